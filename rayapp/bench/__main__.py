"""`python -m rayapp.bench`: load on a server; with `--split` what each layer costs; `routing` simulates routing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> int:
    """Hands over to the module of the command."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["routing"]:
        name, argv = "routing", argv[1:]
    elif "--split" in argv:
        name = "split"
        argv.remove("--split")
    else:
        name = "serve"
    status: int = import_module(f"rayapp.bench.{name}").main(argv)
    return status


if __name__ == "__main__":
    sys.exit(main())
