"""The training loop of `trimtab train`: steps, checkpoints, evaluation, logging, resume and rollback.

Every rank runs it. Rank 0 writes the run folder and the terminal. Other ranks send it their incidents through
the process group. The status of a step announces them, so a step without incidents costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import traceback
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.additive_loss import find_batch_norms
from trimtab.engine.float8 import describe_conversion
from trimtab.engine.optimizer import ONLY
from trimtab.errors import EnvironmentFault, JobFailed, TrimtabError, WrongUse
from trimtab.jobs import synthetic
from trimtab.jobs.job import Job
from trimtab.jobs.load import find_job_file, job_error, load_job
from trimtab.launching.run_summary import JSON as SUMMARY
from trimtab.launching.run_summary import build_summary, count_node_gpus, remove_summary, write_summary
from trimtab.planner import batch_loss_rules
from trimtab.spec import BatchLoss, IncidentKind
from trimtab.strategies import strategy_of
from trimtab.training.bad_steps import BadStepHandler, BadStepPolicy
from trimtab.training.checkpoint_format import take_snapshot
from trimtab.training.checkpoints import CheckpointManager
from trimtab.training.device_gauge import DeviceGauge, count_compiled_graphs, find_uuid
from trimtab.training.evaluation import LOSS, build_validation_set, evaluate_run
from trimtab.training.events import EventLog
from trimtab.training.fault_injection import FaultInjector, tear_checkpoint
from trimtab.training.loading import (
    MAX_DIFFERENCES,
    build_sample_order,
    compare_batches,
    mix_seed,
)
from trimtab.training.oom_recovery import (
    SMALLER_SIZE,
    RestartWithSmaller,
    read_smaller_size,
    write_smaller_size,
)
from trimtab.training.process_group import connect, disconnect, read_world
from trimtab.training.rank_messages import find_rank_files, is_lost_peer
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
from trimtab.training.task import (
    RunEnding,
    TrainOutput,
    agree_on_plan,
    check_trainable,
    gather_values,
    run_on_rank_zero,
)
from trimtab.units import format_bytes, plural

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from trimtab.spec import Incident
    from trimtab.training.loading import Window
    from trimtab.training.process_group import World
    from trimtab.training.rank_messages import RankFiles
    from trimtab.training.run import StepOutcome
    from trimtab.training.task import TrainTask


SILENCE_STEPS = 5.0
"""After a signal, a rank that is silent for this many step times counts as lost."""


FIX_DATASET = (
    "Fix the job; if that is the cause, let the items of dataset() collate to what batch() makes (a job "
    "may have collate(items) for that)."
)
COMPARED_SAMPLES = 2
"""Samples of the batch() that dataset() is compared with: some jobs cannot make a batch of one."""
OPTIMIZER_STATES = 2
"""Optimizer state tensors per parameter that the disk check assumes, as in Adam."""
SAVED_FIRST = (
    "optimizer in backward: a step that runs out of memory halfway goes back to the last checkpoint, "
    "so one is saved before the first step"
)
MEMORY_INTERVAL_S = 0.5
"""Seconds between two measurements of peak memory."""


class RunProgress:
    """Steps that this process has finished; the worker reads it after a crash."""

    step = 0


def train(task: TrainTask) -> RunEnding:
    """Train until the task is done or a signal stops it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = read_world(os.environ, gpus)
    rank_files = find_rank_files()
    with Signals() as signals:
        # A signal that the parent received while this process was starting.
        signals.asked = signals.asked or (rank_files.stop_signal() if rank_files is not None else None)
        connect(world, timeout_min=task.timeout_min)
        with ExitStack() as stack:
            ending = TrainingLoop(task, world, signals, stack, rank_files).run_steps()
        disconnect()
    return ending


class ZeroBasedFaults:
    """Fault injector for the stepper, which counts steps from 0; users count from 1."""

    def __init__(self, faults: FaultInjector) -> None:
        self.faults = faults

    def at(self, point: str, step: int, rank: int) -> str | None:
        """Inject a fault, if one is due."""
        return self.faults.at(point, step + 1, rank)


