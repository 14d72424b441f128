"""The worker process that traces: reads requests from stdin, a line of JSON each; writes traces or errors.

It installs a fake CUDA device, which cannot be undone, and runs the user's code: hence a separate process.
Work that all settings of a job share, mainly imports, is done once; each setting is traced in a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.errors import CannotFollow, JobFailed, TrimtabError
from trimtab.jobs.job import Job, has_longest
from trimtab.jobs.load import job_error, load_job, tracing_error
from trimtab.jobs.registry import comes_with_trimtab
from trimtab.spec import PARTS, BaseFormat, Offload, Recompute, Setting, Trace
from trimtab.spec.trace import ENTER
from trimtab.strategies import one_micro_batch, strategy_of
from trimtab.strategies.base import ALIKE, RankKind
from trimtab.trace.child_process import end_with_parent, resident_bytes
from trimtab.trace.common_devices import forget_special_facts, is_for_one_device
from trimtab.trace.cpu_check import CpuCheck, blame_error, check_on_cpu
from trimtab.trace.extend_blocks import FEW_BLOCKS, extend_blocks
from trimtab.trace.forks import MAX_FORKS, run_forked
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import (
    END,
    SendAnswer,
    decode_answer,
    encode_error,
    import_ahead,
    import_modules,
    imported_since,
    redirect_stdout,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from trimtab.engine.pipeline_stage import StageSplit
    from trimtab.engine.update_phases import UpdatePhase
    from trimtab.trace.cpu_check import CpuCheckResult
    from trimtab.trace.repeated_blocks import RepeatedBlocks

LEAST_STAGE_BLOCKS = 10
"""Blocks of a pipeline stage from which traces with three and with four of them are less work."""
STEPS = 3
"""The first step creates optimizer states and workspaces, the second has all of them, the third shows the
steady state of the allocator."""
DRAWN_STEPS = 8
"""Steps of a job whose sizes follow from random numbers."""
DRAWN_NOTE = (
    "sizes that follow from random numbers, as of a random mask, differ between steps: peaks are those of "
    f"{DRAWN_STEPS} steps, and reserved memory depends on their order"
)


WHOLE, FEWER, CHECKED = "whole", "fewer", "checked"
"""How to trace a model of many equal blocks: all of them; only a few; or a few, checked against a forward
pass of all."""


GATHERED_WIDE = "fp8: ranks gather weights in 16 bits; trimtab does not gather them in 8 bits"
NOTHING_MOVED = (
    "offload: no activation goes to the host; those of the last operations, small ones and those of code "
    "outside of the model stay on the GPU"
)
PAIR = 2
"""Blocks that compiled code may treat in turn, such as one that adds to a sum and one that writes it."""
LEAST_PAIRED_BLOCKS = 10
"""Six of them are compiled."""
COMPILED_WHOLE = (
    "torch.compile ran on all blocks of the model, which takes longer: a few of them do not show what the "
    "others compile to"
)
AS_COMPILED = "under torch.compile"
"""Begins the assumptions on what compiled code would lose."""
FAILED = b'{"error"'
"""Begins an answer without a trace."""
RUNS = "The job itself is fine: trimtab follows it in other settings."
LONGEST_NOTE = "memory is that of longest(), the longest batch of the job; time is that of batch()"


def seed_random_numbers() -> None:
    """Seed random numbers equally in every process, so that estimates are reproducible."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


def prepare_job(requests: TraceRequests) -> Any:
    """Install the fake device and load the job; then import what every trace needs."""
    from trimtab.trace.block_masks import find_recorder
    from trimtab.trace.cuda_kernels import patch_cuda_kernels
    from trimtab.trace.fake_cuda import install_fake_cuda
    from trimtab.trace.flash_attn_package import stand_in_for_flash_attn
    from trimtab.trace.flex_attention import patch_flex_attention
    from trimtab.trace.hub_kernels import stand_in_for_hub_kernels
    from trimtab.trace.triton_kernels import patch_triton

    forget_special_facts()
    install_fake_cuda(requests.device)
    patch_flex_attention()
    stand_in_for_flash_attn()
    stand_in_for_hub_kernels()
    patch_triton(find_recorder)
    patch_cuda_kernels(find_recorder)
    # Jobs that draw lengths or layers at random draw the same ones for every setting.
    seed_random_numbers()
    job = load_job(requests.job, requests.overrides)
    import_ahead(job)
    return job


def reload_job(requests: TraceRequests) -> Any:
    """Load the job with other options, in a process that has it already."""
    seed_random_numbers()
    return load_job(requests.job, requests.overrides)


def trace_job(  # noqa: PLR0913 - a request, and how to trace it
    job: Any,
    request: TraceRequest,
    deliver: Callable[[Trace, str, bytes], None],
    *,
    rank: RankKind = ALIKE,
    how: str = CHECKED,
    timeout_s: float = 600.0,
    most_forks: int = MAX_FORKS,
) -> None:
    """Run the first steps of a job on fake tensors, record them, and deliver the trace.

    `how` says whether tracing a few of its equal blocks is enough; the way that was used is delivered too,
    and what the trace found out about results of operations. It may run `most_forks` forks at a time.
    """
    with _open_model(job, request, rank) as built:
        _trace_built(built, deliver, how=how, timeout_s=timeout_s, most_forks=most_forks)


