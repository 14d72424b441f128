"""A task of SkyPilot, as text. Shape: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.launching.errand import build_environment, build_train_command
from trimtab.launching.quoting import Raw, dump_yaml, make_label, shell_line
from trimtab.spec import Launch, LaunchKind

if TYPE_CHECKING:
    from trimtab.launching.errand import JobSpec
    from trimtab.launching.habits import LaunchDefaults

PORT = 29400
PLAN = "~/trimtab-plan.json"
ACCELERATORS = {
    "Tesla T4": "T4",
    "A100 40GB SXM4": "A100",
    "A100 40GB PCIe": "A100",
    "A100 80GB SXM4": "A100-80GB",
    "A100 80GB PCIe": "A100-80GB",
    "H100 SXM5 80GB": "H100",
    "H100 PCIe 80GB": "H100",
    "H200 SXM 141GB": "H200",
    "V100 SXM2 16GB": "V100",
    "V100 SXM2 32GB": "V100-32GB",
}
"""SkyPilot's names of devices that it calls otherwise than by one word of ours. Source: `sky show-gpus`."""
PLAIN = ("A10", "A10G", "L4", "L40", "L40S", "B200")


def build_sky_task(errand: JobSpec, habits: LaunchDefaults, *, script_file: str) -> Launch:
    """A task for `sky launch`."""
    need = errand.need
    inside = errand.replace(plan_file=PLAN)
    given = build_environment(errand, cores=None, offline=habits.offline)
    place = Raw(f'"$address:{PORT}"')
    # Behind a tilde that the shell reads.
    words = [Raw(word) if word == PLAN else word for word in build_train_command(inside, rendezvous=place)]
    document: dict[str, Any] = {
        "name": make_label(f"trimtab-{errand.plan.job}"),
        "workdir": errand.folder,
        "num_nodes": need.nodes,
        "resources": {
            **({"accelerators": f"{sky_accelerator(need.devices)}:{need.gpus}"} if need.gpus else {}),
            "cpus": f"{need.cpus}+",
            **({"image_id": f"docker:{habits.image}"} if habits.image else {}),
        },
        "file_mounts": {PLAN: errand.plan_file},
        "envs": {**{name: value for name, (value, _) in given.items()}, **habits.environment},
        **({"setup": "\n".join(habits.lines) + "\n"} if habits.lines else {}),
        "run": f'address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{shell_line(words)}\n',
    }
    return Launch(
        kind=LaunchKind.SKY,
        command=("sky", "launch", script_file),
        environment=document["envs"],
        script=dump_yaml([document]),
        script_file=script_file,
        out=errand.out,
        notes=("the run's folder is on the nodes' own disks unless it lies in a mounted bucket",),
    )


def sky_accelerator(devices: tuple[str, ...]) -> str:
    """What SkyPilot calls the devices of a plan.

    >>> sky_accelerator(("H100 SXM5 80GB",)), sky_accelerator(("A10G (AWS)",))
    ('H100', 'A10G')
    """
    if len(devices) == 1:
        name = devices[0]
        first = name.split()[0]
        known = ACCELERATORS.get(name) or (first if first in PLAIN else None)
        if known:
            return known
    raise WrongUse(
        f"--sky with a plan for {' and '.join(devices)}",
        found="SkyPilot has no name for that that is known here",
        cure="Plan for a device that clouds lend, as `sky show-gpus` lists them.",
    )
