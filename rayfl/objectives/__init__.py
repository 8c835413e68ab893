"""Objectives of local training as sums of terms, as papers write them."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
