"""What the page offers to choose, and the request for an estimate that follows from a choice."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trimtab.api.largest import SEQUENCE_NAMES
from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.tables import devices
from trimtab.errors import TrimtabError, WrongUse
from trimtab.jobs.registry import base_name, job_flags
from trimtab.spec import BaseFormat, Precision, Recompute
from trimtab.spec.requests import EstimateRequest, ExploreRequest, list_options
from trimtab.strategies import STRATEGIES, strategy_by_degrees
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.spec import Cluster, Workload
    from trimtab.trace.number_options import NumberOptions

NODE_GPUS = 8
"""GPUs of a node, where the page has more than one node."""
GPU_COUNTS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
USUAL_MICRO_BATCH = 8
LORA = "lora"
PASSED_ON = ("network", "host_memory", "loss", "offload", "optimizer", "allocator", "clip")
"""Fields of the request that hold for every configuration of the page."""


class ExploreChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration, as the page sends it."""

    device: str = ""
    """A name of the catalogue; empty: the devices that the command named."""
    gpus: Annotated[int, msgspec.Meta(ge=1, le=16384)] = 1
    micro_batch: Annotated[int, msgspec.Meta(ge=1, le=2**24)] = 1
    precision: str = "bf16"
    recompute: str = "none"
    base: str = "none"
    strategy: str = "single"
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**24)] | None = None
    """Tokens per sample; None: as the job has it."""
    lora: Annotated[int, msgspec.Meta(ge=0, le=2**16)] | None = None
    """Rank of the adapters; None: as the job has it."""
    price: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    """Of one GPU for one hour."""


