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
