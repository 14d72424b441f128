"""Read what the knobs of a training command are set to, and write a setting into its command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import WrongUse
from trimtab.scripts.command_options import OptionEditor
from trimtab.scripts.knobs import COUNTS, PRECISIONS, WORDS
from trimtab.spec import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.scripts.knobs import KnobSet, ScriptKnob
    from trimtab.spec import Setting
    from trimtab.spec.script import ScriptCommand


class BatchSplit(NamedTuple):
    """Micro-batch and accumulation; None if unknown."""

    micro_batch: int | None
    accumulation: int | None


def read_split(knobs: KnobSet) -> BatchSplit:
    """Return micro-batch and accumulation that the knobs are set to."""
    counts = _read_counts(knobs)
    return _compute_split(counts, knobs)


def _read_counts(knobs: KnobSet) -> dict[str, int]:
    return {
        knob.field: int(knob.current) // knob.unit
        for knob in knobs.knobs
        if knob.field in COUNTS and knob.current is not None and knob.current.isdigit()
    }


def _compute_split(counts: Mapping[str, int], knobs: KnobSet) -> BatchSplit:
    ranks = max(1, knobs.world_size)
    accumulation = counts.get("accumulation")
    if accumulation is None and "total_accumulation" in counts:
        accumulation = max(1, counts["total_accumulation"] // ranks)
    per_rank = counts.get("rank_batch")
    if per_rank is None and "global_batch" in counts:
        per_rank = counts["global_batch"] // ranks
    micro = counts.get("micro_batch")
    if micro is None and "round_batch" in counts:
        micro = counts["round_batch"] // ranks
    if micro is None and per_rank is not None and accumulation:
        micro = per_rank // accumulation
    if accumulation is None and per_rank is not None and micro:
        accumulation = max(1, per_rank // micro)
    if accumulation is None and not knobs.of("accumulation", "total_accumulation"):
        accumulation = int(knobs.observed.get("accumulation", "1"))
    return BatchSplit(micro or None, accumulation)


def read_word(knobs: KnobSet, field: str) -> str | None:
    """Return what the knobs of precision, recompute or compile are set to, in our words; None if unknown."""
    own = [knob for knob in knobs.of(field) if knob.current is not None]
    if not own:
        return knobs.observed.get(field)
    words = (
        PRECISIONS
        if field == "precision"
        else tuple(dict.fromkeys(word for knob in own for word in knob.words))
    )
    scores: dict[str, int] = {}
    for word in words:
        matches = 0
        for knob in own:
            if word in knob.words:
                matches = matches + 1 if knob.words[word] == knob.current else -len(own) - 1
            elif not knob.leaves_others:
                matches = -len(own) - 1
            if matches < 0:
                break
        if matches > 0:
            scores[word] = matches
    return max(scores, key=lambda word: scores[word]) if scores else None


def observe(knobs: KnobSet, setting: Setting) -> KnobSet:
    """Return the knobs with what a run of the command showed, where their own values do not say."""
    words = {field: _word_of(setting, field) for field in WORDS}
    counts = {"micro_batch": str(setting.micro_batch), "accumulation": str(setting.accumulation)}
    filled = [
        knob.replace(current=knob.words.get(words[knob.field]))
        if knob.field in words and knob.current is None
        else knob
        for knob in knobs.knobs
    ]
    return knobs.replace(knobs=tuple(filled), observed=words | counts)


def mark_tokens(knobs: KnobSet, setting: Setting, sequence: int) -> KnobSet:
    """Return the knobs with those that count tokens marked: a run had as many samples times the sequence."""
    samples = {
        "global_batch": setting.global_batch,
        "rank_batch": setting.micro_batch * setting.accumulation,
    }
    marked = [
        knob.replace(unit=sequence, meaning=f"taken as tokens, in sequences of {sequence:,}")
        if sequence > 1 and knob.current == str(samples.get(knob.field, 0) * sequence)
        else knob
        for knob in knobs.knobs
    ]
    return knobs.replace(knobs=tuple(marked))


def write_setting(
    command: ScriptCommand,
    knobs: KnobSet,
    setting: Setting,
    *,
    now: Setting | None = None,
    in_files: bool = False,
) -> tuple[ScriptCommand, tuple[str, ...]]:
    """Return the command line of a setting, and notes on what changed; raise what it cannot express.

    The notes name each change: '--batch_size 16 instead of --batch_size 64'. `now` is what the command
    trains with: precision, recompute and compile are left alone where they are the same. With `in_files`,
    what a config file sets is changed there, and not overridden on the command line.
    """
    editor = OptionEditor(command, in_files=in_files)
    notes: list[str] = []
    after = _write_counts(editor, knobs, setting, notes)
    for field in WORDS:
        if now is not None and _word_of(now, field) == _word_of(setting, field):
            continue
        after = _write_word(editor, after, field, _word_of(setting, field), notes)
    changed = editor.command()
    if setting.data_parallel != knobs.world_size and command.world_size == knobs.world_size:
        changed = changed.replace(processes=setting.data_parallel // max(1, command.nodes))
    return changed, tuple(notes)


def write_values(
    command: ScriptCommand, knobs: KnobSet, values: Mapping[str, str], *, in_files: bool = False
) -> tuple[ScriptCommand, tuple[str, ...]]:
    """Return the command line with other values of options, by name, and notes on what changed."""
    editor = OptionEditor(command, in_files=in_files)
    notes: list[str] = []
    for name, value in values.items():
        knob = next(knob for knob in knobs.knobs if knob.name == name)
        _write_knob(editor, knob, value, notes)
    return editor.command(), tuple(notes)


def _word_of(setting: Setting, field: str) -> str:
    return str(setting.compile).lower() if field == "compile" else str(getattr(setting, field).value)


def _write_counts(editor: OptionEditor, knobs: KnobSet, setting: Setting, notes: list[str]) -> KnobSet:
    ranks, micro, rounds = setting.data_parallel, setting.micro_batch, setting.accumulation
    if micro * rounds * ranks != setting.global_batch:
        raise WrongUse(
            f"micro-batch {micro} x accumulation {rounds} x {ranks} processes",
            found=f"it is not the global batch {setting.global_batch}: a script has equal micro-batches",
            cure="Choose a micro-batch that divides the global batch.",
        )
    counts = {
        "micro_batch": micro,
        "round_batch": micro * ranks,
        "rank_batch": micro * rounds,
        "global_batch": setting.global_batch,
        "accumulation": rounds,
        "total_accumulation": rounds * ranks,
        "total_processes": ranks,
        "processes": ranks // max(1, knobs.nodes),
    }
    if ranks != knobs.world_size and not knobs.of("processes", "total_processes"):
        raise WrongUse(
            f"{ranks} processes",
            found=f"the command starts {knobs.world_size}, and has no option for their number",
            cure="Start it with torchrun --nproc-per-node, or with accelerate launch --num_processes.",
        )
    if ranks == knobs.world_size:
        del counts["total_processes"], counts["processes"]
    written = []
    for knob in knobs.knobs:
        if knob.field in counts:
            value = str(counts[knob.field] * knob.unit)
            knob = _write_knob(editor, knob, value, notes)  # noqa: PLW2901 - with its new value
        written.append(knob)
    after = knobs.replace(knobs=tuple(written), world_size=ranks)
    split = read_split(after)
    if split.accumulation not in (None, rounds):
        raise WrongUse(
            f"accumulation {rounds}",
            found=f"the script has no option for gradient accumulation, and accumulates {split.accumulation}"
            + _in_source(knobs, "accumulation"),
            cure="Keep it, or add the option to the script and name it with --vary.",
        )
    if split.micro_batch != micro and (split.micro_batch is not None or not _is_observed(knobs, micro)):
        raise WrongUse(
            f"micro-batch {micro}",
            found="no option of the script is known to set it" + _in_source(knobs, "micro_batch"),
            cure="Name the option with --vary, as in --vary --batch-size.",
        )
    return after


def _in_source(knobs: KnobSet, field: str) -> str:
    return f" ({knobs.in_source[field]})" if field in knobs.in_source else ""


def _is_observed(knobs: KnobSet, micro_batch: int) -> bool:
    return knobs.observed.get("micro_batch") == str(micro_batch)


def _write_word(editor: OptionEditor, knobs: KnobSet, field: str, word: str, notes: list[str]) -> KnobSet:
    """Set precision, recompute or compile; raise if the options cannot say the word."""
    if read_word(knobs, field) == word:
        return knobs
    written = []
    for knob in knobs.knobs:
        if knob.field == field and word in knob.words:
            knob = _write_knob(editor, knob, knob.words[word], notes)  # noqa: PLW2901 - with its new value
        written.append(knob)
    after = knobs.replace(knobs=tuple(written))
    if read_word(after, field) != word:
        names = ", ".join(knob.name for knob in knobs.of(field))
        known = knobs.observed.get(field)
        found = f"{names} cannot say it" if names else "no option of the script is known to set it"
        found += f"; a run showed {known}" if known else ""
        raise WrongUse(
            f"{field} {word}", found=found, cure="Keep it as it is, or name the option with --vary."
        )
    return after


def _write_knob(editor: OptionEditor, knob: ScriptKnob, value: str, notes: list[str]) -> ScriptKnob:
    """Set the option of a knob, if it has another value; return the knob with the value."""
    if knob.current == value:
        return knob
    change = editor.set_value(knob.option, value, launcher=knob.is_launcher)
    if change:
        notes.append(change)
    return knob.replace(current=value, is_given=True)


def list_precisions(knobs: KnobSet) -> tuple[Precision, ...]:
    """Return the precisions that the knobs can say."""
    words = {word for knob in knobs.of("precision") for word in knob.words}
    return tuple(Precision(word) for word in PRECISIONS if word in words)
