"""The guide's code blocks on models and processes: attention backends, sliding windows, tensor parallelism.

As test_guide_snippets.py, which has the other blocks. Both spellings of the tensor parallel block run in one launch.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import wait_limit
from tests.guide.blocks import GUIDE, SPELLINGS, Reader, fitted, script, spelled
from tests.serving import BIN, ROOT

TORCHRUN_S = 240


def test_attention_backend(reader: Reader) -> None:
    reader.do("import torch")
    reader.do("from transformers import AutoModelForCausalLM")
    reader.run("attention_backend")
    reader.do("cb_config = None")
    reader.generate()
    reader.check_all()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged|eager"])
@pytest.mark.parametrize("switch", [True, False])
def test_attention_table(reader: Reader, attention: str, switch: bool) -> None:
    """Flash attention is not here: transformers refuses to load a model with it where flash-attn is missing."""
    reader.do("import torch")
    reader.do("from transformers import AutoModelForCausalLM")
    reader.define(attention=attention, switch=switch)
    reader.do("model = AutoModelForCausalLM.from_pretrained(TINY, attn_implementation=attention, dtype=torch.float32)")
    reader.do("cb_config = ContinuousBatchingConfig(auto_switch_to_flash=switch)")
    reader.generate()
    reader.check_all()
    assert reader["model"].config._attn_implementation == attention


def test_sliding_window(reader: Reader, gemma: PreTrainedModel) -> None:
    reader.do("import torch")
    reader.run("sliding_window")
    reader.original = gemma
    assert reader["model"].config.sliding_window == 16
    reader.define(cb_config=None)
    reader.do("generation_config = GenerationConfig(max_new_tokens=40, eos_token_id=tokenizer.eos_token_id)")
    reader.generate()
    reader.check_all(40)


def test_gemma_with_sdpa_is_refused_when_it_is_loaded(gemma_path: Path) -> None:
    """The guide's own spelling of the block above: the refusal is that of transformers, before any engine is there."""
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        AutoModelForCausalLM.from_pretrained(gemma_path, attn_implementation="sdpa")


_CALL = """
outputs = model.generate_batch(
    inputs=inputs, generation_config=generation_config, continuous_batching_config=cb_config
)
"""
_REPORT = """
import json, os, pathlib
found = [output.generated_tokens for output in outputs.values()]
pathlib.Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def tensor_parallel_script(tiny_path: Path) -> str:
    """The block on tensor parallelism, then the one on its time limit, in both spellings."""
    limit = wait_limit(TORCHRUN_S)
    parts = [f"import faulthandler; faulthandler.dump_traceback_later({limit}, exit=True)"]
    parts += ["import engine", f"TINY = {str(tiny_path)!r}"]
    for spelling in SPELLINGS:
        parts += [
            "engine.install()" if spelling == GUIDE else "engine.uninstall()",
            script("tensor_parallel", spelling),
            f"name = '{spelling}'",
            _REPORT,
            script("cpu_group_timeout", spelling),
            spelled(_CALL, spelling),
            f"name = '{spelling}-timeout'",
            _REPORT,
        ]
    return "\n".join(parts)


@pytest.fixture(scope="module")
def launched(tiny_http_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the two processes that the shell block starts left what they generated."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "cb_tp.py").write_text(tensor_parallel_script(tiny_http_path))
    env = os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with subprocess.Popen(
        shlex.split(fitted("torchrun")),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=wait_limit(TORCHRUN_S))
        finally:
            process.kill()  # the processes that it started end by themselves
    assert process.returncode == 0, printed
    return folder


def test_torchrun(launched: Path) -> None:
    """Every process has every output."""
    names = [f"{spelling}{part}-{rank}.json" for spelling in SPELLINGS for part in ("", "-timeout") for rank in (0, 1)]
    assert {path.name for path in launched.glob("*.json")} == set(names)
    found = [json.loads((launched / name).read_text()) for name in names]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("part", ["", "-timeout"])
def test_tensor_parallel(launched: Path, reader: Reader, part: str) -> None:
    found = json.loads((launched / f"{reader.spelling}{part}-0.json").read_text())
    assert len(found) == 2
    for generated, prompt in zip(found, reader["inputs"], strict=False):
        reader.check_tokens(generated, prompt, 8)
