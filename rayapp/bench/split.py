"""`python -m rayapp.bench --split`: what each layer of serving costs on the same work, in one run.

The engine alone (a process without Ray), then the replica, the Router and HTTP of a local Ray Serve that is started
and ended here, then servers of peers that run already. They take turns; medians count; ratios are to the engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from engine.bench import host
from engine.bench.workers import BenchError, EngineSpec, Worker
from rayapp.app import resolve_device
from rayapp.bench.client import connect
from rayapp.bench.closed_loop import Turn, closed_loop
from rayapp.bench.cpu_use import descendants_cpu
from rayapp.bench.datasets import Vocabulary
from rayapp.bench.options import load_tokenizer
from rayapp.bench.serve import KEY_VARIABLE, BenchFailed, first_model
from rayapp.config import AppConfig, ModelConfig

ENGINE = "engine"
LAYERS = (ENGINE, "replica", "router", "router-stream", "http")
CHILD = ("-m", "rayapp.bench.engine_child")
DEFAULT_MODEL = "smollm2-135m-instruct"

TakeTurn = Callable[[list[list[int]], int, int], Awaitable[Turn]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What every layer does."""

    concurrencies: Sequence[int]
    input_len: int
    output_len: int
    rounds: int
    reps: int
    seed: int
    vocabulary: Callable[[np.random.Generator], Vocabulary]

    def prompts(self, concurrency: int, rep: int, layer: int) -> list[list[int]]:
        """Fresh for each turn, so that nothing is found cached."""
        rng = np.random.default_rng((self.seed, concurrency, rep, layer))
        words = self.vocabulary(rng)
        count = max(self.rounds * concurrency, 4)
        return [words.prompt(self.input_len) for _ in range(count)]  # type: ignore[misc]  # ids were asked for


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 1 when a measurement counts for nothing, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    try:
        config = app_config(args.model, args.config)
        peers = dict(_named(one) for one in args.compare_url)
        layers = [name for name in args.layers.split(",") if name]
        if unknown := set(layers) - set(LAYERS):
            raise ValueError(f"--layers: {', '.join(sorted(unknown))}; there are {', '.join(LAYERS)}")
        if min(*args.concurrency, args.rounds, args.reps, args.random_input_len, args.random_output_len) < 1:
            raise ValueError("numbers and lengths must be positive")
        tokenizer = load_tokenizer(config.models[0].source)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    plan = Plan(
        args.concurrency, args.random_input_len, args.random_output_len, args.rounds, args.reps, args.seed,
        lambda rng: Vocabulary(rng, tokenizer, token_ids=True),
    )  # fmt: skip
    command = shlex.join(["python", "-m", "rayapp.bench", "--split", *(sys.argv[1:] if argv is None else argv)])
    try:
        rows = measure(config, layers, peers, plan)
    except (BenchError, BenchFailed, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {"host": host.describe(command), "model": config.models[0].name, "rows": rows}
    print(render(result))
    if args.save_result:
        path = args.result_dir / (args.result_filename or "split.json")
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def app_config(model: str | None, config: Path | None) -> AppConfig:
    """The first model of a Serve configuration, or a model with the defaults; its device resolved.

    Raises:
        ValueError: wrong fields, or both are given.
    """
    if config is not None and model is not None:
        raise ValueError("give --model or --config: the configuration names its models")
    args: dict[str, Any] = {"models": [{"name": model or DEFAULT_MODEL}]}
    if config is not None:
        args = yaml.safe_load(config.read_text())["applications"][0]["args"]
        args = {**args, "models": args["models"][:1]}
    elif model and Path(model).is_dir():
        args = {"models": [{"name": Path(model).name, "source": model}]}
    app = AppConfig.model_validate(args)
    found = app.models[0]
    return app.model_copy(update={"models": [found.model_copy(update={"device": resolve_device(found)})]})


def measure(config: AppConfig, layers: Sequence[str], peers: dict[str, str], plan: Plan) -> list[Row]:
    """A row for each layer or peer and concurrency.

    Raises:
        BenchError, RuntimeError: a layer failed, or gave answers of another length.
    """
    model = config.models[0]
    with ExitStack() as stack:
        turns: dict[str, TakeTurn] = {}
        if ENGINE in layers:
            _say("loading the engine ...")
            spec = EngineSpec(
                ENGINE, model.source, config=model.model_dump(mode="json", exclude_unset=True), child=CHILD
            )
            turns[ENGINE] = _engine_turn(stack.enter_context(Worker(spec)))
        url = ""
        if set(layers) - {ENGINE}:
            from rayapp.bench.layers import local_serve  # Ray is loaded only where it is needed

            _say("starting Ray Serve ...")
            url = stack.enter_context(local_serve(config))
        return asyncio.run(_measure(model, turns, layers, url, peers, plan))


async def _measure(
    model: ModelConfig, turns: dict[str, TakeTurn], layers: Sequence[str], url: str, peers: dict[str, str], plan: Plan
) -> list[Row]:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with connect() as session:
        if url:
            from rayapp.bench import layers as ways

            asks = {
                "replica": lambda: ways.ask_replica(model),
                "router": lambda: ways.ask_router(model),
                "router-stream": lambda: ways.ask_router_stream(model),
                "http": lambda: ways.ask_http(session, url, model.name, {}),
            }
            turns |= {name: _turn(asks[name]()) for name in layers if name in asks}
        for name, address in peers.items():
            from rayapp.bench import layers as ways

            served = await first_model(session, address.rstrip("/"), headers)
            turns[name] = _turn(ways.ask_http(session, address, served, headers))
        return await alternate(turns, plan)


def _turn(ask: Any) -> TakeTurn:
    async def take(prompts: list[list[int]], new_tokens: int, concurrency: int) -> Turn:
        return await closed_loop(ask, prompts, new_tokens, concurrency)

    return take


def _engine_turn(worker: Worker) -> TakeTurn:
    async def take(prompts: list[list[int]], new_tokens: int, concurrency: int) -> Turn:
        order = {"prompts": prompts, "new_tokens": new_tokens, "concurrency": concurrency}
        return Turn(**await asyncio.to_thread(worker.ask, order))

    return take


async def alternate(turns: dict[str, TakeTurn], plan: Plan) -> list[Row]:
    """All layers take a turn, then all again; before that each once for warmth, which does not count."""
    for number, (name, take) in enumerate(turns.items()):
        _say(f"warming {name} ...")
        await take(plan.prompts(1, -1 % 2**32, number)[:2], plan.output_len, 1)
    rows: list[Row] = []
    for concurrency in plan.concurrencies:
        found: dict[str, list[Turn]] = {name: [] for name in turns}
        used: dict[str, dict[str, float]] = {name: {} for name in turns}
        for rep in range(plan.reps):
            for number, (name, take) in enumerate(turns.items()):
                before = descendants_cpu()
                turn = await take(plan.prompts(concurrency, rep, number), plan.output_len, concurrency)
                for process, seconds in descendants_cpu().items():
                    share = seconds - before.get(process, 0.0)
                    used[name][process] = used[name].get(process, 0.0) + share
                found[name].append(turn)
                _say(
                    f"{name} at {concurrency}: {turn.tokens / turn.seconds:.1f} tokens/s, first {_ms(turn.first_ms)} ms"
                )
        rows += [_row(name, concurrency, some, used[name]) for name, some in found.items()]
    _add_ratios(rows)
    return rows


def _row(name: str, concurrency: int, turns: Sequence[Turn], cpu: dict[str, float]) -> Row:
    tokens = sum(turn.tokens for turn in turns)
    return {
        "layer": name,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(turn.tokens / turn.seconds for turn in turns),
        "first_ms": _median([turn.first_ms for turn in turns]),
        "token_ms": _median([turn.token_ms for turn in turns]),
        "turns": [turn.as_dict() for turn in turns],
        "cpu_ms_per_token": {
            process: 1e3 * s / tokens for process, s in sorted(cpu.items()) if 1e3 * s / tokens > 0.01
        },
    }


def _add_ratios(rows: list[Row]) -> None:
    """Tokens/s as a share of the engine's, and how much later the first token comes; None without the engine."""
    alone = {row["concurrency"]: row for row in rows if row["layer"] == ENGINE}
    for row in rows:
        engine = alone.get(row["concurrency"])
        row["of_engine"] = row["tokens_per_s"] / engine["tokens_per_s"] if engine else None
        both = engine is not None and row["first_ms"] is not None and engine["first_ms"] is not None
        row["first_behind_ms"] = row["first_ms"] - engine["first_ms"] if both and engine else None


def render(result: Row) -> str:
    """The rows as Markdown under a line about the machine."""
    machine = result["host"]
    lines = [
        f"{machine['date']}  {machine['cpu']}, {machine['cores']} cores; {result['model']}",
        f"$ {machine['command']}",
        "",
        "| concurrency | layer | tokens/s | of the engine | first token ms | behind the engine | ms a token | "
        "CPU ms a token |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        share = "" if row["of_engine"] is None else f"{row['of_engine']:.0%}"
        behind = "" if row["first_behind_ms"] is None else f"{row['first_behind_ms']:+.1f}"
        cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in row["cpu_ms_per_token"].items())
        lines.append(
            f"| {row['concurrency']} | {row['layer']} | {row['tokens_per_s']:.1f} | {share} | {_ms(row['first_ms'])} | "
            f"{behind} | {_ms(row['token_ms'])} | {cpu} |"
        )
    return "\n".join(lines)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _named(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not url.startswith("http"):
        raise ValueError(f"--compare-url {text!r} is not NAME=URL")
    if name in LAYERS:
        raise ValueError(f"--compare-url {text!r}: the name is that of a layer")
    return name, url


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rayapp.bench --split",
        description="The same requests to the engine in a process of its own, to its replica, to the Router by its "
        "handle (whole answers, and streamed) and over HTTP, in turns. Starts and ends a local Ray Serve. Greedy, ends "
        "of sequence ignored, random token ids, so many requests under way at once.",
    )
    parser.add_argument("--model", help=f"folder, hub id or bundled name; default: {DEFAULT_MODEL}")
    parser.add_argument("--config", type=Path, help="a serve_config.yaml, whose first model is taken")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--layers", default=",".join(LAYERS), help="some of them, with commas")
    parser.add_argument("--compare-url", nargs="+", default=[], metavar="NAME=URL", help="servers that run already")
    parser.add_argument("--random-input-len", type=int, default=128)
    parser.add_argument("--random-output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="requests of a turn, times the concurrency; at least 4")
    parser.add_argument("--reps", type=int, default=3, help="turns of each layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", action="store_true", help="write all figures as JSON")
    parser.add_argument("--result-dir", type=Path, default=Path())
    parser.add_argument("--result-filename", help="default: split.json")
    return parser
