"""Strategies that build every noun, valid by construction."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from config_nouns import config_nouns
from job_nouns import job_nouns
from launch_nouns import launch_nouns
from text_nouns import text_nouns
from trimtab import spec
from trimtab.catalog.words import KINDS, Word
from trimtab.diagnosis.findings import Diagnosed, Diagnosis
from trimtab.exams.measure import Measured
from trimtab.exams.sit import Answer, Case, Marks
from trimtab.jobs.naics.pairs import Pairs
from trimtab.pace.measure import Order
from trimtab.pages.report_data import Profile
from trimtab.predict.timeline import Timeline
from trimtab.spec.precision import DTYPE_BYTES, FLOAT32
from trimtab.trace.batch_loss import Look
from trimtab.trace.rehearse import Rehearsal
from trimtab.trace.summary import Named
from trimtab.trace.worker import Request, Requests
from trimtab.training.chain import Chain
from trimtab.training.faults import HOME, Fault, FaultKind
from trimtab.training.folder import RunIdentity
from trimtab.training.ladder import Ladder
from trimtab.training.meters import Line
from trimtab.training.order import Order as SampleOrder
from trimtab.training.precision import LossScale
from trimtab.training.questions import ANSWERS, Question
from trimtab.training.recovery import Move, Room, Sizes
from trimtab.training.start import Fleet
from trimtab.training.store import FileMark, Manifest
from trimtab.training.suspects import BACKWARD, BATCH, FORWARD, Suspect
from trimtab.training.task import Ending, Task
from trimtab.training.world import World as RunWorld

names = st.text(min_size=1, max_size=12)
counts = st.integers(min_value=0, max_value=2**50)
positive = st.integers(min_value=1, max_value=2**50)
rates = st.floats(min_value=1, max_value=1e18)
seconds = st.floats(min_value=0, max_value=1e9)
sentences = st.text(min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
source = st.builds(lambda kind, text: f"{kind}: {text}", st.sampled_from(spec.base.SOURCE_KINDS), names)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def sources(cls: type[spec.Noun]) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(cls.json_fields()), source, max_size=4)


peaks = st.builds(
    spec.Peaks, fp32=maybe(rates), tf32=maybe(rates), fp16=maybe(rates), bf16=maybe(rates), fp8=maybe(rates)
)
dtype = st.sampled_from([*DTYPE_BYTES])
dtypes = st.builds(
    spec.Dtypes,
    autocast=maybe(dtype.filter(lambda name: name != FLOAT32)),
    weights=dtype,
    frozen_weights=dtype,
    reductions=dtype,
    scales_loss=st.booleans(),
    tf32_products=st.booleans(),
    tf32_convolutions=st.booleans(),
)
process = st.builds(spec.DeviceProcess, pid=counts, used_bytes=maybe(counts), name=maybe(names))
mig = st.builds(spec.Slice, profile=names, parent=names, sm_share=st.floats(min_value=0.01, max_value=1))


@st.composite
def devices(draw: st.DrawFn, index: int = 0) -> spec.Device:
    memory = draw(positive)
    return spec.Device(
        index=index,
        name=draw(names),
        model=draw(maybe(names)),
        vendor=draw(st.sampled_from(spec.Vendor)),
        memory_bytes=memory,
        free_bytes=draw(maybe(st.integers(0, memory))),
        compute_capability=draw(maybe(st.sampled_from(["7.5", "9.0", "12.0", "gfx90a", "gfx942"]))),
        bf16=draw(maybe(st.booleans())),
        peaks=draw(peaks),
        bandwidth_bytes_per_s=draw(maybe(rates)),
        multiprocessors=draw(maybe(positive)),
        clock_hz=draw(maybe(rates)),
        power_limit_w=draw(maybe(st.floats(min_value=1, max_value=2000))),
        pcie_generation=draw(maybe(st.integers(1, 8))),
        pcie_width=draw(maybe(st.integers(1, 32))),
        ecc=draw(maybe(st.booleans())),
        uuid=draw(maybe(names)),
        slice=draw(maybe(mig)),
        processes=draw(maybe(st.lists(process, max_size=2).map(tuple))),
        sources=draw(sources(spec.Device)),
    )


@st.composite
def nodes(draw: st.DrawFn) -> spec.Node:
    return spec.Node(
        name=draw(names),
        devices=tuple(draw(devices(index)) for index in range(draw(st.integers(0, 3)))),
        cpu_cores=draw(maybe(positive)),
        ram_bytes=draw(maybe(positive)),
        ram_free_bytes=draw(maybe(counts)),
        sources=draw(sources(spec.Node)),
    )


def _link(node: int, devices: tuple[int, ...], kind: str, speed: float | None, where: str) -> spec.Link:
    return spec.Link(
        kind=kind,
        node=node,
        devices=devices,
        bandwidth_bytes_per_s=speed,
        total_bytes_per_s=speed,
        source=where,
    )


links = st.builds(_link, st.just(0), st.just((0, 1)), names, maybe(rates), source)
between = st.builds(spec.Link, kind=names, node=st.none(), bandwidth_bytes_per_s=maybe(rates), source=source)
findings = st.builds(
    spec.Finding,
    severity=st.sampled_from(spec.Severity),
    what=sentences,
    evidence=sentences,
    cause=sentences,
    cure=sentences,
)
versions = st.builds(spec.Versions, torch=maybe(names), driver=maybe(names), sources=sources(spec.Versions))


@st.composite
def schedulers(draw: st.DrawFn) -> spec.Scheduler:
    size = draw(maybe(st.integers(1, 100)))
    return spec.Scheduler(
        name=draw(maybe(names)),
        world_size=size,
        rank=None if size is None else draw(st.integers(0, size - 1)),
        node_names=tuple(draw(st.lists(names, max_size=2))),
        ends_at_s=draw(maybe(seconds)),
        sources=draw(sources(spec.Scheduler)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> spec.Cluster:
    held = tuple(draw(st.lists(nodes(), min_size=1, max_size=2)))
    joined = [draw(links)] if len(held[0].devices) > 1 else []
    return spec.Cluster(
        nodes=held,
        links=(*joined, draw(between)),
        scheduler=draw(schedulers()),
        versions=draw(versions),
        notes=tuple(draw(st.lists(names, max_size=2))),
        findings=tuple(draw(st.lists(findings, max_size=1))),
    )


degrees = st.integers(1, 8)
meshes = st.builds(spec.Mesh, dp_replicate=degrees, dp_shard=degrees, branch=degrees, pp=degrees)


@st.composite
def settings(draw: st.DrawFn) -> spec.Setting:
    strategy = draw(st.sampled_from(spec.Strategy))
    mesh = spec.Mesh() if strategy is spec.Strategy.SINGLE else draw(meshes)
    micro, rounds = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    whole = micro * rounds * mesh.data_parallel
    return spec.Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=rounds,
        global_batch=whole - draw(st.integers(0, micro * mesh.data_parallel - 1)),
        precision=draw(st.sampled_from(spec.Precision)),
        recompute=draw(st.sampled_from(spec.Recompute)),
        compile=draw(st.booleans()),
        optimizer=draw(st.sampled_from(spec.OptimizerImplementation)),
        allocator=draw(st.sampled_from(spec.Allocator)),
        workers=draw(st.integers(0, 16)),
        sync_batchnorm=draw(st.booleans()),
    )


@st.composite
def rank_shares(draw: st.DrawFn) -> spec.Share:
    micro, rounds = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    return spec.Share(
        samples=micro * rounds - draw(st.integers(0, micro - 1)), micro_batch=micro, accumulation=rounds
    )


@st.composite
def unlike(draw: st.DrawFn) -> spec.Setting:
    held = tuple(draw(st.lists(rank_shares(), min_size=2, max_size=3)))
    return spec.Setting(
        strategy=spec.Strategy.DDP,
        mesh=spec.Mesh(dp_replicate=len(held)),
        micro_batch=max(one.micro_batch for one in held),
        accumulation=max(one.accumulation for one in held),
        global_batch=sum(one.samples for one in held),
        shares=held,
    )


footprints = st.builds(spec.Footprint, **dict.fromkeys(spec.Footprint.__struct_fields__, counts))
bands = st.tuples(counts, counts).map(lambda ends: spec.Band(low_bytes=min(ends), high_bytes=max(ends)))
step_times = st.builds(spec.StepTime, compute_s=seconds, communication_s=seconds)


@st.composite
def estimates(draw: st.DrawFn) -> spec.Estimate:
    allocated, reserved, process_bytes = sorted(draw(st.tuples(counts, counts, counts)))
    verdict = draw(maybe(st.sampled_from(spec.Verdict)))
    fits = draw(maybe(st.booleans())) if verdict is None else verdict is not spec.Verdict.DOES_NOT_FIT
    return spec.Estimate(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_bytes=process_bytes,
        capacity_bytes=draw(maybe(counts)),
        fits=fits,
        verdict=verdict,
        verdict_reason=draw(sentences),
        least_bytes=draw(st.sampled_from([None, allocated, reserved, process_bytes])),
        releases_per_step=draw(maybe(seconds)),
        parts=draw(footprints),
        band=draw(bands),
        step_s=draw(maybe(seconds)),
        step_time=draw(maybe(step_times)),
        assumptions=tuple(draw(st.lists(names, max_size=2))),
    )


policies = st.builds(
    spec.Policy,
    objective=st.sampled_from(spec.Objective),
    memory_share=st.floats(min_value=0.1, max_value=1),
    deadline_s=maybe(seconds),
    pins=st.dictionaries(names, st.booleans() | st.integers(0, 99) | names, max_size=2),
)
reasons = st.builds(spec.Reason, subject=names, value=names, why=sentences)
candidates = st.builds(spec.Candidate, setting=settings(), estimate=estimates(), why=names)
rejections = st.builds(spec.Rejection, why=names, count=st.integers(1, 99), example=maybe(settings()))
comparisons = st.builds(
    spec.Comparison, gpus=st.integers(1, 99), setting=maybe(settings()), estimate=maybe(estimates())
)
what_ifs = st.builds(
    spec.WhatIf,
    change=names,
    gpus=st.integers(1, 99),
    setting=maybe(settings()),
    estimate=maybe(estimates()),
    meets_deadline=maybe(st.booleans()),
)
looks = st.builds(
    spec.Look,
    setting=settings(),
    process_bytes=counts,
    high_bytes=counts,
    samples_per_s=maybe(seconds),
    fits=st.booleans(),
)
changes = st.builds(spec.Change, what=names, setting=settings(), estimate=estimates())
places = st.builds(spec.Place, node=counts, node_name=names, device=counts, name=names)
batch_losses = st.builds(
    spec.BatchLoss,
    additive=maybe(st.booleans()),
    stated=st.booleans(),
    gap=maybe(st.floats(0, 1)),
    gradient_gap=maybe(st.floats(0, 1)),
    is_near=st.booleans(),
    is_sum=st.booleans(),
    batch_norms=counts,
    global_batch=maybe(st.integers(1, 99)),
    why=names,
)
workloads = st.builds(
    spec.Workload,
    name=names,
    global_batch=st.integers(1, 99),
    samples=maybe(st.integers(1, 99)),
    epochs=st.integers(1, 99),
    branches=st.lists(names, max_size=2).map(tuple),
    seq=maybe(st.integers(1, 99)),
    batch_loss=maybe(batch_losses),
    cached=st.booleans(),
    files=st.dictionaries(names, names, max_size=2),
)
named_jobs = st.builds(Named, job=names, overrides=st.dictionaries(names, counts, max_size=2))
looks_at_jobs = st.builds(
    Look, job=names, overrides=st.dictionaries(names, counts, max_size=2), layers_only=st.booleans()
)
plans = st.builds(
    spec.Plan,
    job=names,
    choice=settings(),
    estimate=estimates(),
    policy=policies,
    reasons=st.lists(reasons, max_size=1).map(tuple),
    runners_up=st.lists(candidates, max_size=1).map(tuple),
    looked_at=st.lists(looks, max_size=1).map(tuple),
    rejected=st.lists(rejections, max_size=1).map(tuple),
    comparison=st.lists(comparisons, max_size=1).map(tuple),
    what_if=st.lists(what_ifs, max_size=1).map(tuple),
    places=st.lists(places, max_size=1).map(tuple),
    workload=maybe(workloads),
    cost=maybe(seconds),
    fingerprints=st.dictionaries(names, names, max_size=2),
)


@st.composite
def measurements(draw: st.DrawFn) -> spec.Measurement:
    allocated, reserved = sorted(draw(st.tuples(counts, counts)))
    return spec.Measurement(
        job=draw(names),
        setting=draw(settings()),
        device=draw(names),
        versions=draw(versions),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        step_s=draw(maybe(seconds)),
    )


incidents = st.builds(
    spec.Incident,
    kind=st.sampled_from(spec.IncidentKind),
    at_s=seconds,
    step=maybe(counts),
    rank=maybe(counts),
    why=names,
    done=names,
)
words = st.builds(
    Word, name=names, kind=st.sampled_from(KINDS), what=names, see=st.lists(names, max_size=2).map(tuple)
)


works = st.builds(
    spec.Work,
    op=names,
    kind=st.sampled_from(spec.KINDS),
    dtype=names,
    flops=counts,
    read_bytes=counts,
    dims=st.lists(counts, max_size=4).map(tuple),
)


def _trace(sizes: list[int], name: str, work: spec.Work) -> spec.Trace:
    count = len(sizes)
    return spec.Trace(
        order=(*range(count), *(~number for number in range(count))),
        sizes=tuple(sizes),
        streams=(0,) * count,
        parts=(0,) * count,
        modules=(0,) * count,
        ops=(0,) * count,
        module_names=(name,),
        op_names=(name,),
        marks={"step0": 0},
        works=(work,),
        sequence=(0,) * count,
        phases={"forward": 0},
    )


traces = st.builds(_trace, st.lists(counts, max_size=4), names, works)
causes = st.builds(spec.Cause, rule=names, numbers=st.lists(counts, max_size=3).map(tuple), word=names)
several_requests = st.builds(
    Requests, job=names, settings=st.lists(settings(), max_size=2).map(tuple), device=devices()
)
requests = st.builds(Request, job=names, setting=settings(), device=devices())
cases = st.builds(Case, id=names, job=names, measurement=measurements())
figures = st.dictionaries(names, counts, max_size=2)
shares = st.dictionaries(names, seconds, max_size=2)
answers = st.builds(Answer, case=names, predicted=figures, measured=figures, error=shares, failed=names)
exam_marks = st.builds(
    Marks, cases=st.lists(answers, max_size=1).map(tuple), median=shares, worst=shares, lowest=shares
)

calibrations = st.builds(
    lambda device, some, host: spec.Calibration(
        device=device, works=tuple(some), seconds=(1e-6,) * len(some), host=host
    ),
    names,
    st.lists(works, max_size=3),
    st.dictionaries(names, seconds, max_size=2),
)
mfu_references = st.builds(
    lambda low, more, model: spec.MfuReference(
        low=low, high=min(1.0, low + more), model=model, figures="measured"
    ),
    st.floats(0.01, 0.9),
    st.floats(0, 0.5),
    names,
)
orders = st.builds(Order, device=names, budget_s=seconds)
measured = st.builds(Measured, allocated_bytes=maybe(counts), step_s=maybe(seconds), out_of_memory=names)

sample_orders = st.builds(
    lambda batch, more, seed: SampleOrder(samples=batch + more, global_batch=batch, seed=seed),
    st.integers(1, 10_000),
    counts,
    st.integers(-5, 2**40),
)
identities = st.builds(
    RunIdentity,
    job=names,
    options=st.dictionaries(names, st.integers(-9, 9) | names, max_size=2),
    global_batch=positive,
    seed=st.integers(-5, 2**40),
    file=names,
    digest=names,
)
file_marks = st.builds(
    FileMark, size_bytes=counts, sha256=st.text("0123456789abcdef", min_size=64, max_size=64)
)
manifests = st.builds(
    Manifest,
    step=counts,
    world=positive,
    saved_at_s=seconds,
    metric=maybe(st.floats(-1e9, 1e9)),
    frozen=maybe(names),
    files=st.dictionaries(names, file_marks, max_size=3),
)

loss_scales = st.builds(LossScale, value=st.floats(2.0**-10, 2.0**24), good=counts)
rooms = st.builds(
    Room, limit_bytes=maybe(counts), fixed_bytes=maybe(counts), sample_bytes=maybe(st.floats(0, 1e12))
)
micro_batches = st.builds(
    Sizes,
    planned=positive,
    current=positive,
    changed_at=counts,
    failed=st.dictionaries(positive.map(str), st.tuples(counts, counts), max_size=3),
    slow=maybe(positive),
)
moves = st.builds(Move, sizes=micro_batches, why=names)
run_worlds = st.builds(
    lambda rank, more, **others: RunWorld(rank=rank, size=rank + more, **others),
    counts,
    positive,
    local_rank=counts,
    node=counts,
    launcher=names,
    address=maybe(names),
    port=maybe(positive),
    restarts=counts,
    agent_listens=st.booleans(),
)

faults = st.sampled_from(FaultKind).flatmap(
    lambda kind: st.builds(
        Fault,
        kind=st.just(kind),
        step=counts,
        rank=counts,
        point=st.sampled_from(["", *HOME[kind]]),
        seconds=seconds,
    )
)
ladders = st.builds(
    Ladder,
    height=counts,
    calm=counts,
    rate=st.floats(0.01, 1),
    kept=st.lists(names, max_size=2).map(tuple),
    losses=st.lists(st.floats(-1e9, 1e9), max_size=3).map(tuple),
)
suspects = st.builds(
    Suspect, module=names, kind=names, phase=st.sampled_from([BATCH, FORWARD, BACKWARD]), order=counts
)
gauges = st.builds(
    spec.Gauge,
    key=names,
    index=counts,
    memory_bytes=maybe(counts),
    used_bytes=maybe(counts),
    busy=maybe(st.floats(0, 1)),
    throttles=st.lists(names, max_size=2).map(tuple),
    processes=maybe(st.lists(process, max_size=2).map(tuple)),
)
advices = st.builds(spec.Advice, kind=sentences, where=names, what=sentences, cure=sentences)
watched_runs = st.builds(
    spec.WatchedRun,
    folder=names,
    state=names,
    step=maybe(counts),
    steps=maybe(counts),
    loss=maybe(seconds),
    events=st.lists(incidents, max_size=1).map(tuple),
    devices=st.lists(names, max_size=2).map(tuple),
    advice=st.lists(advices, max_size=1).map(tuple),
)
watch_samples = st.builds(
    spec.Sample,
    at_s=seconds,
    gpus=st.lists(gauges, max_size=1).map(tuple),
    no_gpus=names,
    runs=st.lists(watched_runs, max_size=1).map(tuple),
)
profiles = st.builds(
    Profile,
    predicted=st.dictionaries(names, maybe(seconds), max_size=2),
    measured=st.dictionaries(names, maybe(seconds), max_size=2),
)
timelines = st.integers(1, 3).flatmap(
    lambda many: st.builds(
        Timeline,
        moments=st.tuples(*[counts] * many),
        held=st.tuples(*[st.tuples(*[counts] * many)] * len(spec.PARTS)),
        total=counts,
        peak=st.integers(0, many - 1),
        operation=names,
        first_gradient=maybe(counts),
    )
)
lines = st.builds(
    Line,
    step=positive,
    epoch=counts,
    loss=maybe(st.floats(-1e9, 1e9)),
    time_s=seconds,
    samples=positive,
    samples_per_s=seconds,
    mfu=maybe(st.floats(0, 1)),
    allocated_bytes=maybe(counts),
    skipped=maybe(names),
    indices=maybe(st.lists(counts, max_size=3).map(tuple)),
)
fleets = st.builds(
    Fleet, procs=positive, nodes=names, rendezvous=names, restarts=counts, logs=names, address=names
)
tasks = st.builds(
    Task,
    job=names,
    options=st.dictionaries(names, st.integers(-9, 9) | names, max_size=2),
    plan=maybe(plans),
    out=names,
    steps=maybe(positive),
    seed=counts,
    faults_due=st.lists(faults, max_size=2).map(tuple),
)
endings = st.builds(
    Ending,
    step=counts,
    loss=maybe(st.floats(-1e9, 1e9)),
    out=names,
    asked=st.sampled_from(["", "SIGTERM", "SIGUSR1"]),
)

diagnosed = st.builds(
    Diagnosed,
    severity=st.sampled_from(spec.Severity),
    what=sentences,
    evidence=sentences,
    cause=sentences,
    cure=sentences,
    kind=st.none() | names,
    realm=st.sampled_from(["job", "environment"]),
    file=st.none() | names,
    line=st.none() | positive,
    ranks=st.lists(counts, max_size=3).map(tuple),
    times=positive,
    consequences=st.lists(sentences, max_size=3).map(tuple),
)
diagnoses = st.builds(
    Diagnosis,
    findings=st.lists(diagnosed, max_size=3).map(tuple),
    read=st.lists(names, max_size=3).map(tuple),
    notes=st.lists(sentences, max_size=3).map(tuple),
)
stage_names = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
stages = st.builds(
    spec.Stage,
    name=stage_names,
    options=st.dictionaries(names, counts, max_size=2),
    epochs=maybe(st.integers(1, 9)),
    rate=maybe(seconds),
)
planned_stages = st.builds(spec.PlannedStage, stage=stages, plan=plans)
staged_plans = st.builds(
    spec.StagedPlan, job=names, stages=st.lists(planned_stages, min_size=1, max_size=1).map(tuple)
)
chains = st.builds(Chain, job=names, stages=st.lists(stages, min_size=1, max_size=1).map(tuple))
code_pairs = st.builds(
    Pairs,
    anchor_level=maybe(st.just((6,))),
    relation_margin=st.sampled_from([None, 2, (1, 3)]),
    distance_margin=st.sampled_from([None, 2.0, (1.0, 3.0)]),
)

NOUNS: dict[type[spec.Noun], st.SearchStrategy[Any]] = {
    Diagnosed: diagnosed,
    Diagnosis: diagnoses,
    spec.Peaks: peaks,
    spec.Dtypes: dtypes,
    spec.DeviceProcess: process,
    spec.Slice: mig,
    spec.Device: devices(),
    spec.Node: nodes(),
    spec.Link: links | between,
    spec.Finding: findings,
    spec.Versions: versions,
    spec.Scheduler: schedulers(),
    spec.Cluster: clusters(),
    spec.Mesh: meshes,
    spec.Setting: settings() | unlike(),
    spec.Share: rank_shares(),
    spec.BatchLoss: batch_losses,
    spec.Workload: workloads,
    spec.WhatIf: what_ifs,
    spec.Change: changes,
    spec.Place: places,
    Named: named_jobs,
    Look: looks_at_jobs,
    Question: st.builds(
        Question, what=st.sampled_from(sorted(ANSWERS)), job=names, overrides=st.dictionaries(names, counts)
    ),
    spec.Footprint: footprints,
    spec.Band: bands,
    spec.StepTime: step_times,
    spec.Estimate: estimates(),
    spec.Policy: policies,
    spec.Reason: reasons,
    spec.Candidate: candidates,
    spec.Look: looks,
    spec.Rejection: rejections,
    spec.Comparison: comparisons,
    spec.Plan: plans,
    spec.Measurement: measurements(),
    spec.Incident: incidents,
    Word: words,
    spec.Trace: traces,
    spec.Work: works,
    spec.Calibration: calibrations,
    Order: orders,
    spec.MfuReference: mfu_references,
    Request: requests,
    Requests: several_requests,
    Rehearsal: st.builds(Rehearsal, job=names, overrides=st.dictionaries(names, counts), micro_batch=counts),
    spec.Cause: causes,
    Case: cases,
    Answer: answers,
    Marks: exam_marks,
    Measured: measured,
    SampleOrder: sample_orders,
    RunIdentity: identities,
    FileMark: file_marks,
    Manifest: manifests,
    LossScale: loss_scales,
    Room: rooms,
    Sizes: micro_batches,
    Move: moves,
    RunWorld: run_worlds,
    Fault: faults,
    Ladder: ladders,
    Suspect: suspects,
    Line: lines,
    spec.Gauge: gauges,
    spec.Advice: advices,
    spec.WatchedRun: watched_runs,
    spec.Sample: watch_samples,
    Profile: profiles,
    Timeline: timelines,
    Fleet: fleets,
    Task: tasks,
    Ending: endings,
    spec.Stage: stages,
    spec.PlannedStage: planned_stages,
    spec.StagedPlan: staged_plans,
    Chain: chains,
    Pairs: code_pairs,
    **config_nouns(settings(), estimates()),
    **job_nouns(incidents),
    **launch_nouns(plans),
    **text_nouns(),
}
