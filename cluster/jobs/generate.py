"""Generates a few answers from inside the cluster and prints them, one JSON object a line.

    RAY_AUTH_MODE=token ray job submit --address http://127.0.0.1:8265 -- python cluster/jobs/generate.py

A cluster that `serve run` has started asks for the token that it left in ~/.ray, hence RAY_AUTH_MODE. Text goes
through the Router; with --ids, token ids go straight to the engine replicas. The job runs wherever Ray puts it:
rayapp must be importable there (installed, or by `--working-dir .`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import ray

from rayapp.client import DEFAULT_APP, Client
from rayapp.models import DEFAULT_MODEL

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4, 5,"]
PROMPT_IDS = [[504, 3575, 282, 4649, 314], [33, 28, 216, 34, 28, 216, 35, 28]]


def main() -> None:
    """Reads the command line, connects to the cluster of the job, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", default=DEFAULT_APP, help="name of the Serve application (%(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="served model (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--chat", action="append", help="text to answer; may be given several times")
    parser.add_argument("--ids", action="append", type=json.loads, help="token ids as a JSON list; several times")
    arguments = parser.parse_args()
    if not (arguments.prompt or arguments.chat or arguments.ids):
        arguments.prompt, arguments.ids = PROMPTS, PROMPT_IDS
    ray.init(log_to_driver=False)
    for line in answers(Client(arguments.app), arguments):
        print(json.dumps(line, ensure_ascii=False), flush=True)


def answers(client: Client, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result for each prompt, chat text and list of ids, in this order. All greedy."""
    fields = {"model": arguments.model, "max_tokens": arguments.max_tokens, "temperature": 0}
    for prompt in arguments.prompt or ():
        yield {"prompt": prompt, **client.generate(prompt, **fields)}
    for text in arguments.chat or ():
        yield {"chat": text, **client.generate([{"role": "user", "content": text}], **fields)}
    for ids in arguments.ids or ():
        yield {"ids": ids, **client.generate_ids(arguments.model, ids, max_new_tokens=arguments.max_tokens)}


if __name__ == "__main__":
    main()
