"""Scores travel in one array, and arrive as they were."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from actors.hosting.job import JobResult
from actors.hosting.packed_scores import Scores
from rayfl.metrics import CLASSIFICATION, STATISTICS_SIZE, Statistics

_NAMES = st.lists(st.sampled_from(["global", "personalized", "lambda=0.5"]), unique=True)
_SPLITS = st.dictionaries(st.sampled_from(["train", "validation", "test", "official"]), _NAMES)


def _sent(scores: Scores) -> tuple[Scores, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    message = cloudpickle.dumps(JobResult(scores=scores), 5, buffers.append)  # type: ignore[no-untyped-call]
    return pickle.loads(message, buffers=buffers).scores, buffers


@given(st.dictionaries(st.integers(0, 99), _SPLITS))
def test_scores_arrive_as_they_were(forms: dict[int, dict[str, list[str]]]) -> None:
    drawn = np.random.default_rng(0)
    scores: Scores = {
        client: {
            split: {name: Statistics(drawn.random(STATISTICS_SIZE), CLASSIFICATION) for name in names}
            for split, names in own.items()
        }
        for client, own in forms.items()
    }
    arrived, _ = _sent(scores)
    assert list(arrived) == list(scores)
    for client, own in scores.items():
        assert [*arrived[client]] == [*own]
        for split, by_name in own.items():
            assert [*arrived[client][split]] == [*by_name]
            for name, statistics in by_name.items():
                found = arrived[client][split][name]
                assert found.vector.tobytes() == statistics.vector.tobytes()
                assert found.metrics().keys() == statistics.metrics().keys()


def test_all_of_them_are_one_array() -> None:
    own = {"test": {f"lambda={i}": Statistics.empty() for i in range(12)}}
    _, buffers = _sent(dict.fromkeys(range(100), own))
    assert [len(buffer.raw()) for buffer in buffers] == [100 * 12 * STATISTICS_SIZE * 8]
