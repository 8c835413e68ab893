"""``python -m rayfl`` is the command ``rayfl``."""

from rayfl.cli.entry import main

main()