@contextlib.contextmanager
def _open_model(job: Any, request: TraceRequest, rank: RankKind) -> Iterator[_BuiltModel]:
    """Build the model of a setting on fake tensors; it is the same for every micro-batch of the setting."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trimtab.trace.compiled import patch_torch_compile
    from trimtab.trace.kernels import Kernels
    from trimtab.trace.recorder import Recorder

    if request.setting.gpus > 1:
        _join_fake_group(request.setting)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(Kernels(request.device), fake_mode)
    patch_torch_compile(recorder)
    if _may_compile(job):
        # Load again, now that torch.compile is watched: a file may call it at import.
        job = load_job(request.job, request.overrides)
    with fake_mode, recorder:
        # Constants are created on the host and lifted, never copied to a device that does not exist.
        torch._C._set_only_lift_cpu_tensors(True)
        model = _build_model(job, request, recorder, rank.branch)
        _note_float8(model, request, recorder)
        _note_offload(request, recorder)
        yield _BuiltModel(job, model, request, recorder, rank)


def _trace_built(
    built: _BuiltModel,
    deliver: Callable[[Trace, str, bytes], None],
    *,
    how: str,
    timeout_s: float,
    most_forks: int,
) -> None:
    """Run the first steps with a model that was built, as `trace_job` says."""
    from trimtab.trace.repeated_blocks import has_long_list

    job, model, request, recorder, rank, _ = built
    built = built._replace(split=_find_split(job, model, request, rank))
    trace, is_right = None, False
    # A job that compiles its model itself has compiled it with all of its blocks.
    if how != WHOLE and _has_equal_blocks(request.setting) and not recorder.uses_compile:
        trace, is_right = _trace_by_few_blocks(
            built, check=how == CHECKED, timeout_s=timeout_s, most_forks=most_forks
        )
        if trace is None and request.setting.compile and has_long_list(model):
            recorder.kernels.assume(COMPILED_WHOLE)
    # Whether a few blocks show the others is a fact of the job; this setting may need all nevertheless.
    came = how if is_right else WHOLE
    trace = _trace_model(built) if trace is None else trace
    deliver(trace, came, recorder.kernels.values.results.pack_results())


def _has_equal_blocks(setting: Setting) -> bool:
    """Return whether a setting treats equal blocks alike, in one list: not with several stages on a rank."""
    way = setting.recompute.way
    return setting.virtual_stages == 1 and not way.is_partial and way.budget is None


def _note_offload(request: TraceRequest, recorder: Any) -> None:
    """Note what FSDP2 moves to the host beyond what was named."""
    from trimtab.engine.offload_rules import TOGETHER

    if request.setting.offload == (Offload.PARAMS,):
        recorder.kernels.assume(TOGETHER)


def _note_float8(model: Any, request: TraceRequest, recorder: Any) -> None:
    """Note which layers of the whole model multiply in 8 bits."""
    from trimtab.engine.float8 import describe_conversion

    if note := describe_conversion(model, request.setting.dtypes):
        recorder.kernels.assume(note)
        if strategy_of(request.setting).is_sharded:
            recorder.kernels.assume(GATHERED_WIDE)


class _BuiltModel(NamedTuple):
    """A model, and everything that is needed to trace its steps."""

    job: Any
    model: Any
    request: TraceRequest
    recorder: Any
    rank: RankKind
    split: StageSplit | None = None
    """Blocks of each pipeline stage; None without stages."""


SPLITS: dict[Setting, StageSplit] = {}
"""Blocks of pipeline stages that forks have found, by setting with one sample; the next forks have them."""


FUSED_AS_COMPILED: set[tuple[Setting, bool, RankKind]] = set()
"""Settings whose attention loses no fused kernel in compiled code, as forks have found; the next forks have
them. Recomputing repeats the same attention, and the micro-batch changes it only if there is one sample."""


REPEATING: set[tuple[Setting, bool, RankKind]] = set()
"""Settings whose second step repeats the passes of the first, as forks have found; the next forks copy
them."""


def _step_key(setting: Setting, rank: RankKind) -> tuple[Setting, bool, RankKind]:
    """Return all that decides whether compiled attention is fused, and whether steps are alike."""
    plain = _drop_micro_batch(setting).replace(recompute=Recompute.NONE)
    return plain, setting.micro_batch == 1, rank


def _find_split(job: Any, model: Any, request: TraceRequest, rank: RankKind) -> StageSplit | None:
    """Return the blocks of each pipeline stage; None without stages, or if the job cannot be cut."""
    from trimtab.engine.step import find_stage_split, make_meta_loss

    if rank.stage is None:
        return None
    setting = request.setting
    if (key := _drop_micro_batch(setting)) not in SPLITS:
        try:
            SPLITS[key] = find_stage_split(model, setting, make_meta_loss(job, setting))
        except TrimtabError:
            # It is raised again where all other reasons are checked too.
            return None
    return SPLITS[key]


def _drop_micro_batch(setting: Setting) -> Setting:
    """Return the setting with one sample: stages are the same for all micro-batches."""
    return setting.replace(micro_batch=1, accumulation=1, global_batch=setting.data_parallel, shares=())


def _pack_split(setting: Setting) -> bytes:
    """Return the stages of a setting as bytes, for the process that has forked this one."""
    split = SPLITS.get(_drop_micro_batch(setting))
    return b"" if split is None else pickle.dumps(split._replace(needs=dict(split.needs)))


def _trace_model(built: _BuiltModel, *, forward: bool = False, as_compiled: bool = True) -> Trace:
    """Trace the model as it is now; with `forward`, only its first forward pass.

    Without `as_compiled`, it does not look for what compiled code would lose.
    """
    from trimtab.trace import fake_ops

    recorder = built.recorder
    counts = _run_steps(built, forward=forward, as_compiled=as_compiled)
    recorder.paused = True
    chosen = built.job.assumptions if isinstance(built.job, Job) else ()
    if has_longest(built.job):
        chosen = (*chosen, LONGEST_NOTE)
    assumed = (
        *chosen,
        *fake_ops.list_script_assumptions(),
        *recorder.kernels.list_assumptions(),
    )
    phases = counts.pop("update_phases", [])
    assumed += tuple(note for note in map(_frequency_note, phases) if note)
    compiled = counts.pop("lost_compiled", {})
    assumed += tuple(f"{AS_COMPILED} {text}" for text in compiled)
    if not forward:
        several = "the optimizers have their own losses, which trimtab does not compile"
        counts["no_compile_gain"] = several if len(phases) > 1 else _no_compile_gain(recorder, compiled)
    return Trace(**_columns(recorder), **counts, assumptions=assumed)


def _frequency_note(phase: UpdatePhase) -> str:
    """Return a note on a loss that is not computed in every step; empty if it is."""
    if phase.every == 1:
        return ""
    return f"time: a step in which {phase.name} is updated, which is one in {phase.every}; others are shorter"


def _no_compile_gain(recorder: Any, unfused: dict[str, None]) -> str:
    """Return why torch.compile would not make this step faster; empty if the eager trace shows no reason."""
    if recorder.kernels.double_backward:
        return "the loss differentiates a gradient, which torch.compile does not support"
    calls = {work.op for work in recorder.works if work.kind == "call"}
    if calls and ENTER not in calls:
        return "loss() calls neither the model nor its methods or direct parts, so nothing is compiled"
    return "attention loses its fused kernel" if unfused else ""


def _trace_by_few_blocks(
    built: _BuiltModel, *, check: bool, timeout_s: float, most_forks: int
) -> tuple[Trace | None, bool]:
    """Compute the trace from traces with few equal blocks; None if the whole model has to be traced.

    With `check`, a forward pass computed in this way must equal a traced one of the whole model: a job may do
    something at the tenth block that the first four do not show. The check uses the simplest setting. Whether
    it does is returned too; without `check`, whether there is a trace.
    """
    from trimtab.trace.compiled import warm_compiler
    from trimtab.trace.repeated_blocks import COMPILED, EAGER, find_cuttable_lists, list_allocations

    compiled = built.request.setting.compile
    lists = find_cuttable_lists(built.model, COMPILED if compiled else EAGER)
    if not lists:
        return None, False
    given = f"job {built.request.job}"
    small = list(itertools.product((FEW_BLOCKS, FEW_BLOCKS + 1), repeat=len(lists)))
    is_right = False

    def run_tasks(tasks: list[Callable[[SendAnswer], None]]) -> list[Trace]:
        answers = {}
        for place, answer in run_forked(tasks, given, timeout_s=timeout_s, most=most_forks):
            answers[place] = _read_few_blocks(built, answer)
        return _copy_compiled_notes([answers[place] for place in range(len(tasks))])

    def traced(built: _BuiltModel, sizes: list[tuple[int, ...]], *, forward: bool) -> list[Trace]:
        return run_tasks(
            [
                _few_blocks_task(
                    built, dict(zip(lists, size, strict=True)), forward=forward, as_compiled=size == sizes[-1]
                )
                for size in sizes
            ]
        )

    try:
        if check:
            all_of_them = tuple(items.length for items in lists)
            *some, whole = traced(_simplify_setting(built), [*small, all_of_them], forward=True)
            guess = _extend_lists(some, lists, reuses=False)
            is_right = guess is not None and list_allocations(guess) == list_allocations(whole)
            if not is_right:
                return None, False
        if compiled:
            warm_compiler(built.recorder)
        if built.rank.stage is not None:
            stage = _find_few_stage(built, lists)
            trace = None if stage is None else stage.extend(*run_tasks(stage.make_tasks(built)))
            return trace, is_right or trace is not None
        few = traced(built, small, forward=False)
        trace = _extend_lists(few, lists, reuses=compiled)
        trace = _finish_compiled(
            built, trace, few[-1], lists, lambda count: traced(built, [(count,)], forward=False)[0]
        )
    except TrimtabError:
        # On any error, trace the whole model: it succeeds or gives a better message.
        return None, is_right
    return trace, is_right or trace is not None


class _FewStage(NamedTuple):
    """A pipeline stage that is traced with few of its blocks; the stages around it keep theirs."""

    blocks: RepeatedBlocks
    split: StageSplit
    """That of the whole model."""
    number: int

    @property
    def own(self) -> int:
        """Return the number of blocks of this stage."""
        return self.split.layers[self.number]

    def make_tasks(self, built: _BuiltModel) -> list[Callable[[SendAnswer], None]]:
        """Return tasks that trace the stage with few blocks, and with one more."""
        tasks = []
        for count in (FEW_BLOCKS, FEW_BLOCKS + 1):
            layers = list(self.split.layers)
            layers[self.number] = count
            cut = built._replace(split=self.split.shorten(tuple(layers)))
            is_last = count > FEW_BLOCKS
            tasks.append(
                _few_blocks_task(cut, {self.blocks: sum(layers)}, forward=False, as_compiled=is_last)
            )
        return tasks

    def extend(self, few: Trace, more: Trace) -> Trace | None:
        """Return the trace of the whole stage."""
        trace = extend_blocks(
            few,
            more,
            blocks=self.blocks.name,
            traced=FEW_BLOCKS + 1,
            total=self.own,
            elsewhere=self.blocks.length - self.own,
        )
        return None if trace is None else trace.replace(stage_layers=self.split.layers)


def _find_few_stage(built: _BuiltModel, lists: list[RepeatedBlocks]) -> _FewStage | None:
    """Return the stage to trace with few blocks; None if it has few, or if the model has other long lists."""
    from trimtab.engine.pipeline_stage import find_block_chain

    stage, split = built.rank.stage, built.split
    if len(lists) != 1 or stage is None or find_block_chain(built.model).name != lists[0].name:
        return None
    if split is None or len(split.layers) != built.request.setting.mesh.pp:
        return None
    few = _FewStage(lists[0], split, stage)
    return few if few.own >= LEAST_STAGE_BLOCKS else None


def _copy_compiled_notes(traces: list[Trace]) -> list[Trace]:
    """Return the traces with what compiled code would lose: only the last one looked for it."""
    *others, last = traces
    notes = tuple(note for note in last.assumptions if note.startswith(AS_COMPILED))
    return [*(trace.replace(assumptions=(*trace.assumptions, *notes)) for trace in others), last]


def _finish_compiled(
    built: _BuiltModel,
    trace: Trace | None,
    few: Trace,
    lists: list[RepeatedBlocks],
    trace_blocks: Callable[[int], Trace],
) -> Trace | None:
    """Return a compiled trace with a note on the models that were compiled; try pairs if there is no trace.

    `few` is the trace of one block more than `FEW_BLOCKS`. `trace_blocks` traces another number of blocks.
    An eager trace is returned as it is.
    """
    if not built.request.setting.compile:
        return trace
    counts = FEW_BLOCKS, FEW_BLOCKS + 1
    total = lists[0].length
    if trace is None and len(lists) == 1 and total >= LEAST_PAIRED_BLOCKS and total % PAIR == 0:
        counts = counts[1], counts[1] + PAIR
        trace = extend_blocks(
            few,
            trace_blocks(counts[1]),
            blocks=lists[0].name,
            traced=counts[1],
            total=total,
            reuses=True,
            step=PAIR,
        )
    if trace is None:
        return None
    small = " and ".join(map(str, counts))
    words = " and ".join(f"{small} of the {items.length} blocks in {items.name}" for items in lists)
    note = f"torch.compile ran on models with {words}; the other blocks repeat what they show"
    return trace.replace(assumptions=(*trace.assumptions, note))


def _extend_lists(some: list[Trace], lists: list[RepeatedBlocks], *, reuses: bool) -> Trace | None:
    """Extend traces of small models to the whole; of each two neighbours, one has one block more."""
    if not lists:
        return some[0]
    *others, last = lists
    longer = [
        extend_blocks(few, more, blocks=last.name, traced=FEW_BLOCKS + 1, total=last.length, reuses=reuses)
        for few, more in zip(some[::2], some[1::2], strict=True)
    ]
    extended = [trace for trace in longer if trace is not None]
    return _extend_lists(extended, others, reuses=reuses) if len(extended) == len(longer) else None


class _FewBlocksAnswer(msgspec.Struct):
    """The trace of a model with few blocks, as a fork sends it."""

    trace: Any
    results: bytes
    """Results of operations, for the next forks."""
    repeats: bool
    """Whether its second step repeats the passes of the first."""


def _read_few_blocks(built: _BuiltModel, answer: bytes) -> Trace:
    """Return the trace of a fork with few blocks, and learn what it found out; raise its error."""
    decoded = decode_answer(answer)
    if isinstance(decoded, TrimtabError):
        raise decoded
    sent = msgspec.convert(decoded, _FewBlocksAnswer)
    built.recorder.kernels.values.results.add_results(sent.results)
    if sent.repeats:
        REPEATING.add(_step_key(built.request.setting, built.rank))
    return Trace.from_builtins(sent.trace)


def _few_blocks_task(
    built: _BuiltModel, counts: dict[RepeatedBlocks, int], *, forward: bool, as_compiled: bool
) -> Callable[[SendAnswer], None]:
    """Return a task that traces the model with only the first blocks of its lists."""

    def task(say: SendAnswer) -> None:
        from trimtab.trace.compiled import allocate_separately
        from trimtab.trace.repeated_blocks import cut_blocks

        # Keep the removed blocks alive: their memory counts.
        taken = [cut_blocks(key, count) for key, count in counts.items()]
        if built.request.setting.compile:
            allocate_separately()
        trace = _trace_model(built, forward=forward, as_compiled=as_compiled)
        del taken
        results = built.recorder.kernels.values.results.pack_results()
        repeats = _step_key(built.request.setting, built.rank) in REPEATING
        say(msgspec.json.encode(_FewBlocksAnswer(trace, results, repeats)))

    return task


def _simplify_setting(built: _BuiltModel) -> _BuiltModel:
    """Return the same model in eager mode on one device, without recomputation."""
    setting = built.request.setting.replace(recompute=Recompute.NONE, compile=False)
    if not built.rank.branch:
        setting = one_micro_batch(setting)
    rank = built.rank._replace(stage=None)
    return built._replace(request=built.request.replace(setting=setting), rank=rank, split=None)


def _may_compile(job: Any) -> bool:
    """Return whether the source file of a job contains "compile"."""
    file = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    try:
        return file is None or "compile" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def _join_fake_group(setting: Setting) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    look_once_for_strided_shards()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.gpus)


def look_once_for_strided_shards() -> None:
    """Skip what torch does for strided shards where an operation has none, and look for them once.

    It looks through all tensors of an operation for each of them. Where an optimizer has hundreds, that is
    half of the function calls of a trace.
    """
    from torch.distributed.tensor import _sharding_prop as propagation
    from torch.distributed.tensor.placement_types import _StridedShard

    functions, name = vars(propagation), "_propagate_use_strided_shard_flag"
    if name not in functions:
        return
    fix_flags, last = functions[name], [None, False]

    def fix_strided_flags(strategy: Any, schema: Any) -> None:
        if last[0] is not schema:
            places = (place for spec in schema.args_spec for place in spec.placements)
            last[:] = schema, any(isinstance(place, _StridedShard) for place in places)
        if last[1]:
            fix_flags(strategy, schema)

    functions[name] = fix_strided_flags


def _build_model(job: Any, request: TraceRequest, recorder: Any, branch: str) -> Any:
    """Build the job's model on the fake device."""
    from trimtab.engine import step as steps
    from trimtab.trace.fake_cuda import hide_fake_tensors

    recorder.mark_phase("build", "weights")
    dropped: list[Any] = []
    with _blame_member("model()"):
        model = steps.build_model(job, request.setting, branch=branch, dropped=dropped)
    if {parameter.device.type for parameter in (*model.parameters(), *model.buffers())} == {"cpu", "cuda"}:
        # torch.Tensor(size) and similar calls ignore the default device; a trainer moves the whole model.
        model.to("cuda")
    if dropped:
        recorder.forget_modules(dropped)
    # Only now are all libraries of the model loaded.
    hide_fake_tensors()
    return model


