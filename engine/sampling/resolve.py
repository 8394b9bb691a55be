"""From generation configs and per-request arguments to `SamplingParams`.

`merge_generation_config` runs once a manager, `make_params` once a request; both raise for what is wrong or not
supported and change nothing that callers own. Knows nothing of scheduling; loads no torch of its own.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# What generate() uses where neither the user nor the model says. Its max_length of 20 is left out on purpose: no
# limit given means the context.
_LIBRARY_DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1}

_USED = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "eos_token_id", "num_return_sequences",
}  # fmt: skip

# Settings that change nothing here, as they change nothing in generate() without beams, an assistant or padding.
_WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "use_cache", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "speculation_type", "renormalize_logits", "disable_compile", "transformers_version", "continuous_batching_config",
}  # fmt: skip

# Values that mean "off" (None does everywhere). Any other value, and any setting in none of these tables, is refused.
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_mtp": (False,),
    "cache_implementation": ("paged", "dynamic", "hybrid"),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "low_memory": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "return_dict_in_generate": (False,),
}

_INSTEAD = {
    "prefill_chunk_size": "set max_batch_tokens of the ContinuousBatchingConfig",
    "compile_config": "see the ContinuousBatchingConfig",
}

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p")


def merge_generation_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None = None
) -> GenerationConfig:
    """The generation config in force, merged as generate() does: the caller's, else the model's, else the library's.

    Returns:
        a new object, in which no max_length is set that nobody asked for.

    Raises:
        ValueError: a value is out of range, or the caller's config has a setting that does not exist.
        NotImplementedError: a setting is not supported; the text names it.
    """
    from transformers import GenerationConfig

    merged = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    known = _public(GenerationConfig())
    models_own = _public(getattr(model, "generation_config", None))
    for name, value in _public(merged).items():
        if name not in known and value is not None and value != models_own.get(name):
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"GenerationConfig has no setting {name!r} ({name}={value!r})"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for defaults in (models_own, _LIBRARY_DEFAULTS):
        for name, value in defaults.items():
            if name in known and getattr(merged, name) is None:
                setattr(merged, name, copy.deepcopy(value))
    for name in known:
        _refuse_unsupported(name, getattr(merged, name), getattr(generation_config, name, None) is None)
    for name, check in _CHECKS.items():
        if getattr(merged, name, None) is not None:
            check(name, getattr(merged, name))
    return merged


def make_params(
    generation_config: GenerationConfig,
    *,
    per_request: Mapping[str, Any],
    per_request_processors: bool,
    num_prompt_tokens: int,
    context_room: int,
    vocab_size: int,
    default_seed: int,
    logprobs: bool = False,
) -> SamplingParams:
    """Sampling parameters of one request.

    A sampling argument of the request other than do_sample turns sampling on for it, and temperature 0 turns it off.

    Args:
        generation_config: from `merge_generation_config`.
        per_request: the request's own arguments by name; None means not given.
        per_request_processors: whether sampling arguments may be among them.
        num_prompt_tokens: length of the prompt, which max_length and min_length include.
        context_room: tokens that fit after the prompt; caps every limit and is the limit where none is given.
        vocab_size: token ids are below it.
        default_seed: 64-bit seed where the request brings none. Seeds are taken modulo 2**64.
        logprobs: return log-probabilities where the request does not say.

    Raises:
        TypeError: an unknown argument.
        ValueError: an argument is out of range or not allowed, or the prompt leaves no room.
    """
    given = _checked(per_request, per_request_processors, vocab_size)
    max_new_tokens = _max_new_tokens(generation_config, given, num_prompt_tokens, context_room)
    min_new_tokens = _first(
        given.get("min_new_tokens"),
        generation_config.min_new_tokens,
        max(0, (generation_config.min_length or 0) - num_prompt_tokens),
    )
    sampling = {name: _first(given.get(name), getattr(generation_config, name)) for name in _SAMPLING}
    if "do_sample" not in given and not given.keys().isdisjoint(_SAMPLING):
        sampling["do_sample"] = True
    if sampling["temperature"] == 0:
        sampling.update(do_sample=False, temperature=None)
    eos = _first(given.get("eos_token_id"), generation_config.eos_token_id)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(min_new_tokens, max_new_tokens),
        do_sample=bool(sampling["do_sample"]),
        temperature=float(_first(sampling["temperature"], 1.0)),
        top_k=int(sampling["top_k"] or 0),
        top_p=float(_first(sampling["top_p"], 1.0)),
        min_p=float(sampling["min_p"] or 0.0),
        seed=int(given.get("seed", default_seed)) % 2**64,
        eos_token_ids=() if eos is None else tuple(dict.fromkeys(i for i in _ids("eos_token_id", eos) if i >= 0)),
        stop_token_ids=tuple(dict.fromkeys(_ids("stop_token_ids", given.get("stop_token_ids", ())))),
        logprobs=given.get("logprobs", logprobs),
    )


def _checked(per_request: Mapping[str, Any], per_request_processors: bool, vocab_size: int) -> dict[str, Any]:
    """The arguments that were given, each valid by itself."""
    for name in per_request:
        if name not in _PER_REQUEST:
            near = difflib.get_close_matches(name, _PER_REQUEST, n=1)
            raise TypeError(
                f"a request takes no argument {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(_PER_REQUEST)}")
            )
    given = {name: value for name, value in per_request.items() if value is not None}
    for name, value in given.items():
        _CHECKS[name](name, value)
        if name in _SAMPLING and not per_request_processors:
            raise ValueError(
                f"{name}={value!r}: requests may not bring their own {name}; set per_request_processors=True in the "
                "ContinuousBatchingConfig, or set it for all requests in the GenerationConfig"
            )
    for name in given.keys() & {"eos_token_id", "stop_token_ids"}:
        for token in _ids(name, given[name]):
            if token >= vocab_size or (token < 0 and name == "stop_token_ids"):
                raise ValueError(f"{name} holds {token}; the model's token ids go from 0 to {vocab_size - 1}")
    return given


def _max_new_tokens(config: GenerationConfig, given: dict[str, Any], num_prompt_tokens: int, room: int) -> int:
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {num_prompt_tokens + room}, one of them "
            f"to be generated: shorten it by {1 - room}"
        )
    limit = _first(given.get("max_new_tokens"), config.max_new_tokens)
    if limit is None and config.max_length is not None:
        limit = config.max_length - num_prompt_tokens
        if limit < 1:
            raise ValueError(
                f"max_length is {config.max_length} and the prompt alone has {num_prompt_tokens} tokens: shorten it by "
                f"{1 - limit}, raise max_length or set max_new_tokens"
            )
    limit = room if limit is None else int(limit)
    least = given.get("min_new_tokens", 0)
    if least > limit and "max_new_tokens" in given:
        raise ValueError(f"min_new_tokens is {least} and max_new_tokens {limit}: it must be at most that")
    return min(limit, room)


def _refuse_unsupported(name: str, value: Any, from_model: bool) -> None:
    if name in _USED or name in _WITHOUT_EFFECT or value is None or value in _OFF.get(name, ()):
        return
    off = _OFF.get(name, (None,))[0]
    source = "model.generation_config" if from_model else "the generation config"
    where = f" in {source}" if off is None else ""  # None elsewhere would fall back to the model's value
    instead = _INSTEAD.get(name, f"set it to {off!r}{where} to generate without it")
    raise NotImplementedError(f"{name}={value!r} of {source} is not supported yet: {instead}")


def _public(config: Any) -> dict[str, Any]:
    return {} if config is None else {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _first(*values: Any) -> Any:
    """The first value that is not None, else None."""
    return next((value for value in values if value is not None), None)


def _ids(name: str, value: Any) -> list[int]:
    """Token ids from an int, a sequence or a tensor. Raises ValueError for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    values = list(value) if isinstance(value, list | tuple | set) else [value]
    if not all(_is_int(each) for each in values):
        raise ValueError(f"{name} is {value!r}: it must be a token id or a list of token ids")
    return [int(each) for each in values]


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integer(low: int | None) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not _is_int(value) or (low is not None and value < low):
            raise ValueError(f"{name} is {value!r}: it must be an integer" + ("" if low is None else f" >= {low}"))

    return check


def _number(accepts: Callable[[float], bool], expected: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, Real) or isinstance(value, bool) or not accepts(float(value)):
            raise ValueError(f"{name} is {value!r}: it must be a number {expected}")

    return check


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def _token_ids(name: str, value: Any) -> None:
    _ids(name, value)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "max_new_tokens": _integer(1),
    "min_new_tokens": _integer(0),
    "max_length": _integer(1),
    "min_length": _integer(0),
    "num_return_sequences": _integer(1),
    "do_sample": _boolean,
    "temperature": _number(lambda x: 0 <= x < math.inf, ">= 0; 0 takes the most likely token"),
    "top_k": _integer(0),
    "top_p": _number(lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": _number(lambda x: 0 <= x <= 1, "between 0 and 1"),
    "seed": _integer(None),
    "eos_token_id": _token_ids,
    "stop_token_ids": _token_ids,
    "logprobs": _boolean,
}
_PER_REQUEST = [name for name in _CHECKS if name not in ("max_length", "min_length", "num_return_sequences")]
