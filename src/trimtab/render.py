"""Values as people read them on a terminal. Returns rich renderables; prints nothing.

Text that comes from drivers, files and variables passes through `inert`: neither markup nor control
characters in it do anything.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.units import format_bandwidth, format_bytes, format_duration, format_flops, format_gib, plural

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from trimtab.catalog.glossary import Word
    from trimtab.catalog.tables import DeviceRow
    from trimtab.errors import TrimtabError
    from trimtab.exams.run import ExamResult
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.spec import (
        Calibration,
        Cluster,
        Comparison,
        Device,
        Estimate,
        Finding,
        Link,
        MfuReference,
        Node,
        Peaks,
        Plan,
        Scheduler,
        Setting,
        StagedPlan,
        Versions,
        WhatIf,
    )

SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "bold red"}
UNKNOWN = "-"
LARGE_BYTES = 2**28
"""Operations that move more than this do not live in a cache."""
WORD = re.compile(r"\s*\S+\s*")
VERY_WIDE = 10_000
"""Characters of a line on which nothing has to be broken."""
WIDER = 4
"""Steps by which a table is widened until its paths are whole."""
MOST_LINKS = 8
"""More pairs than this are counted, not listed."""


def escape_control(text: str) -> str:
    r"""Text without power over the terminal: control and invisible characters are spelt out.

    >>> inert("H100\x1b[31m\n")
    'H100\\x1b[31m\\n'
    """
    hidden = {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    for one in hidden:
        text = text.replace(one, one.encode("unicode_escape", "backslashreplace").decode("ascii"))
    return text


def _escape_cell(text: str) -> str:
    """Text as a table's cell shows it, whatever is in it."""
    return escape(escape_control(text))


def render_cluster(found: Cluster, *, heading: str) -> RenderableType:
    """What detect found: devices, links, host, scheduler, versions and notes."""
    groups = _group_nodes(found)
    parts: list[RenderableType] = [
        Text.assemble((escape_control(heading), "bold"), f": {format_counts(found)}"),
        Text(),
    ]
    for nodes in groups:
        if len(found.nodes) > 1:
            parts.append(
                Text(escape_control(f"{_format_names(nodes)}{', each' * (len(nodes) > 1)}:"), style="bold")
            )
        if nodes[0].devices:
            parts += [Padding(render_devices(nodes[0].devices), (0, 0, 1, 1), expand=False)]
    parts.append(Padding(_render_host(found, groups), (0, 0, 0, 1), expand=False))
    parts += [_render_indented("note", note, "cyan") for note in _list_notes(found)]
    return Group(*parts)


def _list_notes(found: Cluster) -> list[str]:
    elsewhere = "Other hardware is described with --on, as in --on 4xA100-40GB."
    return [*found.notes, *([] if found.devices else [elsewhere])]


def format_counts(found: Cluster) -> str:
    """How many nodes and devices, in words."""
    nodes, total = len(found.nodes), len(found.devices)
    gpus = plural(total, "GPU") if total else "no GPU"
    return f"{plural(nodes, 'node')}, {gpus}"


def _group_nodes(found: Cluster) -> list[list[Node]]:
    """Nodes in groups that would print the same."""
    groups: list[list[Node]] = []
    looks = [(_printed_facts(node), _list_links(found, index)) for index, node in enumerate(found.nodes)]
    for index, node in enumerate(found.nodes):
        if index and looks[index - 1] == looks[index]:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _printed_facts(node: Node) -> Any:
    rows = [
        (device.name, device.memory_bytes, device.free_bytes, device.power_limit_w) for device in node.devices
    ]
    return (rows, node.cpu_cores, node.ram_bytes)


def _list_links(found: Cluster, node: int) -> list[str]:
    """The lines about the links of one node."""
    within = [link for link in found.links if link.node == node]
    lines = [f"{_format_ends(link)}: {link.kind}{_format_speed(link)}" for link in within[:MOST_LINKS]]
    if len(within) > len(lines):
        lines.append(f"and {len(within) - len(lines)} more pairs; --json has them all")
    return lines


def _format_names(nodes: list[Node]) -> str:
    if len(nodes) <= 2:  # noqa: PLR2004 - a short list is spelt out
        return ", ".join(node.name for node in nodes)
    return f"{nodes[0].name} to {nodes[-1].name} ({len(nodes)} nodes)"


