"""Estimate the device memory of NCCL: its kernels, its communicators, and buffers between ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import nccl_memory
from trimtab.predict.communication import find_paths
from trimtab.spec import ContextMethod
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.predict.collectives import Paths
    from trimtab.predict.communication import Links
    from trimtab.spec import Mesh, Setting


class Communicator(NamedTuple):
    """A group of ranks that exchange data."""

    use: str
    """all_gather (with reduce_scatter), all_reduce, all_to_all or send."""
    ranks: int
    apart: int = 1
    """Difference between the numbers of consecutive ranks."""


def estimate_nccl_bytes(setting: Setting, links: Links) -> int:
    """Return the device memory that NCCL takes in each process of a setting; 0 for one process.

    Sizes and numbers of channels follow from NCCL's source and logs. Of published totals, an all-reduce
    between two and between four A100 (544 and 688 MB) is -11 % and +12 % off, an all-to-all between eight
    H100 (3.28 GB) -2 %.
    """
    return sum_communicators(setting.mesh, links, setting.cp_method)


@lru_cache(maxsize=4096)
def sum_communicators(mesh: Mesh, links: Links, method: ContextMethod = ContextMethod.RING) -> int:
    """Return the device memory that NCCL takes in each process of a mesh; 0 for one process."""
    if mesh.size == 1:
        return 0
    sizes = (
        _count_communicator_mib(group.use, links, find_paths(links, group.ranks, group.apart))
        for group in list_communicators(mesh, method)
    )
    return (nccl_memory().kernels_mib + sum(sizes)) * MIB


def list_communicators(mesh: Mesh, method: ContextMethod = ContextMethod.RING) -> Iterator[Communicator]:
    """Yield the groups that a rank of a mesh belongs to.

    >>> from trimtab.spec import Mesh
    >>> list(list_communicators(Mesh(dp_replicate=2, dp_shard=8)))
    [Communicator(use='all_gather', ranks=8, apart=1), Communicator(use='all_reduce', ranks=2, apart=8)]
    """
    inside = mesh.expert_ranks
    if mesh.tp > 1:
        yield Communicator("all_reduce", mesh.tp)
    if mesh.cp > 1:
        yield Communicator("send" if method is ContextMethod.RING else "all_to_all", mesh.cp, mesh.tp)
    if mesh.shards > 1:
        yield Communicator("all_gather", mesh.shards, mesh.tp)
    if mesh.ep > 1:
        yield Communicator("all_to_all", mesh.ep)
    if (copies := max(mesh.branch_ranks)) > 1:
        yield Communicator("all_reduce", copies, inside)
    if mesh.branch > 1:
        yield Communicator("all_reduce", mesh.branch, inside * max(mesh.branch_ranks))
    if mesh.pp > 1:
        yield Communicator("send", mesh.pp, mesh.size // mesh.pp)


def _count_communicator_mib(use: str, links: Links, paths: Paths) -> int:
    """Return the MiB of a communicator and of the buffers for what it is used for."""
    row = nccl_memory()
    between_pairs = row.bus_channels
    if paths.nvlink:
        between_pairs = row.pair_channels if links.pair is None else row.board_pair_channels
    channels = row.bus_channels
    if paths.nodes > 1:
        channels = row.network_channels
    elif paths.nvlink:
        channels = row.nvlink_channels
    size = row.communicator_mib + row.channel_mib * max(channels, between_pairs)
    if use == "send":
        # Both ways between a rank and the next, and the one before: over the network ranks share a buffer.
        return size + row.connection_mib * between_pairs * min(2, paths.local - 1)
    if use == "all_to_all":
        return size + row.connection_mib * between_pairs * (paths.local - 1)
    size += row.connection_mib * channels
    if use == "all_reduce":
        if paths.ranks > 2:  # noqa: PLR2004 - the tree of two ranks uses the connections of their ring
            size += row.connection_mib * channels
        if paths.switched and paths.limits.nvls_share and paths.local > 1:
            size += row.sharp_mib * paths.local
    return size
