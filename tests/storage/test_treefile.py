"""Trees as files: what is read is what was written."""

from __future__ import annotations

import json
import math
import tracemalloc
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayfl.engine.updates.flat import Layout
from rayfl.errors import RunError
from rayfl.params import leaves
from rayfl.storage.treefile import dumps, loads
from tests.support.toys import assert_equal

KEYS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=4)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]


@st.composite
def tensors_of_any_type(draw: Any) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return (10 * torch.randn(shape, generator=generator)).to(draw(st.sampled_from(DTYPES)))


LEAVES = st.one_of(tensors_of_any_type(), st.integers(), st.floats(allow_nan=False), st.booleans())
TREES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=8), max_size=4
)


def assert_identical(left: Any, right: Any) -> None:
    """Equal values, types, order of keys and empty branches."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_identical(left[key], right[key])
    elif isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    else:
        assert left == right


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_round_trip(tree: dict[str, Any]) -> None:
    assert_identical(loads(dumps(tree), "tree"), tree)


@given(TREES)
def test_equal_trees_give_equal_files(tree: dict[str, Any]) -> None:
    assert dumps(tree) == dumps(loads(dumps(tree), "tree"))


def test_special_numbers() -> None:
    tree = {"nan": math.nan, "infinity": -math.inf, "tiny": 5e-324, "third": 1 / 3, "large": 2**80, "zero": -0.0}
    back = loads(dumps(tree), "tree")
    assert math.isnan(back.pop("nan"))
    tree.pop("nan")
    assert_identical(back, tree)
    assert math.copysign(1, back["zero"]) == -1


def test_special_tensors() -> None:
    tree = {
        "w": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
    }
    assert_identical(loads(dumps(tree), "tree"), tree)


def test_lazily_conjugated_and_negated_tensors() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    found = loads(dumps({"conjugated": numbers.conj(), "negated": torch._neg_view(numbers.real.clone())}), "tree")
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negated"].tolist() == [-1, -3]


def test_leaves_that_share_memory() -> None:
    whole = torch.arange(12.0)
    shared = {
        "whole": whole,
        "again": {"whole": whole},
        "overlapping": whole[3:8],
        "inside": whole[4:6],
        "transposed": whole.view(3, 4).t(),
        "apart": whole[8:],
    }
    back = loads(dumps(shared), "tree")
    assert_equal(back, shared)
    assert len({leaf.data_ptr() for _, leaf in leaves(back)}) == len(shared)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
              torch.uint8, torch.bool],
    ids=str,
)  # fmt: skip
def test_files_written_by_way_of_numpy_are_those_of_the_library_for_pytorch(dtype: torch.dtype) -> None:
    tensors = {"b": torch.ones(3, 2).to(dtype), "a": torch.zeros(()).to(dtype), "none": torch.zeros(0, 4).to(dtype)}
    data = dumps(tensors)
    with_bfloat16 = {**tensors, "wide": torch.ones(2, dtype=torch.bfloat16)}  # NumPy has no such type
    assert_equal(loads(dumps(with_bfloat16), "tree"), with_bfloat16)
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size])["__metadata__"]
    assert data == safetensors.torch.save(tensors, metadata=metadata)


def test_views_of_one_buffer() -> None:
    tree = {"a": torch.randn(3), "b": torch.randn(20), "c": torch.zeros(0)}
    layout = Layout.of(tree)
    assert_equal(loads(dumps(layout.views(layout.pack(tree, torch.device("cpu")))), "tree"), tree)


def test_what_is_read_lies_like_fresh_tensors_and_may_be_changed() -> None:
    """An unaligned operand may change the last bit of a product, and a resumed run must not differ in it."""
    tree = {"a": torch.randn(3), "b": torch.randn(7), "c": torch.randn(5).double(), "d": torch.randn(64)}
    data = dumps(tree)
    back = loads(data, "tree")
    for _, leaf in leaves(back):
        assert leaf.data_ptr() % 64 == 0
        leaf.add_(1.0)
    assert_equal(loads(data, "tree"), tree)


class CopiedBytes(TorchDispatchMode):
    """Adds up what is copied, and notes the most that was there with what Python holds.

    Attributes:
        copied: bytes.
        most: bytes of Python's objects and of copies at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.clone.default:
            self.copied += found.nbytes
            self.most = max(self.most, self.copied + tracemalloc.get_traced_memory()[0])
        return found


def test_reading_holds_no_third_copy() -> None:
    """The content, its tensors, and one of these twice while it is copied."""
    each, count = 1 << 20, 16
    data = dumps({str(client): {"w": torch.zeros(each // 4)} for client in range(count)})
    with CopiedBytes():
        loads(data, "tree")  # the first use of such a mode imports much
    tracemalloc.start()
    try:
        with CopiedBytes() as copies:
            loads(data, "tree")
        most = max(copies.most, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert copies.copied == count * each
    assert count * each < most < (count + 2) * each  # the content was there before


def test_the_graph_is_left_behind() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not loads(dumps({"w": weight * 2}), "tree")["w"].requires_grad


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {3: torch.ones(1)}}, "got 3 below 'a/'"),
        ({"a/b": 1.0}, "got 'a/b' below '/'"),
        ({"a": {"b": "text"}}, "'a/b' is a str"),
        ({"a": None}, "'a' is a NoneType"),
        ({"a": [1, 2]}, "'a' is a list"),
        ({"__metadata__": torch.ones(1)}, "a name of the file format's own"),
    ],
    ids=["number_as_key", "slash_in_key", "text", "none", "list", "name_of_the_format"],
)
def test_what_could_not_be_read_back_is_refused(tree: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dumps(tree)


GOOD = dumps({"w": torch.ones(3), "n": 1})


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8, GOOD[:7], GOOD[:40], GOOD[:-1], b"x" * 200, GOOD.replace(b"order", b"other")],
    ids=["empty", "zeros", "no_header", "half_a_header", "cut", "text", "foreign"],
)
def test_a_damaged_file_is_named(data: bytes) -> None:
    with pytest.raises(RunError, match=r"commits/server-000003\.safetensors is damaged"):
        loads(data, "commits/server-000003.safetensors")
