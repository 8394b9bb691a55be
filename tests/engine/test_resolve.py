"""Merging of generation configs as generate() does it, and the parameters of one request."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.sampling import resolve
from engine.sampling.params import SamplingParams
from engine.sampling.resolve import make_params, merge_generation_config


def model_with(**settings: Any) -> Any:
    return SimpleNamespace(generation_config=GenerationConfig(**settings))


def merged(own: dict[str, Any] | None = None, **settings: Any) -> GenerationConfig:
    return merge_generation_config(model_with(**(own or {})), GenerationConfig(**settings))


def params(
    config: GenerationConfig | None = None,
    *,
    processors: bool = True,
    prompt: int = 10,
    room: int = 90,
    **per_request: Any,
) -> SamplingParams:
    return make_params(
        merged() if config is None else config,
        per_request=per_request,
        per_request_processors=processors,
        num_prompt_tokens=prompt,
        context_room=room,
        vocab_size=100,
        default_seed=77,
    )


class TestMerge:
    @pytest.mark.parametrize(
        ("own", "given"),
        [
            ({}, None),
            ({}, {}),
            ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}, None),
            ({"do_sample": True, "temperature": 0.6, "eos_token_id": [1, 2]}, {"temperature": 0.2, "top_k": 0}),
            ({"temperature": 0.6, "do_sample": True}, {"do_sample": False, "eos_token_id": 5, "min_p": 0.1}),
            ({"max_new_tokens": 7, "min_length": 3}, {"max_length": 40, "min_new_tokens": 2}),
        ],
    )
    def test_like_generate(self, tiny: PreTrainedModel, own: dict[str, Any], given: dict[str, Any] | None) -> None:
        model = copy.copy(tiny)
        model.generation_config = GenerationConfig(**own)
        config = None if given is None else GenerationConfig(**given)
        theirs, _ = model._prepare_generation_config(config)
        ours = merge_generation_config(model, config)
        for name in resolve._USED - {"max_length", "min_length"}:
            assert getattr(ours, name) == getattr(theirs, name), name
        asked = [source["max_length"] for source in (given or {}, own) if "max_length" in source]
        assert ours.max_length == (asked[0] if asked else None)  # never the unseen 20

    def test_changes_nobody_elses_object(self) -> None:
        model, config = model_with(eos_token_id=[1, 2], top_k=7, do_sample=True), GenerationConfig(temperature=0.5)
        before = copy.deepcopy(vars(config)), copy.deepcopy(vars(model.generation_config))
        found = merge_generation_config(model, config)
        found.eos_token_id.append(3)
        assert (vars(config), vars(model.generation_config)) == before

    def test_model_without_a_generation_config(self) -> None:
        found: Any = merge_generation_config(SimpleNamespace(), None)  # type: ignore[arg-type]
        assert (found.do_sample, found.top_k, found.max_length) == (False, 50, None)

    def test_every_setting_is_used_without_effect_or_refused(self) -> None:
        for name in resolve._public(GenerationConfig()):
            if name in resolve._USED | resolve._WITHOUT_EFFECT:
                continue
            config = GenerationConfig()
            setattr(config, name, object())
            with pytest.raises(NotImplementedError, match=f"^{name}="):
                merge_generation_config(model_with(), config)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_beams", 4),
            ("repetition_penalty", 1.1),
            ("no_repeat_ngram_size", 2),
            ("bad_words_ids", [[3]]),
            ("sequence_bias", [[[3], 1.0]]),
            ("typical_p", 0.9),
            ("epsilon_cutoff", 0.1),
            ("eta_cutoff", 0.1),
            ("guidance_scale", 2.0),
            ("stop_strings", ["x"]),
            ("max_time", 3.0),
            ("suppress_tokens", [4]),
            ("forced_eos_token_id", 4),
            ("prompt_lookup_num_tokens", 3),
            ("output_logits", True),
        ],
    )
    @pytest.mark.parametrize("where", ["user", "model"])
    def test_unsupported_is_named_with_its_source(self, name: str, value: Any, where: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GenerationConfig(**{name: value})
        model, given = (model_with(), config) if where == "user" else (SimpleNamespace(generation_config=config), None)
        source = "the generation config" if where == "user" else "model.generation_config"
        with pytest.raises(NotImplementedError, match=f"^{name}=.*of {source} is not supported"):
            merge_generation_config(model, given)  # type: ignore[arg-type]

    def test_the_value_that_the_error_names_helps(self) -> None:
        own = {"repetition_penalty": 1.1}
        with pytest.raises(NotImplementedError, match=r"set it to 1\.0 to generate without it"):
            merged(own)
        assert merged(own, repetition_penalty=1.0).repetition_penalty == 1.0

    def test_num_return_sequences(self) -> None:
        assert merged().num_return_sequences == 1
        assert merged(num_return_sequences=2, do_sample=True).num_return_sequences == 2
        with pytest.raises(ValueError, match="num_return_sequences is 0"):
            merged(num_return_sequences=0)

    def test_neutral_values_pass(self) -> None:
        neutral = {name: off[0] for name, off in resolve._OFF.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert merged(neutral, **neutral).num_beams == 1

    def test_a_misspelt_setting_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="'max_new_token'.*did you mean 'max_new_tokens'"):
            merged(max_new_token=5)

    def test_custom_entries_of_the_model_are_left_alone(self) -> None:
        own = {"chat_format": "chatml", "top_k": 3}
        assert not hasattr(merged(own), "chat_format")
        assert merge_generation_config(model_with(**own), GenerationConfig(**own)).top_k == 3

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -1.0),
            ("top_p", 1.5),
            ("top_k", -1),
            ("min_p", 2.0),
            ("eos_token_id", "x"),
            ("max_length", 0),
        ],
    )
    def test_out_of_range(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=name):
            merged(do_sample=True, **{name: value})


class TestLimits:
    def test_no_limit_means_the_context(self) -> None:
        assert params(prompt=10, room=90).max_new_tokens == 90

    @pytest.mark.parametrize(
        ("given", "limit"), [(1, 1), (89, 89), (90, 90), (91, 90), (10**9, 90), (2**63, 90), (np.int64(5), 5)]
    )
    def test_O10_larger_ones_are_capped(self, given: Any, limit: int) -> None:
        found = params(max_new_tokens=given).max_new_tokens
        assert found == limit
        assert type(found) is int
        assert params(merged(max_new_tokens=int(given))).max_new_tokens == limit

    @pytest.mark.parametrize("value", [0, -1, "5", 1.5, 5.0, True, float("nan"), [5]])
    def test_O10_others_are_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"max_new_tokens is .*integer >= 1"):
            params(max_new_tokens=value)

    def test_precedence(self) -> None:
        config = merged(max_new_tokens=8, max_length=30)
        assert params(config, max_new_tokens=5).max_new_tokens == 5
        assert params(config, max_new_tokens=None).max_new_tokens == 8
        assert params(merged(max_length=30)).max_new_tokens == 20
        assert params(merged({"max_length": 30})).max_new_tokens == 20
        assert params(merged(max_length=30), max_new_tokens=50).max_new_tokens == 50
        assert params(merged(max_length=1000)).max_new_tokens == 90

    def test_prompt_beyond_max_length(self) -> None:
        with pytest.raises(ValueError, match=r"max_length is 10 .* 10 tokens: shorten it by 1"):
            params(merged(max_length=10))
        assert params(merged(max_length=11)).max_new_tokens == 1

    def test_O09_prompt_that_fills_the_context(self) -> None:
        assert params(prompt=255, room=1, max_new_tokens=100).max_new_tokens == 1
        with pytest.raises(ValueError, match=r"256 tokens and the context holds 256.*shorten it by 1"):
            params(prompt=256, room=0)
        with pytest.raises(ValueError, match=r"5000 tokens and the context holds 256.*shorten it by 4745"):
            params(prompt=5000, room=-4744)

    def test_min_new_tokens(self) -> None:
        assert params(min_new_tokens=4).min_new_tokens == 4
        assert params(merged(min_new_tokens=4)).min_new_tokens == 4
        assert params(merged(min_new_tokens=4), min_new_tokens=0).min_new_tokens == 0
        assert params(min_new_tokens=10**12).min_new_tokens == 90
        with pytest.raises(ValueError, match="min_new_tokens is 6 and max_new_tokens 5"):
            params(min_new_tokens=6, max_new_tokens=5)
        for value in (-1, 1.0, True):
            with pytest.raises(ValueError, match="min_new_tokens"):
                params(min_new_tokens=value)

    def test_min_length_includes_the_prompt(self) -> None:
        assert params(merged(min_length=14)).min_new_tokens == 4
        assert params(merged(min_length=4)).min_new_tokens == 0
        assert params(merged(min_length=14, min_new_tokens=1)).min_new_tokens == 1


class TestSampling:
    def test_defaults(self) -> None:
        assert params() == SamplingParams(max_new_tokens=90, top_k=50, seed=77)

    def test_from_the_generation_config(self) -> None:
        config = merged(do_sample=True, temperature=0.5, top_k=0, top_p=0.8, min_p=0.1)
        assert params(config, processors=False) == SamplingParams(
            max_new_tokens=90, do_sample=True, temperature=0.5, top_k=0, top_p=0.8, min_p=0.1, seed=77
        )

    def test_own_values_come_first_and_turn_sampling_on(self) -> None:
        found = params(merged(temperature=0.5, do_sample=False), top_p=0.8)
        assert (found.do_sample, found.temperature, found.top_p) == (True, 0.5, 0.8)
        for given in ({"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}):
            assert params(**given).do_sample
            assert not params(**given, do_sample=False).do_sample
        assert not params(merged(do_sample=True), do_sample=False).do_sample
        assert not params(seed=3).do_sample

    @pytest.mark.parametrize("others", [{}, {"top_p": 0.1}, {"top_k": 3}, {"seed": 5}, {"do_sample": True}])
    def test_O11_temperature_0_is_greedy(self, others: dict[str, Any]) -> None:
        config = merged({"do_sample": True, "temperature": 0.7})
        for zero in (0, 0.0, -0.0, np.float32(0)):
            found = params(config, temperature=zero, **others)
            assert (found.do_sample, found.temperature) == (False, 1.0)
        assert not params(merged({"do_sample": True, "temperature": 0.0})).do_sample

    @pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1, 2, np.float32(0.5)])
    def test_temperatures(self, temperature: Any) -> None:
        found = params(temperature=temperature)
        assert found.do_sample
        assert found.temperature == float(temperature)
        assert type(found.temperature) is float

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("do_sample", [1, "yes"]),
            ("temperature", [-0.1, float("nan"), float("inf"), "1", True, [1.0]]),
            ("top_k", [-1, 1.5, "3", True]),
            ("top_p", [0, -0.1, 1.01, float("nan"), "0.9", True]),
            ("min_p", [-0.1, 1.01, float("nan"), True]),
            ("seed", [1.5, "7", True]),
            ("logprobs", [1, 5, "yes"]),
            ("eos_token_id", [1.5, "2", [1, "2"], [[1]], True, 100, [3, 10**9]]),
            ("stop_token_ids", [1.5, "2", [1.0], [-1], 100, True]),
        ],
    )
    def test_out_of_range(self, name: str, values: list[Any]) -> None:
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} "):
                params(**{name: value})

    def test_flag(self) -> None:
        values: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5}
        assert values.keys() == set(resolve._SAMPLING)
        for name, value in values.items():
            with pytest.raises(ValueError, match=f"^{name}=.*per_request_processors=True"):
                params(processors=False, **{name: value})
            assert getattr(params(processors=True, **{name: value}), name) == value
            assert params(processors=False, **{name: None}) == params()
        always: dict[str, Any] = {
            "max_new_tokens": 3, "min_new_tokens": 2, "eos_token_id": 4, "stop_token_ids": [5], "seed": 6,
            "logprobs": True,
        }  # fmt: skip
        assert params(processors=False, **always) == SamplingParams(
            max_new_tokens=3, min_new_tokens=2, eos_token_ids=(4,), stop_token_ids=(5,), seed=6, logprobs=True, top_k=50
        )

    def test_unknown_argument(self) -> None:
        with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
            params(temprature=0.5)
        with pytest.raises(TypeError, match="'max_length'"):
            params(max_length=0.5)
        with pytest.raises(TypeError, match="'zzz'; it takes max_new_tokens"):
            params(zzz=None)

    def test_seeds(self) -> None:
        assert [params(seed=s).seed for s in (0, 7, -1, 2**64, 2**200 + 3)] == [0, 7, 2**64 - 1, 0, 3]
        assert params(seed=None).seed == 77

    def test_logprobs(self) -> None:
        assert [params(logprobs=x).logprobs for x in (True, False)] == [True, False]
        assert (
            make_params(
                merged(),
                per_request={"logprobs": False},
                per_request_processors=False,
                num_prompt_tokens=1,
                context_room=5,
                vocab_size=9,
                default_seed=0,
                logprobs=True,
            ).logprobs
            is False
        )


class TestEndings:
    @pytest.mark.parametrize("eos", [2, [2], (2,), torch.tensor(2), torch.tensor([2]), np.int64(2), [2, 2], [-1, 2]])
    def test_O07_forms(self, eos: Any) -> None:
        assert params(eos_token_id=eos).eos_token_ids == (2,)
        assert params(merged(eos_token_id=eos)).eos_token_ids == (2,)

    def test_O07_list_and_off(self) -> None:
        config = merged({"eos_token_id": [0, 2]})
        assert params(config).ending_ids == (0, 2)
        assert params(config, eos_token_id=None).ending_ids == (0, 2)
        assert params(config, eos_token_id=[0]).ending_ids == (0,)
        for off in (-1, [-1], []):
            assert params(config, eos_token_id=off).ending_ids == ()
        assert params(merged({"eos_token_id": 2}, eos_token_id=-1)).ending_ids == ()
        assert params().ending_ids == ()

    def test_stop_token_ids_come_on_top(self) -> None:
        config = merged({"eos_token_id": 2})
        assert params(config, stop_token_ids=[9, 8, 9]).ending_ids == (2, 9, 8)
        assert params(config, stop_token_ids=9, eos_token_id=-1).ending_ids == (9,)
