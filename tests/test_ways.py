"""Pipelines and uneven branches over gloo: every way to spread a job learns what one process learns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import trimtab
from trimtab.engine.pipeline_stage import (
    RemoteBlock,
    count_head_weights,
    find_block_chain,
    keep_stage,
)
from trimtab.errors import JobFailed, NothingFits, WrongUse
from trimtab.spec import Mesh, Recompute, Schedule, Setting, Strategy
from trimtab.strategies.schedules import Pass, PipelineShape, build_actions
from trimtab.training import process_group
from trimtab.training.bad_steps import find_bad_module, keep_fp32
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.loading import wrap_batch
from trimtab.training.pipeline import NeighbourFailed
from trimtab.training.run import Run
from worlds import Drill, everywhere

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE, STEPS, VOCAB, WIDTH = 10, 4, 11, 8


pytestmark = pytest.mark.usefixtures("doubles")


class Block(nn.Module):
    kind = "plain"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.mode = "tanh"

    def forward(self, x: torch.Tensor, side: torch.Tensor, *, first: torch.Tensor) -> Any:
        return x + self.drop(self.down(torch.tanh(self.up(x) * side))) + 0.1 * first


class Net(nn.Module):
    """A tied head, a learned side input for every block, and the first embedding again in each of them."""

    def __init__(self, depth: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.side = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(depth)])
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> Any:
        first = x = self.tokens(tokens)
        side = torch.sigmoid(self.side)
        for block in self.blocks:
            assert block.mode == "tanh"
            x = block(x, side, first=first)
        return functional.linear(self.norm(self.frozen(x)), self.tokens.weight)


def network(seed: int = 0, depth: int = 5, dropout: float = 0.0) -> Net:
    torch.manual_seed(seed)
    return Net(depth, dropout)


def data(step: int, count: int = WHOLE) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    mask = torch.rand(count, 6, generator=made) > 0.4
    # One sample counts for nothing at all.
    mask[count // 3] = False
    tokens = torch.randint(VOCAB, (count, 7), generator=made)
    return {"tokens": tokens, "mask": mask.double()}


def sparse(step: int) -> dict[str, torch.Tensor]:
    """The same, but that the first half of the samples counts for nothing, and all in the first step."""
    found = data(step)
    found["mask"][: WHOLE // 2 if step else WHOLE] = 0.0
    return found


def loss(model: Any, batch: Any) -> Any:
    each = functional.cross_entropy(
        model(batch["tokens"][:, :-1]).flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none"
    )
    return (each * batch["mask"].flatten()).sum() / batch["mask"].sum()


def tokens(batch: Any) -> Any:
    return batch["mask"].sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {name: cut(value, start, stop) for name, value in batch.items()}
    return batch[start:stop]


class Truth:
    """What one process learns from the whole batches, by hand."""

    def __init__(self, model: Any, compute: Any, batches: list[Any], clip: float | None = None) -> None:
        optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
        self.losses, self.norms = [], []
        for batch in batches:
            optimizer.zero_grad()
            found = compute(model, batch)
            found.backward()
            most = float("inf") if clip is None else clip
            self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), most)))
            optimizer.step()
            self.losses.append(found.item())
        self.state = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def check(self, found: Any, within: float = 1e-10) -> None:
        outcomes, state = found
        assert [outcome.loss for outcome in outcomes] == pytest.approx(self.losses, rel=within)
        assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(self.norms, rel=within)
        assert not any(outcome.skipped for outcome in outcomes)
        for name, value in state.items():
            assert (value - self.state[name]).abs().max() < within, name


@contextlib.contextmanager
def among(size: int) -> Iterator[bool]:
    """A world of the first ranks; False on the others, which stay out of it."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    before = os.environ["WORLD_SIZE"]
    os.environ["WORLD_SIZE"] = str(size)
    here = int(os.environ["RANK"]) < size
    if not here and size > 1:
        # Ranks meet by the number of the meeting.
        next(process_group._RENDEZVOUS)  # noqa: SLF001
    try:
        yield here
    finally:
        os.environ["WORLD_SIZE"] = before


