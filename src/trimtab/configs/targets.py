"""Targets: what the keys of a framework's config mean.

A target is data: each knob says which field of ours a key holds, and in which words. The built-in targets are
in targets.toml. A project adds its own in a trimtab.toml of the same form:

    [[target]]
    name = "ours"
    title = "our trainer"
    marks = [["optim.samples_per_gpu"]]

    [[target.knobs]]
    field = "micro_batch"
    keys = ["optim.samples_per_gpu"]

A target with the name of a built-in one replaces it.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.configs.text_edit import format_path
from trimtab.errors import BrokenFile, UnknownName, WrongUse, find_nearest
from trimtab.spec import (
    Allocator,
    BaseFormat,
    LossForm,
    Noun,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Precision,
    Recompute,
    Strategy,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trimtab.configs.text_edit import Entry, KeyPath, ParsedConfig

COUNTS = (
    "micro_batch",
    "accumulation",
    "global_batch",
    "rank_batch",
    "round_batch",
    "gpus",
    "gpus_per_node",
    "nodes",
    "data_parallel",
    "dp_replicate",
    "dp_shard",
    "pp",
    "tensor",
    "context",
    "expert",
    "virtual_stages",
    "workers",
    "seq",
)
"""Fields that are whole numbers.

data_parallel: ranks that split the global batch
rank_batch: samples of one rank in an optimizer step
round_batch: samples of all ranks in one forward pass
tensor, context, expert: ranks of tensor, context and expert parallelism
virtual_stages: parts of the model on each pipeline rank
seq: tokens of one sample, where the plan's job has such a length
"""
BOTH = f"{Offload.PARAMS},{Offload.OPTIMIZER}"
"""Weights and states of the optimizer on the host, as FSDP puts them there."""
WORDS: dict[str, tuple[str, ...]] = {
    "precision": tuple(member.value for member in Precision),
    "base": tuple(member.value for member in BaseFormat),
    "loss": tuple(member.value for member in LossForm),
    "offload": ("none", Offload.PARAMS.value, Offload.OPTIMIZER.value, BOTH),
    "offload_activations": ("false", "true"),
    "optimizer_rule": tuple(member.value for member in OptimizerRule),
    "optimizer_in_backward": ("false", "true"),
    "recompute": tuple(member.value for member in Recompute),
    "compile": ("false", "true"),
    "sync_batchnorm": ("false", "true"),
    "strategy": tuple(member.value for member in Strategy),
    "optimizer": tuple(member.value for member in OptimizerImplementation),
    "allocator": tuple(member.value for member in Allocator),
}
"""Fields that are words, with ours.

