"""Merging of generation configs as generate() does it, and the parameters of one request."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.sampling.arguments import EDITS, FREE_ARGUMENTS, WARPERS
from engine.sampling.params import SamplingParams, sibling_params
from engine.sampling.random import derive_seed
from engine.sampling.resolve import make_params, merge_generation_config, num_return_sequences
from engine.sampling.support import OFF, USED


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


class Anything:
    def allowed(self, output_ids: Sequence[int]) -> None:
        return None


ANYTHING = Anything()
# Arguments that edit logits, with a value and its form in SamplingParams.
OWN: list[tuple[str, Any, Any]] = [
    ("sequence_bias", [[[1, 2], -1], [[3], 2.5]], (((1, 2), -1.0), ((3,), 2.5))),
    ("repetition_penalty", np.float32(1.5), 1.5),
    ("no_repeat_ngram_size", 3, 3),
    ("bad_words_ids", [[1], [2, 3]], ((1,), (2, 3))),
    ("forced_bos_token_id", 4, 4),
    ("forced_eos_token_id", [4, 5], (4, 5)),
    ("suppress_tokens", [1, 2, 2], (1, 2)),
    ("begin_suppress_tokens", torch.tensor([7]), (7,)),
    ("frequency_penalty", 2, 2.0),
    ("presence_penalty", -2.0, -2.0),
    ("logit_bias", {5: 100, np.int64(6): -100.0}, ((5, 100.0), (6, -100.0))),
    ("allowed_token_ids", (8, 9), (8, 9)),
    ("constraint", ANYTHING, ANYTHING),
]
# What turns each off for one request; None where nothing does.
OFF_VALUES: dict[str, Any] = {
    "sequence_bias": [], "repetition_penalty": 1, "no_repeat_ngram_size": 0, "bad_words_ids": [],
    "forced_bos_token_id": None, "forced_eos_token_id": [], "suppress_tokens": [], "begin_suppress_tokens": [],
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "allowed_token_ids": None,
}  # fmt: skip


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
        off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1}
        for name in USED - {"max_length", "min_length"}:
            found = getattr(ours, name)
            assert (off.get(name) if found is None else found) == getattr(theirs, name), name
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

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_beams", 4),
            ("typical_p", 0.9),
            ("encoder_repetition_penalty", 1.1),
            ("encoder_no_repeat_ngram_size", 2),
            ("penalty_alpha", 0.5),
            ("exponential_decay_length_penalty", (3, 1.1)),
            ("epsilon_cutoff", 0.1),
            ("eta_cutoff", 0.1),
            ("guidance_scale", 2.0),
            ("stop_strings", ["x"]),
            ("max_time", 3.0),
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
        own = {"guidance_scale": 1.1}
        with pytest.raises(NotImplementedError, match=r"set it to 1\.0 to generate without it"):
            merged(own)
        assert merged(own, guidance_scale=1.0).guidance_scale == 1.0

    def test_what_to_do_instead_is_said(self) -> None:
        with pytest.raises(NotImplementedError, match=r"stop_strings=.*no tokenizer; use stop_token_ids"):
            merged(stop_strings=["x"])
        with pytest.raises(TypeError, match=r"'stop_strings': the engine has no tokenizer; use stop_token_ids"):
            params(stop_strings=["x"])
        with pytest.raises(TypeError, match=r"'num_beams': .*num_return_sequences"):
            params(num_beams=4)

    def test_dropping_what_is_not_supported(self, caplog: pytest.LogCaptureFixture) -> None:
        model = model_with(typical_p=0.5, do_sample=True)
        config = GenerationConfig(num_beams=4, max_time=3.0, temperature=0.5, use_cache=False)
        found = merge_generation_config(model, config, drop_unsupported=True)
        assert (found.typical_p, found.num_beams, found.max_time) == (None, None, None)
        assert (found.temperature, found.do_sample, found.use_cache) == (0.5, True, False)
        (warning,) = caplog.records
        for part in ("typical_p=0.5", "num_beams=4", "max_time=3.0"):
            assert part in warning.getMessage()
        assert config.num_beams == 4
        caplog.clear()
        merge_generation_config(model_with(), GenerationConfig(temperature=0.5), drop_unsupported=True)
        assert not caplog.records
        with pytest.raises(ValueError, match="temperature"):
            merge_generation_config(model_with(), GenerationConfig(temperature=-1.0), drop_unsupported=True)

    def test_settings_beside_those_of_transformers(self) -> None:
        found = params(
            merged(
                frequency_penalty=0.5, presence_penalty=1, logit_bias={3: 2}, allowed_token_ids=[3, 4], stop_token_ids=9
            ),
            processors=False,
        )
        assert (found.frequency_penalty, found.presence_penalty, found.logit_bias) == (0.5, 1.0, ((3, 2.0),))
        assert (found.allowed_token_ids, found.stop_token_ids) == ((3, 4), (9,))

    def test_token_ids_beyond_the_vocabulary_are_seen_at_once(self, tiny: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match=r"^bad_words_ids holds 512; the model's token ids go from 0 to 511"):
            merge_generation_config(tiny, GenerationConfig(bad_words_ids=[[3, 512]]))
        assert merge_generation_config(tiny, GenerationConfig(eos_token_id=512)).eos_token_id == 512

    def test_num_return_sequences(self) -> None:
        assert merged().num_return_sequences == 1
        assert merged(num_return_sequences=2, do_sample=True).num_return_sequences == 2
        with pytest.raises(ValueError, match="num_return_sequences is 0"):
            merged(num_return_sequences=0)

    def test_neutral_values_pass(self) -> None:
        neutral = {name: off[0] for name, off in OFF.items()}
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
            ("repetition_penalty", 0.0),
            ("no_repeat_ngram_size", -1),
            ("bad_words_ids", [3]),
            ("sequence_bias", [[[3], "x"]]),
            ("suppress_tokens", [-4]),
            ("num_return_sequences", 0),
            ("frequency_penalty", math.nan),
        ],
    )
    def test_out_of_range(self, name: str, value: Any) -> None:
        config = GenerationConfig(do_sample=True)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            merge_generation_config(model_with(), config)


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
        assert params(merged(min_new_tokens=1), min_length=14).min_new_tokens == 4
        assert params(min_length=14, min_new_tokens=1).min_new_tokens == 1
        assert params(min_length=10**9).min_new_tokens == 90


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
            ("top_logprobs", [-1, 21, True, 1.0, "3"]),
            ("prompt_logprobs", [-1, 21, True, "3"]),
            ("raw_logprobs", [1]),
            ("ignore_eos", [1, "yes"]),
            ("num_return_sequences", [0, -1, 1.5, True]),
            ("repetition_penalty", [0, -1, math.inf, math.nan, "1.1", True]),
            ("frequency_penalty", [math.inf, math.nan, "1", True]),
            ("presence_penalty", [-math.inf, [1.0]]),
            (
                "logit_bias",
                [[3], {"3": 1}, {3: "x"}, {3: 101}, {3: -100.5}, {3: 1e9}, {3: math.nan}, {100: 1}, {-1: 5}],
            ),
            ("bad_words_ids", [3, [3], [[]], [["x"]], [[100]], [[-1]], [[True]]]),
            ("sequence_bias", [3, [[3, 1.0]], [[[3], math.nan]], [[[3], math.inf]], [[[100], 1.0]], {(): 1.0}]),
            ("allowed_token_ids", [[], [100], [-1], "x", [1.0]]),
            ("suppress_tokens", [[100], [-1], "x"]),
            ("begin_suppress_tokens", [[100], [-1], "x"]),
            ("no_repeat_ngram_size", [-1, 1.0, True]),
            ("forced_bos_token_id", [[1], -1, 100, True]),
            ("forced_eos_token_id", [-1, [100], "x"]),
            ("constraint", [3, object()]),
            ("eos_token_id", [1.5, "2", [1, "2"], [[1]], True, 100, [3, 10**9]]),
            ("stop_token_ids", [1.5, "2", [1.0], [-1], 100, True]),
        ],
    )
    def test_out_of_range(self, name: str, values: list[Any]) -> None:
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} "):
                params(**{name: value})

    def test_flag(self) -> None:
        values: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5} | {
            name: value for name, value, _ in OWN
        }
        assert values.keys() == WARPERS.keys() | EDITS.keys()
        for name, value in values.items():
            with pytest.raises(ValueError, match=f"^{name}=.*per_request_processors=True"):
                params(processors=False, **{name: value})
            found = params(processors=True, **{name: value})
            assert found != params()
            assert found.do_sample == (name in WARPERS)
            assert params(processors=False, **{name: None}) == params()
        always: dict[str, Any] = {
            "max_new_tokens": 3, "min_new_tokens": 2, "eos_token_id": 4, "stop_token_ids": [5], "seed": 6,
            "top_logprobs": 3, "raw_logprobs": True, "prompt_logprobs": 0, "num_return_sequences": 2,
            "ignore_eos": False,
        }  # fmt: skip
        assert always.keys() | {"logprobs", "min_length"} == FREE_ARGUMENTS.keys()
        assert params(processors=False, **always) == SamplingParams(
            max_new_tokens=3, min_new_tokens=2, eos_token_ids=(4,), stop_token_ids=(5,), seed=6, logprobs=True,
            top_logprobs=3, raw_logprobs=True, prompt_logprobs=0, top_k=50,
        )  # fmt: skip

    @pytest.mark.parametrize(("name", "value", "normal"), OWN)
    def test_own_edits(self, name: str, value: Any, normal: Any) -> None:
        field = "forced_eos_token_ids" if name == "forced_eos_token_id" else name
        assert params(**{name: value}) == dataclasses.replace(params(), **{field: normal})
        assert params(**{name: value}).edits_logits
        assert not params().edits_logits
        if name == "constraint":
            return
        config = merged(**{name: value})
        assert getattr(params(config, processors=False), field) == normal
        off = OFF_VALUES[name]
        if off is not None:
            assert not params(config, **{name: off}).edits_logits

    def test_an_eos_is_no_bad_word(self) -> None:
        bad = [[3], [4], [3, 4]]
        assert params(bad_words_ids=bad, eos_token_id=3).bad_words_ids == ((4,), (3, 4))
        assert params(bad_words_ids=bad, eos_token_id=3, ignore_eos=None).bad_words_ids == ((4,), (3, 4))
        assert params(merged(eos_token_id=3), bad_words_ids=bad, ignore_eos=True).bad_words_ids == ((3,), (4,), (3, 4))

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
        assert [params(top_logprobs=k).logprobs for k in (0, 1, 20)] == [False, True, True]
        assert [params(raw_logprobs=x).logprobs for x in (True, False)] == [True, False]
        assert params(raw_logprobs=True, logprobs=False, top_logprobs=0).logprobs is False
        assert [params(prompt_logprobs=k).prompt_logprobs for k in (None, 0, 5)] == [None, 0, 5]
        with pytest.raises(ValueError, match="top_logprobs is 2 and logprobs False"):
            params(top_logprobs=2, logprobs=False)
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

    def test_O07_ignore_eos(self) -> None:
        config = merged({"eos_token_id": [0, 2]})
        assert params(config, ignore_eos=True).ending_ids == ()
        assert params(config, ignore_eos=True, eos_token_id=-1, stop_token_ids=[9]).ending_ids == (9,)
        assert params(config, ignore_eos=False).ending_ids == (0, 2)
        with pytest.raises(ValueError, match=r"ignore_eos is True and eos_token_id \[2\]"):
            params(config, ignore_eos=True, eos_token_id=2)

    def test_stop_token_ids_come_on_top(self) -> None:
        config = merged({"eos_token_id": 2})
        assert params(config, stop_token_ids=[9, 8, 9]).ending_ids == (2, 9, 8)
        assert params(config, stop_token_ids=9, eos_token_id=-1).ending_ids == (9,)


class TestSiblings:
    def test_O13_seeds_of_choices(self) -> None:
        first = params(seed=7, do_sample=True, top_p=0.5)
        assert sibling_params(first, 0) is first
        others = [sibling_params(first, index) for index in range(1, 50)]
        assert [other.seed for other in others] == [derive_seed(7, index) for index in range(1, 50)]
        assert len({first.seed, *(other.seed for other in others)}) == 50
        assert {dataclasses.replace(other, seed=7) == first for other in others} == {True}

    def test_num_return_sequences(self) -> None:
        config = merged(num_return_sequences=3, do_sample=True)
        assert num_return_sequences(config, {}) == num_return_sequences(config, {"num_return_sequences": None}) == 3
        assert num_return_sequences(config, {"num_return_sequences": 2}) == 2
        assert num_return_sequences(merged(), {"top_k": 3}) == 1
        with pytest.raises(ValueError, match="num_return_sequences is 0"):
            num_return_sequences(config, {"num_return_sequences": 0})
        assert params(config, num_return_sequences=2) == params(config)


# What each setting of GenerationConfig means: a value that works, one that changes nothing, or one that is refused.
WORKS, NO_EFFECT, REFUSED = "works", "no effect", "refused"
FIELDS: dict[str, tuple[str, Any]] = {
    "max_length": (WORKS, 50),
    "max_new_tokens": (WORKS, 5),
    "min_length": (WORKS, 20),
    "min_new_tokens": (WORKS, 5),
    "do_sample": (WORKS, True),
    "temperature": (WORKS, 0.5),
    "top_k": (WORKS, 5),
    "top_p": (WORKS, 0.5),
    "min_p": (WORKS, 0.5),
    "repetition_penalty": (WORKS, 1.5),
    "no_repeat_ngram_size": (WORKS, 2),
    "bad_words_ids": (WORKS, [[3]]),
    "sequence_bias": (WORKS, [[[3], 1.0]]),
    "forced_bos_token_id": (WORKS, 3),
    "forced_eos_token_id": (WORKS, 3),
    "suppress_tokens": (WORKS, [3]),
    "begin_suppress_tokens": (WORKS, [3]),
    "eos_token_id": (WORKS, 3),
    "num_return_sequences": (WORKS, 2),
    "early_stopping": (NO_EFFECT, True),
    "length_penalty": (NO_EFFECT, 2.0),
    "use_cache": (NO_EFFECT, False),
    "renormalize_logits": (NO_EFFECT, True),
    "pad_token_id": (NO_EFFECT, 3),
    "bos_token_id": (NO_EFFECT, 3),
    "decoder_start_token_id": (NO_EFFECT, 3),
    "is_assistant": (NO_EFFECT, True),
    "num_assistant_tokens": (NO_EFFECT, 3),
    "num_assistant_tokens_schedule": (NO_EFFECT, "heuristic"),
    "assistant_confidence_threshold": (NO_EFFECT, 0.5),
    "max_matching_ngram_size": (NO_EFFECT, 3),
    "assistant_lookbehind": (NO_EFFECT, 3),
    "target_lookbehind": (NO_EFFECT, 3),
    "assistant_ensemble_weight": (NO_EFFECT, 0.5),
    "speculation_type": (NO_EFFECT, "x"),
    "disable_compile": (NO_EFFECT, True),
    "transformers_version": (NO_EFFECT, "5.0.0"),
    "max_time": (REFUSED, 3.0),
    "stop_strings": (REFUSED, ["x"]),
    "num_beams": (REFUSED, 2),
    "num_beam_groups": (REFUSED, 2),
    "use_mtp": (REFUSED, True),
    "cache_implementation": (REFUSED, "static"),
    "cache_config": (REFUSED, {"nbits": 4}),
    "max_cache_len": (REFUSED, 100),
    "top_h": (REFUSED, 0.5),
    "typical_p": (REFUSED, 0.5),
    "epsilon_cutoff": (REFUSED, 0.5),
    "eta_cutoff": (REFUSED, 0.5),
    "encoder_repetition_penalty": (REFUSED, 1.5),
    "remove_invalid_values": (REFUSED, True),
    "exponential_decay_length_penalty": (REFUSED, (3, 1.5)),
    "token_healing": (REFUSED, True),
    "guidance_scale": (REFUSED, 1.5),
    "watermarking_config": (REFUSED, {"bias": 2.5}),
    "output_attentions": (REFUSED, True),
    "output_hidden_states": (REFUSED, True),
    "output_scores": (REFUSED, True),
    "output_logits": (REFUSED, True),
    "return_dict_in_generate": (REFUSED, True),
    "encoder_no_repeat_ngram_size": (REFUSED, 2),
    "prompt_lookup_num_tokens": (REFUSED, 3),
    "assistant_early_exit": (REFUSED, 3),
    "compile_config": (REFUSED, {}),
    "continuous_batching_config": (REFUSED, {}),
    "low_memory": (REFUSED, True),
    "penalty_alpha": (REFUSED, 0.5),
    "dola_layers": (REFUSED, "low"),
    "diversity_penalty": (REFUSED, 0.5),
    "constraints": (REFUSED, [3]),
    "force_words_ids": (REFUSED, [[3]]),
    "prefill_chunk_size": (REFUSED, 3),
}


def test_no_setting_of_transformers_is_missing_from_the_table() -> None:
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_works_or_has_no_effect_or_is_refused_by_name(name: str) -> None:
    meaning, value = FIELDS[name]
    config = GenerationConfig()
    if not hasattr(config, name):
        pytest.skip("this version of transformers has no such setting")
    setattr(config, name, value)
    if meaning == REFUSED:
        with pytest.raises(NotImplementedError, match=f"^{name}=.* is not supported"):
            merge_generation_config(model_with(), config)
        return
    found = merge_generation_config(model_with(), config)
    if name == "num_return_sequences":
        assert num_return_sequences(found, {}) == value
    elif name in WARPERS.keys() - {"do_sample"}:
        assert getattr(params(found), name) == value
    else:
        assert (params(found) != params()) == (meaning == WORKS)
