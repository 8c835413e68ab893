"""Where the leaves of a tree lie in one flat buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.engine.updates.flat import Layout
from rayfl.params import leaves, tensors
from tests.support.problems import CPU
from tests.support.toys import assert_equal
from tests.support.trees import tensors_of, trees


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=st.data())
@pytest.mark.first_case
def test_every_view_of_a_buffer_is_aligned_and_pack_and_views_are_inverse(dtype: torch.dtype, data: Any) -> None:
    tree = data.draw(trees(tensors_of(dtype)))
    layout = Layout.of(tree)
    flat = layout.pack(tree, CPU)
    views = layout.views(flat)
    assert flat.numel() == layout.size
    assert_equal(views, tree)
    assert list(dict(leaves(views))) == list(dict(leaves(tree)))
    assert flat.data_ptr() % 64 == 0
    occupied = torch.zeros(layout.size, dtype=torch.int64)
    for view, offset in zip(tensors(views), layout.offsets, strict=True):
        if view.numel():
            assert (view.data_ptr() - flat.data_ptr()) % 64 == 0
        occupied[offset : offset + view.numel()] += 1
    assert (occupied <= 1).all()
    assert int(occupied.sum()) == sum(leaf.numel() for leaf in tensors(tree))


def test_a_packed_buffer_is_a_copy_moved_through_its_views() -> None:
    tree = {"w": torch.ones(3, 2).t(), "b": torch.zeros(2)}
    layout = Layout.of(tree)
    flat = layout.pack(tree, CPU)
    flat.add_(1.0)
    assert_equal(layout.views(flat), {"w": torch.full((2, 3), 2.0), "b": torch.ones(2)})
    assert_equal(tree, {"w": torch.ones(2, 3), "b": torch.zeros(2)})


def test_equal_layouts_are_equal_and_hash_alike() -> None:
    one, other = (Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(k)}) for k in (3, 4))
    assert one == Layout.of({"w": torch.ones(2, 3), "b": torch.ones(3)})
    assert hash(one) == hash(Layout.of({"w": torch.ones(2, 3), "b": torch.ones(3)}))
    assert one != other


def test_trees_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float32.*float64"):
        Layout.of({"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(TypeError, match="'n'"):
        Layout.of({"a": torch.zeros(1), "n": 3})
    with pytest.raises(TypeError):
        Layout.of({})


def test_what_stays_lies_behind_what_moves() -> None:
    tree = {
        "mean": torch.ones(3),
        "w": torch.full((2, 9), 2.0),
        "var": torch.full((5,), 3.0),
        "b": torch.full((4,), 4.0),
    }
    layout = Layout.of(tree, moved={"w", "b"})
    flat = layout.pack(tree, CPU)
    assert layout.moved == ["w", "b"]
    assert_equal(layout.views(flat), tree)
    assert list(layout.leaves(flat[: layout.moving])) == ["w", "b"]
    flat[: layout.moving] = 0
    still = layout.leaves(flat)
    assert_equal({name: still[name] for name in ("mean", "var")}, {name: tree[name] for name in ("mean", "var")})
    assert not still["w"].any()
    assert not still["b"].any()


def test_places_hold_the_leaves_with_their_padding_and_cover_the_buffer() -> None:
    tree = {"a": torch.zeros(3), "b": torch.zeros(2, 20), "c": torch.zeros(0), "d": torch.zeros(16)}
    layout = Layout.of(tree)
    covered = [index for place in layout.places.values() for index in range(place.start, place.stop)]
    assert covered == list(range(layout.size))
    assert {path: place.stop - place.start for path, place in layout.places.items()} == {
        "a": 16,
        "b": 48,
        "c": 0,
        "d": 16,
    }
