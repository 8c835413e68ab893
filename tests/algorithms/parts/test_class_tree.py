"""Trees of classes: every class ends alone, and classes that are alike stay together longest."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms.parts.class_tree import class_tree


def paths(tree: np.ndarray) -> set[tuple[float, ...]]:
    """What each class meets on its way."""
    return {tuple(column) for column in tree.T}


@pytest.mark.parametrize("classes", [2, 3, 6, 11])
@pytest.mark.parametrize("equal", [False, True])
def test_inv_tree_1_classes_are_divided_until_each_is_alone(classes: int, equal: bool) -> None:
    generator = np.random.default_rng(classes)
    means = np.zeros((classes + 2, 4)) if equal else generator.standard_normal((classes + 2, 4))
    present = np.ones(classes + 2, bool)
    present[[0, classes]] = False
    tree = class_tree(means, present, generator)
    assert tree.shape == (classes - 1, classes + 2)
    assert set(np.unique(tree)) <= {-1.0, 0.0, 1.0}
    assert not tree[:, ~present].any() and (tree[0, present] != 0).all()
    assert len(paths(tree[:, present])) == classes
    for row in tree:
        assert (row == 1).any() and (row == -1).any()
        # a node has the classes of one side of one node before, but for the root
        inside = row != 0
        assert inside.sum() == classes or any((inside == (other == s)).all() for other in tree for s in (1, -1))


def test_inv_tree_2_alike_classes_are_divided_last() -> None:
    means = np.array([[0.0, 0.0], [10.0, 0.0], [0.1, 0.0], [10.1, 0.0]])
    tree = class_tree(means, np.ones(4, bool), np.random.default_rng(0))
    assert tree[0].tolist() in ([1, -1, 1, -1], [-1, 1, -1, 1])


def test_one_class_or_none_needs_no_node() -> None:
    for present in ([True, False, False], [False] * 3):
        assert class_tree(np.zeros((3, 2)), np.array(present), np.random.default_rng(0)).shape == (0, 3)
