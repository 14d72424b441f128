"""Fine-tuning jobs that others measured: decoders as litgpt, torchtune and transformers build them.

The sizes are options of the job, so that the cache key of a trace has them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.jobs.job import Job
from trimtab.jobs.lora import LoRALayer, is_linear

QKV = ("q", "k", "v")


class WideRMSNorm(nn.Module):
    """Scale by the root mean square, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (normed * self.weight.float()).to(x.dtype)


class _KeepInput(torch.autograd.Function):
    """Keep the input of a layer until its backward pass, and as much again for each earlier step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copies: int) -> torch.Tensor:
        """Return the input."""
        ctx.save_for_backward(x, *(torch.empty_like(x) for _ in range(copies - 1)))
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient as it is."""
        return above[0], None


class _FusedLoss(torch.autograd.Function):
    """Cross-entropy as compiled code computes it: it keeps the logits, and no float32 copy of them."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return a number for each token; its value does not matter for a trace."""
        ctx.save_for_backward(logits)
        return logits.amax(-1).float()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> torch.Tensor:
        """Return a gradient as large as the logits."""
        (logits,) = ctx.saved_tensors
        return logits * above[0].to(logits.dtype).unsqueeze(-1)


class _Part(nn.Module):
    """A part of a block that calls linear layers."""

    def __init__(self, job: FineTuning) -> None:
        super().__init__()
        self.kept_inputs, self.narrows = job.kept_inputs, job.wide_stream and not job.wide_products

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer returns."""
        given = x.bfloat16() if self.narrows else x
        if self.kept_inputs and given.requires_grad:
            given = _KeepInput.apply(given, self.kept_inputs)
        return layer(given).to(x.dtype)


class JointAdapter(nn.Module):
    """A frozen projection to queries, keys and values at once, with adapters for some of the three.

    Adapters give narrower outputs than the projection, so they are copied into zeros of its width.
    """

    def __init__(self, inner: nn.Module, sizes: dict[str, int], rank: int, dropout: float) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank * len(sizes), bias=False)
        self.ups = nn.ModuleDict({name: nn.Linear(rank, size, bias=False) for name, size in sizes.items()})
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("index", torch.arange(sum(sizes.values())), persistent=False)

    @property
    def weight(self) -> Any:
        """The frozen weight."""
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        parts = self.down(self.dropout(x)).chunk(len(self.ups), -1)
        products = [up(part) for up, part in zip(self.ups.values(), parts, strict=True)]
        adapted = torch.cat(products, -1) * 2.0
        if adapted.shape[-1] < out.shape[-1]:
            # The backward pass of this copy needs the shape of what is copied, so autograd keeps it.
            adapted = torch.zeros_like(out).index_copy(-1, self.index, adapted)
        return out + adapted


@torch.compiler.disable
def attend_eagerly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend outside of the compiled graphs, as torchtune does for packed samples."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attend with the only fused kernel of torch 2.5 that takes masks; it computes both halves of scores."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, mask.to(q.dtype))


class RotaryAttention(_Part):
    """Attention with one projection for queries, keys and values, and keys repeated for groups of queries."""

    def __init__(self, job: FineTuning) -> None:
        super().__init__(job)
        self.heads, self.groups, self.size = job.heads, job.key_value_heads or job.heads, job.find_head_size()
        self.turned = int(job.rotary_share * self.size)
        self.cap, self.compiled_blocks = job.cap, job.compiled_blocks
        width, narrow = self.size * self.heads, self.size * self.groups
        bias = job.biased or job.qkv_biased
        if job.joint:
            self.qkv = nn.Linear(job.width, width + 2 * narrow, bias=bias)
        else:
            sizes = {"q": width, "k": narrow, "v": narrow}
            self.parts = nn.ModuleDict(
                {name: nn.Linear(job.width, size, bias=bias) for name, size in sizes.items()}
            )
        self.proj = nn.Linear(width, job.width, bias=job.biased)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        samples, length, _ = x.shape
        wide, narrow = self.heads * self.size, self.groups * self.size
        if hasattr(self, "qkv"):
            q, k, v = self.call(self.qkv, x).split((wide, narrow, narrow), -1)
        else:
            q, k, v = (self.call(self.parts[name], x) for name in QKV)
        q = self._rotate(q.view(samples, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = self._rotate(k.view(samples, length, self.groups, self.size).transpose(1, 2), cos, sin)
        v = v.view(samples, length, self.groups, self.size).transpose(1, 2)
        if self.groups != self.heads:
            k = k.repeat_interleave(self.heads // self.groups, 1)
            v = v.repeat_interleave(self.heads // self.groups, 1)
        if self.cap:
            y = self._attend_capped(q, k, v)
        elif mask is not None:
            y = attend_masked(q, k, v, mask)
        elif self.compiled_blocks:
            y = attend_eagerly(q, k, v)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.call(self.proj, y.transpose(1, 2).reshape(samples, length, wide))

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = x[..., : self.turned]
        half = self.turned // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        roped = (turned * cos + swapped * sin).to(x.dtype)
        return torch.cat((roped, x[..., self.turned :]), -1)

    def _attend_capped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * (1.0 / math.sqrt(self.size))
        scores = torch.tanh(scores / self.cap) * self.cap
        mask = torch.full((q.shape[2], q.shape[2]), -1e9, dtype=q.dtype, device=q.device).triu(1)
        return functional.softmax(scores + mask, -1, dtype=torch.float).to(q.dtype) @ v


class FeedForward(_Part):
    """Two linear layers, or three with a gate."""

    def __init__(self, job: FineTuning) -> None:
        super().__init__(job)
        self.up = nn.Linear(job.width, job.feed_forward, bias=job.biased)
        self.gate = nn.Linear(job.width, job.feed_forward, bias=job.biased) if job.gated else None
        self.down = nn.Linear(job.feed_forward, job.width, bias=job.biased)
        self.activation = job.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.call(self.down, self._activate(self.call(self.up, x)))
        return self.call(self.down, self._activate(self.call(self.gate, x)) * self.call(self.up, x))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) if self.activation == "silu" else functional.gelu(x)


class TunedBlock(nn.Module):
    """Attention and feed-forward layers, one after the other or side by side."""

    def __init__(self, job: FineTuning) -> None:
        super().__init__()
        self.norm = job.make_norm()
        self.attention = RotaryAttention(job)
        self.second = None if job.shared_norm else job.make_norm()
        self.after = nn.ModuleList(job.make_norm() for _ in range(2 * job.post_norms))
        self.mlp = FeedForward(job)
        self.parallel = job.parallel

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = self.norm(x)
        attended = self.attention(normed, cos, sin, mask)
        if self.after:
            attended = self.after[0](attended)
        if self.parallel:
            return self.mlp(normed if self.second is None else self.second(x)) + attended + x
        x = attended + x
        fed = self.mlp(self.second(x))
        return (self.after[1](fed) if self.after else fed) + x


def _keep_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd keeps, as it is."""
    return tensor


