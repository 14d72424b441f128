"""Owners of the memory: which modules hold each part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.detecting import explain
from trimtab.pages.figures import list_memory_parts
from trimtab.predict.memory import group_owners, list_part_owners
from trimtab.strategies import strategy_of
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.predict.memory import PartOwner
    from trimtab.spec import Estimate, Setting, Trace
    from trimtab.training.job_queries import ParameterFacts

PART_WORDS = {
    "optimizer": "optimizer-state",
    "communication": "communication-buffers",
    "cached": "reserved",
}
"""Words of the glossary for parts whose name is another."""
LEAST_REST = 2**20
"""A smaller rest of a part gets no line."""
OF_PARAMETERS = ("weights", "gradients", "optimizer")
OUTSIDE = {
    "activations": "the loss, and other code outside of the modules",
    "workspace": "shared by all operations",
    "inputs": "the batch",
}
"""What allocations of a part are that no module made; for other parts: outside of the modules."""
ROUNDING, IN_FLIGHT = "rounding by the allocator", "other micro-batches in flight, and rounding"
NCCL = "NCCL's kernels and buffers"
SPLIT = "The shares are those of the whole model: each GPU holds a part of it."


def describe_owners(
    estimate: Estimate, setting: Setting, trace: Trace, parameters: dict[str, ParameterFacts]
) -> dict[str, dict[str, Any]]:
    """Return what each part of the memory is, and its owners with their sizes."""
    rank = next((rank for rank in trace.ranks if rank.rank == estimate.fullest_rank), trace.ranks[0])
    traced = list_part_owners(rank)
    parts: dict[str, dict[str, Any]] = {}
    for part in list_memory_parts(estimate):
        owners, note = traced.get(part.name, []), ""
        if part.name in OF_PARAMETERS and not any(owner.module for owner in owners):
            owners = share_parameters(part.name, int(part.value), setting, parameters) or owners
            note = SPLIT if trace.beside else ""
        listed = [(name_owner(owner, part.name), owner.size) for owner in owners]
        rest = int(part.value) - sum(size for _, size in listed)
        other = IN_FLIGHT if strategy_of(setting).has_schedule else ROUNDING
        is_nccl = part.name == "communication"
        if rest >= LEAST_REST and (listed or is_nccl):
            listed.append((NCCL if is_nccl else other, rest))
        what = explain(PART_WORDS.get(part.name, part.name)).what
        parts[part.name] = {
            "what": f"{what} {note}".strip(),
            "owners": [{"name": name, "shown": format_bytes(size)} for name, size in listed],
        }
    return parts


def share_parameters(
    part: str, size: int, setting: Setting, parameters: dict[str, ParameterFacts]
) -> list[PartOwner]:
    """Return a part of the memory by the modules whose parameters it is for; empty if they are unknown.

    Weights are shared out by their bytes, gradients and optimizer state by the number of trained weights.
    """
    bits = setting.base.storage.bits
    shares = []
    for name, facts in parameters.items():
        is_stored = bits and facts.is_matrix and not facts.is_trained
        weight = facts.numbers * bits / 8 if is_stored else float(facts.bytes)
        share = weight if part == "weights" else facts.numbers * facts.is_trained
        shares.append((name.rpartition(".")[0], share))
    whole = sum(share for _, share in shares)
    return group_owners((module, size * share / whole) for module, share in shares if share) if whole else []


def name_owner(owner: PartOwner, part: str) -> str:
    """Return an owner in words.

    >>> from trimtab.predict.memory import PartOwner
    >>> name_owner(PartOwner("blocks.*.mlp", 12, 5), "weights"), name_owner(PartOwner("", 1, 5), "inputs")
    ('blocks.*.mlp (12 modules)', 'the batch')
    """
    if not owner.module:
        return OUTSIDE.get(part, "outside of the modules")
    name = f"{owner.module} ({owner.modules} modules)" if owner.modules > 1 else owner.module
    # The libraries keep their workspace, and use it again for other modules.
    return f"first used in {name}" if part == "workspace" else name
