"""Whether samples are what models can read, before they reach a device.

An index out of range is an error of one client on a CPU. On a GPU it ends the context of the process.
"""

from __future__ import annotations

from torch import Tensor

from rayfl.data.federated import Examples, InputSpec
from rayfl.errors import DataError


def check_examples(examples: Examples, spec: InputSpec, whose: str, first: int = 0) -> None:
    """Makes sure that samples fit what their data set says of them.

    Args:
        examples: on the CPU.
        spec: of the data set.
        whose: what to call them in messages.
        first: the number of the first sample.

    Raises:
        DataError: naming the sample.
    """
    if len(examples.x) != len(examples.y):
        raise DataError(f"{whose}: {len(examples.x)} samples have {len(examples.y)} labels")
    _check_range(examples.y, spec.num_classes, f"{whose}: the label", "classes", first)
    check_inputs(examples.x, spec, whose, first)


def check_inputs(x: Tensor, spec: InputSpec, whose: str, first: int = 0) -> None:
    """Makes sure that tokens are in range; arguments and errors as for :func:`check_examples`."""
    if spec.kind == "tokens":
        _check_range(x, spec.vocabulary, f"{whose}: a token", "tokens", first)


def _check_range(indices: Tensor, count: int, what: str, kind: str, first: int) -> None:
    if not indices.numel():
        return
    least, most = (int(bound) for bound in indices.aminmax())
    if least >= 0 and most < count:
        return
    wrong = (indices < 0) | (indices >= count)
    place = tuple(int(axis[0]) for axis in wrong.nonzero(as_tuple=True))
    raise DataError(
        f"{what} of sample {first + place[0]} is {int(indices[place])}, but the data set has {count} {kind}, numbered "
        f"from 0"
    )
