"""The device memory of NCCL: communicators of a mesh, their buffers, and estimates that include them."""

from __future__ import annotations

import pytest

import trimtab
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner.layout_plans import LayoutModel, study_layouts
from trimtab.predict.communication import find_links
from trimtab.predict.nccl_memory import Communicator, list_communicators, sum_communicators
from trimtab.spec import ContextMethod, DecoderShape, Mesh
from trimtab.units import MIB

KERNELS = 170


def count_mib(devices: str, mesh: Mesh, method: ContextMethod = ContextMethod.RING) -> int:
    """Return the MiB of NCCL in each process."""
    return sum_communicators(mesh, find_links(parse_cluster(devices), mesh.size), method) // MIB


def test_one_process_has_no_communicator() -> None:
    assert count_mib("H100", Mesh()) == 0


@pytest.mark.parametrize(
    ("mesh", "communicators"),
    [
        (Mesh(dp_replicate=4), [Communicator("all_reduce", 4)]),
        (Mesh(dp_shard=4), [Communicator("all_gather", 4)]),
        (Mesh(dp_shard=4, tp=2), [Communicator("all_reduce", 2), Communicator("all_gather", 4, 2)]),
        (Mesh(dp_shard=8, ep=4), [Communicator("all_gather", 8), Communicator("all_to_all", 4)]),
        (Mesh(dp_shard=2, cp=2), [Communicator("send", 2), Communicator("all_gather", 4)]),
        (Mesh(dp_replicate=2, pp=4), [Communicator("all_reduce", 2), Communicator("send", 4, 2)]),
        (Mesh(branch=2, copies=(2, 1)), [Communicator("all_reduce", 2), Communicator("all_reduce", 2, 2)]),
    ],
)
def test_every_axis_with_several_ranks_has_a_communicator(
    mesh: Mesh, communicators: list[Communicator]
) -> None:
    assert list(list_communicators(mesh)) == communicators


def test_attention_by_all_to_all_exchanges_with_every_rank() -> None:
    mesh = Mesh(cp=4)
    assert Communicator("all_to_all", 4) in list(list_communicators(mesh, ContextMethod.ALL_TO_ALL))
    ring, exchange = (count_mib("4xH100", mesh, method) for method in ContextMethod)
    assert exchange - ring == 12 * 32, "a third peer, 32 channels to it"


@pytest.mark.parametrize(
    ("devices", "mesh", "published_mib", "error"),
    [
        ("2xA100-80GB", Mesh(dp_replicate=2), 544, 0.12),
        ("4xA100-80GB", Mesh(dp_replicate=4), 688, 0.13),
        ("8xH100", Mesh(dp_shard=8, ep=8), 3.28e9 / MIB, 0.03),
    ],
)
def test_published_totals_are_met(devices: str, mesh: Mesh, published_mib: float, error: float) -> None:
    """The totals are of one communicator: of groups that came after others, or with the kernels."""
    exchanges = mesh.ep > 1
    others = count_mib(devices, Mesh(dp_shard=8)) if exchanges else KERNELS
    own = count_mib(devices, mesh) - others + KERNELS * exchanges
    assert own == pytest.approx(published_mib, rel=error)


def test_switches_that_add_need_a_buffer_for_every_rank_of_the_node() -> None:
    hopper, ampere = (count_mib(devices, Mesh(dp_replicate=8)) for devices in ("8xH100", "8xA100-80GB"))
    assert hopper - ampere == 8 * 32


def test_cards_on_a_bus_have_few_channels() -> None:
    assert count_mib("8xA10", Mesh(dp_shard=8)) < 250 < count_mib("8xA100-80GB", Mesh(dp_shard=8))


def test_sends_between_nodes_need_no_buffers_of_their_own() -> None:
    inside = count_mib("8xH100", Mesh(pp=2, dp_shard=4))
    between = count_mib("2x8xH100", Mesh(pp=2, dp_shard=8))
    assert inside - between >= 12 * 32


def test_estimates_count_nccl_and_say_so() -> None:
    alone = trimtab.estimate("slm:tiny", "H100", micro_batch=2)
    several = trimtab.estimate("slm:tiny", "2xH100", micro_batch=2, strategy="ddp")
    size = count_mib("2xH100", Mesh(dp_replicate=2)) * MIB
    assert several.process_bytes - several.reserved_bytes == alone.process_bytes - alone.reserved_bytes + size
    assert any("NCCL takes" in assumption for assumption in several.assumptions)
    assert not any("NCCL takes" in assumption for assumption in alone.assumptions)


def test_a_large_exchange_of_tokens_can_be_what_does_not_fit() -> None:
    """Layouts by formulas lose as much of their budget as NCCL needs for them."""
    shape = DecoderShape(
        layers=4,
        width=1024,
        heads=8,
        key_value_heads=8,
        head_size=128,
        feed_forward=1024,
        vocabulary=1000,
        experts=8,
        experts_per_token=2,
    )
    model = LayoutModel(shape, parse_cluster("8xH100"), sequence=1024, global_batch=64)
    study = study_layouts(model)
    rows = [study.describe(ranked) for ranked in study.search.found]
    split, together = (min(row.memory_bytes for row in rows if row.ep == ep) for ep in (8, 1))
    assert split > together + 2000 * MIB
