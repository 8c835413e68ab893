"""Files of runs: where they lie, how commits write them, and who may."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
