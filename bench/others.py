"""Sets other estimators beside trimtab, on the recorded cases: the tables of docs/memory.md.

    python bench/others.py [--exam FILE] [--write]

FILE is what `trimtab exam --json` printed; without it, trimtab's errors are read from the table that
bench/memory_exam.py wrote into docs/memory.md. --write puts the tables into that page as well. Models are
built without memory, and no exam is sat: about a minute.

Needs accelerate, whose own code is called (`pip install accelerate`), and transformers and peft for some of
the jobs. DeepSpeed is not needed: its formulas are published, and are two lines.

What is compared: every estimator's figure for the training memory of one device with the measured peak of
allocated memory. Where a case lies outside what an estimator says it covers, its figure is marked and kept
out of its summary.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import BrokenFile, EnvironmentFault, TrimtabError
from trimtab.exams.run import Case, read_cases
from trimtab.jobs.load import load_job
from trimtab.spec import Noun, Recompute
from trimtab.spec.precision import FLOAT32
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
EXAM_BEGIN, EXAM_END = "<!-- exam begins -->\n", "<!-- exam ends -->"
BEGIN, END = "<!-- others begin -->\n", "<!-- others end -->"
VERSIONS = ("accelerate", "torch", "transformers", "peft")
GB = 10**9


class Figure(Noun, frozen=True, kw_only=True):
    """What an estimator says of a case."""

    bytes: float
    covered: bool
    """Whether the case is one that the estimator says it answers."""


class Model(Noun, frozen=True, kw_only=True):
    """What the formulas ask about a job's model."""

    parameters: int
    largest_layer: int
    """Parameters that one module holds itself, at most."""
    frozen: bool
    """Whether some weights are not trained."""
    adam: bool
    accelerate: dict[str, int]
    """accelerate's "Training using Adam", by its name of the dtype."""
    decoders: tuple[int, ...] = ()
    """Parameters of each frozen decoder of the two-decoder job."""


class Row(Noun, frozen=True, kw_only=True):
    """A case and what everybody says of it."""

    case: str
    measured: int
    accelerate: Figure | None
    deepspeed: Figure | None
    trimtab: float | None
    """trimtab's error, as a share."""
    guides: dict[str, Figure]


# ------------------------------------------------------------------------------------------- the formulas


def zero2(parameters: float, gpus: int) -> float:
    """DeepSpeed's bytes a GPU for weights, gradients and Adam's states under ZeRO-2, nothing off-loaded.

    As documented; the code of 0.19.8 splits 18 of the 20 bytes where the documentation says 16, which is
    the same on one GPU.
    """
    return 4 * parameters + 16 * parameters / gpus


def zero3(parameters: float, largest_layer: float, gpus: int) -> float:
    """The same under ZeRO-3: all of it is sharded, and the largest layer is gathered."""
    return 4 * largest_layer + 18 * parameters / gpus


FULL = (8_030_261_248, 7_615_616_512)
"""Parameters of the two decoders that the guides speak of, Llama-3.1-8B and Qwen2.5-7B."""
FULL_LAYERS = 32 + 28


def guide_a(decoders: tuple[int, ...], layers: int, items: int) -> float:
    """Two frozen decoders: 14 and 13 GB of weights, 4 GB of optimizer states each, 0.75 GB a batch item.

    Weights are scaled to the parameters that a case has, and what an item needs to its layers.
    """
    weights = sum(size * GB * have / full for size, have, full in zip((14, 13), decoders, FULL, strict=True))
    return weights + 2 * 4 * GB + 0.75 * GB * items * layers / FULL_LAYERS


def guide_b(decoders: tuple[int, ...], layers: int, items: int) -> float:
    """The same job: 16 and 14 GB of weights, 2 GB of optimizer states, 2 GB for four batch items.

    The trained weights, "under 1 GB", are nothing in its own total of 34 GB, and here.
    """
    weights = sum(size * GB * have / full for size, have, full in zip((16, 14), decoders, FULL, strict=True))
    return weights + 2 * GB + 0.5 * GB * items * layers / FULL_LAYERS


class Encoder(Noun, frozen=True, kw_only=True):
    """What guide C asks about a text encoder."""

    parameters: int
    layers: int
    heads: int
    width: int
    length: int
    channels: int = 1
    """Encoders side by side."""


