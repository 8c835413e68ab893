"""Signatures of clients' samples, and the angles between them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from algorithms.parts.subspaces import Proximity, angles, leading_vectors, proximity_matrix, signature
from rayfl.params import Tree

MEASURES: tuple[Proximity, ...] = ("vectors", "subspaces", "sum")


def samples(count: int, size: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(vectors: list[list[float]], classes: list[int]) -> Tree:
    """A signature with these vectors as columns."""
    columns = torch.tensor(vectors, dtype=torch.float64).T.reshape(-1, len(vectors))
    return {"vectors": columns, "classes": torch.tensor(classes)}


def test_the_vectors_are_eigenvectors_of_the_second_moment_in_the_order_of_their_eigenvalues() -> None:
    rows = samples(9).numpy()
    found = leading_vectors(rows, 3)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    expected = vectors[:, ::-1][:, :3]
    np.testing.assert_allclose(np.abs((found * expected).sum(0)), 1, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(rows @ found, axis=0) ** 2, values[::-1][:3], rtol=1e-12)
    assert (found[np.abs(found).argmax(0), range(3)] > 0).all()
    np.testing.assert_array_equal(leading_vectors(-rows, 3), found)


@pytest.mark.parametrize(
    ("rows", "count", "kept"),
    [
        (samples(2), 3, 2),
        (samples(1), 3, 1),
        (samples(2).repeat(4, 1), 3, 2),  # of rank 2
        (samples(1) * torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64), 3, 1),
        (torch.zeros(5, 6, dtype=torch.float64), 3, 0),
        (torch.zeros(0, 6, dtype=torch.float64), 3, 0),
        (samples(9), None, 6),
    ],
)
def test_a_vector_without_a_singular_value_is_left_out(rows: torch.Tensor, count: int | None, kept: int) -> None:
    found = leading_vectors(rows.numpy(), count)
    assert found.shape == (6, kept)
    np.testing.assert_allclose(found.T @ found, np.eye(kept), atol=1e-12)


def test_a_signature_has_the_vectors_of_each_class_in_float64_whatever_the_samples_are() -> None:
    x, y = samples(11).reshape(11, 1, 2, 3).float(), torch.tensor([2, 0, 2, 2, 0, 2, 2, 5, 2, 2, 2])
    found = signature(x, y, 3)
    assert found["classes"].tolist() == [0, 0, 2, 2, 2, 5]
    assert found["vectors"].shape == (6, 6) and found["vectors"].dtype == torch.float64
    of_two = leading_vectors(x[y == 2].flatten(1).double().numpy(), 3)
    np.testing.assert_array_equal(found["vectors"][:, 2:5].numpy(), of_two)
    together = signature(x, None, 3)
    assert together["classes"].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(together["vectors"].numpy(), leading_vectors(x.flatten(1).double().numpy(), 3))
    assert signature(x[:0], y[:0], 3)["vectors"].shape == (6, 0)


def test_known_angles() -> None:
    half = 0.5**0.5
    one = of([[1, 0, 0], [0, 1, 0]], [0, 1])
    other = of([[half, 0, half], [0, 0, -1]], [0, 2])
    assert angles([one], [other], "vectors")[0, 0] == 45
    assert angles([one], [other], "subspaces")[0, 0] == 0  # both planes have the first axis
    assert angles([one], [other], "sum")[0, 0] == 45 + 90 + 90
    assert angles([one], [of([[0, 0, 1]], [1])], "subspaces")[0, 0] == 90


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_principal_angle_is_that_of_scipy(seed: int) -> None:
    one, other = (signature(samples(9, 12, seed + k), torch.arange(9) % 2, 2) for k in (0, 100))
    expected = np.degrees(scipy.linalg.subspace_angles(one["vectors"].numpy(), other["vectors"].numpy()).min())
    assert abs(angles([one], [other], "subspaces")[0, 0] - expected) < 1e-5


@pytest.mark.parametrize("measure", MEASURES)
def test_neither_signs_nor_last_bits_matter_and_equal_samples_are_at_no_angle(measure: Proximity) -> None:
    classes = torch.arange(12) % 3
    known = [signature(samples(12, 20, seed), classes, 3) for seed in range(4)]
    flipped = [{**one, "vectors": one["vectors"] * torch.tensor([1.0, -1.0, -1.0] * 3)} for one in known]
    nudged = [{**one, "vectors": one["vectors"] * (1 + 2.0**-50)} for one in known]
    matrix = proximity_matrix(known, measure)
    for others in (flipped, nudged):
        np.testing.assert_array_equal(proximity_matrix(others, measure), matrix)
        crossed = angles(known, others, measure)
        np.testing.assert_array_equal(crossed, matrix)
        assert not crossed.diagonal().any()
    assert (matrix == matrix.T).all() and (matrix[np.triu_indices(4, 1)] > 0).all()


def test_subspaces_do_not_depend_on_the_bases() -> None:
    one, other = (signature(samples(5, 20, seed), None, 3) for seed in (0, 1))
    rotation = torch.linalg.qr(samples(3, 3, seed=7))[0]
    turned = {**one, "vectors": one["vectors"] @ rotation}
    assert angles([one], [other], "subspaces") == angles([turned], [other], "subspaces")
    assert angles([one], [other], "vectors") != angles([turned], [other], "vectors")


def test_nobody_is_near_a_client_without_vectors() -> None:
    some, none = signature(samples(4), torch.tensor([0, 0, 1, 1]), 2), signature(samples(0), torch.zeros(0).long(), 2)
    for measure in ("vectors", "subspaces"):
        assert angles([none], [some, none], measure).tolist() == [[90.0, 90.0]]
    assert angles([none], [some, none], "sum").tolist() == [[4 * 90.0, 0.0]]
