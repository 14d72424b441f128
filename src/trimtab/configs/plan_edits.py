"""Find the edits that write a plan into a config, in the config's own words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimtab.configs.interpret import (
    AS_JOB,
    SPLITS,
    ConfigWarning,
    find_entry,
    find_table,
    find_violations,
    format_count,
    format_value,
    interpret_config,
    is_auto,
    make_setting,
    parse_count,
    same_meaning,
    word_to_write,
    words_of_value,
)
from trimtab.configs.targets import WORDS, conditions_hold, place_key
from trimtab.configs.text_edit import format_path
from trimtab.errors import TrimtabError, WrongUse
from trimtab.spec import Noun, Offload
from trimtab.spec.precision import without_float8
from trimtab.strategies import STRATEGIES, strategy_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.configs.targets import ConfigTarget, Knob, Requirement, TargetSite
    from trimtab.configs.text_edit import Entry, KeyPath, ParsedConfig
    from trimtab.spec import Mesh, Plan, Setting

PLAIN: dict[str, int | str] = {
    "accumulation": 1,
    "nodes": 1,
    "pp": 1,
    "tensor": 1,
    "context": 1,
    "expert": 1,
    "virtual_stages": 1,
    "workers": 0,
    "recompute": "none",
    "compile": "false",
    "sync_batchnorm": "false",
    "allocator": "default",
    "optimizer": "fused",
    "optimizer_rule": "job",
    "optimizer_in_backward": "false",
    "base": "none",
    "loss": "whole",
    "offload": "none",
    "offload_activations": "false",
    "strategy": "single",
}
"""What a run is like that nobody has said anything about: not worth a sentence where no key holds it."""
LABELS = {
    "seq": "sequence length",
    "base": "storage of the frozen weights",
    "optimizer": "implementation of the optimizer",
    "optimizer_rule": "optimizer",
    "optimizer_in_backward": "optimizer in backward:",
    "offload": "weights and optimizer states on the CPU:",
    "offload_activations": "activations on the CPU:",
}
"""Fields that people call something else than we do."""
AXES = SPLITS | {"expert": "ep"}
"""Fields that split the model, by the axis of the mesh."""
SPLIT_NAMES = {
    "tensor": "layers over tp",
    "context": "sequences over cp",
    "pp": "the model into pp",
    "expert": "experts over ep",
}
BATCH = ("micro_batch", "accumulation", "global_batch", "rank_batch", "round_batch")
ELSEWHERE = {
    "allocator": "Start the job with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: no key here holds it.",
    "micro_batch": "No key here holds the micro-batch: give the job's data loader {value} samples a batch.",
    "sync_batchnorm": "No key here synchronises BatchNorm: in the job's code, call "
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped.",
    "seq": "No key here holds the sequence length: the plan was made for samples of {value} tokens.",
    "base": "No key here holds the storage of the frozen weights ({value}): in the job's code, load the "
    "model with quantization_config=BitsAndBytesConfig(...).",
    "optimizer_rule": "No key here names the optimizer: create {value} in the job's code.",
    "optimizer_in_backward": "No key here updates weights in the backward pass: in the job's code, call the "
    "optimizer in a hook of Tensor.register_post_accumulate_grad_hook.",
    "loss": "No key here computes the loss in pieces ({value}): in the job's code, use a fused linear "
    "cross-entropy such as Liger's.",
    "virtual_stages": "No key here holds the parts of the model on each pipeline rank (virtual stages): the "
    "plan has {value}.",
    "offload": "No key here moves {value} to the CPU: in the job's code, shard the model with FSDP's "
    "CPUOffloadPolicy.",
    "offload_activations": "No key here moves activations to the CPU: in the job's code, run the forward "
    "pass under torch.autograd.graph.save_on_cpu().",
}


_BORROWED = re.compile(r"\$\{+ *([^}]+?) *\}")
"""A reference to another key or variable, as Hydra and others write it."""


class Edit(Noun, frozen=True, kw_only=True):
    """A value of a config, before and after."""

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


def make_edit(file: str, path: KeyPath, entry: Entry | None, after: Any, field_name: str) -> Edit:
    """Return the edit of one key; `entry` is None if the key is added."""
    before, line = (None, None) if entry is None else (entry.computed or entry.value, entry.line)
    key = format_path(path)
    return Edit(file=file, key=key, before=before, after=after, path=path, line=line, field=field_name)


@dataclass
class Draft:
    """The edits so far, with notes and warnings."""

    file: str
    edits: list[Edit] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    """Fields that the config says after the edits, or has to leave."""
    warnings: list[ConfigWarning] = field(default_factory=list)
    """Where the config will differ from the plan."""
    missing: dict[str, ConfigWarning] = field(default_factory=dict)
    """What to say of fields that no key here holds; another file may."""

    def add(self, edit: Edit) -> None:
        """Add an edit; a second one of the same key replaces the first."""
        first = next((other for other in self.edits if other.path == edit.path), None)
        if first is None:
            self.edits.append(edit)
            return
        self.edits.remove(first)
        if edit.after != first.before:
            self.edits.append(first.replace(after=edit.after, field=edit.field))

    def say(self, sentence: str) -> None:
        """Add a sentence once."""
        if sentence not in self.said:
            self.said.append(sentence)

    def warn(self, text: str, *, field: str, key: str = "", value: Any = None, planned: Any = None) -> None:
        """Add a warning once: the config will differ from the plan."""
        if all(warning.text != text for warning in self.warnings):
            self.warnings.append(
                ConfigWarning(text=text, file=self.file, key=key, value=value, field=field, planned=planned)
            )

    def texts(self) -> list[str]:
        """Return all notes and warnings as sentences."""
        return [*self.said, *(warning.text for warning in (*self.warnings, *self.missing.values()))]


def count_nodes(plan: Plan) -> int:
    """Return how many machines a plan uses."""
    return len({place.node for place in plan.places}) or 1


def make_exact(setting: Setting, given: str) -> tuple[Setting, str]:
    """Return the setting with full micro-batches only, as frameworks need it, and a note.

    trimtab's own trainer makes the last micro-batch smaller; other trainers run full ones only. A
    smaller micro-batch in more rounds fits as well, and keeps the global batch.
    """
    if setting.shares:
        raise WrongUse(
            given,
            found="its ranks take unlike shares of the batch, which only trimtab's own trainer does",
            cure="Plan for GPUs that are alike, as in --on 2xRTX3090, or for one of them.",
        )
    strategy = strategy_of(setting)
    if not strategy.is_in_frameworks and setting.mesh.pp == 1:
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
    micro = max(divisor for divisor in range(1, min(setting.micro_batch, share) + 1) if share % divisor == 0)
    note = (
        f"The plan's micro-batch {setting.micro_batch} x {setting.accumulation} ends in a smaller one, which "
        f"only trimtab's own trainer runs: {micro} x {share // micro} keeps the global batch of "
        f"{setting.global_batch} exactly."
    )
    return setting.replace(micro_batch=micro, accumulation=share // micro), note


def plan_sequence_length(plan: Plan) -> int | None:
    """Return the tokens of one sample in the plan; None if its job has no such length."""
    chosen = plan.options.get("seq")
    if isinstance(chosen, int) and chosen > 0:
        return chosen
    return None if plan.workload is None else plan.workload.sample_length or plan.workload.seq


def list_facts(setting: Setting, nodes: int = 1, seq: int | None = None) -> dict[str, int | str]:
    """Return everything that a key can hold, for a setting with full micro-batches."""
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
        "data_parallel": setting.data_parallel,
        "dp_replicate": setting.mesh.dp_replicate,
        "dp_shard": setting.mesh.dp_shard,
        **{field: getattr(setting.mesh, axis, 1) for field, axis in AXES.items()},
        "virtual_stages": getattr(setting, "virtual_stages", 1),
        "workers": setting.workers,
        "precision": setting.precision.value,
        "recompute": setting.recompute.value,
        "compile": format_value(setting.compile),
        "sync_batchnorm": format_value(setting.sync_batchnorm),
        "strategy": setting.strategy.value,
        "base": setting.base.value,
        "loss": setting.loss.value,
        "offload": name_offload(setting),
        "offload_activations": format_value(Offload.ACTIVATIONS in setting.offload),
        "optimizer": setting.optimizer.value if runs_as_adamw(setting) else PLAIN["optimizer"],
        "optimizer_rule": setting.optimizer_rule.value,
        "optimizer_in_backward": format_value(setting.optimizer_in_backward),
        "allocator": setting.allocator.value,
        "rest": setting.mesh.dp_shard,
    }


def name_offload(setting: Setting) -> str:
    """Return which of weights and optimizer states lie on the host, as one word of a config."""
    named = [member.value for member in setting.offload if member is not Offload.ACTIVATIONS]
    return ",".join(named) or "none"


def runs_as_adamw(setting: Setting) -> bool:
    """Return whether torch's AdamW, or the job's own optimizer, runs: others have one implementation."""
    return setting.optimizer_rule in AS_JOB


def draft_edits(  # noqa: PLR0913 - a plan, where it goes, and how
    site: TargetSite,
    document: ParsedConfig,
    plan: Plan,
    *,
    file: str,
    setting: Setting | None = None,
    beside: bool = False,
) -> Draft:
    """Draft the edits that make a config say what a plan does.

    `setting` replaces the plan's choice for a stage with its own. With `beside`, values that another key
    gives are replaced too. What no key holds is kept apart, since another file of the same job may hold it.
    """
    draft = Draft(file=file)
    nodes = count_nodes(plan)
    given = f"plan for {plan.job}"
    if plan.choice.gpus % nodes:
        raise WrongUse(
            given,
            found=f"it uses {plan.choice.gpus} GPUs on {nodes} nodes, not equally many on each",
            cure="Plan for nodes that are alike.",
        )
    exact, note = make_exact(setting or plan.choice, given)
    draft.said += [note] if note else []
    entries = document.entries()
    values = {entry.path: entry for entry in entries}
    exact = _leave_out_float8(draft, site, values, exact)
    facts = list_facts(exact, nodes, plan_sequence_length(plan))
    _refuse_splits(site.target, facts, given)
    present = {
        knob.field
        for knob in filter(site.applies, site.target.knobs)
        if find_entry(knob, site.root, values)[1] is not None
    }
    for knob in filter(site.applies, site.target.knobs):
        # Two knobs may have one key: the second sees what the first has written.
        now = {entry.path: entry for entry in overlay_edits(entries, draft.edits)} if draft.edits else values
        if all(facts.get(key) in among for key, among in knob.only.items()) and conditions_hold(
            knob.when, site.root, now
        ):
            path, entry = find_entry(knob, site.root, now)
            if knob.field not in facts:
                _warn_unplanned(draft, knob, path, entry)
            elif entry is None and (table_path := find_table(knob, site.root, now)):
                draft.settled.add(knob.field)
                draft.warn(
                    f"{format_path(table_path)} holds a table, and stays; planned: {facts[knob.field]}.",
                    field=knob.field,
                    key=format_path(table_path),
                    planned=facts[knob.field],
                )
            elif str(facts[knob.field]) in knob.keeps:
                _keep_key(draft, knob, format_path(path), entry, facts)
            else:
                _edit_key(draft, knob, path, entry, facts, present)
    for requirement in site.target.requires:
        _apply_requirement(draft, requirement, site.root, entries, facts)
    if not beside:
        _refuse_borrowed(draft)
    _note_missing(draft, site.target, facts)
    _check_global_batch(site, entries, draft, facts)
    _warn_differences(site, entries, draft, exact, facts)
    _warn_job_options(site, values, draft, plan)
    return draft


def _refuse_splits(target: ConfigTarget, facts: Mapping[str, int | str], given: str) -> None:
    """Refuse a plan that splits the model in a way that no key of the config can say."""
    fields = target.fields()
    lacking = [field for field in AXES if facts[field] != 1 and field not in fields]
    if not lacking or target.partial:
        return
    named = [f"{SPLIT_NAMES[field]}={facts[field]}" for field in lacking]
    raise WrongUse(
        given,
        found=f"it splits {' and '.join(named)}, and {target.name} has no key for that",
        cure=f"Plan again with --pin {','.join(f'{AXES[field]}=1' for field in lacking)}, or apply it to a "
        "config of torchtitan or Megatron-Bridge.",
    )


def _leave_out_float8(
    draft: Draft, site: TargetSite, values: Mapping[KeyPath, Entry], setting: Setting
) -> Setting:
    """Return the setting with products in 16 bits, and warn, if a config says the precision but not fp8."""
    precision, wide = setting.precision, without_float8(setting.precision)
    knobs = [knob for knob in site.target.knobs if knob.field == "precision"]
    counting = [knob for knob in knobs if conditions_hold(knob.when, site.root, values)]
    words = [(knob.nearest(precision.value), knob) for knob in counting]
    # A key says it if its value would be another one without fp8.
    says_it = any(
        word in knob.words and knob.words[word] != knob.words.get(knob.nearest(wide.value))
        for word, knob in words
    )
    if precision is wide or not knobs or says_it:
        return setting
    draft.warn(
        f"No key here says {precision}: {wide} is written, which is slower. Convert the linear layers in "
        "your code, as with convert_to_float8_training of torchao.",
        field="precision",
        planned=precision.value,
    )
    return setting.replace(precision=wide)


def _warn_unplanned(draft: Draft, knob: Knob, path: KeyPath, entry: Entry | None) -> None:
    """Warn of a key that holds something the plan does not name."""
    if entry is not None and entry.value is not None:
        label, value = knob.field.replace("_", " "), entry.computed or format_value(entry.value)
        draft.warn(
            f"{format_path(path)} stays {value}: the plan names no {LABELS.get(knob.field, label)}, so "
            "nobody "
            "checked that it was made for this one.",
            field=knob.field,
            key=format_path(path),
            value=entry.value,
        )


def _apply_requirement(
    draft: Draft,
    requirement: Requirement,
    root: KeyPath,
    entries: Sequence[Entry],
    wanted: Mapping[str, int | str],
) -> None:
    """Write what a plan needs beside its own fields, or warn if that changes what is trained."""
    now = {place.path: place for place in overlay_edits(entries, draft.edits)}
    for path, value, entry in find_violations(requirement, root, now, wanted):
        key, shown = format_path(path), format_value(value)
        is_missing = entry is None and value != "a table"
        writes = requirement.write is not None and (
            requirement.add if is_missing else entry is not None and not entry.computed
        )
        if writes:
            if not is_missing:
                draft.say(
                    f"{key} becomes {format_value(requirement.write)} (it was {shown}): {requirement.why}"
                )
            draft.add(make_edit(draft.file, path, entry, requirement.write, requirement.field))
        else:
            by_default = " by default" if is_missing else ""
            draft.warn(
                f"{key} stays {shown}{by_default}: {requirement.why}",
                field=requirement.field,
                key=key,
                value=value,
            )


def _edit_key(  # noqa: PLR0913, PLR0917 - a key, what is there and what is wanted
    draft: Draft,
    knob: Knob,
    path: KeyPath,
    entry: Entry | None,
    wanted: Mapping[str, int | str],
    present: set[str],
) -> None:
    """Decide what happens to one key."""
    value = wanted[knob.field]
    key = format_path(path)
    if knob.field == "workers" and value == 0:
        # Nobody counted the cores: what the user has is better than nothing.
        draft.settled.add(knob.field)
        return
    current = knob.default if entry is None else entry.value
    if entry is not None and not entry.computed and is_auto(knob, current):
        draft.settled.add(knob.field)
        draft.warn(
            f"{key} stays {format_value(current)}, by which the framework decides; planned: {value}.",
            field=knob.field,
            key=key,
            value=current,
            planned=value,
        )
        return
    after, is_written = _value_to_write(draft, knob, current, value, key)
    if not is_written:
        return
    computed = entry is not None and bool(entry.computed)
    if not computed and _already_says(knob, current, value, wanted, is_there=entry is not None):
        draft.settled.add(knob.field)
        _warn_caveat(draft, knob, value)
        return
    if entry is None and (not knob.add or (knob.inferred and set(knob.inferred) <= present)):
        if knob.inferred and set(knob.inferred) <= present:
            draft.settled.add(knob.field)
        return
    if knob.family and (entry is None or not words_of_value(knob, current)):
        draft.settled.add(knob.field)
        # Another field of the same key may have warned already.
        if entry is not None and all(warning.key != key for warning in draft.warnings):
            draft.warn(
                f"{key} stays {format_value(current)}, which the plan did not reckon with; planned: {value}.",
                field=knob.field,
                key=key,
                value=current,
                planned=value,
            )
        return
    draft.settled.add(knob.field)
    _warn_caveat(draft, knob, value)
    if knob.field in AXES and value == 1 and current != 1:
        draft.say(f"{key} becomes 1: the plan does not split the model that way.")
    draft.add(make_edit(draft.file, path, entry, after, knob.field))


def _keep_key(
    draft: Draft, knob: Knob, key: str, entry: Entry | None, wanted: Mapping[str, int | str]
) -> None:
    """Leave a key alone that changes what is trained; warn if it does not say what the plan has."""
    value, current = wanted[knob.field], knob.default if entry is None else entry.value
    computed = "" if entry is None else entry.computed
    if current is None and not computed:
        return
    draft.settled.add(knob.field)
    if computed or not _already_says(knob, current, value, wanted, is_there=entry is not None):
        by_default = " by default" if entry is None else ""
        draft.warn(
            f"{key} stays {computed or format_value(current)}{by_default}: {knob.keeps[str(value)]}",
            field=knob.field,
            key=key,
            value=computed or current,
            planned=value,
        )


def _value_to_write(draft: Draft, knob: Knob, current: Any, value: int | str, key: str) -> tuple[Any, bool]:
    """Return what would be written, and whether anything would."""
    if knob.field not in WORDS:
        return format_count(knob, current, int(value)), True
    word = str(value)
    if why := knob.explain_lack(word):
        draft.settled.add(knob.field)
        draft.warn(why, field=knob.field, key=key, value=current, planned=value)
    return word_to_write(knob, word)


def _refuse_borrowed(draft: Draft) -> None:
    """Refuse a value such as ${batch.size}: it is another key's, whose readers would not see the change."""
    for edit in draft.edits:
        if isinstance(edit.before, str) and (found := _BORROWED.search(edit.before)):
            raise WrongUse(
                f"{edit.file}:{edit.line}: {edit.key}",
                found=f"it is {edit.before}, which is worked out from {found[1]}",
                cure=f"Make {found[1]} give {format_value(edit.after)}, or write that here with --beside.",
            )


