"""Turn plans, estimates, clusters and errors into rich renderables for the terminal; prints nothing.

Text from drivers, files and variables passes through `escape_control`, so that markup and control characters
in it have no effect.
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

from trimtab.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_figure,
    format_flops,
    format_gib,
    plural,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from trimtab.catalog.glossary import Word
    from trimtab.catalog.tables import DeviceRow
    from trimtab.errors import TrimtabError
    from trimtab.exams.outside import OutsideResult
    from trimtab.exams.run import ExamResult
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.scripts.estimate import ScriptEstimate
    from trimtab.spec import (
        Calibration,
        Cluster,
        Comparison,
        Device,
        Estimate,
        Finding,
        HostMemory,
        LargestValue,
        LayoutRanking,
        LayoutRow,
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
"""Operations that move more than this do not fit in a cache of the GPU."""
WORD = re.compile(r"\s*\S+\s*")
VERY_WIDE = 10_000
"""Width in characters at which no line is broken."""
WIDER = 4
"""Characters by which a table is widened at a time until no path is broken."""
MOST_LINKS = 8
"""More pairs than this are counted, not listed."""
LONG_PATH = 60
LONG_PATH_PARTS = 5
"""Characters and parts of a path, above which the parts in its middle are left out."""
MOST_WRITES = 5
"""More files of a script than this are counted, not listed."""


def escape_control(text: str) -> str:
    r"""Return a text with control and invisible characters spelt out.

    >>> escape_control("H100\x1b[31m\n")
    'H100\\x1b[31m\\n'
    """
    hidden = {
        character
        for character in set(text)
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    for character in hidden:
        text = text.replace(character, character.encode("unicode_escape", "backslashreplace").decode("ascii"))
    return text


def _escape_cell(text: str) -> str:
    """Return a text for a table cell, with markup and control characters escaped."""
    return escape(escape_control(text))


def render_cluster(cluster: Cluster, *, heading: str) -> RenderableType:
    """Return a cluster with devices, links, host, scheduler, versions and notes."""
    groups = _group_nodes(cluster)
    parts: list[RenderableType] = [
        Text.assemble((escape_control(heading), "bold"), f": {format_counts(cluster)}"),
        Text(),
    ]
    for nodes in groups:
        if len(cluster.nodes) > 1:
            parts.append(
                Text(escape_control(f"{_format_names(nodes)}{', each' * (len(nodes) > 1)}:"), style="bold")
            )
        if nodes[0].devices:
            parts += [Padding(render_devices(nodes[0].devices), (0, 0, 1, 1), expand=False)]
    parts.append(Padding(_render_host(cluster, groups), (0, 0, 0, 1), expand=False))
    parts += [render_labelled("note", note, "cyan") for note in _list_notes(cluster)]
    return Group(*parts)


def _list_notes(cluster: Cluster) -> list[str]:
    elsewhere = "Other hardware is described with --on, as in --on 4xA100-40GB."
    return [*cluster.notes, *([] if cluster.devices else [elsewhere])]


def format_counts(cluster: Cluster) -> str:
    """Return the numbers of nodes and GPUs in words."""
    nodes, total = len(cluster.nodes), len(cluster.devices)
    gpus = plural(total, "GPU") if total else "no GPU"
    return f"{plural(nodes, 'node')}, {gpus}"


def _group_nodes(cluster: Cluster) -> list[list[Node]]:
    """Return neighbouring nodes in groups that print the same."""
    groups: list[list[Node]] = []
    looks = [(_printed_facts(node), _list_links(cluster, index)) for index, node in enumerate(cluster.nodes)]
    for index, node in enumerate(cluster.nodes):
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


def _list_links(cluster: Cluster, node: int) -> list[str]:
    """Return the lines about the links of one node."""
    within = [link for link in cluster.links if link.node == node]
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
    """A table that drops columns from the right if the terminal is too narrow.

    The first `required` columns always stay. The column `folds` is wrapped before any column is dropped,
    down to `narrowest` characters.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...]
    """Headings of the left-justified columns."""
    folds: str = "name"
    narrowest: int = 20
    required: int = 3

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with the most columns that fit."""
        for count in range(len(self.headings), self.required, -1):
            if self._measure_width(console, options, count) <= options.max_width:
                yield self.table(count)
                return
        yield self.table(self.required)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return at most the width of the whole table."""
        return Measurement(1, Measurement.get(console, options, self.table(len(self.headings))).maximum)

    def _measure_width(self, console: Console, options: ConsoleOptions, count: int) -> int:
        """Return the width of the first columns, with the folding one at its narrowest."""
        width = Measurement.get(console, options.update(width=1000), self.table(count)).maximum
        place = self.headings.index(self.folds)
        if place >= count:
            return width
        longest = max(len(row[place]) for row in self.rows)
        return width - max(0, longest - self.narrowest)

    def table(self, count: int) -> Table:
        """Return a table of the first columns."""
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
            table.add_row(*(_escape_cell(text) for text in row[:count]))
        return table


def render_devices(listed: tuple[Device, ...]) -> Columns:
    """Return one line per device or run of equal devices, without columns that are all unknown."""
    columns: list[tuple[str, Any]] = [
        ("GPU", lambda device: str(device.index)),
        ("name", _format_device),
        ("GiB", lambda device: format_gib(device.memory_bytes)),
        ("free", lambda device: None if device.free_bytes is None else format_gib(device.free_bytes)),
        ("sm", lambda device: device.compute_capability),
        ("bf16", lambda device: None if device.bf16 is None else "yes" if device.bf16 else "no"),
        ("dense peak", _format_peak),
        ("bandwidth", lambda device: _format_known(format_bandwidth, device.bandwidth_bytes_per_s)),
        ("power", lambda device: None if device.power_limit_w is None else f"{device.power_limit_w:.0f} W"),
    ]
    rows = _merge_rows([[cell(device) for _, cell in columns] for device in listed])
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return Columns(
        headings=tuple(columns[index][0] for index in used),
        rows=tuple(tuple(escape_control(row[index] or UNKNOWN) for index in used) for row in rows),
        left=("name",),
    )


def _merge_rows(rows: list[list[str | None]]) -> list[list[str | None]]:
    """Merge neighbouring rows that differ only in their first cell, as in "0-7"."""
    merged: list[list[str | None]] = []
    for row in rows:
        if merged and merged[-1][1:] == row[1:]:
            merged[-1][0] = f"{str(merged[-1][0]).partition('-')[0]}-{row[0]}"
        else:
            merged.append(list(row))
    return merged


def _format_device(device: Device) -> str:
    return f"{device.name} MIG {device.slice.profile}" if device.slice else device.name


