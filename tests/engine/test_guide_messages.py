"""Every warning and error that the guide promises, with what its text must name.

One row each, in the order of the guide. Not here: that a `device_map` beside a `distributed_config` is an error, since
transformers raises it when the model is loaded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig, MistralConfig, MistralForCausalLM, PreTrainedModel

import engine
from engine import ContinuousBatchingConfig, ContinuousBatchingManager
from tests.conftest import wait_limit
from tests.harness import NO_EOS, collect, config, tokens
from tests.models import build_random, build_tiny

LOGGED, FAILED_OUTPUT = "logged warning", "failed output"


@dataclass
class Promise:
    """What the guide says happens.

    Attributes:
        section: of the guide.
        trigger: does what causes the message; gives the error text where `kind` is `FAILED_OUTPUT`.
        kind: an exception, a warning class, or one of the two words above.
        names: what the text must hold.
        missing: the part that is still to come, without which the promise is not kept.
    """

    section: str
    trigger: Callable[[PreTrainedModel], Any]
    kind: Any
    names: tuple[str, ...]
    missing: str = ""


def stopped(model: PreTrainedModel) -> ContinuousBatchingManager:
    manager = engine.init_continuous_batching(model, NO_EOS, config())
    manager.start()
    manager.stop()
    return manager


def stop_hard(model: PreTrainedModel) -> list[str | None]:
    """One request that runs and one that is queued."""
    manager = engine.init_continuous_batching(model, NO_EOS, config(max_requests_per_batch=1))
    manager.start()
    manager.add_request(tokens(0, 8), "active", max_new_tokens=240, streaming=True)
    next(manager.request_id_iter("active"))
    manager.add_request(tokens(1, 8), "queued", max_new_tokens=240)
    manager.stop(hard_stop=True, timeout=wait_limit(20))
    outputs = collect(manager, ["active", "queued"])
    manager.destroy()
    return [output.error for output in outputs]


def start_destroyed(model: PreTrainedModel) -> None:
    manager = stopped(model)
    manager.destroy()
    manager.start()


def carry_config(model: PreTrainedModel) -> None:
    carrying = GenerationConfig(max_new_tokens=2)
    carrying.continuous_batching_config = config()
    engine.generate_batch(model, [[1, 2, 3]], carrying)


def resolve(**fields: Any) -> Callable[[PreTrainedModel], Any]:
    """Making a manager with these settings."""
    return lambda model: engine.init_continuous_batching(model, NO_EOS, config(**fields))


def with_sliding_layers(model: PreTrainedModel) -> Any:
    shape = LlamaConfig(**model.config.to_dict())
    fields = {name: getattr(shape, name) for name in ("vocab_size", "hidden_size", "num_key_value_heads")}
    sliding = MistralConfig(
        **fields, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, sliding_window=16
    )
    return resolve(max_blocks_per_request=8)(build_random(MistralForCausalLM, sliding))


def share_two_kv_heads_among_three(model: PreTrainedModel) -> Any:
    sharded = build_tiny()
    sharded._device_mesh = SimpleNamespace(size=lambda: 3, mesh_dim_names=None)  # type: ignore[assignment]
    return resolve()(sharded)


def submit_with_temperature(model: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(model, NO_EOS, config())
    manager.add_request([1, 2, 3], temperature=0.9)


PROMISES = [
    Promise("stop", lambda model: stopped(model).add_request([1, 2]), LOGGED, ("refused", "start()")),
    Promise("stop", lambda model: stopped(model).add_requests([[1, 2]]), LOGGED, ("refused", "start()")),
    Promise("stop(hard_stop=True)", stop_hard, FAILED_OUTPUT, ("RuntimeError", "stopped")),
    Promise("destroy", start_destroyed, RuntimeError, ("destroyed",)),
    Promise(
        "sampling per request", submit_with_temperature, ValueError, ("temperature", "per_request_processors=True")
    ),
    Promise("ContinuousBatchingConfig", carry_config, FutureWarning, ("continuous_batching_config", "argument")),
    Promise("scheduler", resolve(scheduler_type="lifo"), ValueError, ("'lifo'", "'fifo'", "'prefill_first'")),
    Promise("page size", resolve(page_size=3), ValueError, ("page_size is 3", "4")),
    Promise(
        "page size", lambda model: ContinuousBatchingConfig(block_size=16), FutureWarning, ("block_size", "page_size")
    ),
    Promise("safety margin", resolve(safety_margin=1.5), ValueError, ("safety_margin is 1.5", "0", "1")),
    Promise("safety margin", resolve(safety_margin=-0.1), ValueError, ("safety_margin is -0.1",)),
    Promise(
        "async batching", resolve(use_async_batching=True), LOGGED, ("use_async_batching", "CUDA graphs"), "settings"
    ),
    Promise("CUDA graphs", resolve(use_cuda_graph=True), LOGGED, ("CUDA graphs", "cpu"), "settings"),
    Promise("compilation", resolve(default_compile_level=4), ValueError, ("default_compile_level is 4", "0", "3")),
    Promise("decode fast path", resolve(max_blocks_per_request=64), LOGGED, ("max_blocks_per_request",), "settings"),
    Promise(
        "decode fast path", with_sliding_layers, LOGGED, ("decode fast path", "sliding"), "settings and sliding windows"
    ),
    Promise(
        "CPU offloading", resolve(cpu_offload_space=1e6), LOGGED, ("cpu_offload_space_safety_threshold",), "settings"
    ),
    Promise(
        "tensor parallelism", share_two_kv_heads_among_three, ValueError, ("2 KV heads", "3"), "tensor parallelism"
    ),
]


def parameter(promise: Promise, index: int) -> Any:
    marks = [pytest.mark.xfail(reason=promise.missing, strict=True)] if promise.missing else []
    return pytest.param(promise, id=f"{index}-{promise.section}", marks=marks)


@pytest.mark.parametrize("promise", [parameter(promise, index) for index, promise in enumerate(PROMISES)])
def test_the_guides_warnings_and_errors(
    tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture, promise: Promise
) -> None:
    texts: list[str | None]
    if promise.kind is FAILED_OUTPUT:
        texts = promise.trigger(tiny)
    elif promise.kind is LOGGED:
        with caplog.at_level(logging.WARNING, "engine"):
            promise.trigger(tiny)
        texts = [" ".join(record.message for record in caplog.records if record.levelno == logging.WARNING)]
    elif issubclass(promise.kind, Warning):
        with pytest.warns(promise.kind) as caught:
            promise.trigger(tiny)
        assert len(caught) == 1
        texts = [str(caught[0].message)]
    else:
        with pytest.raises(promise.kind) as raised:
            promise.trigger(tiny)
        texts = [str(raised.value)]
    for text in texts:
        assert text is not None
        assert [name for name in promise.names if name not in text] == [], text


def test_what_the_guide_does_not_warn_of_is_silent(tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "engine"):
        warnings.simplefilter("error")
        outputs = engine.generate_batch(
            tiny, [[1, 2, 3]], NO_EOS, continuous_batching_config=config(), max_new_tokens=2
        )
    assert outputs["req_0"].error is None and not caplog.records
