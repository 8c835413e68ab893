"""LEAF's data sets (Caldas et al., 2018), from LEAF's own JSON or from the sources that LEAF began with.

:func:`import_leaf` reads the JSON of all six data sets; :func:`import_femnist_raw` and
:func:`import_shakespeare_raw` follow LEAF's rules from NIST's images and the plays' text. Each writes one
Parquet file that :class:`rayfl.data.sources.natural.NaturalDataset` reads.
"""

from rayfl.data.sources.leaf.importing import Kind, LeafOptions, import_leaf
from rayfl.data.sources.leaf.letters import ALPHABET
from rayfl.data.sources.leaf.raw import import_femnist_raw, import_shakespeare_raw
from rayfl.data.sources.leaf.sampling import Sampling
from rayfl.data.sources.leaf.writing import ImportReport

__all__ = [
    "ALPHABET",
    "ImportReport",
    "Kind",
    "LeafOptions",
    "Sampling",
    "import_femnist_raw",
    "import_leaf",
    "import_shakespeare_raw",
]
