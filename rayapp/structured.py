"""Structured output: which tokens may come next so that the text follows a schema, regex, grammar or list of choices.

`check` is asked by the Router before a request is dispatched; `Compiler` makes the engine's constraints in the engine
actor. What callers ask for is plain data, see `grammar_text`. llguidance compiles it and makes the masks. Loads no
torch; knows nothing of requests or batches.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rayapp.failures import Overloaded
from rayapp.grammar_text import grammar_text
from rayapp.text.tokenizer import Tokenizer

Structure = Mapping[str, Any]

COMPILE_LIMIT_S = 5.0
COMPILES_AT_ONCE = 2  # of `check`, in one process
KEPT_GRAMMARS = 64
KEPT_VERDICTS = 1024
KEPT_STATES = 64  # of one constraint: choices that share it and are at different places
REASON_LENGTH = 400

_LIMITS = LLParserLimits(verbose_errors=False)  # the library's own: a mask took at most some 50 ms
_KIND_NAMES = {
    "json_object": "json_object",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "marked_grammar": "the grammar",
}


def check(structure: Structure, tokenizer: Tokenizer, limit_s: float = COMPILE_LIMIT_S) -> None:
    """Find out whether output can be made to follow a structure. Waits for the compiler: not on an event loop.

    What was found is kept, so that a structure that comes again costs nothing. The first call for a tokenizer takes
    half a second more.

    Args:
        limit_s: how long it may compile. What takes longer is refused and ends in a thread of its own, by the
            library's limits; few of these run at once.

    Raises:
        ValueError: it cannot; the text says why.
        Overloaded: too many others are being compiled.
    """
    with _checkers_lock:
        checker = _checkers.get(tokenizer)
        if checker is None:
            checker = _checkers[tokenizer] = _Checker(tokenizer)
    try:
        checker.check(grammar_text(structure), limit_s)
    except ValueError as error:
        raise ValueError(f"{_KIND_NAMES.get(str(structure.get('kind')), 'structure')}: {error}") from None


class Compiler:
    """Constraints for one model. Every method may be called from any thread, better not on an event loop.

    Args:
        tokenizer: of the model, or the folder with its tokenizer.json.
        vocab_size: of the model: rows of its logits. May be more than the tokenizer has tokens.
        eos_ids: tokens that end an output; all of them may come where the structure may end.
    """

    def __init__(self, tokenizer: Tokenizer | str | os.PathLike[str], vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._source: Tokenizer | str | os.PathLike[str] | None = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = [token_id for token_id in eos_ids if 0 <= token_id < vocab_size]
        self._vocabulary: LLTokenizer | None = None
        self._roots: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, structure: Structure) -> GrammarConstraint:
        """A constraint for one request, or for several that ask for the same.

        Raises:
            ValueError: the output cannot be made to follow the structure.
        """
        if not self._eos_ids:
            raise ValueError("the model has no token that ends an output, so none can follow a structure to its end")
        text = grammar_text(structure)
        with self._lock:
            root = self._roots.get(text)
            if root is not None:
                self._roots.move_to_end(text)
        if root is None:
            root = self.compile(text)
            with self._lock:
                self._roots[text] = root
                while len(self._roots) > KEPT_GRAMMARS:
                    self._roots.popitem(last=False)
        return GrammarConstraint(root, self._vocab_size, self._eos_ids)

    def compile(self, text: str) -> LLMatcher:
        """The matcher of a grammar at its beginning, its first mask known to be there.

        Raises:
            ValueError: with the library's reason.
        """
        root = LLMatcher(self._tokens(), text, log_level=0, limits=_LIMITS)
        if not root.is_error():
            root.compute_bitmask()
        if root.is_error():
            raise ValueError(_reason(root))
        return root

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                tokenizer = self._source if isinstance(self._source, Tokenizer) else Tokenizer.load(self._source or "")
                size = max(self._vocab_size, tokenizer.backend.get_vocab_size())
                try:
                    self._vocabulary = LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=self._eos_ids)
                except ValueError as error:
                    raise ValueError(f"structured output does not know this model's tokenizer: {error}") from None
            return self._vocabulary


@dataclass(slots=True)
class _State:
    """Where a grammar is behind some tokens; `mask` is known once it was asked for."""

    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)
    mask: bytes | None = None
    over: bool = False  # an ending token has come


class GrammarConstraint:
    """A `TokenConstraint`: the tokens after which the text can still follow the grammar.

    The ending tokens are among them where the grammar may end, and alone when nothing else can come; no other special
    token ever is. States are kept by the tokens that led there, so that one more token costs one step of the grammar,
    and any other output is followed from its beginning.
    """

    def __init__(self, root: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._root = root
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._states: deque[_State] = deque(maxlen=KEPT_STATES)  # the latest first
        self._lock = threading.Lock()

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """See `TokenConstraint.allowed`.

        Raises:
            ValueError: the tokens do not follow the grammar, nothing can follow them, or it has become too complex.
        """
        with self._lock:
            state = self._state(list(output_ids))
            if state.over:
                mask = np.zeros(self._vocab_size, np.bool_)
                mask[list(self._eos_ids)] = True
                return mask
            if state.mask is None:
                state.mask = state.matcher.compute_bitmask()
                if state.matcher.is_error():
                    self._states.remove(state)
                    raise ValueError(_reason(state.matcher))
            bits = np.frombuffer(state.mask, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _state(self, tokens: list[int]) -> _State:
        """Behind these tokens, as the latest of the states."""
        before, last = tokens[:-1], tokens[-1:]
        found = None
        for state in self._states:
            if state.tokens[-1:] == last and state.tokens == tokens:
                found = state
                break
            if found is None and len(state.tokens) == len(before) and state.tokens == before:
                found = state
        if found is None:
            found = _State(self._root.deep_copy())
        else:
            self._states.remove(found)
        self._follow(found, tokens[len(found.tokens) :])
        self._states.appendleft(found)
        return found

    def _follow(self, state: _State, tokens: list[int]) -> None:
        for token in tokens:
            state.over = state.over or (token in self._eos_ids and state.matcher.is_accepting())
            if not state.over and not state.matcher.consume_token(token):
                raise ValueError(f"token {token} at position {len(state.tokens)} of the output does not follow it")
            state.tokens.append(token)
            state.mask = None


class _Checker:
    """The verdicts on structures, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._compiler = Compiler(tokenizer, tokenizer.vocab_size, sorted(tokenizer.special_ids)[:1] or [0])
        self._verdicts: OrderedDict[str, str] = OrderedDict()  # reasons by grammar; "" is none
        self._lock = threading.Lock()

    def check(self, text: str, limit_s: float) -> None:
        self._compiler._tokens()  # not part of what a structure costs
        with self._lock:
            verdict = self._verdicts.get(text)
        if verdict is None:
            verdict = self._compile(text, limit_s)
            with self._lock:
                self._verdicts[text] = verdict
                while len(self._verdicts) > KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise ValueError(verdict)

    def _compile(self, text: str, limit_s: float) -> str:
        if not _room.acquire(timeout=limit_s):
            raise Overloaded(f"other structures were still being compiled after {limit_s:g} s; try again later")
        verdicts: queue.SimpleQueue[str] = queue.SimpleQueue()

        def compile_it() -> None:
            try:
                self._compiler.compile(text)
                verdicts.put("")
            except BaseException as error:  # a panic of the library is no Exception
                verdicts.put(str(error) or type(error).__name__)
            finally:
                _room.release()

        threading.Thread(target=compile_it, name="compile-structure", daemon=True).start()
        try:
            return verdicts.get(timeout=limit_s)
        except queue.Empty:
            return f"it could not be compiled within {limit_s:g} s; make it simpler"


_checkers: WeakKeyDictionary[Tokenizer, _Checker] = WeakKeyDictionary()
_checkers_lock = threading.Lock()
_room = threading.BoundedSemaphore(COMPILES_AT_ONCE)


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher failed, in the library's words."""
    reason = matcher.get_error().removesuffix("<non-verbose/>").partition("\n   1 | ")[0].strip()
    reason = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", reason)
    if reason.startswith("NoExtension"):
        reason = "no text can follow it"
    return reason if len(reason) <= REASON_LENGTH else reason[:REASON_LENGTH] + "..."