def _already_says(
    knob: Knob, current: Any, value: int | str, wanted: Mapping[str, int | str], *, is_there: bool
) -> bool:
    """Return whether a key, or its default, says the value already."""
    if current is None and not is_there:
        return False
    if knob.field not in WORDS:
        stands_for = knob.implied.get(format_value(current))
        return value == (wanted[stands_for] if stands_for else parse_count(knob, current))
    spelt = words_of_value(knob, current)
    word = knob.nearest(str(value))
    strategy = STRATEGIES.get(word) if knob.field == "strategy" else None
    return word in spelt or any(other in spelt for other in (strategy.also_spelt if strategy else ()))


def _warn_caveat(draft: Draft, knob: Knob, value: int | str) -> None:
    if knob.caveat and value not in (1, PLAIN.get(knob.field)):
        draft.warn(knob.caveat.format(value=value), field=knob.field, planned=value)


def _note_missing(draft: Draft, target: ConfigTarget, wanted: Mapping[str, int | str]) -> None:
    """Note what no key of this config holds."""
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
    for field_name in (*BATCH[:2], *WORDS, "workers", "seq", "virtual_stages"):
        value = wanted.get(field_name)
        if value is None or field_name in settled | by_degrees or value == PLAIN.get(field_name):
            continue
        if field_name == "strategy" and not STRATEGIES[str(value)].needs_config_key:
            continue
        if field_name == "accumulation" and "global_batch" in settled:
            continue
        usual = ELSEWHERE.get(
            field_name, f"No key here holds {field_name.replace('_', ' ')}: the plan has {{value}}."
        )
        text = target.lacks.get(field_name, usual).format(value=value)
        draft.missing[field_name] = ConfigWarning(text=text, file=draft.file, field=field_name, planned=value)