class StatefulAdapter:
    """Gives an object state_dict() and load_state_dict() for CheckpointManager."""

    def __init__(
        self, state: Callable[[], dict[str, Any]], load_state: Callable[[dict[str, Any]], None]
    ) -> None:
        self.state_dict = state
        self.load_state_dict = load_state


class TrainingLoop:
    """One attempt at a run, on one rank."""

    def __init__(
        self,
        task: TrainTask,
        world: World,
        signals: Signals,
        stack: ExitStack,
        rank_files: RankFiles | None = None,
    ) -> None:
        self.task = task
        self.world = world
        self.signals = signals
        self.rank_files = rank_files
        """Files shared with the parent process that started this rank."""
        self.loss: float | None = None
        self.best: float | None = None
        self._waited_s = 0.0
        self.learning_rate: float | None = None
        self.checkpoint_due = False
        """Whether to save a checkpoint after the next finished step."""
        self.stop_signal: signal.Signals | None = None
        """The signal that stops the run."""
        self.window: Window | None = None
        """The window that is being computed."""
        self._measured_s = 0.0
        self._peaks: dict[str, int] = {}
        self._gauge: DeviceGauge | None = None
        self.job = load_job(task.job, task.options)
        check_trainable(self.job, task.job)
        with self._job_errors("dataset()"):
            self.dataset = self.job.dataset()
            self.validation = build_validation_set(self.job)
        self.plan, resized = agree_on_plan(task, self.job, world)
        if isinstance(self.job, Job):
            # A plan may have another global batch than the job, and a schedule counts steps of it.
            with contextlib.suppress(AttributeError):
                self.job.global_batch = self.plan.choice.global_batch
        # Check before the run folder is created, so that an error leaves no folder behind.
        build_sample_order(self.dataset, self.plan.choice.global_batch)
        self.events = self._open_event_log(stack)
        if resized:
            self.events.record(IncidentKind.RESIZE, "the plan is for another number of processes", resized)
        self.faults = FaultInjector(task.faults_due, self.events.folder.root) if task.faults_due else None
        zero_based = None if self.faults is None else ZeroBasedFaults(self.faults)
        self.run = Run(
            self.plan, job=self.job, connected=world, listen=self._record_incident, faults=zero_based
        )
        stack.callback(self.run.close)
        self._build()

    # setup

    @contextmanager
    def _job_errors(self, member: str) -> Iterator[None]:
        """Turn errors of the job's own code into JobFailed."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RestartWithSmaller):
                write_smaller_size(self.events.folder.root, self.plan.choice, error, self.world.rank)
                raise
            if isinstance(error, TrimtabError) or is_lost_peer(error) or not is_job_error(error):
                raise
            failure = job_error(f"{member} of job {self.task.job}", error, "Fix the job.")
            difference = self._describe_difference() if self.window is not None else ""
            if difference:
                failure = JobFailed(failure.given, found=f"{failure.found}; {difference}", cure=FIX_DATASET)
            raise failure from error

    def _describe_difference(self) -> str:
        """Describe how the samples of the last step differ from batch(); empty if they do not.

        Called only after a step has failed: a job whose loss accepts both is not refused.
        """
        assert self.window is not None  # noqa: S101 - checked by the caller
        try:
            differences = compare_batches(self.job.batch(COMPARED_SAMPLES), self.window.filler())
        except Exception:  # noqa: BLE001 - the comparison is only a hint; the failure itself matters
            return ""
        count = len(differences)
        more = f"; and {count - MAX_DIFFERENCES} more" if count > MAX_DIFFERENCES else ""
        return (
            f"dataset() is not like batch(): {'; '.join(differences[:MAX_DIFFERENCES])}{more}"
            if differences
            else ""
        )

    def _open_event_log(self, stack: ExitStack) -> EventLog:
        """Open the run folder on rank 0, whose error is raised on all ranks; return the event log."""
        task = self.task
        options = {key: value for key, value in task.options.items() if key != "global_batch"}
        identity = RunIdentity(
            job=task.job, options=options, global_batch=self.plan.choice.global_batch, seed=task.seed
        ).with_file(find_job_file(task.job))
        folder = RunFolder(root=Path(task.out).absolute(), main=False)

        def open_folder() -> None:
            nonlocal folder
            folder = RunFolder.open(task.out, identity=identity, plan=self.plan)
            stack.callback(folder.close)

        run_on_rank_zero(self.world, open_folder)
        step_log = StepLog(
            every=task.every or print_interval(task.steps),
            steps=task.steps,
            as_json=task.json,
            quiet=not self.world.is_main,
            tensorboard=folder.root / "tensorboard" if self.world.is_main else None,
        )
        stack.callback(step_log.close)
        events = EventLog(self.world, folder, step_log)
        events.begin_attempt()
        stack.push(lambda _, error, __: events.end_attempt(error))
        return events

    def _build(self) -> None:
        """Build model, optimizer and loader, and load the latest checkpoint."""
        task, job = self.task, self.job
        torch.manual_seed(task.seed)
        with self._job_errors("model() and optimizer()"):
            self.run.prepare()
        self.loader = self.run.loader(self.dataset, task.seed)
        epochs = max(1, int(getattr(job, "epochs", 1) or 1))
        self.steps = task.steps or self.loader.order.steps_per_epoch * epochs
        self.events.set_total_steps(self.steps)
        step_log = self.events.step_log
        step_log.steps, step_log.every = self.steps, task.every or print_interval(self.steps)
        # From here on ranks draw different random numbers; a checkpoint restores them on equally many ranks.
        self._seed_rank()
        self.checkpoints = CheckpointManager(
            self.events.folder.checkpoints,
            last=task.keep,
            report=self.events.write,
            before_write=None if self.faults is None else self._before_write,
            timeout_min=task.timeout_min,
        )
        self.bad_steps = BadStepHandler(self.run, self.checkpoints, self.events)
        run_on_rank_zero(self.world, self._check_disk_space)
        if self._resume() is None:
            # Logged steps without a checkpoint are lost.
            self.events.folder.rewind(0)
            if task.begin_from:
                self._load_weights(Path(task.begin_from))
            if self.plan.choice.optimizer_in_backward:
                # A step that fails halfway has no other way back.
                self.events.step_log.say(SAVED_FIRST)
                self._save(0, None)
        self._use_smaller_size()
        self.saved_s = time.monotonic()

    def _use_smaller_size(self) -> None:
        """Use the micro-batch with which a rank asked for a restart, after it ran out of memory."""
        root = self.events.folder.root
        request = run_on_rank_zero(self.world, lambda: read_smaller_size(root, self.plan.choice))
        if request is None or request.size >= self.run.micro_batch:
            return
        self.run.use_micro_batch(request.size)
        self.events.record(
            IncidentKind.OUT_OF_MEMORY,
            f"rank {request.rank}: {request.why}",
            f"all ranks started again, with {plural(request.size, 'sample')} at once",
        )

    def _seed_rank(self) -> None:
        """Seed this rank's random numbers; ranks that see the same samples draw the same ones."""
        groups = self.run.groups
        same_samples = self.world.rank // (groups.tensor_parallel * groups.context_parallel)
        torch.manual_seed(mix_seed(self.task.seed, same_samples) % 2**63)

    def _load_weights(self, folder: Path) -> None:
        """Start with the final weights of another run; optimizer and data start from the beginning."""
        before = CheckpointManager(
            folder / "checkpoints", report=self.events.write, timeout_min=self.task.timeout_min
        )
        loaded = before.load_latest({"model": self.run.model})
        if loaded is None:
            raise WrongUse(
                f"the weights of {folder}",
                found="there is no whole checkpoint in it",
                cure="Let that run end first, or begin in another folder.",
            )
        # The checkpoint has restored the random state of the other run.
        self._seed_rank()
        self.events.record(
            IncidentKind.STAGE,
            f"{folder.name} ended with step {loaded.step}",
            "this run begins with its weights; optimizer and data start from the beginning",
        )

    def _check_disk_space(self) -> None:
        """Raise an error before the first step if the disk has no room for one checkpoint."""
        folder = self.events.folder.root
        trainable = [parameter for parameter in self.run.model.parameters() if parameter.requires_grad]
        state = (
            sum(parameter.numel() * parameter.element_size() for parameter in trainable) * OPTIMIZER_STATES
        )
        need = take_snapshot({"model": self.run.model}).size_bytes + state
        free = shutil.disk_usage(folder).free
        if free < need and not any(self.events.folder.checkpoints.iterdir()):
            raise EnvironmentFault(
                f"--out {folder}",
                found=f"{format_bytes(free)} are free, and a checkpoint takes about {format_bytes(need)}",
                cure="Free some room, or give a folder on another disk with --out.",
            )

    def _checkpoint_objects(self) -> dict[str, Any]:
        run = self.run
        return {
            "model": run.model,
            **{label_part("optimizer", name): optimizer for name, optimizer in run.optimizers.items()},
            "loader": self.loader,
            "run": StatefulAdapter(run.state, run.load_state),
            **{label_part("schedule", name): schedule for name, schedule in run.schedules.items()},
        }

    def _resume(self, *, before: int | None = None) -> int | None:
        """Load the newest complete checkpoint before a step, or of all; return its step, or None."""
        loaded = self.checkpoints.load_latest(self._checkpoint_objects(), before=before)
        if loaded is None:
            return None
        # Only rank 0 reads `extra`; it sends it to the others.
        extra = run_on_rank_zero(self.world, lambda: loaded.extra)
        self.bad_steps.restore(BadStepPolicy.from_json(extra["ladder"]), rolled_back=before is not None)
        self.best, self.loss = extra["best"], extra["loss"]
        dropped = self.events.folder.rewind(loaded.step)
        self._say_lost_steps(loaded.step)
        RunProgress.step = self.events.step = loaded.step
        again = f"; {plural(dropped, 'step')} after it will be taken again" if dropped else ""
        self.events.record(
            IncidentKind.RESUME,
            f"{loaded.path.name} was found in {self.events.folder.root}",
            f"the run goes on from step {loaded.step}{again}",
        )
        return loaded.step

    def _say_lost_steps(self, step: int) -> None:
        """Say that the log does not reach the step of the checkpoint that was loaded."""
        lines = self.events.folder.read_lines() if self.world.is_main else []
        last = lines[-1]["step"] if lines else 0
        if self.world.is_main and last < step:
            self.events.step_log.say(
                f"{self.events.folder.log_file} ends at step {last:,}: its lines up to step {step:,} are lost"
            )

    # the run

    def run_steps(self) -> RunEnding:
        """Run the remaining steps."""
        if self.loader.step >= self.steps:
            self.events.step_log.say(f"{self.events.folder.root} has its {self.steps} steps already")
        else:
            self._print_header()
            if self.world.is_main:
                remove_summary(self.events.folder.root)
        clock = StepClock()
        self._prepare_step()
        steps = self.run.over(self._track_window(self.loader.windows(self.steps)), self._needs_outcome)
        while True:
            with self._job_errors("loss()"):
                taken = next(steps, None)
            if taken is None:
                return self._finish(None)
            self._after_step(*taken, clock)
            if self.stop_signal is not None and not self.run.ahead:
                # The rank that got the signal knows which one; the others only know that there was one.
                asked = self.signals.asked or self.stop_signal
                return self._finish(
                    original_signal(asked, None if self.rank_files is None else self.rank_files.stop_signal())
                )
            self._prepare_step()

    def _track_window(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows; set `self.window` while one is computed."""
        for window in windows:
            self.window = window
            yield window
            self.window = None

    def _print_header(self) -> None:
        choice = self.plan.choice
        words = f"micro-batch {choice.micro_batch} x {choice.accumulation} x {choice.data_parallel}"
        where = "without a GPU" if self.run.device.type == "cpu" else f"on {torch.cuda.get_device_name()}"
        spread = strategy_of(choice).describe(choice.mesh)
        self.events.step_log.say(
            f"{self.task.job}, {spread}, {words} = global batch {choice.global_batch}, "
            f"{choice.precision}, {self.world.size} process{'es' * (self.world.size > 1)} {where}"
        )
        if note := describe_conversion(self.run.model, choice.dtypes):
            emulated = " (emulated: this device does not)" if self.run.device.type == "cpu" else ""
            self.events.step_log.say(note + emulated)
        for note in self._describe_batch_split():
            self.events.step_log.say(note)
        if callable(getattr(self.job, "evaluate", None)) and self.validation is None:
            self.events.step_log.say("the job has evaluate() and no validation(): it is not evaluated")
        if self.run.device.type == "cpu" and not synthetic.has_bf16():
            synthetic.silence_bf16_warning()
            if choice.dtypes.is_bf16:
                self.events.step_log.say(f"{synthetic.NO_BF16}: {choice.precision} is slow here, use fp32")
        if self.world.is_main and isinstance(self.job, Job):
            for remark in self.job.remarks:
                self.events.step_log.say(remark)

    def _describe_batch_split(self) -> list[str]:
        """Return notes on how splitting the batch affects the loss and BatchNorm."""
        workload = self.plan.workload
        if workload is None:
            return []
        norms = len(find_batch_norms(self.run.model))
        stated = workload.replace(batch_loss=BatchLoss(additive=True, stated=True, batch_norms=norms))
        return [
            f"{note.subject} {note.value}: {note.why}"
            for note in batch_loss_rules.explain_batch_loss(stated, self.plan.choice)
        ]

    def _record_incident(self, incident: Incident) -> None:
        """Record an incident of this rank; the next status of the same step tells the other ranks of it.

        Otherwise rank 0 would learn of it a step later, and a kill before that would lose it.
        """
        self.events.record_local(incident)
        if hasattr(self, "run"):
            self._set_request()

    def _set_request(self) -> None:
        news = bool(self.events.pending)
        self.run.asked = pack_request(StopRequest(self.signals.asked, news, self._is_checkpoint_due()))

    def _prepare_step(self) -> None:
        """Set the stop request and the spike limit of the next step."""
        self._set_request()
        self.run.spike_limit = self.bad_steps.spike_limit
        self.learning_rate = learning_rate(self.run.optimizer)

    def _after_step(self, window: Window, outcome: StepOutcome, clock: StepClock) -> None:
        """Handle the outcome of a step: rollback, log, evaluation, checkpoint."""
        events, rate = self.events, self.learning_rate
        done = events.step = window.step + 1
        time_s = clock.lap(outcome.ended_s)
        self.signals.silence_s = max(SILENCE_S, SILENCE_STEPS * time_s)
        self.signals.note_step_end()
        RunProgress.step = done
        request = unpack_requests(outcome.asked)
        if request.news:
            events.gather_incidents()
        if self._rolled_back(window, outcome):
            return
        self.checkpoint_due = self.checkpoint_due or request.checkpoint
        self.stop_signal = self.stop_signal or request.asked
        if self.run.ahead:
            # The next window has been computed already: save or evaluate after that one.
            self._log_step(window, outcome, time_s, rate, None)
            return
        metrics = self._evaluate(done)
        self._log_step(window, outcome, time_s, rate, metrics)
        if self._is_saved(done) or metrics is not None:
            self._save(done, metrics)
            self.checkpoint_due = False
        if metrics is not None:
            clock.restart()

    def _rolled_back(self, window: Window, outcome: StepOutcome) -> bool:
        """Handle a bad step; return True if the run went back to a checkpoint."""
        done = window.step + 1
        before = done
        if outcome.rollback_needed:
            why = outcome.skipped
        elif not outcome.skipped:
            self.bad_steps.record_good(outcome.loss)
            self.loss = outcome.loss
            return False
        elif not self.bad_steps.handle(window, outcome):
            return False
        else:
            why, before = outcome.skipped, self.bad_steps.first_bad_step or done
        if self._resume(before=before) is None:
            raise JobFailed(
                f"step {done}",
                found=f"{why}, and there is no checkpoint from before step {before} to go back to",
                cure="Save more often, with --checkpoint-every STEPS.",
            )
        return True

    def _is_checkpoint_due(self) -> bool:
        return self.world.is_main and time.monotonic() - self.saved_s >= self.task.checkpoint_s

    def _needs_outcome(self, window: Window) -> bool:
        """Return whether a save or an evaluation after this step needs its outcome before the next passes."""
        done = window.step + 1
        return self._is_saved(done) or self._is_evaluated(done)

    def _is_saved(self, done: int) -> bool:
        by_steps = self.task.checkpoint_steps is not None and done % self.task.checkpoint_steps == 0
        return by_steps or self.checkpoint_due or self.stop_signal is not None or done == self.steps

    def _save(self, done: int, metrics: dict[str, float] | None) -> None:
        """Save a checkpoint, unless the weights of a rank differ from the others."""
        if self.run.rollback_needed():
            return
        validation = None if metrics is None else metrics.get(LOSS)
        if validation is not None and isfinite(validation):
            self.best = validation if self.best is None else min(self.best, validation)
        extra = {"ladder": self.bad_steps.policy.to_json(), "best": self.best, "loss": self.loss}
        with self.signals.busy():
            self.checkpoints.save(done, self._checkpoint_objects(), extra, metric=validation)
            if self.faults is not None and self.faults.at("checkpoint", done, self.world.rank) == "tear":
                self.checkpoints.finish()
                tear_checkpoint(self.events.folder.checkpoints)
        self.saved_s = time.monotonic()

    def _finish(self, asked: signal.Signals | None) -> RunEnding:
        """Finish writing all files, print the last lines, and return how the run ended."""
        with self.signals.busy():
            saved = self.checkpoints.finish()
        self.events.gather_incidents()
        if asked is not None:
            kind, who = describe_stop(asked)
            self.events.record(
                kind,
                f"{who} asked for the end",
                f"the step was finished and the checkpoint of step {saved} kept; the same command resumes",
            )
        ending = RunEnding(
            step=self.loader.step, loss=self.loss, out=self.task.out, asked=asked.name if asked else ""
        )
        self.events.step_log.close()
        if self.world.is_main:
            if asked is None:
                self._write_summary()
                (self.events.folder.root / SMALLER_SIZE).unlink(missing_ok=True)
            self._print_ending(ending)
        return ending

    def _write_summary(self) -> None:
        """Write the summary of the run into its folder, unless there is one already."""
        folder, cuda = self.events.folder, self.run.device.type == "cuda"
        if (folder.root / SUMMARY).exists():
            return
        node_gpus = count_node_gpus() if cuda else None
        summary = build_summary(
            self.task.job,
            self.plan,
            self.events.attempt,
            folder.read_lines(),
            folder.read_events(),
            epoch_samples=self.loader.order.samples,
            device=torch.cuda.get_device_name() if cuda else None,
            gpus_there=None if node_gpus is None else node_gpus * self.events.attempt.nodes,
            now_s=time.time(),
        )
        try:
            write_summary(folder.root, summary)
        except OSError as error:
            # The run is done and its weights are saved: do not fail for a summary.
            self.events.step_log.say(f"no summary could be written: {error.strerror}")

    def _print_ending(self, ending: RunEnding) -> None:
        folder, step_log = self.events.folder, self.events.step_log
        if self.task.json:
            events = tuple(folder.read_events())
            last = TrainOutput(events=events, steps=ending.step, out=ending.out, asked=ending.asked or None)
            step_log.write(json.dumps(last.to_builtins()))
            return
        loss = "" if ending.loss is None else f", loss {ending.loss:.4f}"
        step_log.say(f"{ending.step} of {self.steps} steps{loss}, in {folder.root}")

    # evaluation, step log, fault injection

    def _evaluate(self, done: int) -> dict[str, float] | None:
        """Return the metrics on the validation set; None if this step is not followed by an evaluation."""
        if self.validation is None or not self._is_evaluated(done):
            return None
        member = "evaluate()" if callable(getattr(self.job, "evaluate", None)) else "loss()"
        with self.signals.busy(), self._job_errors(member):
            return evaluate_run(self.run, self.validation)

    def _is_evaluated(self, done: int) -> bool:
        every = self.task.evaluate_steps or self.loader.order.steps_per_epoch
        return self.validation is not None and (done % every == 0 or done == self.steps)

    def _log_step(
        self,
        window: Window,
        outcome: StepOutcome,
        time_s: float,
        rate: float | None,
        metrics: dict[str, float] | None,
    ) -> None:
        indices = self._gather_indices(window)
        if not self.world.is_main:
            return
        memory, choice = self._measure_memory(), self.plan.choice
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
            **self._read_gauge(),
            compiled_graphs=count_compiled_graphs(),
            grad_norm=outcome.grad_norm if isfinite(outcome.grad_norm) else None,
            lr=rate,
            micro_batch=outcome.micro_batch,
            gpus=self.world.size,
            attempts=outcome.attempts,
            skipped=outcome.skipped or None,
            validation_loss=None if metrics is None else metrics.get(LOSS),
            metrics=_select_metrics(metrics),
            losses={name: loss for name, loss in outcome.losses.items() if isfinite(loss)} or None,
            indices=indices,
        )
        self._waited_s = self.loader.waited_s
        self.events.folder.log_step(line.to_log())
        self.events.step_log.show_step(line)

    def _read_gauge(self) -> dict[str, Any]:
        """Return the clock and throttle reasons of this process's GPU, at most some seconds old."""
        if self._gauge is None:
            self._gauge = DeviceGauge(find_uuid(self.run.device))
        return self._gauge.read_fields()

    def _measure_memory(self) -> dict[str, int]:
        """Return the peak memory of this process; measured rarely, as it takes nearly a millisecond."""
        now = time.monotonic()
        if now - self._measured_s > MEMORY_INTERVAL_S:
            self._measured_s, self._peaks = now, self.run.memory()
        return self._peaks

    def _gather_indices(self, window: Window) -> tuple[int, ...] | None:
        """Gather the sample indices of all ranks if faults are injected, for tests; else return None."""
        if self.faults is None:
            return None
        mine = window.indices if self.run.groups.counts_samples else ()
        return tuple(index for indices in gather_values(self.world, mine) for index in indices)

    def _before_write(self, step: int) -> None:
        if self.faults is not None:
            self.faults.at("write", step, self.world.rank)


def is_job_error(error: BaseException) -> bool:
    """Return whether a traceback has a frame of the job: neither trimtab nor an installed package."""
    ours, jobs = str(Path(__file__).parent.parent), str(Path(load_job.__code__.co_filename).parent)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(
        file.startswith(jobs)
        or not (file.startswith((ours, "<")) or "site-packages" in file or file == contextlib.__file__)
        for file in files
    )


def _select_metrics(metrics: dict[str, float] | None) -> dict[str, float] | None:
    """Return the metrics besides the loss; None if there are none."""
    others = {name: value for name, value in (metrics or {}).items() if name != LOSS}
    return others or None


def label_part(kind: str, name: str) -> str:
    """Return the label of an optimizer or schedule in a checkpoint.

    >>> label_part("schedule", "optimizer"), label_part("optimizer", "muon")
    ('schedule', 'optimizer-muon')
    """
    return kind if name == ONLY else f"{kind}-{name}"


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first parameter group."""
    groups = optimizer.param_groups
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