@dataclass(frozen=True)
class Columns:
    """A table that drops whole columns from the right where the terminal is too narrow for them.

    The first `kept` columns stay whatever the width; the one called `folds` takes several lines before
    anything is dropped, down to `narrowest` letters.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...]
    """Headings of the columns that hold words."""
    folds: str = "name"
    narrowest: int = 20
    kept: int = 3

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The widest table that fits."""
        for count in range(len(self.headings), self.kept, -1):
            if self._needs(console, options, count) <= options.max_width:
                yield self.table(count)
                return
        yield self.table(self.kept)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the whole table, at most."""
        return Measurement(1, Measurement.get(console, options, self.table(len(self.headings))).maximum)

    def _needs(self, console: Console, options: ConsoleOptions, count: int) -> int:
        """The width of the first columns, with the one that folds at its narrowest."""
        whole = Measurement.get(console, options.update(width=1000), self.table(count)).maximum
        place = self.headings.index(self.folds)
        if place >= count:
            return whole
        longest = max(len(row[place]) for row in self.rows)
        return whole - max(0, longest - self.narrowest)

    def table(self, count: int) -> Table:
        """The first columns."""
        table = _make_table()
        for heading in self.headings[:count]:
            table.add_column(
                heading,
                justify="left" if heading in self.left else "right",
                no_wrap=heading not in self.left,
                overflow="fold",
                header_style="dim",
            )
        for row in self.rows:
            table.add_row(*(_escape_cell(one) for one in row[:count]))
        return table


def render_devices(listed: tuple[Device, ...]) -> Columns:
    """One line a device, or a run of devices alike; columns without a known value are left out."""
    columns: list[tuple[str, Any]] = [
        ("GPU", lambda one: str(one.index)),
        ("name", _format_device),
        ("GiB", lambda one: format_gib(one.memory_bytes)),
        ("free", lambda one: None if one.free_bytes is None else format_gib(one.free_bytes)),
        ("sm", lambda one: one.compute_capability),
        ("bf16", lambda one: None if one.bf16 is None else "yes" if one.bf16 else "no"),
        ("dense peak", _format_peak),
        ("bandwidth", lambda one: _format_known(format_bandwidth, one.bandwidth_bytes_per_s)),
        ("power", lambda one: None if one.power_limit_w is None else f"{one.power_limit_w:.0f} W"),
    ]
    rows = _merge_rows([[cell(device) for _, cell in columns] for device in listed])
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return Columns(
        headings=tuple(columns[index][0] for index in used),
        rows=tuple(tuple(escape_control(row[index] or UNKNOWN) for index in used) for row in rows),
        left=("name",),
    )


def _merge_rows(rows: list[list[str | None]]) -> list[list[str | None]]:
    """Neighbouring rows that differ in their first cell only, as one row for "0-7"."""
    kept: list[list[str | None]] = []
    for row in rows:
        if kept and kept[-1][1:] == row[1:]:
            kept[-1][0] = f"{str(kept[-1][0]).partition('-')[0]}-{row[0]}"
        else:
            kept.append(list(row))
    return kept


def _format_device(device: Device) -> str:
    return f"{device.name} MIG {device.slice.profile}" if device.slice else device.name


def _format_peak(device: Device) -> str | None:
    """The best 16-bit rate, with a mark where it is derived rather than catalogued."""
    rate = device.peaks.bf16 or device.peaks.fp16
    if rate is None:
        return None
    derived = device.sources.get("peaks", "").startswith("derived")
    return f"{'~' * derived}{format_flops(rate)}"


def _format_known(formatted: Any, value: float | None) -> str | None:
    return None if value is None else str(formatted(value))


def _make_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)


def _render_host(found: Cluster, groups: list[list[Node]]) -> Table:
    table = _make_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [("links", link) for link in _list_all_links(found, groups)]
    rows += [("host", one) for nodes in groups if (one := _format_host(nodes[0]))]
    rows += [("scheduler", _format_scheduler(found.scheduler))] if _is_detected(found) else []
    rows += [("versions", one)] if (one := _format_versions(found.versions)) else []
    last = None
    for name, text in rows:
        table.add_row("" if name == last else name, _escape_cell(text))
        last = name
    return table


def _is_detected(found: Cluster) -> bool:
    """Whether this cluster was looked at, rather than stated."""
    return found.versions.python is not None


def _list_all_links(found: Cluster, groups: list[list[Node]]) -> list[str]:
    """Each group's own links, then the one between nodes."""
    lines: list[str] = []
    index = 0
    for nodes in groups:
        own = _list_links(found, index)
        index += len(nodes)
        if len(groups) > 1:
            own = [f"{_format_names(nodes)}: {text}" for text in own]
        if len(nodes) > 1 and own:
            own[-1] += " (in each node alike)"
        lines += own
    lines += [
        f"between nodes: {link.kind}{_format_speed(link)}{_format_link_source(link)}"
        for link in found.links
        if link.node is None
    ]
    return lines


def _format_ends(link: Link) -> str:
    if len(link.devices) > 2:  # noqa: PLR2004 - more than a pair
        return f"any two of the {len(link.devices)} GPUs"
    return f"GPU {link.devices[0]} and {link.devices[1]}"


def _format_speed(link: Link) -> str:
    if link.bandwidth_bytes_per_s is None:
        return " of unknown speed"
    speed = f", {format_bandwidth(link.bandwidth_bytes_per_s)} each way"
    total = link.total_bytes_per_s
    if total is None or total <= link.bandwidth_bytes_per_s:
        return speed
    return f"{speed}, {format_bandwidth(total)} from one to all others"


