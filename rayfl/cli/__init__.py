"""The command ``rayfl``, one module for each group of commands."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
