"""Check degrees of parallelism against a model and a cluster, from sizes alone: nothing is traced.

A degree is the number of ranks along one axis of the mesh: tp, cp, pp, ep, dp_replicate, dp_shard. An error
cannot run. A warning runs, and is slower or uses more memory than another degree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from trimtab.spec import Noun, Reason
from trimtab.spec.finding import Severity
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trimtab.jobs.model_sizes import ModelSizes
    from trimtab.spec import Cluster

DEGREES = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "ep": "expert parallelism",
    "dp_replicate": "replicas",
    "dp_shard": "shards",
    "virtual_stages": "virtual stages of a pipeline rank",
}
"""Degrees by name, each with what it counts."""
MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Degrees whose product is the number of GPUs. Experts share the ranks of dp_shard, cp and tp."""
TILE = 128
"""Columns of a tile of a matrix product: cuBLAS and CUTLASS compute 128 x 128 and larger tiles, so that
narrower products leave units idle."""
H100_FLOPS = 989e12
"""Dense bf16, NVIDIA H100 SXM5 datasheet."""
NVLINK4_BYTES_PER_S = 450e9
"""One way per GPU, NVIDIA H100 SXM5 datasheet."""


class DegreeFinding(Noun, frozen=True, kw_only=True):
    """A degree that cannot run, or that another value would beat."""

    severity: Severity
    rule: str
    """Name of the check, such as kv-heads."""
    given: str
    """The degree with its value, as the user wrote it: tp=8."""
    found: str
    cure: str

    def sentence(self) -> str:
        """Return the three parts as one line.

        >>> finding = DegreeFinding(severity="error", rule="heads", given="tp=3", found="x", cure="Use 4.")
        >>> finding.sentence()
        'tp=3: x. Use 4.'
        """
        return f"{self.given}: {self.found}. {self.cure}"


@dataclass(frozen=True, kw_only=True)
class FrameworkRules:
    """What the code that trains requires of degrees."""

    uses_all_gpus: bool = True
    """Whether the degrees have to make the number of GPUs; trimtab's plans may take fewer."""
    even_batches: bool = True
    """Whether every rank has to get equally many samples."""
    even_stages: bool = False
    """Whether every pipeline stage has to have equally many layers."""
    copies_kv_heads: bool = False
    """Whether heads of keys and values are copied where tp is a multiple of them."""
    sequence_parallel: bool = True
    """Whether tensor parallelism splits the sequence between the split layers."""
    all_to_all: bool = False
    """Whether context parallelism exchanges heads for tokens (Ulysses) instead of passing blocks around."""
    ignores_experts: bool = True
    """Whether ep changes nothing where a model has no experts; trimtab refuses it."""


