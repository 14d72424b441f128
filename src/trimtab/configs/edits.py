"""From a plan to the edits of a config that say the same, in the config's own words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.configs import words
from trimtab.configs.reading import ConfigWarning, as_setting, held, read, table, violated
from trimtab.configs.targets import WORDS, counts, parts
from trimtab.configs.texts import dotted
from trimtab.errors import TrimtabError, WrongUse
from trimtab.spec import Noun
from trimtab.strategies import STRATEGIES, strategy_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.targets import Knob, Path, Requirement, Site, Target
    from trimtab.configs.texts import Document, Entry
    from trimtab.spec import Plan, Setting

PLAIN: dict[str, int | str] = {
    "accumulation": 1,
    "nodes": 1,
    "pp": 1,
    "tensor": 1,
    "context": 1,
    "workers": 0,
    "recompute": "none",
    "compile": "false",
    "sync_batchnorm": "false",
    "allocator": "default",
    "optimizer": "fused",
    "strategy": "single",
}
"""What a run is like that nobody has said anything about: not worth a sentence where no key holds it."""
LABELS = {"seq": "sequence length"}
"""Fields that people call something else than we do."""
BATCH = ("micro_batch", "accumulation", "global_batch", "rank_batch", "round_batch")
ELSEWHERE = {
    "allocator": "Start the job with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: no key here holds it.",
    "micro_batch": "No key here holds the micro-batch: give the job's data loader {value} samples a batch.",
    "sync_batchnorm": "No key here synchronises BatchNorm: in the job's code, call "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped.",
    "seq": "No key here holds the sequence length: the plan was made for samples of {value} tokens.",
}


_BORROWED = re.compile(r"\$\{+ *([^}]+?) *\}")
"""A reference to another key or variable, as Hydra and others write it."""


class Edit(Noun, frozen=True, kw_only=True):
    """One value of a config, before and after."""

    file: str
    key: str
    before: Any = None
    """None where the key is added."""
    after: Any = None
    path: tuple[str | int, ...] = ()
    line: int | None = None
    """None where the key is added."""
    field: str = ""
    """What of ours it holds."""


@dataclass
class Draft:
    """The edits so far, and what has to be said beside them."""

    file: str
    edits: list[Edit] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    """Fields that the config says after the edits, or has to leave."""
    warnings: list[ConfigWarning] = field(default_factory=list)
    """Where the config will differ from the plan."""
    missing: dict[str, ConfigWarning] = field(default_factory=dict)
    """What to say of fields that no key here holds; another file may."""

    def say(self, sentence: str) -> None:
        """Once."""
        if sentence not in self.said:
            self.said.append(sentence)

    def warn(self, text: str, *, field: str, key: str = "", value: Any = None, planned: Any = None) -> None:
        """Once: the config will differ from the plan."""
        if all(one.text != text for one in self.warnings):
            self.warnings.append(
                ConfigWarning(text=text, file=self.file, key=key, value=value, field=field, planned=planned)
            )

    def texts(self) -> list[str]:
        """Everything there is to say, in sentences."""
        return [*self.said, *(one.text for one in (*self.warnings, *self.missing.values()))]


def nodes_of(plan: Plan) -> int:
    """On how many machines a plan runs."""
    return len({one.node for one in plan.places}) or 1


def exactly(setting: Setting, given: str) -> tuple[Setting, str]:
    """The setting with micro-batches that are all full, as frameworks need it, and a word about it.

    trimtab's own trainer makes the last micro-batch smaller; others run as many full ones as they are told. A
    smaller micro-batch in more rounds fits as well, and keeps the global batch.
    """
    if setting.shares:
        raise WrongUse(
            given,
            found="its ranks take unlike shares of the batch, which only trimtab's own trainer does",
            cure="Plan for GPUs that are alike, as in --on 2xRTX3090, or for one of them.",
        )
    strategy = strategy_of(setting)
    if not strategy.is_in_frameworks:
        raise WrongUse(
            given,
            found=f"its strategy is {setting.strategy}, which only trimtab's own trainer runs",
            cure="Plan again with --pin strategy=ddp, or fsdp.",
        )
    setting = strategy.config_form(setting)
    share, over = divmod(setting.global_batch, setting.data_parallel)
    if over:
        raise WrongUse(
            given,
            found=f"a global batch of {setting.global_batch} cannot be cut into "
            f"{setting.data_parallel} equal parts",
            cure=f"Plan again with --global-batch {share * setting.data_parallel or setting.data_parallel}, "
            f"or with --pin gpus=N for an N that divides {setting.global_batch}.",
        )
    if share == setting.micro_batch * setting.accumulation:
        return setting, ""
    micro = max(one for one in range(1, min(setting.micro_batch, share) + 1) if share % one == 0)
    said = (
        f"The plan's micro-batch {setting.micro_batch} x {setting.accumulation} ends in a smaller one, which "
        f"only trimtab's own trainer runs: {micro} x {share // micro} keeps the global batch of "
        f"{setting.global_batch} exactly."
    )
    return setting.replace(micro_batch=micro, accumulation=share // micro), said


def seq_of(plan: Plan) -> int | None:
    """Tokens of one sample as the plan has them; None where its job has no such length."""
    chosen = plan.options.get("seq")
    if isinstance(chosen, int) and chosen > 0:
        return chosen
    return None if plan.workload is None else plan.workload.sample_length or plan.workload.seq


def facts_of(setting: Setting, nodes: int = 1, seq: int | None = None) -> dict[str, int | str]:
    """Everything that a key can hold, for a setting whose micro-batches are full."""
    length: dict[str, int | str] = {} if seq is None else {"seq": seq}
    return length | {
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "global_batch": setting.global_batch,
        "rank_batch": setting.micro_batch * setting.accumulation,
        "round_batch": setting.micro_batch * setting.data_parallel,
        "gpus": setting.gpus,
        "gpus_per_node": -(-setting.gpus // nodes),
        "nodes": nodes,
        "dp_replicate": setting.mesh.dp_replicate,
        "dp_shard": setting.mesh.dp_shard,
        "pp": 1,
        "tensor": 1,
        "context": 1,
        "workers": setting.workers,
        "precision": setting.precision.value,
        "recompute": setting.recompute.value,
        "compile": words.text(setting.compile),
        "sync_batchnorm": words.text(setting.sync_batchnorm),
        "strategy": setting.strategy.value,
        "optimizer": setting.optimizer.value,
        "allocator": setting.allocator.value,
        "rest": setting.mesh.dp_shard,
    }


def edits(  # noqa: PLR0913 - a plan, where it goes, and how
    site: Site,
    document: Document,
    plan: Plan,
    *,
    file: str,
    setting: Setting | None = None,
    beside: bool = False,
) -> tuple[list[Edit], list[str]]:
    """The edits that make a config say what a plan does, and what it cannot say.

    `setting` stands in for the plan's choice where a stage has one of its own; with `beside`, values that
    another key gives are replaced too.
    """
    found = drafted(site, document, plan, file=file, setting=setting, beside=beside)
    return found.edits, found.texts()


def drafted(  # noqa: PLR0913 - as above
    site: Site,
    document: Document,
    plan: Plan,
    *,
    file: str,
    setting: Setting | None = None,
    beside: bool = False,
) -> Draft:
    """As `edits`, with what no key holds kept apart: another file of the same job may hold it."""
    draft = Draft(file=file)
    nodes = nodes_of(plan)
    given = f"plan for {plan.job}"
    if plan.choice.gpus % nodes:
        raise WrongUse(
            given,
            found=f"it uses {plan.choice.gpus} GPUs on {nodes} nodes, not equally many on each",
            cure="Plan for nodes that are alike.",
        )
    exact, note = exactly(setting or plan.choice, given)
    draft.said += [note] if note else []
    wanted = facts_of(exact, nodes, seq_of(plan))
    entries = document.entries()
    values = {one.path: one for one in entries}
    present = {knob.field for knob in site.target.knobs if held(knob, site.root, values)[1] is not None}
    for knob in site.target.knobs:
        now = {one.path: one for one in overlaid(entries, draft.edits)} if knob.when else values
        if all(wanted.get(key) in among for key, among in knob.only.items()) and counts(
            knob.when, site.root, now
        ):
            path, entry = held(knob, site.root, values)
            if knob.field not in wanted:
                _unplanned(draft, knob, path, entry)
            elif entry is None and (whole := table(knob, site.root, values)):
                draft.settled.add(knob.field)
                draft.warn(
                    f"{dotted(whole)} holds a table, and stays; planned: {wanted[knob.field]}.",
                    field=knob.field,
                    key=dotted(whole),
                    planned=wanted[knob.field],
                )
            else:
                _one(draft, knob, path, entry, wanted, present)
    for requirement in site.target.requires:
        _require(draft, requirement, site.root, entries, wanted)
    if not beside:
        _refuse_borrowed(draft)
    _elsewhere(draft, site.target, wanted)
    _check(site, entries, draft, wanted)
    _compare(site, entries, draft, exact, wanted)
    _compare_jobs(site, values, draft, plan)
    return draft


def _unplanned(draft: Draft, knob: Knob, path: Path, entry: Entry | None) -> None:
    """A key that holds something of which the plan says nothing."""
    if entry is not None and entry.value is not None:
        label, value = knob.field.replace("_", " "), entry.computed or words.text(entry.value)
        draft.warn(
            f"{dotted(path)} stays {value}: the plan names no {LABELS.get(knob.field, label)}, so nobody "
            "checked that it was made for this one.",
            field=knob.field,
            key=dotted(path),
            value=entry.value,
        )


def _require(
    draft: Draft,
    one: Requirement,
    root: Path,
    entries: Sequence[Entry],
    wanted: Mapping[str, int | str],
) -> None:
    """Write what a plan needs beside its own fields, or warn where that would change what is trained."""
    now = {place.path: place for place in overlaid(entries, draft.edits)}
    for path, value, entry in violated(one, root, now, wanted):
        key, shown = dotted(path), words.text(value)
        is_missing = entry is None and value != "a table"
        writes = one.write is not None and (
            one.add if is_missing else entry is not None and not entry.computed
        )
        if writes:
            if not is_missing:
                draft.say(f"{key} becomes {words.text(one.write)} (it was {shown}): {one.why}")
            draft.edits.append(
                Edit(
                    file=draft.file,
                    key=key,
                    before=None if is_missing else value,
                    after=one.write,
                    path=path,
                    line=None if entry is None else entry.line,
                    field=one.field,
                )
            )
        else:
            by_default = " by default" if is_missing else ""
            draft.warn(f"{key} stays {shown}{by_default}: {one.why}", field=one.field, key=key, value=value)


def _one(  # noqa: PLR0913, PLR0917 - a key, what is there and what is wanted
    draft: Draft,
    knob: Knob,
    path: Path,
    entry: Entry | None,
    wanted: Mapping[str, int | str],
    present: set[str],
) -> None:
    """What becomes of one key."""
    value = wanted[knob.field]
    key = dotted(path)
    if knob.field == "workers" and value == 0:
        # Nobody counted the cores: what the user has is better than nothing.
        draft.settled.add(knob.field)
        return
    current = knob.default if entry is None else entry.value
    if entry is not None and not entry.computed and words.is_auto(knob, current):
        draft.settled.add(knob.field)
        draft.warn(
            f"{key} stays {words.text(current)}, by which the framework decides; planned: {value}.",
            field=knob.field,
            key=key,
            value=current,
            planned=value,
        )
        return
    after, is_written = _after(draft, knob, current, value, key)
    if not is_written:
        return
    computed = entry is not None and bool(entry.computed)
    if not computed and _says(knob, current, value, wanted, is_there=entry is not None):
        draft.settled.add(knob.field)
        _warn(draft, knob, value)
        return
    if entry is None and (not knob.add or (knob.inferred and set(knob.inferred) <= present)):
        if knob.inferred and set(knob.inferred) <= present:
            draft.settled.add(knob.field)
        return
    if knob.family and (entry is None or not words.spelt(knob, current)):
        draft.settled.add(knob.field)
        if entry is not None:
            draft.warn(
                f"{key} stays {words.text(current)}, which the plan did not reckon with; planned: {value}.",
                field=knob.field,
                key=key,
                value=current,
                planned=value,
            )
        return
    draft.settled.add(knob.field)
    _warn(draft, knob, value)
    if knob.field in ("tensor", "context"):
        draft.say(f"{key} becomes 1: the plan does not split the model that way.")
    draft.edits.append(
        Edit(
            file=draft.file,
            key=key,
            before=None if entry is None else entry.computed or entry.value,
            after=after,
            path=path,
            line=None if entry is None else entry.line,
            field=knob.field,
        )
    )


def _after(draft: Draft, knob: Knob, current: Any, value: int | str, key: str) -> tuple[Any, bool]:
    """What would be written, and whether anything would."""
    if knob.field not in WORDS:
        return words.numbered(knob, current, int(value)), True
    word = str(value)
    if word in knob.lacks:
        draft.settled.add(knob.field)
        draft.warn(knob.lacks[word], field=knob.field, key=key, value=current, planned=value)
    return words.wanted(knob, word)


def _refuse_borrowed(draft: Draft) -> None:
    """A value such as ${batch.size} is another key's: whoever reads that key would not see the change."""
    for one in draft.edits:
        if isinstance(one.before, str) and (found := _BORROWED.search(one.before)):
            raise WrongUse(
                f"{one.file}:{one.line}: {one.key}",
                found=f"it is {one.before}, which is worked out from {found[1]}",
                cure=f"Make {found[1]} give {words.text(one.after)}, or write that here with --beside.",
            )


