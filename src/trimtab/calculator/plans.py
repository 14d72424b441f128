"""Plans of the configurations on the page: the page about a plan, and its edits of a config file."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trimtab.api.applying import applied, propose, write_plan
from trimtab.api.planning import plan as make_plan
from trimtab.api.reporting import build_plan_page
from trimtab.calculator.choices import ExploreChoice  # noqa: TC001 - msgspec reads the annotations
from trimtab.calculator.traces import TraceMissing
from trimtab.configs.apply import parse_aim, stage_pins
from trimtab.errors import WrongUse, shorten
from trimtab.spec.requests import ApplyRequest, PlanRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.calculator.choices import JobChoices
    from trimtab.calculator.traces import WorkQueue
    from trimtab.configs.files import PreparedFile
    from trimtab.spec import Plan, Setting

MOST_PLANS = 64


class ConfigQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration, and the file that it is to be written into."""

    choice: ExploreChoice
    file: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """FILE or FILE:PATH, relative to the folder in which the command was started."""
    seen: str = ""
    """What identifies the diff that the user has seen; empty: show it, and write nothing."""


@dataclass
class PlanStore:
    """Plans of configurations, each made once."""

    choices: JobChoices
    queue: WorkQueue
    root: Path = field(default_factory=lambda: Path.cwd().resolve())
    """The folder in which the command was started; no file outside of it is written."""
    plans: dict[str, Plan] = field(default_factory=dict)

    def find(self, choice: ExploreChoice, setting: Setting) -> tuple[str, Plan]:
        """Return the name and the plan of a configuration; raise TraceMissing after queueing it."""
        request = self.make_request(choice, setting)
        name = hashlib.sha256(repr((choice, request.pins)).encode()).hexdigest()[:16]
        if name not in self.plans:
            what = "planning this configuration"
            raise TraceMissing(self.queue.ask(f"plan {name}", what, lambda: self._make(name, request)))
        return name, self.plans[name]

    def _make(self, name: str, request: PlanRequest) -> None:
        self.plans[name] = make_plan(request)
        for oldest in list(self.plans)[:-MOST_PLANS]:
            self.plans.pop(oldest, None)

    def list_pins(self, setting: Setting) -> dict[str, Any]:
        """Return what a plan keeps of the configuration on the page: all but the number of micro-batches."""
        pins = {"optimizer": setting.optimizer, **stage_pins(setting)}
        pins |= {"micro_batch": setting.micro_batch, "allocator": setting.allocator}
        return {name: getattr(value, "value", value) for name, value in pins.items()}

    def make_request(self, choice: ExploreChoice, setting: Setting) -> PlanRequest:
        """Return the request for a plan with everything pinned that the page shows."""
        asked = self.choices.make_request(choice)
        return PlanRequest(
            asked.job,
            asked.on,
            network=asked.network,
            host_memory=asked.host_memory,
            options=asked.options,
            clip=asked.clip,
            price=choice.price,
            memory=1.0,
            pins=self.list_pins(setting),
        )

    def write_command(self, choice: ExploreChoice, setting: Setting) -> str:
        """Return the command line that makes the same plan, and writes it to a file."""
        words = shlex.split(self.choices.write_command(choice, "plan"))
        on = words[: words.index("--on") + 2] if "--on" in words else words[:3]
        request = self.make_request(choice, setting)
        pins = ",".join(f"{name}={_write_pin(value)}" for name, value in self.list_pins(setting).items())
        options = self.choices.write_options(request.options or {})
        return shlex.join([*on, "--memory", "1", "--pin", pins, *options, "--out", "plan.json"])

    def propose(self, plan: Plan, question: ConfigQuestion) -> dict[str, Any]:
        """Return the diff that writes a plan into a file; with `seen`, write it if it is still the same."""
        self._check_place(question.file)
        _, proposal = propose(ApplyRequest(plan, (question.file,)))
        ready = proposal.prepare()
        self._check_files(ready)
        preview = applied(proposal, ready, None)
        digest = hashlib.sha256(b"".join(file.before + b"\0" + file.after for file in ready)).hexdigest()
        if not question.seen or not preview["diff"]:
            return {**preview, "seen": digest}
        if question.seen != digest:
            raise WrongUse(
                question.file,
                found="the file or the configuration has changed since the diff was shown",
                cure="Look at the new diff, and write again.",
            )
        return {**applied(proposal, ready, write_plan(ready, plan)), "seen": digest}

    def _check_place(self, place: str) -> None:
        """Raise if a place is not a file below the folder in which the command was started."""
        if "\0" in place:
            raise WrongUse("the config file", found="its name has a zero byte", cure="Give another path.")
        try:
            real = (self.root / parse_aim(place).file).resolve()
            is_file = real.is_file()
        except OSError as error:
            found = f"it cannot be read ({error.strerror})"
            raise WrongUse(shorten(place), found=found, cure="Give another path.") from error
        self._refuse_outside(place, real)
        if not is_file:
            raise WrongUse(
                shorten(place),
                found=f"there is no such file in {self.root}",
                cure="Give the path of a config file, as in conf/train.yaml.",
            )

    def _check_files(self, ready: Sequence[PreparedFile]) -> None:
        """Raise if a file that would be written is outside: a config can name others."""
        for file in ready:
            self._refuse_outside(file.file, file.real.resolve())

    def _refuse_outside(self, name: str, real: Path) -> None:
        if not real.is_relative_to(self.root):
            raise WrongUse(
                shorten(name),
                found=f"it is outside of {self.root}, where trimtab explore was started",
                cure="Give a file below that folder, or start trimtab explore in the file's folder.",
            )

    def read_page(self, name: str) -> str | None:
        """Return the page about a plan; None if there is no such plan."""
        plan = self.plans.get(name)
        return None if plan is None else build_plan_page(plan, "trimtab explore")


def _write_pin(value: Any) -> str:
    """Return the value of a pin as it is typed.

    >>> _write_pin(False), _write_pin(8)
    ('false', '8')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
