"""Exact sums of weighted trees, the same for every grouping and order."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
