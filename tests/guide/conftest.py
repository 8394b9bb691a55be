"""What the guide's blocks run on: two small models in folders, and a reader for each spelling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import engine
from tests.architectures import build
from tests.guide.blocks import GUIDE, SPELLINGS, Reader
from tests.models import SMOL_VOCAB, save

PROMPTS = ["What's up?", "Name a cat breed.", "Write a detailed history of quantum mechanics."]


def build_gemma(window: int) -> PreTrainedModel:
    """Gemma-2 with SmolLM2's vocabulary; every second layer has the window."""
    fields: dict[str, Any] = {"vocab_size": SMOL_VOCAB, "head_dim": 16, "sliding_window": window}
    return build("gemma2", attn_logit_softcapping=5.0, **fields)


@pytest.fixture(scope="session")
def gemma() -> PreTrainedModel:
    """What the block on sliding windows makes of the model that it loads."""
    return build_gemma(16)


@pytest.fixture(scope="session")
def gemma_path(smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build_gemma(4096), tmp_path_factory.mktemp("models") / "gemma", smol_path)


@pytest.fixture(scope="session")
def loaded(tiny_http_path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_http_path, dtype=torch.float32)
    return model


@pytest.fixture(params=SPELLINGS)
def reader(
    request: pytest.FixtureRequest,
    loaded: PreTrainedModel,
    tiny_http: PreTrainedModel,
    tiny_http_path: Path,
    gemma_path: Path,
    smol_tokenizer: PreTrainedTokenizerFast,
) -> Iterator[Reader]:
    """One who has run the guide's first block, but for what it generates."""
    inputs = [smol_tokenizer.encode(prompt) for prompt in PROMPTS]
    if request.param == GUIDE:
        engine.install()
    reader = Reader(
        request.param,
        tiny_http,
        TINY=tiny_http_path,
        GEMMA=gemma_path,
        model=loaded,
        tokenizer=smol_tokenizer,
        inputs=inputs,
        input_ids=inputs[0],
    )
    reader.do("generation_config = GenerationConfig(max_new_tokens=8, eos_token_id=tokenizer.eos_token_id)")
    yield reader
    if "manager" in reader.names:
        reader["manager"].stop(hard_stop=True)
        reader["manager"].destroy()
    engine.uninstall()
