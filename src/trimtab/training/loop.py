"""The whole run: from a task to the last step, through whatever happens on the way.

Every rank runs this. Rank 0 writes the folder and the terminal; what happens to another rank reaches it
through the process group, announced in the status of a step, so that a step without news costs nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import time
import traceback
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate

from trimtab.engine.additive_loss import find_batch_norms
from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.job import Job, samples_in
from trimtab.jobs.load import failed, file_of, load
from trimtab.launching.run_summary import JSON as SUMMARY
from trimtab.launching.run_summary import build_summary, count_node_gpus, remove_summary, write_summary
from trimtab.planner import batch_loss_rules
from trimtab.spec import BatchLoss, IncidentKind
from trimtab.strategies import strategy_of
from trimtab.training.bad_steps import BadStepHandler, BadStepPolicy
from trimtab.training.checkpoint_format import take_snapshot
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.events import EventLog
from trimtab.training.fault_injection import FaultInjector, tear_checkpoint
from trimtab.training.loading import (
    MAX_DIFFERENCES,
    build_sample_order,
    compare_batches,
    mix_seed,
    rank_slice_bounds,
    slice_batch,
)
from trimtab.training.oom_recovery import is_out_of_memory
from trimtab.training.process_group import connect, disconnect, read_world
from trimtab.training.rank_files import find_rank_files, is_lost_peer
from trimtab.training.run import Run
from trimtab.training.run_folder import RunFolder, RunIdentity
from trimtab.training.signals import (
    SILENCE_S,
    Signals,
    StopRequest,
    describe_stop,
    original_signal,
    pack_request,
    unpack_requests,
)
from trimtab.training.step_log import StepClock, StepLine, StepLog, compute_mfu, count_tokens, print_interval
from trimtab.training.task import RunEnding, agree_on_plan, check_trainable, gather_values, run_on_rank_zero
from trimtab.units import format_bytes, plural

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from trimtab.training.loading import Window
    from trimtab.training.process_group import World
    from trimtab.training.rank_files import RankFiles
    from trimtab.training.run import StepOutcome
    from trimtab.training.task import TrainTask


# The loss on samples that nothing is learnt from, shared over ranks.


def build_validation_set(job: Any) -> Any:
    """The job's dataset for evaluation; None where it has none."""
    make = getattr(job, "validation", None)
    dataset = make() if callable(make) else None
    if dataset is None:
        return None
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        raise JobFailed(
            "validation()",
            found=f"a {type(dataset).__name__} has no samples that can be counted and shared out",
            cure="Return a dataset with __len__ and __getitem__(index), or None.",
        )
    return dataset


