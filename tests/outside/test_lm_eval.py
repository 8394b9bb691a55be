"""lm-eval's `local-completions` against a server here, beside its own `hf` on the same weights in float32.

python3 -m venv ENV && ENV/bin/pip install torch 'lm-eval[api]' transformers accelerate
LM_EVAL_PYTHON=ENV/bin/python make test-all ARGS="-n0 tests/outside/test_lm_eval.py -s"
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import wait_limit
from tests.outside.conftest import python_of, run

ITEMS, GREEDY = 200, 20
TASKS = {"scored": ITEMS, "greedy": GREEDY}
CLOSE = 1e-3
THINGS = ["apples", "pages", "coins", "days", "Äpfel", "евро", "苹果", "🍎"]
NAMES = ["Ann", "Bob", "Zoë", "Łukasz", "李", "Olga"]


def items() -> list[dict[str, Any]]:
    """Sums in prose, each with the right end and a wrong one, of different lengths and scripts."""
    draw = random.Random(0)
    made = []
    for number in range(ITEMS):
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        have, more = draw.randint(1, 50), draw.randint(1, 50)
        before = " ".join(f"{draw.choice(NAMES)} saw {draw.randint(2, 9)} {thing}." for _ in range(draw.randint(0, 12)))
        prompt = f"{before} {name} had {have} {thing} and got {more} more. So now {name} has".strip()
        ends = [f" {have + more} {thing}.", f" {have + more + draw.randint(1, 9)} {thing} in all."]
        made.append({"number": number, "prompt": prompt, "choices": ends, "gold": 0})
    return made


def tasks(folder: Path) -> Path:
    """A folder with two tasks on `items`: scored, and answered greedily."""
    folder.mkdir()
    data = folder / "items.jsonl"
    data.write_text("\n".join(json.dumps(item) for item in items()))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }  # fmt: skip
    scored = common | {
        "task": "scored", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
        "target_delimiter": "",
    }  # fmt: skip
    greedy = common | {
        "task": "greedy", "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"max_gen_toks": 24, "until": ["\n\n"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    for task in (scored, greedy):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


def evaluated(python: Path, folder: Path, model: str, args: str, task: str, limit: int) -> list[Any]:
    """What a model answered to each item."""
    output = folder / f"{model}-{task}-{len(args)}"
    command: list[Any] = [python, "-m", "lm_eval", "run", "--model", model, "--model_args", args, "--tasks", task]
    command += ["--include_path", folder / "tasks", "--batch_size", 1, "--limit", limit, "--log_samples"]
    run([*command, "--output_path", output], folder, wait_limit(1500))
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    found = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda one: one["doc_id"])
    assert len(found) == limit
    answers = [one["filtered_resps"] for one in found]
    if task == "greedy":  # half a character at the end, which the API leaves out and decode() shows
        return [text.rstrip("\ufffd") for (text,) in answers]
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval")
    tasks(folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def own(smol_path: Path, folder: Path) -> dict[str, list[Any]]:
    """What the model itself says, by task."""
    python = python_of("LM_EVAL_PYTHON", "torch lm-eval[api] transformers accelerate")
    args = f"pretrained={smol_path},dtype=float32"
    return {task: evaluated(python, folder, "hf", args, task, limit) for task, limit in TASKS.items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_lm_eval_finds_what_it_finds_with_the_model_itself(
    own: dict[str, list[Any]], smol_url: str, smol_path: Path, folder: Path, tokenizer: str
) -> None:
    """`remote` takes the tokens from the server, so that nothing of the model is needed here."""
    python = python_of("LM_EVAL_PYTHON", "torch lm-eval[api] transformers accelerate")
    args = f"model=smol,base_url={smol_url}/v1/completions,num_concurrent=4,max_retries=1,tokenizer_backend={tokenizer}"
    args += f",tokenizer={smol_path}" if tokenizer == "huggingface" else ""
    served = {task: evaluated(python, folder, "local-completions", args, task, limit) for task, limit in TASKS.items()}
    pairs = [
        (float(ours[0]), float(theirs[0]), str(ours[1]) == str(theirs[1]))
        for choices in zip(served["scored"], own["scored"], strict=True)
        for ours, theirs in zip(*choices, strict=True)
    ]
    worst = max(abs(ours - theirs) for ours, theirs, _ in pairs)
    same = sum(ours == theirs for ours, theirs in zip(served["greedy"], own["greedy"], strict=True))
    print(f"\n{tokenizer}: {len(pairs)} log-likelihoods are off by {worst:.1e} at most; {same} answers are equal")
    assert len(pairs) == 2 * ITEMS and worst < CLOSE and all(greedy for *_, greedy in pairs)
    assert same == GREEDY
