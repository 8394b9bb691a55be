"""Sampling parameters of one request, after every default has been applied.

Made by the manager (library) and read by the sampler and the core. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: limit of generated tokens, at least 1. The manager caps it to the context length.
        min_new_tokens: until so many tokens were generated no EOS or stop token can be chosen.
        do_sample: False takes the most likely token; the four fields below are then unused.
        temperature: divides the logits, > 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: 64-bit seed of the request's random stream.
        eos_token_ids: generation stops after one of these; empty turns it off.
        stop_token_ids: further ids that end generation like an EOS.
        logprobs: return the log-probability of each chosen token.
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
    logprobs: bool = False

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """Every token id that ends the request."""
        return self.eos_token_ids + self.stop_token_ids
