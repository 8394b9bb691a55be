"""The KV cache facade without a scheduler: block tables, prefix hits, salts, what loses its hash."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.cache import entry as entry_module
from engine.cache.kv_cache import KVCache
from engine.cache.prefix import HASH_BYTES, block_hash, root_hash
from engine.request import Request
from tests.engine.scripted import Requests

PAGE = 4


@pytest.fixture
def new() -> Requests:
    return Requests()


def compute(cache: KVCache, request: Request, count: int | None = None) -> list[int]:
    """Schedules `count` of the remaining tokens, all by default; the blocks that got a hash."""
    start = request.computed
    request.computed = request.num_tokens if count is None else start + count
    return cache.mark_scheduled(request, request.computed)


def filled(cache: KVCache, request: Request) -> Request:
    assert cache.admit(request)
    compute(cache, request)
    return request


def table(cache: KVCache, request: Request, group: int = 0) -> list[int]:
    return cache.tables(request)[group]


def hits(cache: KVCache, prompt: Sequence[int], salt: bytes = b"") -> int:
    """Blocks that a request with this prompt would hit."""
    request = Requests()(prompt, salt=salt, request_id="probe")
    found = cache.match(request)
    cache.free(request)
    return found


def test_several_grow_together_or_not_at_all(new: Requests) -> None:
    cache = KVCache(5, PAGE)
    first, second = filled(cache, new([1] * PAGE)), filled(cache, new([2] * PAGE))
    third = filled(cache, new([3] * 2))
    for request in (first, second):
        request.token_ids.append(9)
    assert cache.grow_all([first, second, third])
    blocks = [table(cache, request) for request in (first, second, third)]
    assert [len(each) for each in blocks] == [2, 2, 1]
    assert len({block for each in blocks for block in each}) == 5
    third.token_ids += [9] * PAGE
    assert not cache.grow_all([first, third]), "nothing is left"
    cache.free(second)
    assert cache.grow_all([first, third])
    first.token_ids += [9] * PAGE
    third.token_ids += [9] * PAGE
    assert not cache.grow_all([first, third]), "one is left, and none is taken"
    assert (len(table(cache, first)), len(table(cache, third)), cache.num_free_blocks) == (2, 2, 1)
    third.token_ids += [9] * PAGE * 9
    assert not cache.grow_all([third]), "longer than the cache"
    cache.check_integrity([first, third])


def test_hash_depends_on_salt_parent_and_tokens() -> None:
    root = root_hash(b"")
    hashes = {
        root,
        root_hash(b"a"),
        block_hash(root, [1, 2]),
        block_hash(root, [2, 1]),
        block_hash(root, [1, 2, 0]),
        block_hash(root_hash(b"a"), [1, 2]),
        block_hash(block_hash(root, [1, 2]), [1, 2]),
    }
    assert len(hashes) == 7
    assert {len(value) for value in hashes} == {HASH_BYTES}
    assert block_hash(root, [1, 2]) == block_hash(root_hash(b""), (1, 2))


def test_a_salt_cannot_pose_as_a_block() -> None:
    root = root_hash(b"")
    tokens = (1).to_bytes(8, "little")
    assert root_hash(root + tokens) != block_hash(root, [1])


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_admission_takes_blocks_for_all_known_tokens(new: Requests, page_size: int) -> None:
    cache = KVCache(100, page_size)
    for length in (1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size):
        request = new(range(length))
        assert cache.admit(request)
        assert len(table(cache, request)) == -(-length // page_size) == cache.num_used_blocks
        cache.free(request)
        cache.check_integrity([])
    assert cache.num_free_blocks == 100


def test_growth_takes_a_block_at_each_page_border_only(new: Requests) -> None:
    cache = KVCache(3, PAGE)
    request = filled(cache, new(range(PAGE)))
    line = cache.line(request)
    used = []
    for token in range(2 * PAGE):
        request.token_ids.append(token)
        assert cache.grow(request)
        compute(cache, request)
        used.append(cache.num_used_blocks)
    assert used == [2] * PAGE + [3] * PAGE
    assert cache.line(request) == line, "a table given to the runner grows in place"
    assert cache.block_tables[0][line].tolist()[:3] == table(cache, request)
    request.token_ids.append(0)
    assert not cache.grow(request)
    assert cache.num_used_blocks == 3
    cache.check_integrity([request])


def test_O19_a_wholly_cached_prompt_leaves_a_token_to_compute(new: Requests) -> None:
    for length in (PAGE, 2 * PAGE, 3 * PAGE, 2 * PAGE + 1):
        cache = KVCache(20, PAGE)
        filled(cache, new(range(length)))
        again = new(range(length))
        expected = (length - 1) // PAGE
        assert cache.match(again) == expected
        assert cache.admit(again)
        assert again.computed == again.cached_tokens == expected * PAGE < length


def test_a_hit_needs_the_whole_chain(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    filled(cache, new(range(16)))
    assert hits(cache, [*range(8), 99, *range(9, 17)]) == 2
    assert hits(cache, [99, *range(1, 17)]) == 0
    assert hits(cache, range(4, 17)) == 0, "the same tokens at other positions are no hit"


def test_reserved_blocks_are_no_hit_before_they_are_scheduled(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    first, second = new(range(16)), new(range(17))
    cache.admit(first)
    assert cache.match(second) == 0
    compute(cache, first, 7)
    assert cache.match(second) == 1
    compute(cache, first, 1)
    assert cache.match(second) == 2


def test_salts_do_not_share(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    filled(cache, new(range(16), salt=b"a"))
    assert hits(cache, range(16), salt=b"b") == 0
    assert hits(cache, range(16)) == 0
    assert hits(cache, range(16), salt=b"a") == 3


def test_without_sharing_nothing_is_hashed(new: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("a block was hashed")

    monkeypatch.setattr(entry_module, "block_hash", refuse)
    cache = KVCache(20, PAGE, sharing=False)
    filled(cache, new(range(16)))
    again = new(range(16))
    assert cache.match(again) == 0
    assert cache.admit(again)
    assert cache.num_cached_blocks == 0
    assert again.cached_tokens == 0


def test_a_block_whose_last_token_is_not_known_is_hashed_the_next_time(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    request = filled(cache, new(range(7)))
    request.unknown = 1  # position 7 is being sampled
    assert cache.grow(request)
    assert compute(cache, request) == []
    assert cache.num_cached_blocks == 1
    request.token_ids.append(7)
    assert cache.grow(request)
    assert compute(cache, request) == table(cache, request)[1:2], "now it is known, and another one is being sampled"
    assert hits(cache, range(9)) == 2
    cache.check_integrity([request])


def test_an_unknown_token_is_no_token_to_hit(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    filled(cache, new(range(8)))
    request = new(range(4))
    assert cache.match(request) == 0
    request.unknown = 1
    assert cache.match(request) == 1, "the unknown one is left to compute"


def test_a_request_that_wants_prompt_logprobs_computes_its_prompt(
    new: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(20, PAGE)
    filled(cache, new(range(16)))
    monkeypatch.setattr(Request, "needs_prompt_logprobs", property(lambda request: request.request_id == "wants"))
    request = new(range(16), request_id="wants")
    assert cache.match(request) == 0
    assert cache.admit(request)
    assert request.computed == request.cached_tokens == 0
    assert compute(cache, request) == [], "the first block of a hash keeps it"
    other = new(range(16))
    assert cache.admit(other)
    assert other.computed == 12


def test_each_block_is_hashed_once_and_a_refused_request_not_again(
    new: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(parent: bytes, token_ids: list[int]) -> bytes:
        calls.append(token_ids)
        return block_hash(parent, token_ids)

    monkeypatch.setattr(entry_module, "block_hash", counting)
    cache = KVCache(6, PAGE)
    running = filled(cache, new(range(16)))
    assert len(calls) == 4
    waiting = new(range(22))
    for _ in range(50):
        assert not cache.admit(waiting, reserve=3)
    assert len(calls) == 4 + 5, "its four hits and the first miss"
    cache.free(running)
    assert cache.admit(waiting)
    compute(cache, waiting)
    assert len(calls) == 4 + 5


def test_asking_again_for_a_refused_request_looks_nothing_up(new: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while others take, evict and give back blocks, as long as there cannot be enough."""
    cache = KVCache(60, PAGE)
    filled(cache, new(range(100, 180)))
    cache.free(filled(cache, new(range(40))))
    waiting = new(range(200))
    assert not cache.admit(waiting)
    lookups: list[object] = []
    lookup = cache._pool.lookup
    monkeypatch.setattr(cache._pool, "lookup", lambda key: lookups.append(key) or lookup(key))
    for round_number in range(20):
        other = new(range(1000 * round_number, 1000 * round_number + 12))
        assert cache.admit(other)
        compute(cache, other)
        lookups.clear()
        assert not cache.admit(waiting)
        cache.free(other)
        assert not cache.admit(waiting)
        assert lookups == []
    assert cache.match(waiting) < 10, "others have evicted some of its hits meanwhile"