def pipeline(stages: int, copies: int = 1, micro: int = 3, **others: Any) -> Setting:
    share = -(-WHOLE // copies)
    return Setting(
        strategy=Strategy.PIPELINE, mesh=Mesh(pp=stages, dp_replicate=copies), micro_batch=micro,
        accumulation=-(-share // micro), global_batch=WHOLE, **others,
    )  # fmt: skip


def trained(run: Run, model: Any, batches: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    places = [number * WHOLE // run.groups.data_parallel for number in range(run.groups.data_parallel + 1)]
    mine = run.groups.data_rank
    outcomes = [run.step(cut(batch, places[mine], places[mine + 1])) for batch in batches]
    state = model.state_dict()
    return outcomes, {
        name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in state.items()
    }


def piped(
    setting: Setting, *, drill: Any = None, clip: float | None = None, depth: int = 5, batches: Any = data
) -> Any:
    with Run(setting, faults=drill, join_s=60) as run:
        # Another seed on every rank for what all hold; blocks are as their own rank built them.
        model, _ = run.prepare(network(0, depth), sgd, loss=loss, weight=tokens, clip=clip)
        return trained(run, model, [batches(step) for step in range(STEPS)])


def fails_at(rank: int) -> Any:
    """A loss with a bug that one rank meets in its second part."""
    calls = []

    def broken(model: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) > 1 and int(os.environ["RANK"]) == rank:
            raise ValueError("a bug of the job")
        return loss(model, batch)

    return broken


def failing(rank: int, setting: Setting | None = None) -> str:
    with Run(setting or pipeline(3), join_s=60) as run:
        run.prepare(network(), sgd, loss=fails_at(rank), weight=tokens)
        try:
            run.step(data(0))
        except (ValueError, NeighbourFailed) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


class Endless(nn.Module):
    """What it returns is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


class Steep(nn.Module):
    """What it returns is finite, and its gradient is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x - x)


def suspected(setting: Setting | None = None, depth: int = 5) -> dict[str, Any]:
    """What a pipeline of three finds, with a bad module in each of its stages and phases."""
    found: dict[str, Any] = {}
    with Run(setting or pipeline(3), join_s=60) as run:
        model, _ = run.prepare(network(0, depth), sgd, loss=loss, weight=tokens)
        window = wrap_batch(data(0))
        found["none"] = find_bad_module(run, window)
        for kind in (Endless(), Steep()):
            for number, block in enumerate(model.blocks):
                mine = not isinstance(block, RemoteBlock)
                if mine:
                    good, block.drop = block.drop, kind
                found[f"{type(kind).__name__} {number}"] = find_bad_module(run, window)
                if mine:
                    block.drop = good
        # Whoever has a block widens it; the others still hand over what they are given.
        found["kept"] = [keep_fp32(model, f"blocks.{number}") for number in range(depth)]
        found["trained"] = trained(run, model, [data(step) for step in range(STEPS)])
    return found


class Full:
    """Rank 1 has no memory for anything."""

    def at(self, point: str, step: int, rank: int) -> None:
        del step
        if point == "forward" and rank == 1:
            raise torch.OutOfMemoryError("full")


def out_of_memory(setting: Setting | None = None) -> str:
    try:
        piped(setting or pipeline(3, micro=1), drill=Full())
    except NothingFits as error:
        return str(error)
    return "nothing"


def kept(folder: Path) -> dict[str, Any]:
    """Two steps of a pipeline of two, then two of one process, then two of a pipeline of four."""
    alone = Setting(micro_batch=5, accumulation=2, global_batch=WHOLE)
    return resumed(folder, [pipeline(2), alone, pipeline(4)])


def resumed(folder: Path, settings: list[Setting]) -> dict[str, Any]:
    """Two steps under each setting in turn, each from the checkpoint of the one before."""
    found = {}
    for number, setting in enumerate(settings):
        with among(setting.gpus) as here:
            if not here:
                continue
            with Run(setting, join_s=60) as run:
                model, optimizer = run.prepare(network(number), torch.optim.AdamW, loss=loss, weight=tokens)
                objects = {"model": model, "optimizer": optimizer}
                keeper = CheckpointManager(folder)
                assert (keeper.load_latest(objects) is None) == (number == 0)
                batches = [data(2 * number), data(2 * number + 1)]
                found[f"kept {number}"] = trained(run, model, batches)
                keeper.save(number + 1, objects, wait=True)
                assert keeper.last_saved == number + 1
    return found


def evaluated_loss(setting: Setting) -> float:
    from trimtab.training.evaluation import evaluate_run

    samples = data(7)
    dataset = [{name: value[number] for name, value in samples.items()} for number in range(WHOLE)]
    with Run(setting, join_s=60) as run:
        model, _ = run.prepare(network(), sgd, loss=loss, weight=tokens)
        value = evaluate_run(run, dataset)["loss"]
        assert all(module.training for module in model.modules())
        return value


def built_in(name: str, setting: Setting, **given: Any) -> Any:
    job = trimtab.load(name)
    torch.manual_seed(0)
    # Branches are the job's; what else it brings, such as its schedule, has no part in this.
    with Run(setting, job=job if setting.mesh.branch > 1 else None, join_s=60, **given) as run:
        own = {} if setting.mesh.branch > 1 else {"loss": job.loss, "weight": job.weight}
        model, _ = run.prepare(job.model().double(), sgd, **own)
        torch.manual_seed(3)
        return trained(run, model, [job.batch(WHOLE) for _ in range(3)])


def hybrid(*copies: int) -> Setting:
    fewest = min(copies)
    alike = len(set(copies)) == 1
    mesh = Mesh(branch=len(copies), dp_replicate=fewest, copies=() if alike else copies)
    share = -(-WHOLE // fewest)
    return Setting(
        strategy=Strategy.HYBRID, mesh=mesh, micro_batch=2, accumulation=-(-share // 2), global_batch=WHOLE
    )


def all_ways(folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    with among(4):
        found["2 x 2"] = piped(pipeline(2, 2, micro=2), clip=0.3)
    with among(4):
        found["2 x 2 sparse"] = piped(pipeline(2, 2, micro=2), batches=sparse)
    with among(4):
        drill = Drill(("forward", 0, 3), ("backward", 1, 0), ("backward", 1, 3), ("gradient", 2, 2))
        found["2 x 2 drill"] = piped(pipeline(2, 2, micro=2), drill=drill)
    with among(4):
        found["loss"] = evaluated_loss(pipeline(2, 2, micro=2))
    with among(4):
        found["2 + 2"] = built_in("bridge:tiny", hybrid(2, 2))
    with among(3) as here:
        if here:
            found |= {f"suspect {name}": one for name, one in suspected().items()}
    with among(3) as here:
        if here:
            found["3 recomputed"] = piped(pipeline(3, recompute=Recompute.FULL))
    with among(3) as here:
        if here:
            drill = Drill(("forward", 0, 1), ("backward", 1, 0), ("forward", 2, 2), ("backward", 3, 1))
            found["3 drill"] = piped(pipeline(3), drill=drill)
    with among(3) as here:
        if here:
            drill = Drill(("forward", 0, 1), ("backward", 1, 2), ("forward", 1, 0))
            found["2 + 1"] = built_in("bridge:tiny", hybrid(2, 1), faults=drill)
    with among(2) as here:
        if here:
            found["slm"] = built_in("slm:tiny", pipeline(2))
    found |= kept(Path(folder))
    for rank in (0, 1, 2):
        with among(3) as here:
            if here:
                found[f"failing {rank}"] = failing(rank)
    with among(3) as here:
        if here:
            found["full"] = out_of_memory()
    return found


def by_hand(name: str) -> Truth:
    job = trimtab.load(name)
    torch.manual_seed(0)
    model = job.model().double()
    torch.manual_seed(3)
    return Truth(model, job.loss, [job.batch(WHOLE) for _ in range(3)])


def check_suspects(found: dict[str, Any], rank: int) -> None:
    assert found["suspect none"] is None
    for kind, phase in (("Endless", "forward"), ("Steep", "backward")):
        for number in range(5):
            text = found[f"suspect {kind} {number}"]
            assert (text.module, text.kind, text.phase) == (f"blocks.{number}.drop", kind, phase)
    assert found["suspect kept"] == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]][rank]


@pytest.mark.slow
def test_every_way_learns_what_one_process_learns(tmp_path: Path) -> None:
    reports = everywhere(4, all_ways, str(tmp_path), timeout_s=600)
    batches = [data(step) for step in range(STEPS)]
    few = Truth(network(), loss, [sparse(step) for step in range(1, STEPS)])
    plain, clipped = Truth(network(), loss, batches), Truth(network(), loss, batches, 0.3)
    bridge, slm = by_hand("bridge:tiny"), by_hand("slm:tiny")
    with torch.no_grad():
        right = loss(network().eval(), data(7)).item()
    for rank, found in enumerate(reports):
        clipped.check(found["2 x 2"])
        (blank, *others), state = found["2 x 2 sparse"]
        assert (blank.loss, blank.grad_norm, blank.skipped) == (0.0, 0.0, "")
        few.check((others, state))
        plain.check(found["2 x 2 drill"])
        assert [one.attempts for one in found["2 x 2 drill"][0]] == [2, 2, 2, 1]
        assert found["loss"] == pytest.approx(right, rel=1e-12)
        bridge.check(found["2 + 2"])
        if rank < 3:
            plain.check(found["3 recomputed"])
            plain.check(found["3 drill"])
            check_suspects(found, rank)
            plain.check(found["suspect trained"])
            assert [one.attempts for one in found["3 drill"][0]] == [2, 2, 2, 2]
            bridge.check(found["2 + 1"])
            own = {name.partition(".")[0] for name in found["2 + 1"][1]}
            assert own == {"encoder", "adapters", "qwen" if rank == 2 else "llama"}
            for failed in (0, 1, 2):
                kind = "ValueError" if rank == failed else "NeighbourFailed: rank"
                assert found[f"failing {failed}"].startswith(kind)
                assert "a bug of the job" in found[f"failing {failed}"]
            text = "one sample at once ran out of memory" if rank == 1 else "another rank has no memory left"
            assert text in found["full"]
        if rank < 2:
            slm.check(found["slm"])
    blocks = [
        {name.split(".")[1] for name in found["3 drill"][1] if name.startswith("blocks")}
        for found in reports[:3]
    ]
    assert blocks == [{"0", "1"}, {"2", "3"}, {"4"}]
    # A pipeline of two, then one process, then a pipeline of four: each goes on where the last one ended.
    for number, ranks in enumerate((2, 1, 4)):
        truth = adamw(2 * number + 2)
        for found in reports[:ranks]:
            for name, value in found[f"kept {number}"][1].items():
                # Ranks give what nobody uses a gradient of nought, and AdamW then decays it.
                if not name.startswith("unused"):
                    assert (value - truth[name]).abs().max() < 1e-10, name


def adamw(steps: int) -> dict[str, torch.Tensor]:
    model = network()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, data(step)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_a_schedule_has_every_pass_once_and_holds_no_more_than_there_are_stages(
    stages: int, parts: int
) -> None:
    for stage in range(stages):
        turns = build_actions(PipelineShape(Schedule.ONE_F_ONE_B, stages, 1, parts))[stage]
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            assert [turn.micro_batch for turn in turns if turn.kind is kind] == list(range(parts))
        live = most = 0
        for turn in turns:
            live += 1 if turn.kind is Pass.FORWARD else -1
            assert live >= 0
            most = max(most, live)
        assert most == min(parts, stages - stage)


def test_the_head_counts_for_the_last_stage() -> None:
    tied = network()
    assert find_block_chain(tied).name == "blocks"
    # The frozen and the unused matrix are no tables; the tied head is one.
    assert count_head_weights(tied, find_block_chain(tied)) == WIDTH * WIDTH + 9
    bare = nn.ModuleDict({"tokens": nn.Embedding(50, WIDTH), "blocks": nn.ModuleList([Block(), Block()])})
    assert count_head_weights(bare, find_block_chain(bare)) == 50 * WIDTH


class Odd(Net):
    """A model whose blocks are no chain, in some way."""

    def __init__(self, how: str) -> None:
        super().__init__(4)
        self.how = how

    def forward(self, tokens: torch.Tensor) -> Any:
        first = x = self.tokens(tokens)
        seen = []
        order = [0, 1, 2, 3]
        if self.how == "twice":
            order = [0, 1, 2, 3, 0]
        if self.how == "out of order":
            order = [1, 0, 2, 3]
        if self.how == "left out":
            order = [0, 1, 2]
        for number in order:
            if self.how == "between" and number:
                x = x * 2
            x = self.blocks[number](tokens if self.how == "whole numbers" else x, self.side, first=first)
            seen.append(x)
        if self.how == "skip":
            x = x + seen[0]
        return functional.linear(x, self.tokens.weight)


def stage_of(model: nn.Module, stage: int, stages: int = 2) -> Any:
    relay, dropped, _ = keep_stage(model, stage, stages, lambda given: torch.zeros(given.shape))
    assert dropped
    return relay.run(lambda: loss(model, data(0)))


@pytest.mark.parametrize(
    ("how", "stage", "text"),
    [
        ("twice", 1, r"loss\(\) calls blocks.0 when they were all called"),
        ("out of order", 0, "loss\\(\\) calls blocks.1 when blocks.0 was due"),
        ("left out", 1, r"ended without calling blocks.3"),
        ("between", 0, "something is computed between blocks.1 and blocks.2"),
        ("between", 1, "uses the output of a block on another rank"),
        ("skip", 1, "uses the output of a block on another rank"),
        ("whole numbers", 0, "the first argument of blocks.0 is not a floating-point tensor"),
    ],
)
def test_blocks_that_are_no_chain_are_refused(how: str, stage: int, text: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(JobFailed, match=text):
        stage_of(Odd(how), stage)
    # The rank that has the other stage does not hang: it hears of it, or finds the same.


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(WrongUse, match="no list of repeated blocks"):
        stage_of(nn.Linear(3, 3), 0)
    with pytest.raises(WrongUse, match="blocks has 5 blocks, and a stage needs one"):
        stage_of(network(), 0, stages=6)
    shared: Any = network()
    shared.blocks[1].up.weight = shared.blocks[3].up.weight
    with pytest.raises(JobFailed, match=r"blocks.1 and blocks.3 share a weight"):
        stage_of(shared, 0)
    outside: Any = network()
    outside.frozen.weight = outside.blocks[2].up.weight
    with pytest.raises(JobFailed, match=r"frozen.weight is also a weight of blocks.2"):
        stage_of(outside, 0)

    class Two(Block):
        def forward(self, x: torch.Tensor, side: torch.Tensor, *, first: torch.Tensor) -> Any:
            return x * side, first

    several = network()
    several.blocks = nn.ModuleList([Two() for _ in range(4)])
    with pytest.raises(JobFailed, match=r"blocks.0 returns a tuple"):
        stage_of(several, 0)


def test_a_pipeline_is_not_compiled_and_needs_its_ranks() -> None:
    with pytest.raises(WrongUse, match="a compiler cannot follow"):
        Run(pipeline(2, compile=True))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"branch": 2, "copies": (2, 1, 1)}, "copies are 2 [+] 1 [+] 1, and branch is 2"),
        ({"branch": 2, "dp_replicate": 2, "copies": (2, 1)}, "are not dp_replicate 2"),
        ({"branch": 2, "dp_replicate": 2, "copies": (2, 2)}, "all alike"),
        ({"branch": 2, "dp_replicate": 0, "copies": (2, 0)}, "dp_replicate is 0"),
    ],
)
def test_copies_are_of_the_branches_and_unlike(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Mesh(**given)


def test_an_uneven_mesh_counts_all_its_ranks() -> None:
    mesh = Mesh(branch=2, copies=(2, 1))
    assert (mesh.size, mesh.data_parallel, mesh.branch_ranks) == (3, 1, (2, 1))
    assert Mesh.from_json(mesh.to_json()) == mesh