def _check_global_batch(
    site: TargetSite, entries: Sequence[Entry], draft: Draft, wanted: Mapping[str, int | str]
) -> None:
    """Check that the edited config keeps the global batch of the plan."""
    after = overlay_edits(entries, draft.edits)
    got = interpret_config(site, after, gpus=int(wanted["gpus"]), nodes=int(wanted["nodes"])).number(
        "global_batch"
    )
    if got is not None and got != wanted["global_batch"] and draft.settled & set(BATCH):
        raise TrimtabError(
            f"the edits of {draft.file}",
            found=f"they would make a global batch of {got}, and the plan has {wanted['global_batch']}",
            cure="Nothing was written. This is a bug of trimtab: please report the config and the plan.",
        )


def _warn_differences(
    site: TargetSite,
    entries: Sequence[Entry],
    draft: Draft,
    exact: Setting,
    wanted: Mapping[str, int | str],
) -> None:
    """Interpret the edited config as `show` would; warn of all that still differs from the plan."""
    after = interpret_config(
        site, overlay_edits(entries, draft.edits), gpus=int(wanted["gpus"]), nodes=int(wanted["nodes"])
    )
    warned = {warning.field for warning in draft.warnings} | set(draft.missing)
    got = make_setting(after, gpus=int(wanted["gpus"]))
    for field_name, planned, found in find_differences(
        exact, got, fact_sequence_length(wanted), after.number("seq")
    ):
        names = {field_name, *OF_FIELD.get(field_name, ())}
        # What was written may count for nothing beside another key, such as a strategy that stays.
        if field_name not in warned and names & {*after.facts, *draft.settled}:
            label = LABELS.get(field_name, field_name.replace("_", " "))
            draft.warn(
                f"{draft.file} will still run with {label} {found}; planned: {planned}.",
                field=field_name,
                value=found,
                planned=planned,
            )
    known = {warning.text for warning in draft.warnings}
    for warning in after.warnings:
        # What apply itself has warned of says "stays" where a reader says "is".
        keys = (warning.key, format_path(place_key(site.root, warning.key)))
        if warning.key and any(other.key in keys for other in draft.warnings):
            continue
        if warning.text not in known:
            draft.warnings.append(warning.replace(file=draft.file))


