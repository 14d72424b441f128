"""Predict what other people measured, and score the predictions by source.

The rows are in outside.csv, with the file that each was read from; outside.toml has the sources, their
trainers and their models. A third of each source's rows is not here: it was kept back to check predictions.
Rows of decoders on many GPUs are predicted by the formulas of `trimtab layouts`. Rows of fine-tuning on one
GPU or few are replayed as jobs (`trimtab.exams.replays`); replays.json has what that predicted last.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trimtab.catalog.clusters import parse_cluster, with_network
from trimtab.catalog.facts import facts_of
from trimtab.errors import WrongUse, find_nearest
from trimtab.exams.outside_facts import JobPrediction, OutsideRow, read_facts
from trimtab.predict.calibration import find_speed
from trimtab.predict.communication import find_links
from trimtab.predict.decoder import FLASH, BlockKernels, Float8
from trimtab.predict.layout import DecoderLayout, LayoutEstimator, Sharding
from trimtab.predict.op_time import CUDNN, ampere_share
from trimtab.spec import DecoderShape, Noun
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trimtab.spec import Device

PER_NODE = 8
WORKERS = 2
FLASH_SHARES = {"flash1": 0.345, "flash2": 0.6}
"""Share of the 16-bit peak of an A100 that FlashAttention reaches with long sequences, by its version. Its
authors published 25 to 40 % and 50 to 73 % (arXiv 2307.08691)."""
DTYPES = {"fp16": "float16"}
FLOAT8 = {"fp8": Float8.TENSOR, "fp8-row": Float8.ROW, "fp8-te": Float8.FUSED}
RESERVED = 1.05
"""Reserved memory over allocated memory: the caching allocator leaves gaps."""
MEMORY = ("allocated", "active", "reserved", "process")
"""Kinds of memory that sources state."""
UNSTATED = "memory of a kind that the source does not state"
STEP, FAR_STEP, VERDICT = "step, one node", "step, several nodes", "out of memory"


class OutsideAnswer(Noun, frozen=True, kw_only=True):
    """A row with its measured and predicted figures."""

    source: str
    path: str
    row: str
    """GPUs, model and degrees."""
    measured: dict[str, float]
    """Seconds, GiB by kind of memory, and 1 for out of memory, by figure."""
    predicted: dict[str, float]
    rivals: dict[str, float] = {}
    """What the source itself predicted."""
    check: bool = False
    is_job: bool = False
    """Whether the row was replayed as a job."""
    fits: bool = True
    """Whether the prediction is below the memory of the GPU."""


class OutsideScore(Noun, frozen=True, kw_only=True):
    """Errors of one figure over the rows of one source."""

    source: str
    figure: str
    rows: int
    mean: float | None = None
    """Mean of the absolute relative errors; None for verdicts."""
    median: float | None = None
    """Median of the signed relative errors."""
    worst: float | None = None
    right: int | None = None
    """Verdicts that were right."""
    check_rows: int = 0
    """Rows that were compared with no prediction while the rules were made."""
    check_mean: float | None = None
    """Mean of their absolute relative errors."""
    rival: str = ""
    """What the source, or the authors of its simulator, reached."""


class OutsideResult(Noun, frozen=True, kw_only=True):
    """Scores by source and figure, and what was not replayed."""

    rows: int
    replayed: int
    scores: tuple[OutsideScore, ...]
    left_out: dict[str, dict[str, int]]
    """Rows of each source that were not replayed, by reason."""
    unscored: dict[str, int]
    """Replayed rows of each source whose memory is of no stated kind."""
    fitted: dict[str, dict[str, float]]
    """Number that was fitted for a source, by name."""
    jobs: int = 0
    """Rows that were replayed as jobs."""
    false_alarms: int = 0
    """Such rows that ran although they are predicted not to fit."""
    answers: tuple[OutsideAnswer, ...] = ()


@cache
def read_rows() -> tuple[OutsideRow, ...]:
    """Return all rows."""
    text = files("trimtab.exams").joinpath("outside.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines())
    cells = [{name: cell for name, cell in line.items() if cell} for line in lines]
    return msgspec.convert(cells, tuple[OutsideRow, ...], strict=False)


def make_shape(model: str, layers: int = 0) -> DecoderShape:
    """Return the sizes of a model that a source names, with so many layers where the source cut it."""
    facts = read_facts()
    sizes = dict(facts["model"][model])
    sizes = facts["family"][sizes.pop("family")] | sizes
    width, heads = sizes["width"], sizes["heads"]
    defaults = {"key_value_heads": heads, "head_size": width // heads, "feed_forward": 4 * width}
    return DecoderShape(**(defaults | sizes | ({"layers": layers} if layers else {})))


class _Machines(NamedTuple):
    """Devices of a source."""

    device: Device
    estimator: LayoutEstimator


def _find_machines(row: OutsideRow, *, fitted: bool) -> _Machines:
    """Return the devices of a row, with an estimator for its model."""
    kernel = read_facts()["trainer"][row.trainer].get("attention", "cudnn")
    return _make_machines((row.source, row.gpu, row.model, kernel), row.gpus, row.layers, fitted=fitted)


@cache
def _make_machines(names: tuple[str, str, str, str], gpus: int, layers: int, *, fitted: bool) -> _Machines:
    facts = read_facts()
    source, gpu, model, kernel = names
    origin, other = facts["source"][source], facts["device"].get(gpu, {})
    name, nodes = other.get("like", gpu), -(-gpus // PER_NODE)
    cluster = parse_cluster(f"{gpus}x{name}" if nodes == 1 else f"{nodes}x8x{name}")
    if nodes > 1 and "network" in origin:
        cluster = with_network(cluster, origin["network"])
    device = cluster.devices[0]
    if other:
        memory = int(other["memory_gib"] * GIB)
        device = device.replace(bandwidth_bytes_per_s=other["bandwidth"], memory_bytes=memory)
    speed = find_speed(device, None)
    if speed is None:
        raise WrongUse(gpu, found="the catalogue has no speed of it", cure="Name another --source.")
    slower = origin.get("host", 1.0) if fitted else 1.0
    host = speed.host._replace(
        forward_s=speed.host.forward_s * slower,
        backward_s=speed.host.backward_s * slower,
        view_s=speed.host.view_s * slower,
        backward_view_s=speed.host.backward_view_s * slower,
        piece_s=speed.host.piece_s * slower,
    )
    old = ampere_share(device)
    estimator = LayoutEstimator(
        make_shape(model, layers),
        speed.pace,
        host,
        find_links(cluster, gpus),
        product_rate=origin.get("efficiency", 1.0) if fitted else 1.0,
        flash_flops=FLASH_SHARES.get(kernel, 1.0) * old * (device.peaks.bf16 or 0.0),
    )
    return _Machines(device, estimator)


def make_layout(row: OutsideRow) -> DecoderLayout:
    """Return how the step of a row was spread."""
    trainer = dict(read_facts()["trainer"][row.trainer])
    kernels = BlockKernels(
        fused=trainer.pop("fused", True),
        attention=CUDNN if trainer.pop("attention", "cudnn") == "cudnn" else FLASH,
        fused_loss=trainer.pop("fused_loss", True),
        float8=FLOAT8.get(row.precision, Float8.NONE),
        stops_early=trainer.pop("stops_early", False),
    )
    shards = row.shards or row.dp
    return DecoderLayout(
        micro_batch=row.micro_batch,
        micro_batches=row.global_batch // (row.micro_batch * row.dp),
        sequence=row.sequence,
        tp=row.tp,
        cp=row.cp,
        pp=row.pp,
        virtual_stages=row.virtual,
        ep=row.ep,
        dp_shard=shards,
        dp_replicate=row.dp // shards,
        full_recompute=row.recompute == "full",
        selective_recompute=row.recompute == "selective",
        dtype=DTYPES.get(row.precision, "bfloat16"),
        kernels=kernels,
        sharding=Sharding(trainer.pop("sharding", "weights")),
        **trainer,
    )


@cache
def read_replays() -> dict[str, JobPrediction]:
    """Return the recorded predictions of replayed jobs by the keys of their rows."""
    text = files("trimtab.exams").joinpath("replays.json").read_text(encoding="utf-8")
    return msgspec.convert(json.loads(text), dict[str, JobPrediction])


def answer_job(
    row: OutsideRow, *, replay: bool = False, cached: bool = True, fitted: bool = True
) -> OutsideAnswer:
    """Return what was predicted for the job of a row, or predict it again.

    Steps take longer by the source's efficiency, unless they shall not be `fitted`.
    """
    if replay or row.key not in read_replays():
        from trimtab.exams.replays import replay_row

        known = replay_row(row, cached=cached)
    else:
        known = read_replays()[row.key]
    fits = known.process_bytes <= known.capacity_bytes
    rate = read_facts()["source"][row.source].get("efficiency", 1.0) if fitted else 1.0
    predicted = {
        STEP: known.step_s and known.step_s / rate,
        "allocated": known.allocated_bytes / GIB,
        "active": known.allocated_bytes / GIB,
        "reserved": known.reserved_bytes / GIB,
        "process": known.process_bytes / GIB,
        VERDICT: float(not fits),
    }
    return _compare_row(row, predicted, STEP).replace(fits=fits)


def answer_row(row: OutsideRow, *, fitted: bool = True) -> OutsideAnswer:
    """Predict the figures that a row has; unless `fitted`, with nothing that was fitted for its source."""
    if row.is_job:
        return answer_job(row)
    device, estimator = _find_machines(row, fitted=fitted)
    layout = make_layout(row)
    memory = estimator.estimate_memory(layout).total
    reserved = memory * RESERVED
    step = STEP if row.gpus <= PER_NODE else FAR_STEP
    known: dict[str, float | None] = {
        step: estimator.estimate_time(layout).total_s,
        "allocated": memory / GIB,
        "active": memory / GIB,
        "reserved": reserved / GIB,
        VERDICT: float(reserved + facts_of(device).memory.sharded_context_bytes > device.memory_bytes),
    }
    return _compare_row(row, known, step)


def _compare_row(row: OutsideRow, known: dict[str, float | None], step: str) -> OutsideAnswer:
    """Return the figures that a row has and that are predicted."""
    measured = {step: row.step_s, **{kind: getattr(row, f"{kind}_gib") for kind in MEMORY}}
    measured[VERDICT] = 1.0 if row.out_of_memory else None
    rivals = {step: row.rival_step_s, "allocated": row.rival_allocated_gib}
    predicted = {name: value for name, value in known.items() if value is not None}
    figures = {name: value for name, value in measured.items() if value is not None and name in predicted}
    if row.is_job:
        words = [row.strategy, row.base, f"lora{row.lora}" if row.lora else "", row.recompute, row.optimizer]
        degrees = " ".join(word for word in words if word)
    else:
        degrees = " ".join(f"{name}{getattr(row, name)}" for name in ("tp", "cp", "pp", "ep", "dp"))
    batch = f"{row.sequence}x{row.micro_batch} of {row.global_batch}"
    return OutsideAnswer(
        source=row.source,
        path=row.path,
        row=f"{row.gpus}x{row.gpu} {row.model} {batch} {degrees}",
        measured=figures,
        predicted={name: predicted[name] for name in figures},
        rivals={name: value for name, value in rivals.items() if value is not None},
        check=row.check,
        is_job=row.is_job,
    )


def run_outside(
    source: str | None = None,
    *,
    replay: bool = False,
    cached: bool = True,
    done: Callable[[str, int], None] = lambda *_: None,
) -> OutsideResult:
    """Predict the rows of a source, or of all; `done` is called with each source and its number of rows.

    Jobs have recorded predictions. With `replay` they are traced and predicted again, from cached traces if
    `cached`; that takes about ten seconds for each.
    """
    names = list(dict.fromkeys(row.source for row in read_rows()))
    if source is not None and source not in names:
        near = find_nearest(source, names)
        raise WrongUse(
            f"--source {source}",
            found=f"it is none of {', '.join(names)}",
            cure=f"Did you mean {near[0]}?" if near else "Name one of them.",
        )
    chosen = [source] if source else names
    rows = [row for row in read_rows() if row.source in chosen]
    answers: list[OutsideAnswer] = []

    def answer(row: OutsideRow) -> OutsideAnswer:
        return answer_job(row, replay=replay, cached=cached) if row.is_job else answer_row(row)

    with ThreadPoolExecutor(WORKERS if replay else 1) as pool:
        for name in chosen:
            own = list(pool.map(answer, (row for row in rows if row.source == name and not row.reason)))
            answers += own
            done(name, len(own))
    jobs = [answer for answer in answers if answer.is_job]
    reasons, sources = read_facts()["reason"], read_facts()["source"]
    left_out = {
        name: dict(Counter(reasons[row.reason] for row in rows if row.source == name and row.reason))
        for name in chosen
    }
    unscored = Counter(row.source for row in rows if not row.reason and row.unstated_gib is not None)
    return OutsideResult(
        rows=len(rows),
        replayed=len(answers),
        scores=tuple(score for name in chosen for score in score_source(name, answers)),
        left_out={name: counts for name, counts in left_out.items() if counts},
        unscored=dict(unscored),
        fitted={
            name: {key: sources[name][key] for key in ("efficiency", "host") if key in sources[name]}
            for name in chosen
            if sources[name].keys() & {"efficiency", "host"}
        },
        jobs=len(jobs),
        false_alarms=sum(not answer.fits and VERDICT not in answer.measured for answer in jobs),
        answers=tuple(answers),
    )


class CorrectionCheck(NamedTuple):
    """Whether one factor for all steps on a chip makes predictions better for a source that was left out."""

    rows: int
    medians: dict[str, float]
    """Median of measured over predicted time by source."""
    factor: float
    """Geometric mean of the medians."""
    before: dict[str, float]
    """Mean error of each source; with one source, of each half of its rows."""
    after: dict[str, float]
    """The same with the factor of the others."""

    @property
    def is_applied(self) -> bool:
        """Whether left-out sources get better on average and most of them do; one source shows nothing."""
        better = sum(self.after[name] < self.before[name] for name in self.before)
        falls = statistics.mean(self.after.values()) < statistics.mean(self.before.values())
        return len(self.medians) > 1 and falls and 2 * better > len(self.before)


def _list_ratios() -> dict[tuple[str, str], list[float]]:
    """Return measured over predicted time with nothing fitted, by device of the catalogue and source.

    Rows that are replayed as jobs are not counted: most train adapters only.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in read_rows():
        if row.reason or row.is_job or row.step_s is None or row.gpu in read_facts()["device"]:
            continue
        device = _find_machines(row, fitted=False).device.model or row.gpu
        predicted = answer_row(row, fitted=False).predicted
        step_s = predicted[STEP] if STEP in predicted else predicted[FAR_STEP]
        ratios.setdefault((device, row.source), []).append(row.step_s / step_s)
    return ratios


