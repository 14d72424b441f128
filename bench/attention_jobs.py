"""Jobs whose speed and memory hang on the attention kernel that torch chooses: one class a case.

    trimtab estimate bench/attention_jobs.py:Windowed --on H200 --micro-batch 64 --precision bf16
    trimtab profile bench/attention_jobs.py:Windowed --micro-batch 64 --precision bf16

The docstring of a class says which kernel runs on an H200 with torch 2.13, and the micro-batch that takes 2
to 20 GiB.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Batch = dict[str, torch.Tensor]


def padding_mask(size: int, length: int) -> torch.Tensor:
    """1 where a sequence has a token: lengths from a half to all of it."""
    lengths = torch.randint(length // 2, length + 1, (size, 1))
    return (torch.arange(length)[None] < lengths).long()


# -------------------------------------------------------------------- bidirectional encoders


class Encoder:
    """BERT with a padding mask: cuDNN, eager and compiled. --micro-batch 32."""

    name, global_batch, samples, epochs = "encoder-masked", 256, 100_000, 1
    vocab, length, layers, heads, width = 30522, 512, 12, 12, 768
    dropout, masked = 0.0, True

    def model(self) -> nn.Module:
        """From its config, without a download."""
        from transformers import BertConfig, BertForMaskedLM

        model: nn.Module = BertForMaskedLM(
            BertConfig(
                vocab_size=self.vocab,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                intermediate_size=4 * self.width,
                max_position_embeddings=self.length,
                attention_probs_dropout_prob=self.dropout,
            )
        )
        return model

    def batch(self, size: int) -> Batch:
        """Tokens, and a mask where the class has one."""
        tokens = torch.randint(0, self.vocab, (size, self.length))
        mask = {"attention_mask": padding_mask(size, self.length)} if self.masked else {}
        return {"input_ids": tokens, "labels": tokens, **mask}

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """Of every token."""
        loss: torch.Tensor = model(**batch).loss
        return loss


class EncoderUnmasked(Encoder):
    """BERT without a mask: cuDNN eager, and not fused compiled (expanded mask). --micro-batch 32, 24."""

    name, masked = "encoder-unmasked", False


class EncoderDropout(Encoder):
    """A dropout of 0.1, which cuDNN takes up to torch 2.11: then memory-efficient. --micro-batch 32."""

    name, dropout = "encoder-dropout-0.1", 0.1


class EncoderDropoutEighth(Encoder):
    """A dropout of 0.125, which cuDNN takes. --micro-batch 32."""

    name, dropout = "encoder-dropout-0.125", 0.125


class ModernEncoder(Encoder):
    """ModernBERT, whose layers see windows and the whole in turn: cuDNN. --micro-batch 16."""

    name, length = "encoder-modern", 1024

    def model(self) -> nn.Module:
        """From its config, without a download."""
        from transformers import ModernBertConfig, ModernBertForMaskedLM

        model: nn.Module = ModernBertForMaskedLM(
            ModernBertConfig(
                vocab_size=self.vocab,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                intermediate_size=1152,
                max_position_embeddings=self.length,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            )
        )
        return model


class RelativeBias:
    """T5, whose bias is learned and permuted: not fused. --micro-batch 16."""

    name, global_batch, samples, epochs = "relative-bias", 128, 100_000, 1
    vocab, source, target, layers = 32128, 512, 128, 12

    def model(self) -> nn.Module:
        """From its config, without a download."""
        from transformers import T5Config, T5ForConditionalGeneration

        model: nn.Module = T5ForConditionalGeneration(
            T5Config(
                vocab_size=self.vocab,
                d_model=768,
                d_kv=64,
                d_ff=3072,
                num_layers=self.layers,
                num_heads=12,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )
        return model

    def batch(self, size: int) -> Batch:
        """Source and target tokens, with a padding mask of the source."""
        return {
            "input_ids": torch.randint(1, self.vocab, (size, self.source)),
            "attention_mask": padding_mask(size, self.source),
            "labels": torch.randint(1, self.vocab, (size, self.target)),
        }

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """Of every target token."""
        loss: torch.Tensor = model(**batch).loss
        return loss


# -------------------------------------------------------------------- windows


class WindowAttention(nn.Module):
    """Attention within windows, with a learned bias for each distance."""

    def __init__(self, width: int, heads: int, side: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.tokens, self.fused = heads, side * side, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]) + side - 1
        self.register_buffer("index", apart[0] * (2 * side - 1) + apart[1])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Of (windows, tokens, width)."""
        windows, tokens, width = x.shape
        qkv = self.qkv(x).reshape(windows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1).contiguous()[None]
        if mask is not None:
            several = mask.view(1, mask.shape[0], 1, tokens, tokens)
            several = several.expand(windows // mask.shape[0], -1, self.heads, -1, -1)
            bias = bias + several.reshape(-1, self.heads, tokens, tokens)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        else:
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + bias
            mixed = scores.softmax(-1) @ value
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(windows, tokens, width))
        return out


