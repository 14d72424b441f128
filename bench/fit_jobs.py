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


class LigerDecoder(Decoder):
    """A Llama with all of Liger's kernels, its loss among them."""

    name = "fit-liger"

    def model(self) -> torch.nn.Module:
        """Return the model, after Liger has replaced the parts of all Llamas."""
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

        apply_liger_kernel_to_llama()
        return super().model()


class Wide(trimtab.Job):
    """Blocks of two linear layers on vectors, with biases."""

    name = "fit-wide"
    global_batch = 65536
    samples, epochs, additive = 1_000_000, 1, True
    width, ff, layers = 4096, 16384, 6

    def model(self) -> torch.nn.Module:
        """Return the blocks and a head of 10 classes."""
        blocks = torch.nn.Sequential(*(_Block(self.width, self.ff) for _ in range(self.layers)))
        return torch.nn.Sequential(blocks, torch.nn.Linear(self.width, 10))

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random vectors and classes."""
        return torch.randn(size, self.width), torch.randint(0, 10, (size,))

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy."""
        given, wanted = batch
        return torch.nn.functional.cross_entropy(model(given).float(), wanted)


class _Block(torch.nn.Module):
    """Norm, wide layer, narrow layer."""

    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, ff)
        self.down = torch.nn.Linear(ff, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum with the input."""
        out: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + out