OF_FIELD = {
    "mesh": ("dp_shard", "dp_replicate", "gpus", *AXES),
    "gpus": ("gpus_per_node",),
    "global_batch": ("micro_batch", "accumulation"),
}
"""Fields of a config that make one of a setting's."""


def fact_sequence_length(facts: Mapping[str, int | str]) -> int | None:
    """Return the sequence length among facts, if there is one."""
    value = facts.get("seq")
    return value if isinstance(value, int) else None


def find_differences(
    planned: Setting, got: Setting, seq: int | None = None, got_seq: int | None = None
) -> list[tuple[str, Any, Any]]:
    """Compare a setting that was read back with the planned one: field, planned, found.

    A plan with no data loader processes leaves their number to the config.
    """
    differences: list[tuple[str, Any, Any]] = []
    for name in (
        *("strategy", "gpus", "micro_batch", "accumulation", "global_batch", "precision", "recompute"),
        *("compile", "sync_batchnorm", "base", "loss", "optimizer_rule", "allocator", "workers"),
        "optimizer_in_backward",
    ):
        ours, other = getattr(planned, name), getattr(got, name)
        if ours != other and not (name == "workers" and ours == 0):
            differences.append((name, format_value(ours), format_value(other)))
    rules = {planned.optimizer_rule, got.optimizer_rule}
    if rules <= set(AS_JOB):
        differences = [row for row in differences if row[0] != "optimizer_rule"]
        if planned.optimizer is not got.optimizer:
            differences.append(("optimizer", planned.optimizer.value, got.optimizer.value))
    offloads = [name_offload(setting) for setting in (planned, got)]
    if offloads[0] != offloads[1]:
        differences.append(("offload", offloads[0], offloads[1]))
    stored = [format_value(Offload.ACTIVATIONS in setting.offload) for setting in (planned, got)]
    if stored[0] != stored[1]:
        differences.append(("offload_activations", stored[0], stored[1]))
    same_strategy = planned.strategy is got.strategy and planned.gpus == got.gpus
    if same_strategy and planned.mesh != got.mesh:
        meshes = [_name_mesh(mesh) for mesh in (planned.mesh, got.mesh)]
        differences.append(("mesh", meshes[0], meshes[1]))
    if seq is not None and seq != got_seq:
        differences.append(("seq", seq, got_seq))
    return differences