def _run_steps(built: _BuiltModel, *, forward: bool, as_compiled: bool) -> dict[str, Any]:
    from trimtab.engine import step as steps
    from trimtab.engine.expert_parallel import describe_experts
    from trimtab.engine.quantize import count_weights
    from trimtab.engine.tensor_plan import describe_split
    from trimtab.trace.host_state import measure_host_state

    job, model, request, recorder, rank, split = built
    setting = request.setting
    with _blame_member("model()"):
        state = steps.assemble_job(job, model, setting, branch=rank.branch, stage=rank.stage, split=split)
    if state.stage is not None:
        # These modules are built on the host and never moved to this device.
        recorder.forget_modules(state.stage.dropped, state.stage.absent)
        state.stage.dropped.clear()
        state.stage.absent.clear()
        state.stage.note = recorder.note_phase
    names = _watch_gradients(state, recorder)
    if not recorder.uses_compile:
        # Compiled code has no modules, and hooks would be compiled too.
        recorder.track_modules(state.model, state.entries)
    if state.after_step is not None:
        state.after_step = _blame_hook("after_step()", state.after_step)
    recorder.mark_phase("batch", "inputs")
    # The longest batch gives the memory, and the usual one the time.
    longest = has_longest(job)
    batch = _make_batch(job, setting, longest=longest)
    _note_other_size(built, batch)
    if forward:
        recorder.mark_phase("step0", "activations")
        with _blame_member("loss()"):
            for phase in state.phases:
                steps.compute_loss(state, batch, phase.loss)
        return {}
    if not recorder.uses_compile:
        _note_is_compiling_calls(recorder.kernels)
        _note_double_backward(recorder.kernels)
    kept = _run_timed_steps(built, state, batch, names)
    # Measured here: a forward pass without a backward pass leaves the weights of the root whole.
    on_host = measure_host_state(state)
    recorder.mark_phase("end", "activations")
    if longest:
        _record_usual_step(built, state)
    recorder.records_work = False
    _note_varying_sizes(built, batch)
    if state.offload is not None and not state.offload.peak_sizes:
        recorder.kernels.assume(NOTHING_MOVED)
    notes = describe_experts(state.experts, setting.expert_imbalance)
    notes += state.stage_notes
    for note in (*describe_split(state.tensor_plan), *notes):
        recorder.kernels.assume(note)
    is_known = _step_key(setting, rank) in FUSED_AS_COMPILED
    lost_compiled = _lost_by_compiling(state, batch, recorder) if as_compiled and not is_known else {}
    sizes = [(count_weights(parameter), parameter.requires_grad) for parameter in state.model.parameters()]
    return {
        "parameters": sum(count for count, _ in sizes),
        "trainable": sum(count for count, learns in sizes if learns),
        "recomputed": state.recomputed,
        **on_host,
        "host_sizes": () if state.offload is None else state.offload.peak_sizes,
        "part": rank.number,
        "rank": rank.words,
        "lost_compiled": lost_compiled,
        "update_phases": state.phases,
        **(
            {}
            if state.stage is None
            else {
                "kept_bytes": kept[1],
                "handed_bytes": state.stage.handed_bytes,
                "outside": state.stage.outside,
                "shared": state.stage.shared,
                "shared_stages": state.stage.shared_stages,
                "stage_layers": state.stage.layers,
                "block_work": state.stage.split.work,
            }
        ),
    }


