"""What single operations ask the CUDA allocator for: the facts behind the rules of trimtab.trace.workspaces.

    python bench/op_memory.py job NAME FILE      on a GPU: every allocation of three steps, with its operation
    python bench/op_memory.py probe GROUP FILE   on a GPU: the allocations of single operations, many shapes
    python bench/op_memory.py all FOLDER         both, for everything in JOBS and PROBES, side by side (40 s)

A job is a case of bench/gpu_queue.py or of the recorded exam. Sizes are bytes; a free is negative.
"""

# Probes run at once, so a lambda sees the values of its own round; numbers are shapes.
# ruff: noqa: B023, PLR2004, PLW0108, S311, SLF001
from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Setting

JOBS = (
    "zoo-packed_lstm", "zoo-graph_sparse", "zoo-point_cloud", "zoo-unet3d", "zoo-segformer",
    "conformer-bf16-b32", "zoo-metric_learning", "zoo-sparse_embeddings", "zoo-resnet", "zoo-efficientnet",
)  # fmt: skip
STEPS = 3
SECONDS = 100.0
"""After which a process is given up."""
INNER = ("aten::empty", "aten::resize", "aten::new_empty", "aten::_empty")
"""Operations that allocate on behalf of the operation around them."""


def _job_of(name: str) -> tuple[str, dict[str, Any], Setting, float | None]:
    """Job, options, setting and clip of a case."""
    from bench.gpu_queue import queue

    from trimtab.exams.run import read_cases

    for case in queue():
        if case.id == name:
            return case.job_name, case.options, case.setting, None
    found = next(case for case in read_cases() if case.id == name)
    return found.measurement.job, found.overrides, found.measurement.setting, found.clip