offload: what of weights and optimizer states is in the memory of the host
optimizer_rule: which optimizer; `job` for the job's own, as which AdamW of torch is read
optimizer: how torch's AdamW runs over the parameters
"""
FIELDS = (*COUNTS, *WORDS)
ANY = "*"
"""Key of a table of words that stands for all others."""
IMPLIED = ("round_batch", "rest")
"""What a number that stands for another one, such as -1, may stand for; `rest`: the ranks that are left."""


class Knob(Noun, frozen=True, kw_only=True):
    """A key of a framework's config, and the field of ours that it holds."""

    field: str
    """The field of ours."""
    keys: tuple[str, ...]
    """Where it is, below the target's root; the first that is there counts, else the first is added."""
    words: dict[str, Any] = {}
    """What is written for each of our words. A word that is not here leaves the key alone."""
    reads: dict[str, str] = {}
    """Further values, as text, that mean one of our words."""
    rough: dict[str, str] = {}
    """Values, as text, that `show` reads as the nearest word, with a warning. `apply` replaces them."""
    rough_why: str = ""
    """How such a value differs from the word it is read as."""
    soft: tuple[Any, ...] = ()
    """Values that give way to another key: they are only a preference, and never contradict anything."""
    near: dict[str, str] = {}
    """For a word that cannot be written, the nearest that can; `*`: for all such words."""
    lacks: dict[str, str] = {}
    """What to say when a word cannot be written, or only its nearest; `*`: for all such words. It may have
    {value}."""
    keeps: dict[str, str] = {}
    """Words of ours for which another value in the file stays, and why: it changes what is trained."""
    default: Any = None
    """What the framework takes where the key is not there; None where nobody knows."""
    add: bool = False
    """Whether the key is added where it is missing and the default is not what is wanted."""
    inferred: tuple[str, ...] = ()
    """Fields from which the framework itself works this one out."""
    implied: dict[str, str] = {}
    """Numbers, as text, that stand for another: -1 for `rest`."""
    auto: tuple[Any, ...] = ("auto",)
    """Values by which the framework decides itself: left alone."""
    listed: bool = False
    """Whether a list counts as its length: devices [0, 1] are two."""
    family: bool = False
    """Whether only values that are known here may be replaced: another optimizer is another training."""
    pattern: str = ""
    """Where the number is part of a text: an expression whose group `n` it is."""
    only: dict[str, tuple[str, ...]] = {}
    """The knob counts only where these fields have one of these words."""
    when: dict[str, tuple[Any, ...]] = {}
    """The knob counts only where these keys have one of these values; null: the key is missing; `table`: it
    holds others; `*.lora_*`: a pattern; `!true`: anything else."""
    formats: tuple[str, ...] = ()
    """Kinds of document in which it counts; none: all."""
    caveat: str = ""
    """What to say when a number other than 1, or another word than the usual one, is written."""

    def faults(self) -> list[str]:
        """The field and the words are ours."""
        if self.field not in FIELDS:
            close = find_nearest(self.field, FIELDS)
            meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(FIELDS)}"
            return [f"there is no field {self.field!r}{meant}"]
        wrong = [] if self.keys else [f"the knob for {self.field} names no key"]
        ours = WORDS.get(self.field)
        if ours is None:
            wrong += [f"{self.field} is a number, and has no words"] * bool(self.words)
        elif not self.words:
            wrong.append(f"{self.field} needs words: what is written for {', '.join(ours)}")
        else:
            used = {*self.words, *self.near, *self.near.values(), *self.lacks, *self.keeps}
            used |= {*self.reads.values(), *self.rough.values()}
            used -= {ANY}
            wrong += [
                f"{word!r} is no {self.field}; there are {', '.join(ours)}"
                for word in used
                if word not in ours
            ]
        wrong += [
            f"{word!r} is none of {', '.join(IMPLIED)}"
            for word in self.implied.values()
            if word not in IMPLIED
        ]
        if self.pattern:
            wrong += _bad_pattern(self.pattern)
        return wrong

    def nearest(self, word: str) -> str:
        """Return the word that is written for one of ours: itself, if it can be."""
        return word if word in self.words else self.near.get(word, self.near.get(ANY, word))

    def explain_lack(self, word: str) -> str:
        """Return what to say when a word cannot be written, or only its nearest; empty if it can."""
        text = self.lacks.get(word, "" if word in self.words else self.lacks.get(ANY, ""))
        return text.replace("{value}", word)


def _bad_pattern(pattern: str) -> list[str]:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        return [f"the pattern {pattern!r} is no regular expression: {error}"]
    return [] if "n" in groups else [f"the pattern {pattern!r} has no group (?P<n>...)"]


class Requirement(Noun, frozen=True, kw_only=True):
    """A key that must have certain values for a plan to hold: nothing offloaded, nothing quantised.

    `apply` writes what the plan needs where that only changes how the job runs. Where it would change what is
    trained, the key stays and a warning says so. `show` warns of every value that an estimate leaves out.
    """

    keys: tuple[str, ...]
    """Where it is, below the target's root; every one of them that is there is looked at."""
    values: tuple[Any, ...] = (None, False)
    """The values under which a plan holds."""
    default: Any = None
    """What the framework takes where the key is missing."""
    write: Any = None
    """What `apply` writes in place of another value; nothing: the key stays, with a warning."""
    add: bool = False
    """Whether `apply` adds the first key where it is missing and the default is none of the values."""
    only: dict[str, tuple[str, ...]] = {}
    """It counts only where these fields have one of these words."""
    when: dict[str, tuple[Any, ...]] = {}
    """It counts only where these keys of the config have one of these values; null: the key is missing."""
    field: str = ""
    """The field of ours that it belongs to, where there is one."""
    why: str
    """What another value means beside a plan, or an estimate."""

    def faults(self) -> list[str]:
        """It names a key, and what it writes is one of the values."""
        wrong = [] if self.keys else ["a requirement names no key"]
        if self.write is not None and self.write not in self.values:
            wrong.append(f"{self.keys[0]} would be written as {self.write}, which is none of its values")
        if self.add and self.write is None:
            wrong.append(f"{self.keys[0]} cannot be added: there is nothing to write")
        return wrong