def _run_timed_steps(built: _BuiltModel, state: Any, batch: Any, names: dict[int, str]) -> list[int]:
    """Run the steps of a trace; return the bytes that each forward pass left for its backward pass."""
    from trimtab.engine import step as steps
    from trimtab.trace.compiled import sort_gradient_marks
    from trimtab.trace.repeated_steps import PassRepeater, repeat_step

    request, recorder = built.request, built.recorder
    key = _step_key(request.setting, built.rank)
    repeater = PassRepeater(recorder, state)
    kept: list[int] = []
    values = recorder.kernels.values
    values.is_training = True
    for number in range(STEPS):
        if number == 1:
            repeater.end_first_step()
            if values.has_drawn_sizes:
                _run_drawn_steps(built, state, batch)
        if number == STEPS - 1:
            # Eager code is steady after two steps; compiled code is still being tuned.
            is_steady = not recorder.uses_compile and not values.has_drawn_sizes
            if is_steady and repeat_step(recorder, "step0", "step1", "step2"):
                break
            recorder.clear_works()
        recorder.mark_phase(f"step{number}", "activations")
        recorder.records_work = number > 0 or repeater.is_possible
        copies = number == 1 and key in REPEATING and not values.has_drawn_sizes and repeater.can_copy()
        if copies:
            repeater.hold_gradients()
        passes = repeater.copy_passes if copies else repeater.note_passes
        with _blame_member("loss()"):
            steps.run_step(
                state,
                [batch],
                clip=request.clip,
                between=lambda: kept.append(recorder.live_bytes()),
                run_passes=passes if repeater.is_possible else None,
            )
        if copies:
            repeater.end_copied_step()
        _label_tensors(state, recorder, names)
        if number == 1 and not copies and repeater.is_repeated():
            REPEATING.add(key)
    if recorder.uses_compile:
        sort_gradient_marks(recorder, list(names.values()))
    return kept


