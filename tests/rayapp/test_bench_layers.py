"""The layers of the split on a real Ray Serve: each generates what was asked; the command starts and ends its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.bench.client import connect
from rayapp.bench.closed_loop import Turn, closed_loop
from rayapp.bench.layers import ask_http, ask_replica, ask_router, ask_router_stream
from rayapp.bench.split import LAYERS
from rayapp.config import ModelConfig
from tests.conftest import wait_limit
from tests.rayapp.conftest import App


def test_every_layer_generates_what_was_asked(tiny_app: App) -> None:
    model = ModelConfig(name="tiny")
    prompts = [[i, i + 1, i + 2] for i in range(10, 14)]

    async def run() -> list[Turn]:
        async with connect() as session:
            asks = [
                ask_replica(model, tiny_app.name),
                ask_router(model, tiny_app.name),
                ask_router_stream(model, tiny_app.name),
                ask_http(session, tiny_app.url, model.name, {}),
            ]
            return [await closed_loop(ask, prompts, 6, 2) for ask in asks]

    turns = asyncio.run(run())
    assert [turn.tokens for turn in turns] == [24] * 4
    assert [turn.first_ms is None for turn in turns] == [False, True, False, False]


@pytest.mark.slow
def test_the_split_starts_and_ends_its_own_serve(tiny_http_path: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    model = {"name": "tiny", "source": str(tiny_http_path), "device": "cpu", "engine": {"num_blocks": 512}}
    config.write_text(json.dumps({"applications": [{"args": {"models": [model]}}]}))
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"TMPDIR": str(tmp_path)}
    child = subprocess.run(
        [
            sys.executable, "-m", "rayapp.bench", "--split", "--config", str(config), "--concurrency", "1", "2",
            "--reps", "1", "--random-input-len", "8", "--random-output-len", "4", "--save-result", "--result-dir",
            str(tmp_path),
        ],
        env=env, capture_output=True, text=True, timeout=wait_limit(200),
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    rows = json.loads((tmp_path / "split.json").read_text())["rows"]
    assert [row["layer"] for row in rows] == [*LAYERS, *LAYERS]
    assert all(row["of_engine"] > 0 for row in rows)
    assert "actor" in rows[-1]["cpu_ms_per_token"] and not list(tmp_path.glob("cvb-*"))