def _format_peak(device: Device) -> str | None:
    """Return the best 16-bit rate, with ~ if it is derived rather than from the catalogue."""
    rate = device.peaks.bf16 or device.peaks.fp16
    if rate is None:
        return None
    derived = device.sources.get("peaks", "").startswith("derived")
    return f"{'~' * derived}{format_flops(rate)}"


def _format_known(formatted: Any, value: float | None) -> str | None:
    return None if value is None else str(formatted(value))


def _make_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)


def _render_host(cluster: Cluster, groups: list[list[Node]]) -> Table:
    table = _make_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [("links", link) for link in _list_all_links(cluster, groups)]
    rows += [("host", text) for nodes in groups if (text := _format_host(nodes[0]))]
    rows += [("scheduler", _format_scheduler(cluster.scheduler))] if _is_detected(cluster) else []
    rows += [("versions", text)] if (text := _format_versions(cluster.versions)) else []
    last = None
    for name, text in rows:
        table.add_row("" if name == last else name, _escape_cell(text))
        last = name
    return table


def _is_detected(cluster: Cluster) -> bool:
    """Whether this cluster was detected rather than stated by the user."""
    return cluster.versions.python is not None


def _list_all_links(cluster: Cluster, groups: list[list[Node]]) -> list[str]:
    """Return the lines about the links of each group, then those between nodes."""
    lines: list[str] = []
    index = 0
    for nodes in groups:
        own = _list_links(cluster, index)
        index += len(nodes)
        if len(groups) > 1:
            own = [f"{_format_names(nodes)}: {text}" for text in own]
        if len(nodes) > 1 and own:
            own[-1] += " (in each node alike)"
        lines += own
    lines += [
        f"between nodes: {link.kind}{_format_speed(link)}{_format_link_source(link)}"
        for link in cluster.links
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
    """Return that a bandwidth between nodes is per GPU, and its source."""
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
    facts = ", ".join(fact for fact in (cores, memory, shm) if fact)
    return f"{node.name}: {facts}" if facts else ""


def _format_scheduler(scheduler: Scheduler) -> str:
    if scheduler.name is None and scheduler.launcher is None:
        return "none"
    rank = None
    if scheduler.rank is not None and scheduler.world_size is not None:
        rank = f"rank {scheduler.rank} of {scheduler.world_size}"
    facts = (
        scheduler.name,
        f"job {scheduler.job_id}" if scheduler.job_id else None,
        f"partition {scheduler.partition}" if scheduler.partition else None,
        f"{scheduler.num_nodes} nodes" if scheduler.num_nodes else None,
        f"{scheduler.gpus_on_node} GPUs on this node" if scheduler.gpus_on_node is not None else None,
        scheduler.launcher,
        rank,
    )
    return ", ".join(fact for fact in facts if fact)


def _format_versions(versions: Versions) -> str:
    cuda = f" (CUDA {versions.driver_cuda})" if versions.driver_cuda else ""
    built = f" for CUDA {versions.torch_cuda}" if versions.torch_cuda else ""
    facts = (
        f"torch {versions.torch}{built}" if versions.torch else None,
        f"driver {versions.driver}{cuda}" if versions.driver else None,
        f"NCCL {versions.nccl}" if versions.nccl else None,
        f"Python {versions.python}" if versions.python else None,
        f"trimtab {versions.trimtab}" if versions.trimtab else None,
    )
    return ", ".join(fact for fact in facts if fact)


def render_sources(cluster: Cluster) -> Table:
    """Return every known fact of a cluster with its source."""
    table = _make_table()
    for name in ("fact", "value", "source"):
        table.add_column(name, header_style="dim", overflow="fold")
    holders: list[tuple[str, Any]] = [("versions", cluster.versions), ("scheduler", cluster.scheduler)]
    for node in cluster.nodes:
        holders.append((node.name, node))
        holders += [(f"{node.name} GPU {device.index}", device) for device in node.devices]
    for label, holder in holders:
        for field, source in holder.sources.items():
            if field not in ("devices", "name"):
                value = _format_field(field, getattr(holder, field))
                table.add_row(_escape_cell(f"{label} {field}"), _escape_cell(value), _escape_cell(source))
    for link in cluster.links:
        where = (
            "between nodes" if link.node is None else f"{cluster.nodes[link.node].name} {_format_ends(link)}"
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
"""Short formats of fields for which str() is not enough."""


def _format_field(field: str, value: Any) -> str:
    return (FIELD_FORMATS.get(field) or (format_bytes if field.endswith("_bytes") else str))(value)


def render_finding(finding: Finding) -> RenderableType:
    """Return a finding with evidence, cause and fix."""
    style = SEVERITY_STYLE[finding.severity.value]
    return Group(
        Text.assemble((f"{finding.severity.value}: ", style), escape_control(finding.what)),
        render_labelled("seen", finding.evidence, "dim"),
        render_labelled("why", finding.cause, "dim"),
        render_labelled("do", finding.cure, "green"),
    )


def render_labelled(label: str, text: str, style: str) -> RenderableType:
    """Return an indented text with a label before it."""
    return Hanging(Text(f"  {label}:", style=style), Text(escape_control(text)))


def _wrap_lines(text: Text, width: int) -> list[Text]:
    """Return the lines of a text, broken only at spaces; a word that is too wide gets its own line."""
    lines: list[Text] = []
    for line in text.split(allow_blank=True):
        breaks, used = [], 0
        for word in WORD.finditer(line.plain):
            if used and used + cell_len(word[0].rstrip()) > width:
                breaks.append(word.start())
                used = 0
            used += cell_len(word[0])
        lines += line.divide(breaks) if breaks else [line]
    for line in lines:
        line.rstrip()
    return lines


@dataclass(frozen=True)
class Hanging:
    """A label with a text beside it, as a hanging indent; no word is broken."""

    label: Text
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, wrapped at spaces; a word wider than the terminal gets its own line."""
        margin = self.label.cell_len + 1
        for number, line in enumerate(_wrap_lines(self.text, options.max_width - margin)):
            before = Text(" " * margin) if number else Text.assemble(self.label, " ")
            yield Text.assemble(before, line, no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return at most the width of the text on one line."""
        width = min(self.label.cell_len + 1 + self.text.cell_len, options.max_width)
        return Measurement(width, width)


@dataclass(frozen=True)
class WholePaths:
    """Lays out a renderable without breaking paths, wider than the terminal if a path needs it.

    Print it uncropped. rich breaks a word that is wider than its column at any character, and then a path
    cannot be copied.
    """

    what: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render part by part: only the part with the long path gets wider."""
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
        """Return the first width at which no path is broken; None if the terminal is wide enough."""
        narrow = options.max_width
        words = self._words(console, options, VERY_WIDE)
        longest = max((len(word) for word in words if "/" in word), default=0)
        for width in range(narrow, narrow + longest + 1, WIDER):
            fragments = self._words(console, options, width) - words
            if not any(path.startswith(fragment) for fragment in fragments for path in words if "/" in path):
                return None if width == narrow else width
        return None

    def _words(self, console: Console, options: ConsoleOptions, width: int) -> set[str]:
        lines = console.render_lines(self.what, options.update(width=width), pad=False)
        return {word for line in lines for word in "".join(part.text for part in line).split()}


def render_error(trimtab_error: TrimtabError) -> RenderableType:
    """Return an error in its three parts: given, found, do."""
    return Group(
        Text.assemble(("error: ", "bold red"), escape_control(trimtab_error.given)),
        render_labelled("found", trimtab_error.found, "dim"),
        render_labelled("do", trimtab_error.cure, "green"),
    )


def render_word(word: Word) -> RenderableType:
    """Return an entry of the glossary."""
    parts: list[RenderableType] = [Text.assemble((word.name, "bold"), (f"  ({word.kind})", "dim"))]
    labels = (("what", word.what), ("cost", word.cost), ("when", word.change))
    parts += [render_labelled(label, text, "cyan") for label, text in labels if text]
    parts += [render_labelled("here", text, "cyan") for text in word.use]
    if word.see:
        parts.append(render_labelled("see", ", ".join(word.see), "dim"))
    return Group(*parts)


def render_word_list(known: dict[str, Word]) -> RenderableType:
    """Return the names of all glossary entries by kind."""
    kinds: dict[str, list[str]] = {}
    for text in known.values():
        kinds.setdefault(text.kind, []).append(text.name)
    parts = [render_labelled(kind, ", ".join(sorted(names)), "cyan") for kind, names in kinds.items()]
    return Group(Text("trimtab explain WORD, with one of:", style="bold"), *parts)


def render_device_names(rows: tuple[DeviceRow, ...]) -> Columns:
    """Return every device of the catalogue with the name for --on."""
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
        required=2,
    )


BAR = 48
"""Width of the memory bar in characters."""
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
"""Letters of the parts in the memory bar, which is readable without colour."""


def render_estimate(
    estimate: Estimate,
    details: MemoryPeaks,
    *,
    heading: str,
    help_lines: tuple[str, ...] = (),
    classes: dict[str, str] | None = None,
) -> RenderableType:
    """Return the verdict, the memory bar, the figures and the largest modules of an estimate."""
    parts: list[RenderableType] = [
        _render_verdict(estimate, heading),
        Text(),
        _render_bar(estimate),
        Text(),
        _render_figures(estimate),
    ]
    moment = f"{details.operation}, {_describe_phase(details.phase)}"
    rows = [("verdict", estimate.verdict_reason)] if estimate.verdict_reason else []
    rows += [("peak", f"{moment}: the parts above are what is live at that moment")]
    if gradients := describe_gradients(estimate):
        rows.append(("", gradients))
    if estimate.host is not None:
        rows.append(("host", describe_host(estimate.host)))
    if estimate.pipeline is not None:
        rows.append(("stages", describe_stages(estimate)))
    rows += [
        ("largest" if not index else "", f"{_format_module(name, classes or {})}  {format_bytes(size)}")
        for index, (name, size) in enumerate(details.modules)
    ]
    if estimate.mfu is not None and estimate.mfu_reference is not None:
        rows.append(("MFU", _describe_mfu(estimate.mfu, estimate.mfu_reference)))
    rows += [("help" if not index else "", line) for index, line in enumerate(help_lines)]
    rows += [("assumed" if not index else "", line) for index, line in enumerate(estimate.assumptions)]
    table = _make_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, escape(text))
    return Group(*parts, Text(), Padding(table, (0, 0, 0, 1), expand=False))


def render_largest(result: LargestValue) -> RenderableType:
    """Return the largest value that fits, its estimate, and what twice as much would need."""
    heading = f"largest {result.of} of {result.job} on {result.on} is {result.largest:,}"
    rows = [("setting", describe_setting(result.setting)), ("limit", result.limit_reason)]
    rows += [("twice", line) for line in _describe_twice(result)]
    rows += [("note", note) for note in result.notes]
    rows += [("assumed", line) for line in result.estimate.assumptions]
    table = _make_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for index, (label, text) in enumerate(rows):
        table.add_row("" if index and rows[index - 1][0] == label else label, escape(text))
    return Group(
        _render_verdict(result.estimate, heading),
        Text(),
        _render_bar(result.estimate),
        Text(),
        _render_figures(result.estimate),
        Text(),
        Padding(table, (0, 0, 0, 1), expand=False),
    )


def _describe_twice(result: LargestValue) -> Iterator[str]:
    """Yield what twice the largest value would need, then the changes that did not suffice."""
    following = result.next
    if following.change is None:
        yield f"{result.of} {following.value:,} is not possible: {following.why_not}"
    else:
        estimate = following.change.estimate
        speed = (
            "" if estimate.samples_per_s is None else f", {format_figure(estimate.samples_per_s)} samples/s"
        )
        tightly = " tightly" if _is_tight(estimate) else ""
        yield (
            f"{result.of} {following.value:,} fits{tightly} with {following.change.what}: "
            f"{format_bytes(estimate.process_bytes)}{speed}"
        )
    for tried in following.tried:
        if tried.process_bytes is None:
            yield f"not with {tried.what}: {tried.error}"
        elif following.change is None or tried.what != following.change.what:
            word = "only tightly" if tried.verdict == "fits-tight" else "not"
            yield f"{word} with {tried.what}: {format_bytes(tried.process_bytes)}"


LAYOUT_COLUMNS = (
    "dp",
    "tp",
    "cp",
    "pp",
    "ep",
    "micro",
    "accum",
    "recomp",
    "memory",
    "step",
    "tok/s/GPU",
    "MFU",
)


def render_layouts(ranking: LayoutRanking) -> RenderableType:
    """Return the fastest layouts as a table, where the best one spends its time, and what was ruled out."""
    scale, letter = (1e9, "B") if ranking.parameters >= 1e9 else (1e6, "M")  # noqa: PLR2004 - a billion
    size = f"{format_figure(ranking.parameters / scale)}{letter}"
    heading = (
        f"{ranking.job}: {size} weights, {plural(ranking.global_batch, 'sequence')} of {ranking.sequence} "
        f"tokens a step on {ranking.on}"
    )
    table = _make_table()
    for name in LAYOUT_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in ranking.rows:
        table.add_row(*_layout_cells(row))
    if ranking.data_parallel is not None and ranking.data_parallel not in ranking.rows:
        table.add_row(*_layout_cells(ranking.data_parallel))
    rows = list(_describe_layouts(ranking))
    notes = _make_table()
    notes.show_header = False
    notes.add_column(style="dim", no_wrap=True)
    notes.add_column(overflow="fold")
    for index, (label, text) in enumerate(rows):
        notes.add_row("" if index and rows[index - 1][0] == label else label, escape(text))
    return Group(Text(heading), Text(), table, Text(), Padding(notes, (0, 0, 0, 1), expand=False))


def _layout_cells(row: LayoutRow) -> list[str]:
    replicas = f"{row.dp_replicate}x" * (row.dp_replicate > 1)
    stages = f"{row.pp}" + f"x{row.virtual_stages}" * (row.virtual_stages > 1)
    return [
        f"{replicas}{row.dp_shard}",
        f"{row.tp}",
        f"{row.cp}",
        stages,
        f"{row.ep}",
        f"{row.micro_batch}",
        f"{row.accumulation}",
        row.recompute,
        format_gib(row.memory_bytes),
        f"{format_figure(row.step_s)} s",
        f"{row.tokens_per_s_per_gpu:,.0f}",
        UNKNOWN if row.mfu is None else f"{row.mfu:.0%}",
    ]


def _describe_layouts(ranking: LayoutRanking) -> Iterator[tuple[str, str]]:
    """Yield labelled notes on the best layout and on the search."""
    best = ranking.rows[0]
    fastest = min(ranking.rows, key=lambda row: row.step_s)
    if fastest is not best:
        more = best.step_s / fastest.step_s - 1
        yield (
            "choice",
            f"the first row is {more:.1%} slower than the fastest, and splits the model in fewer ways",
        )
    parts = {name: seconds for name, seconds in best.times.items() if seconds >= 0.005 * best.step_s}
    yield "time", ", ".join(f"{name} {seconds / best.step_s:.0%}" for name, seconds in parts.items())
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in best.memory.items() if size)
    stage = f" (stage {best.fullest_stage + 1} of {best.pp})" if best.pp > 1 else ""
    yield "memory", f"fullest rank{stage}: {kinds}"
    ruled_out = [f"{reason} ({count:,})" for reason, count in ranking.ruled_out.items()]
    yield "search", f"{ranking.examined:,} layouts; ruled out: {', '.join(ruled_out) or 'none'}"
    if ranking.data_parallel is None and not ranking.is_pinned:
        yield "search", "no layout of data parallelism alone fits"
    for line in ranking.assumptions:
        yield "assumed", line


FACT_LABELS = {
    "micro_batch": "micro-batch",
    "micro_batches_seen": "micro-batches",
    "global_batch": "global batch",
    "longest_possible": "longest",
    "gpus": "GPUs",
    "tensor_parallel": "tensor parallel",
}
"""Names of facts for people, where they differ from the JSON."""


def render_script(found: ScriptEstimate, *, help_lines: tuple[str, ...] = ()) -> RenderableType:
    """Return the estimate of a training command, what was found out about it, and its phases."""
    setting = found.setting
    heading = f"{found.script.command} on {found.device.name}, micro-batch {setting.micro_batch}"
    facts = _make_table()
    facts.show_header = False
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold", style="dim")
    for fact in found.script.found:
        facts.add_row(FACT_LABELS.get(fact.name, fact.name), escape(fact.value), escape(fact.where))
    phases = _make_table()
    for title, justify in (("phase", "left"), ("allocated", "right"), ("reserved", "right")):
        phases.add_column(title, justify=justify, header_style="dim", no_wrap=True)  # type: ignore[arg-type]
    for phase in found.phases:
        phases.add_row(phase.name, format_bytes(phase.allocated_bytes), format_bytes(phase.reserved_bytes))
    notes = [render_labelled(phase.name, phase.note, "dim") for phase in found.phases if phase.note]
    lines = [shorten_path(line) for line in found.script.writes[:MOST_WRITES]]
    writes: list[RenderableType] = [Text(f" not written: {line}", style="dim") for line in lines]
    if len(found.script.writes) > MOST_WRITES:
        more = len(found.script.writes) - MOST_WRITES
        writes.append(Text(f" not written: {more} more, which --json lists", style="dim"))
    if found.script.is_cached:
        cached = "the same command, files and versions were followed before; --no-cache follows it again"
        writes.append(render_labelled("from the cache", cached, "dim"))
    return Group(
        render_estimate(found.estimate, found.peaks, heading=heading, help_lines=help_lines),
        Text(),
        Padding(facts, (0, 0, 0, 1), expand=False),
        Text(),
        Padding(phases, (0, 0, 0, 1), expand=False),
        *notes,
        *writes,
    )


def shorten_path(line: str) -> str:
    """Return a line that begins with a path; of a long path, the folders in the middle are left out.

    >>> shorten_path("~/.cache/huggingface/datasets/json/default-bbdd3119/0.0.0/d78d5935/a.arrow (1 MiB)")
    '~/.cache/huggingface/.../a.arrow (1 MiB)'
    """
    path, gap, rest = line.partition(" (")
    parts = path.split("/")
    is_folder = path.endswith("/")
    if len(path) > LONG_PATH and len(parts) > LONG_PATH_PARTS + is_folder:
        path = "/".join([*parts[:3], "...", *parts[-1 - is_folder :]])
    return path + gap + rest


def describe_host(host: HostMemory) -> str:
    """Return the host memory of a job that offloads, in words."""
    capacity = "" if host.capacity_bytes is None else f" of {format_bytes(host.capacity_bytes)}"
    return (
        f"{format_bytes(host.node_bytes)}{capacity} per node; {format_bytes(host.rank_bytes)} "
        f"per process, of them pinned {format_bytes(host.pinned_bytes)}"
        f"{f', and {format_bytes(host.checkpoint_bytes)} for a checkpoint' if host.checkpoint_bytes else ''}"
    )


def describe_stages(estimate: Estimate) -> str:
    """Return the layers of each pipeline stage, the fullest rank, and what the step loses by waiting.

    >>> from trimtab.spec import Band, Estimate, Footprint, PipelineEstimate, StepTime
    >>> sizes = dict.fromkeys(("allocated_bytes", "reserved_bytes", "process_bytes"), 0)
    >>> stages = PipelineEstimate(layers=(4, 4, 4, 3), held_micro_batches=(3.5, 2.5), bubble_share=0.1,
    ...     first_outside=9_000_000, last_outside=8_000_000)
    >>> time = StepTime(compute_s=0.8, communication_s=0.1, bubble_s=0.1)
    >>> print(describe_stages(Estimate(**sizes, parts=Footprint(), band=Band(low_bytes=0, high_bytes=0),
    ...     pipeline=stages, fullest_rank="stage 1 of 2", step_s=1.0, step_time=time,
    ... )))  # doctest: +NORMALIZE_WHITESPACE
    layers 4 4 4 3 on 2 ranks; parameters outside of the layers: 9,000,000 on the first, 8,000,000 on the
    last; stage 1 of 2 is fullest, with 3.5 micro-batches; bubble 10%, exposed sends 10%
    """
    stages = estimate.pipeline
    if stages is None:
        return ""
    ranks = len(stages.held_micro_batches)
    words = [f"layers {' '.join(map(str, stages.layers))} on {ranks} ranks"]
    if stages.first_outside is not None and stages.last_outside is not None:
        words.append(
            f"parameters outside of the layers: {stages.first_outside:,} on the first, "
            f"{stages.last_outside:,} on the last"
        )
    if estimate.fullest_rank:
        is_last = estimate.fullest_rank.startswith(f"stage {ranks} ")
        count = stages.held_micro_batches[-1 if is_last else 0]
        words.append(f"{estimate.fullest_rank} is fullest, with {count:g} micro-batches")
    if stages.bubble_share is not None and estimate.step_time is not None and estimate.step_s:
        sent = estimate.step_time.communication_s / estimate.step_s
        words.append(f"bubble {stages.bubble_share:.0%}, exposed sends {sent:.0%}")
    return "; ".join(words)


def describe_gradients(estimate: Estimate) -> str:
    """Return the memory of gradients if it is larger at other times than at the peak; else empty."""
    if estimate.gradients_bytes is None or estimate.gradients_bytes <= estimate.parts.gradients:
        return ""
    then, most = format_bytes(estimate.parts.gradients), format_bytes(estimate.gradients_bytes)
    if then == most:
        return ""
    return f"gradients: {then} at the peak, up to {most} at other times"


def _describe_mfu(mfu: float, usual: MfuReference) -> str:
    """Return an MFU compared with published runs.

    >>> from trimtab.spec import MfuReference
    >>> _describe_mfu(0.28, MfuReference(low=0.36, high=0.46, model="transformer", figures="X, 48 runs"))
    '28% is below the 36 to 46% of well-tuned large transformers on such GPUs (X, 48 runs)'
    """
    place = "below" if mfu < usual.low else "above" if mfu > usual.high else "within"
    span = f"{usual.low * 100:.0f} to {usual.high:.0%}"
    return (
        f"{mfu:.0%} is {place} the {span} of well-tuned large {usual.model}s on such GPUs ({usual.figures})"
    )


def _format_module(name: str, classes: dict[str, str]) -> str:
    """Return the name of a module, with its class if the name is only a number.

    >>> _format_module("0", {"0": "Linear"}), _format_module("h.0.mlp", {})
    ('0 (Linear)', 'h.0.mlp')
    """
    return f"{name} ({classes[name]})" if name in classes else name


def _render_verdict(estimate: Estimate, heading: str) -> Text:
    if estimate.capacity_bytes is None or estimate.fits is None:
        return Text.assemble((heading, "bold"), f": {format_bytes(estimate.process_bytes)}")
    share = estimate.process_bytes / estimate.capacity_bytes
    need = f"{format_bytes(estimate.process_bytes)} of {format_bytes(estimate.capacity_bytes)} ({share:.0%})"
    word, style = ("fits", "bold green") if estimate.fits else ("does not fit", "bold red")
    if _is_tight(estimate):
        word, style = "fits tightly", "bold yellow"
    return Text.assemble((heading, "bold"), ": ", (word, style), f", {need}")


def _is_tight(estimate: Estimate) -> bool:
    """Whether it fits only because torch releases cached blocks."""
    return estimate.verdict is not None and estimate.verdict.value == "fits-tight"


def _describe_phase(phase: str) -> str:
    return f"step {int(phase.removeprefix('step')) + 1}" if phase.startswith("step") else phase


def _render_bar(estimate: Estimate) -> Text:
    """Return the bar of the parts at the peak, then what the allocator reserves beyond them."""
    total = max(estimate.capacity_bytes or 0, estimate.process_bytes)
    text = Text(" ")
    sizes = {name: getattr(estimate.parts, name) for name in estimate.parts.__struct_fields__}
    sizes["held"] = max(0, estimate.reserved_bytes - estimate.allocated_bytes)
    drawn = 0.0
    printed = 0
    for name, size in sizes.items():
        drawn += size / total * BAR
        count = max(0, round(min(drawn, BAR)) - printed)
        printed += count
        text.append(LETTERS.get(name, "-") * count, style=PART_COLOURS.get(name, "dim"))
    return text.append("." * max(0, BAR - printed), style="dim")


def _render_figures(estimate: Estimate) -> Table:
    table = _make_table()
    table.show_header = False
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    sizes = [(name, getattr(estimate.parts, name)) for name in estimate.parts.__struct_fields__]
    left = [(f" {LETTERS[name]} {name}", format_bytes(size)) for name, size in sizes]
    low, high = format_bytes(estimate.band.low_bytes), format_bytes(estimate.band.high_bytes)
    # If both have the same unit, print it once.
    band = f"{low.removesuffix(high[-4:])} to {high}"
    right = [
        ("allocated", format_bytes(estimate.allocated_bytes, digits=2)),
        ("reserved", format_bytes(estimate.reserved_bytes, digits=2)),
        ("process", format_bytes(estimate.process_bytes, digits=2)),
        ("band", band),
        *_list_speed_rows(estimate),
    ]
    for index, (name, size) in enumerate(left):
        label, value = right[index] if index < len(right) else ("", "")
        table.add_row(name, size, f"   {label}", value)
    return table


def _list_speed_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """Return the rows of step time, samples per second and MFU, if known."""
    if estimate.step_s is None or estimate.samples_per_s is None:
        return []
    rows = [("step", format_duration(estimate.step_s)), ("samples/s", f"{estimate.samples_per_s:,.1f}")]
    if estimate.mfu is not None:
        rated = f", {estimate.mfu_rating}" if estimate.mfu_rating else ""
        rows.append(("MFU", f"{estimate.mfu:.0%}{rated}"))
    return rows


def render_exam(result: ExamResult) -> RenderableType:
    """Return every exam case with its errors, and the summary."""
    table = _make_table()
    table.add_column("case", header_style="dim", overflow="fold")
    for name in ("allocated", "error", "reserved", "process", "step", "error"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for case in result.cases:
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
    lines = [_render_exam_summary(result, figure) for figure in result.median]
    failures = [render_labelled(case.case, case.failed, "red") for case in result.cases if case.failed]
    return Group(table, Text(), *lines, *failures)


def render_outside(result: OutsideResult) -> RenderableType:
    """Return the errors against other people's measurements by source, and what was not replayed."""
    table = _make_table()
    table.add_column("source", header_style="dim")
    table.add_column("figure", header_style="dim")
    for name in ("rows", "mean", "median", "worst"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    table.add_column("its own", header_style="dim")
    previous = ""
    for score in result.scores:
        name = "" if score.source == previous else score.source
        previous = score.source
        if score.mean is None or score.median is None or score.worst is None:
            figures = [f"{score.right} right", "", ""]
        else:
            figures = [f"{score.mean:.1%}", f"{score.median:+.1%}", f"{score.worst:.0%}"]
        table.add_row(name, score.figure, str(score.rows), *figures, score.rival.rpartition(" ")[2])
    numbers = [(name, *pair) for name, values in result.fitted.items() for pair in values.items()]
    fitted = [f"{name} {word} {value:g}" for name, word, value in numbers]
    lines = [
        render_labelled("replayed", f"{result.replayed:,} of {result.rows:,} rows", "dim"),
        render_labelled("fitted", ", ".join(fitted) or "nothing", "dim"),
    ]
    if result.jobs:
        alarms = f"{result.false_alarms} of those that ran are predicted not to fit"
        lines.append(render_labelled("as jobs", f"{result.jobs} rows; {alarms}", "dim"))
    checks = [
        f"{score.source} {score.figure} {score.check_mean:.1%} ({score.check_rows})"
        for score in result.scores
        if score.check_mean is not None
    ]
    if checks:
        text = f"mean error of rows that no rule was made with: {', '.join(checks)}"
        lines.append(render_labelled("check", text, "dim"))
    if result.unscored:
        counts = ", ".join(f"{name} {count}" for name, count in result.unscored.items())
        lines.append(
            render_labelled("unscored", f"memory whose kind the source does not state: {counts}", "dim")
        )
    for name, reasons in result.left_out.items():
        text = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
        lines.append(render_labelled("left out", f"{name}: {text}", "dim"))
    return Group(table, Text(), *lines)


def _render_exam_summary(result: ExamResult, figure: str) -> Text:
    name = figure.removesuffix("_bytes").removesuffix("_s")
    return Text(
        f"{name:10} median error {result.median[figure]:.2%}, worst {result.worst[figure]:.2%}, "
        f"largest underestimate {min(0.0, result.lowest[figure]):.2%}"
    )


def render_profile(report: dict[str, Any], *, heading: str) -> RenderableType:
    """Return predicted and measured figures of a profile, or that it ran out of memory."""
    title = Text(heading, style="bold")
    if report["run"]["out_of_memory"]:
        return Group(title, render_labelled("out of memory", report["run"]["out_of_memory"], "red"))
    table = _make_table()
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="right" if name else "left", header_style="dim")
    for figure, measured in report["measured"].items():
        if measured is None:
            continue
        guess, error = report["predicted"][figure], report["error"][figure]
        shown = format_duration if figure.endswith("_s") else format_bytes
        table.add_row(
            f" {figure.rpartition('_')[0]}",
            UNKNOWN if guess is None else shown(guess),
            shown(measured),
            UNKNOWN if error is None else f"{error:+.2%}",
        )
    return Group(title, table)


def render_calibration(calibration: Calibration, file: Path) -> RenderableType:
    """Return the best measured rates by dtype, and the host's time per operation."""
    table = _make_table()
    for name in ("", "best", "at"):
        table.add_column(name, justify="right" if name == "best" else "left", header_style="dim")
    pairs = list(zip(calibration.works, calibration.seconds, strict=True))
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        products = [pair for pair in pairs if pair[0].kind == "matrix" and pair[0].dtype == dtype]
        rated = [(work.flops / seconds, work) for work, seconds in products]
        if rated:
            rate, work = max(rated, key=lambda row: row[0])
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
    for name, rate in calibration.copy_bytes_per_s.items():
        table.add_row(f" copies {name.replace('_', ' ')}", f"{rate / 1e9:.0f} GB/s", "256 MiB, pinned")
    if "forward_s" in calibration.host:
        table.add_row(
            " one operation, on the host", f"{calibration.host['forward_s'] * 1e6:.1f} us", "64 numbers"
        )
    title = Text(f"{calibration.device}: {len(calibration.works)} operations measured", style="bold")
    left = [Text(f" left out: {text}", style="dim") for text in calibration.left_out]
    kept = f" kept in {file}\n to share it, send that file: `trimtab calibrate --import FILE` takes it"
    return Group(title, table, *left, Text(kept))


def render_calibrations(stored: list[dict[str, Any]]) -> RenderableType:
    """Return the stored calibrations by name: device, size, whose they are and whether they are used."""
    if not stored:
        return Text("no calibration is stored; the H200's comes with trimtab, and other GPUs follow from it")
    lines: list[RenderableType] = []
    for entry in stored:
        lines.append(Text(entry["name"], style="bold"))
        if entry["device"] is not None:
            count = f"{entry['operations']} operations, {entry['collectives']} collectives"
            lines.append(Text(f"  {entry['device']}: {count}, taken on {entry['taken_on']}"))
            lines.append(Text(f"  from {entry['from']}"))
        lines.append(Text(f"  {entry['use']}", style="dim"))
    return Group(*lines)


def render_links(calibration: Calibration, file: Path) -> RenderableType:
    """Return latency and bandwidth of each measured collective."""
    table = _make_table()
    for name in ("", "ranks", "nodes", "latency", "bandwidth"):
        table.add_column(name, justify="right" if name else "left", header_style="dim")
    for times in calibration.collectives:
        table.add_row(
            f" {times.collective.replace('_', '-')}",
            str(times.ranks),
            str(times.nodes),
            f"{times.latency_s * 1e6:.1f} us",
            f"{times.bytes_per_s / 1e9:.3g} GB/s",
        )
    backend = calibration.collectives[0].backend if calibration.collectives else "nothing"
    title = Text(f"{calibration.device}: links measured with {backend}", style="bold")
    use = Text(f" for another machine's plans: --network {file}", style="dim")
    return Group(title, table, Text(f" kept in {file}"), use)


MOST_REJECTED = 10
"""Causes to list; the others are only counted."""


STOPPED = "the search was stopped before it ended; something better may exist"


COMMAND_WIDTH = 76
"""A longer command line is printed on several lines."""


NOT_TRACED = "time and memory follow from the sizes of the model; no step was traced"
CUT_SHORT = (
    "tracing took too long on this machine, so not all layouts were traced; plan again while it is less busy"
)


def render_plan(plan: Plan) -> RenderableType:
    """Return the recommendation, the memory, every choice with its reason, and the alternatives."""
    parts: list[RenderableType] = [
        Text.assemble(
            (escape_control(_format_plan_name(plan)), "bold"), f": {describe_setting(plan.choice)}"
        ),
        Text(),
        *_render_command(plan),
        *([] if plan.complete else [render_labelled("best so far", STOPPED, "yellow"), Text()]),
        *([render_labelled("by formulas", NOT_TRACED, "yellow"), Text()] if plan.by_formulas else []),
        *([render_labelled("cut short", CUT_SHORT, "yellow"), Text()] if plan.is_cut_short else []),
        Padding(Text(escape_control(plan.recommendation), style="green"), (0, 0, 0, 1)),
        Text(),
        _render_bar(plan.estimate),
        Padding(Text(_describe_headroom(plan)), (0, 0, 0, 1)),
        *(
            []
            if plan.estimate.host is None
            else [Padding(Text(f"host memory: {describe_host(plan.estimate.host)}"), (0, 0, 0, 1))]
        ),
        *(
            []
            if plan.estimate.pipeline is None
            else [Padding(Text(f"stages: {describe_stages(plan.estimate)}"), (0, 0, 0, 1))]
        ),
        Text(),
        Padding(_render_reasons(plan), (0, 0, 0, 1), expand=False),
    ]
    for heading, table in (
        ("GPUs side by side", _render_comparison(plan)),
        ("what if", _render_what_ifs(plan)),
        ("runners-up", _render_runners_up(plan)),
    ):
        if table is not None:
            parts += [Text(), Text(f" {heading}", style="bold"), Padding(table, (0, 0, 0, 1), expand=False)]
        if heading == "what if":
            parts += [
                render_labelled(what_if.change, what_if.why, "dim")
                for what_if in plan.what_if
                if _needs_explanation(what_if)
            ]
    if plan.rejected or plan.script is None:
        parts += [
            Text(),
            Text(" rejected", style="bold"),
            Padding(_render_rejected(plan), (0, 0, 0, 1), expand=False),
        ]
    if plan.script is not None:
        parts += [Text(), *(render_labelled("note", line, "yellow") for line in plan.script.notes)]
    parts += [render_labelled("assumed", line, "dim") for line in plan.estimate.assumptions]
    parts += [render_labelled("left out", line, "dim") for line in plan.left_out]
    return Group(*parts)


def render_staged_plan(staged_plan: StagedPlan) -> RenderableType:
    """Return one line per stage, and the total time."""
    first = staged_plan.stages[0].plan
    table = _make_table()
    for heading in ("stage", "batch", "how", "memory", "step", "epochs", "rate", "time"):
        table.add_column(heading, justify="left" if heading in ("stage", "how") else "right")
    for stage in staged_plan.stages:
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
    total = "" if staged_plan.hours is None else f", {format_duration(staged_plan.hours * 3600)} in all"
    return Group(
        Text.assemble(
            (escape_control(_format_plan_name(first)), "bold"), f": {len(staged_plan.stages)} stages{total}"
        ),
        Text(),
        Padding(table, (0, 0, 0, 1), expand=False),
        Text(),
        Padding(Text(f"global batch {staged_plan.global_batch} in every stage, exactly"), (0, 0, 0, 1)),
    )


def _render_command(plan: Plan) -> list[RenderableType]:
    """Return the command line of a plan, as a shell takes it, and what differs from the given one."""
    if plan.script is None:
        return []
    from trimtab.launching.quoting import shell_line

    line = plan.script.command
    if len(line) > COMMAND_WIDTH:
        line = shell_line(plan.script.words)
    changes = [render_labelled("changed", change, "dim") for change in plan.script.changes]
    in_files = [change for change in plan.script.edits if change.file]
    only_there = [change for change in in_files if change.form == "config"]
    first: list[RenderableType] = []
    if only_there:
        rows = [Text(f"   {escape_control(change.text)}", style="bold green") for change in only_there]
        how = render_labelled("write it", "trimtab apply PLAN, for a plan from --out", "dim")
        first = [Text(" change this", style="bold"), *rows, how, Text()]
        known = {change.text for change in only_there}
        changes = [
            render_labelled("changed", change, "dim") for change in plan.script.changes if change not in known
        ]
    elif in_files:
        texts = "; ".join(change.text for change in in_files)
        changes.append(render_labelled("or in files", f"{texts} (trimtab apply writes it)", "dim"))
    return [
        *first,
        Text(" type this", style="bold"),
        *(Text(f"   {escape_control(part)}", style="bold green") for part in line.split("\n")),
        *changes,
        Text(),
    ]


def _format_plan_name(plan: Plan) -> str:
    from trimtab.planner.plan_files import describe_places

    if plan.script is not None:
        return f"training command on {describe_places(plan.places)}"
    name = plan.workload.name if plan.workload else plan.job
    return f"{name} on {describe_places(plan.places)}"


def describe_setting(setting: Setting) -> str:
    """Return a setting in one line.

    >>> from trimtab.spec import Setting
    >>> describe_setting(Setting(micro_batch=8, accumulation=2, global_batch=16))
    '1 GPU, single, micro-batch 8 x 2, fp32'
    """
    words = [
        plural(setting.gpus, "GPU"),
        _describe_spread(setting),
        f"micro-batch {setting.micro_batch} x {setting.accumulation}",
        setting.precision.value,
        f"base {setting.base.value}" * setting.base.storage.is_quantized,
        "" if setting.recompute.value == "none" else f"recompute {setting.recompute.value}",
        "" if setting.loss.value == "whole" else f"loss {setting.loss.value}",
        f"offload {'+'.join(setting.offload)}" * bool(setting.offload),
        f"optimizer {setting.optimizer_rule.value}" * bool(setting.optimizer_rule.stored.place),
        "optimizer in backward" * setting.optimizer_in_backward,
        "compiled" * setting.compile,
        f"schedule {setting.schedule.value}"
        * (setting.schedule.splits_backward or setting.virtual_stages > 1),
        f"{setting.virtual_stages} virtual stages" * (setting.virtual_stages > 1),
        "synchronised BatchNorm" * (setting.sync_batchnorm and setting.gpus > 1),
        "shares by speed" * bool(setting.shares),
    ]
    return ", ".join(word for word in words if word)


def _describe_spread(setting: Setting) -> str:
    """Return the strategy, with the degrees that split the model beyond it.

    >>> from trimtab.spec import Mesh, Setting, Strategy
    >>> mesh = Mesh(dp_replicate=2, dp_shard=8, tp=4, pp=2)
    >>> _describe_spread(
    ...     Setting(strategy=Strategy.HSDP, mesh=mesh, micro_batch=1, accumulation=1, global_batch=16)
    ... )
    'hsdp 2 x 8 x tp 4 x pp 2'
    >>> _describe_spread(
    ...     Setting(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=8, ep=4), micro_batch=1, global_batch=8)
    ... )
    'fsdp 8 with ep 4'
    """
    from trimtab.strategies import strategy_of

    mesh = setting.mesh
    degrees = {axis: getattr(mesh, axis) for axis in ("cp", "tp", "pp")}
    if strategy_of(setting).has_schedule:
        return strategy_of(setting).describe(mesh)
    if max(mesh.ep, *degrees.values()) == 1:
        return setting.strategy.value
    ranks = [str(count) for count in (mesh.dp_replicate, mesh.dp_shard) if count > 1]
    split = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    # Experts are on ranks that have been counted.
    experts = f" with ep {mesh.ep}" * (mesh.ep > 1)
    return f"{setting.strategy} " + " x ".join([*(ranks or ["1"]), *split]) + experts


def _describe_headroom(plan: Plan) -> str:
    """Return the memory of the fullest GPU and the limit."""
    estimate = plan.estimate
    capacity = estimate.capacity_bytes or estimate.process_bytes
    most = plan.policy.memory_share * capacity
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


def _render_reasons(plan: Plan) -> Table:
    table = _make_words_table("left", "left", "left")
    for reason in plan.reasons:
        table.add_row(_escape_cell(reason.subject), _escape_cell(reason.value), _escape_cell(reason.why))
    return table


def _render_comparison(plan: Plan) -> Columns | None:
    """Return one line per GPU count, without columns that are all unknown."""
    if not plan.comparison:
        return None
    return _make_columns(
        (
            ("GPUs", lambda row: str(row.gpus)),
            ("how", lambda row: _format_setting_briefly(row.setting) if row.setting else row.why),
            ("GiB", lambda row: row.estimate and format_gib(row.estimate.process_bytes)),
            ("samples/s", lambda row: row.estimate and _format_figure(row.estimate.samples_per_s)),
            ("epoch", lambda row: None if row.epoch_s is None else format_duration(row.epoch_s)),
            ("total", lambda row: _format_hours(row.estimate)),
            ("GPU-h", lambda row: row.estimate and _format_figure(row.estimate.gpu_hours)),
            ("cost", lambda row: None if row.cost is None else f"{row.cost:,.2f}"),
            ("in time", lambda row: _format_bool(row.meets_deadline)),
            ("unused", _format_unused),
            (
                "scaling",
                lambda row: None if row.scaling_efficiency is None else f"{row.scaling_efficiency:.0%}",
            ),
        ),
        plan.comparison,
        "how",
    )


def _format_unused(comparison: Comparison) -> str | None:
    """Return the number of unused GPUs in words, not to confuse it with free memory."""
    if comparison.free_share is None or comparison.free_share >= 1:
        return None
    count = round(comparison.gpus * comparison.free_share / (1 - comparison.free_share))
    return plural(count, "GPU")


def _render_what_ifs(plan: Plan) -> Columns | None:
    if not plan.what_if:
        return None
    return _make_columns(
        (
            ("change", lambda row: row.change),
            ("GPUs", lambda row: str(row.gpus)),
            ("how", lambda row: _format_setting(row.setting) if row.setting else None),
            ("total", lambda row: _format_hours(row.estimate)),
            ("samples/s", lambda row: row.estimate and _format_figure(row.estimate.samples_per_s)),
            ("GPU-h", lambda row: row.estimate and _format_figure(row.estimate.gpu_hours)),
            ("cost", lambda row: None if row.cost is None else f"{row.cost:,.2f}"),
            ("in time", lambda row: _format_bool(row.meets_deadline)),
        ),
        plan.what_if,
        "how",
    )


def _needs_explanation(what_if: WhatIf) -> bool:
    """Whether a row has no setting or has dropped a pin, so that a line below says why."""
    return what_if.setting is None or bool(what_if.unpinned) or "--pin" in what_if.change


def _render_runners_up(plan: Plan) -> Columns | None:
    if not plan.runners_up:
        return None
    return _make_columns(
        (
            ("how", lambda row: describe_setting(row.setting)),
            ("GiB", lambda row: format_gib(row.estimate.process_bytes)),
            ("samples/s", lambda row: _format_figure(row.estimate.samples_per_s)),
            ("why not", lambda row: row.why),
        ),
        plan.runners_up,
        "how",
        left=("how", "why not"),
    )


def _make_columns(
    columns: tuple[tuple[str, Any], ...], rows: tuple[Any, ...], folds: str, left: tuple[str, ...] = ()
) -> Columns:
    """Return a table without columns that are all unknown."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    used = [
        index for index, (name, _) in enumerate(columns) if name == folds or any(row[index] for row in cells)
    ]
    headings = tuple(columns[index][0] for index in used)
    return Columns(
        headings=headings,
        rows=tuple(tuple(escape_control(row[index] or UNKNOWN) for index in used) for row in cells),
        left=left or (folds, "change"),
        folds=folds,
        narrowest=10,
        required=min(4, len(headings)),
    )


def _format_setting(setting: Setting) -> str:
    """Return a setting without the number of GPUs, which has its own column."""
    return describe_setting(setting).partition(", ")[2].replace("micro-batch ", "")


def _format_setting_briefly(setting: Setting) -> str:
    """Return strategy, micro-batch, accumulation and recompute mode."""
    again = "" if setting.recompute.value == "none" else f" {setting.recompute.value}"
    return f"{setting.strategy} {setting.micro_batch}x{setting.accumulation}{again}"


def _format_figure(value: float | None) -> str | None:
    return None if value is None else format_figure(value)


def _format_hours(estimate: Estimate | None) -> str | None:
    return None if estimate is None or estimate.hours is None else format_duration(estimate.hours * 3600)


def _format_bool(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _render_rejected(plan: Plan) -> Table:
    """Return the causes of most rejections in their order, with the number of settings of each."""
    table = _make_words_table("right", "left")
    by_count = sorted(range(len(plan.rejected)), key=lambda place: -plan.rejected[place].count)
    shown, rest = sorted(by_count[:MOST_REJECTED]), by_count[MOST_REJECTED:]
    for place in shown:
        rejection = plan.rejected[place]
        table.add_row(f"{rejection.count:,}", _escape_cell(rejection.why))
    if rest:
        table.add_row(
            f"{sum(plan.rejected[place].count for place in rest):,}",
            f"for {len(rest)} other causes; --json has them all",
        )
    return table