def _run_drawn_steps(built: _BuiltModel, state: Any, batch: Any) -> None:
    """Run more steps after the first one, whose random numbers give tensors other sizes.

    Memory that is cached for one size is too small for a larger one, so the reserved memory grows.
    """
    from trimtab.engine import step as steps
    from trimtab.spec.trace import DRAWN_STEP

    built.recorder.records_work = False
    for number in range(DRAWN_STEPS - STEPS):
        built.recorder.mark_phase(f"{DRAWN_STEP}{number}", "activations")
        with _blame_member("loss()"):
            steps.run_step(state, [batch], clip=built.request.clip)
    built.recorder.kernels.assume(DRAWN_NOTE)


OTHER_SIZE = "batch(size) returned no tensor with `size` rows: it is taken to be `size` samples"
"""Assumption about a batch that does not have the requested size, as far as its shapes tell."""


def _note_other_size(built: _BuiltModel, batch: Any) -> None:
    """Note that a batch does not have the requested size; one with a part of each sequence is left out."""
    request, setting = built.request, built.request.setting
    if comes_with_trimtab(request.job) or setting.mesh.cp > 1 or _has_samples(batch, setting.micro_batch):
        return
    built.recorder.kernels.assume(OTHER_SIZE)


VARYING_SIZES = (
    "batch(size) has other sizes with other random numbers: memory and time are those of one draw; "
    "longest(size) gives memory for the longest"
)
"""Assumption about a batch whose shapes are random."""


def _note_varying_sizes(built: _BuiltModel, batch: Any) -> None:
    """Note that another draw of batch() has other shapes, if the job has no longest()."""
    import torch

    from trimtab.engine.step import make_batch

    if comes_with_trimtab(built.request.job) or has_longest(built.job):
        return
    with built.recorder.discard_changes():
        random.seed(1)
        torch.manual_seed(1)
        with contextlib.suppress(Exception):
            other = make_batch(built.job, built.request.setting, "cuda")
            if _list_shapes(other) != _list_shapes(batch):
                built.recorder.kernels.assume(VARYING_SIZES)
            del other
    seed_random_numbers()


def _list_shapes(batch: Any) -> list[tuple[int, ...]]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _has_samples(batch: Any, samples: int) -> bool:
    """Return whether a tensor, list or tuple of a batch has that many entries, or it has no tensor."""
    shapes = [shape for shape in _list_shapes(batch) if shape]
    lists = [batch, *(batch.values() if isinstance(batch, dict) else ())]
    sizes = [len(item) for item in lists if isinstance(item, list | tuple)]
    return not shapes or samples in (*sizes, *(shape[0] for shape in shapes))


