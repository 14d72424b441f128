"""The allocator's rules, each named where it is tested, and the comparison with a recorded trace.

Expected values are worked out by hand from c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.cpp as of torch 2.11 to 2.13; `Slow` below is a second, independent reading
of the same rules.
"""

from __future__ import annotations

import gzip
import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compare_traces import compare, load, main, render
from trimtab.predict.allocator import (
    MIN_BLOCK,
    SMALL_SIZE,
    AllocatorConfig,
    CachingAllocator,
    Event,
    OutOfMemory,
    Replay,
    ReplayPeaks,
    _Addresses,
    replay,
    round_size,
    segment_size,
    should_split,
)

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PLAIN = AllocatorConfig()
GROWING = AllocatorConfig(expandable=True)


def alloc(ident: int, size: int, stream: int = 0) -> Event:
    return ("alloc", ident, size, stream)


def free(ident: int) -> Event:
    return ("free", ident, 0, 0)


FLUSH: Event = ("empty_cache", 0, 0, 0)


def run(*events: Event, config: AllocatorConfig = PLAIN) -> Replay:
    return replay(events, config)


def after(*events: Event, config: AllocatorConfig = PLAIN) -> CachingAllocator:
    allocator = CachingAllocator(config)
    for event in events:
        assert allocator.apply(event) == 0
    return allocator


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_round_size_goes_to_multiples_of_512(size: int, rounded: int) -> None:
    assert round_size(size, PLAIN) == rounded
    assert run(alloc(1, size)).peak_allocated == rounded


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 * KIB, 4, 1280 * KIB),
        (1280 * KIB, 4, 1280 * KIB),
        (1281 * KIB, 4, 1536 * KIB),
        (2048 * KIB, 4, 2048 * KIB),
        (3 * MIB + 1, 2, 4 * MIB),
        (2048, 4, 2048),  # size > 512 * divisions does not hold: plain rounding
        (2049, 4, 2560),  # it does: steps of 512 between 2048 and 4096
        (5000, 1, 5120),  # one division means off
    ],
)
def test_roundup_power2_next_division(size: int, divisions: int, rounded: int) -> None:
    config = AllocatorConfig(roundup_power2_divisions=divisions)
    assert round_size(size, config) == rounded
    assert run(alloc(1, size), config=config).peak_requested == size


def test_roundup_power2_divisions_has_one_entry_for_each_power_from_1_mib() -> None:
    config = AllocatorConfig(roundup_power2_divisions=(0, 8, *[2] * 14))
    assert round_size(1200 * KIB, config) == 1200 * KIB
    assert round_size(2 * MIB + 1, config) == 2 * MIB + 256 * KIB
    assert round_size(5 * MIB, config) == 6 * MIB
    assert round_size(100 * GIB, config) == 128 * GIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_get_allocation_size(size: int, segment: int) -> None:
    assert segment_size(size, PLAIN) == segment
    assert run(alloc(1, size)).peak_reserved == segment


def test_large_segment_size_replaces_the_20_mib() -> None:
    config = AllocatorConfig(large_segment_size=64 * MIB)
    assert run(alloc(1, 2 * MIB), config=config).peak_reserved == 64 * MIB
    growing = AllocatorConfig(large_segment_size=64 * MIB, expandable=True)
    assert run(alloc(1, 65 * MIB), config=growing).peak_reserved == 128 * MIB


# --- splitting, merging, best fit -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "size", "config", "cut"),
    [
        (511, KIB, PLAIN, False),
        (512, KIB, PLAIN, True),
        (MIB, 12 * MIB, PLAIN, False),
        (MIB + 512, 12 * MIB, PLAIN, True),
        (512, 12 * MIB, GROWING, True),
        (9 * MIB, 32 * MIB, AllocatorConfig(max_split_size=32 * MIB), False),
        (9 * MIB, 32 * MIB - 512, AllocatorConfig(max_split_size=32 * MIB), True),
    ],
)
def test_should_split(remaining: int, size: int, config: AllocatorConfig, cut: bool) -> None:
    assert should_split(remaining, size, config) is cut


def test_should_split_leaves_up_to_1_mib_with_a_large_block_and_counts_it_as_allocated() -> None:
    found = run(alloc(1, 11 * MIB))
    assert (found.peak_requested, found.peak_allocated) == (11 * MIB, 12 * MIB)
    assert run(alloc(1, 11 * MIB), config=GROWING).peak_allocated == 11 * MIB


def test_small_requests_share_a_2_mib_segment_until_it_is_full() -> None:
    assert run(*(alloc(i, MIB) for i in range(2))).peak_reserved == 2 * MIB
    assert run(*(alloc(i, MIB) for i in range(3))).peak_reserved == 4 * MIB


def test_pools_do_not_share_between_small_and_large() -> None:
    found = run(alloc(1, 20 * MIB), free(1), alloc(2, 512))
    assert found.reserved == 22 * MIB


def test_streams_do_not_share() -> None:
    found = run(alloc(1, 2 * MIB, 0), free(1), alloc(2, 2 * MIB, 7))
    assert (found.reserved, found.num_segments) == (40 * MIB, 2)


def test_a_block_goes_back_to_the_stream_it_came_from() -> None:
    found = run(alloc(1, 2 * MIB, 7), ("free", 1, 0, 0), alloc(2, 2 * MIB, 7))
    assert found.reserved == 20 * MIB