def _format_link_source(link: Link) -> str:
    """What a bandwidth between nodes is for, and where it is from."""
    return "" if link.bandwidth_bytes_per_s is None else f" for each GPU ({link.source})"


def _format_host(node: Node) -> str:
    cores = None
    if node.cpu_cores is not None:
        cores = plural(node.cpu_cores, "core")
        if node.cpu_cores_total and node.cpu_cores_total > node.cpu_cores:
            cores += f" of {node.cpu_cores_total}"
    ram = _format_known(format_bytes, node.ram_bytes)
    free = _format_known(format_bytes, node.ram_free_bytes)
    memory = f"{ram} RAM ({free} free)" if ram and free else f"{ram} RAM" if ram else None
    shm = f"{format_bytes(node.shm_bytes)} /dev/shm" if node.shm_bytes else None
    facts = ", ".join(one for one in (cores, memory, shm) if one)
    return f"{node.name}: {facts}" if facts else ""


def _format_scheduler(found: Scheduler) -> str:
    if found.name is None and found.launcher is None:
        return "none"
    rank = None
    if found.rank is not None and found.world_size is not None:
        rank = f"rank {found.rank} of {found.world_size}"
    facts = (
        found.name,
        f"job {found.job_id}" if found.job_id else None,
        f"partition {found.partition}" if found.partition else None,
        f"{found.num_nodes} nodes" if found.num_nodes else None,
        f"{found.gpus_on_node} GPUs on this node" if found.gpus_on_node is not None else None,
        found.launcher,
        rank,
    )
    return ", ".join(fact for fact in facts if fact)


def _format_versions(found: Versions) -> str:
    cuda = f" (CUDA {found.driver_cuda})" if found.driver_cuda else ""
    built = f" for CUDA {found.torch_cuda}" if found.torch_cuda else ""
    facts = (
        f"torch {found.torch}{built}" if found.torch else None,
        f"driver {found.driver}{cuda}" if found.driver else None,
        f"NCCL {found.nccl}" if found.nccl else None,
        f"Python {found.python}" if found.python else None,
        f"trimtab {found.trimtab}" if found.trimtab else None,
    )
    return ", ".join(fact for fact in facts if fact)


def render_sources(found: Cluster) -> Table:
    """Every known fact with where it comes from."""
    table = _make_table()
    for name in ("fact", "value", "source"):
        table.add_column(name, header_style="dim", overflow="fold")
    holders: list[tuple[str, Any]] = [("versions", found.versions), ("scheduler", found.scheduler)]
    for node in found.nodes:
        holders.append((node.name, node))
        holders += [(f"{node.name} GPU {device.index}", device) for device in node.devices]
    for label, holder in holders:
        for field, source in holder.sources.items():
            if field not in ("devices", "name"):
                value = _format_field(field, getattr(holder, field))
                table.add_row(_escape_cell(f"{label} {field}"), _escape_cell(value), _escape_cell(source))
    for link in found.links:
        where = (
            "between nodes" if link.node is None else f"{found.nodes[link.node].name} {_format_ends(link)}"
        )
        table.add_row(
            _escape_cell(f"link {where}"),
            _escape_cell(f"{link.kind}{_format_speed(link)}"),
            _escape_cell(link.source),
        )
    return table


def _format_peaks(value: Peaks) -> str:
    rates = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return ", ".join(f"{name} {format_flops(rate)}" for name, rate in rates if rate)


FIELD_FORMATS: dict[str, Callable[[Any], str]] = {
    "bandwidth_bytes_per_s": format_bandwidth,
    "clock_hz": lambda value: f"{value / 1e6:.0f} MHz",
    "peaks": _format_peaks,
    "processes": lambda value: f"{len(value)} other" if value else "none",
    "slice": lambda value: f"{value.profile}, {value.sm_share:.3f} of {value.parent}",
}
"""How a field's value is written in few letters, where str() will not do."""


def _format_field(field: str, value: Any) -> str:
    return (FIELD_FORMATS.get(field) or (format_bytes if field.endswith("_bytes") else str))(value)


def render_finding(finding: Finding) -> RenderableType:
    """A finding: what, the evidence, why, and what to do."""
    style = SEVERITY_STYLE[finding.severity.value]
    return Group(
        Text.assemble((f"{finding.severity.value}: ", style), escape_control(finding.what)),
        _render_indented("seen", finding.evidence, "dim"),
        _render_indented("why", finding.cause, "dim"),
        _render_indented("do", finding.cure, "green"),
    )


def render_labelled(label: str, text: str, style: str) -> RenderableType:
    """A sentence below something else, with its label before it."""
    return _render_indented(label, text, style)


def _render_indented(label: str, text: str, style: str) -> RenderableType:
    return Hanging(Text(f"  {label}:", style=style), Text(escape_control(text)))


def _wrap_lines(text: Text, width: int) -> list[Text]:
    """Return the lines of a text, broken at blanks alone; a word that is too wide has a line of its own."""
    lines: list[Text] = []
    for line in text.split(allow_blank=True):
        breaks, used = [], 0
        for found in WORD.finditer(line.plain):
            if used and used + cell_len(found[0].rstrip()) > width:
                breaks.append(found.start())
                used = 0
            used += cell_len(found[0])
        lines += line.divide(breaks) if breaks else [line]
    for line in lines:
        line.rstrip()
    return lines


