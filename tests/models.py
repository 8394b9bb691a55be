"""Models for tests, and what plain transformers makes of them.

Used through the fixtures of conftest.py, or directly where a test needs a variant. The models are small enough to
build in milliseconds and shaped so that greedy output depends on every token of the prompt (`build_tiny`) or can
be dictated (`build_chain`). Knows nothing of the engine: `ref` is what the engine is compared with.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

# Prompts on which SmolLM2 (float32) has top-2 logit gaps of more than 1: prompt, its number of tokens, greedy ids.
COUNT = "1, 2, 3, 4, 5,"
COUNT_TOKENS = 14
COUNT_IDS = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28]
CJK = " ".join(["你好"] * 5)
CJK_TOKENS = 24
CJK_IDS = [216, 18645, 250, 48392, 138] * 3
ACC = " ".join(["e\u0301"] * 5)
ACC_TOKENS = 15
ACC_IDS = [297, 151, 219] * 5

# Prompts of one token for the model `chain` that is served, whose answers begin with "there" and with a newline.
CHAIN_THERE, CHAIN_NEWLINES = 66, 504

SMOL_VOCAB = 49152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_tiny(
    vocab_size: int = 512, max_position_embeddings: int = 256, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """TINY: a random 4-layer Llama in float32 without BOS and EOS, whose greedy output hardly repeats itself.

    The wide initialisation and untied head matter: with the defaults the output is one token over and over,
    whatever the cache holds. `config` overrides other fields of LlamaConfig.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | config
    return build_random(LlamaForCausalLM, LlamaConfig(**fields), seed)


def build_chain(walk: Sequence[int], eos_token_id: int | list[int] | None = None) -> PreTrainedModel:
    """CHAIN: a one-layer Llama on SmolLM2's vocabulary that answers walk[i] with walk[i + 1].

    The next token depends on the current one alone, with a gap of about 50, so any text can be dictated. A walk
    may end where it began (it then goes round); otherwise a token that comes twice is a ValueError.
    """
    if len(set(walk[:-1])) != len(walk) - 1:
        raise ValueError(f"A token of the walk {list(walk)} would need two successors.")
    fields: dict[str, Any] = {"num_hidden_layers": 1, "initializer_range": 0.02, "eos_token_id": eos_token_id}
    model = build_tiny(SMOL_VOCAB, 4096, **fields)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding = torch.randn(SMOL_VOCAB, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        embedding = 8 * torch.nn.functional.normalize(embedding, dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        for current, following in itertools.pairwise(walk):
            model.lm_head.weight[following] += embedding[current]
    return model


def build_random(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of any architecture with reproducible random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
    model.requires_grad_(False)
    return model


def save(model: PreTrainedModel, folder: Path, tokenizer: Path) -> Path:
    """Writes `model` into `folder` with the tokenizer files of the folder `tokenizer`; returns `folder`."""
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
    return folder


@dataclass(frozen=True)
class Reference:
    """What plain transformers generates: the new tokens, and for each how far the runner-up's logit was behind."""

    token_ids: list[int]
    gaps: list[float]


_references: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], Reference]] = WeakKeyDictionary()


def reference(model: PreTrainedModel, prompt: Sequence[int], n: int) -> Reference:
    """REF: greedy `generate` of exactly `n` tokens for one prompt, a batch of one, EOS ignored.

    Kept per model and prompt; the longest one answers for all shorter ones. A model whose weights a test changes
    must be another object than the one asked about before.
    """
    known = _references.setdefault(model, {})
    key = tuple(prompt)
    found = known.get(key)
    if found is None or len(found.token_ids) < n:
        found = known[key] = _generate(model, prompt, n)
    return Reference(found.token_ids[:n], found.gaps[:n])


def ref(model: PreTrainedModel, prompt: Sequence[int], n: int) -> list[int]:
    """The new token ids of `reference`."""
    return reference(model, prompt, n).token_ids


def _generate(model: PreTrainedModel, prompt: Sequence[int], n: int) -> Reference:
    input_ids = torch.tensor([list(prompt)], device=model.device)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=n,
        eos_token_id=model.config.vocab_size,  # an id no token has; None would mean the model's own
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        out = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings)
    best_two = torch.stack([logits[0].float().topk(2).values for logits in out.logits])
    return Reference(out.sequences[0, len(prompt) :].tolist(), (best_two[:, 0] - best_two[:, 1]).tolist())
