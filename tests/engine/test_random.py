"""The counter-based generator: known answers, range, and what a draw depends on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.random import derive_seed, philox4x32, uniform

# Known answers of philox4x32-10 published with Random123.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**62)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def draw(seed: int, position: int) -> float:
    return float(uniform(np.array([seed], np.uint64), np.array([position], np.int64))[0])


def test_philox_known_answers() -> None:
    counter = np.array([words(c) for c, _, _ in KNOWN], np.uint32).T
    key = np.array([words(k) for _, k, _ in KNOWN], np.uint32).T
    assert philox4x32(counter, key).T.tolist() == [words(answer) for _, _, answer in KNOWN]


def test_uniform_is_made_of_the_first_two_words() -> None:
    high, low, _, _ = words(KNOWN[0][2])
    assert draw(0, 0) == ((high << 32 | low) >> 11) / 2**53 + 2**-53


def test_uniform_uses_every_bit_of_seed_and_position() -> None:
    drawn = [draw(1 << bit, 0) for bit in range(64)] + [draw(0, 1 << bit) for bit in range(63)] + [draw(0, 0)]
    assert len(set(drawn)) == 64 + 63 + 1


@given(st.lists(st.tuples(seeds, positions), min_size=1, max_size=20))
def test_uniform_depends_on_its_own_pair_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniform(np.array([s for s, _ in pairs], np.uint64), np.array([p for _, p in pairs], np.int64))
    assert together.dtype == np.float64
    assert together.tolist() == [draw(seed, position) for seed, position in pairs]
    assert ((together > 0) & (together <= 1)).all()


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_uniform_is_even(along: str) -> None:
    n = 200_000
    counting = np.arange(n)
    if along == "positions":
        drawn = uniform(np.full(n, 7, np.uint64), counting.astype(np.int64))
    else:
        drawn = uniform(counting.astype(np.uint64), np.full(n, 3, np.int64))
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01


@given(seeds, st.integers(0, 2**32))
def test_derived_seeds(seed: int, index: int) -> None:
    derived = derive_seed(seed, index)
    assert 0 <= derived < 2**64
    assert derived == derive_seed(seed, index)
    assert len({derived, derive_seed(seed, index + 1), derive_seed(seed ^ 1, index), seed}) == 4


def test_derived_seeds_stay_the_same_over_releases() -> None:
    assert derive_seed(0, 0) == 1041621211125469266
    assert derive_seed(7, 1) == 14818979533484651488
    assert derive_seed(2**64 - 1, 2) == derive_seed(-1, 2) == 13735383697695547404
