"""`python -m engine.bench step`: what the host does in a step beside the model, in microseconds by part.

Called by the benchmark's command line. The engine under it is real but for the model, which costs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence

import torch

from engine.bench import sampling
from engine.bench.scripted import PAGE, PARTS, ScriptedEngine


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench step", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024], help="requests that decode")
    parser.add_argument("--context", type=int, nargs="+", default=[100, 10_000], help="tokens of each before")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="requests that wait")
    parser.add_argument("--rounds", type=int, default=20, help=f"of {PAGE} steps each; of each step the best counts")
    parser.add_argument("--sampling", action="store_true", help="instead, what choosing the tokens costs, by kind")
    parser.add_argument("--vocab", type=int, default=49152, help="tokens that --sampling chooses from")
    parser.add_argument("--history", type=int, default=8000, help="tokens of each request with --sampling")
    options = parser.parse_args(argv)
    if min(*options.rows, *options.context, options.rounds, 1) < 1 or min(options.waiting) < 0:
        parser.error("--rows, --context and --rounds must be positive, --waiting not negative")
    if options.sampling:
        for rows in options.rows:
            _print_sampling(rows, options)
        return
    print(_line(["rows", "context", "waiting", *PARTS, "total"]))
    for rows, context, waiting in itertools.product(options.rows, options.context, options.waiting):
        spent = measure(rows, context, waiting, options.rounds)
        figures = [f"{1e6 * spent[part]:.0f}" for part in PARTS]
        print(_line([str(rows), str(context), str(waiting), *figures, f"{1e6 * sum(spent.values()):.0f}"]), flush=True)


def measure(rows: int, context: int, waiting: int, rounds: int) -> dict[str, float]:
    """Seconds a step by part: the mean over as many steps as a page has tokens, each the best of its `rounds`."""
    engine = ScriptedEngine(rows, context, waiting, steps=(rounds + 1) * PAGE)
    best = [dict.fromkeys(PARTS, math.inf) for _ in range(PAGE)]
    for number in range(1 + rounds):
        for step in range(PAGE):
            engine.clock.reset()
            engine.step()
            if number:  # the first round warms up
                best[step] = {part: min(best[step][part], engine.clock.spent[part]) for part in PARTS}
    return {part: statistics.mean(spent[part] for spent in best) for part in PARTS}


def _print_sampling(rows: int, options: argparse.Namespace) -> None:
    print(f"{rows} rows of {options.vocab}: microseconds with bfloat16 and with float32 logits")
    columns = [
        sampling.measure(rows, options.vocab, options.history, dtype, options.rounds)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    for kind in sampling.KINDS:
        print(f"{kind:28}", _line([f"{1e6 * column[kind]:.0f}" for column in columns]), flush=True)


def _line(cells: list[str]) -> str:
    return " ".join(cell.rjust(11) for cell in cells)