class WindowBlock(nn.Module):
    """A block over an image of tokens, cut into windows that are shifted in every second one."""

    def __init__(  # noqa: PLR0913 - a shape
        self, width: int, heads: int, image: int, side: int, shift: int, *, fused: bool
    ) -> None:
        super().__init__()
        self.image, self.side, self.shift = image, side, shift
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, side, fused=fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", self._mask() if shift else None)

    def _mask(self) -> torch.Tensor:
        """Tokens that a shift has brought together from both ends do not see each other."""
        region = torch.zeros(1, self.image, self.image, 1)
        cuts = (slice(0, -self.side), slice(-self.side, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((a, b) for a in cuts for b in cuts):
            region[:, rows, columns] = number
        windows = self._cut(region).view(-1, self.side * self.side)
        return (windows[:, None] != windows[:, :, None]).float() * -100.0

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        size, side, count = x.shape[0], self.side, self.image // self.side
        x = x.view(size, count, side, count, side, -1).permute(0, 1, 3, 2, 4, 5).contiguous()
        return x.view(size * count * count, side * side, -1)

    def _join(self, x: torch.Tensor, size: int) -> torch.Tensor:
        side, count = self.side, self.image // self.side
        x = x.view(size, count, count, side, side, -1).permute(0, 1, 3, 2, 4, 5).contiguous()
        return x.view(size, self.image, self.image, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, height, width, channels)."""
        y = self.first(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self._join(self.attention(self._cut(y), self.mask), x.shape[0])
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return out


class Windowed:
    """Windows of 7 x 7 with a learned bias as the mask: memory-efficient. --micro-batch 64."""

    name, global_batch, samples, epochs = "windowed", 256, 100_000, 1
    image, width, heads, side, layers, fused = 224, 96, 3, 7, (2, 2, 6, 2), True
    classes = 1000

    def model(self) -> nn.Module:
        """Four stages: half as many tokens a side, twice the width, at each."""
        parts: list[nn.Module] = [nn.Conv2d(3, self.width, 4, 4), _ChannelsLast()]
        image, width, heads = self.image // 4, self.width, self.heads
        for stage, depth in enumerate(self.layers):
            if stage:
                parts += [_Halve(width)]
                image, width, heads = image // 2, 2 * width, 2 * heads
            shifts = [self.side // 2 if number % 2 and image > self.side else 0 for number in range(depth)]
            parts += [
                WindowBlock(width, heads, image, self.side, shift, fused=self.fused) for shift in shifts
            ]
        return nn.Sequential(*parts, nn.LayerNorm(width), _Mean(), nn.Linear(width, self.classes))

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels."""
        return torch.randn(size, 3, self.image, self.image), torch.randint(0, self.classes, (size,))

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross entropy."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)


class WindowedSpeltOut(Windowed):
    """The same with matrix products and a softmax instead of torch's function. --micro-batch 64."""

    name, fused = "windowed-spelt-out", False


class WindowedHF(Windowed):
    """Swin of transformers, with the bias as the mask: memory-efficient. --micro-batch 64."""

    name = "windowed-hf"

    def model(self) -> nn.Module:
        """From its config, without a download."""
        from transformers import SwinConfig, SwinForImageClassification

        model: nn.Module = SwinForImageClassification(SwinConfig(num_labels=self.classes))
        return model

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Cross entropy."""
        images, labels = batch
        return functional.cross_entropy(model(pixel_values=images).logits, labels)


class _ChannelsLast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2))


class _Halve(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        out: torch.Tensor = self.reduce(self.norm(torch.cat(corners, -1)))
        return out


# -------------------------------------------------------------------- decoders: head sizes, groups, dtypes


class DecoderBlock(nn.Module):
    """Causal attention with grouped heads, and an MLP."""

    def __init__(self, job: Decoder) -> None:
        super().__init__()
        self.job, width = job, job.heads * job.head
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * job.groups * job.head)
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Of (batch, tokens, width)."""
        job = self.job
        size, tokens, width = x.shape
        y = self.first(x)
        query = self.query(y).view(size, tokens, job.heads, job.head).transpose(1, 2)
        key, value = self.keys(y).view(size, tokens, 2, job.groups, job.head).permute(2, 0, 3, 1, 4)
        with contextlib.nullcontext() if job.kernel is None else sdpa_kernel(job.kernel):
            mixed = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=job.dropout,
                is_causal=mask is None,
                enable_gqa=job.groups != job.heads,
            )
        x = x + self.out(mixed.transpose(1, 2).reshape(size, tokens, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return out


class DecoderModel(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, job: Decoder) -> None:
        super().__init__()
        width = job.heads * job.head
        self.masked = job.masked
        self.embed, self.places = nn.Embedding(job.vocab, width), nn.Embedding(job.length, width)
        self.blocks = nn.ModuleList(DecoderBlock(job) for _ in range(job.layers))
        self.head = nn.Linear(width, job.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        x = self.embed(tokens) + self.places(places)
        mask = (places[:, None] >= places)[None, None].expand(len(tokens), 1, -1, -1) if self.masked else None
        for block in self.blocks:
            x = block(x, mask)
        out: torch.Tensor = self.head(x)
        return out


class Decoder:
    """Heads of 64, causal: cuDNN in bf16; memory-efficient in fp32. --micro-batch 16, 8."""

    name, global_batch, samples, epochs = "decoder-head-64", 256, 100_000, 1
    vocab, length, layers, heads, groups, head = 32000, 1024, 8, 16, 16, 64
    dropout, masked = 0.0, False
    kernel: SDPBackend | None = None
    """The only kernel that torch may choose; None: any."""

    def model(self) -> nn.Module:
        """With positions of its own."""
        return DecoderModel(self)

    def batch(self, size: int) -> torch.Tensor:
        """Tokens."""
        return torch.randint(0, self.vocab, (size, self.length))

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Of the next token."""
        logits = model(batch)[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, self.vocab), batch[:, 1:].reshape(-1))


class MaskedEfficient(Decoder):
    """A mask for the memory-efficient kernel, the only one for it before Hopper. --micro-batch 4, 1."""

    name, masked, kernel = "decoder-masked-efficient", True, SDPBackend.EFFICIENT_ATTENTION
    length, layers, heads, groups, head = 2048, 2, 32, 32, 128


class Head80(Decoder):
    """Heads of 80: cuDNN. --micro-batch 16."""

    name, head = "decoder-head-80", 80


class Head96(Decoder):
    """Heads of 96: cuDNN. --micro-batch 16."""

    name, head = "decoder-head-96", 96


class Head160(Decoder):
    """Heads of 160: cuDNN up to torch 2.13 on Hopper, then flash. --micro-batch 8."""

    name, heads, groups, head = "decoder-head-160", 8, 8, 160


class Head100(Decoder):
    """Heads of 100, which only flash takes, padded to 104. --micro-batch 16."""

    name, heads, groups, head = "decoder-head-100", 10, 10, 100


class Grouped(Decoder):
    """16 heads that share 4 keys: cuDNN. --micro-batch 16."""

    name, groups = "decoder-grouped", 4


class GroupedMasked(Decoder):
    """The same with a mask: cuDNN; on an A100 not fused. --micro-batch 16."""

    name, groups, masked = "decoder-grouped-masked", 4, True


class Masked(Decoder):
    """A causal mask instead of is_causal: cuDNN; in fp32 memory-efficient. --micro-batch 16, 8."""

    name, masked = "decoder-masked", True
