"""Layouts: degrees of parallelism for a decoder, ranked by predicted time."""

from __future__ import annotations

from trimtab.spec.base import Noun, check_minimum


class DecoderShape(Noun, frozen=True, kw_only=True):
    """Sizes of a decoder."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    """Width of the feed-forward part; of each expert in a mixture of experts."""
    vocabulary: int
    gated: bool = True
    """Whether the feed-forward part has a gate, as in Llama; else it has one product up, as in GPT-2."""
    biased: bool = False
    """Whether linear layers have biases."""
    tied: bool = False
    """Whether the head has the weights of the embedding."""
    dropout: bool = False
    flash: bool = True
    """Whether attention is one kernel; else scores are stored, as Megatron-LM's fused softmax does it."""
    experts: int = 0
    """Experts in each block; 0: the feed-forward part is dense."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that see every token."""

    def faults(self) -> list[str]:
        """Check that sizes are positive and that heads divide into groups."""
        wrong = check_minimum(
            1,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            head_size=self.head_size,
            feed_forward=self.feed_forward,
            vocabulary=self.vocabulary,
        )
        wrong += check_minimum(0, experts=self.experts, shared_experts=self.shared_experts)
        if not wrong and self.heads % self.key_value_heads:
            wrong.append(f"heads {self.heads} are no multiple of key_value_heads {self.key_value_heads}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            wrong.append(
                f"experts_per_token is {self.experts_per_token}, and there are {self.experts} experts"
            )
        return wrong

    @property
    def attention_weights(self) -> int:
        """Weights of the attention of one block."""
        rows = self.heads * self.head_size
        return self.width * (2 * rows + 2 * self.key_value_heads * self.head_size)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert; of the whole feed-forward part in a dense block."""
        return self.width * self.feed_forward * (3 if self.gated else 2)

    @property
    def table_weights(self) -> int:
        """Weights of the embedding; the head has as many."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Weights of the model, without norms and biases."""
        feed = self.expert_weights * (self.experts + self.shared_experts if self.experts else 1)
        tables = self.table_weights * (1 if self.tied else 2)
        return self.layers * (self.attention_weights + feed) + tables

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by, with those of the head."""
        experts = self.experts_per_token + self.shared_experts if self.experts else 1
        return self.layers * (self.attention_weights + experts * self.expert_weights) + self.table_weights


class LayoutRow(Noun, frozen=True, kw_only=True):
    """One layout with its predicted time and memory."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    virtual_stages: int
    """Parts of the model on each pipeline stage; more than 1: interleaved 1F1B."""
    micro_batch: int
    accumulation: int
    """Micro-batches of a data-parallel rank in a step."""
    recompute: str
    """none, or full: each block stores only its input."""
    step_s: float
    times: dict[str, float]
    """Seconds of the step by what they are spent on."""
    tokens_per_s_per_gpu: float
    mfu: float | None
    memory_bytes: int
    """Of the fullest rank, with the CUDA context."""
    memory: dict[str, int]
    """Bytes of the fullest rank by what they hold."""
    fullest_stage: int
    """Number of the fullest pipeline stage, from 0."""


class LayoutRanking(Noun, frozen=True, kw_only=True):
    """Layouts of a model on a cluster, the fastest first."""

    job: str
    on: str
    gpus: int
    sequence: int
    global_batch: int
    """Sequences per optimizer step."""
    is_pinned: bool = False
    """Whether some degrees were fixed."""
    trainer: str
    """Whose way of sharding the layouts are for: torchtitan or megatron."""
    parameters: int
    rows: tuple[LayoutRow, ...]
    data_parallel: LayoutRow | None = None
    """The fastest layout of data parallelism alone; None if none fits."""
    examined: int
    """Layouts that were considered."""
    ruled_out: dict[str, int]
    """Number of layouts by the reason for which they were left out."""
    assumptions: tuple[str, ...] = ()