@dataclass(frozen=True)
class Hanging:
    """A label and a text beside it, whose lines begin below each other; no word of it is ever broken."""

    label: Text
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wrap at blanks; a word that is wider than the terminal has a line of its own."""
        margin = self.label.cell_len + 1
        for number, line in enumerate(_wrap_lines(self.text, options.max_width - margin)):
            before = Text(" " * margin) if number else Text.assemble(self.label, " ")
            yield Text.assemble(before, line, no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as its text on one line, at most."""
        whole = self.label.cell_len + 1 + self.text.cell_len
        return Measurement(min(whole, options.max_width), min(whole, options.max_width))


@dataclass(frozen=True)
class WholePaths:
    """Lays out what it holds so that no path is broken, wider than the terminal where a path needs it.

    Print it uncropped. rich would break a word that is wider than its column at any letter, and nobody could
    read or copy the path then.
    """

    what: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Part by part: only what holds the long path gets wider."""
        if isinstance(self.what, Group):
            for renderable in self.what.renderables:
                yield WholePaths(renderable)
        elif isinstance(self.what, Hanging):
            yield self.what
        elif isinstance(self.what, str | Text):
            text = console.render_str(self.what) if isinstance(self.what, str) else self.what
            for line in _wrap_lines(text, options.max_width) if not text.no_wrap else [text]:
                line.no_wrap, line.overflow = True, "ignore"
                yield line
        else:
            width = self._width(console, options)
            yield from console.render(self.what, options.update(width=width) if width else options)

    def _width(self, console: Console, options: ConsoleOptions) -> int | None:
        """The first width at which every path is whole; None where that of the terminal will do."""
        narrow = options.max_width
        whole = self._words(console, options, VERY_WIDE)
        longest = max((len(one) for one in whole if "/" in one), default=0)
        for width in range(narrow, narrow + longest + 1, WIDER):
            fragments = self._words(console, options, width) - whole
            if not any(path.startswith(fragment) for fragment in fragments for path in whole if "/" in path):
                return None if width == narrow else width
        return None

    def _words(self, console: Console, options: ConsoleOptions, width: int) -> set[str]:
        lines = console.render_lines(self.what, options.update(width=width), pad=False)
        return {word for line in lines for word in "".join(part.text for part in line).split()}


def render_error(trimtab_error: TrimtabError) -> RenderableType:
    """What was given, what was found, what to do."""
    return Group(
        Text.assemble(("error: ", "bold red"), escape_control(trimtab_error.given)),
        _render_indented("found", trimtab_error.found, "dim"),
        _render_indented("do", trimtab_error.cure, "green"),
    )


def render_word(word: Word) -> RenderableType:
    """An entry of the glossary."""
    parts: list[RenderableType] = [Text.assemble((word.name, "bold"), (f"  ({word.kind})", "dim"))]
    labels = (("what", word.what), ("cost", word.cost), ("when", word.change))
    parts += [_render_indented(label, text, "cyan") for label, text in labels if text]
    parts += [_render_indented("here", text, "cyan") for text in word.use]
    if word.see:
        parts.append(_render_indented("see", ", ".join(word.see), "dim"))
    return Group(*parts)


def render_word_list(known: dict[str, Word]) -> RenderableType:
    """Every word, by kind."""
    kinds: dict[str, list[str]] = {}
    for text in known.values():
        kinds.setdefault(text.kind, []).append(text.name)
    parts = [_render_indented(kind, ", ".join(sorted(names)), "cyan") for kind, names in kinds.items()]
    return Group(Text("trimtab explain WORD, with one of:", style="bold"), *parts)


def render_device_names(rows: tuple[DeviceRow, ...]) -> Columns:
    """Every device of the catalogue, as people type it."""
    return Columns(
        headings=("name", "GiB", "16-bit peak", "bandwidth", "also"),
        rows=tuple(
            (
                row.typed[0],
                format_gib(row.usable_bytes),
                format_flops((row.bf16 or row.fp16) * 1e12),
                format_bandwidth(row.bandwidth_gbs * 1e9),
                ", ".join(row.typed[1:4]),
            )
            for row in rows
        ),
        left=("name", "also"),
        folds="also",
        kept=2,
    )


BAR = 48
"""Characters of the bar of parts."""
PART_COLOURS = {
    "weights": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "activations": "green",
    "inputs": "white",
    "workspace": "yellow",
    "communication": "red",
    "context": "bright_black",
}
LETTERS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "inputs": "I",
    "workspace": "K",
    "communication": "C",
    "context": "X",
}
"""What a part is drawn with: letters, so that the bar reads without colour too."""


def render_estimate(
    found: Estimate,
    details: MemoryPeaks,
    *,
    heading: str,
    help_lines: tuple[str, ...] = (),
    classes: dict[str, str] | None = None,
) -> RenderableType:
    """A verdict, the bar of parts, the three figures, and where the memory goes."""
    parts: list[RenderableType] = [
        _render_verdict(found, heading),
        Text(),
        _render_bar(found),
        Text(),
        _render_figures(found),
    ]
    moment = f"{details.operation}, {_describe_phase(details.phase)}"
    rows = [("verdict", found.verdict_reason)] if found.verdict_reason else []
    rows += [("peak", f"{moment}: the parts above are what is live at that moment")]
    if gradients := describe_gradients(found):
        rows.append(("", gradients))
    rows += [
        ("largest" if not index else "", f"{_format_module(name, classes or {})}  {format_bytes(size)}")
        for index, (name, size) in enumerate(details.modules)
    ]
    if found.mfu is not None and found.mfu_reference is not None:
        rows.append(("MFU", _describe_mfu(found.mfu, found.mfu_reference)))
    rows += [("help" if not index else "", line) for index, line in enumerate(help_lines)]
    rows += [("assumed" if not index else "", line) for index, line in enumerate(found.assumptions)]
    table = _make_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, escape(text))
    return Group(*parts, Text(), Padding(table, (0, 0, 0, 1), expand=False))


def describe_gradients(found: Estimate) -> str:
    """What gradients hold where that is at another moment than the peak; empty where it is not."""
    if found.gradients_bytes is None or found.gradients_bytes <= found.parts.gradients:
        return ""
    then, most = format_bytes(found.parts.gradients), format_bytes(found.gradients_bytes)
    return f"gradients hold {then} at the peak, and up to {most} at another moment"


def _describe_mfu(mfu: float, usual: MfuReference) -> str:
    """An MFU beside what published runs reach.

    >>> from trimtab.spec import MfuReference
    >>> _mfu_words(0.28, MfuReference(low=0.36, high=0.46, model="transformer", figures="X, 48 runs"))
    '28% is below the 36 to 46% of well-tuned large transformers on such GPUs (X, 48 runs)'
    """
    place = "below" if mfu < usual.low else "above" if mfu > usual.high else "within"
    span = f"{usual.low * 100:.0f} to {usual.high:.0%}"
    return (
        f"{mfu:.0%} is {place} the {span} of well-tuned large {usual.model}s on such GPUs ({usual.figures})"
    )


def _format_module(name: str, classes: dict[str, str]) -> str:
    """A module as a person finds it: a number alone is no name.

    >>> _module("0", {"0": "Linear"}), _module("h.0.mlp", {})
    ('0 (Linear)', 'h.0.mlp')
    """
    return f"{name} ({classes[name]})" if name in classes else name


def _render_verdict(found: Estimate, heading: str) -> Text:
    if found.capacity_bytes is None or found.fits is None:
        return Text.assemble((heading, "bold"), f": {format_bytes(found.process_bytes)}")
    share = found.process_bytes / found.capacity_bytes
    need = f"{format_bytes(found.process_bytes)} of {format_bytes(found.capacity_bytes)} ({share:.0%})"
    word, style = ("fits", "bold green") if found.fits else ("does not fit", "bold red")
    if _is_tight(found):
        word, style = "fits tightly", "bold yellow"
    return Text.assemble((heading, "bold"), ": ", (word, style), f", {need}")


def _is_tight(found: Estimate) -> bool:
    """Whether it fits only because torch releases cached blocks."""
    return found.verdict is not None and found.verdict.value == "fits-tight"


def _describe_phase(phase: str) -> str:
    return f"step {int(phase.removeprefix('step')) + 1}" if phase.startswith("step") else phase


def _render_bar(found: Estimate) -> Text:
    """Parts of the peak and, after them, what the allocator holds beyond it, as a share of the device."""
    whole = max(found.capacity_bytes or 0, found.process_bytes)
    text = Text(" ")
    sizes = {name: getattr(found.parts, name) for name in found.parts.__struct_fields__}
    sizes["held"] = max(0, found.reserved_bytes - found.allocated_bytes)
    drawn = 0.0
    printed = 0
    for name, size in sizes.items():
        drawn += size / whole * BAR
        count = round(drawn) - printed
        printed += count
        text.append(LETTERS.get(name, "-") * count, style=PART_COLOURS.get(name, "dim"))
    return text.append("." * max(0, BAR - printed), style="dim")


def _render_figures(found: Estimate) -> Table:
    table = _make_table()
    table.show_header = False
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    sizes = [(name, getattr(found.parts, name)) for name in found.parts.__struct_fields__]
    left = [(f" {LETTERS[name]} {name}", format_bytes(size)) for name, size in sizes]
    low, high = format_bytes(found.band.low_bytes), format_bytes(found.band.high_bytes)
    # The unit once, where both have the same.
    band = f"{low.removesuffix(high[-4:])} to {high}"
    right = [
        ("allocated", format_bytes(found.allocated_bytes, digits=2)),
        ("reserved", format_bytes(found.reserved_bytes, digits=2)),
        ("process", format_bytes(found.process_bytes, digits=2)),
        ("band", band),
        *_list_speed_rows(found),
    ]
    for index, (name, size) in enumerate(left):
        label, value = right[index] if index < len(right) else ("", "")
        table.add_row(name, size, f"   {label}", value)
    return table


def _list_speed_rows(found: Estimate) -> list[tuple[str, str]]:
    """Time of a step, samples a second and MFU, where they are known."""
    if found.step_s is None or found.samples_per_s is None:
        return []
    rows = [("step", format_duration(found.step_s)), ("samples/s", f"{found.samples_per_s:,.1f}")]
    if found.mfu is not None:
        rated = f", {found.mfu_rating}" if found.mfu_rating else ""
        rows.append(("MFU", f"{found.mfu:.0%}{rated}"))
    return rows


def render_marks(found: ExamResult) -> RenderableType:
    """Every case with its errors, and the summary."""
    table = _make_table()
    table.add_column("case", header_style="dim", overflow="fold")
    for name in ("allocated", "error", "reserved", "process", "step", "error"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for case in found.cases:
        if case.failed:
            table.add_row(escape(case.case), "failed", *[""] * 5)
            continue
        errors = {figure: f"{error:+.2%}" for figure, error in case.error.items()}
        table.add_row(
            escape(case.case),
            format_gib(case.measured["allocated_bytes"]),
            *(errors.get(f"{name}_bytes", UNKNOWN) for name in ("allocated", "reserved", "process")),
            f"{case.measured['step_s'] * 1e3:.1f} ms" if "step_s" in case.measured else UNKNOWN,
            f"{case.error['step_s']:+.1%}" if "step_s" in case.error else UNKNOWN,
        )
    lines = [_render_mark(found, figure) for figure in found.median]
    failures = [_render_indented(case.case, case.failed, "red") for case in found.cases if case.failed]
    return Group(table, Text(), *lines, *failures)


def _render_mark(found: ExamResult, figure: str) -> Text:
    name = figure.removesuffix("_bytes").removesuffix("_s")
    return Text(
        f"{name:10} median error {found.median[figure]:.2%}, worst {found.worst[figure]:.2%}, "
        f"furthest too low {min(0.0, found.lowest[figure]):.2%}"
    )


def render_profile(found: dict[str, Any], *, heading: str) -> RenderableType:
    """Predicted against measured, or that it ran out of memory."""
    title = Text(heading, style="bold")
    if found["run"]["out_of_memory"]:
        return Group(title, _render_indented("out of memory", found["run"]["out_of_memory"], "red"))
    table = _make_table()
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="right" if name else "left", header_style="dim")
    for figure, measured in found["measured"].items():
        if measured is None:
            continue
        guess, error = found["predicted"][figure], found["error"][figure]
        shown = format_duration if figure.endswith("_s") else format_bytes
        table.add_row(
            f" {figure.rpartition('_')[0]}",
            UNKNOWN if guess is None else shown(guess),
            shown(measured),
            UNKNOWN if error is None else f"{error:+.2%}",
        )
    return Group(title, table)


def render_calibration(found: Calibration, file: Path) -> RenderableType:
    """The best rates that were seen, by dtype, and what the host costs."""
    table = _make_table()
    for name in ("", "best", "at"):
        table.add_column(name, justify="right" if name == "best" else "left", header_style="dim")
    pairs = list(zip(found.works, found.seconds, strict=True))
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        products = [pair for pair in pairs if pair[0].kind == "matrix" and pair[0].dtype == dtype]
        rated = [(work.flops / seconds, work) for work, seconds in products]
        if rated:
            rate, work = max(rated, key=lambda one: one[0])
            size = " x ".join(str(dim) for dim in work.dims[1:4])
            table.add_row(f" matrix products, {dtype}", f"{rate / 1e12:.0f} TFLOP/s", size)
    large = [
        ((work.read_bytes + work.write_bytes) / seconds, work.op)
        for work, seconds in pairs
        if work.kind == "pointwise" and work.read_bytes + work.write_bytes > LARGE_BYTES
    ]
    if large:
        rate, op = max(large)
        table.add_row(" memory", f"{rate / 1e9:.0f} GB/s", op.removeprefix("aten::"))
    for name, rate in found.copy_bytes_per_s.items():
        table.add_row(f" copies {name.replace('_', ' ')}", f"{rate / 1e9:.0f} GB/s", "256 MiB, pinned")
    if "forward_s" in found.host:
        table.add_row(" one operation, on the host", f"{found.host['forward_s'] * 1e6:.1f} us", "64 numbers")
    title = Text(f"{found.device}: {len(found.works)} operations measured", style="bold")
    left = [Text(f" left out: {one}", style="dim") for one in found.left_out]
    return Group(title, table, *left, Text(f" kept in {file}"))


MOST_REJECTED = 10
"""Causes shown; the rest are counted."""


STOPPED = "the search was stopped before it ended; something better may exist"


def render_plan(found: Plan) -> RenderableType:
    """The recommendation, the memory, every choice with its reason, and what else there was."""
    parts: list[RenderableType] = [
        Text.assemble(
            (escape_control(_format_plan_name(found)), "bold"), f": {describe_setting(found.choice)}"
        ),
        Text(),
        *([] if found.complete else [_render_indented("best so far", STOPPED, "yellow"), Text()]),
        Padding(Text(escape_control(found.recommendation), style="green"), (0, 0, 0, 1)),
        Text(),
        _render_bar(found.estimate),
        Padding(Text(_describe_headroom(found)), (0, 0, 0, 1)),
        Text(),
        Padding(_render_reasons(found), (0, 0, 0, 1), expand=False),
    ]
    for heading, table in (
        ("GPUs side by side", _render_comparison(found)),
        ("what if", _render_what_ifs(found)),
        ("runners-up", _render_runners_up(found)),
    ):
        if table is not None:
            parts += [Text(), Text(f" {heading}", style="bold"), Padding(table, (0, 0, 0, 1), expand=False)]
        if heading == "what if":
            parts += [
                _render_indented(one.change, one.why, "dim")
                for one in found.what_if
                if _needs_explanation(one)
            ]
    parts += [
        Text(),
        Text(" rejected", style="bold"),
        Padding(_render_rejected(found), (0, 0, 0, 1), expand=False),
    ]
    parts += [_render_indented("assumed", line, "dim") for line in found.estimate.assumptions]
    parts += [_render_indented("left out", line, "dim") for line in found.left_out]
    return Group(*parts)


def render_staged_plan(found: StagedPlan) -> RenderableType:
    """A line a stage, and what all of them take together."""
    first = found.stages[0].plan
    table = _make_table()
    for heading in ("stage", "batch", "how", "memory", "step", "epochs", "rate", "time"):
        table.add_column(heading, justify="left" if heading in ("stage", "how") else "right")
    for stage in found.stages:
        choice, estimate = stage.plan.choice, stage.plan.estimate
        ways = "" if choice.recompute.value == "none" else f"recompute {choice.recompute.value}"
        ranks = f" x {choice.data_parallel}" * (choice.data_parallel > 1)
        table.add_row(
            escape_control(stage.stage.name),
            f"{choice.micro_batch} x {choice.accumulation}{ranks}",
            ", ".join(word for word in (ways, "compiled" * choice.compile) if word) or "eager",
            format_bytes(estimate.process_bytes),
            "-" if estimate.step_s is None else format_duration(estimate.step_s),
            "-" if stage.stage.epochs is None else str(stage.stage.epochs),
            "-" if stage.stage.rate is None else f"{stage.stage.rate:g}",
            _format_hours(estimate) or "-",
        )
    whole = "" if found.hours is None else f", {format_duration(found.hours * 3600)} in all"
    return Group(
        Text.assemble(
            (escape_control(_format_plan_name(first)), "bold"), f": {len(found.stages)} stages{whole}"
        ),
        Text(),
        Padding(table, (0, 0, 0, 1), expand=False),
        Text(),
        Padding(Text(f"global batch {found.global_batch} in every stage, exactly"), (0, 0, 0, 1)),
    )


def _format_plan_name(found: Plan) -> str:
    from trimtab.planner.validity import describe_places

    name = found.workload.name if found.workload else found.job
    return f"{name} on {describe_places(found.places)}"


def describe_setting(setting: Setting) -> str:
    """A setting in a line.

    >>> from trimtab.spec import Setting
    >>> setting_words(Setting(micro_batch=8, accumulation=2, global_batch=16))
    '1 GPU, single, micro-batch 8 x 2, fp32'
    """
    words = [
        plural(setting.gpus, "GPU"),
        setting.strategy.value,
        f"micro-batch {setting.micro_batch} x {setting.accumulation}",
        setting.precision.value,
        "" if setting.recompute.value == "none" else f"recompute {setting.recompute.value}",
        "compiled" * setting.compile,
        "synchronised BatchNorm" * (setting.sync_batchnorm and setting.gpus > 1),
        "shares by speed" * bool(setting.shares),
    ]
    return ", ".join(word for word in words if word)


def _describe_headroom(found: Plan) -> str:
    """Memory of the fullest GPU against what may be used."""
    estimate = found.estimate
    capacity = estimate.capacity_bytes or estimate.process_bytes
    most = found.policy.memory_share * capacity
    words = (
        f"{format_bytes(estimate.process_bytes)} of {format_bytes(capacity)} free on the fullest GPU, "
        f"{format_bytes(estimate.band.high_bytes)} at most; {format_bytes(most)} may be used"
    )
    if _is_tight(estimate):
        words += f"; torch releases cached blocks, and runs in {format_bytes(estimate.need_bytes)}"
    return words


def _make_words_table(*justify: str) -> Table:
    table = _make_table()
    table.show_header = False
    for index, side in enumerate(justify):
        last = index == len(justify) - 1
        table.add_column(
            style=None if last else "dim" if not index else None,
            justify="right" if side == "right" else "left",
            no_wrap=not last,
            overflow="fold",
        )
    return table


def _render_reasons(found: Plan) -> Table:
    table = _make_words_table("left", "left", "left")
    for reason in found.reasons:
        table.add_row(_escape_cell(reason.subject), _escape_cell(reason.value), _escape_cell(reason.why))
    return table


def _render_comparison(found: Plan) -> Columns | None:
    """One line for each number of GPUs; columns without a known value are left out."""
    if not found.comparison:
        return None
    return _make_columns(
        (
            ("GPUs", lambda one: str(one.gpus)),
            ("how", lambda one: _format_setting_briefly(one.setting) if one.setting else one.why),
            ("GiB", lambda one: one.estimate and format_gib(one.estimate.process_bytes)),
            ("samples/s", lambda one: one.estimate and _format_figure(one.estimate.samples_per_s)),
            ("epoch", lambda one: None if one.epoch_s is None else format_duration(one.epoch_s)),
            ("total", lambda one: _format_hours(one.estimate)),
            ("GPU-h", lambda one: one.estimate and _format_figure(one.estimate.gpu_hours)),
            ("cost", lambda one: None if one.cost is None else f"{one.cost:,.2f}"),
            ("in time", lambda one: _format_bool(one.meets_deadline)),
            ("unused", _format_unused),
            (
                "scaling",
                lambda one: None if one.scaling_efficiency is None else f"{one.scaling_efficiency:.0%}",
            ),
        ),
        found.comparison,
        "how",
    )


def _format_unused(comparison: Comparison) -> str | None:
    """GPUs of the cluster that are left for others: in words, since memory is free or not as well."""
    if comparison.free_share is None or comparison.free_share >= 1:
        return None
    count = round(comparison.gpus * comparison.free_share / (1 - comparison.free_share))
    return plural(count, "GPU")


def _render_what_ifs(found: Plan) -> Columns | None:
    if not found.what_if:
        return None
    return _make_columns(
        (
            ("change", lambda one: one.change),
            ("GPUs", lambda one: str(one.gpus)),
            ("how", lambda one: _format_setting(one.setting) if one.setting else None),
            ("total", lambda one: _format_hours(one.estimate)),
            ("samples/s", lambda one: one.estimate and _format_figure(one.estimate.samples_per_s)),
            ("GPU-h", lambda one: one.estimate and _format_figure(one.estimate.gpu_hours)),
            ("cost", lambda one: None if one.cost is None else f"{one.cost:,.2f}"),
            ("in time", lambda one: _format_bool(one.meets_deadline)),
        ),
        found.what_if,
        "how",
    )


def _needs_explanation(what_if: WhatIf) -> bool:
    """Whether a row is without a setting, or without a pin: the line below says why."""
    return what_if.setting is None or bool(what_if.unpinned)


def _render_runners_up(found: Plan) -> Columns | None:
    if not found.runners_up:
        return None
    return _make_columns(
        (
            ("how", lambda one: describe_setting(one.setting)),
            ("GiB", lambda one: format_gib(one.estimate.process_bytes)),
            ("samples/s", lambda one: _format_figure(one.estimate.samples_per_s)),
            ("why not", lambda one: one.why),
        ),
        found.runners_up,
        "how",
        left=("how", "why not"),
    )


def _make_columns(
    columns: tuple[tuple[str, Any], ...], rows: tuple[Any, ...], folds: str, left: tuple[str, ...] = ()
) -> Columns:
    """A table of the columns in which something is known."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    used = [index for index in range(len(columns)) if any(row[index] for row in cells)]
    headings = tuple(columns[index][0] for index in used)
    return Columns(
        headings=headings,
        rows=tuple(tuple(escape_control(row[index] or UNKNOWN) for index in used) for row in cells),
        left=left or (folds, "change"),
        folds=folds,
        narrowest=10,
        kept=min(4, len(headings)),
    )


def _format_setting(setting: Setting) -> str:
    """A setting without the number of GPUs, which has its own column."""
    return describe_setting(setting).partition(", ")[2].replace("micro-batch ", "")


def _format_setting_briefly(setting: Setting) -> str:
    """Strategy and cut of the batch, and recomputing where there is some."""
    again = "" if setting.recompute.value == "none" else f" {setting.recompute.value}"
    return f"{setting.strategy} {setting.micro_batch}x{setting.accumulation}{again}"


def _format_figure(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _format_hours(estimate: Estimate | None) -> str | None:
    return None if estimate is None or estimate.hours is None else format_duration(estimate.hours * 3600)


def _format_bool(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _render_rejected(found: Plan) -> Table:
    """Causes with how many settings each removed."""
    table = _make_words_table("right", "left")
    listed = found.rejected
    for one in listed[:MOST_REJECTED]:
        table.add_row(f"{one.count:,}", _escape_cell(one.why))
    if len(listed) > MOST_REJECTED:
        rest = listed[MOST_REJECTED:]
        table.add_row(
            f"{sum(one.count for one in rest):,}", f"for {len(rest)} other causes; --json has them all"
        )
    return table
