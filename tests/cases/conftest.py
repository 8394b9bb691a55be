"""What the cases of the cache and the scheduler are repeated with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from tests.harness import Stepper
from tests.models import build_random

VARIANTS: dict[str, dict[str, Any]] = {
    "fifo": {},
    "prefill first": {"scheduler_type": "prefill_first"},
    "two steps in flight": {"overlap": True},
    "host memory": {"cpu_offload_space": 0.01},
    "no sharing": {"allow_block_sharing": False},
    "plain sdpa": {"auto_switch_to_flash": False},
    "all": {"scheduler_type": "prefill_first", "overlap": True, "cpu_offload_space": 0.01},
}


@dataclass(frozen=True)
class Variant:
    """A model and how its engine is set up."""

    model: PreTrainedModel
    fields: dict[str, Any] = field(default_factory=dict)

    def stepper(self, **fields: Any) -> Stepper:
        return Stepper(self.model, **self.fields | fields)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, tiny: PreTrainedModel) -> Variant:
    """TINY in every variant."""
    return Variant(tiny, VARIANTS[request.param])


@pytest.fixture(params=[*VARIANTS, "windows", "windows and all"])
def any_variant(request: pytest.FixtureRequest, tiny: PreTrainedModel, tiny_sw: PreTrainedModel) -> Variant:
    """TINY in every variant, and TINY-SW."""
    if "windows" in request.param:
        return Variant(tiny_sw, VARIANTS["all" if "all" in request.param else "fifo"])
    return Variant(tiny, VARIANTS[request.param])


@pytest.fixture(scope="session")
def tiny_sw(tiny: PreTrainedModel) -> PreTrainedModel:
    """TINY-SW: TINY's sizes in a Mistral whose layers see 16 tokens."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "tie_word_embeddings")
    sizes = {name: getattr(tiny.config, name) for name in names}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return build_random(MistralForCausalLM, MistralConfig(**sizes, **ids, sliding_window=16))