def _says(
    knob: Knob, current: Any, value: int | str, wanted: Mapping[str, int | str], *, is_there: bool
) -> bool:
    """Whether a key, or the default in its place, says the value already."""
    if current is None and not is_there:
        return False
    if knob.field not in WORDS:
        stands_for = knob.implied.get(words.text(current))
        return value == (wanted[stands_for] if stands_for else words.number(knob, current))
    spelt = words.spelt(knob, current)
    word = knob.near.get(str(value), str(value))
    strategy = STRATEGIES.get(word) if knob.field == "strategy" else None
    return word in spelt or any(other in spelt for other in (strategy.also_spelt if strategy else ()))


def _warn(draft: Draft, knob: Knob, value: int | str) -> None:
    if knob.caveat and value != 1:
        draft.warn(knob.caveat.format(value=value), field=knob.field, planned=value)


def _elsewhere(draft: Draft, target: Target, wanted: Mapping[str, int | str]) -> None:
    """What no key of this config holds."""
    settled = draft.settled
    if wanted["gpus"] != 1 and not settled & {"gpus", "gpus_per_node"}:
        usual = "Start one process on each of {gpus} GPUs: no key here says how many."
        how = f"The number of GPUs is not in this file: {target.launch}" if target.launch else usual
        draft.missing["gpus"] = ConfigWarning(
            text=how.format_map(wanted), file=draft.file, field="gpus", planned=wanted["gpus"]
        )
    if target.partial:
        draft.say(target.partial)
        if "allocator" in target.fields() - settled and wanted["allocator"] != PLAIN["allocator"]:
            draft.missing["allocator"] = ConfigWarning(
                text=ELSEWHERE["allocator"], file=draft.file, field="allocator", planned=wanted["allocator"]
            )
        return
    by_degrees = {"strategy"} if "dp_shard" in target.fields() else set()
    for one in (*BATCH[:2], *WORDS, "workers", "seq"):
        value = wanted.get(one)
        if value is None or one in settled | by_degrees or value == PLAIN.get(one):
            continue
        if one == "strategy" and not STRATEGIES[str(value)].needs_config_key:
            continue
        if one == "accumulation" and "global_batch" in settled:
            continue
        usual = ELSEWHERE.get(one, f"No key here holds {one.replace('_', ' ')}: the plan has {{value}}.")
        text = target.lacks.get(one, usual).format(value=value)
        draft.missing[one] = ConfigWarning(text=text, file=draft.file, field=one, planned=value)


