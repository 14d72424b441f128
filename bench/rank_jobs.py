"""Jobs that are measured as one rank of many (`gpu_queue.py`)."""

from __future__ import annotations

from typing import Any

import torch

import trimtab


class Experts(trimtab.Job):
    """A Mixtral of 8 experts a layer, at its real widths."""

    name = "experts"
    global_batch = 64
    samples, epochs = 1_000, 1
    layers = 8
    seq = 2048
    vocabulary = 32_000

    def model(self) -> torch.nn.Module:
        """Return the model, with random weights."""
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(num_hidden_layers=self.layers, vocab_size=self.vocabulary)
        return MixtralForCausalLM(config)  # type: ignore[no-untyped-call]

    def batch(self, size: int) -> torch.Tensor:
        """Return random tokens."""
        return torch.randint(0, self.vocabulary, (size, self.seq))

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token."""
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss


class SpreadExperts(Experts):
    """The same, in the form that trimtab gives models of a folder: without a cache of keys."""

    name = "spread-experts"
    layers = 4

    def model(self) -> torch.nn.Module:
        """Return the model, with random weights."""
        from trimtab.jobs.pretrained import run_experts_in_autocast

        model: Any = super().model()
        model.config.use_cache = False
        run_experts_in_autocast(model)
        return model  # type: ignore[no-any-return]


class ManyExperts(SpreadExperts):
    """A Qwen3-MoE of 128 experts a layer, at the widths of its 30B model."""

    name = "many-experts"
    vocabulary = 151_936

    def model(self) -> torch.nn.Module:
        """Return the model, with random weights."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from trimtab.jobs.pretrained import run_experts_in_autocast

        config = Qwen3MoeConfig(
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,  # type: ignore[call-arg]
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            use_cache=False,
        )
        model = Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]
        run_experts_in_autocast(model)
        return model