def compare_devices() -> dict[str, dict[str, tuple[int, float]]]:
    """Return how long published steps took over what is predicted with nothing fitted.

    By device of the catalogue and source: the rows, and the median of measured over predicted time.
    """
    compared: dict[str, dict[str, tuple[int, float]]] = {}
    for (device, source), values in sorted(_list_ratios().items()):
        compared.setdefault(device, {})[source] = len(values), round(statistics.median(values), 2)
    return compared


def check_corrections() -> dict[str, CorrectionCheck]:
    """Leave out each source on a chip, and predict it with the geometric mean of the others' medians.

    A chip is the first word of its device's name: A100s with 40 and 80 GB are one.
    """
    chips: dict[str, dict[str, list[float]]] = {}
    for (device, source), ratios in sorted(_list_ratios().items()):
        chips.setdefault(device.split()[0], {}).setdefault(source, []).extend(ratios)
    return {chip: _check_chip(sources) for chip, sources in chips.items()}


def _check_chip(sources: dict[str, list[float]]) -> CorrectionCheck:
    medians = {name: statistics.median(ratios) for name, ratios in sources.items()}
    groups = sources
    if len(sources) == 1:
        ((name, ratios),) = sources.items()
        groups = {f"{name}, half {half + 1}": ratios[half::2] for half in range(min(2, len(ratios)))}
    factors = {name: statistics.median(ratios) for name, ratios in groups.items()}
    before, after = {}, {}
    for name, ratios in groups.items():
        others = [factor for other, factor in factors.items() if other != name]
        factor = statistics.geometric_mean(others) if others else 1.0
        before[name] = statistics.mean(abs(1 / ratio - 1) for ratio in ratios)
        after[name] = statistics.mean(abs(factor / ratio - 1) for ratio in ratios)
    rows = sum(map(len, sources.values()))
    return CorrectionCheck(rows, medians, statistics.geometric_mean(medians.values()), before, after)


