"""Train with several processes that share one GPU (gloo), inject faults, and measure NCCL's own buffers.

    python bench/shared_gpu.py --device cpu --out shared.jsonl            every case without a GPU
    python bench/shared_gpu.py --out shared.jsonl --jobs 3                every case on the GPU
    python bench/shared_gpu.py --only ddp-2,fsdp-4 --out shared.jsonl     some of them
    python bench/shared_gpu.py --soak 300 --out shared.jsonl              a hundred faults in one run
    python bench/shared_gpu.py --compare cpu.jsonl gpu.jsonl              losses, and memory as predicted

Each case is one `trimtab train` with its own process group. The program writes a JSON line for each case,
with the hardware and versions. Cases that are in the file already are skipped, so that it can be resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve()
MEMORY_FOLDER = "SHARED_GPU_MEMORY"
"""Environment variable with a folder: each rank writes its peak memory there."""
CASE_S = 240.0
"""Seconds after which a case is given up."""
SAME_LOSS = 2e-5
"""Relative difference of losses in fp32 between devices."""
VOCABULARY, LENGTH, WIDTH = 512, 64, 256


# ---------------------------------------------------------------------------------------------- jobs


def note_memory() -> None:
    """Write this rank's peak memory, if a folder for it is named."""
    folder = os.environ.get(MEMORY_FOLDER)
    if folder and torch.cuda.is_available():
        values = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        Path(folder, os.environ.get("RANK", "0")).write_text(json.dumps(values), encoding="utf-8")


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inward, self.outward = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the layer."""
        normal = self.norm(hidden)
        heads = [
            part(normal).unflatten(-1, (8, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        output: torch.Tensor = hidden + self.outward(functional.gelu(self.inward(self.norm_inner(hidden))))
        return output


class DecoderModel(nn.Module):
    """A small decoder."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Decoder:
    """Next tokens of random sequences."""

    name = "decoder"
    global_batch, samples, epochs = 16, 256, 100
    layers = 4
    greedy_rank, greedy_at = -1, 6

    def __init__(self) -> None:
        self.calls = 0
        self.hoard: list[torch.Tensor] = []

    def model(self) -> nn.Module:
        """Return the model."""
        return DecoderModel(self.layers)

    def batch(self, size: int) -> torch.Tensor:
        """Return random tokens."""
        return torch.randint(0, VOCABULARY, (size, LENGTH))

    def dataset(self) -> torch.Tensor:
        """Return the same tokens in every process."""
        return torch.randint(
            0, VOCABULARY, (self.samples, LENGTH), generator=torch.Generator().manual_seed(0)
        )

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token; a greedy rank runs out of memory once, for real."""
        self.calls += 1
        if self.calls == self.greedy_at and os.environ.get("RANK") == str(self.greedy_rank):
            # Processes that were started again are not greedy again.
            marker = Path(os.environ[MEMORY_FOLDER]).with_name("greedy")
            if not marker.exists():
                marker.touch()
                self._take_all(batch.device)
        logits = model(batch)[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        note_memory()
        return loss

    def _take_all(self, device: torch.device) -> None:
        """Allocate more than the device has, in this process alone."""
        if device.type != "cuda":
            raise torch.OutOfMemoryError("no memory, as if this were a GPU")
        torch.empty(torch.cuda.mem_get_info(device)[1], dtype=torch.uint8, device=device)


class Towers(Decoder):
    """Two frozen towers behind a shared encoder: the loss is a sum over branches."""

    name = "towers"
    branches: ClassVar[dict[str, str]] = {"wide": "towers.wide", "deep": "towers.deep"}

    def model(self) -> nn.Module:
        """Return the encoder, its adapters and the towers."""

        def make_tower(width: int, depth: int) -> nn.Module:
            layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
            return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 8)).requires_grad_(False)

        parts = {
            "encoder": nn.Linear(LENGTH, 64),
            "adapters": nn.ModuleDict({name: nn.Linear(64, 64) for name in self.branches}),
            "towers": nn.ModuleDict({"wide": make_tower(1024, 2), "deep": make_tower(512, 3)}),
        }
        return nn.ModuleDict(parts)

    def losses(self, model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of each branch."""
        hidden = model.encoder(batch.float() / VOCABULARY)
        note_memory()
        return {
            name: functional.cross_entropy(model.towers[name](model.adapters[name](hidden)), batch[:, 0] % 8)
            for name in self.branches
        }

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the sum over the branches."""
        total: torch.Tensor = sum(self.losses(model, batch).values())  # type: ignore[assignment]
        return total


class ExpertLayer(nn.Module):
    """Experts as stacked weights."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.outward = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of the chosen experts."""
        output = torch.zeros_like(hidden)
        for expert in range(self.inward.shape[0]):
            token, choice = torch.where(index == expert)
            inner = functional.gelu(hidden[token] @ self.inward[expert]) @ self.outward[expert]
            output = output.index_add(0, token, (inner * weights[token, choice, None]).to(output.dtype))
        return output


