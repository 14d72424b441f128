"""Compare predictions of layouts with steps that others measured on many GPUs.

    python bench/outside.py [--rows FILE] [--worst N]

The rows are in bench/outside_rows.csv, with the sizes of the mesh, the measured step and, where the source
has them, memory and the source's own prediction:

- VIA-Research/vTrain, data/ground_truth_{single,multi}.csv: GPT models by Megatron-DeepSpeed on 2 to 512
  A100, fp16, every block recomputed, no flash attention. Its own simulator is off by 8.37 % on one node and
  14.73 % on several (mean of absolute errors, as its authors published).
- MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json: blocks of Llama 3 and DeepSeek on eight B200
  by Megatron-LM with Transformer Engine, bf16, memory as allocated, with SimuMax's own predictions.

One number is fitted for each source, and printed: how much slower its host launches operations than the one
that was calibrated (vTrain), or the rate of its products over the predicted one (SimuMax). Rows of DeepSeek
are left out: their attention is compressed, which layouts do not know.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src")]

from trimtab.catalog.clusters import parse_cluster  # noqa: E402
from trimtab.predict.calibration import find_speed  # noqa: E402
from trimtab.predict.communication import find_links  # noqa: E402
from trimtab.predict.layout import DecoderLayout, LayoutEstimator, Sharding  # noqa: E402
from trimtab.spec import DecoderShape  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.predict.op_time import Pace

GIB = 2**30
PER_NODE = 8


@dataclass(frozen=True)
class Source:
    """A source of measured steps."""

    name: str
    device: str
    dtype: str
    gradients: str
    sharding: Sharding
    sequence_parallel: bool
    full_recompute: bool
    overlaps_data: bool
    host_factor: float = 1.0
    """Seconds of its host for an operation, over those of the calibrated one."""
    product_factor: float = 1.0
    """Rate of its products, over that predicted. Of both factors, one is fitted."""


SOURCES = {
    "vTrain": Source(
        "vTrain", "A100-80GB", "float16", "float16", Sharding.NONE, False, True, False, host_factor=1.55
    ),
    "SimuMax": Source(
        "SimuMax", "B200", "bfloat16", "float32", Sharding.OPTIMIZER, True, False, False, product_factor=0.62
    ),
}


def make_shape(model: str, layers: int) -> DecoderShape:
    """Return the sizes of a model that a source names."""
    if model.startswith("gpt-"):
        width = int(model.removeprefix("gpt-"))
        heads = {1024: 16, 2048: 16, 3072: 32, 6144: 48, 8192: 64, 12288: 96}[width]
        return DecoderShape(
            layers=layers,
            width=width,
            heads=heads,
            key_value_heads=heads,
            head_size=width // heads,
            feed_forward=4 * width,
            vocabulary=50304,
            gated=False,
            biased=True,
            tied=True,
            dropout=True,
            flash=False,
        )
    sizes = {"llama3_70b": (8192, 64, 8, 28672), "llama3_405b": (16384, 128, 8, 53248)}
    width, heads, groups, inner = sizes[model]
    return DecoderShape(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=groups,
        head_size=128,
        feed_forward=inner,
        vocabulary=128256,
    )


@dataclass(frozen=True)
class Comparison:
    """A measured row with its prediction."""

    row: dict[str, str]
    step_s: float
    allocated_gib: float

    @property
    def error(self) -> float:
        """Relative error of the step time."""
        return self.step_s / float(self.row["step_s"]) - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None where the source has none."""
        measured = self.row["allocated_gib"]
        return self.allocated_gib / float(measured) - 1 if measured else None


@cache
def make_estimator(source: Source, model: str, layers: int, gpus: int) -> LayoutEstimator:
    """Return the estimator for a model on a number of GPUs."""
    nodes = -(-gpus // PER_NODE)
    cluster = parse_cluster(f"{gpus}x{source.device}" if nodes == 1 else f"{nodes}x8x{source.device}")
    speed = find_speed(cluster.devices[0], None)
    if speed is None:
        raise SystemExit(f"the catalogue has no speed of {source.device}")
    host = speed.host._replace(
        forward_s=speed.host.forward_s * source.host_factor,
        backward_s=speed.host.backward_s * source.host_factor,
    )
    return LayoutEstimator(make_shape(model, layers), make_pace(source), host, find_links(cluster, gpus))


@cache
def make_pace(source: Source) -> Pace:
    """Return the times of operations on the device of a source."""
    speed = find_speed(parse_cluster(source.device).devices[0], None)
    if speed is None:
        raise SystemExit(f"the catalogue has no speed of {source.device}")
    rates, factor = speed.pace.target, source.product_factor
    slower = rates._replace(float16=rates.float16 * factor, bfloat16=rates.bfloat16 * factor)
    return speed.pace.with_rates(slower)


def predict_row(row: dict[str, str]) -> Comparison:
    """Predict a row."""
    source = SOURCES[row["source"]]
    number = {key: int(row[key]) for key in row if key not in {"source", "model"} and row[key].isdigit()}
    layout = DecoderLayout(
        micro_batch=number["micro_batch"],
        micro_batches=number["global_batch"] // (number["micro_batch"] * number["dp"]),
        sequence=number["sequence"],
        tp=number["tp"],
        sequence_parallel=source.sequence_parallel,
        cp=number["cp"],
        pp=number["pp"],
        ep=number["ep"],
        dp_shard=number["dp"],
        sharding=source.sharding,
        overlaps_data=source.overlaps_data,
        full_recompute=source.full_recompute,
        dtype=source.dtype,
        gradients=source.gradients,
    )
    estimator = make_estimator(source, row["model"], number["layers"], number["gpus"])
    memory = estimator.estimate_memory(layout)
    return Comparison(row, estimator.estimate_time(layout).total_s, memory.total / GIB)


def summarize(name: str, errors: Iterable[float]) -> str:
    """Return the number of rows, the mean absolute error and the median error."""
    found = list(errors)
    if not found:
        return f"{name}: no rows"
    mean, worst = statistics.mean(map(abs, found)), max(map(abs, found))
    middle = statistics.median(found)
    return f"{name}: {len(found)} rows, mean |error| {mean:.1%}, median {middle:+.1%}, worst {worst:.0%}"


def main() -> None:
    """Print the errors by source."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=HERE / "outside_rows.csv")
    parser.add_argument("--worst", type=int, default=0, help="print so many rows with the largest errors")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["model"].startswith("deepseek")]
    found = [predict_row(row) for row in rows]
    for source in SOURCES.values():
        own = [each for each in found if each.row["source"] == source.name]
        print(f"{source.name}: host factor {source.host_factor}, product factor {source.product_factor}")
        one_node = [each.error for each in own if int(each.row["gpus"]) <= PER_NODE]
        print(summarize("  step, one node", one_node))
        print(
            summarize(
                "  step, several nodes", [each.error for each in own if int(each.row["gpus"]) > PER_NODE]
            )
        )
        rivals = [
            float(each.row["rival_step_s"]) / float(each.row["step_s"]) - 1
            for each in own
            if each.row["rival_step_s"]
        ]
        if rivals:
            print(summarize(f"  step, predicted by {source.name}", rivals))
        print(summarize("  memory", [each.memory_error for each in own if each.memory_error is not None]))
    for each in sorted(found, key=lambda each: -abs(each.error))[: options.worst]:
        print(f"{each.error:+.0%} {each.memory_error or 0:+.1%}", dict(each.row))


if __name__ == "__main__":
    main()