def record_job(name: str, file: Path) -> None:
    """Run a job's first steps under torch's profiler and write down each allocation with its operation."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from trimtab.engine import step as steps
    from trimtab.jobs.load import load_job

    named, options, setting, clip = _job_of(name)
    job = load_job(named, options)
    torch.zeros(1, device="cuda")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        with record_function("mark build"):
            state = steps.prepare_job(job, setting)
        with record_function("mark batch"):
            batch = steps.make_batch(job, setting, "cuda")
        for number in range(STEPS):
            with record_function(f"mark step{number}"):
                steps.run_step(state, [batch], clip=clip)
                torch.cuda.synchronize()
    made = {
        "job": name,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    ops: dict[str, int] = {}
    lines = list(_with_operations(events, ops))
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump(made | {"ops": list(ops), "events": lines}, out)
    print(name, len(lines), made, flush=True)


def _with_operations(events: list[dict[str, Any]], ops: dict[str, int]) -> Iterator[list[Any]]:
    """Each CUDA allocation: bytes, reserved after it, number of its operation, phase."""
    kinds = ("cpu_op", "user_annotation")
    began = [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]
    marks = sorted(
        (event["ts"], event["name"].removeprefix("mark "))
        for event in began
        if event["name"].startswith("mark ")
    )
    memory = [
        event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 1
    ]
    stacks: dict[Any, list[dict[str, Any]]] = {}
    everything = sorted(
        [(event["ts"], 0, index, event) for index, event in enumerate(began)]
        + [(event["ts"], 1, event["args"].get("Ev Idx", 0), event) for event in memory],
        key=lambda item: item[:3],
    )
    for now, is_memory, _, event in everything:
        stack = stacks.setdefault(event["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] < now:
            stack.pop()
        if not is_memory:
            stack.append(event)
            continue
        words = [_described(each) for each in stack if not each["name"].startswith((*INNER, "mark "))]
        label = " > ".join(words[-3:])
        phase = next((name for since, name in reversed(marks) if since <= now), "")
        number = ops.setdefault(label, len(ops))
        yield [event["args"]["Bytes"], event["args"]["Total Reserved"], number, phase]


def _described(operation: dict[str, Any]) -> str:
    shapes = operation["args"].get("Input Dims", [])
    types = operation["args"].get("Input type", [])
    text = " ".join(
        f"{kind}{shape}".replace(" ", "") for shape, kind in zip(shapes, types, strict=False) if shape
    )
    return f"{operation['name']}({text[:160]})"


# ------------------------------------------------------------------------------------- single operations


class Probes:
    """Runs operations one after another and tells the allocations of each from the allocator's history."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.lines: list[dict[str, Any]] = []
        self.spans: list[tuple[int, int]] = []
        torch.zeros(1, device="cuda")
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7)
        self.began = self._count()

    def _count(self) -> int:
        stats = self.torch.cuda.memory_stats()
        return int(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def __call__(self, run: Callable[[], Any], **facts: Any) -> Any:
        """Run it once, and keep its result until after its allocations are counted."""
        self.torch.cuda.synchronize()
        begin = self._count()
        out = None
        try:
            out = run()
        except Exception as why:  # noqa: BLE001 - what an operation refuses is an answer too
            facts["failed"] = str(why)[:200]
        self.lines.append(facts)
        self.spans.append((begin - self.began, self._count() - self.began))
        return out

    def write(self, file: Path) -> None:
        """Add the allocations to each line."""
        history = self.torch.cuda.memory._snapshot()["device_traces"][0]
        signed = {"alloc": 1, "free_completed": -1}
        sizes = [signed[event["action"]] * event["size"] for event in history if event["action"] in signed]
        with gzip.open(file, "wt", encoding="utf-8") as out:
            for facts, (begin, end) in zip(self.lines, self.spans, strict=True):
                out.write(json.dumps(facts | {"sizes": sizes[begin:end]}) + "\n")


def probe_recurrent(probes: Probes) -> None:
    """Layers of cuDNN: modes, sizes, directions, dropout, packed sequences."""
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    draw = random.Random(7)
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
    base: dict[str, Any] = {
        "kind": "lstm", "batch": 64, "steps": 80, "width": 300, "hidden": 512, "layers": 2, "both": True,
        "dropout": 0.3, "dtype": "float16", "packed": "random",
    }  # fmt: skip
    choices: dict[str, list[Any]] = {
        "kind": ["lstm", "gru", "rnn"], "batch": [1, 16, 64, 96, 256], "steps": [7, 20, 80, 200],
        "width": [64, 128, 300, 512, 1024], "hidden": [64, 100, 128, 256, 512, 1024], "layers": [1, 2, 3, 4],
        "both": [False, True], "dropout": [0.0, 0.3], "dtype": ["float16", "float32", "bfloat16"],
        "packed": ["", "full", "random", "random"],
    }  # fmt: skip
    cases = [base] + [base | {name: value} for name, values in choices.items() for value in values]
    plain = base | {"packed": "", "both": False}
    cases += [plain | {name: value} for name, values in choices.items() for value in values]
    cases += [{name: draw.choice(values) for name, values in choices.items()} for _ in range(150)]
    for case in cases:
        dtype = getattr(torch, case["dtype"])
        layer = kinds[case["kind"]](
            case["width"], case["hidden"], case["layers"], dropout=case["dropout"],
            bidirectional=case["both"], device="cuda", dtype=dtype,
        )  # fmt: skip
        source: Any = torch.randn(
            case["steps"], case["batch"], case["width"], device="cuda", dtype=dtype, requires_grad=True
        )
        rows = case["steps"] * case["batch"]
        if case["packed"]:
            lengths = torch.tensor(
                [case["steps"]]
                + [
                    case["steps"] if case["packed"] == "full" else draw.randint(1, case["steps"])
                    for _ in range(case["batch"] - 1)
                ]
            )
            source = pack_padded_sequence(source, lengths, enforce_sorted=False)
            rows = source.data.shape[0]
        facts = {"op": "rnn", **case, "rows": rows, "parameters": sum(p.numel() for p in layer.parameters())}
        out = probes(lambda: layer(source), phase="forward", **facts)
        if out is None:
            continue
        first = out[0].data if case["packed"] else out[0]
        gradient = torch.ones_like(first)
        probes(lambda: first.backward(gradient), phase="backward", **facts)


def probe_volumes(probes: Probes) -> None:
    """Convolutions over volumes, forward and both gradients."""
    draw = random.Random(8)
    cases: list[dict[str, Any]] = []
    sizes = {96: (4, 32, 64), 48: (32, 64, 128), 24: (64, 128, 256), 12: (128, 256)}
    for side, channels in sizes.items():
        cases += [
            {"samples": 2, "source": source, "result": result, "image": [side] * 3, "kernel": [3] * 3}
            for source in channels
            for result in channels[-2:]
        ]
    cases += [
        {
            "samples": 2, "source": 2 * narrow, "result": narrow, "image": [side] * 3, "kernel": [2] * 3,
            "stride": [2] * 3, "padding": [0] * 3, "transposed": True,
        }
        for narrow, side in ((128, 12), (64, 24), (32, 48))
    ]  # fmt: skip
    cases.append({"samples": 2, "source": 32, "result": 4, "image": [96] * 3, "kernel": [1] * 3})
    cases += [{**case, "dtype": "float32"} for case in cases]
    for _ in range(160):
        kernel = draw.choice([[1, 1, 1], [3, 3, 3], [3, 3, 3], [1, 3, 3], [3, 1, 1], [3, 7, 7], [5, 5, 5]])
        side = draw.choice([7, 8, 14, 16, 28, 32, 56])
        cases.append(
            {
                "samples": draw.choice([1, 2, 4, 8]),
                "source": draw.choice([1, 3, 4, 16, 24, 32, 64, 128, 256, 512]),
                "result": draw.choice([4, 16, 24, 32, 64, 128, 256, 512]),
                "image": [draw.choice([4, 8, 16, side]), side, side],
                "kernel": kernel,
                "stride": draw.choice([[1, 1, 1], [1, 1, 1], [2, 2, 2], [1, 2, 2]]),
                "dtype": draw.choice(["bfloat16", "bfloat16", "float16", "float32", "tf32"]),
                "last": draw.random() < 0.2,
            }
        )
    for case in cases:
        _probe_convolution(probes, case)
        if case.get("dtype") == "float32":
            _probe_convolution(probes, case | {"dtype": "tf32"})


def _probe_convolution(probes: Probes, case: dict[str, Any]) -> None:
    import torch

    count = len(case["image"])
    padding = [size // 2 for size in case["kernel"]]
    case = {"stride": [1] * count, "padding": padding, "transposed": False, "dtype": "bfloat16"} | case
    case = {"last": False, "groups": 1} | case
    torch.backends.cudnn.allow_tf32 = case["dtype"] == "tf32"
    dtype = torch.float32 if case["dtype"] == "tf32" else getattr(torch, case["dtype"])
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}.get(count, torch.contiguous_format)
    layout = layout if case["last"] else torch.contiguous_format
    source = torch.randn(case["samples"], case["source"], *case["image"], device="cuda", dtype=dtype)
    source = source.contiguous(memory_format=layout)
    channels = (case["source"], case["result"]) if case["transposed"] else (case["result"], case["source"])
    weight = torch.randn(
        channels[0], channels[1] // case["groups"], *case["kernel"], device="cuda", dtype=dtype
    )
    settings = (case["stride"], case["padding"], [1] * count, case["transposed"], [0] * count, case["groups"])
    facts = {"op": "convolution", **case}
    aten = torch.ops.aten
    out = probes(lambda: aten.convolution(source, weight, None, *settings), phase="forward", **facts)
    if out is None:
        return
    gradient = torch.randn_like(out)
    for phase, wanted in (("source", [True, False, False]), ("weight", [False, True, False])):
        probes(
            lambda: aten.convolution_backward(gradient, source, weight, None, *settings, wanted),
            phase=phase,
            **facts,
        )


def probe_sparse(probes: Probes) -> None:
    """Sparse tensors: sorting, conversions, products and their gradients."""
    import torch

    for count, entries, columns in (
        (40_000, 600_000, 512), (40_000, 600_000, 128), (40_000, 600_000, 40), (10_000, 150_000, 64),
        (10_000, 1_000_000, 256), (100_000, 300_000, 32),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.float64):
            facts = {"rows": count, "entries": entries, "columns": columns, "dtype": str(dtype)}
            places = torch.randint(count, (2, entries), device="cuda")
            values = torch.rand(entries, device="cuda", dtype=dtype)
            loose = torch.sparse_coo_tensor(places, values, (count, count))
            dense = torch.randn(count, columns, device="cuda", dtype=dtype, requires_grad=True)
            tight = probes(loose.coalesce, op="coalesce", **facts)
            facts["kept"] = tight._nnz()
            compressed = probes(tight.to_sparse_csr, op="to_sparse_csr", **facts)
            probes(lambda: tight.t().coalesce(), op="t coalesce", **facts)
            for name, matrix in (("loose", loose), ("tight", tight), ("compressed", compressed)):
                out = probes(lambda: torch.sparse.mm(matrix, dense), op=f"sparse.mm {name}", **facts)
                if out is not None:
                    given = torch.ones_like(out)
                    probes(lambda: out.backward(given), op=f"sparse.mm {name} backward", **facts)
                probes(lambda: matrix @ dense.detach(), op=f"matmul {name}", **facts)
            learned = torch.sparse_coo_tensor(places, values.clone().requires_grad_(), (count, count))
            out = probes(lambda: torch.sparse.mm(learned, dense), op="sparse.mm learned", **facts)
            if out is not None:
                given = torch.ones_like(out)
                probes(lambda: out.backward(given), op="sparse.mm learned backward", **facts)


ROWS = (
    (1, 1000), (1, 100_000), (1, 4_000_000), (8, 50_000), (2048, 1024), (64, 4096), (30_000, 64),
    (512, 16_384), (32, 131_072),
)  # fmt: skip
"""Rows and their length."""
TABLES = (
    (30_000, 300, 5120),
    (30_000, 512, 5120),
    (50_257, 768, 16_384),
    (1000, 64, 2048),
    (200_000, 64, 8192),
)
"""Words, width and indices of an embedding."""
IMAGES = (
    (8, 64, 128, 128), (8, 256, 128, 128), (8, 150, 128, 128), (2, 32, 16, 16), (32, 64, 64, 32),
    (16, 512, 14, 14),
)  # fmt: skip


def probe_others(probes: Probes) -> None:
    """Sorting, scattering, scans, images and norms."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    for slices, size in ROWS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            facts = {"slices": slices, "size": size, "dtype": str(dtype)}
            source = (torch.rand(slices, size, device="cuda") * 30_000).to(dtype)
            whole = torch.randint(size, (slices, size), device="cuda")
            probes(lambda: source.topk(min(32, size), -1), op="topk 32", **facts)
            probes(lambda: source.topk(size // 2, -1), op="topk half", **facts)
            probes(lambda: source.sort(-1), op="sort", **facts)
            probes(lambda: source.sort(dim=-1, stable=True), op="stable sort", **facts)
            probes(lambda: source.argsort(-1), op="argsort", **facts)
            probes(lambda: source.cumsum(-1), op="cumsum", **facts)
            probes(lambda: source.t().cumsum(0), op="cumsum over columns", **facts)
            probes(lambda: torch.unique(source), op="unique", **facts)
            probes(lambda: torch.unique(source, return_inverse=True), op="unique inverse", **facts)
            probes(lambda: source.argmax(-1), op="argmax", **facts)
            probes(lambda: source.max(-1), op="max", **facts)
            probes(lambda: source.sum(-1), op="sum", **facts)
            probes(lambda: source.sum(), op="sum all", **facts)
            probes(lambda: (source > 15_000).nonzero(), op="nonzero", **facts)
            probes(lambda: source[source > 15_000], op="masked", **facts)
            probes(lambda: source.scatter_add(-1, whole, source), op="scatter_add", **facts)
            probes(lambda: source.gather(-1, whole), op="gather", **facts)
            if slices > 1:
                rows = torch.randint(slices, (slices,), device="cuda")
                probes(lambda: source.index_add(0, rows, source), op="index_add", **facts)
                probes(
                    lambda: source.index_put((rows,), source, accumulate=True),
                    op="index_put accumulate",
                    **facts,
                )
                probes(lambda: source.index_select(0, rows), op="index_select", **facts)
            if dtype is not torch.int64:
                probes(lambda: source.median(-1), op="median", **facts)
                probes(lambda: source.logsumexp(-1), op="logsumexp", **facts)
                probes(lambda: source.std(-1), op="std", **facts)
                probes(lambda: source.norm(), op="norm", **facts)
                if size < 2**24:
                    probes(lambda: torch.multinomial(source.abs() + 1, 4), op="multinomial", **facts)
            probes(lambda: torch.randperm(slices * size, device="cuda"), op="randperm", **facts)
    for words, width, count in TABLES:
        ids = torch.randint(words, (count,), device="cuda")
        for dtype in (torch.float32, torch.bfloat16):
            facts = {"words": words, "width": width, "count": count, "dtype": str(dtype)}
            given = torch.randn(count, width, device="cuda", dtype=dtype)
            for padding in (-1, 0):
                probes(
                    lambda: torch.ops.aten.embedding_dense_backward(given, ids, words, padding, False),
                    op="embedding_dense_backward",
                    padding=padding,
                    **facts,
                )
    _probe_images(probes, functional)


def _probe_images(probes: Probes, functional: Any) -> None:
    import torch

    for shape in IMAGES:
        for dtype in (torch.float32, torch.bfloat16):
            for last in (False, True):
                facts = {"shape": shape, "dtype": str(dtype), "last": last}
                layout = torch.channels_last if last else torch.contiguous_format
                image = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)
                image.requires_grad_()
                channels = shape[1]
                scale = torch.ones(channels, device="cuda", requires_grad=True)
                half = scale.detach().to(dtype).requires_grad_()
                moved, spread = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
                ids = torch.randint(channels, (shape[0], *shape[2:]), device="cuda")
                depth = torch.randn(channels, 1, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
                point = torch.randn(64, channels, 1, 1, device="cuda", dtype=dtype, requires_grad=True)
                sides = shape[2:]

                def double(mode: str, image: Any = image, sides: Any = sides) -> Any:
                    size = [2 * side for side in sides]
                    corners = {} if mode in ("nearest", "area") else {"align_corners": False}
                    return functional.interpolate(image, size, mode=mode, **corners)

                runs: dict[str, Callable[[], Any]] = {
                    "bilinear": lambda: double("bilinear"),
                    "nearest": lambda: double("nearest"),
                    "bicubic": lambda: double("bicubic"),
                    "batch_norm": lambda: functional.batch_norm(
                        image, moved, spread, scale, scale, training=True
                    ),
                    "group_norm": lambda: functional.group_norm(image, 2, half, half),
                    "instance_norm": lambda: functional.instance_norm(image, None, None, half, half),
                    "max last": lambda: image.max(-1).values,
                    "max_pool": lambda: functional.max_pool2d(image, 2),
                    "adaptive_pool": lambda: functional.adaptive_avg_pool2d(image, 1),
                    "mean": lambda: image.mean((2, 3)),
                    "cross_entropy": lambda: functional.cross_entropy(image.float(), ids),
                    "softmax channels": lambda: image.softmax(1),
                    "depthwise": lambda: functional.conv2d(image, depth, padding=1, groups=channels),
                    "pointwise": lambda: functional.conv2d(image, point),
                    "gelu": lambda: functional.gelu(image),
                    "dropout2d": lambda: functional.dropout2d(image, 0.1),
                    "bias": lambda: image + half[None, :, None, None],
                }
                for name, run in runs.items():
                    out = probes(run, op=name, phase="forward", **facts)
                    if out is not None:
                        given = torch.ones_like(out)
                        probes(lambda: out.backward(given), op=name, phase="backward", **facts)
                    image.grad = scale.grad = half.grad = depth.grad = point.grad = None


PROBES: dict[str, Callable[[Probes], None]] = {
    "recurrent": probe_recurrent,
    "volumes": probe_volumes,
    "sparse": probe_sparse,
    "others": probe_others,
}


def record_probes(group: str, file: Path) -> None:
    """Run one group of single operations."""
    probes = Probes()
    try:
        PROBES[group](probes)
    finally:
        probes.write(file)
    print(group, len(probes.lines), flush=True)


def record_all(folder: Path, only: str) -> None:
    """Everything, in processes side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [("probe", name) for name in PROBES] + [("job", name) for name in JOBS]
    tasks = [task for task in tasks if not only or task[1] in only.split(",")]

    def record(task: tuple[str, str]) -> None:
        began = time.monotonic()
        command = [sys.executable, __file__, *task, str(folder / f"{task[1]}.json.gz")]
        env = os.environ | {"OMP_NUM_THREADS": "2"}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            said = done.stdout[-300:] + (done.stderr[-1500:] if done.returncode else "")
        except subprocess.TimeoutExpired:
            said = f"{task[1]}: no answer in {SECONDS:.0f} s"
        print(f"{time.monotonic() - began:5.1f} s  {said.strip()}", flush=True)

    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(record, tasks))


def main() -> None:
    """Read the command line."""
    verb, *rest = sys.argv[1:]
    if verb == "job":
        record_job(rest[0], Path(rest[1]))
    elif verb == "probe":
        record_probes(rest[0], Path(rest[1]))
    else:
        record_all(Path(rest[0]), rest[1] if len(rest) > 1 else "")


if __name__ == "__main__":
    main()