class ExpertBlock(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.feed = ExpertLayer(4, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the experts."""
        tokens = self.norm(hidden).flatten(0, 1)
        weights, index = torch.topk(torch.softmax(self.router(tokens), -1), 2)
        fed: torch.Tensor = self.feed(tokens, index, weights)
        return hidden + fed.view_as(hidden)


class Experts(Decoder):
    """A decoder of experts alone."""

    name = "experts"
    expert_modules: ClassVar[tuple[str, ...]] = ("blocks.*.feed",)

    def model(self) -> nn.Module:
        """Return the model."""
        model = DecoderModel(0)
        model.blocks.extend(ExpertBlock() for _ in range(2))
        return model


class Soak(Decoder):
    """A small model in float64, so that its losses do not depend on how the batch is split."""

    name = "soak"
    global_batch, samples = 64, 400

    def model(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()

    def batch(self, size: int) -> Any:
        """Return random inputs and targets."""
        return [torch.randn(size, 8, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)]

    def dataset(self) -> Any:
        """Return the same samples in every process."""
        x = torch.randn(self.samples, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the mean squared error."""
        loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
        return loss


# --------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """One run of several processes."""

    name: str
    job: str = "Decoder"
    procs: int = 2
    pins: str = ""
    faults: tuple[dict[str, Any], ...] = ()
    options: tuple[str, ...] = ()
    steps: int = 8


def list_cases() -> Iterator[SharedCase]:
    """Yield every case: the strategies, then faults under ddp and fsdp."""
    yield SharedCase(name="single-1", procs=1)
    for procs in (2, 4):
        yield SharedCase(name=f"ddp-{procs}", procs=procs, pins="strategy=ddp")
        yield SharedCase(name=f"fsdp-{procs}", procs=procs, pins="strategy=fsdp")
        yield SharedCase(name=f"pipeline-{procs}", procs=procs, pins=f"pp={procs}")
    yield SharedCase(name="towers-1", job="Towers", procs=1)
    yield SharedCase(name="branch-2", job="Towers", pins="strategy=branch")
    yield SharedCase(name="hybrid-4", job="Towers", procs=4, pins="strategy=hybrid")
    yield SharedCase(name="tp-2", pins="tp=2")
    yield SharedCase(name="slm-1", job="slm:tiny", procs=1)
    yield SharedCase(name="cp-2", job="slm:tiny", pins="cp=2")
    yield SharedCase(name="experts-1", job="Experts", procs=1)
    yield SharedCase(name="ep-2", job="Experts", pins="ep=2")
    yield SharedCase(name="sharded-pipeline-4", procs=4, pins="pp=2,dp_shard=2")
    yield SharedCase(name="split-pipeline-4", procs=4, pins="pp=2,tp=2")
    # hsdp copies across nodes, so that on one node only the stages of a pipeline are sharded and copied.
    yield SharedCase(name="hsdp-pipeline-8", procs=8, pins="pp=2,dp_replicate=2,dp_shard=2")
    faults = {
        "oom": {"kind": "out-of-memory", "step": 3, "rank": 1, "point": "backward"},
        "kill": {"kind": "kill", "step": 4, "rank": 1},
        "stall": {"kind": "slow", "step": 4, "rank": 1, "seconds": 5},
        "nan": {"kind": "not-a-number", "step": 3, "rank": 1},
    }
    for strategy in ("ddp", "fsdp"):
        for word, fault in faults.items():
            yield SharedCase(name=f"{strategy}-2-{word}", pins=f"strategy={strategy}", faults=(fault,))
        yield SharedCase(
            name=f"{strategy}-2-real-oom", pins=f"strategy={strategy}", options=("--set", "greedy_rank=1")
        )


def run_case(case: SharedCase, device: str) -> dict[str, Any]:
    """Train a case; return its losses, its events, the memory of each rank and how it ended."""
    with tempfile.TemporaryDirectory(prefix="trimtab-shared-") as home:
        folder = Path(home)
        memory = folder / "memory"
        memory.mkdir()
        env = os.environ | {"TRIMTAB_SHARE_GPU": "1", MEMORY_FOLDER: str(memory), "TRIMTAB_PROGRESS": "0"}
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        job = case.job if ":" in case.job else f"{HERE}:{case.job}"
        command = [sys.executable, "-m", "trimtab", "train", job, "--procs", str(case.procs)]
        command += ["--steps", str(case.steps), "--out", str(folder / "run"), *case.options]
        pins = case.pins or "strategy=single"
        command += ["--pin", f"{pins},precision=fp32"]
        if case.faults:
            (folder / "faults.json").write_text(json.dumps(case.faults), encoding="utf-8")
            command += ["--faults", str(folder / "faults.json")]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, timeout=CASE_S, check=False
            )
            code, said = done.returncode, done.stderr[-1500:]
        except subprocess.TimeoutExpired as error:
            code, said = -1, f"given up after {CASE_S:.0f} s: {(error.stderr or b'')[-800:]!r}"
        lines, events = (read_lines(folder / "run" / name) for name in ("log.jsonl", "events.jsonl"))
        plan = folder / "run" / "plan.json"
        return {
            "case": case.name,
            "exit_code": code,
            "seconds": round(time.monotonic() - began, 1),
            "losses": [line["loss"] for line in lines],
            "step_s": [round(line["time_s"], 4) for line in lines],
            "events": [[event["kind"], event["step"], event["rank"]] for event in events],
            "memory": {file.name: json.loads(file.read_text()) for file in sorted(memory.iterdir())},
            "setting": json.loads(plan.read_text())["choice"] if plan.exists() else None,
            "said": "" if code == 0 else said.replace(f"{HERE.parents[1]}{os.sep}", ""),
        }


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file; none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# -------------------------------------------------------------------------------------------- probes


def probe_collectives(rank: int, size: int, device: str, port: int, out: str) -> None:
    """Try each collective of gloo on tensors of a device; write what works."""
    import torch.distributed as dist

    backend = f"cpu:gloo,{device}:gloo" if device != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    one, many = torch.ones(4, device=device), [torch.ones(4, device=device) for _ in range(size)]
    whole = torch.ones(4 * size, device=device)
    peer = 1 - rank
    trials = {
        "all_reduce": lambda: dist.all_reduce(one),
        "broadcast": lambda: dist.broadcast(one, 0),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather(many, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "gather": lambda: dist.gather(one, many if rank == 0 else None),
        "scatter": lambda: dist.scatter(one, many if rank == 0 else None),
        "send and recv": lambda: dist.send(one, peer) if rank == 0 else dist.recv(one, peer),
        "batched send and recv": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, one, peer), dist.P2POp(dist.irecv, torch.empty_like(one), peer)]
            )
        ],
    }
    results = {}
    for name, trial in trials.items():
        try:
            trial()  # type: ignore[no-untyped-call]
            if device != "cpu":
                torch.cuda.synchronize()
            results[name] = "runs"
        except Exception as error:  # noqa: BLE001 - what cannot run is the result
            results[name] = str(error).splitlines()[0][:160]
        if rank == 0:
            # gloo ends the process where it sends from GPU memory: what ran before that is kept.
            Path(out).write_text(json.dumps(results))


