"""From generation configs and per-request arguments to `SamplingParams`.

`merge_generation_config` runs once a manager, `make_params` once a request; both raise for what is wrong or not
supported and change nothing that callers own. Knows nothing of scheduling; loads no torch of its own.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.sampling.arguments import ARGUMENTS, CONFIG_ONLY, EDITS, WARPERS
from engine.sampling.params import SamplingParams
from engine.sampling.support import EXTRA, INSTEAD, OFF, USED, WITHOUT_EFFECT

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# What generate() uses where neither the user nor the model says. Its max_length of 20 is left out on purpose: no
# limit given means the context.
_LIBRARY_DEFAULTS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_return_sequences": 1}

_SETTINGS = CONFIG_ONLY | {name: read for name, read in ARGUMENTS.items() if name in USED | EXTRA}


def merge_generation_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None = None, *, drop_unsupported: bool = False
) -> GenerationConfig:
    """The generation config in force, merged as generate() does: the caller's, else the model's, else the library's.

    Args:
        drop_unsupported: unset what is not supported, with one logged warning that names it, instead of raising.

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
        if name not in known.keys() | EXTRA and value is not None and value != models_own.get(name):
            near = difflib.get_close_matches(name, known.keys() | EXTRA, n=1)
            raise ValueError(
                f"GenerationConfig has no setting {name!r} ({name}={value!r})"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    for defaults in (models_own, _LIBRARY_DEFAULTS):
        for name, value in defaults.items():
            if name in known and getattr(merged, name) is None:
                setattr(merged, name, copy.deepcopy(value))
    dropped = []
    for name in known:
        value = getattr(merged, name)
        if name in USED or name in WITHOUT_EFFECT or value is None or value in OFF.get(name, ()):
            continue
        if not drop_unsupported:
            raise NotImplementedError(_refusal(name, value, getattr(generation_config, name, None) is None))
        dropped.append(f"{name}={value!r}")
        setattr(merged, name, None)
    if dropped:
        logger.warning("dropped from the generation config, as the engine does not support it: %s", ", ".join(dropped))
    _configured(merged, _vocab_size(model))
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

    Temperature, top_k, top_p or min_p of the request turns sampling on for it, and temperature 0 turns it off.
    num_return_sequences is checked and left to the caller, who asks `num_return_sequences` and `sibling_params`.

    Args:
        generation_config: from `merge_generation_config`.
        per_request: the request's own arguments by name (`ARGUMENTS`); None means not given.
        per_request_processors: whether arguments that change how a token is chosen may be among them.
        num_prompt_tokens: length of the prompt, which max_length and min_length include.
        context_room: tokens that fit after the prompt; caps every limit and is the limit where none is given.
        vocab_size: token ids are below it.
        default_seed: 64-bit seed where the request brings none. Seeds are taken modulo 2**64.
        logprobs: return log-probabilities where the request does not say.

    Raises:
        TypeError: an unknown argument.
        ValueError: an argument is out of range or not allowed, or the prompt leaves no room.
    """
    given = _given(per_request, per_request_processors, vocab_size)
    config = _configured(generation_config, vocab_size)
    max_new_tokens = _max_new_tokens(given, config, num_prompt_tokens, context_room)
    eos = _eos(given, config)
    both = {name: _first(given.get(name), config.get(name)) for name in (*WARPERS, *EDITS)}
    bad_words = both.pop("bad_words_ids") or ()
    fields = _warpers(given, both) | {name: both[name] for name in EDITS if both.get(name) is not None}
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(_min_new_tokens(given, config, num_prompt_tokens), max_new_tokens),
        seed=given.get("seed", default_seed) % 2**64,
        eos_token_ids=eos,
        stop_token_ids=_first(given.get("stop_token_ids"), config.get("stop_token_ids"), ()),
        # As in transformers, an EOS is not a bad word.
        bad_words_ids=tuple(ids for ids in bad_words if not (len(ids) == 1 and ids[0] in eos)),
        forced_eos_token_ids=fields.pop("forced_eos_token_id", ()),
        **_logprobs(given, logprobs),
        **fields,
    )


def num_return_sequences(generation_config: GenerationConfig, per_request: Mapping[str, Any]) -> int:
    """How many choices a prompt asks for, at least 1: the request's, else the generation config's."""
    name = "num_return_sequences"
    value = _first(per_request.get(name), getattr(generation_config, name), 1)
    count: int = ARGUMENTS[name](name, value, None)
    return count


def _given(per_request: Mapping[str, Any], per_request_processors: bool, vocab_size: int) -> dict[str, Any]:
    """The arguments that were given, each valid by itself and in its normal form."""
    for name in per_request:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(ARGUMENTS)}"
            hint = f": {INSTEAD[name]}" if name in INSTEAD else hint
            raise TypeError(f"a request takes no argument {name!r}{hint}")
    given = {name: ARGUMENTS[name](name, value, vocab_size) for name, value in per_request.items() if value is not None}
    for name in given.keys() & (WARPERS.keys() | EDITS.keys()):
        if not per_request_processors:
            raise ValueError(
                f"{name}={per_request[name]!r}: requests may not bring their own {name}; set "
                "per_request_processors=True in the ContinuousBatchingConfig, or set it for all requests in the "
                "GenerationConfig"
            )
    return given


def _configured(config: GenerationConfig, vocab_size: int | None) -> dict[str, Any]:
    """The settings of a generation config in their normal form. An EOS beyond the vocabulary is none, but no error."""
    return {
        name: read(name, value, None if name == "eos_token_id" else vocab_size)
        for name, read in _SETTINGS.items()
        if (value := getattr(config, name, None)) is not None
    }


def _max_new_tokens(given: dict[str, Any], config: dict[str, Any], num_prompt_tokens: int, room: int) -> int:
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {num_prompt_tokens + room}, one of them "
            f"to be generated: shorten it by {1 - room}"
        )
    limit = _first(given.get("max_new_tokens"), config.get("max_new_tokens"))
    if limit is None and "max_length" in config:
        limit = config["max_length"] - num_prompt_tokens
        if limit < 1:
            raise ValueError(
                f"max_length is {config['max_length']} and the prompt alone has {num_prompt_tokens} tokens: shorten "
                f"it by {1 - limit}, raise max_length or set max_new_tokens"
            )
    limit = room if limit is None else limit
    least = given.get("min_new_tokens", 0)
    if least > limit and "max_new_tokens" in given:
        raise ValueError(f"min_new_tokens is {least} and max_new_tokens {limit}: it must be at most that")
    return min(limit, room)


def _min_new_tokens(given: dict[str, Any], config: dict[str, Any], num_prompt_tokens: int) -> int:
    for source in (given, config):
        if "min_new_tokens" in source:
            return source["min_new_tokens"]
        if "min_length" in source:
            return max(0, source["min_length"] - num_prompt_tokens)
    return 0


def _eos(given: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    if not given.get("ignore_eos"):
        return _first(given.get("eos_token_id"), config.get("eos_token_id"), ())
    if given.get("eos_token_id"):
        raise ValueError(f"ignore_eos is True and eos_token_id {list(given['eos_token_id'])}: set one of them")
    return ()


def _warpers(given: dict[str, Any], both: dict[str, Any]) -> dict[str, Any]:
    do_sample = both["do_sample"]
    if "do_sample" not in given and not given.keys().isdisjoint(WARPERS):
        do_sample = True
    temperature = _first(both["temperature"], 1.0)
    return {
        "do_sample": bool(do_sample and temperature > 0),
        "temperature": temperature or 1.0,
        "top_k": both["top_k"] or 0,
        "top_p": _first(both["top_p"], 1.0),
        "min_p": both["min_p"] or 0.0,
    }


def _logprobs(given: dict[str, Any], default: bool) -> dict[str, Any]:
    """Asking for the most likely tokens, or for raw scores, asks for log-probabilities."""
    top, raw = given.get("top_logprobs", 0), given.get("raw_logprobs", False)
    if top and given.get("logprobs") is False:
        raise ValueError(f"top_logprobs is {top} and logprobs False: set logprobs=True, or top_logprobs=0")
    return {
        "logprobs": given.get("logprobs", default or raw or top > 0),
        "top_logprobs": top,
        "raw_logprobs": raw,
        "prompt_logprobs": given.get("prompt_logprobs"),
    }


def _refusal(name: str, value: Any, from_model: bool) -> str:
    off = OFF.get(name, (None,))[0]
    source = "model.generation_config" if from_model else "the generation config"
    where = f" in {source}" if off is None else ""  # None elsewhere would fall back to the model's value
    instead = f"{INSTEAD[name]}. Else " if name in INSTEAD else ""
    return f"{name}={value!r} of {source} is not supported: {instead}set it to {off!r}{where} to generate without it"


def _vocab_size(model: Any) -> int | None:
    config = getattr(model, "config", None)
    return None if config is None else getattr(config.get_text_config(), "vocab_size", None)


def _public(config: Any) -> dict[str, Any]:
    return {} if config is None else {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _first(*values: Any) -> Any:
    """The first value that is not None, else None."""
    return next((value for value in values if value is not None), None)