def count_passes(samples: int, ranks: int, size: int) -> int:
    """Passes that the rank with the most samples makes; sharded ranks must all make as many.

    >>> rounds(10, 4, 2), rounds(3, 4, 2)
    (2, 1)
    """
    places = rank_slice_bounds(samples, ranks)
    most = max(stop - start for start, stop in pairwise(places))
    return -(-most // size)


def evaluate_loss(run: Run, dataset: Any) -> float:
    """The mean loss over a dataset, weighted as in training; not a number where none of it counts.

    Memory is given back afterwards.
    """
    total, weight = _sum_own_losses(run, dataset)
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    whole = run.all_reduce(torch.tensor([total, weight], dtype=torch.float64))
    # Every branch and every stage counted the same samples.
    mesh = run.setting.mesh
    return float(whole[0]) * mesh.branch * mesh.pp / float(whole[1]) if whole[1] else nan


def _sum_own_losses(run: Run, dataset: Any) -> tuple[float, float]:
    """The weighted loss of this rank's samples, and their weight."""
    ranks, size = run.groups.data_parallel, run.micro_batch
    places = rank_slice_bounds(len(dataset), ranks)
    mine = range(places[run.groups.data_rank], places[run.groups.data_rank + 1])
    reader: DataLoader[Any] = DataLoader(
        Subset(dataset, mine),
        batch_size=size,
        num_workers=run.setting.workers if len(mine) > size else 0,
        collate_fn=getattr(run.job, "collate", None) or default_collate,
        generator=torch.Generator(),
    )
    total = weight = 0.0
    modes = {name: module.training for name, module in run.model.named_modules()}
    run.model.eval()
    try:
        with torch.no_grad(), run.quiet():
            for batch in reader:
                counted = float(run.weight_of(batch))
                found = _batch_loss(run, batch)
                # A mean over nothing is not a number, and neither is nought times it.
                total += found * counted if counted else 0.0
                weight += counted
            for _ in range(count_passes(len(dataset), ranks, size) - len(reader)):
                _batch_loss(run, (getattr(run.job, "collate", None) or default_collate)([dataset[0]]))
    finally:
        for name, module in run.model.named_modules():
            module.training = modes[name]
    return total, weight


def _batch_loss(run: Run, batch: Any) -> float:
    """The loss of a batch; in halves where it does not fit."""
    try:
        with run.computing():
            return float(run.loss_of(run.on_device(batch)))
    except Exception as error:
        samples = samples_in(batch)
        # Ranks that compute together, each with a share of the weights, cannot take halves alone.
        shares = strategy_of(run.setting).weight_shares(run.setting.mesh) or 1
        if not is_out_of_memory(error) or samples < 2 or shares > 1:  # noqa: PLR2004 - halves
            raise
    gc.collect()
    torch.cuda.empty_cache()
    half = samples // 2
    parts = [slice_batch(batch, 0, half), slice_batch(batch, half, samples)]
    weights = [float(run.weight_of(part)) for part in parts]
    known = [_batch_loss(run, part) * share for part, share in zip(parts, weights, strict=True) if share]
    return sum(known) / sum(weights) if known else nan


SILENCE_STEPS = 5.0
"""After a signal, times the last step until silence means that a rank is gone."""


FIX_DATASET = (
    "Mend the job; where that is the cause, let the items of dataset() collate to what batch() makes (a job "
    "may have collate(items) for that)."
)
COMPARED_SAMPLES = 2
"""Samples of a batch that is only looked at: some losses have no use for one."""
OPTIMIZER_STATES = 2
"""Tensors that an optimizer keeps for every parameter, as Adam does."""
MEMORY_INTERVAL_S = 0.5
"""Between two looks at the memory."""


class RunProgress:
    """How far this process has come, for whoever asks when it has crashed."""

    step = 0


def train(task: TrainTask) -> RunEnding:
    """Train until the task is done or a signal asks for the end."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = read_world(os.environ, gpus)
    notes = find_rank_files()
    with Signals() as signals:
        # What the parent was asked while this process was still waking up.
        signals.asked = signals.asked or (notes.stopping() if notes is not None else None)
        connect(world, timeout_min=task.timeout_min)
        with ExitStack() as stack:
            ending = TrainingLoop(task, world, signals, stack, notes).go()
        disconnect()
    return ending


class ZeroBasedFaults:
    """Faults as the engine asks for them: it counts steps from 0, people from 1."""

    def __init__(self, faults: FaultInjector) -> None:
        self.faults = faults

    def at(self, point: str, step: int, rank: int) -> str | None:
        """Strike, if something is due."""
        return self.faults.at(point, step + 1, rank)


class StatefulAdapter:
    """Something with a state, as the keeper takes it."""

    def __init__(
        self, state: Callable[[], dict[str, Any]], load_state: Callable[[dict[str, Any]], None]
    ) -> None:
        self.state_dict = state
        self.load_state_dict = load_state


class TrainingLoop:
    """One attempt at a run."""

    def __init__(
        self,
        task: TrainTask,
        world: World,
        signals: Signals,
        stack: ExitStack,
        notes: RankFiles | None = None,
    ) -> None:
        self.task = task
        self.world = world
        self.signals = signals
        self.notes = notes
        """Of the parent that started this rank."""
        self.loss: float | None = None
        self.best: float | None = None
        self._waited_s = 0.0
        self.rate: float | None = None
        self.due = False
        """A checkpoint is wanted after the next step that is settled."""
        self.ending: signal.Signals | None = None
        """What asked for the end of the run."""
        self.window: Window | None = None
        """What is being computed."""
        self._asked_s = 0.0
        self._peaks: dict[str, int] = {}
        self.job = load(task.job, task.options)
        check_trainable(self.job, task.job)
        with self._blaming("dataset()"):
            self.dataset = self.job.dataset()
            self.validation = build_validation_set(self.job)
        self.plan, resized = agree_on_plan(task, self.job, world)
        if isinstance(self.job, Job):
            # A plan may have another global batch than the job, and a schedule counts steps of it.
            with contextlib.suppress(AttributeError):
                self.job.global_batch = self.plan.choice.global_batch
        # Before there is a folder, so that what is wrong leaves nothing behind.
        build_sample_order(self.dataset, self.plan.choice.global_batch)
        self.scribe = self._scribe(stack)
        if resized:
            self.scribe.tell(IncidentKind.RESIZE, "the plan is for another number of processes", resized)
        self.faults = FaultInjector(task.faults_due, self.scribe.folder.root) if task.faults_due else None
        drill = None if self.faults is None else ZeroBasedFaults(self.faults)
        self.run = Run(self.plan, job=self.job, connected=world, listen=self.scribe.hear, faults=drill)
        stack.callback(self.run.close)
        self._build()

    # getting ready

    @contextmanager
    def _blaming(self, member: str) -> Iterator[None]:
        """Errors of the job's own code are the job's."""
        try:
            yield
        except Exception as error:
            if isinstance(error, TrimtabError) or is_lost_peer(error) or not is_job_error(error):
                raise
            told = failed(f"{member} of job {self.task.job}", error, "Mend the job.")
            unlike = self._unlike() if self.window is not None else ""
            if unlike:
                told = JobFailed(told.given, found=f"{told.found}; {unlike}", cure=FIX_DATASET)
            raise told from error

    def _unlike(self) -> str:
        """In what the samples of the last step are not what batch() makes; empty where they are.

        Asked only after a step has failed: a job whose loss takes them is not refused.
        """
        assert self.window is not None  # noqa: S101 - asked before
        try:
            found = compare_batches(self.job.batch(COMPARED_SAMPLES), self.window.filler())
        except Exception:  # noqa: BLE001 - nothing can be said of it, and the failure itself is what counts
            return ""
        more = f"; and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        return f"dataset() is not like batch(): {'; '.join(found[:MAX_DIFFERENCES])}{more}" if found else ""

    def _scribe(self, stack: ExitStack) -> EventLog:
        """The folder, taken up by rank 0; an error there is one on all ranks."""
        task = self.task
        options = {key: value for key, value in task.options.items() if key != "global_batch"}
        identity = RunIdentity(
            job=task.job, options=options, global_batch=self.plan.choice.global_batch, seed=task.seed
        ).of_file(file_of(task.job))
        folder = RunFolder(root=Path(task.out).absolute(), main=False)

        def take_up() -> None:
            nonlocal folder
            folder = RunFolder.open(task.out, identity=identity, plan=self.plan)
            stack.callback(folder.close)

        run_on_rank_zero(self.world, take_up)
        meters = StepLog(
            every=task.every or print_interval(task.steps),
            steps=task.steps,
            as_json=task.json,
            quiet=not self.world.is_main,
            tensorboard=folder.root / "tensorboard" if self.world.is_main else None,
        )
        stack.callback(meters.close)
        scribe = EventLog(self.world, folder, meters)
        scribe.begin()
        stack.push(lambda _, error, __: scribe.end(error))
        return scribe

    def _build(self) -> None:
        """Model, optimizer and data, in the state they were left in."""
        task, job = self.task, self.job
        torch.manual_seed(task.seed)
        with self._blaming("model() and optimizer()"):
            self.run.prepare()
        self.loader = self.run.loader(self.dataset, task.seed)
        epochs = max(1, int(getattr(job, "epochs", 1) or 1))
        self.steps = task.steps or self.loader.order.steps_per_epoch * epochs
        self.scribe.goes_to(self.steps)
        meters = self.scribe.meters
        meters.steps, meters.every = self.steps, task.every or print_interval(self.steps)
        # Ranks draw unlike numbers from here on; a checkpoint of as many ranks puts them back.
        torch.manual_seed(mix_seed(task.seed, self.world.rank) % 2**63)
        self.keeper = CheckpointManager(
            self.scribe.folder.checkpoints,
            last=task.keep,
            tell=self.scribe.write,
            before_write=None if self.faults is None else self._before_write,
            timeout_min=task.timeout_min,
        )
        self.trouble = BadStepHandler(self.run, self.keeper, self.scribe)
        run_on_rank_zero(self.world, self._check_room)
        if self._resumed() is None:
            # Whatever was logged had no checkpoint to go with it.
            self.scribe.folder.rewind(0)
            if task.begin_from:
                self._take_weights(Path(task.begin_from))
        self.saved_s = time.monotonic()

    def _take_weights(self, folder: Path) -> None:
        """Begin with the weights that another run ended with; optimizer and data begin anew."""
        before = CheckpointManager(
            folder / "checkpoints", tell=self.scribe.write, timeout_min=self.task.timeout_min
        )
        loaded = before.load_latest({"model": self.run.model})
        if loaded is None:
            raise WrongUse(
                f"the weights of {folder}",
                found="there is no whole checkpoint in it",
                cure="Let that run end first, or begin in another folder.",
            )
        # The other run's random numbers came with its weights.
        torch.manual_seed(mix_seed(self.task.seed, self.world.rank) % 2**63)
        self.scribe.tell(
            IncidentKind.STAGE,
            f"{folder.name} ended with step {loaded.step}",
            "this run begins with its weights; optimizer and data begin anew",
        )

    def _check_room(self) -> None:
        """A disk that has no room for one checkpoint is said so before the first step."""
        folder = self.scribe.folder.root
        learn = [parameter for parameter in self.run.model.parameters() if parameter.requires_grad]
        state = sum(one.numel() * one.element_size() for one in learn) * OPTIMIZER_STATES
        need = take_snapshot({"model": self.run.model}).size_bytes + state
        free = shutil.disk_usage(folder).free
        if free < need and not any(self.scribe.folder.checkpoints.iterdir()):
            raise EnvironmentFault(
                f"--out {folder}",
                found=f"{format_bytes(free)} are free, and a checkpoint takes about {format_bytes(need)}",
                cure="Free some room, or give a folder on another disk with --out.",
            )

    def _objects(self) -> dict[str, Any]:
        run = self.run
        found = {
            "model": run.model,
            "optimizer": run.optimizer,
            "loader": self.loader,
            "run": StatefulAdapter(run.state, run.load_state),
        }
        return found | ({} if run.schedule is None else {"schedule": run.schedule})

    def _resumed(self, *, before: int | None = None) -> int | None:
        """Go on from the newest whole checkpoint, or from one before a step; None where there is none."""
        loaded = self.keeper.load_latest(self._objects(), before=before)
        if loaded is None:
            return None
        # Ranks other than the first have no extra: they hear it.
        extra = run_on_rank_zero(self.world, lambda: loaded.extra)
        self.trouble.restored(BadStepPolicy.from_json(extra["ladder"]), rolled_back=before is not None)
        self.best, self.loss = extra["best"], extra["loss"]
        dropped = self.scribe.folder.rewind(loaded.step)
        RunProgress.step = self.scribe.step = loaded.step
        again = f"; {plural(dropped, 'step')} after it will be taken again" if dropped else ""
        self.scribe.tell(
            IncidentKind.RESUME,
            f"{loaded.path.name} was found in {self.scribe.folder.root}",
            f"the run goes on from step {loaded.step}{again}",
        )
        return loaded.step

    # the run

    def go(self) -> RunEnding:
        """Take the steps that are left."""
        if self.loader.step >= self.steps:
            self.scribe.meters.say(f"{self.scribe.folder.root} has its {self.steps} steps already")
        else:
            self._announce()
            if self.world.is_main:
                remove_summary(self.scribe.folder.root)
        clock = StepClock()
        self._prompt()
        steps = self.run.over(self._noted(self.loader.windows(self.steps)), self._settles)
        while True:
            with self._blaming("loss()"):
                taken = next(steps, None)
            if taken is None:
                return self._finished(None)
            self._follow(*taken, clock)
            if self.ending is not None and not self.run.ahead:
                # A rank that was asked itself knows by which signal; the others know that there was one.
                asked = self.signals.asked or self.ending
                return self._finished(
                    original_signal(asked, None if self.notes is None else self.notes.stopping())
                )
            self._prompt()

    def _noted(self, windows: Iterator[Window]) -> Iterator[Window]:
        """The windows as they come, the last of them remembered while it is computed."""
        for window in windows:
            self.window = window
            yield window
            self.window = None

    def _announce(self) -> None:
        choice = self.plan.choice
        words = f"micro-batch {choice.micro_batch} x {choice.accumulation} x {choice.data_parallel}"
        where = "without a GPU" if self.run.device.type == "cpu" else f"on {torch.cuda.get_device_name()}"
        spread = strategy_of(choice).describe(choice.mesh)
        self.scribe.meters.say(
            f"{self.task.job}, {spread}, {words} = global batch {choice.global_batch}, "
            f"{choice.precision}, {self.world.size} process{'es' * (self.world.size > 1)} {where}"
        )
        for note in self._batch_notes():
            self.scribe.meters.say(note)
        if self.run.device.type == "cpu" and not synthetic.has_bf16():
            synthetic.silence_bf16_warning()
            if choice.dtypes.is_bf16:
                self.scribe.meters.say(f"{synthetic.NO_BF16}: {choice.precision} is slow here, use fp32")
        if self.world.is_main and isinstance(self.job, Job):
            for remark in self.job.remarks:
                self.scribe.meters.say(remark)

    def _batch_notes(self) -> list[str]:
        """What becomes of a batch that is cut, where that is not what it seems."""
        known = self.plan.workload
        if known is None:
            return []
        norms = len(find_batch_norms(self.run.model))
        stated = known.replace(batch_loss=BatchLoss(additive=True, stated=True, batch_norms=norms))
        return [
            f"{note.subject} {note.value}: {note.why}"
            for note in batch_loss_rules.notes(stated, self.plan.choice)
        ]

    def _prompt(self) -> None:
        """What the next step is to know and to ask the other ranks."""
        news = bool(self.scribe.news)
        self.run.asked = pack_request(StopRequest(self.signals.asked, news, self._is_due()))
        self.run.spike_limit = self.trouble.limit
        self.rate = learning_rate(self.run.optimizer)

    def _follow(self, window: Window, outcome: StepOutcome, clock: StepClock) -> None:
        """All that may follow from a step."""
        scribe, rate = self.scribe, self.rate
        done = scribe.step = window.step + 1
        time_s = clock.lap(outcome.ended_s)
        self.signals.silence_s = max(SILENCE_S, SILENCE_STEPS * time_s)
        self.signals.step_ended()
        RunProgress.step = done
        request = unpack_requests(outcome.asked)
        if request.news:
            scribe.share()
        if self._goes_back(window, outcome):
            return
        self.due = self.due or request.checkpoint
        self.ending = self.ending or request.asked
        if self.run.ahead:
            # The next window has been computed already: what was asked for is done after that one.
            self._log(window, outcome, time_s, rate, None)
            return
        validation = self._evaluated(done)
        self._log(window, outcome, time_s, rate, validation)
        if self._saves(done) or validation is not None:
            self._save(done, validation)
            self.due = False
        if validation is not None:
            clock.restart()

    def _goes_back(self, window: Window, outcome: StepOutcome) -> bool:
        """Judge the step; True where the run went back and the step never was."""
        done = window.step + 1
        before = done
        if outcome.rollback_needed:
            why = "the optimizer of a rank was interrupted halfway"
        elif not outcome.skipped:
            self.trouble.after_good(outcome.loss)
            self.loss = outcome.loss
            return False
        elif not self.trouble.answer(window, outcome):
            return False
        else:
            why, before = outcome.skipped, self.trouble.since or done
        if self._resumed(before=before) is None:
            raise JobFailed(
                f"step {done}",
                found=f"{why}, and there is no checkpoint from before step {before} to go back to",
                cure="Save more often, with --checkpoint-every STEPS.",
            )
        return True

    def _is_due(self) -> bool:
        return self.world.is_main and time.monotonic() - self.saved_s >= self.task.checkpoint_s

    def _settles(self, window: Window) -> bool:
        """Whether something follows on this step that needs its outcome, before the next is computed."""
        done = window.step + 1
        return self._saves(done) or self._evaluates(done)

    def _saves(self, done: int) -> bool:
        by_steps = self.task.checkpoint_steps is not None and done % self.task.checkpoint_steps == 0
        return by_steps or self.due or self.ending is not None or done == self.steps

    def _save(self, done: int, validation: float | None) -> None:
        """A checkpoint, unless the weights of a rank are not what the others have."""
        if self.run.rollback_needed():
            return
        if validation is not None and isfinite(validation):
            self.best = validation if self.best is None else min(self.best, validation)
        extra = {"ladder": self.trouble.ladder.to_json(), "best": self.best, "loss": self.loss}
        with self.signals.busy():
            self.keeper.save(done, self._objects(), extra, metric=validation)
            if self.faults is not None and self.faults.at("checkpoint", done, self.world.rank) == "tear":
                self.keeper.finish()
                tear_checkpoint(self.scribe.folder.checkpoints)
        self.saved_s = time.monotonic()

    def _finished(self, asked: signal.Signals | None) -> RunEnding:
        """Everything on the disk, and the last words."""
        with self.signals.busy():
            saved = self.keeper.finish()
        self.scribe.share()
        if asked is not None:
            kind, who = describe_stop(asked)
            self.scribe.tell(
                kind,
                f"{who} asked for the end",
                f"the step was finished and the checkpoint of step {saved} kept; the same command resumes",
            )
        ending = RunEnding(
            step=self.loader.step, loss=self.loss, out=self.task.out, asked=asked.name if asked else ""
        )
        self.scribe.meters.close()
        if self.world.is_main:
            if asked is None:
                self._sum_up()
            self._last_words(ending)
        return ending

    def _sum_up(self) -> None:
        """What came of the whole run, in its folder; kept where the run had ended before."""
        folder, cuda = self.scribe.folder, self.run.device.type == "cuda"
        if (folder.root / SUMMARY).exists():
            return
        there = count_node_gpus() if cuda else None
        summary = build_summary(
            self.task.job,
            self.plan,
            self.scribe.attempt,
            folder.lines(),
            folder.events(),
            epoch_samples=self.loader.order.samples,
            device=torch.cuda.get_device_name() if cuda else None,
            gpus_there=None if there is None else there * self.scribe.attempt.nodes,
            now_s=time.time(),
        )
        try:
            write_summary(folder.root, summary)
        except OSError as error:
            # The run is done and its weights are kept: a summary is not worth failing for.
            self.scribe.meters.say(f"no summary could be written: {error.strerror}")

    def _last_words(self, ending: RunEnding) -> None:
        folder, meters = self.scribe.folder, self.scribe.meters
        if self.task.json:
            events = [event.to_builtins() for event in folder.events()]
            last = {"events": events, "steps": ending.step, "out": ending.out, "asked": ending.asked or None}
            meters.write(json.dumps(last))
            return
        loss = "" if ending.loss is None else f", loss {ending.loss:.4f}"
        meters.say(f"{ending.step} of {self.steps} steps{loss}, in {folder.root}")

    # evaluation, lines, drills

    def _evaluated(self, done: int) -> float | None:
        if self.validation is None or not self._evaluates(done):
            return None
        with self.signals.busy():
            return evaluate_loss(self.run, self.validation)

    def _evaluates(self, done: int) -> bool:
        every = self.task.evaluate_steps or self.loader.order.steps_per_epoch
        return self.validation is not None and (done % every == 0 or done == self.steps)

    def _log(
        self,
        window: Window,
        outcome: StepOutcome,
        time_s: float,
        rate: float | None,
        validation: float | None,
    ) -> None:
        indices = self._indices(window)
        if not self.world.is_main:
            return
        memory, choice = self._memory(), self.plan.choice
        samples = outcome.samples
        tokens = count_tokens(samples, outcome.weight, getattr(self.job, "seq", None))
        share = samples / choice.global_batch
        line = StepLine(
            step=window.step + 1,
            epoch=window.epoch,
            loss=outcome.loss if isfinite(outcome.loss) else None,
            time_s=time_s,
            samples=samples,
            samples_per_s=samples / time_s,
            tokens_per_s=None if tokens is None else tokens / time_s,
            mfu=compute_mfu(self.plan.estimate, choice.gpus, self.world.size, share, time_s),
            allocated_bytes=memory.get("peak_allocated_bytes"),
            reserved_bytes=memory.get("peak_reserved_bytes"),
            data_wait_s=self.loader.waited_s - self._waited_s,
            grad_norm=outcome.grad_norm if isfinite(outcome.grad_norm) else None,
            lr=rate,
            micro_batch=outcome.micro_batch,
            gpus=self.world.size,
            attempts=outcome.attempts,
            skipped=outcome.skipped or None,
            validation_loss=validation,
            indices=indices,
        )
        self._waited_s = self.loader.waited_s
        self.scribe.folder.log(line.to_log())
        self.scribe.meters.step(line)

    def _memory(self) -> dict[str, int]:
        """Peaks of this process; asking takes a good part of a millisecond, so it is not done every step."""
        now = time.monotonic()
        if now - self._asked_s > MEMORY_INTERVAL_S:
            self._asked_s, self._peaks = now, self.run.memory()
        return self._peaks

    def _indices(self, window: Window) -> tuple[int, ...] | None:
        """In a drill, which samples the ranks computed; branches and stages compute the same ones."""
        if self.faults is None:
            return None
        mine = window.indices if self.run.groups.counts else ()
        return tuple(index for some in gather_values(self.world, mine) for index in some)

    def _before_write(self, step: int) -> None:
        if self.faults is not None:
            self.faults.at("write", step, self.world.rank)


def is_job_error(error: BaseException) -> bool:
    """Whether an error came out of a job's code: a frame of it is neither ours nor an installed package's."""
    ours, jobs = str(Path(__file__).parent.parent), str(Path(load.__code__.co_filename).parent)
    frames = [one.filename for one in traceback.extract_tb(error.__traceback__)]
    return any(
        frame.startswith(jobs)
        or not (frame.startswith((ours, "<")) or "site-packages" in frame or frame == contextlib.__file__)
        for frame in frames
    )


def learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the first group."""
    groups = optimizer.param_groups
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