def _make_batch(job: Any, setting: Setting, *, longest: bool) -> Any:
    """Return a micro-batch of batch() or longest() on the fake device."""
    from trimtab.engine import step as steps

    seed_random_numbers()
    member = f"{'longest' if longest else 'batch'}({setting.micro_batch})"
    with _blame_member(member):
        batch = steps.make_batch(job, setting, "cuda", longest=longest)
    if batch is None:
        raise JobFailed(member, found="it returned None", cure="Return the tensors of so many samples.")
    return batch


def _record_usual_step(built: _BuiltModel, state: Any) -> None:
    """Replace the operations of the last step by those of a step with batch(); memory stays as it is."""
    from trimtab.engine import step as steps

    job, request, recorder = built.job, built.request, built.recorder
    with recorder.discard_changes():
        batch = _make_batch(job, request.setting, longest=False)
        recorder.clear_works()
        with _blame_member("loss()"):
            steps.run_step(state, [batch], clip=request.clip)
        del batch


def _blame_hook(member: str, hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return the hook with errors that name it."""

    def run_hook(model: Any) -> None:
        with _blame_member(member):
            hook(model)

    return run_hook


def _watch_gradients(state: Any, recorder: Any) -> dict[int, str]:
    """Label gradient tensors, or watch where they are allocated; return the names of parameters by id."""
    from trimtab.engine.gradients import LocalGradients
    from trimtab.engine.in_backward import InBackwardGradients

    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    for phase in state.phases:
        if isinstance(phase.gradients, InBackwardGradients):
            # Such a gradient does not exist any more when others are labelled, after the step.
            phase.gradients.before_update = lambda parameter: _note_update(recorder, parameter, names)
        if isinstance(phase.gradients, LocalGradients):
            for parameter in phase.parameters:
                recorder.watch_gradient(parameter, names[id(parameter)])
        else:
            for gradient in phase.gradients.local_gradients():
                recorder.relabel(gradient, "gradients")
    return names


def _note_update(recorder: Any, parameter: Any, names: dict[int, str]) -> None:
    """Label a gradient that is freed after its update, and count the call of the optimizer."""
    from trimtab.trace.recorder import UPDATE_WORK

    if parameter.grad is not None:
        recorder.relabel(parameter.grad, "gradients", names[id(parameter)])
    if recorder.records_work:
        recorder.add_work(UPDATE_WORK)


def _note_double_backward(kernels: Any) -> None:
    """Record from now on whether a gradient is computed with `create_graph`."""
    import torch

    def noting(whole: Callable[..., Any], place: int) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            create_graph = kwargs.get("create_graph", args[place] if len(args) > place else False)
            kernels.double_backward = kernels.double_backward or bool(create_graph)
            return whole(*args, **kwargs)

        return called

    torch.autograd.grad = noting(torch.autograd.grad, 4)
    torch.autograd.backward = noting(torch.autograd.backward, 3)


def _note_is_compiling_calls(kernels: Any) -> None:
    """Record from now on whether code outside of torch calls `torch.compiler.is_compiling`."""
    import sys

    import torch

    whole = torch.compiler.is_compiling

    def is_compiling() -> bool:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            kernels.checks_compiling = True
        return whole()

    torch.compiler.is_compiling = is_compiling


def _lost_by_compiling(state: Any, batch: Any, recorder: Any) -> dict[str, None]:
    """Return why attention would lose its fused kernel in compiled code.

    Some libraries build other masks if `torch.compiler.is_compiling()` is true. So run one more forward pass
    in which it returns True. Running the compiler itself would take a minute.
    """
    import torch

    from trimtab.engine import step as steps

    before = recorder.kernels.unfused_notes
    if recorder.uses_compile or not (recorder.kernels.uses_attention and recorder.kernels.checks_compiling):
        return {}
    notes: dict[str, None] = {}
    recorder.kernels.unfused_notes = notes
    asked, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
    try:
        with recorder.discard_changes():
            steps.compute_loss(state, batch)
    except Exception:  # noqa: BLE001 - code that only a compiler can run gives no result
        notes.clear()
    finally:
        torch.compiler.is_compiling = asked
        recorder.kernels.unfused_notes = before
    return {text: None for text in notes if text not in before}


def _label_tensors(state: Any, recorder: Any, names: dict[int, str]) -> None:
    """Label gradients, with their parameter, and optimizer state in the recorder."""
    import torch

    def local(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    for parameter in state.parameters:
        if parameter.grad is not None:
            recorder.relabel(local(parameter.grad), "gradients", names.get(id(parameter)))
    optimizers = [named.optimizer for phase in state.phases for named in phase.optimizers]
    for tensors in (entry for optimizer in optimizers for entry in optimizer.state.values()):
        for value in tensors.values():
            if isinstance(value, torch.Tensor):
                recorder.relabel(local(value), "optimizer")


@contextlib.contextmanager
def _blame_member(member: str) -> Any:
    """Turn an error into one that names the job's member; whether the job is at fault is checked later."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        # The compiler wraps the original error.
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, ImportError):
            raise job_error(member, inner, "Install what the job needs on this machine too.") from error
        if REFUSES_AUTOCAST in str(inner):
            cure = "Use --precision tf32 or fp32, or a loss of logits, which autocast allows."
            raise job_error(member, inner, cure) from error
        if type(inner).__name__ == MIXED_DEVICES:
            raise _mixed_devices_error(member, inner) from error
        if inner is not error:
            cure = "Leave compiling out; if it works on a GPU, this is a bug in trimtab: please report it."
            raise tracing_error(f"torch.compile in {member}", inner, cure) from error
        cure = (
            "Write that part with other operations, or measure the job on a GPU with `trimtab profile`. "
            "Please report it, with the operation."
        )
        raise tracing_error(member, inner, cure) from error


def _mixed_devices_error(member: str, error: Exception) -> TrimtabError:
    """Return the error for an operation on tensors of the GPU and of the CPU: a GPU refuses it too."""
    return job_error(
        member,
        error,
        "On a GPU, that line needs all its tensors on the GPU. Make new ones there, as in torch.zeros(10, "
        "device=x.device), and register constants of the model as buffers. If the line works on a GPU, this "
        "is a bug in trimtab: please report it.",
    )


MIXED_DEVICES = "FakeTensorDeviceMismatchError"
"""Class of torch's error for an operation on tensors of several devices."""
REFUSES_AUTOCAST = "unsafe to autocast"
"""Part of torch's error for a loss that may not run in half precision."""