def test_a_refused_request_fits_once_others_hold_its_prefix(new: Requests) -> None:
    """Hits that were free are no burden any more when another request has taken them."""
    cache = KVCache(10, PAGE)
    running = [filled(cache, new(range(start, start + 8))) for start in (100, 200)]
    cache.free(filled(cache, new(range(12))))
    waiting = new(range(28))
    assert not cache.admit(waiting), "six are free, three of them its hits; seven are needed"
    assert cache.admit(new(range(12))), "this one holds two of the three"
    assert not cache.admit(waiting), "three are free, five are needed"
    cache.free(running[0])
    assert cache.num_free_blocks == 5
    assert cache.admit(waiting)


def test_a_refused_request_is_not_mistaken_for_another_of_its_name(new: Requests) -> None:
    cache = KVCache(6, PAGE)
    filled(cache, new(range(16)))
    refused = new(range(100, 112), request_id="name")
    assert not cache.admit(refused)
    cache.free(refused)
    again = new(range(12), request_id="name")
    assert cache.admit(again), "two of its three blocks are hits"


def test_a_refused_request_fits_once_its_prefix_has_got_longer(new: Requests) -> None:
    cache = KVCache(6, PAGE)
    first, second = new(range(16)), new(range(16))
    assert cache.admit(first)
    assert not cache.admit(second), "two are free, four are needed"
    compute(cache, first, 4)
    assert not cache.admit(second), "one hit, three are needed"
    compute(cache, first, 4)
    assert cache.admit(second)
    assert table(cache, second)[:2] == table(cache, first)[:2]
    assert cache.num_free_blocks == 0
    cache.check_integrity([first, second])


