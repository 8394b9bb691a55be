"""LangChain and LiteLLM against a server here; what they are asked to do stands in clients.py.

python3 -m venv ENV && ENV/bin/pip install langchain-openai litellm
CLIENTS_PYTHON=ENV/bin/python make test-all ARGS="-n0 tests/outside/test_clients.py -s"
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_limit
from tests.outside.conftest import python_of, run
from tests.rayapp.local_server import local_server, small


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_langchain_and_litellm(tiny_http_path: Path, smol_tokenizer: Any, tmp_path: Path) -> None:
    python = python_of("CLIENTS_PYTHON", "langchain-openai litellm")
    folder = shutil.copytree(tiny_http_path, tmp_path / "ending")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": smol_tokenizer.eos_token_id}))
    with local_server(small("tiny", folder, tool_parser="hermes")) as url:
        print("\n" + run([python, Path(__file__).with_name("clients.py"), url, "tiny"], tmp_path, wait_limit(240)))