def probe_nccl(channels: int | None) -> dict[str, Any]:
    """Measure the memory that an NCCL communicator of one rank takes, with a number of channels."""
    code = """
import json, torch, torch.distributed as dist
torch.cuda.init(); torch.ones(1, device="cuda"); torch.cuda.synchronize()
before = torch.cuda.mem_get_info()[0]
store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
created = torch.cuda.mem_get_info()[0]
x = torch.ones(1 << 20, device="cuda")
own = torch.cuda.memory_reserved()
dist.all_reduce(x); torch.cuda.synchronize()
used = torch.cuda.mem_get_info()[0]
group = dist.new_group([0]); dist.all_reduce(x, group=group); torch.cuda.synchronize()
second = torch.cuda.mem_get_info()[0]
sizes = {"created": before - created, "all_reduce": before - used - own, "second_group": used - second}
print(json.dumps(sizes | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}))
"""
    env = dict(os.environ)
    if channels is not None:
        env |= {"NCCL_MIN_NCHANNELS": str(channels), "NCCL_MAX_NCHANNELS": str(channels)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {"said": done.stderr[-600:]}
    return {"case": f"nccl-1-channels-{channels or 'default'}"} | result


def run_probes(device: str) -> Iterator[dict[str, Any]]:
    """Yield which collectives gloo has for the device, and NCCL's buffers on a GPU."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out.json")
        port = 29500 + os.getpid() % 2000
        try:
            spawn(_probe_rank, (2, device, port, out), nprocs=2)  # type: ignore[no-untyped-call]
            yield {"case": "gloo-collectives", "collectives": json.loads(Path(out).read_text())}
        except Exception as error:  # noqa: BLE001 - a crash of a rank is a result too
            ran = json.loads(Path(out).read_text()) if Path(out).exists() else {}
            yield {"case": "gloo-collectives", "collectives": ran, "said": str(error)[-600:]}
    if device != "cpu":
        for channels in (None, 1, 2, 4, 8, 16, 32):
            yield probe_nccl(channels)


def _probe_rank(rank: int, size: int, device: str, port: int, out: str) -> None:
    probe_collectives(rank, size, device, port, out)


# ---------------------------------------------------------------------------------------------- soak


def draw_faults(random: Random, steps: int, ranks: int) -> list[dict[str, Any]]:
    """Draw a hundred faults over the steps and ranks of a run."""

    def place() -> dict[str, Any]:
        return {"step": random.randrange(2, steps - 6), "rank": random.randrange(ranks)}

    faults = [
        *(
            {"kind": "out-of-memory", "point": random.choice(["forward", "backward"]), **place()}
            for _ in range(20)
        ),
        *({"kind": "out-of-memory", "point": "optimizer", **place()} for _ in range(15)),
        *(
            {"kind": "not-a-number", "step": step, "rank": random.randrange(ranks)}
            for step in random.sample(range(2, steps - 6), 27)
        ),
        *({"kind": "slow", "seconds": random.uniform(0.05, 0.5), **place()} for _ in range(20)),
        *({"kind": "full-disk", "step": random.randrange(2, steps - 6)} for _ in range(6)),
        *({"kind": "kill", "point": random.choice(["forward", "backward"]), **place()} for _ in range(7)),
        {"kind": "terminate", **place()},
    ]
    for step in random.sample(range(2, steps - 8), 2):
        faults += [
            {"kind": "torn-checkpoint", "step": step},
            {"kind": "kill", "step": step + 5, "rank": random.randrange(ranks)},
        ]
    return faults


def run_soak(device: str, limit_s: float) -> dict[str, Any]:
    """Put a hundred faults into one run of two processes; compare its losses with those of a calm one."""
    steps = 160
    env = os.environ | {"TRIMTAB_SHARE_GPU": "1", "TRIMTAB_PROGRESS": "0"}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="trimtab-soak-") as home:
        folder = Path(home)
        faults = draw_faults(Random(0), steps, 2)  # noqa: S311 - the same faults in every soak
        (folder / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
        shared = ["train", f"{HERE}:Soak", "--steps", str(steps), "--pin", "precision=fp32"]
        calm = [*shared, "--procs", "1", "--out", str(folder / "calm")]
        rough = [
            *shared,
            "--procs",
            "2",
            "--out",
            str(folder / "rough"),
            "--faults",
            str(folder / "faults.json"),
        ]
        rough += ["--checkpoint-every", "5", "--restarts", "100"]
        began = time.monotonic()
        codes = []
        for command in (calm, rough):
            left = limit_s - (time.monotonic() - began)
            with (folder / "output.txt").open("ab") as output:
                try:
                    codes.append(
                        subprocess.run(
                            [sys.executable, "-m", "trimtab", *command],
                            env=env,
                            stdout=output,
                            stderr=output,
                            timeout=max(1.0, left),
                            check=False,
                        ).returncode
                    )
                except subprocess.TimeoutExpired:
                    codes.append(-1)
        logs = [read_lines(folder / name / "log.jsonl") for name in ("calm", "rough")]
        happened = [event["kind"] for event in read_lines(folder / "rough" / "events.jsonl")]
        pairs = list(zip(*logs, strict=False))
        worst = max(
            (abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs if b["loss"]), default=None
        )
        return {
            "case": "soak",
            "exit_codes": codes,
            "faults": len(faults),
            "events": {kind: happened.count(kind) for kind in sorted({*happened})},
            "steps": len(logs[1]),
            "worst_loss_difference": worst,
            "same_samples": [sorted(a.get("indices") or ()) for a, _ in pairs if a.get("indices")]
            == [sorted(b.get("indices") or ()) for a, b in pairs if a.get("indices")],
            "seconds": round(time.monotonic() - began, 1),
            "said": (folder / "output.txt").read_text(errors="replace")[-1500:] if any(codes) else "",
        }


# ----------------------------------------------------------------------------------------- the program


def describe_machine(device: str) -> dict[str, str]:
    """Return the hardware and the versions, for each line."""
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def predict_memory(result: dict[str, Any], gpu: str) -> int | None:
    """Return the allocated bytes that trimtab predicts for a rank of a case; None if it cannot say."""
    import trimtab
    from trimtab.errors import TrimtabError
    from trimtab.spec import Setting

    case = next(case for case in list_cases() if case.name == result["case"])
    setting = Setting.from_builtins(result["setting"])
    job = case.job if ":" in case.job else f"{HERE}:{case.job}"
    try:
        plan = trimtab.plan(job, f"{case.procs}x{gpu}", pins=dict(_pin_setting(setting)))
    except TrimtabError as error:
        print(f"{case.name}: {error}")
        return None
    return plan.estimate.allocated_bytes


def _pin_setting(setting: Any) -> Iterator[tuple[str, Any]]:
    yield "strategy", setting.strategy
    yield "micro_batch", setting.micro_batch
    yield "precision", "fp32"
    yield "compile", False
    yield "recompute", setting.recompute
    yield "gpus", setting.gpus
    for degree in ("dp_replicate", "dp_shard", "pp", "tp", "cp", "ep"):
        yield degree, getattr(setting.mesh, degree)


def compare_results(reference: Path, measured: Path, gpu: str) -> None:
    """Print the losses of a file beside those of another, and memory beside predictions."""
    expected = {line["case"]: line for line in read_lines(reference)}
    for line in read_lines(measured):
        before = expected.get(line["case"])
        if before is None or "losses" not in line:
            continue
        pairs = list(zip(before["losses"], line["losses"], strict=False))
        worst = max((abs(a - b) / abs(a) for a, b in pairs if a and b), default=float("nan"))
        alike = len(before["losses"]) == len(line["losses"]) and worst < SAME_LOSS
        peak = max((rank["allocated"] for rank in line["memory"].values()), default=0)
        guess = predict_memory(line, gpu) if peak and line["exit_code"] == 0 and gpu else None
        share = "" if not guess else f", predicted {guess / 2**20:.1f} ({guess / peak - 1:+.1%})"
        print(
            f"{line['case']:<20} exit {line['exit_code']}, {len(line['losses'])} steps, losses "
            f"{'equal' if alike else 'DIFFER'} to {worst:.1e}, peak {peak / 2**20:.1f} MiB{share}",
            flush=True,
        )


def main() -> None:
    """Run the cases that are not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case is started")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")
    parser.add_argument("--gpu", default="", help="with --compare: predict memory for this GPU")
    options = parser.parse_args()
    if options.compare:
        compare_results(options.compare[0], options.compare[1], options.gpu)
        return
    about = describe_machine(options.device)
    began = time.monotonic()

    def write(result: dict[str, Any]) -> None:
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result | about) + "\n")
        words = {key: result[key] for key in ("exit_code", "seconds", "events", "said") if result.get(key)}
        print(result["case"], words, flush=True)

    if options.soak:
        write(run_soak(options.device, options.soak))
        return
    done = {line["case"] for line in read_lines(options.out)}
    wanted = {*filter(None, options.only.split(","))}
    cases = [case for case in list_cases() if case.name not in done and (not wanted or case.name in wanted)]
    if not wanted and "gloo-collectives" not in done:
        for result in run_probes(options.device):
            write(result)

    def run(case: SharedCase) -> None:
        if time.monotonic() - began < options.limit:
            write(run_case(case, options.device))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, cases))


if __name__ == "__main__":
    main()
