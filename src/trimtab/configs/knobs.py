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

from trimtab.configs.targets import Index, roots
from trimtab.errors import TrimtabError, UnknownName, WrongUse, nearest
from trimtab.spec import Noun, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.texts import Document, KeyPath

TRUTHS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
AMP = ("enable_amp", "amp_dtype", "enable_tf32")
"""Knobs that make one choice together: the precision."""
MARKS = ("batch_size", "max_length", "learning_rate", "enable_amp", "max_steps")
"""Keys by which the table of knobs in a config is found."""
SEE = "docs/knobs.md lists them all."


class Knob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One knob; the head of knobs.toml says what each key means."""

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


class Wired(Noun, frozen=True, kw_only=True):
    """What knobs have set."""

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
def knobs() -> dict[str, Knob]:
    """All that are known, by name."""
    text = files("trimtab.configs").joinpath("knobs.toml").read_text(encoding="utf-8")
    rows = msgspec.convert(tomllib.loads(text)["knob"], list[Knob])
    return {one.name: one for one in rows}


def split(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE as people type it.

    >>> split(["batch_size=12"])
    {'batch_size': '12'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise WrongUse(
                f"--knob {text}", found="it is not NAME=VALUE", cure="Write it like --knob batch_size=12."
            )
        if name in found:
            raise WrongUse(f"--knob {text}", found=f"{name} is also {found[name]}", cure="Give it once.")
        found[name] = value
    return found


def read(document: Document, origin: str, below: KeyPath = ()) -> dict[str, Any]:
    """The knobs in a config: all keys of the table that has batch_size, max_length and the like."""
    entries = document.entries()
    found = [below] if below else roots([list(MARKS)], Index(entries), ())
    if len(found) != 1:
        many = f"{len(found)} tables of them" if found else "none"
        raise WrongUse(
            f"--config {origin}",
            found=f"it should have one table with knobs such as {', '.join(MARKS[:3])}, and has {many}",
            cure="Name the table, as in --config config.py:slm_config.",
        )
    root = found[0]
    depth = len(root) + 1
    values: dict[str, Any] = {}
    for one in entries:
        if len(one.path) < depth or one.path[: len(root)] != root:
            continue
        name = str(one.path[len(root)])
        within = one.path[depth:]
        if one.computed or len(within) > 1 or not all(isinstance(step, int) for step in within):
            what = f"computed ({one.computed})" if one.computed else "a table"
            raise WrongUse(
                f"{name} in line {one.line} of {origin}",
                found=f"it is {what}, not a value",
                cure=f"Write the value down, or give it as --knob {name}=VALUE.",
            )
        if not within:
            # A list is an entry; so is each number in it.
            values[name] = one.value
    return values


def wire(given: Mapping[str, Any], *, ranks: int = 1, bf16: bool = True, joint: bool = True) -> Wired:
    """What knobs set, for so many processes, on devices with or without bf16.

    `joint`: batch_size makes the global batch, as nobody else does. All that cannot be is raised at once.
    """
    found: dict[str, Any] = {}
    wrong: list[TrimtabError] = []
    for name, value in given.items():
        try:
            found[name] = _value(_known(name), value)
        except TrimtabError as error:
            wrong.append(error)
    if wrong:
        raise _all(wrong)
    made = _Made()
    for name, value in found.items():
        made.take(knobs()[name], given[name], value)
    made.precision(found, bf16=bf16)
    made.betas(found)
    if joint:
        made.whole(found, ranks)
    return made.wired()


def _known(name: str) -> Knob:
    known = knobs()
    if name in known:
        return known[name]
    close = nearest(name, known)
    meant = f"; the nearest are {', '.join(close[:3])}" if close else ""
    raise UnknownName(f"knob {name}", found=f"there is no such knob{meant}", cure=SEE)


def _value(knob: Knob, given: Any) -> Any:
    """The value of a knob, read by its kind."""
    label = f"knob {knob.name}={given}"
    if not knob.kind:
        raise WrongUse(label, found=_sentence(knob.why), cure=knob.cure)
    try:
        value = _READERS[knob.kind](knob, given)
    except (ValueError, TypeError, KeyError):
        raise WrongUse(label, found=f"it is not {_expected(knob)}", cure=f"{knob.name}: {knob.why}") from None
    if knob.least is not None and value < knob.least:
        raise WrongUse(label, found=f"it is below {knob.least:g}", cure=f"{knob.name}: {knob.why}")
    if knob.only is not None and value != knob.only:
        raise WrongUse(label, found=_sentence(knob.why), cure=knob.cure)
    return value


def _expected(knob: Knob) -> str:
    if knob.kind == "words":
        return f"one of {', '.join(knob.words)}"
    return {"whole": "a whole number", "number": "a number", "switch": "true or false"}.get(
        knob.kind, "two numbers from 0 to below 1, as in [0.9, 0.95]"
    )


def _sentence(text: str) -> str:
    return text[0].lower() + text[1:].removesuffix(".") if not text[:2].isupper() else text.removesuffix(".")


def _whole(_: Knob, given: Any) -> int:
    if isinstance(given, str):
        return int(given)
    if isinstance(given, bool) or int(given) != given:
        raise TypeError
    return int(given)


def _number(_: Knob, given: Any) -> float:
    value = float(given)
    if isinstance(given, bool) or value != value or value in (float("inf"), -float("inf")):  # noqa: PLR0124 - not a number
        raise TypeError
    return value


def _switch(knob: Knob, given: Any) -> Any:
    value = given if isinstance(given, bool) else TRUTHS[str(given).lower()]
    return knob.words[str(value).lower()] if knob.words else value


def _word(knob: Knob, given: Any) -> str:
    return knob.words[str(given).removeprefix("torch.")]


def _pair(_: Knob, given: Any) -> list[float]:
    value = msgspec.json.decode(given) if isinstance(given, str) else given
    first, second = (float(one) for one in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError
    return [first, second]


_READERS = {"whole": _whole, "number": _number, "switch": _switch, "words": _word, "pair": _pair}


def _all(wrong: list[TrimtabError]) -> TrimtabError:
    """One error for all."""
    if len(wrong) == 1:
        return wrong[0]
    listed = "; ".join(f"{one.given}: {one.found}. {one.cure.removesuffix('.')}" for one in wrong)
    return WrongUse(f"{len(wrong)} knobs that cannot be", found=listed, cure="Mend them, or leave them out.")


class _Made:
    """What has been set so far."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.spare: list[str] = []
        self.pins: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        self.said: list[str] = []
        self.by: dict[str, str] = {}

    def take(self, knob: Knob, given: Any, value: Any) -> None:
        """A knob that sets one thing."""
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

    def precision(self, found: Mapping[str, Any], *, bf16: bool) -> None:
        """Autocast in bf16 where that is asked for and there, else in fp16; without it TF32 or fp32."""
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

    def betas(self, found: Mapping[str, Any]) -> None:
        """Two knobs for a pair; what is not given is what AdamW has for language models."""
        if "adam_beta1" in found or "adam_beta2" in found:
            pair = [found.get("adam_beta1", 0.9), found.get("adam_beta2", 0.95)]
            word = " ".join(f"{name}={found[name]}" for name in ("adam_beta1", "adam_beta2") if name in found)
            if max(pair) >= 1:
                raise WrongUse(f"knob {word}", found="it is not below 1", cure="Give a number such as 0.95.")
            self._put(self.options, "betas", pair, word)

    def whole(self, found: Mapping[str, Any], ranks: int) -> None:
        """The global batch that a batch of one process makes."""
        if "batch_size" not in found:
            return
        rounds = found.get("gradient_accumulation_steps", 1)
        total = found["batch_size"] * rounds * ranks
        self._put(self.options, "global_batch", total, f"batch_size={found['batch_size']}")
        many = f"{ranks} process{'es' * (ranks > 1)}"
        self.said.append(f"global batch {total}: batch_size {found['batch_size']} x {rounds} x {many}")

    def wired(self) -> Wired:
        """All of it."""
        return Wired(
            options=self.options,
            spare=tuple(self.spare),
            pins=self.pins,
            train=self.train,
            said=tuple(self.said),
            by=self.by,
        )
