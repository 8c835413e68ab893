"""Data that are made up, and scikit-learn's tables: what they say they are."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine

from rayfl.data.sources.made_up.source import SyntheticLabelsSource, SyntheticSurvivalSource, SyntheticTextSource
from rayfl.data.sources.tables.small_tables import BreastCancerSource, DiabetesSource, WineSource
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(3)


def test_texts_follow_the_chain_of_their_client() -> None:
    source = SyntheticTextSource(num_clients=2, texts=400, length=50, vocabulary=6, concentration=1.0)
    samples = source.open(STREAMS)
    assert samples.spec.target == "tokens" and samples.spec.target_shape == (50,)
    assert samples.x.min() == 1 and samples.x.max() == 5
    assert np.array_equal(samples.x[:, 1:], samples.y[:, :-1])
    assert samples.clients is not None
    for client in (0, 1):
        own = samples.clients == str(client)
        counts = np.zeros((5, 5))
        np.add.at(counts, (samples.x[own].ravel() - 1, samples.y[own].ravel() - 1), 1)
        expected = source.chain(client, STREAMS)
        np.testing.assert_allclose(counts / counts.sum(1, keepdims=True), expected, atol=0.05)
        np.testing.assert_allclose(expected.sum(1), 1)


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_how_much_of_a_chain_is_a_clients_own(own: float) -> None:
    source = SyntheticTextSource(num_clients=2, vocabulary=5, own=own)
    same = np.array_equal(source.chain(0, STREAMS), source.chain(1, STREAMS))
    assert same == (own == 0)


def test_labels_are_those_of_linear_models_and_about_a_third_of_the_samples_has_one() -> None:
    samples = SyntheticLabelsSource(num_clients=30, samples=200, dimension=10, labels=4, beta=0.5).open(STREAMS)
    assert samples.spec.target == "labels" and samples.y.shape == (6000, 4)
    assert set(np.unique(samples.y)) == {0, 1}
    assert 0.2 < samples.y.mean() < 0.45
    alike = SyntheticLabelsSource(num_clients=2, samples=300, dimension=10, labels=1, beta=0).open(STREAMS)
    # One model for all: some hyperplane separates the samples of both clients.
    separated = np.linalg.lstsq(np.c_[alike.x, np.ones(600)], 2 * alike.y[:, 0] - 1, rcond=None)[0]
    right = (np.c_[alike.x, np.ones(600)] @ separated > 0) == (alike.y[:, 0] > 0.5)
    assert right.mean() > 0.9


def test_patients_with_higher_risks_die_sooner_and_clients_risks_differ_as_far_as_beta_says() -> None:
    def concordances(beta: float) -> list[float]:
        """How well the risks that fit the first client order the deaths of each."""
        source = SyntheticSurvivalSource(num_clients=6, samples=400, dimension=4, beta=beta)
        samples = source.open(STREAMS)
        assert samples.spec.target == "survival" and samples.y.shape == (2400, 2)
        assert set(np.unique(samples.y[:, 1])) == {0, 1} and 0.4 < samples.y[:, 1].mean() < 0.8
        assert (samples.y[:, 0] > 0).all() and samples.y[:, 0].max() < 3000
        x, y = samples.x.reshape(6, 400, 4), samples.y.reshape(6, 400, 2)
        died = y[0, :, 1] == 1
        risk = -np.linalg.lstsq(x[0][died], np.log(y[0, died, 0]) - np.log(y[0, died, 0]).mean(), rcond=None)[0]
        found = []
        for own, (time, event) in zip(x, y.transpose(0, 2, 1), strict=True):
            score, first = own @ risk, (time[:, None] < time) & (event[:, None] == 1)
            found.append(float((score[:, None] > score)[first].mean()))
        return found

    alike, unlike = concordances(0.0), concordances(3.0)
    assert min(alike) > 0.7
    assert unlike[0] > 0.7 and min(unlike) < 0.6


def test_the_same_samples_every_time() -> None:
    sources = (
        SyntheticTextSource(num_clients=3),
        SyntheticLabelsSource(num_clients=3),
        SyntheticSurvivalSource(num_clients=3),
    )
    for source in sources:
        one, other, another = (source.open(streams) for streams in (STREAMS, RandomStreams(3), RandomStreams(4)))
        assert np.array_equal(one.x, other.x) and np.array_equal(one.y, other.y)
        assert not np.array_equal(one.x, another.x)


def test_tables_are_scikit_learns() -> None:
    diabetes, own = load_diabetes(), DiabetesSource().open()
    np.testing.assert_allclose(own.y[:, 0] * 100, diabetes.target, rtol=1e-6)
    np.testing.assert_allclose(own.x.std(0), 1, rtol=1e-4)
    assert own.spec.target == "values" and own.spec.num_classes == 1
    for found, loaded in ((BreastCancerSource().open(), load_breast_cancer()), (WineSource().open(), load_wine())):
        assert np.array_equal(found.y, loaded.target)
        np.testing.assert_allclose(found.x.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(np.corrcoef(found.x[:, 0], loaded.data[:, 0])[0, 1], 1)
        assert found.spec.num_classes == len(loaded.target_names)
