"""The knobs that trainers of small models are tuned with, and what each sets here.

    wire({"batch_size": 12, "max_length": 1024}, ranks=2).options
    {'seq': 1024, 'global_batch': 24}

What they mean is data: knobs.toml. A knob that sets nothing here is refused with the reason.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.configs.targets import KeyIndex, find_roots
from trimtab.errors import TrimtabError, UnknownName, WrongUse, find_nearest
from trimtab.spec import Noun, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.text_edit import KeyPath, ParsedConfig

TRUTHS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
AMP = ("enable_amp", "amp_dtype", "enable_tf32")
"""Knobs that make one choice together: the precision."""
MARKS = ("batch_size", "max_length", "learning_rate", "enable_amp", "max_steps")
"""Keys by which the table of knobs in a config is found."""
SEE = "docs/knobs.md lists them all."


class TrainerKnob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A knob; the head of knobs.toml explains each key."""

    name: str
    kind: str = ""
    least: float | None = None
    words: dict[str, str] = {}
    option: str = ""
    spare: bool = False
    pin: str = ""
    train: str = ""
    only: bool | int | None = None
    why: str
    cure: str = ""


class KnobSettings(Noun, frozen=True, kw_only=True):
    """Everything that knobs have set."""

    options: dict[str, Any] = {}
    """Attributes of the job."""
    spare: tuple[str, ...] = ()
    """Options that are set only where the job has them."""
    pins: dict[str, Any] = {}
    """Choices of the plan."""
    train: dict[str, Any] = {}
    """Arguments of training."""
    said: tuple[str, ...] = ()
    """What the user should know."""
    by: dict[str, str] = {}
    """The knob that set an option or a pin, as the user wrote it."""


@cache
def load_knobs() -> dict[str, TrainerKnob]:
    """Load all knobs, by name."""
    text = files("trimtab.configs").joinpath("knobs.toml").read_text(encoding="utf-8")
    rows = msgspec.convert(tomllib.loads(text)["knob"], list[TrainerKnob])
    return {row.name: row for row in rows}


