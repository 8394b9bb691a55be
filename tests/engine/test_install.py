"""`install()`: the spelling of transformers, with its config class and its status values, runs on this engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
    if "page_size" in fields and not hasattr(transformers.ContinuousBatchingConfig, "page_size"):
        fields["block_size"] = fields.pop("page_size")  # as earlier versions call it
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


def test_their_settings_reach_the_engine(installed: PreTrainedModel) -> None:
    manager = installed.init_continuous_batching(
        generation_config=NO_EOS,
        continuous_batching_config=theirs(page_size=16, max_requests_per_batch=3, max_queue_size=5, seed=7),
    )
    settings = manager.settings
    assert (settings.page_size, settings.num_blocks, settings.max_requests) == (16, 64, 3)
    assert (settings.max_queue_size, settings.seed) == (5, 7)


def test_their_config_inside_the_generation_config(installed: PreTrainedModel) -> None:
    with pytest.warns(FutureWarning):
        carrying = GenerationConfig(
            max_new_tokens=4, do_sample=False, eos_token_id=-1, continuous_batching_config=theirs(page_size=8)
        )
    with pytest.warns(FutureWarning, match="pass it as the argument") as caught:
        outputs = installed.generate_batch([tokens(0, 9)], generation_config=carrying)
    assert len(caught) == 1
    assert outputs["req_0"].generated_tokens == ref(installed, tokens(0, 9), 4)


def test_the_life_of_a_persistent_manager(installed: PreTrainedModel) -> None:
    arguments = {"generation_config": NO_EOS, "continuous_batching_config": theirs()}
    with installed.continuous_batching_context_manager(persistent_manager=True, **arguments) as manager:
        pass
    assert installed.init_continuous_batching() is manager
    installed.destroy_cached_continuous_batching_manager()
    assert installed.init_continuous_batching(**arguments) is not manager
    installed.destroy_cached_continuous_batching_manager()


def test_generate_batch_of_several_sequences(installed: PreTrainedModel) -> None:
    outputs = installed.generate_batch(
        inputs=[tokens(0, 9)],
        generation_config=GenerationConfig(do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=2),
        continuous_batching_config=theirs(),
        max_new_tokens=3,
    )
    assert list(outputs) == ["req_0", "req_0__child#0"]


def test_uninstall_gives_their_methods_back() -> None:
    mixin = transformers.GenerationMixin
    names = (
        "generate_batch",
        "init_continuous_batching",
        "continuous_batching_context_manager",
        "destroy_cached_continuous_batching_manager",
        "generate",
    )
    before = {name: getattr(mixin, name) for name in names}
    engine.install()
    assert mixin.generate_batch is engine.generate_batch
    assert all(getattr(mixin, name) is not before[name] for name in names)
    engine.uninstall()
    for name, method in before.items():
        assert getattr(mixin, name) is method


def test_status_values_equal_theirs() -> None:
    for status in TheirStatus:
        assert RequestStatus[status.name] == status
    assert RequestStatus.CANCELLED not in list(TheirStatus)


class TestPagedGenerate:
    """`model.generate(..., cache_implementation="paged")` against plain `generate` of the same call."""

    def both(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The tokens of the paged call, once they are those of the plain one."""
        plain = model.generate(*args, **kwargs)
        paged = model.generate(*args, cache_implementation="paged", **kwargs)
        assert paged.dtype == plain.dtype and paged.tolist() == plain.tolist()
        return paged

    @pytest.fixture
    def rows(self) -> torch.Tensor:
        return torch.tensor([tokens(i, 10) for i in range(3)])

    def padded(self, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts of these lengths, padded on the left with 0, and their mask."""
        width = max(lengths)
        prompts = [[token or 1 for token in tokens(i, length)] for i, length in enumerate(lengths)]
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - length) + [1] * length for length in lengths]
        return torch.tensor(rows), torch.tensor(mask)

    def test_a_batch(self, installed: PreTrainedModel, rows: torch.Tensor) -> None:
        assert self.both(installed, rows, max_new_tokens=6, do_sample=False).shape == (3, 16)
        self.both(installed, input_ids=rows, max_length=14)
        self.both(installed, rows)  # the default number of new tokens
        self.both(installed, rows, GenerationConfig(max_new_tokens=3))
        self.both(installed, rows, GenerationConfig(max_new_tokens=3), max_new_tokens=5)

    def test_padding_by_the_mask(self, installed: PreTrainedModel) -> None:
        rows, mask = self.padded(4, 9, 6)
        self.both(installed, rows, attention_mask=mask, max_new_tokens=8, pad_token_id=0)
        self.both(installed, rows, attention_mask=mask, max_length=20, pad_token_id=0)

    def test_padding_by_the_pad_token(self, installed: PreTrainedModel) -> None:
        rows, _ = self.padded(4, 9, 6)
        self.both(installed, rows, max_new_tokens=8, pad_token_id=0)

    @pytest.mark.parametrize("pad", [0, None])
    def test_rows_that_end_early_are_filled_up(
        self, installed: PreTrainedModel, rows: torch.Tensor, pad: int | None
    ) -> None:
        eos = [ref(installed, row, 8)[i + 1] for i, row in enumerate(rows.tolist())]
        arguments = {} if pad is None else {"pad_token_id": pad}
        found = self.both(
            installed, rows, attention_mask=torch.ones_like(rows), max_new_tokens=8, eos_token_id=eos, **arguments
        )
        assert found.shape[1] < 18
        assert found[0, -1] == (eos[0] if pad is None else pad)

    def test_a_single_row(self, installed: PreTrainedModel, rows: torch.Tensor) -> None:
        found = installed.generate(rows[0], cache_implementation="paged", max_new_tokens=4)
        assert found.tolist() == [rows[0].tolist() + ref(installed, rows[0].tolist(), 4)]

    def test_several_sequences_a_row(self, installed: PreTrainedModel, rows: torch.Tensor) -> None:
        self.both(installed, rows, max_new_tokens=4, do_sample=True, top_k=1, num_return_sequences=2)

    def test_the_config_may_ask_for_it(self, installed: PreTrainedModel, rows: torch.Tensor) -> None:
        config = GenerationConfig(max_new_tokens=3, cache_implementation="paged")
        assert installed.generate(rows, generation_config=config).tolist() == [
            row + ref(installed, row, 3) for row in rows.tolist()
        ]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("stopping_criteria", [lambda *args: False]),
            ("logits_processor", [lambda ids, scores: scores]),
            ("prefix_allowed_tokens_fn", lambda *args: [1]),
            ("assistant_model", "draft"),
            ("streamer", object()),
            ("negative_prompt_ids", torch.ones(1, 2)),
            ("negative_prompt_attention_mask", torch.ones(1, 2)),
            ("custom_generate", lambda *args: None),
            ("synced_gpus", True),
            ("position_ids", torch.arange(10)[None]),
            ("inputs_embeds", torch.zeros(1, 2, 64)),
            ("num_beams", 2),
            ("return_dict_in_generate", True),
            ("output_scores", True),
            ("stop_strings", ["x"]),
            ("tokenizer", object()),
        ],
    )
    def test_what_it_cannot_do_is_refused_by_name(
        self, installed: PreTrainedModel, rows: torch.Tensor, name: str, value: object
    ) -> None:
        with pytest.raises(NotImplementedError, match=name):
            installed.generate(rows, cache_implementation="paged", max_new_tokens=2, **{name: value})

    def test_wrong_arguments(self, installed: PreTrainedModel, rows: torch.Tensor) -> None:
        def paged(*args: Any, **kwargs: Any) -> None:
            installed.generate(*args, cache_implementation="paged", **kwargs)

        with pytest.raises(TypeError, match="max_new_token"):
            paged(rows, max_new_token=3)
        for bad in (None, rows[None], rows.float(), [[1, 2]]):
            with pytest.raises(ValueError, match="1-D or 2-D tensor"):
                paged(bad)
        for mask in (torch.ones(3, 9), torch.ones(2, 10), [[1]]):
            with pytest.raises(ValueError, match="attention_mask"):
                paged(rows, attention_mask=mask)
        with pytest.raises(ValueError, match="max_length is 10"):
            paged(rows, max_length=10)
        empty = torch.ones_like(rows)
        empty[1] = 0
        with pytest.raises(ValueError, match="row 1.*empty"):
            paged(rows, attention_mask=empty)