def _check(site: Site, entries: Sequence[Entry], draft: Draft, wanted: Mapping[str, int | str]) -> None:
    """Read the result by the target's own meaning: the global batch is a promise."""
    after = overlaid(entries, draft.edits)
    got = read(site, after, gpus=int(wanted["gpus"]), nodes=int(wanted["nodes"])).number("global_batch")
    if got is not None and got != wanted["global_batch"] and draft.settled & set(BATCH):
        raise TrimtabError(
            f"the edits of {draft.file}",
            found=f"they would make a global batch of {got}, and the plan has {wanted['global_batch']}",
            cure="Nothing was written. This is a bug of trimtab: please report the config and the plan.",
        )


def _compare(
    site: Site,
    entries: Sequence[Entry],
    draft: Draft,
    exact: Setting,
    wanted: Mapping[str, int | str],
) -> None:
    """Read the result as `show` would: whatever is still not as planned is a warning, whatever its cause."""
    after = read(site, overlaid(entries, draft.edits), gpus=int(wanted["gpus"]), nodes=int(wanted["nodes"]))
    warned = {one.field for one in draft.warnings} | set(draft.missing)
    got = as_setting(after, gpus=int(wanted["gpus"]))
    for field_name, planned, found in differences(exact, got, seq_of_facts(wanted), after.number("seq")):
        if field_name not in warned and {field_name, *OF_FIELD.get(field_name, ())} & set(after.facts):
            label = LABELS.get(field_name, field_name.replace("_", " "))
            draft.warn(
                f"{draft.file} will still run with {label} {found}; planned: {planned}.",
                field=field_name,
                value=found,
                planned=planned,
            )
    known = {one.text for one in draft.warnings}
    for one in after.warnings:
        # What apply itself has warned of says "stays" where a reader says "is".
        if one.key and any(dotted(site.root + parts(one.key)) == other.key for other in draft.warnings):
            continue
        if one.text not in known:
            draft.warnings.append(one.replace(file=draft.file))