def guide_c(encoder: Encoder, samples: int, *, value_bytes: int = 2, recompute: bool = False) -> float:
    """Text encoders: weights and gradients as computed in, Adam in fp32, activations and token ids.

    A sample keeps the attention scores of one layer and four values a token, layer and unit of width; a
    quarter of that with checkpointing. Its 1500 MB for the CUDA context is not allocated memory, and is left
    out.
    """
    states = (2 * value_bytes + 8) * encoder.parameters
    scores = encoder.heads * encoder.length**2
    hidden = 4 * encoder.layers * encoder.length * encoder.width
    kept = encoder.channels * (scores + hidden) * value_bytes * (0.25 if recompute else 1)
    ids = encoder.channels * encoder.length * 2 * 8
    return states + samples * (kept + ids)


# --------------------------------------------------------------------------- the figures for a case


def job_of(case: Case) -> Any:
    """The job as the case was run."""
    job = load_job(f"trimtab.exams.jobs:{case.job}")
    for name, value in case.overrides.items():
        setattr(job, name, value)
    return job


def built(case: Case) -> Model:
    """The model of a case, on the meta device, in the figures that formulas need."""
    import torch

    from trimtab.engine.optimizer import make_optimizer

    job = job_of(case)
    with torch.device("meta"):
        model: Any = job.model()
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = make_optimizer(job, trained, case.measurement.setting.optimizer)
    return Model(
        parameters=sum(parameter.numel() for parameter in parameters),
        largest_layer=max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()),
        frozen=len(trained) < len(parameters),
        adam=isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)),
        decoders=tuple(
            sum(p.numel() for p in getattr(model, name).parameters()) for name in getattr(job, "branches", ())
        ),
        # Last, as it changes the model: the command builds every model in fp32, whatever its own dtype.
        accelerate=training_using_adam(model.float()),
    )


def training_using_adam(model: Any) -> dict[str, int]:
    """What `accelerate estimate-memory` prints in that column, computed by its own code."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError as error:
        raise EnvironmentFault(
            "bench/others.py",
            found=f"accelerate's estimator cannot be imported ({error})",
            cure="Install it: pip install accelerate",
        ) from error
    size, _ = calculate_maximum_sizes(model)
    return {dtype: max(estimate_training_usage(size, dtype).values()) for dtype in ("float32", "float16")}


def accelerate_figure(case: Case, model: Model) -> Figure | None:
    """One whole model: of a shard it knows nothing."""
    setting = case.measurement.setting
    if setting.mesh.dp_shard > 1:
        return None
    dtype = "float32" if setting.dtypes.compute == FLOAT32 else "float16"
    covered = model.adam and not model.frozen and setting.dtypes.weights == FLOAT32
    return Figure(bytes=model.accelerate[dtype], covered=covered)


def deepspeed_figure(case: Case, model: Model) -> Figure:
    """ZeRO-3 where weights are sharded; where nothing is, ZeRO-2 on one GPU."""
    setting = case.measurement.setting
    if setting.mesh.dp_shard > 1:
        needed = zero3(model.parameters, model.largest_layer, setting.mesh.dp_shard)
    else:
        needed = zero2(model.parameters, 1)
    covered = model.adam and not model.frozen and setting.dtypes.autocast is not None
    return Figure(bytes=needed, covered=covered)


def guide_figures(case: Case, model: Model) -> dict[str, Figure]:
    """What the guides that speak of such a job say."""
    setting = case.measurement.setting
    if setting.mesh.dp_shard > 1 or setting.recompute is Recompute.SELECTIVE:
        return {}
    job = job_of(case)
    items, full = setting.micro_batch, setting.recompute is Recompute.FULL
    if case.job == "Bridge":
        asked = (model.decoders, job.layers_a + job.layers_b, items)
        # Neither guide knows of recomputation.
        return {
            "A": Figure(bytes=guide_a(*asked), covered=not full),
            "B": Figure(bytes=guide_b(*asked), covered=not full),
        }
    if case.job not in {"Bert", "ViT"}:
        return {}
    encoder = Encoder(
        parameters=model.parameters,
        layers=job.layers,
        heads=job.heads,
        width=job.width,
        length=job.seq if case.job == "Bert" else (job.image // job.patch) ** 2 + 1,
    )
    value_bytes = 4 if setting.dtypes.compute == FLOAT32 else 2
    needed = guide_c(encoder, items, value_bytes=value_bytes, recompute=full)
    return {"C": Figure(bytes=needed, covered=case.job == "Bert")}


# --------------------------------------------------------------------------- trimtab's own errors


def errors_in_page(text: str) -> dict[str, float]:
    """The errors of allocated memory in the table of the page, by case."""
    _, _, rest = text.partition(EXAM_BEGIN)
    table, end, _ = rest.partition(EXAM_END)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    head = next((line for line in lines if "allocated GiB" in line), None)
    if not end or head is None:
        raise BrokenFile(
            PAGE.name, found="there is no table of the exam in it", cure="Run bench/memory_exam.py first."
        )
    error = head.index("allocated GiB") + 1
    # Eager and compiled runs have a table each, with a summary of its own before it.
    body = [line for line in lines if len(line) == len(head) and line[error].endswith("%")]
    return {line[0]: float(line[error].rstrip("%")) / 100 for line in body}


def errors_in_exam(path: Path) -> dict[str, float]:
    """The same from what `trimtab exam --json` printed."""
    cure = "Write it with: trimtab exam --json > FILE"
    try:
        marked = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return {one["case"]: one["error"]["allocated_bytes"] for one in marked if not one.get("failed")}
    except OSError as error:
        raise BrokenFile(str(path), found=f"it cannot be read ({error.strerror})", cure=cure) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFile(str(path), found="it does not hold the marks of an exam", cure=cure) from error


# --------------------------------------------------------------------------- the tables


def share(figure: Figure, measured: int) -> float:
    """The error of a figure."""
    return figure.bytes / measured - 1


def cell(figure: Figure | None, measured: int) -> str:
    """A figure and its error, marked where the case is not the estimator's."""
    if figure is None:
        return "- | -"
    mark = "" if figure.covered else " \\*"
    return f"{figure.bytes / GIB:.2f}{mark} | {share(figure, measured):+.0%}{mark}"


