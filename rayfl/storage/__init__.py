"""Storage of runs: file systems, the commit protocol, and the lease that guards a run."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