def _columns(recorder: Any) -> dict[str, Any]:
    names: dict[str, int] = {}
    ops: dict[str, int] = {}
    return {
        # Ignore frees after the end of the last step.
        "order": tuple(recorder.order[: recorder.marks.get("end")]),
        "sizes": tuple(recorder.sizes),
        "streams": tuple(recorder.streams),
        "parts": tuple(PARTS.index(part) for part in recorder.parts),
        "modules": tuple(names.setdefault(name, len(names)) for name in recorder.modules),
        "ops": tuple(ops.setdefault(name, len(ops)) for name in recorder.ops),
        "module_names": tuple(names),
        "op_names": tuple(ops),
        "marks": dict(recorder.marks),
        **_causes(recorder),
        "works": tuple(recorder.works),
        "sequence": tuple(recorder.sequence),
        "phases": recorder.phases(),
        "recomputed_flops": recorder.recomputed_flops,
    }


def _causes(recorder: Any) -> dict[str, Any]:
    places: dict[Any, int] = {}
    caused = tuple(
        (number, places.setdefault(cause, len(places))) for number, cause in recorder.causes.items()
    )
    return {"causes": tuple(places), "caused": caused}


class _TraceHeader(msgspec.Struct):
    """The part of a trace that this process reads."""

    assumptions: list[str] = []

    @property
    def lost_compiled(self) -> list[str]:
        """What compiled code would lose."""
        return [note for note in self.assumptions if note.startswith(AS_COMPILED)]


class _AnswerHeader(msgspec.Struct):
    """The part of an answer that this process reads."""

    imported: list[str] = []
    how: str = ""
    """How the blocks were traced: WHOLE, FEWER or CHECKED."""
    results: bytes = b""
    """Results of operations, for the next forks."""
    split: bytes = b""
    """Blocks of each pipeline stage, for the next forks; empty without stages."""
    repeats: bool = False
    """Whether the second step repeats the passes of the first."""
    trace: _TraceHeader | None = None
    """None if tracing failed."""


class _RankRequest(NamedTuple):
    """What one fork traces: a request, for one kind of rank."""

    number: int
    """Index of the request."""
    request: TraceRequest
    rank: RankKind


