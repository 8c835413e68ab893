"""A user's own data, made by a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.data.federated import FederatedDataset
from rayfl.data.files.content import checksum
from rayfl.data.soundness import check_inputs
from rayfl.data.sources.base import LABELS, Labels, Samples, Source
from rayfl.data.sources.remarks import Remark, on_texts, remarks_on
from rayfl.data.sources.targets import WANTED, Wanted, as_targets, check_masks, count_of, mask_classes, no_pairs, ranked
from rayfl.data.sources.tokens.tokenizers import PADDING
from rayfl.errors import DataError, RayflError, text_of
from rayfl.examples import InputSpec, Target
from rayfl.naming.objects import as_custom, import_object
from rayfl.naming.texts import ObjectPath
from rayfl.randomness import RandomStreams


class CustomSource(Source):
    """Configuration of your own data, made by a function that is named as my_package.my_module:function.

    The function is called with the experiment's :class:`~rayfl.randomness.RandomStreams` (or, if its parameter is
    called ``seed``, with the experiment's seed) in every process, and must return the same every time: arrays
    (x, y, num_classes), (x, y, num_classes, clients), a :class:`~rayfl.data.sources.base.Samples`, or a
    :class:`~rayfl.data.federated.FederatedDataset`. x is float32, or uint8 standing for x / 255, of shape (N, ...), or
    int32 or int64 for tokens, of shape (N, T), padded with 0, or a pair of tokens and lengths, integers of shape (N,),
    where 0 is a token, too, and what is behind a text's length is not looked at; y are integers of shape (N,), and what
    other tasks learn from (``target``); clients are N names or numbers. Of several labels, of numbers and of survival
    num_classes may be None.
    """

    name: Literal["custom"] = Field(default="custom", description="Your own function.")
    function: ObjectPath = Field(
        description="The function, as my_package.my_module:function; it may also stand in the place of the name."
    )
    labels: Labels = Field(default="as_found", description=LABELS)
    target: Wanted = Field(default="auto", description=WANTED)
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="How many distinct tokens there are, where x holds some (int64); null: it holds none, or, for a "
        "language model, the largest plus 1.",
    )

    def aimed_at(self, target: Target) -> CustomSource:
        """See the base class."""
        return self.model_copy(update={"target": target}) if self.target == "auto" else self

    def open(self, streams: RandomStreams) -> Samples | FederatedDataset:
        """Returns what the function returns, checked.

        Raises:
            ConfigError: the function cannot be imported.
            DataError: it fails or returns something else.
        """
        function = import_object(self.function, "dataset")
        try:
            made = function(streams.seed if _wants_seed(function) else streams)
        except RayflError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise DataError(f"dataset {self.function} fails: {type(error).__name__}: {text_of(error)}") from error
        if isinstance(made, FederatedDataset | Samples):
            kind = "Samples" if isinstance(made, Samples) else "FederatedDataset"
            for option in ("labels", "vocabulary"):
                if (value := getattr(self, option)) != type(self).model_fields[option].default:
                    raise DataError(
                        f"dataset.{option} is {value}, but {self.function} returned a {kind}, which is used as it is: "
                        "leave the option out"
                    )
            return self._looked_at(made) if isinstance(made, Samples) else made
        if not isinstance(made, tuple) or len(made) not in (3, 4):
            raise DataError(
                f"dataset {self.function} returned a {type(made).__name__}; needed are (x, y, num_classes), "
                "(x, y, num_classes, clients), a Samples or a FederatedDataset"
            )
        return self._samples(*made)

    def _looked_at(self, made: Samples) -> Samples:
        """Samples whose inputs, clients and domains are sound; their types, shapes and targets are checked later."""
        whose = f"dataset {self.function}"
        for what, array in (("x", made.x), ("y", made.y)):
            if not isinstance(array, np.ndarray) or not array.ndim:
                raise DataError(f"{whose}: {what} of Samples is a {type(array).__name__}; needed is a NumPy array")
        count = len(made.x)
        names = None if made.clients is None else _names(made.clients, count, whose)
        x = np.asarray(made.x)
        if made.table is None and x.dtype.kind == "f":  # in tables NaN stands for what is missing
            self._check_finite(x, names)
        if made.spec.kind == "tokens" and x.dtype.kind in "iu":
            check_inputs(torch.from_numpy(x.astype(np.int64)), made.spec, whose)
        if made.spec.kind == "graph" and x.dtype == np.float32 and x.shape[1:] == made.spec.shape:
            check_inputs(torch.from_numpy(x), made.spec, whose)
        if made.domain is not None:
            made = replace(made, domain=_positions(made.domain, count, made.domains, "domain", "domains", whose))
        if made.group is not None or made.spec.groups:
            made = replace(made, group=_positions(made.group, count, made.spec.groups, "group", "spec.groups", whose))
        return replace(made, clients=names)

    def _samples(self, x: Any, y: Any, num_classes: Any, clients: Any = None) -> Samples:
        whose = f"dataset {self.function}"
        target: Target = "class" if self.target == "auto" else self.target
        no_pairs(target)
        lengths = None
        if isinstance(x, tuple):
            if len(x) != 2:
                raise DataError(f"{whose}: x is a tuple of {len(x)}; needed is an array, or tokens and their lengths")
            x, lengths = x
        x, y = (_as_array(value, f"{whose}: {name}") for name, value in (("x", x), ("y", y)))
        if not x.shape or not len(x):
            raise DataError(f"{whose}: x has the shape {x.shape}: there are no samples")
        said = self.vocabulary is not None or target == "tokens" or lengths is not None
        tokens = said and x.ndim == 2 and x.dtype in (np.int32, np.int64)
        if x.ndim < 2 or (x.dtype not in (np.uint8, np.float32, np.float64) and not tokens):
            raise DataError(
                f"{whose}: x has the type {x.dtype} and the shape {x.shape}; needed are uint8 or float32 and (N, ...), "
                "or for tokens int64 and (N, T), with dataset.vocabulary"
            )
        if self.vocabulary is not None and not tokens:
            raise DataError(
                f"{whose}: dataset.vocabulary is {self.vocabulary}, but x has the type {x.dtype} and the shape "
                f"{x.shape}: return tokens, int64 of shape (N, T), or leave the option out"
            )
        if self.labels == "renumbered" and target not in ("class", "mask"):
            raise DataError(f"{whose}: dataset.labels=renumbered is for classes, and there are none: leave it out")
        names = None if clients is None else _names(clients, len(x), whose)
        y = as_targets(y, target, f"{whose}: y", len(x), names)
        count = count_of(num_classes, y, target, whose)
        if target == "mask":
            y = self._masks(x, y, count, names)
        if x.dtype == np.float64:
            with np.errstate(over="ignore"):  # what is too large is named below
                x = x.astype(np.float32)
        self._check_finite(x, names)
        spec = InputSpec("image", x.shape[1:], count, target=target)
        remarks: Callable[[], Sequence[Remark]] = tuple
        if tokens:
            x, vocabulary, padding = self._tokens(x, lengths, names)
            spec = InputSpec("tokens", x.shape[1:], count, vocabulary, target, padding)
            remarks = partial(_on_rows, x, padding)
        if target == "class":
            y = self._numbered(y, count, names)
        if target in ("class", "mask") and not tokens:
            remarks = partial(remarks_on, x, y, count, counted=False, integers=False)
        return Samples(x, y, spec, names, remarks=remarks, content=partial(checksum, x, y, names))

    def _tokens(self, x: np.ndarray, lengths: Any, names: np.ndarray | None) -> tuple[np.ndarray, int, int]:
        """Rows that are filled up, how many distinct tokens there are then, and the one that fills up."""
        if lengths is None:
            return x, self._vocabulary(x), PADDING
        whose = f"dataset {self.function}: lengths"
        lengths = _as_array(lengths, whose)
        if lengths.dtype.kind not in "iu" or lengths.shape != x.shape[:1]:
            raise DataError(
                f"{whose} have the type {lengths.dtype} and the shape {lengths.shape}; needed is an integer for each "
                f"of the {len(x)} texts"
            )
        wrong = np.flatnonzero((lengths < 0) | (lengths > x.shape[1]))
        if wrong.size:
            raise DataError(
                f"{whose}: that of sample {wrong[0]}{_owner(names, int(wrong[0]))} is {lengths[wrong[0]]}, but rows "
                f"have {x.shape[1]} tokens"
            )
        within = np.arange(x.shape[1]) < lengths[:, np.newaxis]
        count = self._vocabulary(np.where(within, x, 0))
        return np.where(within, x, count), count + 1, count

    def _vocabulary(self, x: np.ndarray) -> int:
        least, most = (int(x.min()), int(x.max())) if x.size else (0, 0)
        if least < 0 or most >= (self.vocabulary or most + 1):
            bound = "" if self.vocabulary is None else f" and below dataset.vocabulary={self.vocabulary}"
            raise DataError(
                f"dataset {self.function}: tokens run from {least} to {most}; they must be at least 0{bound}"
            )
        return self.vocabulary or most + 1

    def _check_finite(self, x: np.ndarray, names: np.ndarray | None) -> None:
        if x.dtype.kind in "iu" or np.isfinite(x).all():
            return
        sample = int(np.argmax(~np.isfinite(x.reshape(len(x), -1)).all(axis=1)))
        raise DataError(
            f"dataset {self.function}: x of sample {sample}{_owner(names, sample)} holds a value that is not finite in "
            "float32: remove the sample, or mend it"
        )

    def _masks(self, x: np.ndarray, y: np.ndarray, num_classes: int, names: np.ndarray | None) -> np.ndarray:
        whose = f"dataset {self.function}"
        present = mask_classes(y, f"{whose}: y")
        if self.labels == "renumbered":
            self._check_count(present, num_classes)
            y = ranked(y, present)
        check_masks(x, y, num_classes, whose, names)
        return y

    def _check_count(self, present: np.ndarray, num_classes: int) -> None:
        if len(present) > num_classes:
            raise DataError(
                f"dataset {self.function}: num_classes is {num_classes}, but there are {len(present)} different labels"
            )

    def _numbered(self, y: np.ndarray, num_classes: int, names: np.ndarray | None) -> np.ndarray:
        if self.labels == "as_found":
            outside = np.flatnonzero((y < 0) | (y >= num_classes))
            if outside.size:
                sample = int(outside[0])
                raise DataError(
                    f"dataset {self.function}: y of sample {sample}{_owner(names, sample)} is {y[sample]}, but with "
                    f"num_classes={num_classes} labels are 0 to {num_classes - 1}: return as many classes as there "
                    "are, or set dataset.labels=renumbered"
                )
            return y
        present, numbers = np.unique(y, return_inverse=True)
        self._check_count(present, num_classes)
        return numbers.astype(np.int64)


def _as_array(value: Any, whose: str) -> np.ndarray:
    """An array or a tensor, or lists of equal shapes, as an array."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    try:
        return np.asarray(value)
    except ValueError as error:  # of lists, when numpy finds no common shape
        sizes = [len(one) if isinstance(one, Sized) else 0 for one in value]
        other = next((place for place, size in enumerate(sizes) if size != sizes[0]), None)
        found = str(error) if other is None else f"sample {other} has {sizes[other]} values, but sample 0 {sizes[0]}"
        raise DataError(f"{whose}: {found}; give all samples the same shape") from error