def test_best_fit_takes_the_smallest_block_that_suffices() -> None:
    state = after(
        alloc(1, 30 * MIB),
        alloc(2, 14 * MIB),
        alloc(3, 18 * MIB),
        free(1),
        free(2),
        free(3),
        alloc(4, 13 * MIB),
    )
    place = state.place(4)
    assert place is not None
    assert (place.segment, place.size) == (1, 14 * MIB)  # 1 MiB over: not split


def test_best_fit_among_equals_takes_the_lowest_address() -> None:
    events = [alloc(1, 12 * MIB), alloc(2, 12 * MIB), free(2), free(1), alloc(3, 12 * MIB)]
    place = after(*events).place(3)
    assert place is not None
    assert place.segment == 0
    falling = CachingAllocator(PLAIN, segment_addresses=[900 * MIB, 800 * MIB])
    for event in events:
        falling.apply(event)
    place = falling.place(3)
    assert place is not None
    assert place.segment == 1


REAL_ADDRESSES = [
    (24, 0),
    (48, -64),
    (72, -160),
    (24, -88),
    (2, -16),
    (24, -192),
    (48, -256),
    (96, -352),
    (96, -448),
    (20, -480),
    (24, -512),
    (48, -576),
    (72, -672),
    (24, -600),
    (24, -704),
    (48, -768),
    (96, -864),
    (96, -960),
    (24, -992),
    (48, -1056),
    (24, -1088),
    (72, -1184),
]
"""Sizes and bases in MiB, from a trace of an H200 with driver 580.159."""


