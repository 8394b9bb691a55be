"""Layer groups: how layers are split, which blocks a group holds, and the cache facade with windows; by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.groups import _GROUP_COST, LayerGroup, plan_groups
from engine.cache.kv_cache import KVCache
from engine.cache.layout import UNBOUNDED, Layout
from engine.request import Request
from tests.engine.scripted import Engine, Requests, reference

PAGE = 4
WINDOWS = st.lists(st.sampled_from([None, 1, 2, 3, 4, 5, 8, 11]), min_size=1, max_size=3)


def groups_of(*windows: int | None) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))


def sizes(windows: Sequence[int | None]) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in plan_groups(windows)]


# Splitting the layers


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("count", [1, 2, 7, 32, 80])
def test_layers_of_one_type_form_one_group(count: int, window: int | None) -> None:
    assert plan_groups([window] * count) == (LayerGroup(tuple(range(count)), window),)


def test_half_and_half_forms_two_groups() -> None:
    windows = [128, None] * 12
    assert plan_groups(windows) == (LayerGroup(tuple(range(0, 24, 2)), 128), LayerGroup(tuple(range(1, 24, 2)), None))


def test_a_few_unused_slots_are_better_than_many_groups() -> None:
    one_in_six = [None if layer % 6 == 5 else 512 for layer in range(26)]  # 22 with a window, 4 without
    assert sorted(sizes(one_in_six), key=str) == [(512, 2), *[(512, 4)] * 5, (None, 4)]
    assert sizes([None if layer % 6 == 5 else 1024 for layer in range(34)]) == [
        (1024, 5),
        (None, 5),
        *[(1024, 5)] * 4,
        (1024, 4),
    ]
    assert len(sizes([None if layer % 6 == 5 else 1024 for layer in range(62)])) == 5


def test_three_types() -> None:
    assert sizes([None, 8, 16, None, 8, 16]) == [(None, 2), (8, 2), (16, 2)]
    assert sizes([None, 8, 8, 16]) in ([(None, 1), (8, 2), (16, 1)], [(None, 1), (8, 1), (8, 1), (16, 1)])


def test_impossible_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        plan_groups([])
    with pytest.raises(ValueError, match="layer 1 has a window of 0"):
        plan_groups([None, 0])


@given(st.lists(st.sampled_from([None, None, 4, 4, 4, 8]), min_size=1, max_size=16))
@settings(max_examples=100, deadline=None)
def test_no_other_split_costs_less(windows: list[int | None]) -> None:
    """Against every number of groups of each type."""
    plan = plan_groups(windows)
    assert sorted(layer for group in plan for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in plan for layer in group.layers)
    assert [group.layers[0] for group in plan] == sorted(group.layers[0] for group in plan)
    counts = [windows.count(window) for window in dict.fromkeys(windows)]

    def cost(size: int, num_groups: int) -> float:
        return size * num_groups - len(windows) + _GROUP_COST * num_groups

    splits = [
        (max(-(-count // parts) for count, parts in zip(counts, split, strict=True)), sum(split))
        for split in itertools.product(*(range(1, count + 1) for count in counts))
    ]
    least = min(cost(*split) for split in splits)
    size = max(len(group.layers) for group in plan)
    assert cost(size, len(plan)) == least
    assert size == max(split[0] for split in splits if cost(*split) == least)


# Which blocks a group holds


def held(layout: Layout, group: int, computed: int, num_tokens: int) -> set[int]:
    """Position by position."""
    window = layout.windows[group]
    if window is None:
        return {position // layout.page_size for position in range(num_tokens)}
    end = min(num_tokens, computed + layout.max_step_tokens)
    return {position // layout.page_size for position in range(max(0, computed - window + 1), end)}


@given(WINDOWS, st.integers(1, 5), st.integers(1, 12), st.integers(1, 60), st.data())
@settings(max_examples=200, deadline=None)
def test_blocks_and_peak_against_brute_force(
    windows: list[int | None], page_size: int, max_step: int, num_tokens: int, data: st.DataObject
) -> None:
    layout = Layout(page_size, groups_of(*windows), max_step)
    computed = data.draw(st.integers(0, num_tokens - 1))
    for group, window in enumerate(windows):
        first, end = layout.first(group, computed), layout.end(group, computed, num_tokens)
        assert set(range(first, end)) == held(layout, group, computed, num_tokens)
        if window is not None:
            at = layout.behind_at(group, first)
            assert layout.first(group, at - 1) == first < layout.first(group, at)
    need = max(
        sum(len(held(layout, group, at, num_tokens)) for group in range(len(windows)))
        for at in range(computed, num_tokens)
    )
    assert layout.need(computed, num_tokens) == need


@given(WINDOWS, st.integers(1, 5), st.integers(1, 12), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_the_longest_request_against_brute_force(
    windows: list[int | None], page_size: int, max_step: int, num_blocks: int
) -> None:
    layout = Layout(page_size, groups_of(*windows), max_step)
    bound = 1 + num_blocks * page_size if None in windows else 40 + page_size

    def fits(num_tokens: int) -> bool:
        return all(
            sum(len(held(layout, group, at, num_tokens)) for group in range(len(windows))) <= num_blocks
            for at in range(num_tokens)
        )

    longest = next((length - 1 for length in range(1, bound + 1) if not fits(length)), UNBOUNDED)
    assert layout.longest_request(num_blocks) == longest


@given(WINDOWS, st.integers(1, 4), st.integers(0, 12), st.data())
@settings(max_examples=300, deadline=None)
def test_the_longest_hit_against_brute_force(
    windows: list[int | None], page_size: int, most: int, data: st.DataObject
) -> None:
    layout = Layout(page_size, groups_of(*windows), 100)
    missing = data.draw(st.sets(st.tuples(st.integers(0, len(windows) - 1), st.integers(0, 11)), max_size=8))
    asked: list[tuple[int, int]] = []

    def has(group: int, index: int) -> bool:
        asked.append((group, index))
        return (group, index) not in missing

    def works(length: int) -> bool:
        """The query at the first position that is not hit finds all that it sees."""
        at = length * page_size
        return not any(
            (group, position // page_size) in missing
            for group, window in enumerate(windows)
            for position in range(0 if window is None else max(0, at - window + 1), at)
        )

    assert layout.longest_hit(most, has) == max(length for length in range(most + 1) if works(length))
    assert len(asked) == len(set(asked)), "each block is asked for once"


def test_numbers_that_make_no_layout() -> None:
    with pytest.raises(ValueError, match="page_size is 0"):
        Layout(0, groups_of(None), 1)
    with pytest.raises(ValueError, match="max_step_tokens is 0"):
        Layout(1, groups_of(None), 0)
    with pytest.raises(ValueError, match="no layer groups"):
        Layout(1, [], 1)
    with pytest.raises(ValueError, match="num_blocks is 2.*3 layer groups"):
        KVCache(2, PAGE, groups_of(None, 4, 4))


# The facade with windows


@pytest.fixture
def new() -> Requests:
    return Requests()


def compute(cache: KVCache, request: Request, count: int) -> None:
    assert cache.grow(request)
    request.computed += count
    cache.mark_scheduled(request, request.computed)


def run(cache: KVCache, request: Request, step: int) -> Request:
    """Computes all of a request, so many tokens at a time."""
    assert cache.admit(request)
    while request.remaining:
        compute(cache, request, min(step, request.remaining))
    return request


def test_a_group_with_a_window_holds_what_it_sees_and_the_next_step(new: Requests) -> None:
    cache = KVCache(30, PAGE, groups_of(None, 6), max_step_tokens=8)
    request = new(range(40))
    assert cache.admit(request)
    full, windowed = cache.tables(request)
    assert (len(full), len(windowed)) == (10, 2)
    compute(cache, request, 8)
    assert cache.grow(request)
    full, windowed = cache.tables(request)
    assert (len(full), len(windowed)) == (10, 4)
    assert 0 not in windowed, "position 8 sees positions 3 to 8"
    compute(cache, request, 8)
    assert cache.grow(request)
    full, windowed = cache.tables(request)
    assert windowed[:2] == [0, 0], "position 16 sees positions 11 to 16"
    assert len(windowed) == 6
    assert 0 not in windowed[2:] + full
    assert cache.num_used_blocks == 10 + 4
    cache.check_integrity([request])


def test_what_lies_behind_the_window_can_still_be_hit(new: Requests) -> None:
    cache = KVCache(30, PAGE, groups_of(6), max_step_tokens=4)
    first = run(cache, new(range(40)), 4)
    assert cache.num_used_blocks <= 3
    second = new([*range(16), *range(100, 110)])
    assert cache.match(second) == 4
    assert cache.admit(second)
    assert second.computed == 16
    (table,) = cache.tables(second)
    assert table[:2] == [0, 0]
    assert 0 not in table[2:]
    cache.check_integrity([first, second])


def test_a_hit_needs_every_group(new: Requests) -> None:
    cache = KVCache(30, PAGE, groups_of(None, 6), max_step_tokens=100)
    first = run(cache, new(range(40)), 40)
    full, windowed = cache.tables(first)
    assert cache.match(new(range(40))) == 9
    cache.unhash([windowed[8]])
    assert cache.match(new(range(40), request_id="a")) == 8
    cache.unhash([windowed[6]])
    assert cache.match(new(range(40), request_id="b")) == 6
    cache.unhash([windowed[0], windowed[1]])
    assert cache.match(new(range(40), request_id="c")) == 6
    cache.unhash([full[1]])
    assert cache.match(new(range(40), request_id="d")) == 0, "of one block only position 0 to 3, of which 0 is gone"
    cache.unhash([full[0]])
    assert cache.match(new(range(40), request_id="e")) == 0


def test_groups_do_not_share_blocks(new: Requests) -> None:
    cache = KVCache(12, PAGE, groups_of(None, None, 100))
    first = run(cache, new(range(12)), 12)
    assert len({block for table in cache.tables(first) for block in table}) == 9
    assert cache.num_cached_blocks == 9
    second = new(range(13))
    assert cache.admit(second)
    assert [table[:3] for table in cache.tables(second)] == cache.tables(first)


def test_decoding_asks_for_blocks_at_page_borders_only(new: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs must not depend on the length of the context."""
    cache = KVCache(300, 16, groups_of(None, 50), max_step_tokens=512)
    request = run(cache, new(range(512)), 512)
    ends: list[int] = []
    end = cache._layout.end
    monkeypatch.setattr(cache._layout, "end", lambda group, *more: ends.append(group) or end(group, *more))
    for token in range(320):
        request.token_ids.append(token)
        compute(cache, request, 1)
    assert len(ends) <= 2 * 2 * (320 // 16 + 1), "a block is taken, and one given back, every 16 tokens"
    assert cache.num_used_blocks <= 832 // 16 + 5


def test_without_sharing_windows_work_and_nothing_is_hashed(new: Requests) -> None:
    cache = KVCache(8, PAGE, groups_of(None, 5), sharing=False, max_step_tokens=4)
    run(cache, new(range(12)), 4)
    assert cache.num_cached_blocks == 0
    assert cache.match(new(range(12))) == 0


def test_a_window_of_one_token_holds_one_block(new: Requests) -> None:
    cache = KVCache(2, PAGE, groups_of(1), max_step_tokens=4)
    assert cache.max_tokens == UNBOUNDED
    request = run(cache, new(range(64)), 3)
    assert cache.num_used_blocks <= 2
    cache.check_integrity([request])


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (9, None, 6), (1, None)])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_the_longest_request_runs_alone_and_one_token_more_does_not(
    new: Requests, windows: tuple[int | None, ...], step: int
) -> None:
    cache = KVCache(4 * len(windows), PAGE, groups_of(*windows), max_step_tokens=step)
    length = min(cache.max_tokens, 400)
    cache.free(run(cache, new(range(length)), step))
    if cache.max_tokens != UNBOUNDED:
        assert not cache.admit(new(range(1000, 1001 + length)))
    assert cache.max_tokens >= 4 * PAGE * (len(windows) > 1) or windows in ((None,), (6,))


