"""Requests of the commands: one definition of every option for the command line, Python and JSON.

    class PlanRequest(JobOnDevices, frozen=True, kw_only=True):
        price: Annotated[float | None, option("Price of one GPU for one hour.")] = None

gives `trimtab plan --price 2.5`, `trimtab.plan(job, price=2.5)` and the key `price` in the request's JSON.
`cli/options.py` builds the flags of a command from its request, `accepts` the arguments of a function.
Shared options are type aliases here, so that `--on` has the same help text everywhere.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, Self, TypeVar, get_type_hints

import msgspec

from trimtab.errors import WrongUse, find_nearest
from trimtab.spec.hardware import Cluster
from trimtab.spec.plan import Plan, StagedPlan
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    # Types that Python callers may pass; JSON has the simpler types below.
    PathText = str | Path
    PinValues = Mapping[str, Any] | Iterable[str]
    Numbers = Iterable[int]
    Words = Sequence[str]
    Places = str | Path | Sequence[str | Path]
    PlanOrFile = Plan | Path | str
    PlansOrFile = PlanOrFile | StagedPlan
else:
    PathText = str
    PinValues = dict[str, Any] | tuple[str, ...]
    Numbers = tuple[int, ...]
    Words = tuple[str, ...]
    Places = str | list[str]
    PlanOrFile = PlansOrFile = str | Plan

Arguments = ParamSpec("Arguments")
RequestType = TypeVar("RequestType")
Result = TypeVar("Result")


class CommandOption(NamedTuple):
    """Definition of an option: a field of a request with its flag and help text."""

    help: str
    flag: str | None = ""
    """Empty: derived from the field's name. None: no flag; the field is only for Python and JSON."""
    metavar: str | None = None
    short: str | None = None
    argument: bool = False
    """Whether it is a positional argument."""
    required: bool = True
    """For a positional argument: whether the command line requires it."""
    many: bool = False
    """Whether it can be repeated."""
    minimum: float | None = None
    parse: Callable[[Any], Any] | None = None
    """Converts the text to the field's value."""
    switches: dict[str, str] = {}
    """Help text by value; each value gets its own flag, such as --slurm."""
    job_flags: str = ""
    """Job flags that the command has too: those of "plan" or "train"; see jobs/registry.py."""
    type: Any = None
    """Type of the field, filled in by `list_options`."""
    default: Any = None
    """Default of the field, filled in by `list_options`; inspect.Parameter.empty if it has none."""


