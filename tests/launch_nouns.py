"""Strategies that build the nouns of launches, valid by construction."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trimtab import spec
from trimtab.launching.defaults import LaunchDefaults
from trimtab.launching.job_spec import JobSpec
from trimtab.launching.request import LaunchOrder
from trimtab.launching.resources import Resources
from trimtab.launching.slurm import Partition, SlurmCluster, SlurmNode

words = st.text(min_size=1, max_size=12)
one_line = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1, max_size=12)
few = st.integers(min_value=1, max_value=64)
maybe_line = st.none() | one_line


@st.composite
def launches(draw: st.DrawFn) -> spec.Launch:
    environment = draw(st.dictionaries(words, words, max_size=3))
    script = draw(st.none() | words)
    return spec.Launch(
        kind=draw(st.sampled_from(spec.LaunchKind)),
        command=tuple(draw(st.lists(words, min_size=1, max_size=3))),
        environment=environment,
        why={name: draw(words) for name in environment},
        script=script,
        script_file=None if script is None else draw(words),
        files=draw(st.dictionaries(words, words, max_size=2)),
        starts=tuple(draw(st.lists(words, max_size=2))),
        out=draw(st.none() | words),
        notes=tuple(draw(st.lists(words, max_size=2))),
        job_id=draw(st.none() | words),
    )


@st.composite
def needs(draw: st.DrawFn) -> Resources:
    nodes, procs = draw(few), draw(few)
    return Resources(
        nodes=nodes,
        least_nodes=draw(st.integers(min_value=1, max_value=nodes)),
        procs=procs,
        gpus=draw(st.sampled_from([0, procs])),
        devices=tuple(draw(st.lists(words, max_size=2))),
        cpus=draw(few),
        memory_bytes=draw(few),
        seconds=draw(st.none() | st.floats(min_value=0, max_value=1e9)),
    )


habits = st.builds(
    LaunchDefaults,
    modules=st.lists(one_line, max_size=2).map(tuple),
    activate=one_line,
    partition=maybe_line,
    account=maybe_line,
    qos=maybe_line,
    time=maybe_line,
    sbatch=st.lists(one_line.map(lambda text: f"--{text}"), max_size=2).map(tuple),
    lines=st.lists(one_line, max_size=2).map(tuple),
    environment=st.dictionaries(one_line, one_line, max_size=2),
    offline=st.booleans(),
    image=maybe_line,
    namespace=maybe_line,
    claim=maybe_line,
    mount=one_line,
    runtime=one_line,
)
site_nodes = st.builds(
    SlurmNode,
    name=words,
    gpus=st.dictionaries(words, few, max_size=2),
    cpus=st.none() | few,
    memory_bytes=st.none() | few,
    state=words,
)
partitions = st.builds(
    Partition,
    name=words,
    is_default=st.booleans(),
    is_up=st.booleans(),
    limit_s=st.none() | st.floats(min_value=0, max_value=1e9),
    nodes=st.lists(site_nodes, max_size=2).map(tuple),
)
sites = st.builds(
    SlurmCluster,
    partitions=st.lists(partitions, min_size=1, max_size=2).map(tuple),
    counts_gpus=st.booleans(),
)
orders = st.builds(
    LaunchOrder,
    kind=st.sampled_from(spec.LaunchKind),
    nodes=st.none() | words,
    rendezvous=st.none() | words,
    restarts=st.none() | few,
    out=st.none() | words,
    steps=st.none() | few,
    time=st.none() | words,
    script=st.none() | words,
    extra=st.lists(words, max_size=2).map(tuple),
    folder=words,
    python=words,
    compares=st.booleans(),
)


def launch_nouns(plans: st.SearchStrategy[spec.Plan]) -> dict[type[spec.Noun], st.SearchStrategy[Any]]:
    errands = st.builds(
        JobSpec,
        plan=plans,
        plan_file=words,
        resources=needs(),
        out=words,
        folder=words,
        program=st.lists(words, min_size=1, max_size=3).map(tuple),
        restarts=st.none() | few,
        extra=st.lists(words, max_size=2).map(tuple),
    )
    return {
        spec.Launch: launches(),
        Resources: needs(),
        LaunchDefaults: habits,
        SlurmNode: site_nodes,
        Partition: partitions,
        SlurmCluster: sites,
        LaunchOrder: orders,
        JobSpec: errands,
    }