TRIMTAB_RULES = FrameworkRules(uses_all_gpus=False, even_batches=False, ignores_experts=False)
"""What trimtab's own plans require."""


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """What degrees depend on of a cluster; None where nobody knows."""

    gpus: int | None = None
    gpus_per_node: int | None = None
    joined: int | None = None
    """GPUs of a node that NVLink or Infinity Fabric joins; 1: none."""
    device: str = ""
    flops: float | None = None
    """Dense bf16 operations per second of a GPU."""
    within: float | None = None
    """One-way bytes per second of a GPU within its node."""
    between: float | None = None
    """The same between nodes."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of parallelism with the batch; None where it follows from the number of GPUs."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    dp_replicate: int | None = None
    dp_shard: int | None = None
    virtual_stages: int = 1
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """How the user spells a degree, if not by its name here: tensor_parallel_degree."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model between them, without shards."""
        return self.tp * self.cp * self.pp

    def spell(self, *names: str) -> str:
        """Return degrees with their values, as the user wrote them.

        >>> Degrees(tp=8, pp=4).spell("tp", "pp")
        'tp=8 x pp=4'
        """
        return " x ".join(f"{self.names.get(name, name)}={getattr(self, name)}" for name in names)

    def data_parallel(self, gpus: int | None) -> int | None:
        """Return the ranks that split the global batch; None if it is not known."""
        if self.dp_replicate is not None and self.dp_shard is not None:
            return self.dp_replicate * self.dp_shard
        if gpus is None or gpus % self.model_ranks:
            return None
        return gpus // self.model_ranks

    def micro_batches(self, gpus: int | None) -> int | None:
        """Return the micro-batches of a rank in one step; None if it is not known."""
        if self.accumulation is not None:
            return self.accumulation
        ranks = self.data_parallel(gpus)
        if ranks is None or self.global_batch is None:
            return None
        return max(1, self.global_batch // (ranks * (self.micro_batch or 1)))


def describe_cluster(cluster: Cluster, gpus: int | None = None) -> ClusterShape:
    """Return what degrees depend on of a cluster; `gpus`: so many of its devices are used."""
    if not cluster.devices:
        return ClusterShape(gpus=gpus)
    sizes = [len(node.devices) for node in cluster.nodes if node.devices]
    device = cluster.devices[0]
    fast = [
        link for link in cluster.links if link.node is not None and not link.kind.lower().startswith("pci")
    ]
    rates = [link.total_bytes_per_s or link.bandwidth_bytes_per_s for link in fast]
    network = [link.bandwidth_bytes_per_s for link in cluster.links if link.node is None]
    return ClusterShape(
        gpus=gpus or len(cluster.devices),
        gpus_per_node=min(sizes),
        joined=max((len(link.devices) for link in fast), default=1) if cluster.links else None,
        device=device.model or device.name,
        flops=device.peaks.bf16,
        within=min((rate for rate in rates if rate), default=None),
        between=min((rate for rate in network if rate), default=None),
    )


def lint_degrees(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape, rules: FrameworkRules = TRIMTAB_RULES
) -> list[DegreeFinding]:
    """Return what is illegal or unwise about degrees, the errors first."""
    wrong = list(_check_minimum(degrees))
    if not wrong:
        for check in (_check_mesh, _check_tensor, _check_sequence, _check_context, _check_stages):
            wrong += check(degrees, sizes, shape, rules)
        wrong += _check_experts(degrees, sizes, shape, rules)
    return sorted(wrong, key=lambda finding: finding.severity is not Severity.ERROR)


def _error(rule: str, given: str, found: str, cure: str) -> DegreeFinding:
    return DegreeFinding(severity=Severity.ERROR, rule=rule, given=given, found=found, cure=cure)


def _warning(rule: str, given: str, found: str, cure: str) -> DegreeFinding:
    return DegreeFinding(severity=Severity.WARNING, rule=rule, given=given, found=found, cure=cure)


def list_divisors(*numbers: int) -> list[int]:
    """Return the common divisors of numbers, in order.

    >>> list_divisors(32, 8)
    [1, 2, 4, 8]
    """
    common = gcd(*numbers)
    low = [number for number in range(1, int(common**0.5) + 1) if common % number == 0]
    return sorted({*low, *(common // number for number in low)})


def suggest_nearest(value: int, legal: Iterable[int]) -> str:
    """Return the legal values next to one, in words.

    >>> suggest_nearest(6, [1, 2, 4, 8, 16]), suggest_nearest(16, [1, 2, 4, 8]), suggest_nearest(3, [])
    ('Use 4 or 8.', 'Use 8.', 'Leave it out.')
    """
    legal = sorted({number for number in legal if number != value})
    near = [number for number in legal if number < value][-1:] + [
        number for number in legal if number > value
    ][:1]
    return f"Use {' or '.join(map(str, near))}." if near else "Leave it out."


def _check_minimum(degrees: Degrees) -> Iterator[DegreeFinding]:
    for name in DEGREES:
        value = getattr(degrees, name)
        if value is not None and value < 1:
            yield _error(
                "minimum", degrees.spell(name), "a degree is a whole number from 1 up", "Use 1 or more."
            )


def _check_mesh(
    degrees: Degrees, _: ModelSizes, shape: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check the product of the degrees, and the share of a rank in the global batch."""
    gpus = shape.gpus
    used = [name for name in MESH_AXES if (getattr(degrees, name) or 1) > 1]
    ranks = prod(getattr(degrees, name) for name in used)
    spelt = degrees.spell(*used)
    makes = f"they make {plural(ranks, 'rank')}" if len(used) > 1 else f"it makes {plural(ranks, 'rank')}"
    is_open = degrees.dp_replicate is None or degrees.dp_shard is None
    if gpus is not None and used and ranks > gpus:
        given = f"{makes}, and there {'is' if gpus == 1 else 'are'} {plural(gpus, 'GPU')}"
        yield _error("product", spelt, given, _suggest_product(degrees, used, gpus))
    elif gpus is not None and used and rules.uses_all_gpus:
        if (gpus % ranks) if is_open else (gpus != ranks):
            of = "which do not divide" if is_open else "and there are"
            cure = _suggest_product(degrees, used, gpus)
            yield _error("product", spelt, f"{makes}, {of} {plural(gpus, 'GPU')}", cure)
    elif gpus is not None and used and gpus % ranks:
        yield _warning(
            "product",
            spelt,
            f"{makes}: of {plural(gpus, 'GPU')}, {gpus % ranks} cannot be used",
            _suggest_product(degrees, used, gpus),
        )
    parallel, batch = degrees.data_parallel(gpus), degrees.global_batch
    if parallel is None or batch is None:
        return
    if batch < parallel:
        yield _error(
            "batch",
            f"global batch {batch}",
            f"{plural(parallel, 'data-parallel rank')} split it, and each needs a sample",
            f"Use {parallel} or more, or larger tp, cp or pp.",
        )
    elif rules.even_batches and batch % (share := parallel * (degrees.micro_batch or 1)):
        micro = f" x micro-batch {degrees.micro_batch}" if (degrees.micro_batch or 1) > 1 else ""
        yield _error(
            "batch",
            f"global batch {batch}",
            f"{plural(parallel, 'data-parallel rank')}{micro} do not divide it",
            suggest_nearest(batch, [batch // share * share or share, -(-batch // share) * share]),
        )


def _suggest_product(degrees: Degrees, used: list[str], gpus: int) -> str:
    """Return a degree that makes the product right, the ranks of data parallelism first."""
    for name in ("dp_shard", "dp_replicate", *reversed(used)):
        value = getattr(degrees, name)
        others = prod(getattr(degrees, other) for other in used if other != name)
        if value is None or gpus % others or gpus // others == value:
            continue
        if name in {"dp_shard", "dp_replicate"} and name in used:
            return f"Use {degrees.names.get(name, name)}={gpus // others}."
        near = suggest_nearest(value, list_divisors(gpus // others))
        return near.replace("Use ", f"Use {degrees.names.get(name, name)}=")
    return "Use degrees whose product divides the number of GPUs."


def _check_tensor(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check heads and widths of the model, and where the ranks of a group are."""
    tp, given = degrees.tp, degrees.spell("tp")
    if tp == 1:
        return
    kv = sizes.kv_heads
    copied = rules.copies_kv_heads and kv is not None and tp % kv == 0
    counts = {
        "attention heads": sizes.heads,
        "KV heads": None if copied else kv,
        "columns of hidden width": sizes.hidden,
        "columns of feed-forward width": sizes.intermediate,
    }
    known = {what: count for what, count in counts.items() if count}
    uneven = [f"{count:,} {what}" for what, count in known.items() if count % tp]
    if uneven:
        legal = list_divisors(*known.values())
        listed = " or ".join((", ".join(uneven[:-1]), uneven[-1])[len(uneven) == 1 :])
        found = f"{tp} ranks cannot share {listed} evenly"
        yield _error("widths", given, found, suggest_nearest(tp, legal))
    if copied and kv and tp > kv:
        yield _warning(
            "kv-heads",
            given,
            f"the model has {plural(kv, 'KV head')}: each is copied to {tp // kv} ranks",
            f"Use {kv} or less to save their memory.",
        )
    if sizes.vocab and sizes.vocab % tp:
        padded = -(-sizes.vocab // tp) * tp
        yield _warning(
            "vocabulary",
            given,
            f"a vocabulary of {sizes.vocab:,} does not divide by {tp}: a rank gets fewer columns, or padding",
            f"Pad the vocabulary to {padded:,}.",
        )
    yield from _check_tensor_speed(degrees, sizes, shape)


def _check_tensor_speed(degrees: Degrees, sizes: ModelSizes, shape: ClusterShape) -> Iterator[DegreeFinding]:
    tp, given, node = degrees.tp, degrees.spell("tp"), shape.gpus_per_node
    if node and (tp > node or node % tp):
        where = f"a node has {plural(node, 'GPU')}: every layer waits for the network between nodes"
        cure = f"{suggest_nearest(tp, [size for size in list_divisors(node) if size < tp])[:-1]}, and pp"
        yield _warning("tp-across-nodes", given, where, f"{cure} across nodes.")
        return
    if shape.joined is not None and tp > shape.joined:
        joined = "no" if shape.joined == 1 else f"only {shape.joined}"
        yield _warning(
            "nvlink",
            given,
            f"{joined} GPUs of a node are joined by NVLink: every layer waits for the PCIe bus",
            f"Use {shape.joined}." if shape.joined > 1 else "Use pp or dp_shard instead.",
        )
        return
    width = (sizes.expert_intermediate if sizes.experts else None) or sizes.intermediate
    if width and width % tp == 0 and width // tp < TILE:
        yield _warning(
            "narrow",
            given,
            f"a rank gets {width // tp} columns of a feed-forward layer; products come in tiles of {TILE}",
            suggest_nearest(tp, [size for size in list_divisors(width) if width // size >= TILE]),
        )
    weights, flops, rate = sizes.layer_weights, shape.flops, shape.within
    if weights and flops and rate and sizes.hidden:
        ratio = compare_tensor_traffic(tp, sizes.hidden, weights, flops / rate)
        if ratio > 1:
            best = max(
                size
                for size in list_divisors(tp)
                if size == 1 or compare_tensor_traffic(size, sizes.hidden, weights, flops / rate) <= 1
            )
            yield _warning(
                "traffic",
                given,
                f"at the peaks of {shape.device}, a layer's all-reduces take {ratio:.1f} times as long as "
                "its products",
                f"Use {best}, if memory allows.",
            )


def compare_tensor_traffic(tp: int, hidden: int, layer_weights: int, flops_per_byte: float) -> float:
    """Return the time of a layer's all-reduces over that of its products, both at peak rates.

    A token takes 2 * layer_weights / tp operations in the forward pass, and two all-reduces of `hidden`
    values of 2 bytes, each of which moves 2 * (tp - 1) / tp times that. The backward pass doubles both. Llama
    3.1 8B on H100 with NVLink 4 (989e12 / 450e9 operations per byte):

    >>> round(compare_tensor_traffic(8, 4096, 218_103_808, 989e12 / 450e9), 2)
    1.16
    """
    return 4 * hidden * (tp - 1) * flops_per_byte / layer_weights


def _check_sequence(
    degrees: Degrees, sizes: ModelSizes, _: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check that the sequence divides by what tp and cp split it into."""
    seq, tp, cp = sizes.seq, degrees.tp, degrees.cp
    if seq is None:
        return
    pieces = cp if rules.all_to_all or cp == 1 else 2 * cp
    if seq % pieces:
        why = f"{pieces} pieces" if rules.all_to_all else f"2 x {cp} pieces, two for each rank"
        yield _error(
            "sequence",
            degrees.spell("cp"),
            f"a sequence of {seq:,} tokens does not divide into {why}",
            _suggest_sequence(seq, pieces, cp, half=not rules.all_to_all),
        )
    elif tp > 1 and rules.sequence_parallel and seq % (pieces * tp) and not (sizes.heads or tp) % tp:
        split = degrees.spell("tp", "cp") if cp > 1 else degrees.spell("tp")
        yield _error(
            "sequence",
            split,
            f"a sequence of {seq:,} tokens does not divide into {pieces * tp} pieces (sequence parallelism)",
            f"Use sequences of {-(-seq // (pieces * tp)) * pieces * tp:,} tokens, or a smaller tp.",
        )


def _suggest_sequence(seq: int, pieces: int, cp: int, *, half: bool) -> str:
    legal = list_divisors(seq // 2 if half else seq) if seq % 2 == 0 or not half else [1]
    near = suggest_nearest(cp, [number for number in legal if number < cp])
    longer = f"sequences of {-(-seq // pieces) * pieces:,} tokens"
    return f"{near[:-1]}, or {longer}."


def _check_context(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check heads for all-to-all, and whether pieces are long enough to hide the ring's exchange."""
    tp, cp, given, heads = degrees.tp, degrees.cp, degrees.spell("cp"), sizes.heads
    if cp == 1:
        return
    if rules.all_to_all:
        if heads and heads % tp == 0 and (heads // tp) % cp:
            found = f"a rank has {heads // tp} attention heads, which all-to-all cannot give to {cp} ranks"
            yield _error("cp-heads", given, found, suggest_nearest(cp, list_divisors(heads // tp)))
        return
    if not sizes.seq:
        return
    crosses = shape.gpus_per_node is not None and tp * cp > shape.gpus_per_node
    rate = shape.between if crosses else shape.within
    flops, device = (shape.flops, shape.device) if shape.flops and rate else (H100_FLOPS, "H100 with NVLink")
    least = find_least_piece(sizes.kv_share, flops / (rate if rate and shape.flops else NVLINK4_BYTES_PER_S))
    if sizes.seq // cp < least:
        legal = [
            size for size in list_divisors(cp) if size < cp and (size == 1 or sizes.seq // size >= least)
        ]
        over = " over the network" if crosses and rate else ""
        yield _warning(
            "short-sequence",
            given,
            f"a rank gets {sizes.seq // cp:,} tokens; on {device} the ring's exchange{over} hides behind "
            f"attention from {least:,} tokens up",
            f"Use {max(legal)}.",
        )


def find_least_piece(kv_share: float, flops_per_byte: float) -> int:
    """Return the tokens of a rank from which ring attention hides its exchange.

    A rank with s tokens computes 2 * s^2 * hidden operations for a block of keys and values (half of them
    are masked), and receives 4 * s * kv_share * hidden bytes for the next. Llama 3.1 8B on H100:

    >>> find_least_piece(8 / 32, 989e12 / 450e9)
    1099
    """
    return round(2 * kv_share * flops_per_byte)


def split_layers(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, as even as possible.

    >>> split_layers(126, 4)
    [32, 32, 31, 31]
    """
    each, over = divmod(layers, stages)
    return [each + (stage < over) for stage in range(stages)]


def _check_stages(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check layers against stages, and micro-batches against the bubble."""
    pp, chunks, layers = degrees.pp, degrees.virtual_stages, sizes.layers
    given = degrees.spell("pp", "virtual_stages") if chunks > 1 else degrees.spell("pp")
    if pp == 1:
        if chunks > 1:
            yield _warning(
                "virtual-stages",
                degrees.spell("virtual_stages"),
                "there is one pipeline stage, so that nothing is interleaved",
                f"Use {degrees.names.get('pp', 'pp')}=2 or more, or leave it out.",
            )
        return
    stages = pp * chunks
    if layers is not None and layers < stages:
        found = f"the model has {plural(layers, 'layer')} for {plural(stages, 'stage')}"
        most = shape.gpus // (degrees.tp * degrees.cp) if shape.gpus else layers
        legal = [count for count in list_divisors(layers) if count <= most]
        yield _error("layers", given, found, suggest_nearest(pp, legal))
    elif layers is not None and layers % stages:
        split = split_layers(layers, stages)
        many, few = split.count(split[0]), split.count(split[-1])
        legal = [count for count in list_divisors(layers) if layers % (count * chunks) == 0]
        report = _error if rules.even_stages else _warning
        found = f"{layers} layers do not divide by {plural(stages, 'stage')}"
        found += f": {many} get {split[0]} and {few} get {split[-1]}"
        yield report("layers", given, found, suggest_nearest(pp, legal))
    yield from _check_bubble(degrees, shape, rules)


def _check_bubble(degrees: Degrees, shape: ClusterShape, rules: FrameworkRules) -> Iterator[DegreeFinding]:
    pp, chunks = degrees.pp, degrees.virtual_stages
    rounds = degrees.micro_batches(shape.gpus)
    if rounds is None:
        return
    given = degrees.spell("pp")
    if rounds < pp:
        share = (pp - 1) / (rounds * chunks + pp - 1)
        yield _warning(
            "bubble",
            given,
            f"{rounds} micro-batch{'es' * (rounds > 1)} a step for {pp} stages: ranks idle for {share:.0%}",
            f"Use {pp * 4} micro-batches or more: smaller ones, a larger global batch, or a smaller pp.",
        )
    elif chunks > 1 and rules.even_stages and rounds % pp:
        yield _error(
            "bubble",
            degrees.spell("pp", "virtual_stages"),
            f"interleaving needs micro-batches in multiples of {pp}, and a step has {rounds}",
            f"Use {-(-rounds // pp) * pp} micro-batches.",
        )


def _check_experts(
    degrees: Degrees, sizes: ModelSizes, shape: ClusterShape, rules: FrameworkRules
) -> Iterator[DegreeFinding]:
    """Check experts against ep, and ep against the ranks that share them."""
    ep, given, experts = degrees.ep, degrees.spell("ep"), sizes.experts
    if ep == 1:
        return
    if experts == 0:
        say = _warning if rules.ignores_experts else _error
        yield say("experts", given, "the model has no experts, so that it changes nothing", "Leave it out.")
        return
    if experts is not None and experts % ep:
        found = f"the model has {experts} experts a layer, which {ep} ranks cannot share evenly"
        yield _error("experts", given, found, suggest_nearest(ep, list_divisors(experts)))
    parallel = degrees.data_parallel(shape.gpus)
    if parallel is None and degrees.dp_shard is None:
        return
    shards = degrees.dp_shard or (parallel or 1) // (degrees.dp_replicate or 1)
    ranks, axes = shards * degrees.cp * degrees.tp, "dp_shard x cp x tp"
    if ranks % ep:
        yield _error(
            "ep-ranks",
            given,
            f"experts share the {ranks} ranks of {axes}, which {ep} does not divide",
            suggest_nearest(ep, list_divisors(ranks, experts) if experts else list_divisors(ranks)),
        )
    elif shape.gpus_per_node and ep > shape.gpus_per_node:
        node = shape.gpus_per_node
        yield _warning(
            "ep-across-nodes",
            given,
            f"a node has {plural(node, 'GPU')}: tokens cross the network to their experts in every layer",
            suggest_nearest(ep, [size for size in list_divisors(ranks, experts or ranks) if size <= node]),
        )


def read_degrees(pins: Mapping[str, Any], *, global_batch: int | None = None) -> Degrees:
    """Return the degrees among pins.

    >>> read_degrees({"tp": 8, "strategy": "fsdp", "micro_batch": 2}).spell("tp", "micro_batch")
    'tp=8 x micro_batch=2'
    """
    stated: dict[str, Any] = {
        name: int(pins[name]) for name in (*DEGREES, "micro_batch", "accumulation") if name in pins
    }
    return replace(Degrees(global_batch=global_batch), **stated)


def explain_degrees(findings: Iterable[DegreeFinding]) -> list[Reason]:
    """Return findings as reasons of a plan."""
    reasons = []
    for finding in findings:
        subject, _, value = finding.given.partition("=")
        why = f"{finding.severity}: {finding.found}. {finding.cure}"
        reasons.append(Reason(subject=subject, value=value or finding.given, why=why))
    return reasons