def test_free_hits_count_as_used_when_taken(new: Requests) -> None:
    cache = KVCache(4, PAGE)
    cache.free(filled(cache, new(range(8))))
    long = new(range(17))
    assert cache.num_free_blocks == 4
    assert cache.match(long) == 2
    assert not cache.admit(long), "two free hits and three new blocks are five"
    assert cache.admit(new(range(16)), reserve=0)
    assert cache.num_free_blocks == 0


def test_the_reserve_must_stay_free(new: Requests) -> None:
    cache = KVCache(4, PAGE)
    request = new(range(8))
    assert not cache.admit(request, reserve=3)
    assert cache.num_used_blocks == 0
    assert cache.admit(request, reserve=2)


def test_admission_never_evicts_its_own_hits(new: Requests) -> None:
    cache = KVCache(4, PAGE)
    cache.free(filled(cache, new(range(12))))
    again = new([*range(12), 77])
    assert cache.admit(again)
    assert again.computed == 12
    assert len(set(table(cache, again))) == 4


def test_the_beginning_of_a_prefix_lives_longest(new: Requests) -> None:
    cache = KVCache(5, PAGE)
    cache.free(filled(cache, new(range(16))))
    cache.free(filled(cache, new(range(100, 108))))
    assert hits(cache, range(17)) == 3
    assert hits(cache, range(100, 109)) == 2


def test_a_preempted_request_hits_its_own_blocks(new: Requests) -> None:
    cache = KVCache(8, PAGE)
    request = filled(cache, new(range(6)))
    for token in range(7):
        request.token_ids.append(token)
        assert cache.grow(request)
        compute(cache, request)
    cache.release(request)
    request.computed = 0
    assert not cache.holds(request)
    assert cache.num_free_blocks == 8
    assert cache.admit(request)
    assert request.computed == 12, "its generated tokens are a prefix like any other"
    assert request.cached_tokens == 0, "only the first admission is reported"


def test_hits_on_generated_tokens_of_a_resumed_request_are_no_cached_prompt(new: Requests) -> None:
    cache = KVCache(8, PAGE)
    filled(cache, new(range(16)))
    resumed = new(range(6), output=range(6, 16))
    assert cache.admit(resumed)
    assert resumed.computed == 12
    assert resumed.cached_tokens == 6


def test_a_failed_step_unhashes_what_it_was_to_write(new: Requests) -> None:
    cache = KVCache(8, PAGE)
    request = new(range(16))
    assert cache.admit(request)
    assert compute(cache, request, 6) == table(cache, request)[:1]
    hashed = compute(cache, request, 8)
    assert hashed == table(cache, request)[1:3]
    assert hits(cache, range(17)) == 3
    cache.unhash(hashed)
    assert hits(cache, range(17)) == 1
    cache.check_integrity([request])