def score_source(source: str, answers: Iterable[OutsideAnswer]) -> list[OutsideScore]:
    """Return the errors of a source's rows by figure."""
    own = [answer for answer in answers if answer.source == source]
    scores = []
    for figure in (STEP, FAR_STEP, *MEMORY, VERDICT):
        rows = [answer for answer in own if figure in answer.measured]
        if not rows:
            continue
        if figure == VERDICT:
            right = sum(answer.predicted[figure] == answer.measured[figure] for answer in rows)
            scores.append(OutsideScore(source=source, figure=figure, rows=len(rows), right=right))
            continue
        errors = [answer.predicted[figure] / answer.measured[figure] - 1 for answer in rows]
        checked = [abs(error) for error, answer in zip(errors, rows, strict=True) if answer.check]
        scores.append(
            OutsideScore(
                source=source,
                figure=figure,
                rows=len(rows),
                mean=statistics.mean(map(abs, errors)),
                median=statistics.median(errors),
                worst=max(map(abs, errors)),
                check_rows=len(checked),
                check_mean=statistics.mean(checked) if checked else None,
                rival=_describe_rival(source, figure, rows),
            )
        )
    return scores


def _describe_rival(source: str, figure: str, rows: list[OutsideAnswer]) -> str:
    """Return how far off the source's own predictions are: of these rows, or as published."""
    errors = [
        abs(answer.rivals[figure] / answer.measured[figure] - 1) for answer in rows if figure in answer.rivals
    ]
    if errors:
        return f"{source} {statistics.mean(errors):.1%}"
    published: str = read_facts()["source"][source].get("rival", {}).get(figure, "")
    return published
