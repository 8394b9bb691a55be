"""Sampling parameters of one request, after every default has been applied.

Made by the manager (library) and read by the sampler and the core. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.sampling.constraint import TokenConstraint
from engine.sampling.random import derive_seed

MAX_TOP_LOGPROBS = 20  # as in the OpenAI API


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: limit of generated tokens, at least 1. The manager caps it to the context length.
        min_new_tokens: until so many tokens were generated no EOS or stop token can be chosen, unless the constraint
            lets nothing else come.
        do_sample: False takes the most likely token; the four fields below are then unused.
        temperature: divides the logits, > 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: 64-bit seed of the request's random stream.
        eos_token_ids: generation stops after one of these; empty turns it off.
        stop_token_ids: further ids that end generation like an EOS.
        sequence_bias: (token ids, bias) added to the logit of the last id where the others are what was read last.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; > 0.
        no_repeat_ngram_size: no run of so many tokens comes twice in prompt and output; 0 allows all.
        bad_words_ids: token sequences that are never completed.
        forced_bos_token_id: the first token after a prompt of one token.
        forced_eos_token_ids: the last token under max_new_tokens is one of these; empty forces nothing.
        suppress_tokens: ids that are never chosen.
        begin_suppress_tokens: ids that are not chosen as the first token.
        frequency_penalty: subtracted from a token's logit for each time it was generated.
        presence_penalty: subtracted once if the token was generated.
        logit_bias: (token id, bias) added to logits.
        allowed_token_ids: only these can be chosen; None allows all.
        constraint: says before each token which ones can be chosen.
        logprobs: return the log-probability of each chosen token.
        top_logprobs: return so many of the most likely tokens with each, up to MAX_TOP_LOGPROBS.
        raw_logprobs: both are of the model's own scores, before any of the above.
        prompt_logprobs: return log-probabilities of the prompt's tokens and so many of the most likely ones at each
            position; None returns none.
        ending_ids: every token id that ends the request.
        edits_logits: something above changes logits before a token is chosen (apart from min_new_tokens).
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    constraint: TokenConstraint | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    edits_logits: bool = field(init=False, repr=False, compare=False)
    ending_ids: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edits = (
            self.sequence_bias
            or self.repetition_penalty != 1.0
            or self.no_repeat_ngram_size
            or self.bad_words_ids
            or self.forced_bos_token_id is not None
            or self.forced_eos_token_ids
            or self.suppress_tokens
            or self.begin_suppress_tokens
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.constraint is not None
        )
        object.__setattr__(self, "edits_logits", bool(edits))
        object.__setattr__(self, "ending_ids", self.eos_token_ids + self.stop_token_ids)


def sibling_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of the index-th of several choices for one prompt: the first is the request itself, the others differ
    in the seed alone, which derives from the request's."""
    return params if index == 0 else replace(params, seed=derive_seed(params.seed, index))