def _name_mesh(mesh: Mesh) -> str:
    """Return the degrees of a mesh, those of data parallelism first."""
    split = [f" x {axis} {degree}" for axis in AXES.values() if (degree := getattr(mesh, axis, 1)) > 1]
    return f"{mesh.dp_replicate} x {mesh.dp_shard}{''.join(split)}"


def _warn_job_options(site: TargetSite, values: Mapping[KeyPath, Entry], draft: Draft, plan: Plan) -> None:
    """Warn of options of the job on which the file and the plan differ."""
    subject = site.target.subject
    is_folder = bool(subject.folders()) and plan.job.startswith("hf:")
    for option, (path, value) in subject.read_options(site.root, values).items():
        if option == "seq" or not (is_folder or option in plan.options):
            continue
        planned = plan.options.get(option)
        if not same_meaning(value, planned) and (value or planned):
            draft.warn(
                f"{format_path(path)} is {_format_option(value)}, and the plan was made for {option} "
                f"{_format_option(planned)}: plan again with --set {option}={_format_option(value)}, or "
                "edit the file.",
                field="job",
                key=format_path(path),
                value=value,
                planned=planned,
            )


def _format_option(value: Any) -> str:
    return "none" if value is None else format_value(value)


def overlay_edits(entries: Sequence[Entry], changes: Sequence[Edit]) -> list[Entry]:
    """Return the entries as they will be after the edits."""
    from trimtab.configs.text_edit import Entry as Place

    new = {edit.path: edit.after for edit in changes}
    kept = [
        entry.replace(value=new[entry.path], computed="") if entry.path in new else entry for entry in entries
    ]
    there = {entry.path for entry in entries}
    return kept + [
        Place(path=path, value=value, line=0, column=0) for path, value in new.items() if path not in there
    ]