class TunedDecoder(nn.Module):
    """A decoder whose loss is computed in chunks of tokens."""

    def __init__(self, job: FineTuning) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.vocabulary, job.width)
        self.blocks = nn.ModuleList(TunedBlock(job) for _ in range(job.layers))
        self.keeps_head, self.logits_stay = job.keeps_head, job.logits_stay
        self.norm = job.make_norm()
        self.head = nn.Linear(job.width, job.vocabulary, bias=job.head_biased)
        if job.tied:
            self.head.weight = self.embedding.weight
        self.masked = job.masked and not job.cap
        self.chunk = job.seq // job.chunks if job.chunks else job.chunk
        self.upcast, self.shifted = job.upcast, job.shifted
        self.final_cap, self.fused_loss = job.final_cap, job.fused_loss
        self.wide_stream = job.wide_stream
        if job.wide_stream:
            for part in (self.embedding, self.norm, self.head):
                part.float()
            for block in self.blocks:
                for norm in (block.norm, block.second, *block.after):
                    if norm is not None:
                        norm.float()
        turned = int(job.rotary_share * job.find_head_size())
        for name in ("cos", "sin"):
            table = torch.ones(1, 1, job.seq, turned, dtype=torch.float32)
            self.register_buffer(name, table, persistent=False)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head if a 4-bit base leaves it as it is."""
        return self.head if self.keeps_head else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos.float(), self.sin.float()
        mask = None
        if self.masked:
            samples, length = tokens.shape
            mask = torch.full((samples, 1, length, length), -1e9, dtype=torch.bfloat16, device=x.device).triu(
                1
            )
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        if self.logits_stay:
            with torch.autograd.graph.saved_tensors_hooks(_keep_saved, _keep_saved):
                return self._find_loss(x, tokens)
        return self._find_loss(x, tokens)

    def _find_loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the last hidden states, chunk by chunk."""
        size = self.chunk or x.shape[1]
        logits = [self._cap(self.head(part)) for part in x.split(size, 1)]
        if self.fused_loss:
            return torch.cat([_FusedLoss.apply(self._arrange(part)) for part in logits]).mean()
        losses = [
            functional.cross_entropy(self._arrange(part), target.flatten(), reduction="none")
            for part, target in zip(logits, tokens.split(size, 1), strict=True)
        ]
        return torch.cat(losses).mean()

    def _arrange(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits as the loss gets them: in float32, or copied when the last token is dropped."""
        logits = logits.float() if self.upcast else logits
        return (logits.clone() if self.shifted else logits).flatten(0, 1)

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tanh(logits / self.final_cap) * self.final_cap if self.final_cap else logits


class FineTuning(Job):
    """Train a decoder, or adapters on it, on sequences of equal length."""

    name = "finetuning"
    additive = True
    global_batch = 64
    samples: int | None = 10_000
    seq = 2048
    layers = 32
    width = 4096
    heads = 32
    key_value_heads = 0
    head_size = 0
    feed_forward = 11008
    vocabulary = 32000
    gated = True
    activation = "silu"
    biased = False
    qkv_biased = False
    head_biased = False
    rms = True
    rotary_share = 1.0
    parallel = False
    shared_norm = False
    post_norms = False
    masked = False
    """Whether attention gets a mask instead of being called causal."""
    cap = 0.0
    """Cap of attention scores, which fused kernels do not have."""
    final_cap = 0.0
    """Cap of logits."""
    lora = 0
    """Rank of the adapters; 0: all weights are trained."""
    targets = "all"
    """Layers with adapters, with commas between them: q, k, v, proj, mlp, head; all: all but the head."""
    dropout = 0.0
    """Of the adapters' inputs."""
    chunk = 0
    """Tokens of each sample whose logits and loss are computed at once; 0: all."""
    chunks = 0
    """Chunks of a sample whose logits and loss are computed one after the other, whatever its length."""
    compiled_blocks = False
    """Whether each block is compiled on its own, and attention is called between its graphs."""
    keeps_head = False
    """Whether the head stays in 16 bits beside a base in 4 bits."""
    upcast = False
    """Whether logits are converted to float32 before the loss."""
    fused_loss = False
    """Whether the loss is compiled."""
    logits_stay = False
    """Whether what the head and the loss keep stays on the device when activations are offloaded."""
    shifted = False
    """Whether logits are copied without their last token."""
    joint = True
    """Whether one layer computes queries, keys and values."""
    tied = False
    half = False
    """Whether the weights are in bfloat16, apart from those that are said to be in float32."""
    wide_adapters = False
    """Whether adapters are in float32, as peft makes them."""
    wide_stream = False
    """Whether embedding, norms and head are in float32; other layers convert their inputs and outputs."""
    wide_products = False
    """Whether 4-bit layers multiply in float32 if their input is, as bitsandbytes did before 0.46 even if
    `bnb_4bit_compute_dtype` was another one."""
    kept_inputs = 0
    """Steps for which inputs of linear layers are kept, as 4-bit layers of bitsandbytes did before 0.43.2."""
    rate = 1e-4
    GROUPS: ClassVar[dict[str, tuple[str, ...]]] = {
        "proj": ("proj",),
        "mlp": ("up", "gate", "down"),
        "head": ("head",),
    }

    def find_head_size(self) -> int:
        """Return the width of a head."""
        return self.head_size or self.width // self.heads

    def make_norm(self) -> nn.Module:
        """Return a norm over the width."""
        return WideRMSNorm(self.width) if self.rms else nn.LayerNorm(self.width)

    def model(self) -> nn.Module:
        """Return the model with random weights."""
        usual = torch.get_default_dtype()
        if self.half:
            torch.set_default_dtype(torch.bfloat16)
        try:
            model = TunedDecoder(self)
            if self.lora:
                self._add_adapters(model)
        finally:
            torch.set_default_dtype(usual)
        if self.compiled_blocks:
            for block in model.blocks:
                # Checkpoints wrap it later, so that a compiled forward pass is computed again.
                block.forward = torch.compile(block.forward)
        return model

    def _add_adapters(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        chosen = set(self.targets.replace("all", "q,k,v,proj,mlp").split(","))
        sizes = {
            "q": self.heads,
            "k": self.key_value_heads or self.heads,
            "v": self.key_value_heads or self.heads,
        }
        sizes = {name: count * self.find_head_size() for name, count in sizes.items() if name in chosen}
        names = {name for group in chosen for name in self.GROUPS.get(group, ())}
        parts = [(parent, *pair) for parent in model.modules() for pair in parent.named_children()]
        for parent, name, child in parts:
            if not is_linear(child):
                continue
            if name == "qkv" and sizes:
                setattr(parent, name, JointAdapter(child, sizes, self.lora, self.dropout))
            elif name in names or name in sizes:
                adapter = LoRALayer(child, self.lora, alpha=16, dropout=self.dropout)
                if self.wide_adapters:
                    adapter.down.float()
                    adapter.up.float()
                if isinstance(parent, nn.ModuleDict):
                    parent[name] = adapter
                else:
                    setattr(parent, name, adapter)

    def batch(self, size: int) -> torch.Tensor:
        """Return tokens of full sequences."""
        return torch.randint(0, self.vocabulary, (size, self.seq))

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of all tokens."""
        return model(batch)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.rate)
