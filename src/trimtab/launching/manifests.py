"""Build manifests: a Kubeflow TrainJob, an Indexed Job with a headless Service, or a SkyPilot task.

Kubernetes expands `$(NAME)` in commands and variables, and reads `$$` as `$`; values are escaped so that they
arrive unchanged. Schemas: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1,
https://github.com/kubeflow/trainer, manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml, and
https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.launching.job_spec import build_environment, build_train_command
from trimtab.launching.quoting import Raw, dump_yaml, make_label, shell_line
from trimtab.spec import Launch, LaunchKind, Vendor
from trimtab.units import MIB

if TYPE_CHECKING:
    from trimtab.launching.defaults import LaunchDefaults
    from trimtab.launching.job_spec import JobSpec
    from trimtab.launching.resources import Resources

PORT = 29400
GRACE_S = 120
"""How long a pod that has to go may take to save."""
ENDINGS = [2, 3, 4]
"""Exit codes that come again if the same is run again: wrong use, nothing fits, the job's own code."""
RETRIES = 10
"""Pods of each node that may fail otherwise."""
PLAN_FOLDER = "/etc/trimtab"
PLAN_NAME = "plan.json"
PLAN_VARIABLE = "TRIMTAB_PLAN"
GPU_RESOURCES = {Vendor.NVIDIA: "nvidia.com/gpu", Vendor.AMD: "amd.com/gpu"}


def build_indexed_job(job_spec: JobSpec, defaults: LaunchDefaults, *, script_file: str) -> Launch:
    """Build a Service by which the pods find the first of them, the plan, and the Job."""
    name = make_label(f"trimtab-{job_spec.plan.job}")
    place = f"{name}-0.{name}:{PORT}"
    inside = job_spec.replace(
        plan_file=f"{PLAN_FOLDER}/{PLAN_NAME}", out=_path_below(defaults.mount, job_spec.out)
    )
    words = build_train_command(inside, rendezvous=place)
    image, given = _require_image(defaults), _pod_environment(job_spec, defaults)
    about = _metadata(name, defaults)
    volumes, mounts = _build_volumes(job_spec, defaults, plan=name)
    container = {
        "name": "train",
        "image": image,
        "command": [escape_dollars(word) for word in words],
        "env": [{"name": key, "value": escape_dollars(value)} for key, value in given.items()],
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": pod_resources(job_spec.resources),
        "volumeMounts": mounts,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        # Pods have to find each other before they are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    plan = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": about,
        "data": {PLAN_NAME: shorten_plan(job_spec, indent=2) + "\n"},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": about,
        "spec": {
            "completionMode": "Indexed",
            "completions": job_spec.resources.nodes,
            "parallelism": job_spec.resources.nodes,
            "backoffLimit": RETRIES * job_spec.resources.nodes,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "train", "operator": "In", "values": ENDINGS},
                    },
                ]
            },
            "template": {
                "metadata": {"labels": dict(about["labels"])},
                "spec": {
                    "subdomain": name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE_S,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }
    return _manifest_launch(LaunchKind.KUBERNETES, [service, plan, job], script_file, job_spec, defaults)


def build_train_job(job_spec: JobSpec, defaults: LaunchDefaults, *, script_file: str) -> Launch:
    """Build a TrainJob; its operator starts one pod a node and tells each the rendezvous.

    Volumes are the runtime's: how a TrainJob adds its own has changed from release to release.
    """
    name = make_label(f"trimtab-{job_spec.plan.job}")
    plan_file = "/tmp/trimtab-plan.json"  # noqa: S108 - in a container that has nobody else in it
    inside = job_spec.replace(plan_file=plan_file, out=_path_below(defaults.mount, job_spec.out))
    place = Raw('"$PET_MASTER_ADDR:$PET_MASTER_PORT"')
    words = shell_line(build_train_command(inside, rendezvous=place))
    script = f'printf %s "${PLAN_VARIABLE}" > {plan_file}\nexec {words}\n'
    given = {**_pod_environment(job_spec, defaults), PLAN_VARIABLE: shorten_plan(job_spec)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(name, defaults),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": defaults.runtime,
            },
            "trainer": {
                "image": _require_image(defaults),
                "command": ["bash", "-c", escape_dollars(script)],
                "numNodes": job_spec.resources.nodes,
                "numProcPerNode": job_spec.resources.procs,
                "resourcesPerNode": pod_resources(job_spec.resources),
                "env": [{"name": key, "value": escape_dollars(value)} for key, value in given.items()],
            },
        },
    }
    launch = _manifest_launch(LaunchKind.KUBEFLOW, [job], script_file, job_spec, defaults)
    note = f"the runtime {defaults.runtime} has to mount the folder {defaults.mount}, which all pods share"
    return launch.replace(notes=(*launch.notes, note))


def escape_dollars(text: str) -> str:
    """Escape a text so that Kubernetes leaves it as it is.

    >>> escape_dollars("$(HOME) and $x")
    '$$(HOME) and $$x'
    """
    return text.replace("$", "$$")


def shorten_plan(job_spec: JobSpec, *, indent: int = 0) -> str:
    """Return the plan without what only people read: a manifest has little room."""
    return job_spec.plan.replace(
        runners_up=(), rejected=(), comparison=(), what_if=(), reasons=(), left_out=()
    ).to_json(indent=indent)


def pod_resources(resources: Resources) -> dict[str, dict[str, str]]:
    """Return the resources of a pod: GPUs are limits, from which Kubernetes makes requests."""
    pod = {"requests": {"cpu": str(resources.cpus)}}
    if resources.memory_bytes:
        pod["requests"]["memory"] = f"{-(-resources.memory_bytes // MIB)}Mi"
    if resources.gpus:
        pod["limits"] = {_gpu_resource(resources): str(resources.gpus)}
    return pod


