"""What the user sees and types: standard output holds answers and nothing else, standard error all the rest.

Used by `rayapp.chat.session` and `rayapp.cli`. On a terminal nothing that came from elsewhere is interpreted: control
characters are written as escapes. Elsewhere answers are written as they came.
"""

from __future__ import annotations

import contextlib
import io
import sys
import termios
from collections.abc import Iterator

from rich.console import Console

PROMPT = "> "
LOCAL_FLAGS = 3  # where termios keeps them

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """`text` with every control character but line feed and tab written out, as `\\x1b`."""
    return text.translate(_ESCAPES)


class Screen:
    """The process's own standard streams.

    Attributes:
        interactive: somebody types at a terminal.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self._terminal = sys.stdout.isatty()
        self._console = Console(
            stderr=True, force_terminal=sys.stderr.isatty(), force_interactive=False, markup=False, highlight=False
        )
        self._open: str | None = None  # the stream whose last line has no end yet
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() editing and history)

    def show(self, text: str, reasoning: bool) -> None:
        """The next piece of an answer, or of the reasoning before it."""
        stream = "stderr" if reasoning else "stdout"
        if self._open not in (None, stream):
            self.end_line()
        if reasoning:
            self._console.out(visible(text), end="", style="dim", highlight=False)
        else:
            sys.stdout.write(visible(text) if self._terminal else text)
            sys.stdout.flush()
        self._open = None if text.endswith("\n") else stream

    @contextlib.contextmanager
    def keys_kept(self) -> Iterator[None]:
        """What is typed meanwhile is the next input, also after Ctrl-C, at which a terminal otherwise forgets it."""
        if not self.interactive:
            yield
            return
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        meanwhile = termios.tcgetattr(keyboard)
        meanwhile[LOCAL_FLAGS] |= termios.NOFLSH
        termios.tcsetattr(keyboard, termios.TCSANOW, meanwhile)
        try:
            yield
        finally:
            termios.tcsetattr(keyboard, termios.TCSANOW, before)

    def end_answer(self) -> None:
        """An answer that is not shown on a terminal is followed by one line end, whatever its own end is."""
        if self._terminal:
            self.end_line()
        else:
            self._open = "stdout"
            self.end_line()

    def end_line(self) -> None:
        if self._open == "stdout":
            sys.stdout.write("\n")
            sys.stdout.flush()
        elif self._open == "stderr":
            self._console.out("")
        self._open = None

    def line(self, text: str) -> None:
        """A line of output proper."""
        sys.stdout.write((visible(text) if self._terminal else text) + "\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        self._console.out(visible(text), style="dim", highlight=False)

    def error(self, text: str) -> None:
        self._console.out(visible(text), style="red", highlight=False)

    def ask(self) -> str | None:
        """The next line; None when the user leaves with Ctrl-C or Ctrl-D."""
        try:
            if self._terminal:
                return input(PROMPT)
            sys.stderr.write(PROMPT)  # input() would write it among the answers
            sys.stderr.flush()
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        except (EOFError, KeyboardInterrupt):
            self._console.out("")
            return None

    def read_all(self) -> str:
        """All of standard input, without the line ends at its end.

        Raises:
            ValueError: it is not UTF-8.
        """
        data = b"" if sys.stdin is None else sys.stdin.buffer.read()
        return data.decode("utf-8-sig").rstrip("\r\n")