def test_segments_lie_where_the_driver_put_them() -> None:
    driver = _Addresses(GIB)
    bases = [driver.take(size * MIB) for size, _ in REAL_ADDRESSES]
    assert [(base - bases[0]) // MIB for base in bases] == [base for _, base in REAL_ADDRESSES]


def test_a_segment_given_back_leaves_room_in_its_range_or_a_hole() -> None:
    driver = _Addresses(0)
    assert [driver.take(size * MIB) // MIB for size in (64, 20, 10, 64)] == [-64, -96, -76, -160]
    driver.give_back(-96 * MIB, 20 * MIB)
    assert driver.take(12 * MIB) == -96 * MIB  # its range holds another one still
    driver.give_back(-96 * MIB, 12 * MIB)
    driver.give_back(-76 * MIB, 10 * MIB)
    driver.give_back(-64 * MIB, 64 * MIB)  # now the upper two ranges are one hole
    assert driver.take(34 * MIB) == -64 * MIB
    assert driver.take(30 * MIB) == -30 * MIB  # what is left of that range
    assert driver.take(32 * MIB) == -96 * MIB
    assert driver.take(50 * MIB) == -224 * MIB
    driver.give_back(-224 * MIB, 50 * MIB)
    assert driver.take(90 * MIB) == -256 * MIB  # nothing lies below: no hole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 90)), max_size=60))
def test_addresses_in_use_never_overlap(moves: list[tuple[bool, int]]) -> None:
    driver = _Addresses(0)
    held: dict[int, int] = {}
    for gives, number in moves:
        if gives and held:
            start = sorted(held)[number % len(held)]
            driver.give_back(start, held.pop(start))
        else:
            start = driver.take(number * 2 * MIB)
            assert start not in held
            held[start] = number * 2 * MIB
        spans = sorted(held.items())
        assert all(low + size <= high for (low, size), (high, _) in pairwise(spans))
        spare = sum(end - start for start, end in driver._spare)  # noqa: SLF001
        taken = sum(end - start for start, end in driver._ranges)  # noqa: SLF001
        assert spare + sum(held.values()) == taken


def test_free_merges_with_both_neighbours() -> None:
    state = after(alloc(1, MIB), alloc(2, 512 * KIB), alloc(3, 512 * KIB), free(1), free(3), free(2))
    assert [(span.size, span.state) for span in state.layout()] == [(2 * MIB, "free")]
    assert state.reserved == 2 * MIB


def test_neighbouring_segments_do_not_merge() -> None:
    state = after(alloc(1, 10 * MIB), alloc(2, 10 * MIB), free(1), free(2))
    assert [span.size for span in state.layout()] == [10 * MIB, 10 * MIB]
    assert state.apply(alloc(3, 20 * MIB)) == 0
    assert state.reserved == 40 * MIB


def test_segments_stay_reserved_when_everything_is_freed() -> None:
    found = run(alloc(1, 100 * MIB), free(1))
    assert (found.allocated, found.reserved, found.num_segments) == (0, 100 * MIB, 1)


def test_empty_cache_frees_only_segments_without_a_live_block() -> None:
    found = run(alloc(1, 2 * MIB), alloc(2, 2 * MIB), alloc(3, 50 * MIB), free(1), free(3), FLUSH)
    assert (found.reserved, found.num_segments, found.num_retries) == (20 * MIB, 1, 0)


# --- max_split_size -------------------------------------------------------------------------------


def test_get_free_block_keeps_oversize_blocks_from_smaller_requests() -> None:
    config = AllocatorConfig(max_split_size=32 * MIB)
    found = run(alloc(1, 40 * MIB), free(1), alloc(2, 30 * MIB), config=config)
    assert found.reserved == 70 * MIB
    assert run(alloc(1, 40 * MIB), free(1), alloc(2, 30 * MIB)).reserved == 40 * MIB


@pytest.mark.parametrize(("first", "reserved"), [(58, 58), (60, 100)])
def test_get_free_block_lets_an_oversize_block_be_less_than_20_mib_too_large(
    first: int, reserved: int
) -> None:
    config = AllocatorConfig(max_split_size=32 * MIB)
    found = run(alloc(1, first * MIB), free(1), alloc(2, 40 * MIB), config=config)
    assert found.reserved == reserved * MIB


def test_max_non_split_rounding_moves_that_bound() -> None:
    config = AllocatorConfig(max_split_size=32 * MIB, max_non_split_rounding=64 * MIB)
    found = run(alloc(1, 60 * MIB), free(1), alloc(2, 40 * MIB), config=config)
    assert (found.reserved, found.allocated) == (60 * MIB, 60 * MIB)


def test_release_available_cached_blocks_gives_back_one_that_suffices_without_a_flush() -> None:
    config = AllocatorConfig(max_split_size=32 * MIB, capacity_bytes=150 * MIB)
    events = [alloc(1, 80 * MIB), alloc(2, 12 * MIB), free(1), free(2), alloc(3, 60 * MIB)]
    found = run(*events, config=config)
    assert (found.reserved, found.num_retries) == (72 * MIB, 0)  # the 12 MiB stay cached


def test_release_available_cached_blocks_gives_back_the_largest_until_they_suffice() -> None:
    config = AllocatorConfig(max_split_size=32 * MIB, capacity_bytes=130 * MIB)
    events = [alloc(1, 36 * MIB), alloc(2, 40 * MIB), alloc(3, 44 * MIB)]
    found = run(*events, free(1), free(2), free(3), alloc(4, 80 * MIB), config=config)
    assert (found.reserved, found.num_retries) == (116 * MIB, 0)  # 36 stay, 44 and 40 went


def test_without_max_split_size_the_same_need_flushes_everything() -> None:
    config = AllocatorConfig(capacity_bytes=130 * MIB)
    events = [alloc(1, 36 * MIB), alloc(2, 40 * MIB), alloc(3, 44 * MIB)]
    found = run(*events, free(1), free(2), free(3), alloc(4, 80 * MIB), config=config)
    assert (found.reserved, found.num_retries) == (80 * MIB, 1)


# --- capacity, limit, garbage collection ----------------------------------------------------------


def test_out_of_memory_names_the_event_and_what_was_missing() -> None:
    found = run(
        alloc(1, 60 * MIB), alloc(2, 60 * MIB), free(1), config=AllocatorConfig(capacity_bytes=100 * MIB)
    )
    expected = OutOfMemory(index=1, requested_bytes=60 * MIB, short_bytes=20 * MIB)
    assert found.out_of_memory == expected
    assert (found.num_retries, found.allocated, found.peak_reserved) == (1, 60 * MIB, 60 * MIB)


def test_split_segments_cannot_be_flushed() -> None:
    config = AllocatorConfig(capacity_bytes=40 * MIB)
    found = run(alloc(1, 2 * MIB), alloc(2, 2 * MIB), free(1), alloc(3, 30 * MIB), config=config)
    assert found.out_of_memory == OutOfMemory(index=3, requested_bytes=30 * MIB, short_bytes=10 * MIB)


def test_alloc_block_holds_the_limit_against_the_whole_segment_even_when_expandable() -> None:
    config = AllocatorConfig(expandable=True, limit_bytes=30 * MIB)
    found = run(alloc(1, 15 * MIB), alloc(2, 6 * MIB), config=config)
    assert found.out_of_memory is not None  # 20 mapped + 20 asked > 30, though 1 MiB more would do
    assert found.out_of_memory.short_bytes == 10 * MIB
    assert run(alloc(1, 15 * MIB), alloc(2, 6 * MIB), config=GROWING).reserved == 40 * MIB


def test_capacity_of_an_expandable_segment_is_held_against_pages() -> None:
    events = [alloc(1, 15 * MIB), alloc(2, 26 * MIB)]
    config = AllocatorConfig(expandable=True, capacity_bytes=59 * MIB)
    assert run(*events, config=config).out_of_memory == OutOfMemory(
        index=1, requested_bytes=26 * MIB, short_bytes=MIB
    )
    config = AllocatorConfig(expandable=True, capacity_bytes=60 * MIB)
    assert run(*events, config=config).out_of_memory is None


def test_garbage_collection_frees_what_has_been_idle_longest() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5, limit_bytes=200 * MIB)
    old = [alloc(1, 60 * MIB), free(1)]
    young = [alloc(2, 70 * MIB), free(2)]
    found = run(*old, *young, alloc(3, 90 * MIB), config=config)
    # At the third request 130 MiB exceed 100: ages are 2 (60 MiB) and 1 (70 MiB), their mean 1.5.
    assert (found.reserved, found.num_retries) == (160 * MIB, 0)


def test_garbage_collection_frees_a_block_that_is_alone_and_so_of_mean_age() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5, limit_bytes=200 * MIB)
    found = run(alloc(1, 110 * MIB), free(1), alloc(2, 120 * MIB), config=config)
    assert (found.reserved, found.num_retries) == (120 * MIB, 0)


def test_garbage_collection_counts_age_in_searches_of_the_large_pool() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.3, limit_bytes=400 * MIB)
    events = [alloc(ident, size * MIB) for ident, size in enumerate((2, 60, 40, 30))]
    events.append(alloc(10, 512))  # so that no small request misses, which would collect too
    search = [alloc(9, 2 * MIB), free(9)]
    small = [alloc(ident, 512) for ident in range(20, 30)]
    events += [free(1), *search, *small, free(2), *search, free(3), *search]
    found = run(*events, alloc(4, 90 * MIB), config=config)
    # Ages 4, 3 and 2, mean 3: 60 and 40 MiB go. Were small searches counted, only the 60 would.
    assert found.reserved == (20 + 30 + 2 + 90) * MIB