def _gpu_resource(resources: Resources) -> str:
    """Return the device plugins' name of the GPUs."""
    from trimtab.catalog.devices import find_typed_device

    vendors = {find_typed_device(device)[0].vendor for device in resources.devices}
    return GPU_RESOURCES[Vendor.AMD if Vendor.AMD in vendors else Vendor.NVIDIA]


def _manifest_launch(
    kind: LaunchKind, documents: list[Any], script_file: str, job_spec: JobSpec, defaults: LaunchDefaults
) -> Launch:
    notes = ["the job's own files have to be in the image, or on the volume"]
    if job_spec.resources.gpus:
        notes.append(
            f"GPUs of any type are asked for; the plan is for {', '.join(job_spec.resources.devices)}"
        )
    if not defaults.claim and kind is LaunchKind.KUBERNETES:
        notes.append("without claim in [launch] of trimtab.toml, checkpoints go when the pod goes")
    return Launch(
        kind=kind,
        command=("kubectl", "apply", "-f", script_file),
        environment=_pod_environment(job_spec, defaults),
        script=dump_yaml(documents),
        script_file=script_file,
        out=job_spec.out,
        notes=tuple(notes),
    )


def _pod_environment(job_spec: JobSpec, defaults: LaunchDefaults) -> dict[str, str]:
    variables = build_environment(job_spec, cores=job_spec.resources.cpus, offline=defaults.offline)
    return {
        **{name: value for name, (value, _) in variables.items()},
        "PYTHONUNBUFFERED": "1",
        **defaults.environment,
    }


def _require_image(defaults: LaunchDefaults) -> str:
    if not defaults.image:
        raise WrongUse(
            "a launch in containers",
            found="no image is named",
            cure="Give --image, or image in [launch] of trimtab.toml: it has to hold trimtab and the job.",
        )
    return defaults.image


def _metadata(name: str, defaults: LaunchDefaults) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if defaults.namespace:
        metadata["namespace"] = defaults.namespace
    return {**metadata, "labels": {"app.kubernetes.io/managed-by": "trimtab"}}


def _path_below(mount: str, out: str) -> str:
    return f"{mount.rstrip('/')}/{out.lstrip('/')}"


def _build_volumes(job_spec: JobSpec, defaults: LaunchDefaults, *, plan: str) -> tuple[list[Any], list[Any]]:
    """Build the volumes: the plan, shared memory for data loaders, and the pods' shared volume."""
    if not defaults.claim and job_spec.resources.nodes > 1:
        raise WrongUse(
            f"a launch on {job_spec.resources.nodes} pods",
            found="they have no folder that they share, where checkpoints are kept",
            cure='Name a PersistentVolumeClaim in [launch] of trimtab.toml: claim = "NAME".',
        )
    shared = {"persistentVolumeClaim": {"claimName": defaults.claim}} if defaults.claim else {"emptyDir": {}}
    volumes = [
        {"name": "plan", "configMap": {"name": plan}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "shared", **shared},
    ]
    mounts = [
        {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108 - it is what data loaders share batches through
        {"name": "shared", "mountPath": defaults.mount},
    ]
    return volumes, mounts


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


def build_sky_task(job_spec: JobSpec, defaults: LaunchDefaults, *, script_file: str) -> Launch:
    """Build a task for `sky launch`."""
    resources = job_spec.resources
    inside = job_spec.replace(plan_file=PLAN)
    given = build_environment(job_spec, cores=None, offline=defaults.offline)
    place = Raw(f'"$address:{PORT}"')
    # Behind a tilde that the shell reads.
    words = [Raw(word) if word == PLAN else word for word in build_train_command(inside, rendezvous=place)]
    document: dict[str, Any] = {
        "name": make_label(f"trimtab-{job_spec.plan.job}"),
        "workdir": job_spec.folder,
        "num_nodes": resources.nodes,
        "resources": {
            **(
                {"accelerators": f"{sky_accelerator(resources.devices)}:{resources.gpus}"}
                if resources.gpus
                else {}
            ),
            "cpus": f"{resources.cpus}+",
            **({"image_id": f"docker:{defaults.image}"} if defaults.image else {}),
        },
        "file_mounts": {PLAN: job_spec.plan_file},
        "envs": {**{name: value for name, (value, _) in given.items()}, **defaults.environment},
        **({"setup": "\n".join(defaults.lines) + "\n"} if defaults.lines else {}),
        "run": f'address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{shell_line(words)}\n',
    }
    return Launch(
        kind=LaunchKind.SKY,
        command=("sky", "launch", script_file),
        environment=document["envs"],
        script=dump_yaml([document]),
        script_file=script_file,
        out=job_spec.out,
        notes=("the run's folder is on the nodes' own disks unless it lies in a mounted bucket",),
    )


def sky_accelerator(devices: tuple[str, ...]) -> str:
    """Return SkyPilot's name of the devices of a plan.

    >>> sky_accelerator(("H100 SXM5 80GB",)), sky_accelerator(("A10G (AWS)",))
    ('H100', 'A10G')
    """
    if len(devices) == 1:
        name = devices[0]
        first = name.split()[0]
        accelerator = ACCELERATORS.get(name) or (first if first in PLAIN else None)
        if accelerator:
            return accelerator
    raise WrongUse(
        f"--sky with a plan for {' and '.join(devices)}",
        found="SkyPilot has no name for that that is known here",
        cure="Plan for a device that clouds lend, as `sky show-gpus` lists them.",
    )