class JobChecks:
    """Results of checks of a job, kept between requests."""

    few: bool | None = None
    """Whether tracing a few blocks gives the whole trace; None before the check."""
    outcome: CpuCheckResult | None = None
    """Result of running the job on the CPU; None before the check."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        """Micro-batches at which the job was traced."""

    def has_run(self, setting: Setting) -> bool:
        """Whether the job was traced with so many samples; without what the setting changes, about so many.

        A job may refuse a number of samples between two that it takes.
        """
        if setting.base is BaseFormat.NONE and not setting.offload:
            return setting.micro_batch in self.sizes
        return bool(self.sizes) and min(self.sizes) <= setting.micro_batch <= max(self.sizes)


def _serve_requests() -> None:
    """Answer requests for one job, a line each, until stdin ends."""
    end_with_parent()
    warnings.simplefilter("ignore")
    stdout, job, checks = redirect_stdout(), None, JobChecks()
    loaded: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        requests = TraceRequests.from_json(line)
        try:
            if job is not None and requests.overrides != loaded:
                # With other options it may be another model: nothing that was learned of it holds.
                job, checks = reload_job(requests), JobChecks()
                SPLITS.clear()
                FUSED_AS_COMPILED.clear()
                REPEATING.clear()
            job = prepare_job(requests) if job is None else job
            loaded = requests.overrides
            answers = _answer_requests(job, requests, checks)
        except TrimtabError as error:
            answers = encode_error(_check_load_failure(error, requests))
        stdout.write(answers + END)
        stdout.flush()
    os._exit(0)


def _answer_requests(job: Any, requests: TraceRequests, checks: JobChecks) -> bytes:
    """Return a line for each setting; nothing if the request only loads the job."""
    if not requests.settings:
        return b""
    checks.few = False if requests.whole else checks.few
    parts = [
        _RankRequest(number, request, rank)
        for number, request in enumerate(requests.each())
        for rank in _rank_kinds(job, request)
    ]
    lines: dict[int, dict[RankKind, bytes]] = {}
    answers = _trace_ranks(job, requests, parts, checks)
    checks.sizes |= {
        part.request.setting.micro_batch
        for part, answer in zip(parts, answers, strict=True)
        if not answer.startswith(FAILED)
    }
    for part, answer in zip(parts, answers, strict=True):
        lines.setdefault(part.number, {})[part.rank] = _check_failure(answer, part.request, checks)
    return b"\n".join(map(_merge_ranks, lines.values()))


def _check_failure(answer: bytes, request: TraceRequest, checks: JobChecks) -> bytes:
    """Return the answer; if tracing failed, run the job on the CPU to find out whether it is at fault."""
    if not answer.startswith(FAILED):
        return answer
    error = decode_answer(answer)
    if not isinstance(error, CannotFollow):
        return answer
    if checks.has_run(request.setting):
        # Only this setting fails, such as a base of 4 bits: running the job on the CPU would take longer.
        return encode_error(CannotFollow(error.given, found=error.found, cure=f"{RUNS} {error.cure}"))
    small = CpuCheck(job=request.job, overrides=request.overrides, micro_batch=request.setting.micro_batch)
    if error.given.startswith(("batch(", "longest(")):
        # It may fail only at this size.
        return encode_error(blame_error(error, check_on_cpu(small.replace(member="batch()"))))
    if checks.outcome is None:
        checks.outcome = check_on_cpu(small)
    return encode_error(blame_error(error, checks.outcome))


def _check_load_failure(error: TrimtabError, requests: TraceRequests) -> TrimtabError:
    """Return the error of loading a job: CannotFollow if the job loads without the fake device."""
    if type(error) is not JobFailed:
        return error
    outcome = check_on_cpu(CpuCheck(job=requests.job, overrides=requests.overrides, member="load"))
    if outcome.failure is not None or outcome.untried:
        return outcome.failure or error
    cure = (
        "Without the GPU that trimtab pretends to have, it loads. Ask for CUDA inside model(), not at import."
    )
    return CannotFollow(error.given, found=error.found, cure=cure)


def _trace_ranks(
    job: Any, requests: TraceRequests, parts: list[_RankRequest], checks: JobChecks
) -> list[bytes]:
    """Return the answer to each part; trace parts with all blocks if the check of few blocks fails.

    The first eager part is checked for all eager parts, and each compiled part for itself: shorter lists of
    blocks are worth cutting.
    """
    compiled = [part.request.setting.compile for part in parts]
    ways = [WHOLE if checks.few is False else FEWER] * len(parts)
    cuttable = [_has_equal_blocks(part.request.setting) for part in parts]
    # A setting that needs all blocks in any case checks nothing.
    first = min(range(len(parts)), key=lambda place: (not cuttable[place], compiled[place]))
    if checks.few is None:
        ways = [
            CHECKED if place == first or is_compiled else FEWER for place, is_compiled in enumerate(compiled)
        ]
    answers = _run_forks(job, requests, list(zip(parts, ways, strict=True)))
    came = [msgspec.json.decode(answer, type=_AnswerHeader).how for answer in answers]
    is_checked = ways[first] == CHECKED and cuttable[first]
    if is_checked and came[first] and (came[first] == CHECKED or not compiled[first]):
        checks.few = came[first] == CHECKED
    doubtful = [place for place, how in enumerate(came) if how == FEWER]
    if checks.few or not doubtful:
        return answers
    again = _run_forks(job, requests, [(parts[place], WHOLE) for place in doubtful])
    for place, answer in zip(doubtful, again, strict=True):
        answers[place] = answer
    return answers


def _run_forks(job: Any, requests: TraceRequests, parts: list[tuple[_RankRequest, str]]) -> list[bytes]:
    """Trace each part in a fork, in the given way; return the answers.

    Parts that differ only in the micro-batch are forks of one fork, which builds their model.
    """
    from trimtab.trace.result_cache import share_results

    before = frozenset(sys.modules)
    given = f"job {requests.job}"
    groups = _group_alike([part for part, _ in parts])

    def trace_part(built: _BuiltModel, place: int, say: SendAnswer) -> None:
        part, how = parts[place]
        setting = part.request.setting

        def deliver(trace: Trace, came: str, results: bytes) -> None:
            answer = {
                "trace": trace,
                "imported": imported_since(before),
                "how": came,
                "results": results,
                "split": _pack_split(setting),
                "repeats": _step_key(setting, part.rank) in REPEATING,
                "is_for_one_device": setting.compile or is_for_one_device(),
            }
            say(msgspec.json.encode(answer))

        # A fork beside others runs its own forks one after the other: the second knows what the first
        # found out. Compiling takes too long to wait.
        _trace_built(
            built._replace(request=part.request),
            deliver,
            how=how,
            timeout_s=requests.timeout_s,
            most_forks=MAX_FORKS if setting.compile or len(parts) == 1 else 1,
        )

    def task(places: list[int]) -> Callable[[SendAnswer], None]:
        def work(say: SendAnswer) -> None:
            first, _ = parts[places[0]]
            with _open_model(job, first.request, first.rank) as built:
                if len(places) == 1:
                    trace_part(built, places[0], say)
                cached = built.recorder.kernels.values.results
                most = MAX_FORKS if len(groups) == 1 else 1
                answers = {}
                for number, answer in run_forked(
                    [partial(trace_part, built, place) for place in places],
                    given,
                    timeout_s=requests.timeout_s,
                    most=most,
                    held_bytes=resident_bytes(os.getpid()),
                ):
                    answers[number] = answer
                    if most == 1 and len(answers) < len(places):
                        results = _learn_from(answer, parts[places[number]][0])
                        share_results(results)
                        cached.add_results(results)
                say(b"\n".join(answers[number] for number in range(len(places))))

        return work

    answers = {}
    for number, lines in run_forked(
        [task(places) for places in groups],
        given,
        timeout_s=requests.timeout_s * max(map(len, groups)),
        learn=_import_same,
    ):
        places, several = groups[number], lines.splitlines()
        # An error of the model concerns all parts that would have used it.
        several = several if len(several) == len(places) else several[:1] * len(places)
        for place, answer in zip(places, several, strict=True):
            answers[place] = answer
            share_results(_learn_from(answer, parts[place][0]))
    return [answers[place] for place in range(len(parts))]


def _group_alike(parts: list[_RankRequest]) -> list[list[int]]:
    """Return the places of parts whose model is the same; compiled parts have a fork each."""
    groups: dict[Hashable, list[int]] = {}
    for place, part in enumerate(parts):
        setting = part.request.setting
        key = place if setting.compile else (_drop_micro_batch(setting), part.rank)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _import_same(lines: bytes) -> None:
    """Import what forks had to import, for the next forks."""
    for line in lines.splitlines():
        import_modules(msgspec.json.decode(line, type=_AnswerHeader).imported)


def _learn_from(answer: bytes, part: _RankRequest) -> bytes:
    """Keep what a fork found out, for the next forks; return the results of operations."""
    header = msgspec.json.decode(answer, type=_AnswerHeader)
    setting, rank = part.request.setting, part.rank
    if header.trace is not None and setting.recompute is Recompute.NONE and not header.trace.lost_compiled:
        FUSED_AS_COMPILED.add(_step_key(setting, rank))
    if header.repeats:
        REPEATING.add(_step_key(setting, rank))
    if header.split:
        SPLITS[_drop_micro_batch(setting)] = pickle.loads(header.split)  # noqa: S301 - a fork wrote it
    return header.results


def _rank_kinds(job: Any, request: TraceRequest) -> list[RankKind]:
    """Return the kinds of ranks of a setting, which differ in their memory."""
    strategy = strategy_of(request.setting)
    branches: list[str] = []
    if strategy.needs_branches:
        from trimtab.engine.branches import get_branches

        branches = list(get_branches(job))
    return strategy.rank_kinds(request.setting.mesh, branches)


def _merge_ranks(answers: dict[RankKind, bytes]) -> bytes:
    """Return the trace of the first kind of rank, with the others in `beside`; or the first error."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    decoded = [msgspec.json.decode(line) for line in answers.values()]
    for line, answer in zip(answers.values(), decoded, strict=True):
        if "error" in answer:
            return line
    first, *others = [answer["trace"] for answer in decoded]
    is_special = any(answer["is_for_one_device"] for answer in decoded)
    return msgspec.json.encode({"trace": {**first, "beside": others}, "is_for_one_device": is_special})


if __name__ == "__main__":
    _serve_requests()