def option(text: str, flag: str | None = "", **declared: Any) -> msgspec.Meta:
    """Declare a field of a request as an option, with its help text and flag."""
    return msgspec.Meta(description=text, extra={"option": CommandOption(text, flag, **declared)})


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs in a text such as 1,2,4,8.

    >>> parse_counts("1,2,4")
    (1, 2, 4)
    """
    counts = [parse_whole(number) for number in text.split(",")]
    if not all(counts):
        raise WrongUse(
            f"--compare {text}",
            found="it is no list of numbers from 1 up",
            cure="Write it like --compare 1,2,4.",
        )
    return tuple(count for count in counts if count)


def ignore_message(_: str) -> None:
    """Discard a progress message."""


Say = Callable[[str], None]
JOB_HELP = (
    "FILE.py:NAME or package.module:NAME (its code is run), a built-in job (slm, bridge, naics; slm:tiny "
    "and so on are small versions), or hf:FOLDER with a Hugging Face config.json."
)
COMMAND_HELP = " Instead of a job you can give a training command after --: -- python train.py --lr 1e-4."
JobName = Annotated[Any, option(JOB_HELP, argument=True, metavar="JOB")]
JobOrNone = Annotated[Any, option(JOB_HELP + COMMAND_HELP, argument=True, metavar="JOB", required=False)]
Devices = Annotated[
    str | Cluster | None,
    option("Devices to plan for: H200, 4xA100-40GB, 2x8xH100; default: this machine.", metavar="DEVICES"),
]
Network = Annotated[
    str | None,
    option(
        "Bandwidth between nodes, one way: 400Gb/gpu, 8x400Gb/node, 50GB/s/gpu (Gb: bits, GB: bytes). "
        "Options follow after commas, as in 400Gb/gpu,latency=5us; they are latency, rails=yes, "
        "oversubscription=2 and nvlink=72. Default: what such nodes usually have.",
        metavar="BANDWIDTH",
    ),
]
HostMemorySize = Annotated[
    str | None,
    option(
        "Memory of each node's host, for jobs that offload: 512GiB; default: as detected, else unknown.",
        metavar="SIZE",
    ),
]
Pins = Annotated[
    PinValues,
    option(
        "Fix choices of the plan: micro_batch=8, strategy=fsdp, or tp=8,pp=4. Can be repeated.",
        "--pin",
        metavar="KEY=VALUE",
        many=True,
    ),
]
SET = {"flag": "--set", "metavar": "NAME=VALUE", "many": True}
SET_HELP = "Set an attribute of the job, as in --set layers=24. Can be repeated."
JobOptions = Annotated[dict[str, Any] | None, option(SET_HELP, **SET, job_flags="plan")]
TrainOptions = Annotated[dict[str, Any] | None, option(SET_HELP, **SET, job_flags="train")]
PlainOptions = Annotated[dict[str, Any] | None, option(SET_HELP, **SET)]
Cache = Annotated[bool, option("Trace again, even if nothing changed.", "--no-cache")]
Clip = Annotated[float | None, option("Clip gradients to this norm.", minimum=0.0)]
MicroBatch = Annotated[int, option("Samples per forward pass on one rank.")]
PrecisionName = Annotated[
    str,
    option(
        "Precision of the computation: fp32, tf32, bf16, fp16, bf16-true, fp8-tensorwise, fp8-rowwise, "
        "fp8-tensorwise-true, fp8-rowwise-true or mxfp8."
    ),
]
RecomputeName = Annotated[
    str,
    option(
        "Activation recomputation (gradient checkpointing): none, full, selective, every-2, every-3, "
        "every-4, all-but-3 or all-but-4; with --compile also budget-0.1 to budget-0.9."
    ),
]
BaseName = Annotated[
    str,
    option(
        "Storage of frozen linear layers: none (as they are), nf4, nf4-double, fp4, fp4-double, int8 "
        "(bitsandbytes), nf4-ao or int8-ao (torchao).",
        metavar="FORMAT",
    ),
]
LossName = Annotated[
    str,
    option(
        "How a language model computes its loss: whole; chunked or liger (all logits never exist together).",
        metavar="FORM",
    ),
]
OffloadWords = Annotated[
    str,
    option(
        "What is in the memory of the host while the GPU does not use it, separated by commas: params, "
        "optimizer, activations; or none.",
        metavar="WORDS",
    ),
]
Compile = Annotated[bool, option("Run the model through torch.compile.")]
OptimizerName = Annotated[
    str,
    option(
        "Optimizer instead of the job's own (adamw, adamw-bf16, adamw8bit, paged-adamw8bit, paged-adamw, "
        "lion, lion8bit, adamw8bit-ao, adamw4bit, adamw-fp8, adafactor, muon, sgd), or the implementation "
        "of the job's own: fused, foreach or plain."
    ),
]
InBackward = Annotated[
    bool,
    option(
        "Update each weight in the backward pass, as soon as its gradient is complete, and free the gradient."
    ),
]
AllocatorName = Annotated[str, option("Mode of PyTorch's CUDA allocator: default or expandable.")]
StrategyName = Annotated[
    str,
    option("How the work is spread over GPUs: single, ddp, fsdp, hsdp, branch, hybrid or pipeline."),
]
GpuCount = Annotated[int | None, option("Number of GPUs; default: all that `on` names.", None)]
TensorParallel = Annotated[
    int,
    option(
        "Tensor parallelism: number of neighbouring GPUs that split every layer between them. With it, "
        "strategy single means fsdp over the rest of the GPUs."
    ),
]
PipelineParallel = Annotated[
    int,
    option(
        "Pipeline parallelism: number of stages. The strategy then says what the GPUs of a stage hold: "
        "shards of it (fsdp, hsdp; single means fsdp), or copies (ddp, pipeline)."
    ),
]
ContextParallel = Annotated[
    int,
    option(
        "Context parallelism: number of GPUs that split every sequence between them. Strategy single then "
        "means fsdp over all GPUs."
    ),
]
ExpertParallel = Annotated[
    int,
    option(
        "Expert parallelism: number of neighbouring GPUs that hold different experts. They also divide "
        "the batch, so it takes no more GPUs. Strategy single then means fsdp over all GPUs."
    ),
]
ExpertImbalance = Annotated[
    float,
    option(
        "Tokens of the GPU with the most over those of the mean GPU, if GPUs hold different experts; an "
        "assumption."
    ),
]
ContextMethodName = Annotated[
    str,
    option("How GPUs that split sequences compute attention: ring or all-to-all."),
]
SyncBatchnorm = Annotated[
    bool, option("Compute BatchNorm statistics over a micro-batch of all GPUs together.")
]
ScheduleName = Annotated[
    str,
    option(
        "Order of forward and backward passes in a pipeline: 1f1b, interleaved-1f1b (several stages on each "
        "GPU) or zero-bubble (weight gradients computed while a GPU would wait)."
    ),
]
VirtualStages = Annotated[
    int | None,
    option("Pipeline stages on each GPU; default: 2 with --schedule interleaved-1f1b, else 1."),
]
RunFolder = Annotated[
    PathText | None,
    option("Folder of the run; an existing run is resumed. Default: runs/JOB.", metavar="DIR", parse=Path),
]
Steps = Annotated[
    int | None, option("Stop after this many optimizer steps; default: when the job is complete.")
]
Rendezvous = Annotated[
    str | None,
    option("Address where the nodes of a multi-node run meet.", metavar="HOST:PORT"),
]
Restarts = Annotated[
    int | None,
    option("How many times lost processes are restarted; default 10.", metavar="COUNT"),
]
TargetName = Annotated[
    str | None,
    option("Framework that reads the config file, if trimtab cannot tell.", metavar="NAME"),
]


TrainingCommand = Annotated[
    Words, option("A training command, word by word, as it is typed; instead of a job.", None)
]
Vary = Annotated[
    Words,
    option(
        "Option or environment variable of the training command that may change, with values to try if you "
        "like: --vary --batch-size, --vary BATCH=8,16. Default: those that are known. Can be repeated.",
        metavar="NAME[=VALUES]",
        many=True,
    ),
]


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of requests. A field without `option` is a hook for Python callers: no flag, not in JSON."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """Return every field by name, hooks included."""
        return msgspec.structs.asdict(self)

    def to_json(self) -> str:
        """Return the request as JSON text; a job in it must be named by a string."""
        values = {name: getattr(self, name) for name in list_options(type(self))}
        return msgspec.json.encode(values, enc_hook=_to_plain).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the request from JSON text; raise msgspec.ValidationError."""
        values = msgspec.json.decode(text, type=_json_form(cls))
        return cls(**msgspec.structs.asdict(values))

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the JSON schema of the request."""
        return msgspec.json.schema(_json_form(cls))


def _to_plain(value: Any) -> Any:
    if isinstance(value, PathLike):
        return fspath(value)
    raise TypeError(f"{value!r} cannot be written as JSON: give it by name")


@functools.cache
def list_options(request: type[CommandRequest]) -> dict[str, CommandOption]:
    """Return the fields of a request that are options, by name, in the order of their definition."""
    hints = get_type_hints(request, include_extras=True)
    options = {}
    for field in msgspec.structs.fields(request):
        hint = hints[field.name]
        meta = next((item for item in getattr(hint, "__metadata__", ()) if type(item) is msgspec.Meta), None)
        if meta is not None and meta.extra:
            declared: CommandOption = meta.extra["option"]
            options[field.name] = declared._replace(
                flag=f"--{field.name.replace('_', '-')}" if declared.flag == "" else declared.flag,
                type=hint,
                default=inspect.Parameter.empty if field.required else field.default,
            )
    return options


@functools.cache
def _json_form(request: type[CommandRequest]) -> type[msgspec.Struct]:
    """Return the request without its hooks."""
    fields: list[Any] = [
        (name, item.type) if item.default is inspect.Parameter.empty else (name, item.type, item.default)
        for name, item in list_options(request).items()
    ]
    return msgspec.defstruct(request.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def accepts(
    request_class: Callable[Arguments, RequestType],
) -> Callable[[Callable[[RequestType], Result]], Callable[Arguments, Result]]:
    """Let a function of a request be called with the request's fields as arguments.

    The function also takes the request itself as its only argument. Type checkers and `inspect.signature`
    see the fields; a wrong name gets a suggestion.
    """

    def decorate(function: Callable[[RequestType], Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(request_class)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if len(args) == 1 and not kwargs and isinstance(args[0], request_class):  # type: ignore[arg-type]
                return function(args[0])  # type: ignore[arg-type]
            for name in kwargs:
                if name not in signature.parameters:
                    close = find_nearest(name, signature.parameters, count=1)
                    hint = f"; did you mean {close[0]!r}?" if close else ""
                    raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
            return function(request_class(*args, **kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


class JobOnDevices(CommandRequest, frozen=True):
    """A job and its devices: positional arguments."""

    job: JobName
    on: Devices = None


class JobOrCommand(CommandRequest, frozen=True):
    """A job, or a training command as its owner types it, and the devices."""

    job: JobOrNone = None
    on: Devices = None
    command: TrainingCommand = ()


class EstimateRequest(JobOrCommand, frozen=True, kw_only=True):
    """Arguments of `trimtab estimate`: one configuration of a job on some devices."""

    network: Network = None
    host_memory: HostMemorySize = None
    micro_batch: MicroBatch = 1
    precision: PrecisionName = "bf16"
    base: BaseName = "none"
    loss: LossName = "whole"
    recompute: RecomputeName = "none"
    offload: OffloadWords = "none"
    compile: Compile = False
    strategy: StrategyName = "single"
    schedule: ScheduleName = "1f1b"
    virtual_stages: VirtualStages = None
    gpus: GpuCount = None
    pp: PipelineParallel = 1
    tp: TensorParallel = 1
    cp: ContextParallel = 1
    cp_method: ContextMethodName = "ring"
    ep: ExpertParallel = 1
    expert_imbalance: ExpertImbalance = 1.0
    optimizer: OptimizerName = "fused"
    optimizer_in_backward: InBackward = False
    allocator: AllocatorName = "default"
    sync_batchnorm: SyncBatchnorm = False
    clip: Clip = None
    options: JobOptions = None
    cache: Cache = True


class MaxRequest(JobOnDevices, frozen=True, kw_only=True):
    """Arguments of `trimtab max`: what to make as large as memory allows, and the rest of the setting."""

    of: Annotated[
        str,
        option(
            "What to make as large as possible: micro_batch, or a whole-number option of the job, such as "
            "seq, layers or lora (the rank).",
            metavar="NAME",
        ),
    ] = "micro_batch"
    step: Annotated[
        int | None,
        option("Try only multiples of this number; default: 64 for a sequence length, else 1."),
    ] = None
    network: Network = None
    micro_batch: Annotated[int | None, option("Samples per forward pass on one rank; default 1.")] = None
    precision: PrecisionName = "bf16"
    base: BaseName = "none"
    loss: LossName = "whole"
    recompute: RecomputeName = "none"
    offload: OffloadWords = "none"
    compile: Compile = False
    strategy: StrategyName = "single"
    schedule: ScheduleName = "1f1b"
    virtual_stages: VirtualStages = None
    gpus: GpuCount = None
    pp: PipelineParallel = 1
    tp: TensorParallel = 1
    cp: ContextParallel = 1
    cp_method: ContextMethodName = "ring"
    ep: ExpertParallel = 1
    expert_imbalance: ExpertImbalance = 1.0
    optimizer: OptimizerName = "fused"
    optimizer_in_backward: InBackward = False
    allocator: AllocatorName = "default"
    sync_batchnorm: SyncBatchnorm = False
    clip: Clip = None
    options: JobOptions = None
    cache: Cache = True
    say: Say = ignore_message


class ExploreRequest(JobOnDevices, frozen=True, kw_only=True):
    """Arguments of `trimtab explore`: the job, and the configuration that the page starts with."""

    network: Network = None
    host_memory: HostMemorySize = None
    micro_batch: Annotated[
        int | None,
        option(
            "Samples per forward pass on one rank to start with; default: 8, or the job's global batch if "
            "that is smaller.",
            minimum=1,
        ),
    ] = None
    precision: PrecisionName = "bf16"
    base: BaseName = "none"
    loss: LossName = "whole"
    recompute: RecomputeName = "none"
    offload: OffloadWords = "none"
    strategy: Annotated[
        str | None,
        option("How the work is spread over GPUs; default: single, or ddp on several GPUs."),
    ] = None
    optimizer: OptimizerName = "fused"
    allocator: AllocatorName = "default"
    clip: Clip = None
    price: Annotated[float | None, option("Price of one GPU for one hour.", minimum=0.0)] = None
    options: JobOptions = None
    port: Annotated[int, option("Port on 127.0.0.1; default: any free one.", metavar="N", minimum=0)] = 0
    browser: Annotated[bool, option("Print the address and open no browser.", "--no-browser")] = True
    say: Say = ignore_message


class LayoutsRequest(JobOnDevices, frozen=True, kw_only=True):
    """Arguments of `trimtab layouts`: a decoder, the devices, and the batch of a step."""

    network: Network = None
    seq: Annotated[
        int | None,
        option("Tokens per sequence; default: 4096, or the model's longest if it is shorter.", minimum=1),
    ] = None
    global_batch: Annotated[
        int | None,
        option(
            "Sequences per optimizer step; default: as many as make 4 million tokens, on more than 256 GPUs "
            "16,384 a GPU up to 16 million.",
            minimum=1,
        ),
    ] = None
    trainer: Annotated[
        str,
        option(
            "Whose way of sharding to assume: torchtitan (data-parallel ranks share weights, FSDP2), "
            "megatron (they share the optimizer's states) or trimtab (only what `trimtab train` runs).",
            metavar="NAME",
        ),
    ] = "torchtitan"
    pins: Annotated[
        Words,
        option(
            "Fix degrees: tp=8,pp=4; also cp, ep, dp_shard, dp_replicate, virtual_stages, micro_batch. "
            "Can be repeated.",
            "--pin",
            metavar="KEY=N",
            many=True,
        ),
    ] = ()
    top: Annotated[int, option("How many layouts to show.", minimum=1)] = 5
    row: Annotated[int, option("Which layout --out writes: the number of its row.", minimum=1)] = 1


class ProfileRequest(CommandRequest, frozen=True, kw_only=True):
    """Arguments of `trimtab profile`: one configuration of a job, run on this machine."""

    job: JobName
    micro_batch: MicroBatch = 1
    precision: PrecisionName = "bf16"
    base: BaseName = "none"
    loss: LossName = "whole"
    recompute: RecomputeName = "none"
    offload: OffloadWords = "none"
    compile: Compile = False
    optimizer: OptimizerName = "fused"
    optimizer_in_backward: InBackward = False
    allocator: AllocatorName = "default"
    clip: Clip = None
    options: JobOptions = None
    keep: Annotated[
        PathText | None,
        option("Add the run to a file of cases, for `trimtab exam --cases`.", metavar="FILE", parse=Path),
    ] = None


class PlanRequest(JobOrCommand, frozen=True, kw_only=True):
    """Arguments of `trimtab plan`: find the best configuration of a job on some devices."""

    network: Network = None
    host_memory: HostMemorySize = None
    vary: Vary = ()
    global_batch: Annotated[
        int | None, option("Samples per optimizer step, instead of the job's own number.")
    ] = None
    samples: Annotated[int | None, option("Samples per epoch, instead of the job's own number.")] = None
    epochs: Annotated[int | None, option("Number of epochs, instead of the job's own.")] = None
    memory: Annotated[float, option("Share of the free GPU memory that the plan may use.")] = 0.9
    deadline: Annotated[str | float | None, option("Longest time that the run may take, as in 12h.")] = None
    objective: Annotated[
        str,
        option(
            "What to optimize. speed: ends soonest; gpus: fewest GPUs that meet the deadline; cost: fewest "
            "GPU-hours."
        ),
    ] = "speed"
    compare: Annotated[
        Numbers,
        option("Compare numbers of GPUs side by side, as in 1,2,4,8.", metavar="COUNTS", parse=parse_counts),
    ] = ()
    price: Annotated[float | None, option("Price of one GPU for one hour.")] = None
    allow: Annotated[
        str | Words,
        option(
            "What the plan may change besides its own choices, separated by commas: quantised (frozen layers "
            "in 4 bits), optimizer (states in 8 bits, updates in the backward pass), offload (activations, "
            "or weights and optimizer, on the host).",
            metavar="WORDS",
        ),
    ] = ""
    pins: Pins = ()
    verify: Annotated[
        float | None,
        option(
            "Seconds in which torch's compiler may verify a compiled choice; default: its figures are "
            "derived from eager traces.",
            metavar="SECONDS",
            minimum=1.0,
        ),
    ] = None
    clip: Clip = None
    options: JobOptions = None
    cache: Cache = True
    say: Say = ignore_message
    say_best: Say = ignore_message
    partial: bool = False


class PlanStagesRequest(PlanRequest, frozen=True, kw_only=True):
    """Arguments of `trimtab plan --stages`: make a plan for every stage of a job."""

    files: Annotated[PathText | None, option("Folder of the stages; default: the job's own.", None)] = None


class JobToTrain(CommandRequest, frozen=True):
    """A job and the plan to train it with."""

    job: JobName
    plan: Annotated[
        PlansOrFile | None,
        option(
            "Plan to follow, from `trimtab plan --out`; default: plan for this machine.",
            metavar="FILE",
            parse=Path,
        ),
    ] = None


class TrainRequest(JobToTrain, frozen=True, kw_only=True):
    """Arguments of `trimtab train`."""

    steps: Steps = None
    procs: Annotated[
        int | None, option("Processes on this machine; default: as many as the plan has GPUs.")
    ] = None
    out: RunFolder = None
    seed: Annotated[int | None, option("Random seed for initial weights and sample order; default 0.")] = None
    pins: Pins = ()
    options: TrainOptions = None
    checkpoint_steps: Annotated[
        int | None, option("Steps between checkpoints.", "--checkpoint-every", metavar="STEPS")
    ] = None
    checkpoint_s: Annotated[
        float | None,
        option(
            "Minutes between checkpoints; default 10.",
            "--checkpoint-minutes",
            metavar="MINUTES",
            parse=lambda minutes: 60 * minutes,
        ),
    ] = None
    keep: Annotated[
        int | None, option("Checkpoints to keep besides the best one; default 3.", metavar="COUNT")
    ] = None
    evaluate_steps: Annotated[
        int | None,
        option(
            "Steps between evaluations, for a job with validation(); default: once an epoch.",
            "--evaluate-every",
            metavar="STEPS",
        ),
    ] = None
    every: Annotated[
        int | None,
        option("Steps between printed lines; default 1, or 10 in long runs.", metavar="STEPS"),
    ] = None
    nodes: Annotated[
        str,
        option(
            "Number of nodes: 2, or 1:2 for a run that continues with those that are left.", metavar="MIN:MAX"
        ),
    ] = "1"
    rendezvous: Rendezvous = None
    restarts: Restarts = None
    timeout_min: Annotated[
        float, option("How many minutes processes wait for one that does not answer.", metavar="MINUTES")
    ] = 10.0
    faults: Annotated[
        PathText | None,
        option(
            "File of faults to inject, to test recovery; see docs/training.md.", metavar="FILE", parse=Path
        ),
    ] = None
    json: Annotated[bool, option("Print one JSON object a line: steps, then events.")] = False
    say: Say = ignore_message


class TrainStagesRequest(TrainRequest, frozen=True, kw_only=True):
    """Arguments of `trimtab train --stages`: train the stages of a job one after the other."""

    files: Annotated[PathText | None, option("Folder of the stages; default: the job's own.", None)] = None


class PlanToLaunch(CommandRequest, frozen=True):
    """A plan to launch, or a job or a training command to plan and launch."""

    plan_or_job: Annotated[
        Any,
        option(
            "A plan that `trimtab plan --out` wrote, or a job, which is planned first." + COMMAND_HELP,
            argument=True,
            required=False,
            metavar="PLAN_OR_JOB",
        ),
    ] = None


class LaunchRequest(PlanToLaunch, frozen=True, kw_only=True):
    """Arguments of `trimtab launch`."""

    command: TrainingCommand = ()
    vary: Vary = ()
    extra: Annotated[
        Words,
        option(
            "Further options of `trimtab train`, or arguments for your --script.",
            argument=True,
            required=False,
            many=True,
            metavar="-- WORDS",
        ),
    ] = ()
    kind: Annotated[
        str,
        option(
            "What starts the run: torchrun, slurm, kubernetes, kubeflow, sky, accelerate or deepspeed.",
            switches={
                "slurm": "Write an sbatch script, checked against the cluster.",
                "kubernetes": "Write a Kubernetes manifest: an Indexed Job and its Service.",
                "kubeflow": "Write a Kubeflow manifest: a TrainJob.",
                "sky": "Write a SkyPilot task.",
                "accelerate": "Show the `accelerate launch` command for your own --script.",
                "deepspeed": "Show the `deepspeed` command for your own --script.",
            },
        ),
    ] = "torchrun"
    yes: Annotated[bool, option("Run or submit it; without this flag it is only shown.", short="-y")] = False
    out: RunFolder = None
    on: Devices = None
    network: Network = None
    nodes: Annotated[
        str | None,
        option(
            "Number of nodes: 2, or 1:2 for a run that continues with those that are left.", metavar="MIN:MAX"
        ),
    ] = None
    procs: Annotated[int | None, option("Processes on each node, for a job; default: the plan's.")] = None
    rendezvous: Rendezvous = None
    restarts: Restarts = None
    steps: Steps = None
    time: Annotated[
        str | None, option("Time limit of the job, as in 12h; default: the estimate plus a quarter.")
    ] = None
    partition: Annotated[str | None, option("Slurm partition; default: the cluster's default.")] = None
    account: Annotated[str | None, option("Slurm account to charge.")] = None
    qos: Annotated[str | None, option("Slurm quality of service.")] = None
    activate: Annotated[
        str | None, option("Virtual environment that the Slurm job activates.", metavar="VENV")
    ] = None
    image: Annotated[str | None, option("Container image, for Kubernetes, Kubeflow and SkyPilot.")] = None
    script: Annotated[
        str | None, option("Your own training script, for accelerate and deepspeed.", metavar="FILE")
    ] = None
    compare: Annotated[
        Numbers,
        option("Make one launch for each number of GPUs, as in 1,2,4.", metavar="COUNTS", parse=parse_counts),
    ] = ()
    pins: Pins = ()
    options: JobOptions = None
    cache: Cache = True
    say: Say = ignore_message


class PlanToApply(CommandRequest, frozen=True):
    """A plan and the config files to write it into."""

    plan: Annotated[
        PlanOrFile,
        option("A plan that `trimtab plan --out` wrote.", argument=True, required=False, metavar="PLAN"),
    ]
    to: Annotated[
        Places,
        option(
            "Config file, a place in one (config.py:slm_config), or a folder with stages; for the plan of a "
            "training command, a shell script that holds the command. Can be repeated.",
            metavar="FILE[:PATH]",
            many=True,
            required=False,
        ),
    ] = ()


class ApplyRequest(PlanToApply, frozen=True, kw_only=True):
    """Arguments of `trimtab apply`."""

    target: TargetName = None
    beside: Annotated[bool, option("Also replace computed values; each old value stays in a comment.")] = (
        False
    )
    on: Annotated[
        str | Cluster | None,
        option("Devices to plan the stages for; default: the plan's own.", metavar="DEVICES"),
    ] = None
    network: Network = None
    dry: Annotated[bool, option("Show the changes and write nothing.", None)] = False
    cache: Cache = True
    say: Say = ignore_message


class ConfigOnDevices(CommandRequest, frozen=True):
    """A config file and the devices to check it for."""

    file: Annotated[
        PathText,
        option(
            "Config file, a place in one (FILE:PATH), or a folder with stages.",
            argument=True,
            metavar="FILE_OR_FOLDER",
        ),
    ]
    on: Devices = None


class ShowRequest(ConfigOnDevices, frozen=True, kw_only=True):
    """Arguments of `trimtab show`."""

    network: Network = None
    job: Annotated[
        Any, option("The job that the config is for, if the file does not say.", metavar="JOB")
    ] = None
    target: TargetName = None
    options: PlainOptions = None
    cache: Cache = True
    say: Say = ignore_message
