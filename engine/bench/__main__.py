"""`python -m engine.bench SECTION`: the command line of the benchmark.

throughput   workloads against peers, with the share of this host's limits
latency      one stream: time to first token, between tokens
prefix       a prompt cold and as a prefix hit
all          these three, then step
step         microseconds of each part of a step; options of its own
replay       microseconds of a step that a GPU replays, on the host; options of its own
startup      seconds to the first token, peak of memory; options of its own
forward      milliseconds of a forward pass on CPU, whole and by kernel; options of its own
linear       matrix products on CPU against torch and the machine's limits; options of its own
attention    attention on CPU by page size; options of its own
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.bench.prompts import Message
from engine.bench.workers import BenchError, EngineSpec, Worker, started
from engine.bench.workloads import DESCRIPTIONS, REAL, Encode
from engine.config import ContinuousBatchingConfig

PEERS = ("transformers", "openvino", "vllm")
_SECTIONS = ("throughput", "latency", "prefix")
_ALONE = ("step", "replay", "startup", "forward", "linear", "attention")  # modules with a command line of their own
_STEP: list[str] = []  # options of `step` within `all`
_DEFAULT_WORKLOADS = [name for name in DESCRIPTIONS if name != "single"]  # that one is measured by `latency`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit status: 0, 1 when a measurement counts for nothing, 2 for wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in _ALONE:
        return _alone(*argv)
    arguments = _parser().parse_args(argv)
    try:
        check(arguments)
        specs = engine_specs(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        result = _measure(arguments, specs, shlex.join(["python", "-m", "engine.bench", *argv]))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _publish(result, arguments)
    if arguments.section == "all":
        print("\nstep", flush=True)
        return subprocess.run([sys.executable, "-m", "engine.bench", "step", *_STEP], check=False).returncode
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for section in (*_SECTIONS, "all"):
        sub = sections.add_parser(section)
        sub.add_argument("--model", required=True, help="folder with config.json and safetensors")
        sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
        sub.add_argument("--reps", type=_positive, default=3, help="repetitions, each with fresh prompts")
        sub.add_argument("--seed", type=int, default=100, help="of the first repetition's prompts")
        sub.add_argument("--engine-config", type=_json_object, default={}, metavar="JSON", help="fields of our config")
        sub.add_argument("--compare", nargs="+", choices=PEERS, default=[], metavar="PEER", help=", ".join(PEERS))
        sub.add_argument("--openvino-python", metavar="PATH", help="interpreter that has openvino-genai")
        sub.add_argument("--openvino-model", metavar="PATH", help=".gguf file, or folder of OpenVINO's format")
        sub.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vllm for CPU")
        sub.add_argument(
            "--peer-config", nargs=2, action="append", default=[], metavar=("PEER", "JSON"), help="a peer's settings"
        )
        sub.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
        if section in ("throughput", "all"):
            _add_throughput_options(sub)
    for section in _ALONE:
        sections.add_parser(section)  # for the list of sections: main hands their arguments on
    return parser


def _add_throughput_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--workloads", nargs="+", choices=list(DESCRIPTIONS), default=_DEFAULT_WORKLOADS, metavar="NAME")
    sub.add_argument("--weight-bits", type=float, metavar="N", help="of our weights, for the bound (the dtype's)")
    sub.add_argument("--no-limits", action="store_true", help="do not measure what this host can reach")
    sub.add_argument("--chart", type=Path, metavar="FILE", help="write an SVG")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


def check(arguments: argparse.Namespace) -> None:
    """Finds out now what would else end a measurement that has begun.

    Raises:
        ValueError: a file, folder, program or setting that is named does not exist.
    """
    if not Path(arguments.model, "config.json").is_file():
        raise ValueError(f"--model {arguments.model}: a folder with config.json and safetensors is needed")
    for name in ("json", "chart"):
        file = getattr(arguments, name, None)
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"--{name} {file}: there is no such folder")
    ContinuousBatchingConfig.from_dict(arguments.engine_config)
    for peer in ("openvino", "vllm"):
        python = getattr(arguments, f"{peer}_python")
        if python is not None and shutil.which(python) is None:
            raise ValueError(f"--{peer}-python {python}: there is no such program")


def engine_specs(arguments: argparse.Namespace) -> list[EngineSpec]:
    """Our engine, then the peers in the order given.

    Raises:
        ValueError: a peer's environment or model is missing, or the settings are of a peer that is not compared.
    """
    configs = {name: _json_object(text) for name, text in arguments.peer_config}
    if unused := sorted(set(configs) - set(arguments.compare)):
        raise ValueError(f"--peer-config {unused[0]}: not among --compare")
    specs = [EngineSpec("convoy", arguments.model, arguments.dtype, arguments.engine_config)]
    for name in dict.fromkeys(arguments.compare):
        python, model = sys.executable, arguments.model
        if name != "transformers":
            python = getattr(arguments, f"{name}_python")
            if python is None:
                raise ValueError(f"--compare {name} needs --{name}-python, an interpreter that has it")
        if name == "openvino":
            model = arguments.openvino_model
            if model is None:
                raise ValueError("--compare openvino needs --openvino-model, a .gguf file or OpenVINO folder")
        specs.append(EngineSpec(name, model, arguments.dtype, configs.get(name, {}), python))
    return specs


def _measure(arguments: argparse.Namespace, specs: list[EngineSpec], command: str) -> dict[str, Any]:
    from engine.bench import host, measure
    from engine.bench.limits import Costs
    from engine.bench.limits import measure as measure_limits

    result: dict[str, Any] = {"host": host.describe(command), "model": arguments.model, "dtype": arguments.dtype}
    sections = _SECTIONS if arguments.section == "all" else (arguments.section,)
    workloads = getattr(arguments, "workloads", [])
    plan = measure.Plan(
        arguments.reps,
        arguments.seed,
        _vocab_size(arguments.model),
        _encoder(arguments.model) if set(workloads) & set(REAL) else None,
    )
    with started(specs) as workers, _reference(arguments) as reference:
        result["engines"] = {worker.name: worker.version for worker in workers}
        if "throughput" in sections:
            limits = None
            if not arguments.no_limits:
                costs = Costs.of(arguments.model, arguments.dtype, arguments.weight_bits)
                limits = costs, measure_limits(costs)
                result["limits"] = {"gemm": limits[1].gemm, "bandwidth": limits[1].bandwidth}
            result["throughput"] = measure.throughput(workers, workloads, plan, limits, reference)
        if "latency" in sections:
            result["latency"] = measure.latency(workers, plan)
        if "prefix" in sections:
            result["prefix"] = measure.prefix(workers, plan)
    return result


@contextlib.contextmanager
def _reference(arguments: argparse.Namespace) -> Iterator[Worker | None]:
    """Plain `generate()` where its tokens must be ours: bfloat16 rounds differently in every engine."""
    if arguments.dtype != "float32" or arguments.section not in ("throughput", "all"):
        yield None
        return
    with Worker(EngineSpec("generate", arguments.model, arguments.dtype)) as worker:
        yield worker


def _vocab_size(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().vocab_size)


def _encoder(model: str) -> Encode:
    """The model's chat template and tokenizer; a model without a template gets the contents, a blank line apart."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def encode(messages: Sequence[Message]) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


def _publish(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    from engine.bench.chart import chart
    from engine.bench.report import render

    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if getattr(arguments, "chart", None):
        machine = result["host"]
        title = f"{Path(arguments.model).name}, {arguments.dtype}: tokens per second"
        caption = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}; medians of {arguments.reps}"
        arguments.chart.write_text(chart(result["throughput"], title, caption))


def _alone(section: str, *argv: str) -> int:
    return import_module(f"engine.bench.{section}").main(list(argv)) or 0


if __name__ == "__main__":
    sys.exit(main())