def test_garbage_collection_without_a_limit_does_nothing() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5, capacity_bytes=400 * MIB)
    found = run(alloc(1, 60 * MIB), free(1), alloc(2, 70 * MIB), free(2), alloc(3, 90 * MIB), config=config)
    assert found.reserved == 220 * MIB


# --- expandable segments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "mapped"), [(1, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 40)]
)
def test_map_takes_whole_pages_of_2_or_20_mib(size: int, mapped: int) -> None:
    found = run(alloc(1, size), config=GROWING)
    assert (found.reserved, found.num_segments) == (mapped * MIB, 1)


def test_expandable_segments_grow_at_their_end_using_the_free_tail_first() -> None:
    found = run(alloc(1, 15 * MIB), alloc(2, 15 * MIB), alloc(3, 15 * MIB), config=GROWING)
    assert (found.reserved, found.num_segments) == (
        60 * MIB,
        1,
    )  # 45 in three pages, not 3 x 20 apart
    assert [
        span.size // MIB for span in after(alloc(1, 15 * MIB), alloc(2, 15 * MIB), config=GROWING).layout()
    ][:3] == [15, 15, 10]


def test_get_free_block_spares_the_growable_tail() -> None:
    # Free: 10 MiB at the tail, which could grow without end, and a hole of 12 MiB.
    events = [alloc(1, 12 * MIB), alloc(2, 18 * MIB), free(1)]
    place = after(*events, alloc(3, 9 * MIB), config=GROWING).place(3)
    assert place is not None
    assert place.offset == 0  # best fit alone would have taken the tail's 10 MiB


