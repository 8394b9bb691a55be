"""A sweep of guidellm against a server here, through each endpoint: no request may fail.

python3 -m venv ENV && ENV/bin/pip install torch guidellm
GUIDELLM_PYTHON=ENV/bin/python make test-all ARGS="-n0 tests/outside/test_guidellm.py -s"
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_limit
from tests.outside.conftest import python_of, run

SWEEP, REQUESTS = 4, 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_sweep_has_no_errors(smol_url: str, smol_path: Path, tmp_path: Path, endpoint: str) -> None:
    python = python_of("GUIDELLM_PYTHON", "torch guidellm")
    report = tmp_path / "report.json"
    command: list[Any] = [python, "-m", "guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={smol_url},model=smol,request_format={endpoint}"]
    command += ["--profile", f"kind=sweep,sweep_size={SWEEP},max_concurrency=16"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={smol_path}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16"]
    run([*command, "--output", f"kind=json,path={report}"], tmp_path, wait_limit(600))

    benchmarks = json.loads(report.read_text())["benchmarks"]
    counts = [one["metrics"]["request_totals"] for one in benchmarks]
    strategies = [one["config"]["strategy"]["type_"] for one in benchmarks]
    print(f"\n{endpoint}: " + "; ".join(f"{name} {one}" for name, one in zip(strategies, counts, strict=True)))
    assert len(counts) == SWEEP
    assert all(one["successful"] == REQUESTS and one["errored"] == 0 for one in counts)
    tokens = [one["metrics"]["output_token_count"]["successful"] for one in benchmarks]
    assert all(one["min"] == one["max"] == 16 for one in tokens), "the lengths that were asked for"
