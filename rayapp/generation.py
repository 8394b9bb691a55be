"""One generation as the Router drives it: token ids to a replica, text back, cut at stop strings.

Called once per choice. Whatever ends it early (a stop string, a client that left, an error) aborts it in the
engine. The text so far is kept here, so a `link` may go on at another replica. Knows nothing of HTTP, and of Ray only
the `Link`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from rayapp.api.service import Chunk, SamplingFields
from rayapp.instruments import GenerationWatch
from rayapp.link import wire_request
from rayapp.migration import TokenSource
from rayapp.text.detokenizer import Detokenizer
from rayapp.text.stop import StopBuffer
from rayapp.text.tokenizer import Tokenizer


async def generate(
    link: TokenSource,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    sampling: SamplingFields,
    stop: list[str],
    index: int = 0,
    watch: GenerationWatch | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Drive one generation to its end. The last chunk, and no other, has a finish reason.

    Args:
        stop: non-empty strings; the text ends before the earliest match.
        index: which of the choices that share prompt and seed this is.
        watch: is told what happens.

    Raises:
        GenerationError: one of its subclasses.
    """
    fields = {**asdict(sampling), "seed": choice_seed(sampling.seed, index) if sampling.do_sample else None}
    text = _Text(tokenizer, prompt_ids, stop, fields.pop("shown_ids"))
    del fields["timeout"]  # the deadline says when
    if sampling.logprobs:
        fields["raw_logprobs"] = True  # what the model thinks, whatever was asked to be done to it
    request = wire_request(prompt_ids, fields)
    cached, prompt = 0, None
    if watch is not None:
        watch.submitted(request["request_id"])
    async with aclosing(link.generate(request)) as items:
        async for tokens, reason, info in items:
            if info is not None:
                cached, prompt = info["cached_tokens"], None if text.count else info.get("prompt")
            piece, taken = text.push(tokens, reason)
            if text.matched:
                reason = "stop"
            if watch is not None:
                watch.saw(text.count, reason, info)
            yield Chunk(piece, taken, reason, text.count, len(prompt_ids), cached, prompt)
            prompt = None
            if reason is not None:
                return


def choice_seed(seed: int | None, index: int) -> int:
    """The 64-bit seed of one choice: the request's own for the first, a hash of it and the index for the others."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Text:
    """Tokens in, text out, up to a stop string.

    Attributes:
        count: tokens so far, up to the one that completed a stop string.
        matched: a stop string was found; nothing comes after it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], stop: list[str], shown_ids: tuple[int, ...] = ()
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, frozenset(shown_ids))
        self._stop = StopBuffer(stop) if stop else None
        self.count = 0
        self.matched = False

    def push(self, tokens: list[int], reason: str | None) -> tuple[str, list[int]]:
        """The text these tokens let out, and those of them that it is of."""
        # The token that ended the generation is not part of the text, be it the model's own or one the caller chose.
        shown = tokens[:-1] if reason == "stop" else tokens
        text, taken = self._up_to_match(shown)
        if self.matched:
            tokens = shown = tokens[:taken]
        elif reason is not None:
            text += self._finish()
        self.count += len(tokens)
        return text, shown

    def _up_to_match(self, tokens: list[int]) -> tuple[str, int]:
        if self._stop is None:
            return self._detokenizer.push(tokens), len(tokens)
        text = ""
        for position, token in enumerate(tokens):
            piece, self.matched = self._stop.push(self._detokenizer.push([token]))
            text += piece
            if self.matched:
                return text, position + 1
        return text, len(tokens)

    def _finish(self) -> str:
        """What was held back. A stop string in it still cuts it, and counts as the reason."""
        text = self._detokenizer.finish()
        if self._stop is None:
            return text
        text, self.matched = self._stop.push(text)
        if not self.matched:
            text += self._stop.flush()
            self.matched = self._stop.matched
        return text
