"""What the benchmarks compute without a server: figures, arrivals, data, the client's strain, layers in turns."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.bench.client import Outcome
from rayapp.bench.closed_loop import Answer, Turn, closed_loop
from rayapp.bench.datasets import (
    Conversation,
    Vocabulary,
    prefix_repetition,
    random_requests,
    read_custom,
    read_sharegpt,
    sampled,
)
from rayapp.bench.load import arrival_times
from rayapp.bench.metrics import details, figures, parse_goodput
from rayapp.bench.report import render
from rayapp.bench.split import Plan, alternate, app_config
from rayapp.bench.split import render as render_split
from rayapp.bench.watch import Strain
from rayapp.text.tokenizer import Tokenizer

seconds = st.floats(0, 5, allow_nan=False)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    start = draw(seconds)
    arrivals = sorted(start + draw(seconds) for _ in range(draw(st.integers(1, 4))))
    return Outcome(
        start=start,
        arrivals=arrivals,
        end=arrivals[-1] + draw(st.floats(0, 1)),
        prompt_tokens=draw(st.integers(0, 99)),
        completion_tokens=draw(st.integers(1, 20)),
        has_usage=draw(st.booleans()),
        error=draw(st.sampled_from([None, None, None, "a", "b"])),
    )


@given(st.lists(outcomes(), min_size=1, max_size=12), st.floats(0.1, 10), st.floats(1, 3000))
def test_figures_add_up(some: list[Outcome], duration: float, limit_ms: float) -> None:
    result = figures(some, duration, percentiles=(0, 50, 100), goodput={"ttft": limit_ms, "tpot": limit_ms})
    good = [one for one in some if one.error is None]
    assert result["completed"] + result["failed"] == len(some)
    assert sum(result["error_counts"].values()) == result["failed"]
    assert result["total_output_tokens"] == sum(one.completion_tokens for one in good)
    assert result["request_throughput"] * duration == pytest.approx(len(good))
    both = result["total_input_tokens"] + result["total_output_tokens"]
    assert result["total_token_throughput"] * duration == pytest.approx(both)
    rest = [(one.end - one.arrivals[0]) / max(1, one.completion_tokens - 1) for one in good]
    met = sum(
        1e3 * (one.arrivals[0] - one.start) <= limit_ms
        and (one.completion_tokens == 1 or 1e3 * (one.end - one.arrivals[0]) / (one.completion_tokens - 1) <= limit_ms)
        for one in good
    )
    assert result["request_goodput"] * duration == pytest.approx(met)
    spans = [(one.start, one.end) for one in some]
    busiest = max(sum(a <= start < b for a, b in spans) for start, _ in spans)
    assert result["max_concurrent_requests"] >= busiest
    if good:
        ttfts = [1e3 * (one.arrivals[0] - one.start) for one in good]
        assert result["p0_ttft_ms"] == pytest.approx(min(ttfts), abs=1e-6)
        assert result["p100_ttft_ms"] == pytest.approx(max(ttfts), abs=1e-6)
        assert result["mean_ttft_ms"] == pytest.approx(sum(ttfts) / len(ttfts), abs=1e-6)
        several = [one for one in good if one.completion_tokens > 1]
        assert len(several) <= len(rest)
        assert result["max_output_tokens_per_s"] <= result["total_output_tokens"] + 1e-9
    assert render(result, ("ttft", "tpot", "itl", "e2el"), (0, 50, 100))
    assert {len(values) for values in details(some).values()} == {len(some)}


def test_figures_by_hand() -> None:
    first = Outcome(start=0, arrivals=[1.0, 1.5, 2.0], end=2.0, prompt_tokens=10, completion_tokens=3, has_usage=True)
    second = Outcome(start=1, arrivals=[1.25, 1.75], end=2.25, prompt_tokens=5, completion_tokens=6, has_usage=True)
    failed = Outcome(start=1.5, end=1.75, error="HTTP 503: full")
    result = figures([first, second, failed], 2.5, goodput={"e2el": 1300.0})
    assert result["median_ttft_ms"] == pytest.approx(625)
    assert result["mean_tpot_ms"] == pytest.approx((500 + 200) / 2)
    assert result["mean_itl_ms"] == pytest.approx(500)
    assert result["mean_e2el_ms"] == pytest.approx(1625)
    assert result["request_goodput"] == pytest.approx(1 / 2.5)
    assert result["max_concurrent_requests"] == 3
    assert (
        result["max_output_tokens_per_s"] == 2 + 6
    )  # second 1 has two of the first's three pieces, all of the other's
    assert result["error_counts"] == {"HTTP 503: full": 1}


def test_nothing_was_answered() -> None:
    result = figures([Outcome(start=0, end=1, error="x")], 1.0)
    assert (result["completed"], result["output_throughput"], result["p99_ttft_ms"]) == (0, 0, 0)


def test_goodput_flags() -> None:
    assert parse_goodput(["ttft:200", "e2el:1.5"]) == {"ttft": 200, "e2el": 1.5}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_a_gamma_process(burstiness: float) -> None:
    count, rate = 20_000, 50.0
    times = np.array(arrival_times(count, rate, burstiness, np.random.default_rng(3)))
    gaps = np.diff(times, prepend=0)
    assert (gaps >= 0).all() and times[-1] == pytest.approx(count / rate)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)
    if burstiness == 1:  # exponential: the distance between the distributions at 1 % significance
        expected = 1 - np.exp(-np.sort(gaps) * rate)
        assert np.abs(expected - np.arange(1, count + 1) / count).max() < 1.63 / math.sqrt(count)
        # Counts of a second vary as much as they are on average.
        counts = np.bincount(times.astype(int), minlength=400)[:400]
        assert counts.var() / counts.mean() == pytest.approx(1, abs=0.25)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_arrivals_at_once_and_evenly() -> None:
    rng = np.random.default_rng(0)
    assert arrival_times(3, math.inf, 1.0, rng) == [0.0] * 3
    assert arrival_times(4, 2.0, math.inf, rng) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    with pytest.raises(ValueError, match="positive"):
        arrival_times(1, 1.0, 0.0, rng)


@given(st.integers(1, 40), st.integers(1, 30), st.floats(0, 0.99), st.integers(0, 20), st.integers(0, 99))
def test_lengths_of_random_data(length: int, output: int, ratio: float, prefix: int, seed: int) -> None:
    def make() -> list[Conversation]:
        rng = np.random.default_rng(seed)
        return random_requests(
            8, Vocabulary(rng), rng, input_len=length, output_len=output, range_ratio=ratio, prefix_len=prefix
        )

    data = make()
    assert data == make()
    prompts = [str(turn.prompt).split() for (turn,) in data]
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    assert all(low <= len(prompt) - prefix <= high for prompt in prompts)
    assert all(max(1, math.floor(output * (1 - ratio))) <= turn.output_tokens for (turn,) in data)
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1


def test_prompts_have_exactly_the_tokens_asked_for(smol_path: Path) -> None:
    tokenizer = Tokenizer.load(smol_path)
    words = Vocabulary(np.random.default_rng(0), tokenizer)
    assert [len(tokenizer.encode(str(words.prompt(n)))) for n in (1, 50, 400)] == [1, 50, 400]
    plain = Vocabulary(np.random.default_rng(0))
    assert len(tokenizer.encode(str(plain.prompt(100)))) == 100
    ids = Vocabulary(np.random.default_rng(0), tokenizer, token_ids=True).prompt(300)
    assert len(ids) == 300
    tokenizer.check_ids(list(ids))  # type: ignore[arg-type]


def test_prefixes_are_shared_evenly() -> None:
    rng = np.random.default_rng(1)
    data = prefix_repetition(20, Vocabulary(rng), rng, prefix_len=6, suffix_len=3, num_prefixes=4, output_len=2)
    prompts = [str(turn.prompt).split() for (turn,) in data]
    counts: dict[tuple[str, ...], int] = {}
    for prompt in prompts:
        assert len(prompt) == 9
        counts[tuple(prompt[:6])] = counts.get(tuple(prompt[:6]), 0) + 1
    assert sorted(counts.values()) == [5, 5, 5, 5]
    assert len({tuple(prompt) for prompt in prompts}) == 20


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text('{"prompt": [1, 2]}\n\n{"turns": ["a", "b"], "output_tokens": 3}\n')
    assert [[(turn.prompt, turn.output_tokens) for turn in one] for one in read_custom(path, 9)] == [
        [([1, 2], 9)],
        [("a", 3), ("b", 3)],
    ]
    path.write_text('{"prompt": "a"}\n{"text": "a"}')
    with pytest.raises(ValueError, match="line 2"):
        read_custom(path, 9)
    talk = [{"value": "hi there"}, {"value": "one two three"}]
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    (one,) = read_sharegpt(path, None, None)
    assert (one[0].prompt, one[0].output_tokens) == ("hi there", 4)
    assert read_sharegpt(path, 7, None)[0][0].output_tokens == 7


def test_files_are_used_again_or_not() -> None:
    data: list[Conversation] = [(), (), ()]
    rng = np.random.default_rng(0)
    assert len(sampled(data, 7, rng)) == 7
    assert len(sampled(data, 7, rng, oversample=False)) == 3
    assert len(sampled(data, 2, rng)) == 2
    with pytest.raises(ValueError, match="no requests"):
        sampled([], 1, rng)


def test_strain_warns_of_each_cause() -> None:
    assert Strain(0.5, 0.005, 0.001).warnings() == []
    assert Strain(0.5, 0.005, None).warnings() == []
    (cpu,) = Strain(0.93, 0.0, 0.0).warnings()
    (lag,) = Strain(0.1, 0.08, 0.0).warnings()
    (late,) = Strain(0.1, 0.0, 0.12).warnings()
    assert "93% of a core" in cpu and "80 ms late" in lag and "120 ms later than planned" in late
    result = figures([Outcome(start=0, arrivals=[1], end=1, completion_tokens=1)], 1.0)
    assert "WARNING: " + cpu in render(result | {"client_warnings": [cpu]}, (), ())


def test_closed_loop_keeps_so_many_under_way() -> None:
    running = most = 0

    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Answer(0.5, 0.5 + 0.1 * (new_tokens - 1), new_tokens)

    turn = asyncio.run(closed_loop(ask, [[1]] * 10, 5, 3))
    assert most == 3 and turn.tokens == 50
    assert (turn.first_ms, turn.token_ms) == (pytest.approx(500), pytest.approx(100))


def test_answers_of_another_length_count_for_nothing() -> None:
    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        return Answer(None, 1.0, new_tokens - prompt[0])

    with pytest.raises(RuntimeError, match="1 of 2 answers have 3 tokens instead of 4"):
        asyncio.run(closed_loop(ask, [[0], [1]], 4, 1))


def test_layers_take_turns_on_as_many_fresh_prompts(smol_path: Path) -> None:
    tokenizer = Tokenizer.load(smol_path)
    order: list[tuple[str, int]] = []
    seen: list[tuple[int, ...]] = []

    def layer(name: str, seconds: float, first_ms: float | None) -> object:
        async def take(prompts: list[list[int]], new_tokens: int, concurrency: int) -> Turn:
            order.append((name, concurrency))
            seen.extend(map(tuple, prompts))
            return Turn(seconds, len(prompts) * new_tokens, first_ms, None)

        return take

    plan = Plan([2, 4], 16, 10, 3, 2, 0, lambda rng: Vocabulary(rng, tokenizer, token_ids=True))
    turns = {"engine": layer("engine", 1.0, 20.0), "http": layer("http", 2.0, 30.0), "peer": layer("peer", 4.0, None)}
    rows = asyncio.run(alternate(turns, plan))  # type: ignore[arg-type]
    names = ["engine", "http", "peer"]
    assert order[:3] == [(name, 1) for name in names]
    assert order[3:] == [(name, c) for c in (2, 4) for _ in range(2) for name in names]
    assert len(set(seen)) == len(seen)
    by_layer = {(row["layer"], row["concurrency"]): row for row in rows}
    assert by_layer["http", 4]["tokens_per_s"] == 60 and by_layer["http", 4]["of_engine"] == 0.5
    assert by_layer["http", 2]["first_behind_ms"] == 10 and by_layer["peer", 2]["first_behind_ms"] is None
    host = {"date": "today", "cpu": "x", "cores": 2, "command": "python"}
    text = render_split({"host": host, "model": "m", "rows": rows})
    assert "| 4 | http | 60.0 | 50% | 30.0 | +10.0 |" in text and "| 4 | peer | 30.0 | 25% |  |" in text


def test_the_application_of_a_split(tmp_path: Path) -> None:
    (model,) = app_config(str(tmp_path), None).models
    assert (model.name, model.source) == (tmp_path.name, str(tmp_path)) and model.device in ("cpu", "cuda")
    assert app_config(None, Path("serve_config.yaml")).models[0].name == "smollm2-135m-instruct"
    with pytest.raises(ValueError, match="give --model or --config"):
        app_config("a", Path("serve_config.yaml"))
