"""From a plan to text: what is launched, judged by bash and by YAML, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import launch_plans as lp
from trimtab import api, cache
from trimtab.cli.launch import launch_notes, launch_text
from trimtab.errors import BrokenFile, EnvironmentFault, JobFailed, TrimtabError, UnknownName, WrongUse
from trimtab.launching import defaults, manifests, request, slurm, submit
from trimtab.launching.defaults import LaunchDefaults
from trimtab.launching.job_spec import JobSpec, build_environment, build_train_command, visible_devices
from trimtab.launching.jobs import parse_slurm_time
from trimtab.launching.quoting import batch_option, batch_value, dump_yaml, make_label, shell_line, shell_word
from trimtab.launching.request import USED_BY, refuse_unused
from trimtab.launching.resources import add_margin, compute_resources
from trimtab.launching.slurm import SlurmCluster, format_slurm_time, parse_cluster, parse_gpus
from trimtab.spec import Allocator, Launch, LaunchKind, Mesh, Plan, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent / "launches"
SITE = lp.site()
HABITS = LaunchDefaults(
    account="vision",
    modules=("cuda/12.8",),
    activate="~/venv",
    sbatch=("--constraint=nvlink", "--exclusive"),
    lines=("ulimit -n 65536",),
    environment={"WANDB_MODE": "offline"},
    image="ghcr.io/lab/train:1",
    claim="runs",
    namespace="ml",
)
FILE = "/work/runs/slm/launch.sbatch"


def batch(
    what: JobSpec | None = None,
    told: LaunchDefaults | None = None,
    at: SlurmCluster | None = SITE,
    **more: Any,
) -> Launch:
    file = more.pop("script_file", FILE)
    return slurm.build_sbatch_launch(
        what or lp.errand(), told or LaunchDefaults(), at, script_file=file, **more
    )


def options(launch: Launch) -> dict[str, str]:
    """What sbatch reads of a script."""
    lines = (launch.script or "").splitlines()
    found = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in found}


def on(device: str, nodes: int = 1, gpus: int = 4) -> JobSpec:
    return lp.errand(lp.plan(nodes=nodes, gpus=gpus, device=device))


TEXTS: dict[str, Any] = {
    "slurm.sbatch": lambda: batch(lp.errand(lp.plan(nodes=2, gpus=8)), HABITS.replace(partition="gpu")),
    "slurm-unchecked.sbatch": lambda: batch(
        lp.errand(lp.on_cpus(4), nodes="2", extra=("--steps", "20")), at=None
    ),
    "indexed.yaml": lambda: manifests.build_indexed_job(
        lp.errand(lp.plan(nodes=2, gpus=8), out="runs/slm"), HABITS, script_file="job.yaml"
    ),
    "trainjob.yaml": lambda: manifests.build_train_job(
        lp.errand(lp.plan(nodes=2, gpus=8), out="runs/slm"), HABITS, script_file="job.yaml"
    ),
    "sky.yaml": lambda: manifests.build_sky_task(
        lp.errand(lp.plan(nodes=2), out="runs/slm"), LaunchDefaults(), script_file="s.yaml"
    ),
}


def without_plan(script: str) -> str:
    """A manifest without the plan in it, which has tests of its own."""
    block = re.sub(r"(?<=plan\.json: \|\n)(?:    .*\n)+", "    PLAN\n", script)
    return re.sub(r"(?<=- name: TRIMTAB_PLAN\n)(      value: )(?:.*\n)+", r"\1PLAN\n", block)


@pytest.mark.parametrize("name", TEXTS)
def test_a_script_is_what_it_was(name: str) -> None:
    file, script = GOLDEN / name, without_plan(TEXTS[name]().script)
    if os.environ.get("TRIMTAB_RECORD"):
        file.write_text(script, encoding="utf-8")
    assert script == file.read_text(encoding="utf-8"), f"look at it, then: TRIMTAB_RECORD=1 pytest {__file__}"


# Slurm


def test_a_script_asks_for_what_the_plan_needs() -> None:
    asked = options(batch(lp.errand(lp.plan(nodes=2, gpus=4))))
    assert asked["nodes"] == "2"
    assert asked["ntasks-per-node"] == "1"
    assert asked["gpus-per-node"] == "h100:4"
    # One core for each process and each of its three loaders.
    assert asked["cpus-per-task"] == "16"
    # Half of the GPUs, half of the memory.
    assert asked["mem"] == f"{1024000 // 2}M"
    # 2 hours and a quarter, and a quarter of an hour.
    assert asked["time"] == "02:45:00"
    assert asked["partition"] == "gpu"
    assert asked["signal"] == "USR1@120"
    assert "requeue" in asked
    assert asked["comment"] == "trimtab:/work/runs/slm"
    assert "account" not in asked


def test_gres_is_asked_for_where_the_cluster_counts_no_gpus() -> None:
    asked = options(batch(at=lp.site(config="SelectType = select/linear")))
    assert asked["gres"] == "gpu:h100:4"
    assert "gpus-per-node" not in asked


def test_gpus_without_a_type_are_asked_for_without_one_and_that_is_said() -> None:
    found = batch(at=lp.site("gpu*|g1|gpu:8|64|512000|infinite|idle|up"))
    assert options(found)["gpus-per-node"] == "4"
    assert any("no type" in note for note in found.notes)


def test_the_nodes_meet_on_the_first_of_the_job_and_never_here(tmp_path: Path) -> None:
    script = batch(lp.errand(lp.plan(nodes=2))).script or ""
    words = run_script(script, {"SLURM_JOB_NUM_NODES": "2"}, tmp_path)
    assert words[words.index("--rendezvous") + 1] == "10.1.2.3:12042"
    assert words[words.index("--nodes") + 1] == "2"
    assert os.uname().nodename not in script


def test_elastic_nodes_are_a_range_for_slurm_and_what_it_gave_for_torchrun(tmp_path: Path) -> None:
    found = batch(lp.errand(lp.plan(nodes=2), nodes="1:2"))
    assert options(found)["nodes"] == "1-2"
    words = run_script(found.script or "", {"SLURM_JOB_NUM_NODES": "1"}, tmp_path)
    assert words[words.index("--nodes") + 1] == "1"


@pytest.mark.parametrize(
    ("code", "env", "requeued"),
    [
        (138, {}, True),
        (138, {"SLURM_RESTART_COUNT": "100"}, False),
        (4, {}, False),
        (0, {}, False),
        # A cancelled job ends as a preempted one does, and Slurm knows which it was.
        (143, {}, False),
        (143, {"PREEMPTED": "2026-01-01T00:00:00"}, True),
    ],
)
def test_a_run_that_saved_at_its_limit_is_queued_again_and_no_other(
    code: int, env: dict[str, str], requeued: bool, tmp_path: Path
) -> None:
    env = {**env, "CODE": str(code), "SLURM_JOB_NUM_NODES": "1"}
    done = bash(FAKES + (batch().script or ""), env, tmp_path)
    assert done.returncode == code
    assert (b"REQUEUED 42" in done.stderr) is requeued


def test_habits_come_before_the_run_in_their_order() -> None:
    lines = (batch(told=HABITS).script or "").splitlines()
    wanted = [
        "#SBATCH --constraint=nvlink",
        "#SBATCH --exclusive",
        "module load cuda/12.8 || exit 5",
        'source "$HOME"/venv/bin/activate || exit 5',
        "ulimit -n 65536",
        "export WANDB_MODE=offline  # trimtab.toml says so",
    ]
    places = [lines.index(one) for one in wanted]
    assert places == sorted(places)
    # What is activated brings the program.
    assert options(batch(told=HABITS))["account"] == "vision"


def test_a_time_limit_is_the_partitions_where_the_run_is_longer_and_the_note_says_what_follows() -> None:
    found = batch(lp.errand(lp.plan(hours=100)))
    assert options(found)["time"] == "1-00:00:00"
    assert any("queued again" in note and "1d" in note for note in found.notes)


def test_a_run_of_unknown_length_gets_no_time_limit() -> None:
    found = batch(lp.errand(lp.plan(hours=None)))
    assert "time" not in options(found)
    assert any("nobody knows" in note for note in found.notes)


def test_without_a_cluster_the_script_is_there_and_says_that_it_is_unchecked() -> None:
    found = batch(at=None, silence="there is no sinfo here")
    assert options(found)["gres"] == "gpu:4"
    assert any("nothing was checked" in note and "no sinfo" in note for note in found.notes)
    assert "mem" not in options(found)


WRONG: dict[str, tuple[Callable[[], Launch], type[TrimtabError], str]] = {
    "unknown partition": (
        lambda: batch(told=LaunchDefaults(partition="gpus")),
        UnknownName,
        r"no such partition; it has gpu \(2 nodes with 8 x h100\); short",
    ),
    "time above the limit": (
        lambda: batch(told=LaunchDefaults(partition="short"), time="2h"),
        WrongUse,
        r"--time 2h: jobs in partition short may run for 30m. Give --time 30m",
    ),
    "a time that is none": (lambda: batch(time="soon"), WrongUse, "--time 'soon': it is not a duration"),
    "fewer GPUs on a node": (
        lambda: batch(on("A100 40GB SXM4", gpus=8), LaunchDefaults(partition="old")),
        EnvironmentFault,
        r"needs 1 node with 8 x A100 40GB SXM4, and it is old \(2 nodes with 4 x a100\)",
    ),
    "fewer nodes": (
        lambda: batch(lp.errand(lp.plan(nodes=4, gpus=8))),
        EnvironmentFault,
        "needs 4 nodes with 8 x H100",
    ),
    "another GPU, with the partition that has it": (
        lambda: batch(on("A100 40GB SXM4")),
        EnvironmentFault,
        r"Use --partition old: old \(2 nodes with 4 x a100\)",
    ),
    "GPUs in a partition without": (
        lambda: batch(told=LaunchDefaults(partition="cpu")),
        EnvironmentFault,
        r"cpu \(1 node with no GPU\). Use --partition gpu",
    ),
    "CPU nodes": (
        lambda: batch(lp.errand(lp.on_cpus(4), nodes="4"), LaunchDefaults(partition="cpu")),
        EnvironmentFault,
        "4 nodes are needed",
    ),
    "a partition that is down": (
        lambda: batch(told=LaunchDefaults(partition="broken")),
        EnvironmentFault,
        "it is down",
    ),
    "no default partition": (
        lambda: batch(at=lp.site("gpu|g1|gpu:h100:8|64|512000|infinite|idle|up")),
        WrongUse,
        "no default partition; it has gpu",
    ),
    "a script path with a newline": (
        lambda: batch(script_file="/work/a\nb.sbatch"),
        WrongUse,
        "line break",
    ),
    "an out with a newline": (lambda: batch(lp.errand(out="/work/a\nb")), WrongUse, "line break"),
    "a folder with a quotation mark": (
        lambda: batch(lp.errand(folder='/work/"x')),
        WrongUse,
        "chdir .* no line break, quotation mark",
    ),
    "a partition that is none": (
        lambda: batch(told=LaunchDefaults(partition="a b"), at=None),
        WrongUse,
        "letters, digits",
    ),
    "more memory than a node has": (
        lambda: batch(at=lp.site("gpu*|g1|gpu:h100:8|64|8000|infinite|idle|up")),
        EnvironmentFault,
        "24.0 GiB a node, and node g1 has 7.8 GiB of host memory",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_run_is_refused_with_the_cure(case: str) -> None:
    build, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        build()


@pytest.mark.parametrize(
    ("kind", "device", "alike"),
    [
        ("h100", "H100 SXM5 80GB", True),
        ("h100", "H100 PCIe 80GB", True),
        ("nvidia_h100_80gb_hbm3", "H100 SXM5 80GB", True),
        ("a100", "A100 40GB SXM4", True),
        ("a100_80gb", "A100 40GB SXM4", False),
        ("a100_80gb", "A100 80GB SXM4", True),
        ("a10", "A100 40GB SXM4", False),
        ("a100", "A10", False),
        ("h200", "H100 SXM5 80GB", False),
        ("l4", "L40S", False),
        ("rtx3090", "GeForce RTX 3090", True),
        ("geforce_rtx_3090", "GeForce RTX 3090", True),
        ("rtx_3090_ti", "GeForce RTX 3090", False),
        ("v100", "V100 SXM2 32GB", True),
        ("", "V100 SXM2 32GB", True),
        ("gold", "V100 SXM2 32GB", False),
    ],
)
def test_a_type_of_slurm_is_matched_with_the_catalogue_and_never_guessed(
    kind: str, device: str, alike: bool
) -> None:
    assert slurm.is_same_gpu(kind, device) is alike


def test_sinfo_is_read() -> None:
    by_name = {partition.name: partition for partition in SITE.partitions}
    assert by_name["gpu"].is_default
    assert by_name["gpu"].limit_s == 86400
    assert by_name["old"].limit_s is None
    assert not by_name["broken"].is_up
    assert [node.is_up for node in by_name["old"].nodes] == [False, False]
    assert [node.is_up for node in by_name["gpu"].nodes] == [True, True]
    assert by_name["gpu"].nodes[0].memory_bytes == 1024000 * 2**20
    assert SITE.counts_gpus


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:a100_80gb:2,gpu:h100:4,shard:16", {"a100_80gb": 2, "h100": 4}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("lustre:1", {}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_generic_resources_are_read(gres: str, found: dict[str, int]) -> None:
    assert parse_gpus(gres) == found


@given(st.integers(min_value=60, max_value=10**7))
def test_a_time_limit_is_read_back_and_never_shorter(seconds: int) -> None:
    back = parse_slurm_time(format_slurm_time(seconds))
    assert back is not None
    assert 0 <= back - seconds < 60


@pytest.mark.parametrize("text", ["", "gpu|g1", "a|b|c|d|e|f|g|h|i", "slurm_load: error"])
def test_what_is_not_sinfo_is_said(text: str) -> None:
    with pytest.raises(EnvironmentFault, match="it printed"):
        parse_cluster({"nodes": text})


# Real bash and YAML

FAKES = """
scontrol() {
  case "$1 $2" in
    "show hostnames") printf 'g1\\ng2\\n' ;;
    "--oneliner show")
      case "$3" in
        node) echo "NodeName=$4 Arch=x NodeAddr=10.1.2.3 NodeHostName=$4" ;;
        job) echo "JobId=$4 PreemptTime=${PREEMPTED:-None} SuspendTime=None" ;;
      esac ;;
    requeue*) echo "REQUEUED $2" >&2 ;;
  esac
}
module() { :; }
source() { :; }
trimtab() { printf '%s\\0' "$@"; return "${CODE:-0}"; }
srun() { while [ "${1#--}" != "$1" ]; do shift; done; "$@"; }
"""


def bash(script: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    held = {
        "PATH": os.environ["PATH"],
        "HOME": "/home/ada",
        "SLURM_JOB_ID": "42",
        "SLURM_CPUS_PER_TASK": "4",
    }
    return subprocess.run(
        ["bash", "--norc", "-s"],
        input=script.encode(),
        env={**held, "SLURM_JOB_NODELIST": "g[1-2]", **env},
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=240,
    )


def run_script(script: str, env: dict[str, str], folder: Path) -> list[str]:
    """The words that trimtab would get from a script, by a real shell; nothing else may have happened."""
    before = sorted(folder.iterdir())
    done = bash(FAKES + script, env, folder)
    assert not done.stderr, done.stderr
    assert sorted(folder.iterdir()) == before
    return done.stdout.decode().split("\0")[:-1]


NASTY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12) | st.lists(
    st.sampled_from(
        [
            "a",
            " ",
            "'",
            '"',
            "`touch x`",
            "$(touch x)",
            "; touch x",
            "\n",
            "\\",
            "$HOME",
            "#",
            "&",
            "|",
            "~",
            "*",
            "--",
            "%j",
        ]
    ),
    min_size=1,
    max_size=6,
).map("".join)


def one_of_them(text: str) -> JobSpec:
    """An errand in which a text stands everywhere that it can come from a user."""
    what = lp.plan(job=f"job.py:{text}", options={"name": text})
    return lp.errand(
        what,
        plan_file=f"/work/{text}.json",
        out=f"/work/{text}",
        folder=f"/work/{text}",
        extra=("--seed", text),
    )


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=NASTY)
@example(text="$(touch x)")
@example(text="a b")
@example(text="'; touch x; '")
@example(text="100%")
def test_nothing_given_breaks_out_of_a_batch_script(text: str, empty: Path) -> None:
    what = one_of_them(text)
    try:
        script = batch(what, script_file=f"/work/{text}/launch.sbatch").script or ""
    except WrongUse as error:
        assert set(text) & {'"', "\\"} or not text.isprintable(), error
        return
    head = script.split("\n\n")[0].splitlines()
    # sbatch reads no more options than we wrote, and comments stay comments.
    assert len([one for one in head if one.startswith("#SBATCH")]) == 14
    assert all(one.startswith("#") for one in head)
    words = run_script(script, {"SLURM_JOB_NUM_NODES": "1"}, empty)
    assert words == [
        "train",
        f"job.py:{text}",
        "--plan",
        f"/work/{text}.json",
        "--out",
        f"/work/{text}",
        "--procs",
        "4",
        "--nodes",
        "1",
        "--rendezvous",
        "10.1.2.3:12042",
        "--set",
        f"name={text}",
        "--seed",
        text,
    ]


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(NASTY, min_size=1, max_size=4), name=st.from_regex(r"[A-Z_]{1,8}", fullmatch=True))
def test_any_words_and_variables_reach_a_command_whole(texts: list[str], name: str, empty: Path) -> None:
    given = Launch(kind=LaunchKind.TORCHRUN, command=("trimtab", *texts), environment={f"T_{name}": texts[0]})
    shown = launch_text(given, several=False).replace("trimtab", "show", 1)
    show = f'show() {{ printf \'%s\\0\' "$T_{name}" "$@"; }}\n'
    done = bash(show + shown, {}, empty)
    assert done.stdout.decode().split("\0")[:-1] == [texts[0], *texts]


def kubernetes_reads(text: str) -> str:
    """What a container gets: $$ is a dollar, and $(NAME) would be a variable."""
    assert not re.search(r"(?<!\$)(?:\$\$)*\$\(", text)
    return text.replace("$$", "$")


@settings(max_examples=25, deadline=None)
@given(text=NASTY)
@example(text="$(PATH)")
@example(text="$$")
@example(text="a: b\n- c")
def test_nothing_given_breaks_out_of_a_manifest(text: str, empty: Path) -> None:
    what = one_of_them(text)
    told = LaunchDefaults(image="i", environment={"NAME": text.replace("\n", " ").replace("\r", " ")})
    try:
        indexed = manifests.build_indexed_job(what, told, script_file="j")
        train = manifests.build_train_job(what, told, script_file="j")
        there = manifests.build_sky_task(what, told, script_file="j")
    except WrongUse as error:
        assert not text.isprintable(), error
        return
    service, plan, job = yaml.safe_load_all(indexed.script or "")
    assert [service["kind"], plan["kind"], job["kind"]] == ["Service", "ConfigMap", "Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = [kubernetes_reads(one) for one in container["command"]]
    name = service["metadata"]["name"]
    wanted = build_train_command(
        what.replace(plan_file="/etc/trimtab/plan.json", out=f"/workspace/work/{text}"),
        rendezvous=f"{name}-0.{name}:29400",
    )
    assert words == wanted
    env = {one["name"]: kubernetes_reads(one["value"]) for one in container["env"]}
    assert env["NAME"] == told.environment["NAME"]
    assert Plan.from_json(plan["data"]["plan.json"]).job == what.plan.job
    (trained,) = yaml.safe_load_all(train.script or "")
    script = kubernetes_reads(trained["spec"]["trainer"]["command"][2])
    assert run_exec(script, empty)[:2] == ["train", f"job.py:{text}"]
    (task,) = yaml.safe_load_all(there.script or "")
    assert task["workdir"] == f"/work/{text}"
    words = run_script(task["run"], {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, empty)
    assert words[1] == f"job.py:{text}"
    assert words[words.index("--rendezvous") + 1] == "10.0.0.1:29400"


def run_exec(script: str, folder: Path) -> list[str]:
    """A script that ends by becoming trimtab."""
    shown = script.replace("exec trimtab", "trimtab").replace("> /tmp/trimtab-plan.json", "> /dev/null")
    return run_script(shown, {"TRIMTAB_PLAN": "{}"}, folder)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", 'a"b', "a\\b", "", "\x1b[31m", "\ud800"])
def test_a_line_of_sbatch_refuses_what_it_cannot_hold(text: str) -> None:
    with pytest.raises(WrongUse):
        batch_value("output", text)


def test_a_percent_sign_in_a_path_is_no_pattern_of_sbatch() -> None:
    found = batch(lp.errand(out="/work/100%j"))
    assert options(found)["output"] == "/work/100%%j/slurm-%j.log"


@given(st.text(max_size=80))
def test_a_label_is_one_that_kubernetes_takes(text: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", make_label(text))
    assert len(make_label(text)) <= 57


@settings(max_examples=60)
@given(
    st.recursive(
        st.text(st.characters(codec="utf-8")) | st.integers() | st.booleans(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
@example("\x85")
@example("a\u2028b\n")
@example(" a\n  b")
@example("")
def test_yaml_is_read_back(value: Any) -> None:
    assert list(yaml.safe_load_all(dump_yaml([value]))) == [value]


# Kubernetes: the parts of the published schemas that are used, as data

TEXT, COUNT, FLAG = str, int, bool
QUANTITIES = {"cpu": TEXT, "memory": TEXT, "nvidia.com/gpu": TEXT, "amd.com/gpu": TEXT}
ENV = [{"name": TEXT, "value": TEXT}]
RESOURCES = {"requests": QUANTITIES, "limits": QUANTITIES}
METADATA = {"name": TEXT, "namespace": TEXT, "labels": {"app.kubernetes.io/managed-by": TEXT}}
SCHEMAS: dict[str, Any] = {
    "Service": {
        "apiVersion": "v1",
        "kind": TEXT,
        "metadata": METADATA,
        "spec": {
            "clusterIP": TEXT,
            "publishNotReadyAddresses": FLAG,
            "selector": {"job-name": TEXT},
            "ports": [{"name": TEXT, "port": COUNT}],
        },
    },
    "ConfigMap": {"apiVersion": "v1", "kind": TEXT, "metadata": METADATA, "data": {"plan.json": TEXT}},
    "Job": {
        "apiVersion": "batch/v1",
        "kind": TEXT,
        "metadata": METADATA,
        "spec": {
            "completionMode": TEXT,
            "completions": COUNT,
            "parallelism": COUNT,
            "backoffLimit": COUNT,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": TEXT,
                        "onPodConditions": [{"type": TEXT, "status": TEXT}],
                        "onExitCodes": {"containerName": TEXT, "operator": TEXT, "values": [COUNT]},
                    }
                ]
            },
            "template": {
                "metadata": METADATA,
                "spec": {
                    "subdomain": TEXT,
                    "restartPolicy": TEXT,
                    "terminationGracePeriodSeconds": COUNT,
                    "containers": [
                        {
                            "name": TEXT,
                            "image": TEXT,
                            "command": [TEXT],
                            "env": ENV,
                            "ports": [{"name": TEXT, "containerPort": COUNT}],
                            "resources": RESOURCES,
                            "volumeMounts": [{"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}],
                        }
                    ],
                    "volumes": [
                        {
                            "name": TEXT,
                            "configMap": {"name": TEXT},
                            "emptyDir": {"medium": TEXT},
                            "persistentVolumeClaim": {"claimName": TEXT},
                        }
                    ],
                },
            },
        },
    },
    "TrainJob": {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": TEXT,
        "metadata": METADATA,
        "spec": {
            "runtimeRef": {"apiGroup": TEXT, "kind": TEXT, "name": TEXT},
            "trainer": {
                "image": TEXT,
                "command": [TEXT],
                "args": [TEXT],
                "env": ENV,
                "numNodes": COUNT,
                "numProcPerNode": COUNT,
                "resourcesPerNode": RESOURCES,
            },
        },
    },
}
"""Fields and their types, from the OpenAPI of Kubernetes 1.31 and the CRD of Kubeflow Trainer 2."""


def misfits(value: Any, shape: Any, at: str = "") -> list[str]:
    """Where a document is not of a shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{at} is no mapping"]
        strange = [f"{at}.{key} is not known" for key in value if key not in shape]
        return strange + [
            misfit
            for key in value
            if key in shape
            for misfit in misfits(value[key], shape[key], f"{at}.{key}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [
            misfit
            for number, item in enumerate(value)
            for misfit in misfits(item, shape[0], f"{at}[{number}]")
        ]
    if isinstance(shape, str):
        return [] if value == shape else [f"{at} is {value!r}"]
    return [] if type(value) is shape else [f"{at} is {type(value).__name__}"]


def test_manifests_are_of_the_published_shape() -> None:
    what = lp.errand(lp.plan(nodes=2, gpus=8), out="runs/slm")
    found = [
        one
        for build in (manifests.build_indexed_job, manifests.build_train_job)
        for one in yaml.safe_load_all(build(what, HABITS, script_file="j").script or "")
    ]
    assert [one["kind"] for one in found] == ["Service", "ConfigMap", "Job", "TrainJob"]
    assert [misfit for one in found for misfit in misfits(one, SCHEMAS[one["kind"]])] == []
    _, _, job, train = found
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert train["spec"]["trainer"]["numNodes"] == 2
    assert train["spec"]["trainer"]["numProcPerNode"] == 8
    # The pods' names in the Service lead to the first of them.
    assert job["spec"]["template"]["spec"]["subdomain"] == found[0]["metadata"]["name"]


def test_a_shape_that_is_wrong_is_seen() -> None:
    assert misfits({"apiVersion": "v2"}, SCHEMAS["Service"]) == [".apiVersion is 'v2'"]
    assert misfits({"spec": {"port": 1}}, SCHEMAS["Service"]) == [".spec.port is not known"]
    assert misfits({"spec": {"ports": [{"port": "1"}]}}, SCHEMAS["Service"]) == [".spec.ports[0].port is str"]


def test_an_amd_gpu_is_asked_for_by_its_own_name() -> None:
    need = compute_resources(lp.plan(device="MI300X 192GB"))
    assert manifests.pod_resources(need)["limits"] == {"amd.com/gpu": "4"}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: manifests.build_indexed_job(lp.errand(), LaunchDefaults(), script_file="j"),
            "no image is named",
        ),
        (
            lambda: manifests.build_indexed_job(
                lp.errand(lp.plan(nodes=2)), LaunchDefaults(image="i"), script_file="j"
            ),
            "no folder that they share",
        ),
        (
            lambda: manifests.build_sky_task(on("GeForce RTX 3090"), LaunchDefaults(), script_file="j"),
            "SkyPilot has no name",
        ),
    ],
)
def test_a_manifest_that_could_not_run_is_refused(build: Any, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        build()


def test_sky_names_are_of_devices_that_the_catalogue_has() -> None:
    from trimtab.catalog.tables import devices

    known = {row.name for row in devices()}
    assert set(manifests.ACCELERATORS) <= known
    assert set(manifests.PLAIN) <= {name.split()[0] for name in known}


# torchrun here


def here(what: JobSpec | None = None, env: dict[str, str] | None = None, **more: Any) -> Launch:
    return request.build_local_launch(what or lp.errand(), LaunchDefaults(), cores=32, here=env or {}, **more)


def test_a_local_launch_shows_what_it_starts_in_turn() -> None:
    found = here()
    assert found.command[:3] == ("trimtab", "train", "slm")
    assert found.starts[0] == "torchrun"
    assert "--nproc-per-node=4" in found.starts
    assert "--log-dir=/work/runs/slm/logs" in found.starts
    assert found.environment["OMP_NUM_THREADS"] == "8"
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert set(found.why) == set(found.environment)


def test_several_nodes_meet_where_they_are_told() -> None:
    found = here(lp.errand(lp.plan(nodes=2), nodes="1:2"), rendezvous="head:29400")
    words = list(found.command)
    assert words[words.index("--nodes") + 1] == "1:2"
    assert words[words.index("--rendezvous") + 1] == "head:29400"
    assert "--rdzv-endpoint=head:29400" in found.starts
    assert any("each of the 2 nodes" in note for note in found.notes)


def test_what_the_user_has_set_stays_and_that_is_said() -> None:
    found = here(env={"OMP_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS" not in found.environment
    assert "OMP_NUM_THREADS stays 3, as it is set" in found.notes


def test_devices_are_the_plans_among_those_that_are_visible() -> None:
    two = lp.plan(gpus=2)
    two = two.replace(places=tuple(place.replace(device=place.device + 1) for place in two.places))
    assert visible_devices(two, {}) == "1,2"
    assert visible_devices(two, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "5,6"
    assert visible_devices(two, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}) == "GPU-b,GPU-c"
    with pytest.raises(WrongUse, match="it shows 1 device, and the plan uses 2"):
        visible_devices(two, {"CUDA_VISIBLE_DEVICES": "0"})


def test_variables_have_reasons_and_only_where_there_is_one() -> None:
    plain = build_environment(lp.errand(lp.on_cpus(2)), cores=8, offline=False)
    assert plain == {"OMP_NUM_THREADS": ("4", "8 cores over 2 processes a node")}
    expandable = build_environment(
        lp.errand(lp.plan(allocator=Allocator.EXPANDABLE)),
        cores=None,
        offline=True,
        here={"PYTORCH_CUDA_ALLOC_CONF": "a:1"},
    )
    assert expandable["PYTORCH_CUDA_ALLOC_CONF"][0] == "a:1,expandable_segments:True"
    assert expandable["HF_HUB_OFFLINE"][0] == "1"
    assert (
        build_environment(lp.errand(lp.plan(job="hf:/m")), cores=None, offline=False)["HF_HUB_OFFLINE"][0]
        == "1"
    )
    # A scheduler hands out devices itself.
    assert "CUDA_VISIBLE_DEVICES" not in build_environment(lp.errand(), cores=4, offline=False)


def test_options_of_a_job_are_said_again_on_its_command_line() -> None:
    hf = build_train_command(
        lp.errand(lp.plan(job="hf:/m", options={"seq": 512, "lora": 8, "frozen": True, "a": "b c"}))
    )
    assert hf[hf.index("--seq") :] == ["--seq", "512", "--lora", "8", "--frozen", "--set", "a=b c"]
    with pytest.raises(WrongUse, match="no command line can say"):
        build_train_command(lp.errand(lp.plan(options={"sizes": [1, 2]})))


# accelerate, deepspeed


def line(kind: LaunchKind, what: Plan, script: str | None = "train.py", meet: str | None = None) -> Launch:
    own = lp.errand(what, extra=("--lr", "1e-3"))
    return request.build_script_launch(
        kind, own, LaunchDefaults(), script=script, rendezvous=meet, cores=16, here={}
    )


def test_accelerate_is_told_what_it_can_hold_and_takes_it() -> None:
    from accelerate.commands.launch import launch_command_parser

    found = line(LaunchKind.ACCELERATE, lp.plan(compile=True))
    taken = launch_command_parser().parse_args(list(found.command[2:]))
    assert (taken.num_processes, taken.num_machines, taken.mixed_precision) == (4, 1, "bf16")
    assert taken.dynamo_backend == "inductor"
    assert taken.multi_gpu
    assert taken.training_script == "train.py"
    assert taken.training_script_args == ["--lr", "1e-3"]
    sharded = line(LaunchKind.ACCELERATE, lp.plan(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=4)))
    taken = launch_command_parser().parse_args(list(sharded.command[2:]))
    assert (taken.use_fsdp, taken.fsdp_version) == (True, "2")


def test_deepspeed_is_told_of_nodes_only_where_there_are_several() -> None:
    assert line(LaunchKind.DEEPSPEED, lp.plan()).command == (
        "deepspeed",
        "--num_gpus=4",
        "train.py",
        "--lr",
        "1e-3",
    )
    several = line(LaunchKind.DEEPSPEED, lp.plan(nodes=2), meet="head:29500").command
    assert {"--num_nodes=2", "--master_addr=head", "--master_port=29500"} <= set(several)


@pytest.mark.parametrize("kind", [LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED])
def test_other_launchers_refuse_what_they_cannot_do(kind: LaunchKind) -> None:
    with pytest.raises(WrongUse, match="no script is named"):
        line(kind, lp.plan(), script=None)
    with pytest.raises(WrongUse, match="need a place to meet"):
        line(kind, lp.plan(nodes=2))
    with pytest.raises(WrongUse, match="no HOST:PORT"):
        line(kind, lp.plan(nodes=2), meet="head")
    with pytest.raises(WrongUse, match="line break"):
        line(kind, lp.plan(), script="a\nb.py")


# trimtab.toml


def told(text: str, folder: Path) -> LaunchDefaults:
    (folder / "trimtab.toml").write_text(text, encoding="utf-8")
    return defaults.read_defaults(folder)


def test_habits_are_read_and_none_are_none(tmp_path: Path) -> None:
    assert defaults.read_defaults(tmp_path) == LaunchDefaults()
    text = '[launch]\npartition = "gpu"\nmodules = ["cuda"]\nenvironment = {A = "1"}\n[[target]]\nname="a"'
    assert told(text, tmp_path) == LaunchDefaults(partition="gpu", modules=("cuda",), environment={"A": "1"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[launch]\npartion = "gpu"\n', r"'partion', which is none of .* \(perhaps partition\)"),
        ('[lunch]\npartition = "gpu"\n', r"'lunch', which is none of target, launch \(perhaps launch\)"),
        ("[launch]\npartition = 3\n", "Expected `str"),
        ('[launch]\nmodules = "cuda"\n', "Expected `array`"),
        ('[launch]\nlines = ["a\\nb"]\n', "lines holds a line break"),
        ('[launch]\naccount = "a\\nb"\n', "account holds a line break"),
        ('[launch]\nsbatch = ["constraint=x"]\n', "begins with no --"),
        ("launch = 3\n", "launch is no table"),
        ("[launch\n", "it is not TOML"),
    ],
)
def test_habits_that_cannot_be_meant_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match=words):
        told(text, tmp_path)


# What is needed


def test_the_need_follows_from_the_plan() -> None:
    need = compute_resources(lp.plan(nodes=2, gpus=8))
    assert (need.nodes, need.procs, need.gpus, need.cpus) == (2, 8, 8, 32)
    assert need.devices == (lp.H100,)
    assert need.memory_bytes == 8 * 6 * lp.GIB
    assert need.seconds == 7200
    assert compute_resources(lp.plan(), steps=20).seconds == 10
    assert add_margin(10) == 960


@pytest.mark.parametrize(
    ("what", "nodes", "words"),
    [
        (lp.plan(nodes=2), "3", "the plan is for 2 nodes"),
        (lp.plan(), "two", "neither a number of nodes nor MIN:MAX"),
        (lp.on_cpus(3), "2", "3 processes do not divide over 2 nodes"),
        (
            lp.plan(nodes=2, gpus=2).replace(
                places=(*lp.plan(nodes=1, gpus=3).places, lp.plan(nodes=2).places[-1])
            ),
            None,
            "it takes 3 and 1 GPUs of its nodes",
        ),
    ],
)
def test_a_plan_that_cannot_be_spread_is_refused(what: Plan, nodes: str | None, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        compute_resources(what, nodes=nodes)


# The hands


def fake(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is all there is to find."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin-that-is-not:/bin-neither")
    return folder


def to_submit(folder: Path) -> Launch:
    out = folder / "a run"
    return batch(lp.errand(out=str(out)), script_file=str(out / "launch.sbatch"))


def test_a_job_is_submitted_once_and_its_number_kept(programs: Path, tmp_path: Path) -> None:
    fake(programs, "sbatch", f'echo "$@" >> {tmp_path}/calls; echo "17;cluster"')
    done = submit.submit_launch(to_submit(tmp_path))
    assert done.job_id == "17"
    assert (tmp_path / "calls").read_text() == f"--parsable {tmp_path}/a run/launch.sbatch\n"
    assert Launch.from_json((tmp_path / "a run" / "launch.json").read_text()).job_id == "17"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", "Invalid account"),
        ("exit 1", "it ended with 1"),
        ("echo hello", "no number of a job"),
        ("true", "no number of a job"),
    ],
)
def test_a_job_that_was_not_taken_leaves_no_trace_of_one(
    script: str, words: str, programs: Path, tmp_path: Path
) -> None:
    fake(programs, "sbatch", script)
    with pytest.raises(EnvironmentFault, match=words):
        submit.submit_launch(to_submit(tmp_path))
    assert not (tmp_path / "a run" / "launch.json").exists()


