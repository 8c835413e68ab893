"""The data sets of TensorFlow Federated, from its own files: HDF5 or SQLite, clients with named columns.

:func:`import_tff` writes one Parquet file that :class:`rayfl.data.sources.natural.NaturalDataset` reads.
"""

from rayfl.data.sources.tff.importing import TffOptions, import_tff
from rayfl.data.sources.tff.layouts import Kind

__all__ = ["Kind", "TffOptions", "import_tff"]