def split_knobs(texts: Sequence[str]) -> dict[str, str]:
    """Split NAME=VALUE as people type it.

    >>> split_knobs(["batch_size=12"])
    {'batch_size': '12'}
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise WrongUse(
                f"--knob {text}", found="it is not NAME=VALUE", cure="Write it like --knob batch_size=12."
            )
        if name in values:
            raise WrongUse(f"--knob {text}", found=f"{name} is also {values[name]}", cure="Give it once.")
        values[name] = value
    return values


def read_knobs(document: ParsedConfig, origin: str, below: KeyPath = ()) -> dict[str, Any]:
    """Read the knobs in a config: all keys of the table that has batch_size, max_length and the like."""
    entries = document.entries()
    tables = [below] if below else find_roots([list(MARKS)], KeyIndex(entries), ())
    if len(tables) != 1:
        many = f"{len(tables)} tables of them" if tables else "none"
        raise WrongUse(
            f"--config {origin}",
            found=f"it should have one table with knobs such as {', '.join(MARKS[:3])}, and has {many}",
            cure="Name the table, as in --config config.py:slm_config.",
        )
    root = tables[0]
    depth = len(root) + 1
    values: dict[str, Any] = {}
    for entry in entries:
        if len(entry.path) < depth or entry.path[: len(root)] != root:
            continue
        name = str(entry.path[len(root)])
        within = entry.path[depth:]
        if entry.computed or len(within) > 1 or not all(isinstance(step, int) for step in within):
            what = f"computed ({entry.computed})" if entry.computed else "a table"
            raise WrongUse(
                f"{name} in line {entry.line} of {origin}",
                found=f"it is {what}, not a value",
                cure=f"Write the value down, or give it as --knob {name}=VALUE.",
            )
        if not within:
            # A list is an entry; so is each number in it.
            values[name] = entry.value
    return values


def apply_knobs(
    given: Mapping[str, Any], *, ranks: int = 1, bf16: bool = True, joint: bool = True
) -> KnobSettings:
    """Return what knobs set, for `ranks` processes, on devices with or without bf16.

    `joint`: batch_size makes the global batch, as nobody else does. All that cannot be is raised at once.
    """
    values: dict[str, Any] = {}
    wrong: list[TrimtabError] = []
    for name, value in given.items():
        try:
            values[name] = _parse_value(_find_knob(name), value)
        except TrimtabError as error:
            wrong.append(error)
    if wrong:
        raise _join_errors(wrong)
    made = _KnobCollector()
    for name, value in values.items():
        made.add_knob(load_knobs()[name], given[name], value)
    made.set_precision(values, bf16=bf16)
    made.set_betas(values)
    if joint:
        made.set_global_batch(values, ranks)
    return made.build_settings()


def _find_knob(name: str) -> TrainerKnob:
    all_knobs = load_knobs()
    if name in all_knobs:
        return all_knobs[name]
    close = find_nearest(name, all_knobs)
    meant = f"; the nearest are {', '.join(close[:3])}" if close else ""
    raise UnknownName(f"knob {name}", found=f"there is no such knob{meant}", cure=SEE)


def _parse_value(knob: TrainerKnob, given: Any) -> Any:
    """Parse the value of a knob by its kind."""
    label = f"knob {knob.name}={given}"
    if not knob.kind:
        raise WrongUse(label, found=_lower_first(knob.why), cure=knob.cure)
    try:
        value = _READERS[knob.kind](knob, given)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise WrongUse(
            label, found=f"it is not {_expected_words(knob)}", cure=f"{knob.name}: {knob.why}"
        ) from None
    if knob.least is not None and value < knob.least:
        raise WrongUse(label, found=f"it is below {knob.least:g}", cure=f"{knob.name}: {knob.why}")
    if knob.only is not None and value != knob.only:
        raise WrongUse(label, found=_lower_first(knob.why), cure=knob.cure)
    return value


def _expected_words(knob: TrainerKnob) -> str:
    if knob.kind == "words":
        return f"one of {', '.join(knob.words)}"
    return {"whole": "a whole number", "number": "a number", "switch": "true or false"}.get(
        knob.kind, "two numbers from 0 to below 1, as in [0.9, 0.95]"
    )


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:].removesuffix(".") if not text[:2].isupper() else text.removesuffix(".")


def _parse_whole(_: TrainerKnob, given: Any) -> int:
    if isinstance(given, str):
        return int(given)
    if isinstance(given, bool) or int(given) != given:
        raise TypeError
    return int(given)


def _parse_number(_: TrainerKnob, given: Any) -> float:
    value = float(given)
    if isinstance(given, bool) or value != value or value in (float("inf"), -float("inf")):  # noqa: PLR0124 - not a number
        raise TypeError
    return value


def _parse_switch(knob: TrainerKnob, given: Any) -> Any:
    value = given if isinstance(given, bool) else TRUTHS[str(given).lower()]
    return knob.words[str(value).lower()] if knob.words else value


def _parse_word(knob: TrainerKnob, given: Any) -> str:
    return knob.words[str(given).removeprefix("torch.")]


def _parse_pair(_: TrainerKnob, given: Any) -> list[float]:
    value = msgspec.json.decode(given) if isinstance(given, str) else given
    first, second = (float(number) for number in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError
    return [first, second]


_READERS = {
    "whole": _parse_whole,
    "number": _parse_number,
    "switch": _parse_switch,
    "words": _parse_word,
    "pair": _parse_pair,
}


def _join_errors(wrong: list[TrimtabError]) -> TrimtabError:
    """Join several errors in one."""
    if len(wrong) == 1:
        return wrong[0]
    listed = "; ".join(f"{error.given}: {error.found}. {error.cure.removesuffix('.')}" for error in wrong)
    return WrongUse(f"{len(wrong)} knobs that cannot be", found=listed, cure="Fix them, or leave them out.")


class _KnobCollector:
    """Collects what knobs set."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.spare: list[str] = []
        self.pins: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        self.said: list[str] = []
        self.by: dict[str, str] = {}

    def add_knob(self, knob: TrainerKnob, given: Any, value: Any) -> None:
        """Add a knob that sets a single value."""
        for place, key in ((self.options, knob.option), (self.pins, knob.pin), (self.train, knob.train)):
            if key:
                self._put(place, key, value, f"{knob.name}={given}")
        if knob.spare:
            self.spare.append(knob.option)

    def _put(self, place: dict[str, Any], key: str, value: Any, by: str) -> None:
        if key in place and place[key] != value:
            raise WrongUse(f"knobs {self.by[key]} and {by}", found="both set the same", cure="Leave one out.")
        place[key] = value
        self.by[key] = by

    def set_precision(self, found: Mapping[str, Any], *, bf16: bool) -> None:
        """Set autocast to bf16 if asked and supported, else fp16; without autocast TF32 or fp32."""
        asked = [name for name in AMP if name in found]
        if not asked:
            return
        word = ", ".join(f"{name}={found[name]}" for name in asked)
        if not found.get("enable_amp", "amp_dtype" in found):
            if "amp_dtype" in found:
                self.said.append(f"amp_dtype={found['amp_dtype']} counts for nothing: enable_amp is false")
            self._put(self.pins, "precision", "tf32" if found.get("enable_tf32") else "fp32", word)
            return
        wanted = found.get("amp_dtype", "bf16")
        if Precision(wanted).dtypes.is_bf16 and not bf16:
            self.said.append(f"{wanted} is only emulated on these GPUs: fp16 instead")
            wanted = "fp16"
        if "enable_tf32" in found:
            self.said.append(f"enable_tf32 has nothing to do: autocast computes matrix products in {wanted}")
        self._put(self.pins, "precision", wanted, word)

    def set_betas(self, found: Mapping[str, Any]) -> None:
        """Set both betas from two knobs; a missing one gets AdamW's value for language models."""
        if "adam_beta1" in found or "adam_beta2" in found:
            pair = [found.get("adam_beta1", 0.9), found.get("adam_beta2", 0.95)]
            word = " ".join(f"{name}={found[name]}" for name in ("adam_beta1", "adam_beta2") if name in found)
            if max(pair) >= 1:
                raise WrongUse(f"knob {word}", found="it is not below 1", cure="Give a number such as 0.95.")
            self._put(self.options, "betas", pair, word)

    def set_global_batch(self, found: Mapping[str, Any], ranks: int) -> None:
        """Set the global batch from the batch of one process."""
        if "batch_size" not in found:
            return
        rounds = found.get("gradient_accumulation_steps", 1)
        total = found["batch_size"] * rounds * ranks
        self._put(self.options, "global_batch", total, f"batch_size={found['batch_size']}")
        many = f"{ranks} process{'es' * (ranks > 1)}"
        self.said.append(f"global batch {total}: batch_size {found['batch_size']} x {rounds} x {many}")

    def build_settings(self) -> KnobSettings:
        """Return everything that was set."""
        return KnobSettings(
            options=self.options,
            spare=tuple(self.spare),
            pins=self.pins,
            train=self.train,
            said=tuple(self.said),
            by=self.by,
        )