def test_without_slurm_nothing_is_written_or_submitted(programs: Path, tmp_path: Path) -> None:
    del programs
    with pytest.raises(EnvironmentFault, match=r"there is no sbatch on this machine. Run it on a login node"):
        submit.submit_launch(to_submit(tmp_path))
    assert not (tmp_path / "a run").exists()
    assert submit.read_slurm_cluster() == (None, "there is no sinfo here")


def test_a_cluster_that_does_not_answer_is_told_in_its_own_words(programs: Path) -> None:
    fake(programs, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    found, why = submit.read_slurm_cluster()
    assert found is None
    assert "Unable to contact slurm controller" in why


def test_a_cluster_is_asked(programs: Path) -> None:
    fake(programs, "sinfo", "echo 'gpu*|g1|gpu:h100:8|64|512000|infinite|idle|up'")
    fake(programs, "scontrol", "echo 'SelectType = select/cons_tres'")
    found, _ = submit.read_slurm_cluster()
    assert found is not None
    assert found.partitions[0].gpu_types == ("h100",)


def test_a_folder_that_cannot_be_written_stops_before_anything_starts(programs: Path, tmp_path: Path) -> None:
    fake(programs, "sbatch", f"touch {tmp_path}/called; echo 1")
    (tmp_path / "a run").write_text("a file", encoding="utf-8")
    with pytest.raises(WrongUse, match=r"cannot be written .* nothing was started"):
        submit.submit_launch(to_submit(tmp_path))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("kind", [LaunchKind.KUBERNETES, LaunchKind.SKY, LaunchKind.ACCELERATE])
def test_what_is_text_for_others_is_not_run(kind: LaunchKind) -> None:
    with pytest.raises(WrongUse, match="starts nothing there"):
        submit.check_startable(Launch(kind=kind, command=("kubectl",)))


@pytest.mark.parametrize("option", USED_BY)
def test_an_option_without_effect_is_refused(option: str) -> None:
    deaf = next(one for one in LaunchKind if one not in USED_BY[option])
    with pytest.raises(WrongUse, match=f"--{option} x: it means nothing to a launch by {deaf}"):
        refuse_unused(deaf, {option: "x"})
    refuse_unused(USED_BY[option][0], {option: "x"})


# The verb


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [one for one in os.environ if one.startswith(("SLURM", "CUDA_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def test_a_job_is_planned_and_its_plan_goes_with_the_launch(at: Path) -> None:
    found = api.launch("slm:tiny", procs=2, out="a run", steps=3)
    assert isinstance(found, Launch)
    (name,) = found.files
    assert name == "a run/launch-plan.json"
    assert Plan.from_json(found.files[name]).choice.gpus == 2
    assert found.command[found.command.index("--plan") + 1] == name
    assert not list(at.iterdir())


def test_a_plan_is_launched_from_its_file(at: Path) -> None:
    file = at / "plan.json"
    file.write_text(lp.on_cpus(4).to_json(), encoding="utf-8")
    found = api.launch("plan.json", kind="slurm", nodes="2", time="1h")
    assert isinstance(found, Launch)
    assert f"--plan {file}" in (found.script or "")
    assert found.files == {}
    assert f"#SBATCH --output={at}/runs/slm-tiny/slurm-%j.log" in (found.script or "")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"plan_or_job": "missing.json"}, "plan missing.json: it cannot be read"),
        ({"plan_or_job": "plan.json", "procs": 2}, "the plan has made its choices"),
        ({"plan_or_job": "plan.json", "pins": ["micro_batch=1"]}, "the plan has made its choices"),
        ({"plan_or_job": "slm:tiny", "compare": (1, 2)}, "no GPU here to compare"),
        ({"plan_or_job": "slm:tiny", "nodes": "2", "procs": 2}, "they need a place to meet"),
        ({"plan_or_job": "plan.json", "kind": "slurm", "out": "a\nb"}, "line break"),
    ],
)
def test_a_launch_that_cannot_be_meant_is_refused(asked: dict[str, Any], words: str, at: Path) -> None:
    (at / "plan.json").write_text(lp.on_cpus(2).to_json(), encoding="utf-8")
    if Path("/dev/nvidiactl").exists() and "no GPU" in words:
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrimtabError, match=words):
        api.launch(asked.pop("plan_or_job"), **asked)


