"""The flags of `python -m rayapp.bench`, named as those of `vllm bench serve`, and the data that they describe.

Used by `serve.py` and `split.py`. Each flag acts or is refused with the reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rayapp.bench import datasets
from rayapp.bench.client import ENDPOINTS
from rayapp.bench.metrics import METRICS
from rayapp.models import resolve
from rayapp.text.tokenizer import Tokenizer

DATASETS = ("random", "prefix_repetition", "multi-turn", "custom", "sharegpt")
SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}


def serve_parser() -> argparse.ArgumentParser:
    """Of the benchmark of a server."""
    parser = argparse.ArgumentParser(
        prog="python -m rayapp.bench",
        description="Load on an OpenAI-compatible server, and what it took. With --split: what each layer of this one "
        "costs (see --split --help). `python -m rayapp.bench routing` simulates routing.",
    )
    _server_flags(parser.add_argument_group("the server"))
    add_data_flags(parser)
    _load_flags(parser.add_argument_group("the load"))
    _report_flags(parser.add_argument_group("the report"))
    return parser


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=list(ENDPOINTS), default="openai", help="completions, or chat completions")
    group.add_argument("--base-url", help="instead of host and port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", help="default: that of the backend")
    group.add_argument("--model", help="default: the first that the server has")
    group.add_argument("--served-model-name", help="what requests say instead of --model")
    group.add_argument("--tokenizer", help="folder, hub id or bundled name: prompts then have exactly the asked length")
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="of every request")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="default: the server's")
    group.add_argument("--extra-body", metavar="JSON", help="more fields of every request")
    group.add_argument("--ignore-eos", action="store_true", help="always so with random data")


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """What is asked; also of --split."""
    group = parser.add_argument_group("the data")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", type=Path, help="custom: JSON lines of prompt or turns; sharegpt: its JSON")
    group.add_argument("--num-prompts", type=int, default=1000, help="requests; with turns, conversations")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--input-len", type=int, help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, help="of every data set")
    group.add_argument("--random-input-len", type=int, default=1024, help="tokens of a prompt, or of a turn")
    group.add_argument("--random-output-len", type=int, default=128, help="tokens of an answer")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths are spread by so much both ways")
    group.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    group.add_argument("--num-turns", type=int, default=3, help="of a multi-turn conversation")
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    group.add_argument("--prefix-repetition-output-len", type=int, default=128)
    group.add_argument("--custom-output-len", type=int, default=256, help="where a line says nothing")
    group.add_argument("--sharegpt-output-len", type=int, help="default: as long as the recorded answer")
    group.add_argument("--no-oversample", action="store_true", help="a file with too few prompts is used once only")
    group.add_argument("--disable-shuffle", action="store_true", help="a file's prompts in their order")
    group.add_argument("--token-ids", action="store_true", help="prompts are token ids; needs --tokenizer")


def _load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--request-rate", type=float, default=float("inf"), help="arrivals a second; inf: all at once")
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below: in bursts; above: evenly")
    group.add_argument("--max-concurrency", type=int, help="requests under way at once; others wait in the client")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before that do not count")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0.0, help="how long to wait for the server")


def _report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--percentile-metrics", default=",".join(METRICS), help="those of " + ", ".join(METRICS))
    group.add_argument("--metric-percentiles", default="99", help="such as 50,90,99")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="what a good request may take")
    group.add_argument("--disable-tqdm", action="store_true", help="no line of progress")
    group.add_argument("--label", help="of the result file; default: the backend")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--append-result", action="store_true", help="add them to the file as one more line")
    group.add_argument("--save-detailed", action="store_true", help="with those of every request")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="more entries of the file")
    group.add_argument("--result-dir", type=Path, default=Path())
    group.add_argument("--result-filename", help="default: made of label, rate, model and time")


def load_tokenizer(source: str | None) -> Tokenizer | None:
    """Of a folder, hub id or bundled name.

    Raises:
        FileNotFoundError: there is none.
    """
    return None if source is None else Tokenizer.load(resolve(source))


def conversations(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[datasets.Conversation]:
    """The data that the flags describe.

    Raises:
        ValueError: flags that do not go together, wrong figures, or a file that cannot be read as such.
        OSError: no such file.
    """
    generated = args.dataset_name in ("random", "prefix_repetition", "multi-turn")
    if generated != (args.dataset_path is None):
        what = "is generated and takes no" if generated else "is read from a file and needs"
        raise ValueError(f"the data set {args.dataset_name!r} {what} --dataset-path")
    if args.token_ids and args.dataset_name not in ("random", "prefix_repetition"):
        raise ValueError("--token-ids is for the data sets random and prefix_repetition")
    rng = np.random.default_rng(args.seed)
    if not generated:
        return _from_file(args, tokenizer, rng)
    words = datasets.Vocabulary(rng, tokenizer, args.token_ids)
    if args.dataset_name == "prefix_repetition":
        return datasets.prefix_repetition(
            args.num_prompts,
            words,
            rng,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes,
            output_len=args.output_len or args.prefix_repetition_output_len,
        )
    return datasets.random_requests(
        args.num_prompts,
        words,
        rng,
        input_len=args.input_len or args.random_input_len,
        output_len=args.output_len or args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        turns=args.num_turns if args.dataset_name == "multi-turn" else 1,
    )


def _from_file(
    args: argparse.Namespace, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[datasets.Conversation]:
    if args.dataset_name == "custom":
        found = datasets.read_custom(args.dataset_path, args.output_len or args.custom_output_len)
    else:
        found = datasets.read_sharegpt(args.dataset_path, args.output_len or args.sharegpt_output_len, tokenizer)
    return datasets.sampled(
        found, args.num_prompts, rng, shuffle=not args.disable_shuffle, oversample=not args.no_oversample
    )
