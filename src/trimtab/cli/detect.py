"""The commands `trimtab detect` and `trimtab explain`."""

from __future__ import annotations

import json as json_text
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab import api, render
from trimtab.cli.completion import complete_devices, complete_words
from trimtab.cli.console import Json, print_json, print_text
from trimtab.errors import UnknownName, WrongUse, shorten
from trimtab.spec import DevicesOutput, WordNames

if TYPE_CHECKING:
    from trimtab.catalog.glossary import Word
    from trimtab.spec import Cluster


def detect(  # noqa: PLR0913, PLR0917 - each is an option
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            autocompletion=complete_devices,
            help="Describe these devices instead of this machine: H200, 4xA100-40GB, 2x8xH100, "
            "2xRTX3090+1xRTX4090, or a file from `trimtab detect --json`.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH",
            help="State the network between nodes: 400Gb/gpu, 8x400Gb/node, 400Gb/gpu,latency=5us,rails=yes.",
        ),
    ] = None,
    json: Json = False,
    sources: Annotated[bool, typer.Option(help="Also say where each fact comes from.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List every device name that trimtab knows.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save all that detection read from this machine to a file, for a bug report.",
        ),
    ] = None,
) -> None:
    """Show the hardware that this process may use.

    As the scheduler, cgroups, CUDA_VISIBLE_DEVICES and MIG leave it. Exit code 5 when it is not in order.
    """
    _refuse_together({"--on": on is not None, "--list": names, "--record": record is not None})
    if names:
        from trimtab.catalog.devices import row_facts
        from trimtab.catalog.tables import devices

        if json:
            print_json(DevicesOutput(devices=tuple(map(row_facts, devices()))).to_builtins())
        else:
            print_text(render.render_device_names(devices()))
        return
    cluster = _look(on, record)
    if network is not None:
        cluster = api.stated_network(cluster, network)
    if json:
        print_json(cluster.to_builtins())
    else:
        heading = "This machine" if on is None else f"--on {shorten(on)}"
        print_text(render.render_cluster(cluster, heading=heading))
        if sources:
            print_text("")
            print_text(render.render_sources(cluster))
    for finding in cluster.findings:
        print_text(render.render_finding(finding), errors=True)
    if any(finding.severity.value == "error" for finding in cluster.findings):
        raise typer.Exit(5)


def _refuse_together(options: dict[str, bool]) -> None:
    """Raise if more than one of these options is set."""
    given = [option for option, is_set in options.items() if is_set]
    if len(given) > 1:
        raise WrongUse(
            " with ".join(given),
            found="--on describes other hardware, --record looks at this machine, --list shows the catalogue",
            cure="Give one of them.",
        )


def _look(on: str | None, record: Path | None) -> Cluster:
    if on is not None:
        return api.cluster(on)
    if record is None:
        return api.detect()
    from trimtab.probe.detect import detect as look
    from trimtab.probe.machine import record_machine, this_machine

    world, notes = record_machine(this_machine())
    found = look(world)
    try:
        record.write_text(json_text.dumps(notes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise WrongUse(
            f"--record {record}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
    return found


def explain(
    word: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD]...",
            autocompletion=complete_words,
            help="A knob, strategy, term, error or finding, in one or more words; none lists all.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain a knob, strategy, term, error or finding."""
    if not word:
        known = api.all_words()
        if json:
            print_json(WordNames(words=tuple(sorted(known))).to_builtins())
        else:
            print_text(render.render_word_list(known))
        return
    entries = _entries(word)
    if json and len(entries) > 1:
        from trimtab.catalog.glossary import ExplainedWords

        text = "\n".join(entry.text for entry in entries)
        print_json(ExplainedWords(text=text, words=tuple(entries)).to_builtins())
    elif json:
        print_json(entries[0].to_builtins())
    else:
        for number, entry in enumerate(entries):
            if number:
                print_text("")
            print_text(render.render_word(entry))


def _entries(typed: list[str]) -> list[Word]:
    """Return the entry of all words together, as in `flash attention`, or else of each word."""
    try:
        return [api.explain(" ".join(typed))]
    except UnknownName:
        if len(typed) == 1:
            raise
        try:
            return [api.explain(word) for word in typed]
        except UnknownName:
            pass
        raise
