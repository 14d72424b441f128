"""The options of `torchrun` and `accelerate launch`: which take a value, and where the script begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN_FLAGS = _words(
    "--standalone -m --module --no-python --run-path --virtual-local-rank --use-env -h --help"
)
TORCHRUN_VALUED = _words(
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts "
    "--monitor-interval --start-method --event-log-handler --role --log-dir -r --redirects -t --tee "
    "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr "
    "--master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout"
)
ACCELERATE_FLAGS = _words(
    "-q --quiet --cpu --multi-gpu --tpu --enable-cpu-affinity --dynamo-use-fullgraph --dynamo-use-dynamic "
    "--dynamo-use-regional-compilation --use-deepspeed --use-fsdp --use-parallelism-config --use-megatron-lm "
    "--same-network -m --module --no-python --tpu-cluster --no-tpu-cluster --tpu-use-sudo --downcast-bf16 "
    "--fp8-use-autocast-during-eval --debug -h --help"
)
ACCELERATE_VALUED = _words(
    "--config-file --mixed-precision --num-processes --num-machines --num-cpu-threads-per-process "
    "--dynamo-backend --dynamo-mode --gpu-ids --machine-rank --main-process-ip --main-process-port -t --tee "
    "--log-dir --role --rdzv-backend --rdzv-conf --max-restarts --monitor-interval --vm --env "
    "--main-training-function --deepspeed-config-file --zero-stage --offload-optimizer-device "
    "--offload-param-device --offload-optimizer-nvme-path --offload-param-nvme-path "
    "--gradient-accumulation-steps --gradient-clipping --zero3-init-flag --zero3-save-16bit-model "
    "--deepspeed-hostfile --deepspeed-exclusion-filter --deepspeed-inclusion-filter "
    "--deepspeed-multinode-launcher --deepspeed-moe-layer-cls-names --aws-access-key-id "
    "--aws-secret-access-key --mpirun-hostfile --fsdp-version --fsdp-offload-params --fsdp-min-num-params "
    "--fsdp-sharding-strategy --fsdp-reshard-after-forward --fsdp-auto-wrap-policy "
    "--fsdp-transformer-layer-cls-to-wrap --fsdp-backward-prefetch --fsdp-state-dict-type "
    "--fsdp-forward-prefetch --fsdp-use-orig-params --fsdp-cpu-ram-efficient-loading "
    "--fsdp-sync-module-states --fsdp-activation-checkpointing --fsdp-activation-checkpointing-offload"
)
VALUED_FAMILIES = ("--megatron-lm-", "--fp8-", "--parallelism-config-")
"""Long families of accelerate's options that all take a value, but for the flags above."""

TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
ACCELERATE_MODULES = {"accelerate.commands.launch", "accelerate.launch"}


@dataclass
class LauncherOptions:
    """The options of a launcher, and the words that follow them."""

    values: dict[str, str] = field(default_factory=dict)
    """Value of each option, by its long name with dashes; empty for a flag."""
    words: tuple[str, ...] = ()
    """The options as typed."""
    rest: tuple[str, ...] = ()
    """The script or module, and its arguments."""
    typed: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Each option by its long name, with its words as typed."""
    notes: list[str] = field(default_factory=list)

    def has_flag(self, *names: str) -> bool:
        """Return whether one of these flags is given."""
        return any(name in self.values for name in names)


def read_options(
    words: Sequence[str], flags: frozenset[str], valued: frozenset[str], launcher: str
) -> LauncherOptions:
    """Split a launcher's options from the script that follows them, as argparse does."""
    found, rest = LauncherOptions(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        before = len(rest)
        word = rest.pop(0)
        if word == "--":
            found.typed.append((word, (word,)))
            break
        name, has_value, value = word.partition("=")
        name = _complete(name.replace("_", "-"), flags | valued)
        if not name.startswith("--") and len(word) > 2 and word[:2] in valued:  # noqa: PLR2004 - -t3
            name, has_value, value = word[:2], "attached", word[2:]
        if not has_value and name not in flags:
            is_known = name in valued or name.startswith(VALUED_FAMILIES)
            if rest and (is_known or not rest[0].endswith(".py")):
                value = rest.pop(0)
            if not is_known:
                found.notes.append(f"{launcher} {name}: trimtab does not know this option, and ignores it")
        found.values[name] = value
        found.typed.append((name, tuple(words[len(words) - before : len(words) - len(rest)])))
    found.words = tuple(words[: len(words) - len(rest)])
    if "--" not in found.words and rest[1:2] == ["--"]:
        # argparse takes the first of them for its own, also behind the script: `-m train -- --epochs 3`.
        del rest[1]
    found.rest = tuple(rest)
    return found


def _complete(name: str, known: frozenset[str]) -> str:
    """Return the only option that starts with a name, as argparse accepts it; else the name itself."""
    if name in known or not name.startswith("--"):
        return name
    matches = [option for option in known if option.startswith(name)]
    return matches[0] if len(matches) == 1 else name
