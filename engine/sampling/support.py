"""Which settings of transformers' `GenerationConfig` mean what here: used, without effect, or refused by name.

Read by resolve.py. A setting in no table is refused unless it is None, so that new ones never pass unnoticed.
"""

from __future__ import annotations

from typing import Any

USED = frozenset({
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p",
    "min_p", "eos_token_id", "num_return_sequences", "sequence_bias", "repetition_penalty", "no_repeat_ngram_size",
    "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
})  # fmt: skip

# Not fields of GenerationConfig, but `GenerationConfig(frequency_penalty=...)` holds for all requests all the same.
EXTRA = frozenset({"frequency_penalty", "presence_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids"})

# These change nothing here, as they change nothing in generate() without beams, an assistant or padding.
WITHOUT_EFFECT = frozenset({
    "early_stopping", "length_penalty", "use_cache", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "speculation_type", "renormalize_logits", "disable_compile", "transformers_version", "continuous_batching_config",
})  # fmt: skip

# Values that mean "off"; None does everywhere. Any other value is refused.
OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_mtp": (False,),
    "cache_implementation": ("paged", "dynamic", "hybrid"),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
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

_SEQUENCES = "beams are not searched here; num_return_sequences samples several"
_CUTOFF = "use top_p or min_p"
_CACHE = "the cache is paged, its size is set in the ContinuousBatchingConfig"
_SCORES = "ask for top_logprobs"

# What to do instead, where there is something.
INSTEAD = {
    "num_beams": _SEQUENCES,
    "num_beam_groups": _SEQUENCES,
    "diversity_penalty": _SEQUENCES,
    "penalty_alpha": "contrastive search is not done here; use repetition_penalty or sampling",
    "dola_layers": "use repetition_penalty or sampling",
    "constraints": "use allowed_token_ids, or a TokenConstraint as the request's constraint",
    "force_words_ids": "use allowed_token_ids, or a TokenConstraint as the request's constraint",
    "top_h": _CUTOFF,
    "typical_p": _CUTOFF,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "encoder_repetition_penalty": "there is no encoder; use repetition_penalty",
    "encoder_no_repeat_ngram_size": "there is no encoder; use no_repeat_ngram_size",
    "exponential_decay_length_penalty": "use max_new_tokens",
    "remove_invalid_values": "a request whose scores hold NaN or infinity fails alone",
    "stop_strings": "the engine has no tokenizer; use stop_token_ids, or match the text outside and cancel",
    "token_healing": "the engine has no tokenizer; heal the prompt before it is submitted",
    "max_time": "cancel the request when its time is over",
    "guidance_scale": "guidance runs a second prompt beside each, which is not done here",
    "watermarking_config": "watermarks are not made here",
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "prefill_chunk_size": "set max_batch_tokens of the ContinuousBatchingConfig",
    "compile_config": "see the ContinuousBatchingConfig",
    "output_scores": _SCORES,
    "output_logits": "ask for top_logprobs with raw_logprobs",
    "return_dict_in_generate": "results are always GenerationOutput objects",
}