class Subject(Noun, frozen=True, kw_only=True):
    """The job that a config of this kind describes."""

    name: str = ""
    """A built-in job."""
    folder: str | tuple[str, ...] = ""
    """The key, or keys, of a folder with a Hugging Face config.json."""
    options: dict[str, str] = {}
    """Options of the job, by the key that holds each."""
    defaults: dict[str, Any] = {}
    """What the framework takes for an option whose key is missing."""
    when: dict[str, dict[str, tuple[Any, ...]]] = {}
    """An option counts only where these keys have one of these values, as for a knob."""
    calls: dict[str, tuple[str, Any]] = {}
    """Options of the job that a call anywhere in a Python file holds: the key, and the call's own default."""
    assumes: dict[str, str] = {}
    """What the code around the config does though no key says it, by field."""

    def read_options(self, root: KeyPath, values: Mapping[KeyPath, Entry]) -> dict[str, tuple[KeyPath, Any]]:
        """Return the path and the value of each option; None if the file does not say it."""
        options: dict[str, tuple[KeyPath, Any]] = {}
        for option in self.options:
            key, default = self.options[option], self.defaults.get(option)
            counts = conditions_hold(self.when.get(option, {}), root, values)
            if option in self.calls:
                call, call_default = self.calls[option]
                if any(path[:1] == place_key((), call)[:1] for path in values):
                    key, default, counts = call, call_default, True
            path = find_place(root, key, values)
            entry = values.get(path)
            value = default if entry is None else None if entry.computed else entry.value
            options[option] = path, value if counts else None
        return options

    def folders(self) -> tuple[str, ...]:
        """Return the keys that may name a model's folder."""
        return (self.folder,) * bool(self.folder) if isinstance(self.folder, str) else self.folder


class StageFormat(Noun, frozen=True, kw_only=True):
    """Files beside a config, each a stage of the training."""

    marks: tuple[tuple[str, ...], ...]
    """As for the target."""
    options: dict[str, str] = {}
    """Options of the job that a stage sets."""
    micro_batch: str
    """The key of the stage's own micro-batch."""
    accumulation: str
    caveat: str = ""
    """What to say where a stage gets keys of its own."""


class Flavor(Noun, frozen=True, kw_only=True):
    """A model that a config names, with its sizes."""

    when: dict[str, tuple[Any, ...]]
    """The keys that name it, as for a knob."""
    sizes: dict[str, int]
    """Sizes by their names in `trimtab.jobs.model_sizes`."""


class ConfigTarget(Noun, frozen=True, kw_only=True):
    """A framework's config."""

    name: str
    title: str
    formats: tuple[str, ...] = ()
    """Kinds of document; none: all."""
    marks: tuple[tuple[str, ...], ...] = ()
    """By what it is known: of each group one key has to be there."""
    never: tuple[str, ...] = ()
    """Keys by which it is known to be something else."""
    beats: tuple[str, ...] = ()
    """Targets whose marks this one has too, and which it is rather than them."""
    knobs: tuple[Knob, ...]
    requires: tuple[Requirement, ...] = ()
    """What else in the file has to be so for a plan to hold."""
    lacks: dict[str, str] = {}
    """What to say of a field that has no key, instead of the usual sentence; with {value}."""
    partial: str = ""
    """What to say of a file that is only part of a config: its other fields are not missed one by one."""
    launch: str = ""
    """How the number of devices is said where no key holds it; with {gpus}, {gpus_per_node} and {nodes}."""
    subject: Subject = Subject()
    model: dict[str, tuple[str, ...]] = {}
    """Keys of each size of the model, by its name in `trimtab.jobs.model_sizes`; also layers_per_stage and
    stage_micro_batch, by which pipelines are cut."""
    flavors: tuple[Flavor, ...] = ()
    """Models that are known by name."""
    rules: dict[str, dict[str, tuple[Any, ...]]] = {}
    """What the framework requires of degrees (`trimtab.planner.degrees.FrameworkRules`): each rule holds
    where these keys have one of these values, as for a knob; `{}`: always."""
    stage: StageFormat | None = None
    source: str = ""
    """Where the meaning of the keys is written down."""

    def faults(self) -> list[str]:
        """It has a name people can type, and says how it is known."""
        wrong = [] if re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", self.name) else [f"{self.name!r} is no name"]
        if not self.marks:
            wrong.append(f"{self.name} has no marks to be known by")
        if not self.knobs:
            wrong.append(f"{self.name} has no knobs")
        return wrong + [
            f"{self.name} lacks {name!r}, which is no field" for name in self.lacks if name not in FIELDS
        ]

    def fields(self) -> set[str]:
        """Return the fields that its keys hold."""
        return {knob.field for knob in self.knobs}


class TargetsOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab apply --list-targets --json`."""

    targets: tuple[ConfigTarget, ...]


@cache
def builtin_targets() -> tuple[ConfigTarget, ...]:
    """Load the targets that come with trimtab."""
    text = files("trimtab.configs").joinpath("targets.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["target"], tuple[ConfigTarget, ...])


def find_target(name: str, known: Sequence[ConfigTarget]) -> ConfigTarget:
    """Return the target of that name."""
    for target in known:
        if target.name == name:
            return target
    close = find_nearest(name, [target.name for target in known])
    meant = f"; the nearest is {close[0]}" if close else ""
    raise UnknownName(
        f"--target {name}",
        found=f"there is no such target{meant}",
        cure=f"Use one of {', '.join(target.name for target in known)}, or teach it in a trimtab.toml.",
    )


class TargetSite(Noun, frozen=True, kw_only=True):
    """A target found in a document, and the path above its keys."""

    target: ConfigTarget
    root: tuple[str | int, ...] = ()
    kind: str = ""
    """Kind of the document, such as yaml; empty if unknown."""

    def applies(self, knob: Knob) -> bool:
        """Whether a knob counts in documents of this kind."""
        return not knob.formats or self.kind in knob.formats


def split_key(key: str) -> KeyPath:
    """Split a dotted key into a path."""
    return tuple(key.split("."))


def place_key(root: KeyPath, key: str) -> KeyPath:
    """Return the path of a key below a root; a key with a leading slash starts at the top of the file.

    >>> place_key(("SFTConfig",), "bf16"), place_key(("SFTConfig",), "/LoraConfig.r")
    (('SFTConfig', 'bf16'), ('LoraConfig', 'r'))
    """
    return split_key(key[1:]) if key.startswith("/") else root + split_key(key)


def shorten_path(path: KeyPath, root: KeyPath) -> KeyPath:
    """Return a path without the root, if it is below the root."""
    return path[len(root) :] if path[: len(root)] == root else path


def find_place(root: KeyPath, key: str, values: Mapping[KeyPath, Entry]) -> KeyPath:
    """Return the path of a key; of several calls of a function, the first that has the keyword."""
    path = place_key(root, key)
    if path in values or not key.startswith("/") or len(path) < 2:  # noqa: PLR2004 - a call and its keyword
        return path
    numbered = (
        other
        for other in values
        if len(other) == len(path) + 1
        and other[0] == path[0]
        and isinstance(other[1], int)
        and other[2:] == path[1:]
    )
    return min(numbered, default=path, key=lambda other: int(other[1]))


def conditions_hold(
    when: Mapping[str, Sequence[Any]], root: KeyPath, values: Mapping[KeyPath, Entry]
) -> bool:
    """Return whether every key of a `when` has one of its values in the file."""
    return all(_key_has(find_place(root, key, values), among, values) for key, among in when.items())


def _key_has(path: KeyPath, among: Sequence[Any], values: Mapping[KeyPath, Entry]) -> bool:
    entry = values.get(path)
    current = "null" if entry is None or entry.value is None else entry.value
    if entry is None and any(len(other) > len(path) and other[: len(path)] == path for other in values):
        current = "table"
    return any(_matches(str(current).lower(), str(value).lower()) for value in among)


def _matches(current: str, wanted: str) -> bool:
    """Return whether a value is the wanted one, matches its pattern, or is not what follows a `!`."""
    if wanted.startswith("!"):
        return not _matches(current, wanted[1:])
    return fnmatchcase(current, wanted) if "*" in wanted else current == wanted


class KeyIndex:
    """The keys of a document, tables included, by their last word."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.paths: set[KeyPath] = set()
        for entry in entries:
            path = entry.path
            # A key that holds a table has no entry of its own.
            while path and path not in self.paths:
                self.paths.add(path)
                path = path[:-1]
        self.by_end: dict[str | int, list[KeyPath]] = {}
        for path in self.paths:
            self.by_end.setdefault(path[-1], []).append(path)

    def above(self, end: KeyPath) -> list[KeyPath]:
        """Return what comes before a key, wherever it is."""
        return [path[: -len(end)] for path in self.by_end.get(end[-1], []) if path[-len(end) :] == end]


def find_roots(marks: Sequence[Sequence[str]], index: KeyIndex, below: KeyPath = ()) -> list[KeyPath]:
    """Return the paths below which there is one key of every group."""
    candidates = {
        root for key in marks[0] for root in index.above(split_key(key)) if root[: len(below)] == below
    }
    return sorted(
        (
            root
            for root in candidates
            if all(any(root + split_key(key) in index.paths for key in group) for group in marks)
        ),
        key=lambda root: (len(root), str(root)),
    )


def find_sites(
    document: ParsedConfig, known: Sequence[ConfigTarget], below: KeyPath = ()
) -> list[TargetSite]:
    """Return every target that a document can be, and where."""
    index = KeyIndex(document.entries())
    candidates = [
        TargetSite(target=target, root=root, kind=document.kind)
        for target in known
        if not target.formats or document.kind in target.formats
        for root in find_roots(target.marks, index, below)
        if not any(root + split_key(key) in index.paths for key in target.never)
    ]
    return [place for place in candidates if not any(_beats(other, place) for other in candidates)]


def _beats(site: TargetSite, other: TargetSite) -> bool:
    """Return whether the other site is part of this one."""
    return other.target.name in site.target.beats and other.root[: len(site.root)] == site.root


def find_site(
    document: ParsedConfig,
    known: Sequence[ConfigTarget],
    *,
    origin: str,
    name: str | None = None,
    below: KeyPath = (),
) -> TargetSite:
    """Return the target that a document is; raise with advice if that is not clear."""
    given = f"{origin}:{format_path(below)}" if below else origin
    if name is not None:
        found = _sites_of_target(document, find_target(name, known), below, given)
    else:
        found = find_sites(document, known, below)
    if len(found) == 1:
        return found[0]
    if not found:
        raise WrongUse(
            given,
            found="none of its keys tell which framework reads it",
            cure=f"Say which: --target with one of {', '.join(target.name for target in known)}; "
            "or describe its keys in a trimtab.toml (see `trimtab explain target`).",
        )
    names = list(dict.fromkeys(place.target.name for place in found))
    if len(names) == 1:
        listed = ", ".join(f"{origin}:{format_path(place.root)}" if place.root else origin for place in found)
        raise WrongUse(
            given, found=f"it holds {len(found)} configs of {names[0]}", cure=f"Name one of {listed}."
        )
    raise WrongUse(
        given,
        found=f"it could be a config of {' or of '.join(names)}",
        cure=f"Say which: {' or '.join(f'--target {name}' for name in names)}.",
    )


def _sites_of_target(
    document: ParsedConfig, target: ConfigTarget, below: KeyPath, given: str
) -> list[TargetSite]:
    """Find a target that the user named: by its marks, by any of its keys, or where they pointed."""
    index = KeyIndex(document.entries())
    keys = [[key for knob in target.knobs for key in knob.keys]]
    found = find_roots(target.marks, index, below)
    if not found and below in (found := find_roots(keys, index, below)):
        # The others are tables of this one.
        found = [below]
    if not found and not below and index.paths:
        raise WrongUse(
            given,
            found=f"it has none of the keys of {target.name}",
            cure=f"Name another target, or the place where they belong: {given}:PATH.",
        )
    return [TargetSite(target=target, root=root, kind=document.kind) for root in found or [below]]


PROJECT_FILE = "trimtab.toml"
_CURE = "Fix it as docs/configs.md describes; `trimtab apply --list-targets` shows what is known."


def read_targets(file: Path) -> tuple[ConfigTarget, ...]:
    """Read the targets of a trimtab.toml."""
    given = str(file)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenFile(given, found=f"it cannot be read ({error.strerror})", cure=_CURE) from error
    except UnicodeDecodeError as error:
        raise BrokenFile(given, found="it is not UTF-8 text", cure=_CURE) from error
    except tomllib.TOMLDecodeError as error:
        raise BrokenFile(given, found=f"it is not TOML: {error}", cure=_CURE) from error
    rows = content.get("target", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BrokenFile(
            given, found="target is no list of tables", cure="Write [[target]], with two brackets."
        )
    targets = []
    for row in rows:
        try:
            targets.append(msgspec.convert(row, ConfigTarget))
        except msgspec.ValidationError as error:
            name = row.get("name", "without a name")
            raise BrokenFile(given, found=f"the target {name} is not right: {error}", cure=_CURE) from error
    return tuple(targets)


def find_target_files(files: Iterable[Path]) -> list[Path]:
    """Find the trimtab.toml of each config: in its folder, or the nearest one above.

    Nothing above the current folder counts for a config within it: what is there belongs to someone else.
    """
    here = Path.cwd()
    target_files: dict[Path, None] = {}
    for file in files:
        start = file.absolute() if file.is_dir() else file.absolute().parent
        for folder in (start, *start.parents):
            if (folder / PROJECT_FILE).is_file():
                target_files[folder / PROJECT_FILE] = None
                break
            if folder == here:
                break
    return list(target_files)


def list_targets(files: Iterable[Path] = ()) -> tuple[ConfigTarget, ...]:
    """List the targets for these configs: the projects' own first, then the built-in ones."""
    own = [target for file in find_target_files(files) for target in read_targets(file)]
    names = {target.name for target in own}
    return (*own, *(target for target in builtin_targets() if target.name not in names))