@dataclass(frozen=True, kw_only=True)
class JobChoices:
    """A job with the devices that the command named, and all that can be chosen for it."""

    job: str
    options: dict[str, Any]
    request: ExploreRequest
    cluster: Cluster
    numbers: NumberOptions
    workload: Workload

    @property
    def seq_name(self) -> str | None:
        """The job's option for the sequence length."""
        return next((name for name in self.numbers.values if name in SEQUENCE_NAMES), None)

    def describe(self) -> dict[str, Any]:
        """Return everything that the page needs to offer its choices."""
        first = self.start()
        return {
            "job": self.job,
            "version": VERSION,
            "given": "" if first.device else self._describe_given(),
            "devices": [
                {
                    "value": row.typed[0],
                    "label": f"{row.typed[0]}, {row.memory_gb:g} GB",
                    "group": "NVIDIA" if row.vendor == "nvidia" else row.vendor.upper(),
                }
                for row in devices()
            ],
            "gpus": sorted({*GPU_COUNTS, first.gpus, len(self.cluster.devices)}),
            "given_gpus": len(self.cluster.devices),
            "strategies": [
                {"value": word, "several": rules.needs_several_gpus}
                for word, rules in STRATEGIES.items()
                if self.workload.branches or not rules.needs_branches
            ],
            "several": strategy_by_degrees(replicated=True, sharded=False),
            "precisions": [word.value for word in Precision],
            "recomputes": [word.value for word in Recompute if word.way.budget is None],
            "bases": [word.value for word in BaseFormat],
            "seq": self._describe_number(self.seq_name),
            "lora": self._describe_number(LORA),
            "start": msgspec.to_builtins(first),
        }

    def _describe_given(self) -> str:
        on = self.request.on
        return on if isinstance(on, str) else "this machine" if on is None else "the devices of the command"

    def _describe_number(self, name: str | None) -> dict[str, Any] | None:
        if name is None or name not in self.numbers.values:
            return None
        given = self.options.get(name, self.numbers.values[name])
        value = int(given) if given is not None else None
        if value is None and name == self.seq_name:
            value = self.numbers.sample_length
        return {"name": name, "value": value, "limit": self.numbers.limits.get(name)}

    def start(self) -> ExploreChoice:
        """Return the configuration that the page starts with."""
        request, count = self.request, len(self.cluster.devices)
        usual = strategy_by_degrees(replicated=count > 1, sharded=False)
        seq, lora = self._describe_number(self.seq_name), self._describe_number(LORA)
        return ExploreChoice(
            device=self._find_device(),
            gpus=count,
            micro_batch=request.micro_batch or min(USUAL_MICRO_BATCH, self.workload.global_batch),
            precision=request.precision,
            recompute=request.recompute,
            base=request.base,
            strategy=request.strategy or usual,
            seq=seq["value"] if seq else None,
            lora=lora["value"] if lora else None,
            price=request.price,
        )

    def _find_device(self) -> str:
        """Return the name of the catalogue that gives the devices of the command; empty if none does."""
        if not isinstance(self.request.on, str):
            return ""
        models = {device.model for device in self.cluster.devices}
        for row in devices():
            if models == {row.name}:
                try:
                    same = parse_cluster(write_devices(row.typed[0], len(self.cluster.devices)))
                except TrimtabError:
                    return ""
                return row.typed[0] if same.nodes == self.cluster.nodes else ""
        return ""

    def make_request(self, choice: ExploreChoice) -> EstimateRequest:
        """Return the request for the estimate of a choice."""
        passed = {name: getattr(self.request, name) for name in PASSED_ON}
        if not choice.device and choice.gpus != len(self.cluster.devices):
            raise WrongUse(
                f"{choice.gpus} GPUs",
                found=f"the command named {len(self.cluster.devices)}",
                cure="Choose a GPU by its name to change the number.",
            )
        on = write_devices(choice.device, choice.gpus) if choice.device else self.request.on
        return EstimateRequest(
            self.job,
            on if choice.device or isinstance(on, str) else self.cluster,
            micro_batch=choice.micro_batch,
            precision=choice.precision,
            recompute=choice.recompute,
            base=choice.base,
            strategy=choice.strategy,
            options=self._make_options(choice),
            **passed,
        )

    def _make_options(self, choice: ExploreChoice) -> dict[str, Any]:
        """Return the options of the job: as the command has them, and what the choice changes."""
        options = dict(self.options)
        for name, value in ((self.seq_name, choice.seq), (LORA, choice.lora)):
            own = self._describe_number(name)
            if own is not None and value is not None and value != own["value"]:
                options[own["name"]] = value
        return options

    def write_command(self, choice: ExploreChoice, verb: str = "estimate") -> str:
        """Return the command line that gives the same estimate."""
        request = self.make_request(choice)
        words = ["trimtab", verb, self.job]
        for name, option in list_options(EstimateRequest).items():
            value = getattr(request, name)
            if name in {"job", "options", "cache"} or option.flag is None or value == option.default:
                continue
            if name == "on" and not choice.device:
                value = self.request.on
            if isinstance(value, str | int | float) and option.flag is not None:
                words += [option.flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, *self.write_options(request.options or {})])

    def write_options(self, options: dict[str, Any]) -> list[str]:
        """Return the flags that set the options of the job."""
        own = {flag.attribute: flag for flag in job_flags() if base_name(self.job) in flag.jobs}
        words: list[str] = []
        for name, value in options.items():
            if name in own and own[name].type is int:
                words += [f"--{own[name].name}", str(value)]
            else:
                words += ["--set", f"{name}={value}"]
        return words


def write_devices(device: str, gpus: int) -> str:
    """Return the devices as --on takes them; more than eight are nodes of eight.

    >>> write_devices("H100", 1), write_devices("H100", 4), write_devices("H100", 16)
    ('H100', '4xH100', '2x8xH100')
    """
    if gpus <= NODE_GPUS:
        return device if gpus == 1 else f"{gpus}x{device}"
    nodes, rest = divmod(gpus, NODE_GPUS)
    if rest:
        raise WrongUse(
            f"{gpus} GPUs",
            found=f"they are no whole number of nodes with {NODE_GPUS} GPUs",
            cure=f"Choose a multiple of {NODE_GPUS}, or give other nodes with --on in the terminal.",
        )
    return f"{nodes}x{NODE_GPUS}x{device}"