OF_FIELD = {
    "mesh": ("dp_shard", "dp_replicate", "gpus"),
    "gpus": ("gpus_per_node",),
    "global_batch": ("micro_batch", "accumulation"),
}
"""Fields of a config that make one of a setting's."""


def seq_of_facts(facts: Mapping[str, int | str]) -> int | None:
    """The sequence length among facts, where there is one."""
    value = facts.get("seq")
    return value if isinstance(value, int) else None


def differences(
    planned: Setting, got: Setting, seq: int | None = None, got_seq: int | None = None
) -> list[tuple[str, Any, Any]]:
    """Where a setting that was read back differs from the planned one: field, planned, found.

    A plan with no data loader processes leaves their number to the config.
    """
    found: list[tuple[str, Any, Any]] = []
    for name in (
        *("strategy", "gpus", "micro_batch", "accumulation", "global_batch", "precision", "recompute"),
        *("compile", "sync_batchnorm", "optimizer", "allocator", "workers"),
    ):
        one, other = getattr(planned, name), getattr(got, name)
        if one != other and not (name == "workers" and one == 0):
            found.append((name, words.text(one), words.text(other)))
    same_strategy = planned.strategy is got.strategy and planned.gpus == got.gpus
    if same_strategy and planned.mesh != got.mesh:
        meshes = [f"{one.dp_replicate} x {one.dp_shard}" for one in (planned.mesh, got.mesh)]
        found.append(("mesh", meshes[0], meshes[1]))
    if seq is not None and seq != got_seq:
        found.append(("seq", seq, got_seq))
    return found


