"""Which package may know which: imports as they are written, and what an import really loads.

What an import loads is seen in a process of its own, since a module once loaded stays in this one.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[1]
SERVING = {"ray", "starlette", "fastapi", "uvicorn", "pydantic", "rayapp"}
ENGINE_NEEDS = {"engine", "torch", "transformers", "numpy", "safetensors", "tqdm"}  # transformers needs tqdm itself
GPU_EXTRA = {"flash_attn", "triton"}
PEERS = {"engine/bench/engines.py": {"openvino", "openvino_genai", "vllm"}}  # run by interpreters that have them

# Imports the named modules, packages with all that is in them, and prints the top level names then loaded. What needs
# an extra of GPUs that is not installed stays out: nothing that has been loaded may have needed it.
LOAD = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name not in ("flash_attn", "triton"):
                raise
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    """Top level names in sys.modules of a fresh interpreter that imported `modules` and their submodules."""
    child = subprocess.run(
        [sys.executable, "-c", LOAD, *modules],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=wait_limit(120),
    )
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout.splitlines()[-1]))


def imports_in(file: Path) -> set[str]:
    """Full names of the modules a source file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("file", sources("engine"), ids=lambda file: str(file.relative_to(ROOT)))
def test_engine_sources_import_only_what_the_engine_needs(file: Path) -> None:
    top_level = {name.partition(".")[0] for name in imports_in(file)}
    peers = PEERS.get(file.relative_to(ROOT).as_posix(), set())
    assert top_level <= ENGINE_NEEDS | GPU_EXTRA | peers | sys.stdlib_module_names


def test_engine_loads_nothing_of_serving() -> None:
    loaded = loaded_by("engine")
    assert {"engine", "torch", "transformers"} <= loaded
    assert not loaded & SERVING


def test_importing_the_engine_alone_is_light() -> None:
    child = "import sys, engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", child], cwd=ROOT, timeout=wait_limit(60)).returncode == 0


def test_the_public_names_load_neither_torch_nor_transformers() -> None:
    """What they cost is then the engine's own; the models that they are used on bring both."""
    child = (
        "import sys; before = set(sys.modules); from engine import *;"
        "from engine import generate_batch, install, ContinuousBatchingManager;"
        "import engine.model.loader, engine.ops.cpu.prebuild;"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "sys.exit(str(sorted(tops - sys.stdlib_module_names)))"
    )
    run = [sys.executable, "-c", child]
    loaded = subprocess.run(run, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=wait_limit(60)).stderr
    assert loaded.strip() == "['engine', 'numpy']"


def test_decisions_load_no_torch() -> None:
    loaded = loaded_by(
        "engine.scheduling", "engine.cache", "engine.request", "engine.outputs", "engine.sampling.params"
    )
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers"}


def test_router_process_loads_no_torch() -> None:
    loaded = loaded_by("rayapp.router", "rayapp.api", "rayapp.api.routes", "rayapp.text", "rayapp.models")
    assert {"rayapp", "ray", "fastapi"} <= loaded
    assert "torch" not in loaded


def test_loading_the_tokenizer_loads_no_torch(smol_path: Path) -> None:
    child = (
        "import sys; from rayapp.text.tokenizer import Tokenizer;"
        "assert Tokenizer.load(sys.argv[1]).encode('1, 2'); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", child, str(smol_path)], cwd=ROOT, timeout=wait_limit(60))
    assert result.returncode == 0


@pytest.mark.parametrize("package", ["engine", "rayapp"])
def test_nothing_touches_the_continuous_batching_of_transformers(package: str) -> None:
    offenders = [
        str(file.relative_to(ROOT))
        for file in sources(package)
        if "bench" not in file.parts and any("generation.continuous_batching" in name for name in imports_in(file))
    ]
    assert not offenders