JOB = """
class NoData:
    global_batch = 4
    def model(self): ...
    def batch(self, size): ...
    def loss(self, model, batch): ...

class WithData(NoData):
    def dataset(self): ...

class Broken(NoData):
    def __init__(self):
        raise OSError("no such disk")
"""


def test_a_job_without_data_is_said_before_it_is_started_and_refused_after(
    at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(at / "cache"))
    (at / "job.py").write_text(JOB, encoding="utf-8")
    found = api.launch(lp.on_cpus(1).replace(job="job.py:NoData"), kind="slurm")
    assert isinstance(found, Launch)
    assert "job.py:NoData: it has no dataset()" in found.fault
    assert any("this run would end at once" in note for note in launch_notes([found]))
    with pytest.raises(JobFailed, match="it has no dataset"):
        api.start_launch(found)
    assert not (at / "runs").exists()
    # What can be trained, what is somebody's own script, and what nobody can tell are let through.
    fine = api.launch(lp.on_cpus(1).replace(job="job.py:WithData"), kind="slurm")
    own = api.launch(lp.on_cpus(1).replace(job="job.py:NoData"), kind="accelerate", script="own.py")
    gone = api.launch(lp.on_cpus(1).replace(job="elsewhere.py:NoData"), kind="slurm")
    broken = api.launch(lp.on_cpus(1).replace(job="job.py:Broken"), kind="slurm")
    assert [one.fault for one in (fine, own, gone, broken) if isinstance(one, Launch)] == [""] * 4
    # Cached: asking a child process takes seconds.
    assert list(cache.JOB_FAULTS.folder.iterdir())


def test_words_and_lines_are_quoted_by_the_rules_of_their_language() -> None:
    assert shell_word("a'b") == "'a'\"'\"'b'"
    with pytest.raises(WrongUse, match="NUL"):
        shell_word("a\0b")
    assert shell_line(["a", "--b", "c d"]) == "a \\\n  --b 'c d'"
    assert batch_option("output", "/a b") == '#SBATCH --output="/a b"'
