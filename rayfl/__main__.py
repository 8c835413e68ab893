"""``python -m rayfl`` is the command ``rayfl``."""

from rayfl.cli import main

main()