def summary(name: str, errors: Iterable[float]) -> str:
    """How an estimator did on its cases."""
    found = sorted(errors, key=abs)
    if not found:
        return f"| {name} | 0 | - | - |"
    median = statistics.median(map(abs, found))
    digits = 0 if median > 0.01 else 2  # noqa: PLR2004 - one percent
    return f"| {name} | {len(found)} | {median:.{digits}%} | {found[-1]:+.{digits}%} |"


def tables(rows: list[Row]) -> str:
    """Summary, all cases, and the guides."""
    guides = [(name, row, figure) for row in rows for name, figure in row.guides.items()]

    def inside(figures: Iterable[tuple[Figure | None, int]]) -> list[float]:
        return [share(figure, measured) for figure, measured in figures if figure and figure.covered]

    lines = [
        "| | cases | median error | worst |",
        "|---|--:|--:|--:|",
        summary("accelerate", inside((row.accelerate, row.measured) for row in rows)),
        summary("DeepSpeed", inside((row.deepspeed, row.measured) for row in rows)),
        *(
            summary(f"guide {letter}", inside((f, row.measured) for name, row, f in guides if name == letter))
            for letter in "ABC"
        ),
        summary("trimtab", [row.trimtab for row in rows if row.trimtab is not None]),
        "",
        "| case | measured GiB | accelerate | error | DeepSpeed | error | trimtab's error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        own = "-" if row.trimtab is None else f"{row.trimtab:+.2%}"
        others = f"{cell(row.accelerate, row.measured)} | {cell(row.deepspeed, row.measured)}"
        lines.append(f"| {row.case} | {row.measured / GIB:.2f} | {others} | {own} |")
    lines += ["", "| case | measured GiB | guide | its figure | error |", "|---|--:|---|--:|--:|"]
    for name, row, figure in guides:
        lines.append(f"| {row.case} | {row.measured / GIB:.2f} | {name} | {cell(figure, row.measured)} |")
    return "\n".join(lines) + "\n"


def answers(own: dict[str, float]) -> list[Row]:
    """Every recorded case."""
    found = []
    for case in read_cases():
        model = built(case)
        found.append(
            Row(
                case=case.id,
                measured=case.measurement.allocated_bytes,
                accelerate=accelerate_figure(case, model),
                deepspeed=deepspeed_figure(case, model),
                trimtab=own.get(case.id),
                guides=guide_figures(case, model),
            )
        )
    return found


def placed(text: str, found: str) -> str:
    """The page with the tables between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        cure = f"Write both lines where the tables belong: {BEGIN.strip()} {END}"
        raise BrokenFile(PAGE.name, found="the marks of the tables are not in it", cure=cure)
    return before + begin + found + end + after


def main() -> None:
    """Print the tables, and write them into the page where that is asked for."""
    parser = argparse.ArgumentParser(description="Other estimators beside trimtab, on the recorded cases.")
    parser.add_argument("--exam", type=Path, metavar="FILE", help="what `trimtab exam --json` printed")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name} as well")
    args = parser.parse_args()
    try:
        text = PAGE.read_text(encoding="utf-8")
        placed(text, "")  # a page without the marks is refused before the work, not after it
        found = tables(answers(errors_in_exam(args.exam) if args.exam else errors_in_page(text)))
    except TrimtabError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    print(found)
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS))
    if args.write:
        PAGE.write_text(placed(text, found), encoding="utf-8")


if __name__ == "__main__":
    main()