def test_admission_leaves_room_for_the_window_that_a_prompt_will_fill(new: Requests) -> None:
    cache = KVCache(16, PAGE, groups_of(16), max_step_tokens=4)
    requests = [new(range(100 * i, 100 * i + 60)) for i in range(4)]
    admitted = [request for request in requests if cache.admit(request)]
    assert len(admitted) == 4, "each holds one block so far"
    cache.free(admitted.pop())
    while admitted[0].remaining:
        compute(cache, admitted[0], 4)
        compute(cache, admitted[1], 4)
    assert cache.num_used_blocks >= 8
    late = new(range(900, 960))
    compute(cache, admitted[2], 4)
    compute(cache, admitted[2], 4)
    compute(cache, admitted[2], 4)
    assert cache.num_free_blocks < 6
    assert not cache.admit(late), "it could start, but not go on"
    short = new(range(900, 908))
    assert cache.admit(short), "its window never fills"


def test_a_refused_request_with_windows_is_not_looked_up_again_while_others_decode(
    new: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(25, PAGE, groups_of(8, 8), max_step_tokens=16)
    others = [run(cache, new(range(100 * i, 100 * i + 20)), 16) for i in range(1, 4)]
    waiting = new(range(200))
    assert not cache.admit(waiting)
    lookups: list[object] = []
    lookup = cache._pool.lookup
    monkeypatch.setattr(cache._pool, "lookup", lambda key: lookups.append(key) or lookup(key))
    for token in range(40):
        for other in others:
            other.token_ids.append(token)
            compute(cache, other, 1)
        lookups.clear()
        assert not cache.admit(waiting)
        assert lookups == []
    for other in others:
        cache.free(other)
    assert cache.admit(waiting)


# The scheduler on top


@pytest.mark.parametrize("windows", [(7,), (None, 7), (3, None, 10)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
def test_every_request_sees_its_own_pages_while_blocks_run_out(
    windows: tuple[int | None, ...], overlap: bool, sharing: bool
) -> None:
    engine = Engine(
        9 * len(windows), PAGE, budget=11, groups=groups_of(*windows), overlap=overlap, sharing=sharing
    )  # fmt: skip
    common = [seed % 3 for seed in range(18)]
    requests = [engine.add([*common[: 18 - 2 * i], i], 14) for i in range(7)]
    engine.drain()
    for request in requests:
        assert request.output_ids == reference(request.prompt_ids, 14)
    assert engine.scheduler.num_preemptions > 0 or None not in windows
    assert any(request.cached_tokens for request in requests) == sharing
