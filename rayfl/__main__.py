"""The command ``rayfl``, which is also ``python -m rayfl``."""

import importlib
import signal
import sys
from collections.abc import Callable

_COMPUTING = {"run", "sweep", "reproduce", "replay", "fork"}
"""Commands that import PyTorch and Ray when they begin."""


def main() -> None:
    """Starts the command. Ctrl-C while modules are imported, which takes seconds, ends the process at once.

    Until then nothing has been written. As an exception it would be lost in modules written in C, or become another.
    Once the command has ended it is ignored: it could only cut short how the process ends, and change the exit status.
    """
    try:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            _command()()  # started in the background, where Ctrl-C is ignored
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            command = _command()
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _command() -> Callable[[], None]:
    """Imports the command, and what it is about to need."""
    command: Callable[[], None] = importlib.import_module("rayfl.cli.entry").main
    if _COMPUTING & {*sys.argv[1:3]}:
        importlib.import_module("cluster.run")
    return command


if __name__ == "__main__":
    main()
