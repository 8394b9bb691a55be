"""`python -m rayapp.bench`: load on a server that runs already, and the report.

Flags, report and result file are those of `vllm bench serve`, so that what reads or calls that one works with this.
Needs neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rayapp.bench import metrics
from rayapp.bench.client import ENDPOINTS, Outcome, Target, connect, send
from rayapp.bench.datasets import Conversation
from rayapp.bench.load import Run, arrival_times, run_load
from rayapp.bench.options import SAMPLING, conversations, load_tokenizer, serve_parser
from rayapp.bench.report import render

KEY_VARIABLE = "OPENAI_API_KEY"
READY_POLL_S = 0.5
WARMUP_SEED = 10**6
PROGRESS_S = 0.5


class BenchFailed(RuntimeError):
    """There is nothing to measure; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 1 when no request was answered, 2 for wrong usage."""
    args = serve_parser().parse_args(argv)
    try:
        settings = _settings(args)
        tokenizer = load_tokenizer(args.tokenizer)
        data, warmups = conversations(args, tokenizer), conversations(_for_warmth(args), tokenizer)
        times = arrival_times(len(data), args.request_rate, args.burstiness, np.random.default_rng(args.seed))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        result, run = run_loop(_benchmark(args, settings, data, warmups, times))
    except BenchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(result, settings["metrics"], settings["percentiles"]))
    if args.save_result or args.append_result:
        print(f"Result: {_save(args, result, run)}", file=sys.stderr)
    return 0 if result["completed"] else 1


def run_loop(work: Any) -> Any:
    """`asyncio.run` on the faster loop that Ray Serve brings, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _benchmark(
    args: argparse.Namespace,
    settings: dict[str, Any],
    data: list[Conversation],
    warmups: list[Conversation],
    times: list[float],
) -> tuple[dict[str, Any], Run]:
    async with connect() as session:
        target = await _target(args, settings, session)

        async def ask(prompt: Any, max_tokens: int) -> Outcome:
            return await send(session, target, prompt, max_tokens)

        await _check(args, ask, warmups[0])
        if warmups := warmups[1:]:
            await run_load(warmups, ask, [0.0] * len(warmups), chat=target.chat, max_concurrency=args.max_concurrency)
        progress = Progress(sum(map(len, data)), shown=not args.disable_tqdm and sys.stderr.isatty())
        run = await run_load(
            data, ask, times, chat=target.chat, max_concurrency=args.max_concurrency, on_outcome=progress
        )
        progress.end()
    figures = metrics.figures(
        run.outcomes,
        run.duration_s,
        percentiles=settings["percentiles"],
        metrics=settings["metrics"],
        goodput=settings["goodput"],
    )
    return _describe(args, target) | figures | run.strain.figures() | {"client_warnings": run.strain.warnings()}, run


def _for_warmth(args: argparse.Namespace) -> argparse.Namespace:
    """Flags of what is asked before: other prompts where they are made, or the server would have them cached."""
    return argparse.Namespace(**vars(args) | {"seed": args.seed + WARMUP_SEED, "num_prompts": 1 + args.num_warmups})


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What flags say that argparse does not understand. Raises ValueError."""
    selected = [name for name in args.percentile_metrics.split(",") if name]
    if unknown := set(selected) - set(metrics.METRICS):
        raise ValueError(f"--percentile-metrics: {', '.join(sorted(unknown))}; there are {', '.join(metrics.METRICS)}")
    percentiles = [float(one) for one in args.metric_percentiles.split(",")]
    if not all(0 <= one <= 100 for one in percentiles):
        raise ValueError("--metric-percentiles must be within 0 and 100")
    if args.num_prompts < 1 or (args.max_concurrency is not None and args.max_concurrency < 1):
        raise ValueError("--num-prompts and --max-concurrency must be positive")
    if args.backend == "openai-chat" and args.token_ids:
        raise ValueError("chat takes text: leave out --token-ids")
    extra = json.loads(args.extra_body) if args.extra_body else {}
    if not isinstance(extra, dict):
        raise ValueError("--extra-body must be a JSON object")
    return {
        "metrics": selected,
        "percentiles": percentiles,
        "goodput": metrics.parse_goodput(args.goodput),
        "headers": _pairs(args.header, "--header"),
        "metadata": _pairs(args.metadata, "--metadata"),
        "extra": extra,
    }


def _pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ValueError(f"{flag} {wrong[0]!r} is not KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


async def _target(args: argparse.Namespace, settings: dict[str, Any], session: aiohttp.ClientSession) -> Target:
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
    headers |= settings["headers"]
    fields = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos or args.dataset_name in ("random", "multi-turn"):
        fields["ignore_eos"] = True
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    if not args.model:
        args.model = await _until_ready(args, lambda: first_model(session, base, headers))
    return Target(
        base + endpoint,
        args.served_model_name or args.model,
        args.backend == "openai-chat",
        fields | settings["extra"],
        headers,
    )


async def first_model(session: aiohttp.ClientSession, base: str, headers: dict[str, str]) -> str:
    """The first model that a server lists.

    Raises:
        BenchFailed: it lists none.
    """
    try:
        async with session.get(f"{base}/v1/models", headers=headers) as response:
            content = await response.json()
            return str(content["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise BenchFailed(f"{base}/v1/models names no model ({error!r}); is the server up? Or give --model") from None


async def _check(
    args: argparse.Namespace, ask: Callable[[Any, int], Awaitable[Outcome]], conversation: Conversation
) -> None:
    """One request that does not count: a server that cannot answer it is not worth a benchmark."""
    prompt: Any = conversation[0].prompt
    if args.backend == "openai-chat":
        prompt = [{"role": "user", "content": prompt}]

    async def once() -> None:
        outcome = await ask(prompt, conversation[0].output_tokens)
        if outcome.error is not None:
            raise BenchFailed(f"the test request failed: {outcome.error}")

    await _until_ready(args, once)


async def _until_ready(args: argparse.Namespace, attempt: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            return await attempt()
        except BenchFailed:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(READY_POLL_S)


class Progress:
    """A line on the terminal that counts the requests that have ended."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown = total, shown
        self._ended = self._failed = 0
        self._printed = 0.0

    def __call__(self, outcome: Outcome) -> None:
        self._ended += 1
        self._failed += outcome.error is not None
        if self._shown and time.monotonic() - self._printed > PROGRESS_S:
            self._printed = time.monotonic()
            self._print()

    def end(self) -> None:
        """The last count stays."""
        if self._shown:
            self._print()
            print(file=sys.stderr)

    def _print(self) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        print(f"\r{self._ended} of {self._total} requests{failed}", end="", file=sys.stderr, flush=True)


def _describe(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The settings of a run, as `vllm bench serve` names them."""
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": args.num_prompts,
        **_pairs(args.metadata, "--metadata"),
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "dataset_name": args.dataset_name,
        "seed": args.seed,
        "url": target.url,
    }


def _save(args: argparse.Namespace, result: dict[str, Any], run: Run) -> Path:
    name = args.result_filename
    if name is None:
        concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        model = args.model.rstrip("/").rpartition("/")[2]
        rate = f"{args.request_rate}qps"
        name = f"{args.label or args.backend}-{rate}{concurrency}-{model}-{result['date']}.json"
    path: Path = args.result_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = result | (metrics.details(run.outcomes) if args.save_detailed else {})
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        if file.tell():
            file.write("\n")
        json.dump(content, file)
    return path
