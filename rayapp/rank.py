"""`python -m rayapp.rank PARENT`: one further rank of a tensor parallel engine, started by `rayapp.ranks`.

It takes the steps that rank 0 takes, and ends when that does. Reads what to load from its standard input, pickled;
what ended it goes to the standard output that it was given, all else to standard error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys

from rayapp.child import end_with_parent


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, which ends in order
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    config, place = pickle.load(sys.stdin.buffer)
    error: BaseException | None
    try:
        from rayapp.loading import load_engine

        manager, _ = load_engine(config, place)
        while manager.get_result() is not None:  # they are rank 0's to give; here they would pile up
            pass
        error = manager.fatal_error
    except Exception as raised:
        error = raised
    if error is not None:
        os.write(answer, f"{type(error).__name__}: {error}".encode())
    os._exit(error is not None)  # not by way of torch.distributed, which would wait for ranks that may be gone


if __name__ == "__main__":
    main()
