"""Named, counter-based random streams: the only source of randomness in rayfl.

Every draw is a pure function of (experiment seed, stream name, round, client), so results depend
neither on the number of actors nor on the order in which they work, and a restart has nothing to
restore. Stream names: ``init.global``, ``init.local``, ``init.endpoint``, ``init.projection``, ``init.architecture``,
``init.hyper``, ``init.generator``, ``init.adapters``, ``init.classifier``, ``init.exits``, ``init.scores``,
``ranks``, ``widths``, ``depths``, ``levels``, ``units``,
``split``, ``holdout``, ``sampling``, ``batches``, ``digest``, ``augment``, ``mix``, ``dropout``, ``coin``, ``public``,
``noise``, ``noise.clients``, ``clients``, ``server``, ``datastore``, ``event``, ``unseen``, ``evaluated``, ``folds``,
``privacy``,
``virtual``, ``posterior``, ``attackers``, ``attack``, ``privacy.count``, ``privacy.example``,
``privacy.local``, ``privacy.discrete``, ``privacy.rotation``,
``privacy.tree.<tensor>``, ``privacy.banded.<tensor>``, ``attack.labels``, ``attack.backdoor``, ``aggregator.<call>``,
``topology``, ``mask``, ``labelled``, ``batches.unlabelled``, ``long_tail``, ``long_tail.order``, ``long_tail.test``,
``stages.order``, ``stages.samples``, ``stages.memory``, ``stages.concept``, ``density``, ``contribution``,
``stages.clients``, ``directions``, ``edges``, ``dispatch``, ``secure_sum``, ``selection``, ``views``,
``augment.gradient``, ``mixtures``;
``synthetic`` of the data set of that name, ``leaf.sample`` and ``leaf.split`` of imports.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NO_COORDINATE = -1


class _Key(np.random.bit_generator.ISeedSequence):
    """Gives Philox its key as it is; a key by its own name would first have entropy of the machine gathered."""

    def __init__(self, digest: bytes) -> None:
        self._key = np.frombuffer(digest, dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._key


@dataclass(frozen=True)
class RandomStreams:
    """All random streams of one experiment.

    Args:
        seed: the experiment's seed.
        branch: a text that begins with a point: streams of rounds are others for every one, those without a round are
            the same.
    """

    seed: int
    branch: str = field(default="", kw_only=True)

    def generator(self, name: str, round: int = _NO_COORDINATE, client: int = _NO_COORDINATE) -> np.random.Generator:
        """A fresh Philox generator at the start of the stream (name, round, client)."""
        key: Any = _Key(self._digest(name, round, client))
        return np.random.Generator(np.random.Philox(key))

    def drawn(self, name: str, round: int, among: int, size: int, least: int | None = None) -> list[int]:
        """Different clients, ascending, drawn from the stream (name, round).

        Args:
            name: of the stream.
            round: its round.
            among: they are below this number.
            size: how many.
            least: draws their number, too, from this one to ``size``, from the stream (name.size, round).
        """
        if least is not None:
            size = int(self.generator(f"{name}.size", round).integers(least, size, endpoint=True))
        found = self.generator(name, round).choice(among, size=size, replace=False)
        return sorted(int(client) for client in found)

    def integer(self, name: str, round: int = _NO_COORDINATE, client: int = _NO_COORDINATE) -> int:
        """A 63-bit seed for libraries that take an integer (PyTorch, scikit-learn)."""
        return int.from_bytes(self._digest(name, round, client)[:8], "little") >> 1

    def _digest(self, name: str, round: int, client: int) -> bytes:
        text = f"{self.seed}{'' if round == _NO_COORDINATE else self.branch}/{name}/{round}/{client}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