def _names(clients: Any, count: int, whose: str) -> np.ndarray:
    """Returns whose each sample is; raises DataError unless that is known of all."""
    names = np.asarray(clients)
    if names.shape != (count,):
        raise DataError(
            f"{whose}: clients have the shape {names.shape}; needed is a name or number for each of {count} samples"
        )
    if names.dtype.kind not in "biu":
        # as given: among texts NumPy turns NaN into one
        given = np.asarray(clients, dtype=object)
        for sample, name in enumerate(given):
            if name is None or name == "" or (isinstance(name, float | np.floating) and np.isnan(name)):
                shown = repr(name) if name == "" else name
                raise DataError(f"{whose}: the client of sample {sample} is {shown}: name it, or remove the sample")
        if names.dtype.kind == "U" and (other := [name for name in given if not isinstance(name, str)]):
            # NumPy has made texts of them: 1 and "1" would be one client
            raise DataError(
                f"{whose}: clients are named by texts and by others, such as {other[0]!r}: name all by texts, or by "
                "integers"
            )
        try:
            np.unique(names)
        except TypeError as error:
            raise DataError(
                f"{whose}: clients cannot be sorted ({error}): name all by texts, or by integers"
            ) from error
    return names


def _positions(values: Any, count: int, names: Sequence[str], what: str, where: str, whose: str) -> np.ndarray:
    """Returns positions among names, one for each sample, int64; raises DataError unless they are that."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu" or found.shape != (count,) or ((found < 0) | (found >= len(names))).any():
        raise DataError(
            f"{whose}: {what} has the type {found.dtype} and the shape {found.shape}; needed is an integer for each of "
            f"the {count} samples, a position among the {len(names)} names in {where}"
        )
    return found.astype(np.int64)


def _owner(names: np.ndarray | None, sample: int) -> str:
    return "" if names is None else f" (client {str(names[sample])!r})"


def _on_rows(x: np.ndarray, padding: int) -> list[Remark]:
    tokens = x != padding
    lengths = (tokens * np.arange(1, x.shape[1] + 1)).max(axis=1)
    return on_texts(0, int((tokens.sum(1) < lengths).sum()), x.shape, "let the function return (tokens, lengths)")


def _wants_seed(function: Any) -> bool:
    try:
        return next(iter(inspect.signature(function).parameters), None) == "seed"
    except (TypeError, ValueError):
        return False


def data_named_by_object(content: Any) -> Any:
    """``{name: my_module:f}`` as ``{name: custom, function: my_module:f}``; everything else as it is."""
    return as_custom(content, "function")