def _compare_jobs(site: Site, values: Mapping[Path, Entry], draft: Draft, plan: Plan) -> None:
    """Options of the job that the file and the plan both name, and name differently."""
    subject = site.target.subject
    is_folder = bool(subject.folders()) and plan.job.startswith("hf:")
    for option, key in subject.options.items():
        if option == "seq" or not (is_folder or option in plan.options):
            continue
        path = site.root + parts(key)
        applies = counts(subject.when.get(option, {}), site.root, values)
        entry = values.get(path) if applies else None
        value = entry.value if entry is not None else subject.defaults.get(option) if applies else None
        planned = plan.options.get(option)
        if not words.alike(value, planned) and (value or planned):
            draft.warn(
                f"{dotted(path)} is {_in_words(value)}, and the plan was made for {option} "
                f"{_in_words(planned)}: plan again with --set {option}={_in_words(value)}, or edit the file.",
                field="job",
                key=dotted(path),
                value=value,
                planned=planned,
            )


def _in_words(value: Any) -> str:
    return "none" if value is None else words.text(value)


def overlaid(entries: Sequence[Entry], changes: Sequence[Edit]) -> list[Entry]:
    """The entries as they will be."""
    from trimtab.configs.texts import Entry as Place

    new = {one.path: one.after for one in changes}
    kept = [one.replace(value=new[one.path], computed="") if one.path in new else one for one in entries]
    there = {one.path for one in entries}
    return kept + [
        Place(path=path, value=value, line=0, column=0) for path, value in new.items() if path not in there
    ]