def test_a_failed_request_takes_its_own_blocks_from_the_cache_and_no_others(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    cache.free(filled(cache, new(range(8))))
    rotten = filled(cache, new(range(16)))
    assert rotten.cached_tokens == 8
    cache.unhash_own(rotten)
    cache.free(rotten)
    assert hits(cache, range(17)) == 2
    cache.check_integrity([])


def test_a_request_failed_after_a_preemption_leaves_nothing_behind(new: Requests) -> None:
    cache = KVCache(20, PAGE)
    rotten = filled(cache, new(range(16)))
    cache.release(rotten)
    rotten.computed = 0
    assert cache.admit(rotten)
    assert rotten.computed == 12, "these hits are its own"
    cache.unhash_own(rotten)
    cache.free(rotten)
    assert hits(cache, range(17)) == 0
    assert cache.num_cached_blocks == 0


def test_a_request_failed_while_it_resumes_leaves_nothing_of_its_earlier_life(new: Requests) -> None:
    cache = KVCache(6, PAGE)
    rotten = filled(cache, new(range(16)))
    cache.release(rotten)
    rotten.computed = 0
    other = filled(cache, new(range(100, 117)))
    cache.free(other)
    assert hits(cache, range(17)) == 1, "the end of its prefix was evicted"
    assert cache.admit(rotten)
    assert rotten.computed == 4
    compute(cache, rotten, 4)
    cache.unhash_own(rotten)
    cache.free(rotten)
    assert hits(cache, range(17)) == 0


def test_what_a_request_wrote_before_a_preemption_is_its_own_even_behind_a_gap(new: Requests) -> None:
    cache = KVCache(12, PAGE)
    rotten = filled(cache, new(range(16)))
    second_block = table(cache, rotten)[1]
    cache.release(rotten)
    rotten.computed = 0
    cache.unhash([second_block])
    assert cache.admit(rotten)
    assert rotten.computed == 4
    compute(cache, rotten, 4)
    cache.unhash_own(rotten)
    cache.free(rotten)
    assert cache.num_cached_blocks == 0


def test_a_copy_of_a_cached_block_does_not_replace_it(new: Requests) -> None:
    cache = KVCache(8, PAGE)
    first, second = new(range(8)), new(range(8))
    assert cache.admit(first)
    assert cache.admit(second)
    compute(cache, first)
    compute(cache, second)
    assert not set(table(cache, first)) & set(table(cache, second))
    third = new(range(9))
    assert cache.admit(third)
    assert table(cache, third)[:2] == table(cache, first)
    cache.check_integrity([first, second, third])


def test_reset_forgets_prefixes_and_keeps_running_requests(new: Requests) -> None:
    cache = KVCache(8, PAGE)
    cache.free(filled(cache, new(range(100, 108))))
    request = filled(cache, new(range(8)))
    cache.reset()
    assert cache.num_cached_blocks == 0
    assert hits(cache, range(9)) == hits(cache, range(100, 109)) == 0
    assert cache.num_used_blocks == 2
    request.token_ids += range(8, 12)
    assert cache.grow(request)
    compute(cache, request)
    assert cache.num_cached_blocks == 1
    cache.unhash_own(request)
    assert cache.num_cached_blocks == 0
    cache.free(request)
    cache.check_integrity([])


def test_misuse_is_an_error(new: Requests) -> None:
    with pytest.raises(ValueError, match="page_size is 0"):
        KVCache(4, 0)
    cache = KVCache(4, PAGE)
    request = new(range(4))
    with pytest.raises(KeyError, match="holds no blocks"):
        cache.tables(request)
    cache.admit(request)
    with pytest.raises(RuntimeError, match="already holds"):
        cache.admit(request)
    cache.free(request)
    cache.free(request)
    assert cache.num_free_blocks == 4


@pytest.mark.parametrize("fault", ["leak", "foreign", "short", "stale", "line"])
def test_check_integrity_sees(new: Requests, fault: str) -> None:
    cache = KVCache(8, PAGE)
    first, second = filled(cache, new(range(8))), filled(cache, new(range(100, 108)))
    cache.check_integrity([first, second])
    if fault == "leak":
        live = [first]
    else:
        live = [first, second]
        array, line = cache.block_tables[0], cache.line(first)
        if fault == "foreign":
            array[line, 1] = table(cache, second)[-1]
        elif fault == "short":
            array[line, 1] = 0
        elif fault == "stale":
            array[line, 2] = array[line, 0]
        else:
            cache._tables.take()
    with pytest.raises(RuntimeError):
        cache.check_integrity(live)
