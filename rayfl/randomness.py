"""Named, counter-based random streams: the only source of randomness in rayfl.

Every draw is a pure function of (experiment seed, stream name, round, client), so results depend
neither on the number of actors nor on the order in which they work, and a restart has nothing to
restore. Stream names: ``init.global``, ``init.local``, ``init.endpoint``, ``init.projection``, ``init.architecture``,
``init.hyper``, ``init.generator``, ``split``, ``holdout``, ``sampling``, ``batches``, ``digest``, ``augment``, ``mix``,
``dropout``, ``coin``, ``public``, ``noise``, ``clients``, ``server``, ``datastore``, ``event``, ``unseen``;
``synthetic`` of the data set of that name, ``leaf.sample`` and ``leaf.split`` of imports.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

_NO_COORDINATE = -1


@dataclass(frozen=True)
class RandomStreams:
    """All random streams of one experiment.

    Args:
        seed: the experiment's seed.
    """

    seed: int

    def generator(self, name: str, round: int = _NO_COORDINATE, client: int = _NO_COORDINATE) -> np.random.Generator:
        """A fresh Philox generator at the start of the stream (name, round, client)."""
        key = np.frombuffer(self._digest(name, round, client), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def integer(self, name: str, round: int = _NO_COORDINATE, client: int = _NO_COORDINATE) -> int:
        """A 63-bit seed for libraries that take an integer (PyTorch, scikit-learn)."""
        return int.from_bytes(self._digest(name, round, client)[:8], "little") >> 1

    def _digest(self, name: str, round: int, client: int) -> bytes:
        text = f"{self.seed}/{name}/{round}/{client}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
