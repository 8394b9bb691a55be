"""What the parsers of tool calls have in common: pieces in, pieces out, and what to do with text that was held.

Each format is a subclass that adds its states. Knows nothing of HTTP, tokens or reasoning.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rayapp.text.machine import State, TextMachine
from rayapp.text.markers import Markers
from rayapp.text.pieces import Content, Piece, ToolArguments, ToolStart
from rayapp.text.tools.call_reader import MAX_NAME, CallReader
from rayapp.text.tools.json_scanner import JsonScanner

_SEPARATORS = " \t\r\n,;"
_ID_CHARACTERS = string.ascii_letters + string.digits


def random_characters(count: int) -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(count))


def call_id() -> str:
    """An id as OpenAI's."""
    return "call_" + random_characters(24)


class ToolParser(TextMachine):
    """Text in, `Content` and calls out. Joined and merged, the pieces do not depend on how the text was cut.

    Text that looks like a call and turns out not to be one comes out as content, unchanged: all of it where no call
    has begun, else what came after the arguments that were given out. It is not searched again, so that the cost is
    linear. White space with nothing but calls and the ends of the text around it is not content.

    Args:
        functions: those that there are, by name with their parameters' schemas, or the names alone; None or empty: not
            known. Where a format marks its calls, one of another name is still a call, as with OpenAI; where nothing
            but its look tells a call, it is content.
        new_id: gives each call its id; None: as the format wants them.

    Attributes:
        unfinished: the text ended in the markup of a call of which it does not have the arguments.
    """

    markers: tuple[str, ...] = ()
    """Those that a tokenizer may have as special tokens; the detokenizer must show them."""

    id_maker: Callable[[], str] = staticmethod(call_id)

    _is_marked = True  # a marker, not its look alone, tells the call that is being read

    def __init__(self, functions: Collection[str] | None = None, new_id: Callable[[], str] | None = None) -> None:
        super().__init__(self._content)
        self._names = frozenset(functions or ())
        self._parameters: Mapping[str, Any] = functions if isinstance(functions, Mapping) else {}
        self._new_id = new_id or self.id_maker
        self._held: list[str] = []  # read, and neither content nor part of a call so far
        self._blank: list[str] = []  # white space since the beginning or the last call
        self._only_blank = True  # there was nothing else
        self._calls = 0
        self.unfinished = False
        self._name = ""  # of the call that is being read, in formats that write it outside of JSON
        self._reader = CallReader(self._held, self._any_name)

    def finish(self, cut: bool = False, forced: bool = False) -> list[Piece]:
        """The text ends here: what was held, but for separators and the beginning of an end marker after a call.

        Args:
            cut: the model would have gone on: the markup of a call that has begun is no content.
            forced: the text can be nothing but calls, or the beginning of them.
        """
        self._held.append("" if self._state == self._after else self._rest)
        self._rest = ""
        held = "".join(self._held)
        if held.strip(_SEPARATORS) and (forced or (cut and self._in_markup())):
            self._drop_unfinished()
        elif not (self._calls and self._only_blank and not held.strip(_SEPARATORS)):
            self._release()
        if self._blank and not (self._calls or self.unfinished or forced):
            self._out.append(Content("".join(self._blank)))
        return self._taken()

    def _in_markup(self) -> bool:
        """Whether what is held can be nothing but a call that has begun."""
        follows_call = self._calls > 0 and self._only_blank
        return self._state not in (self._content, self._after) and (self._is_marked or follows_call)

    def _drop_unfinished(self) -> None:
        """What is held is a call that the text does not have whole: its name is told if it is known."""
        self.unfinished = True
        self._held.clear()
        if name := self._unstarted_name():
            self._start(name)

    def _unstarted_name(self) -> str | None:
        """The name of the call at hand if it is known and the call was not given out."""
        in_call = self._state == self._call and not self._reader.started
        return self._reader.name if in_call else None

    def _content(self, text: str, at: int) -> int | None:
        """Outside of calls."""
        raise NotImplementedError

    def _after(self, text: str, at: int) -> int | None:
        """After a whole call."""
        self._state = self._content
        return at

    def _seek(self, markers: Markers, text: str, at: int, then: State) -> int | None:
        """Content up to the next marker, and the marker, which is held."""
        found = markers.search(text, at)
        begin = found.start() if found else markers.open_from(text, at)
        self._say(text[at:begin])
        if found:
            self._held.append(found[0])
            self._state = then
            return found.end()
        return begin if begin > at else None

    def _begin_call(self, reader: CallReader) -> None:
        self._reader = reader
        self._state = self._call

    def _call(self, text: str, at: int) -> int | None:
        """In a call that `_reader` reads."""
        reader, had_started = self._reader, self._reader.started
        end, arguments = reader.feed(text, at)
        if reader.started and not had_started:
            self._start(reader.name or "")
        self._give(arguments)
        if reader.done:
            self._held.clear()
            self._state = self._after
        elif reader.failed:
            self._release()
            self._state = self._broken if reader.started else self._content
        return end

    def _broken(self, text: str, at: int) -> int | None:
        """After a call that broke off."""
        self._state = self._after
        return at

    def _hold(self, text: str, at: int, end: int) -> int:
        self._held.append(text[at:end])
        return end

    def _hold_name(self, run: re.Match[str]) -> int:
        """More of a name, held; not more than a name can have, and one character."""
        end = min(run.end(), run.start() + MAX_NAME + 1 - len(self._name))
        self._name += run.string[run.start() : end]
        return self._hold(run.string, run.start(), end)

    def _release(self) -> None:
        """What was held is content."""
        held = "".join(self._held)
        self._held.clear()
        self._say(held)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._only_blank:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank, self._only_blank = "".join(self._blank), [], False
        self._out.append(Content(text))

    def _start(self, name: str) -> None:
        self._blank, self._only_blank = [], True
        self._out.append(ToolStart(self._calls, self._new_id(), name))
        self._calls += 1

    def _give(self, arguments: str) -> None:
        if arguments:
            self._out.append(ToolArguments(self._calls - 1, arguments))

    def _give_json(self, scanner: JsonScanner, text: str, at: int, behind: State) -> int | None:
        """The arguments as they are written, to their end; `behind` is the state there."""
        end, arguments = scanner.feed(text, at)
        self._give(arguments)
        if scanner.done or scanner.failed:
            self._state = behind
        return end

    def _any_name(self, name: str) -> bool:
        return True

    def _known_name(self, name: str) -> bool:
        return not self._names or name in self._names


def skip_blank(text: str, at: int) -> int:
    """Where the white space that begins at `at` ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
