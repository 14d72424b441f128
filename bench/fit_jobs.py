"""Jobs that are measured with the ways to make a training fit (`gpu_queue.py`)."""

from __future__ import annotations

from typing import Any

import torch

import trimtab
from trimtab.jobs.lora import add_adapters


class Decoder(trimtab.Job):
    """A Llama, trained whole or by adapters on its frozen layers."""

    name = "fit-decoder"
    global_batch = 64
    samples, epochs, additive = 10_000, 1, True
    width, ff, heads, kv_heads, layers, vocabulary, seq = 2048, 8192, 32, 8, 16, 128_256, 1024
    lora = 0
    """Rank of the adapters; 0: all weights are trained."""
    tied = True

    def model(self) -> torch.nn.Module:
        """Return the model with random weights; frozen weights in bf16."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.ff,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=131_072,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )
        if not self.lora:
            return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        from transformers import AutoModelForCausalLM

        build: Any = AutoModelForCausalLM.from_config
        model = build(config, dtype=torch.bfloat16)
        add_adapters(model, self.lora, alpha=2 * self.lora, exclude=[model.get_output_embeddings()])
        return model  # type: ignore[no-any-return]

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return random tokens."""
        ids = torch.randint(0, self.vocabulary, (size, self.seq))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the model's own loss."""
        loss: torch.Tensor = model(**batch).loss
        return loss