def test_unmap_gives_back_only_pages_that_lie_wholly_in_a_free_block() -> None:
    events = [alloc(1, 50 * MIB), alloc(2, 5 * MIB), alloc(3, 45 * MIB), free(1), free(3)]
    state = after(*events, FLUSH, config=GROWING)
    spans = [(span.size // MIB, span.state) for span in state.layout()][:5]
    assert spans[:4] == [(40, "unmapped"), (10, "free"), (5, "live"), (5, "free")]
    assert state.reserved == 20 * MIB


def test_an_expandable_segment_without_live_blocks_is_released_whole() -> None:
    found = run(alloc(1, 50 * MIB), free(1), FLUSH, config=GROWING)
    assert (found.reserved, found.num_segments) == (0, 0)


def test_find_expandable_block_fills_the_lowest_hole_that_is_wide_enough() -> None:
    events = [alloc(1, 40 * MIB), alloc(2, 20 * MIB), free(1), FLUSH]
    hole = after(*events, alloc(3, 30 * MIB), config=GROWING)
    tail = after(*events, alloc(3, 41 * MIB), config=GROWING)
    low, high = hole.place(3), tail.place(3)
    assert low is not None
    assert high is not None
    assert (low.offset, hole.reserved) == (0, 60 * MIB)
    assert (high.offset, tail.reserved) == (60 * MIB, 80 * MIB)


def test_map_block_merges_with_the_free_block_behind_the_hole() -> None:
    events = [alloc(1, 50 * MIB), alloc(2, 5 * MIB), free(1), FLUSH]  # 40 unmapped, 10 free, 5 live
    state = after(*events, alloc(3, 45 * MIB), config=GROWING)
    place = state.place(3)
    assert place is not None
    assert (place.offset, state.reserved) == (0, 60 * MIB)


def test_retry_moves_pages_of_an_expandable_segment_to_another_stream() -> None:
    config = AllocatorConfig(expandable=True, capacity_bytes=60 * MIB)
    found = run(alloc(1, 40 * MIB, 0), free(1), alloc(2, 40 * MIB, 7), config=config)
    assert (found.reserved, found.num_retries, found.out_of_memory) == (40 * MIB, 1, None)


def test_expandable_segments_pass_over_max_split_size_by_growing() -> None:
    config = AllocatorConfig(expandable=True, max_split_size=32 * MIB)
    found = run(alloc(1, 60 * MIB), free(1), alloc(2, 2 * MIB), config=config)
    # get_free_block refuses the 60 MiB; find_expandable_block then comes back with that very block.
    assert found.reserved == 60 * MIB


# --- counting -------------------------------------------------------------------------------------


def test_reset_peak_at_starts_again_from_what_is_held() -> None:
    events = [alloc(1, 100 * MIB), free(1), alloc(2, 10 * MIB), alloc(3, 10 * MIB), free(3)]
    found = replay(events, reset_peak_at=[2, 5])
    assert found.windows == (
        ReplayPeaks(100 * MIB, 100 * MIB, 100 * MIB),
        ReplayPeaks(20 * MIB, 20 * MIB, 100 * MIB),
        ReplayPeaks(10 * MIB, 10 * MIB, 100 * MIB),
    )
    assert found.peak_allocated == 10 * MIB


def test_parallel_lists_are_events_too() -> None:
    found = replay(zip(["alloc", "free"], [1, 1], [600, 0], [0, 0], strict=True))
    assert (found.peak_allocated, found.peak_requested, found.allocated) == (1024, 600, 0)


def test_nothing_happens_without_events() -> None:
    assert run().windows == (ReplayPeaks(0, 0, 0),)


def test_a_size_of_zero_takes_and_counts_nothing() -> None:
    found = run(alloc(1, 0), free(1), alloc(1, 0))
    assert (found.windows, found.reserved, found.num_segments) == ((ReplayPeaks(0, 0, 0),), 0, 0)
    assert after(alloc(1, 0)).place(1) is None


def test_an_exbibyte_is_refused_at_once() -> None:
    found = run(alloc(1, 2 * MIB), free(1), alloc(2, 1 << 60))
    assert found.out_of_memory is not None
    assert (found.num_retries, found.reserved) == (0, 20 * MIB)  # no flush was tried


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([free(3)], "event 0 .* id 3 was never allocated"),
        ([alloc(3, 1), free(3), free(3)], "event 2 .* id 3 was freed already"),
        ([alloc(3, 1), alloc(3, 1)], "event 1 .* id 3 is live already"),
        ([alloc(3, -1)], "event 0 .* size -1 is negative"),
        ([("malloc", 1, 1, 0)], "event 0 .* unknown kind 'malloc'"),
    ],
)
def test_an_event_that_cannot_be_is_named(events: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(events)


@pytest.mark.parametrize(("index", "message"), [(-1, "count from 0"), (3, "only 2 events")])
def test_a_reset_outside_the_events_is_refused(index: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay([alloc(1, 1), free(1)], reset_peak_at=[index])


def test_the_place_of_an_unknown_id_is_refused() -> None:
    with pytest.raises(ValueError, match="id 5 was never allocated"):
        CachingAllocator(PLAIN).place(5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_split_size": 19 * MIB}, "max_split_size=19922944 must be at least"),
        ({"max_non_split_rounding": MIB}, "max_non_split_rounding=1048576 must be at least"),
        ({"large_segment_size": 10 * MIB}, "large_segment_size=10485760 must be above"),
        ({"large_segment_size": 20 * MIB + 1}, "must be whole MiB"),
        ({"garbage_collection_threshold": 1.0}, "must lie between 0 and 1"),
        ({"roundup_power2_divisions": 3}, "must be powers of two"),
        ({"roundup_power2_divisions": (2, 2)}, "must be one number or 16"),
        ({"capacity_bytes": -1}, "capacity_bytes=-1 must not be negative"),
        ({"limit_bytes": -1}, "limit_bytes=-1 must not be negative"),
    ],
)
def test_settings_the_real_parser_refuses_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorConfig(**fields)


# --- properties -----------------------------------------------------------------------------------

SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 9 * MIB, 10 * MIB, 19 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 60 * MIB),
)
CONFIGS = st.builds(
    AllocatorConfig,
    expandable=st.booleans(),
    max_split_size=st.sampled_from([None, None, 20 * MIB, 24 * MIB, 40 * MIB]),
    max_non_split_rounding=st.sampled_from([None, 30 * MIB]),
    roundup_power2_divisions=st.sampled_from([0, 4]),
    garbage_collection_threshold=st.sampled_from([None, 0.3, 0.8]),
    limit_bytes=st.sampled_from([None, 150 * MIB, 300 * MIB]),
    capacity_bytes=st.sampled_from([None, 90 * MIB, 200 * MIB, 333 * MIB]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    live: list[int] = []
    for ident in range(draw(st.integers(1, 45))):
        choice = draw(st.integers(0, 11))
        if choice == 0:
            events.append(FLUSH)
        elif choice <= 5 and live:
            events.append(free(live.pop(draw(st.integers(0, len(live) - 1)))))
        else:
            live.append(ident)
            events.append(alloc(ident, draw(SIZES), draw(st.sampled_from([0, 0, 0, 7]))))
    return events


def live_sizes(events: list[Event], config: AllocatorConfig) -> list[int]:
    sizes: dict[int, int] = {}
    for kind, ident, size, _ in events:
        if kind == "alloc":
            sizes[ident] = size
        elif kind == "free":
            del sizes[ident]
    return [round_size(size, config) for size in sizes.values() if size]


@settings(max_examples=150, deadline=None)
@given(histories(), CONFIGS)
def test_every_state_is_sound(events: list[Event], config: AllocatorConfig) -> None:
    state = CachingAllocator(config)
    for count, event in enumerate(events, start=1):
        if state.apply(event):
            break
        assert state.allocated <= state.reserved
        assert state.reserved <= (config.capacity_bytes or state.reserved)
        assert state.reserved <= max(config.limit_bytes or state.reserved, 0) or config.expandable
        check_layout(state)
        check_allocated(state, live_sizes(events[:count], config))


def check_layout(state: CachingAllocator) -> None:
    spans = state.layout()
    for one, two in pairwise(spans):
        assert one.address + one.size <= two.address, "two blocks overlap"
        if one.segment == two.segment:
            assert one.address + one.size == two.address, "a segment has a gap"
            assert one.state == "live" or one.state != two.state, "idle neighbours did not merge"
    held = sum(span.size for span in spans if span.state != "unmapped")
    assert held == state.reserved


def check_allocated(state: CachingAllocator, rounded: list[int]) -> None:
    """Blocks are the rounded requests; those of the large pool may keep a remainder unsplit."""
    blocks = [span.size for span in state.layout() if span.state == "live"]
    assert state.allocated == sum(blocks)
    assert len(blocks) == len(rounded)
    if state.config.expandable:
        assert state.allocated == sum(rounded)
    elif state.config.max_split_size is None:
        spare = sum(size > SMALL_SIZE for size in rounded) * SMALL_SIZE
        assert sum(rounded) <= state.allocated <= sum(rounded) + spare


@settings(max_examples=100, deadline=None)
@given(histories(), CONFIGS)
def test_freeing_everything_leaves_one_free_block_in_each_segment(
    events: list[Event], config: AllocatorConfig
) -> None:
    state = CachingAllocator(config)
    live: set[int] = set()
    for event in events:
        if state.apply(event):
            break
        live = live - {event[1]} if event[0] == "free" else live | {event[1]} if event[0] == "alloc" else live
    for ident in live:
        state.free(ident)
    assert (state.allocated, state.requested) == (0, 0)
    if not config.expandable:
        spans = state.layout()
        assert [span.state for span in spans] == ["free"] * state.num_segments
        assert sum(span.size for span in spans) == state.reserved
    state.empty_cache()
    assert state.reserved == 0
    assert [span for span in state.layout() if span.state != "unmapped"] == []


@settings(max_examples=50, deadline=None)
@given(histories(), CONFIGS)
def test_replaying_twice_gives_the_same(events: list[Event], config: AllocatorConfig) -> None:
    assert replay(events, config) == replay(iter(events), config)


@settings(max_examples=50, deadline=None)
@given(histories(), CONFIGS)
def test_windows_together_have_the_whole_peak(events: list[Event], config: AllocatorConfig) -> None:
    whole = replay(events, config)
    halves = replay(events, config, reset_peak_at=[len(events) // 2])
    assert whole.peak_reserved == max(window.reserved for window in halves.windows)
    assert whole.peak_allocated == max(window.allocated for window in halves.windows)
    assert whole.peak_requested == max(window.requested for window in halves.windows)


# --- a second reading of the rules ----------------------------------------------------------------


class Slow:
    """The same rules without lists of free blocks: gaps are searched again each time.

    Left out: max_split_size, garbage collection and the limit.
    """

    def __init__(self, config: AllocatorConfig) -> None:
        self.config = config
        self.segments: list[dict[str, Any]] = []
        self.live: dict[int, tuple[dict[str, Any], int, int]] = {}
        self.top = 1
        self.retries = 0

    @property
    def reserved(self) -> int:
        return sum(segment["page"] * len(segment["pages"]) for segment in self.segments)

    def gaps(self, segment: dict[str, Any]) -> list[tuple[int, int, bool]]:
        """Start, end and mappedness of what no live block covers; neighbours alike are joined."""
        taken = sorted((start, start + size) for home, start, size in self.live.values() if home is segment)
        page, base = segment["page"], segment["base"]
        marks = {base, base + segment["size"]} | {mark for pair in taken for mark in pair}
        for number in segment["pages"]:
            marks |= {base + number * page, base + (number + 1) * page}
        points = sorted(marks)
        joined: list[tuple[int, int, bool]] = []
        for start, end in pairwise(points):
            if any(low <= start < high for low, high in taken):
                continue
            mapped = (start - base) // page in segment["pages"]
            if joined and joined[-1][1:] == (start, mapped):
                joined[-1] = (joined[-1][0], end, mapped)
            else:
                joined.append((start, end, mapped))
        return joined

    def fitting(self, size: int, key: tuple[int, bool]) -> tuple[dict[str, Any], int, int] | None:
        found = []
        for segment in self.segments:
            if segment["key"] == key:
                gaps = self.gaps(segment)
                for start, end, mapped in gaps:
                    if mapped and end - start >= size:
                        behind = [b - a for a, b, is_mapped in gaps if a == end and not is_mapped]
                        found.append((end - start, start, end - start + sum(behind), segment))
        found.sort(key=lambda item: item[:2])
        while self.config.expandable and len(found) > 1 and found[1][2] < found[0][2]:
            found.pop(0)
        return (found[0][3], found[0][1], found[0][0]) if found else None

    def add(self, key: tuple[int, bool], size: int, page: int, pages: set[int]) -> dict[str, Any]:
        segment = {"key": key, "base": self.top, "size": size, "page": page, "pages": pages}
        self.top += size
        self.segments.append(segment)
        return segment

    def fits(self, size: int) -> bool:
        capacity = self.config.capacity_bytes
        return capacity is None or self.reserved + size <= capacity

    def grow(self, size: int, key: tuple[int, bool]) -> bool:
        if self.config.expandable:
            return self.expand(size, key)
        whole = segment_size(size, self.config)
        if not self.fits(whole):
            return False
        self.add(key, whole, whole, {0})
        return True

    def expand(self, size: int, key: tuple[int, bool]) -> bool:
        """Map the pages that the lowest run of gaps with an unmapped one lacks, gap by gap."""
        page = 2 * MIB if key[1] else 20 * MIB
        total = self.config.capacity_bytes or GIB << 20
        for attempt in range(2):
            for segment in self.segments:
                run = self.run(segment, size) if segment["key"] == key else None
                if run is not None:
                    return self.fill(segment, run, size)
            assert attempt == 0
            self.add(key, -(-(total + total // 8) // page) * page, page, set())
        raise AssertionError

    def run(self, segment: dict[str, Any], size: int) -> list[tuple[int, int, bool]] | None:
        gaps = self.gaps(segment)
        for at, gap in enumerate(gaps):
            if gap[2]:
                continue
            first = at - 1 if at and gaps[at - 1][1] == gap[0] else at
            run = [gaps[first]]
            for other in gaps[first + 1 :]:
                if run[-1][1] == other[0]:
                    run.append(other)
                else:
                    break
            if run[-1][1] - run[0][0] >= size:
                return run
        return None

    def fill(self, segment: dict[str, Any], run: list[tuple[int, int, bool]], size: int) -> bool:
        base, page = segment["base"], segment["page"]
        until = run[0][0] + size
        for start, end, mapped in run:
            if mapped or start >= until:
                continue
            first = (start - base) // page
            last = -(-(min(end, until) - base) // page)
            if not self.fits((last - first) * page):
                return False
            segment["pages"] |= set(range(first, last))
        return True

    def flush(self) -> None:
        for segment in self.segments:
            base, page = segment["base"], segment["page"]
            for start, end, mapped in self.gaps(segment):
                if mapped:
                    first, last = -(-(start - base) // page), (end - base) // page
                    segment["pages"] -= set(range(first, last))
        self.segments = [segment for segment in self.segments if segment["pages"]]

    def apply(self, event: Event) -> bool:
        kind, ident, size, stream = event
        if kind == "empty_cache":
            self.flush()
        elif kind == "free":
            self.live.pop(ident, None)
        elif size:
            return self.alloc(ident, round_size(size, self.config), stream)
        return True

    def alloc(self, ident: int, size: int, stream: int) -> bool:
        key = (stream, size <= MIB)
        found = self.fitting(size, key)
        if found is None and not self.grow(size, key):
            self.flush()
            self.retries += 1
            if not self.grow(size, key):
                return False
        found = found or self.fitting(size, key)
        assert found is not None
        segment, start, room = found
        tail = room - size
        cut = tail >= MIN_BLOCK if key[1] or self.config.expandable else tail > MIB
        self.live[ident] = (segment, start, size if cut else room)
        return True


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    histories(),
    st.builds(
        AllocatorConfig,
        expandable=st.booleans(),
        capacity_bytes=st.sampled_from([None, 60 * MIB, 90 * MIB, 133 * MIB, 200 * MIB]),
    ),
)
def test_a_slow_second_reading_of_the_rules_agrees(events: list[Event], config: AllocatorConfig) -> None:
    rising = [number << 63 for number in range(1, 300)]  # as in `Slow`
    fast, slow = CachingAllocator(config, segment_addresses=rising), Slow(config)
    for event in events:
        short = fast.apply(event)
        assert (short == 0) is slow.apply(event)
        assert (fast.reserved, fast.num_retries) == (slow.reserved, slow.retries)
        assert fast.allocated == sum(size for _, _, size in slow.live.values())
        if short:
            break
        for ident, (segment, start, size) in slow.live.items():
            place = fast.place(ident)
            assert place is not None
            assert (place.offset, place.size) == (start - segment["base"], size)


# --- speed ----------------------------------------------------------------------------------------


def busy_history(count: int) -> list[Event]:
    chance = random.Random(0)  # noqa: S311 - not a secret
    events: list[Event] = []
    live: list[int] = []
    while len(events) < count:
        if chance.random() < len(live) / 4000:
            events.append(free(live.pop(chance.randrange(len(live)))))
        else:
            live.append(len(events))
            events.append(alloc(len(events), int(2 ** chance.uniform(3, 27)), chance.choice((0, 0, 7))))
    return events


# --- comparison with a recorded trace -------------------------------------------------------------


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream}


BASE = 0x7F0000000000
LOW = BASE - 64 * MIB
HAND_MADE = [
    entry("segment_alloc", BASE, 2 * MIB),
    entry("alloc", BASE, 600),
    entry("alloc", BASE + 1024, 512),
    entry("segment_alloc", LOW, 12 * MIB),
    entry("alloc", LOW, 11 * MIB),  # keeps its spare MiB
    entry("free_requested", BASE, 600),
    entry("free_completed", BASE, 600),
    entry("alloc", BASE, 1000),
    entry("free_requested", LOW, 11 * MIB),
    entry("free_completed", LOW, 11 * MIB),
    entry("alloc", LOW, 5 * MIB),
    entry("alloc", LOW + 5 * MIB, 7 * MIB),
    entry("free_requested", LOW, 5 * MIB),
    entry("free_completed", LOW, 5 * MIB),
    entry("free_requested", LOW + 5 * MIB, 7 * MIB),
    entry("free_completed", LOW + 5 * MIB, 7 * MIB),
    entry("segment_free", LOW, 12 * MIB),
    entry("snapshot", 0, 0),
]


def test_a_trace_made_by_hand_is_followed_to_the_byte() -> None:
    found = compare(HAND_MADE, PLAIN)
    assert found.divergences == ()
    assert (found.real_reserved, found.reserved) == (14 * MIB, 14 * MIB)
    assert (found.real_allocated, found.allocated) == (12 * MIB + 1536, 12 * MIB + 1536)
    assert found.num_requests == 11  # 6 allocs, 4 frees, 1 empty_cache


def test_the_first_divergence_is_shown() -> None:
    odd = [
        *HAND_MADE[:7],
        entry("segment_alloc", LOW - 2 * MIB, 2 * MIB),
        entry("alloc", LOW - 2 * MIB, 1000),
    ]
    found = compare(odd, PLAIN)
    assert [(item.what, item.index) for item in found.divergences] == [
        ("reserved", 8),
        ("place", 8),
    ]
    assert "reserved first differs at entry 8 ('alloc', 8, 1000, 0)" in render(found)


def test_frees_from_before_the_trace_are_counted_and_ignored() -> None:
    found = compare(HAND_MADE[2:], PLAIN)
    assert found.num_unknown_frees == 1
    assert found.real_allocated is None


def recorded(events: list[Event], config: AllocatorConfig, *, falling: bool) -> list[dict[str, Any]]:
    """What the real allocator would have recorded, had it been our own."""
    bases = [BASE - i * GIB * 300 for i in range(5000)] if falling else []
    ours = CachingAllocator(config, segment_addresses=bases)
    trace: list[dict[str, Any]] = []
    where: dict[int, tuple[int, int]] = {}
    held: dict[int, int] = {}
    for event in events:
        before, owners = held, {span.segment: span for span in reversed(ours.layout())}
        assert ours.apply(event) == 0
        held = {}
        starts: dict[int, int] = {}
        for span in ours.layout():
            held[span.segment] = held.get(span.segment, 0) + span.size
            starts.setdefault(span.segment, span.address)
        trace += [
            entry("segment_free", owners[number].address, before[number])
            for number in before
            if number not in held
        ]
        trace += [entry("segment_alloc", starts[n], held[n], event[3]) for n in held if n not in before]
        place = ours.place(event[1]) if event[0] == "alloc" else None
        if place is not None:
            where[event[1]] = (starts[place.segment] + place.offset, event[2])
            trace.append(entry("alloc", *where[event[1]], event[3]))
        elif event[0] == "free" and event[1] in where:
            trace += [entry(action, *where[event[1]]) for action in ("free_requested", "free_completed")]
    return trace


def long_trace(*, falling: bool) -> tuple[list[dict[str, Any]], Replay]:
    config = AllocatorConfig(capacity_bytes=20 * GIB)
    events = [(kind, i, size // 16, stream) for kind, i, size, stream in busy_history(1500)]
    return recorded(events, config, falling=falling), replay(events, config)


def test_a_long_trace_is_followed_to_the_byte() -> None:
    trace, truth = long_trace(falling=False)
    found = compare(trace, PLAIN)
    assert found.divergences == ()
    assert (found.real_reserved, found.real_allocated) == (
        truth.peak_reserved,
        truth.peak_allocated,
    )


@pytest.mark.slow
def test_ties_decided_by_address_are_told_apart_from_rules() -> None:
    trace, _ = long_trace(falling=True)
    assert compare(trace, PLAIN, real_addresses=True).divergences == ()
    assert [item.what for item in compare(trace, PLAIN).divergences] == ["place"]


def test_expandable_traces_are_read_from_map_and_unmap() -> None:
    trace = [
        entry("segment_map", BASE, 40 * MIB),
        entry("alloc", BASE, 30 * MIB),
        entry("segment_map", BASE + 40 * MIB, 20 * MIB),
        entry("alloc", BASE + 30 * MIB, 25 * MIB),
        entry("free_requested", BASE, 30 * MIB),
        entry("free_completed", BASE, 30 * MIB),
        entry("segment_unmap", BASE + 55 * MIB, 0),
        entry("segment_unmap", BASE, 20 * MIB),
        entry("snapshot", 0, 0),
    ]
    found = compare([item for item in trace if item["size"] or item["action"] == "snapshot"], GROWING)
    assert found.divergences == ()
    assert (found.real_reserved, found.reserved) == (60 * MIB, 60 * MIB)
    assert (found.real_allocated, found.allocated) == (55 * MIB, 55 * MIB)


def test_the_program_reads_a_file_and_says_whether_all_agreed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(HAND_MADE).encode()))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "11 requests, 0 modelled retries",
        "              real MiB    model MiB    error",
        "reserved         14.00        14.00   +0.00%",
        "allocated        12.00        12.00   +0.00%",
        "no divergence",
    ]
    assert main([str(path), "--expandable"]) == 1


def test_files_of_measure_py_are_read_and_set_beside_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted({item["action"] for item in HAND_MADE})
    events = [[names.index(item["action"]), item["addr"], item["size"], item["stream"]] for item in HAND_MADE]
    held = {"id": "one", "actions": names, "events": events, "marks": {"build": 3, "step1": 10}}
    path = tmp_path / "trace-one.json.gz"
    path.write_bytes(gzip.compress(json.dumps(held).encode()))
    assert load(path).entries == HAND_MADE
    build = {"allocated": 1536, "requested": 1112, "reserved": 2 * MIB}
    first = {
        "allocated": 12 * MIB + 1536,
        "requested": 11 * MIB + 1512,
        "reserved": 14 * MIB,
    }
    later = {"allocated": 12 * MIB + 1536, "requested": 12 * MIB, "reserved": 14 * MIB}
    measured = tmp_path / "measurements.jsonl"
    case = {"id": "one", "build": build, "first": first, "later": later}
    measured.write_text(json.dumps(case) + "\n")
    assert main([str(path), "--measurements", str(measured)]) == 0
    rows = capsys.readouterr().out.splitlines()[5:]
    assert [row.split()[-2] for row in rows] == ["+0"] * 7 + ["+1512", "+0"]
    path.write_bytes(gzip.compress(json.dumps({**held, "kept_events": 5, "total_events": 6}).encode()))
    with pytest.raises(ValueError, match="cut short"):
        load(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="is no trace"):
        load(path)
