"""The command ``rayfl``, which is also ``python -m rayfl``."""

import signal
import sys


def main() -> None:
    """Starts the command; Ctrl-C while its modules are imported, which takes a second, ends it quietly."""
    try:
        from rayfl.cli.entry import main as command
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    command()


if __name__ == "__main__":
    main()
