"""`install()`: the spelling of transformers, with its config class and its status values, runs on this engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import RequestStatus as TheirStatus

import engine
from engine import ContinuousBatchingManager, RequestStatus
from tests.harness import NO_EOS, tokens
from tests.models import build_tiny, ref


@pytest.fixture
def installed() -> Iterator[PreTrainedModel]:
    engine.install()
    engine.install()
    yield build_tiny()
    engine.uninstall()
    engine.uninstall()


def theirs(**fields: object) -> transformers.ContinuousBatchingConfig:
    return transformers.ContinuousBatchingConfig(num_blocks=64, **fields)  # type: ignore[arg-type]


def test_generate_batch(installed: PreTrainedModel) -> None:
    prompts = [tokens(i, 7 + i) for i in range(3)]
    outputs = installed.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1),
        continuous_batching_config=theirs(page_size=16),
    )
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert isinstance(output, engine.GenerationOutput)
        assert output.status == TheirStatus.FINISHED
        assert output.generated_tokens == ref(installed, prompt, 12)


def test_context_manager_and_streaming(installed: PreTrainedModel) -> None:
    with installed.continuous_batching_context_manager(
        generation_config=NO_EOS, continuous_batching_config=theirs()
    ) as manager:
        assert isinstance(manager, ContinuousBatchingManager)
        manager.add_request(input_ids=tokens(0, 9), request_id="streamed", max_new_tokens=8, streaming=True)
        streamed = []
        for chunk in manager.request_id_iter(request_id="streamed"):
            streamed += chunk.generated_tokens[-1:]
            if chunk.status == TheirStatus.FINISHED:
                break
        assert streamed == ref(installed, tokens(0, 9), 8)


def test_init_continuous_batching(installed: PreTrainedModel) -> None:
    manager = installed.init_continuous_batching(generation_config=NO_EOS, continuous_batching_config=theirs())
    manager.start()
    request_id = manager.add_request(tokens(1, 5), max_new_tokens=4)
    result = manager.get_result(request_id)
    assert result is not None and result.generated_tokens == ref(installed, tokens(1, 5), 4)
    manager.destroy()


def test_their_settings_without_a_mechanism_are_refused_by_name(installed: PreTrainedModel) -> None:
    for field in ("varlen_compile_config", "decode_compile_config"):
        config = theirs(**{field: transformers.CompileConfig(fullgraph=True)})
        with pytest.raises(NotImplementedError, match=field):
            installed.generate_batch([[1]], continuous_batching_config=config)


def test_uninstall_gives_their_methods_back() -> None:
    before = {
        name: getattr(transformers.GenerationMixin, name) for name in ("generate_batch", "init_continuous_batching")
    }
    engine.install()
    assert transformers.GenerationMixin.generate_batch is engine.generate_batch
    engine.uninstall()
    for name, method in before.items():
        assert getattr(transformers.GenerationMixin, name) is method


def test_status_values_equal_theirs() -> None:
    for status in TheirStatus:
        assert RequestStatus[status.name] == status
    assert RequestStatus.CANCELLED not in list(TheirStatus)
