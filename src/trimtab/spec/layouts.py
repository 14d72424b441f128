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
    rotary: bool = True
    """Whether queries and keys are turned by their positions; else positions are learned or in the scores."""
    flash: bool = True
    """Whether attention is one kernel; else scores are stored, as Megatron-LM's fused softmax does it."""
    experts: int = 0
    """Experts in each block; 0: the feed-forward part is dense."""
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that see every token."""
    dense_layers: int = 0
    """First blocks without experts, in a mixture of experts."""
    dense_feed_forward: int = 0
    """Width of the feed-forward part in those blocks."""
    key_value_rank: int = 0
    """Width to which keys and values are compressed, as in DeepSeek; 0: they are not."""
    query_rank: int = 0
    """Width to which queries are compressed; 0: they are not."""
    rope_size: int = 0
    """Part of each head with positions: compressed keys share one such part between all heads."""
    value_size: int = 0
    """Size of the heads of values; 0: `head_size`."""

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
        counts = ("experts", "shared_experts", "dense_layers", "dense_feed_forward")
        ranks = ("key_value_rank", "query_rank", "rope_size", "value_size")
        wrong += check_minimum(0, **{name: getattr(self, name) for name in (*counts, *ranks)})
        if not wrong and self.heads % self.key_value_heads:
            wrong.append(f"heads {self.heads} are no multiple of key_value_heads {self.key_value_heads}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            wrong.append(
                f"experts_per_token is {self.experts_per_token}, and there are {self.experts} experts"
            )
        if self.dense_layers and not (self.experts and self.dense_feed_forward):
            wrong.append(f"dense_layers is {self.dense_layers}; it needs experts and dense_feed_forward")
        if self.rope_size and not self.rope_size < self.head_size:
            wrong.append(f"rope_size {self.rope_size} is not below head_size {self.head_size}")
        return wrong

    @property
    def values(self) -> int:
        """Size of the heads of values."""
        return self.value_size or self.head_size

    @property
    def compressing_weights(self) -> int:
        """Weights that compress queries, keys and values in one block; every tensor-parallel rank has all."""
        if not self.key_value_rank:
            return 0
        return self.width * (self.query_rank + self.key_value_rank + self.rope_size)

    @property
    def expanded_columns(self) -> int:
        """Columns of keys and values when they are expanded from their compressed form."""
        return self.heads * (self.head_size - self.rope_size + self.values)

    @property
    def attention_weights(self) -> int:
        """Weights of the attention of one block, without those that compress."""
        queries, outputs = self.heads * self.head_size, self.heads * self.values
        if self.key_value_rank:
            expanding = (
                self.query_rank or self.width
            ) * queries + self.key_value_rank * self.expanded_columns
            return expanding + self.width * outputs
        return self.width * (queries + outputs + self.key_value_heads * (self.head_size + self.values))

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
        tables = self.table_weights * (1 if self.tied else 2)
        return self._count_blocks(self.experts) + tables

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by, with those of the head."""
        return self._count_blocks(self.experts_per_token) + self.table_weights

    @property
    def dense_weights(self) -> int:
        """Weights of the feed-forward part of a block without experts, in a mixture of experts."""
        return self.width * self.dense_feed_forward * (3 if self.gated else 2)

    def _count_blocks(self, experts: int) -> int:
        """Return the weights of all blocks with so many experts in each that has any."""
        feed = self.expert_weights * (experts + self.shared_experts if self.experts else 1)
        attention = self.layers * (self.attention_weights + self.compressing_weights)
        return attention + (self.layers - self.dense_layers) * feed + self.dense_layers * self.dense_weights


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
