"""Sources whose samples are rows of named columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from rayfl.data.sources.base import LABELS, Labels, NaturalPath, Samples
from rayfl.data.sources.columns.files import NamedTable
from rayfl.data.sources.columns.layout import AUTO, Wanted
from rayfl.data.sources.columns.reading import Rows, read_rows
from rayfl.data.sources.columns.tables import Missing
from rayfl.data.sources.preparation.pooled_file import Part
from rayfl.data.sources.remarks import Remark, on_categories, on_columns, on_labels, on_texts, remarks_on
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.sources.targets import IGNORE, WANTED, check_counted, no_pairs
from rayfl.data.sources.targets import Wanted as TargetOption
from rayfl.data.sources.tokens.tokenizers import LEARNED, tokenizer_digest
from rayfl.data.tables import Standardize, TableColumns, TableOptions
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.naming.lists import EACH_ONCE

_CLASSES = ("class", "mask")
_YOUNGER = ("labels", "kind", "tokenizer", "length", "vocabulary", "missing", "padding", "ignore", "group")


class ColumnSource(CopiedSource):
    """What sources of rows with named columns have in common: which columns are what, and what is done to them."""

    x: Annotated[str | tuple[str, ...], EACH_ONCE] = Field(
        default=AUTO,
        description="Column of the inputs, or several with a number or a category (text, true and false) each, in "
        "their order; auto: x, image, img, or all x... columns, which must be numbers; of texts: text or x; of tokens: "
        "tokens, input_ids or x.",
    )
    y: Annotated[str | tuple[str, ...], EACH_ONCE] = Field(
        default=AUTO,
        description="Column of the labels, integers from 0; of several labels and of numbers also several columns, or "
        "one of lists; of survival the columns of the time and of the event, 1 or 0; of masks lists of integers, or "
        "images of classes; auto: y or label (or mask; or time and event), or of several all y... columns that are "
        "numbered.",
    )
    target: TargetOption = Field(default="auto", description=WANTED)
    kind: Literal["auto", "tokens"] = Field(
        default="auto", description="auto: by the columns' types; tokens: the inputs are lists of tokens."
    )
    tokenizer: str | None = Field(
        default=None,
        description="How texts become tokens: words, basic_english or characters, learned from the rows of the split "
        "train (from all, without a division), or a tokenizer.json of the library tokenizers, or a folder with one; "
        "null: the inputs are no texts.",
    )
    length: int | None = Field(
        default=None, ge=1, description="Tokens of a text; longer ones are cut; null: those of the longest."
    )
    vocabulary: int | None = Field(
        default=None,
        ge=3,
        lt=2**31,
        description="Of texts: most tokens that are learned; of tokens: how many there are.",
    )
    padding: int | None = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Of lists of tokens: the one that fills them up; null: all are tokens, and shorter lists are "
        "filled up with another one.",
    )
    missing: Missing = Field(
        default="error",
        description="Missing numbers: error; mean: the mean of the training samples; indicator: that, and a column "
        "that says where.",
    )
    standardize: Standardize = Field(
        default="none",
        description="Numbers of named columns get mean 0 and standard deviation 1 by the moments of the training "
        "samples of all clients (global), or of each client's own (client).",
    )
    labels: Labels = Field(default="as_found", description=LABELS)
    ignore: int | None = Field(default=None, ge=0, description=IGNORE)
    group: str | None = Field(
        default=None,
        description="Column that says of which group of people a row is (a sensitive attribute, such as sex), of "
        "inputs that are named columns; models see it only if x names it, too; null: there is none.",
    )
    client: str = Field(
        default=AUTO, description="Column of the clients' names; auto: client, if there is one; none: pool the samples."
    )
    shape: tuple[int, ...] | None = Field(
        default=None,
        description="Shape of an input, channels first, such as [1, 28, 28]; needed for raw bytes, else null.",
    )
    num_classes: int | None = Field(default=None, ge=1, description="Number of labels; null: the largest label plus 1.")

    _as_trained: bool = PrivateAttr(default=False)
    """Whether the number of classes is that of the clients' samples, and not a user's."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ValueError("shape must be a list of numbers of at least 1")
        if self.kind == "tokens" and self.tokenizer is not None:
            raise ValueError("tokenizer makes tokens of texts, but with kind=tokens they are there: leave one out")
        texts = self.kind == "tokens" or self.tokenizer is not None
        for option in ("length", "vocabulary"):
            if getattr(self, option) is not None and not texts:
                raise ValueError(f"{option} is for texts: set tokenizer, or kind=tokens, or leave it out")
        if self.padding != 0 and self.kind != "tokens":
            raise ValueError("padding is for lists of tokens: set kind=tokens, or leave it out")
        for option in ("missing", "standardize", "shape", "group"):
            if texts and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"{option} is for numbers, and the inputs are texts: leave it out")
        if self.labels == "renumbered" and self.target not in ("auto", *_CLASSES):
            raise ValueError("labels=renumbered is for classes: leave it out")
        return self

    @abstractmethod
    def tables(self) -> Sequence[NamedTable]:
        """Returns what is read, in its order.

        Raises:
            DataError: a file is missing or damaged.
        """

    @property
    @abstractmethod
    def split_column(self) -> str:
        """The column that says ``train`` or ``test``, as :class:`Wanted` has it."""

    def aimed_at(self, target: Target) -> Self:
        """See the base class; raises DataError for labels that are numbered again where none are learned."""
        no_pairs(target)
        found = self.model_copy(update={"target": target}) if self.target == "auto" else self
        if found.ignore is not None and found._learns != "mask":
            raise DataError("dataset.ignore is for masks, and there are none: leave it out")
        if found.group is not None and found._learns != "class":
            raise DataError("dataset.group is for data with a class of each sample, and these have none: leave it out")
        if found.labels == "renumbered" and found._learns not in _CLASSES:
            raise DataError("dataset.labels=renumbered is for classes, and there are none: leave it out")
        return found

    @property
    def _learns(self) -> Target:
        return "class" if self.target == "auto" else self.target

    def _choices(self) -> Mapping[str, Any]:
        # Younger options are left out at their defaults, so that copies from before are found; moments need no copy.
        younger = {name for name in _YOUNGER if getattr(self, name) == type(self).model_fields[name].default}
        younger |= {"target"} if self._learns == "class" else set()
        options = self.model_dump(mode="json", exclude={"root", "path", "paths", "standardize", *younger})
        if self.standardize != "none":
            options["named"] = True
        if (digest := tokenizer_digest(self.tokenizer)) is not None:
            options["tokenizer_sha256"] = digest
        if self.kind == "tokens" or self.tokenizer is not None:
            # The file says what padding is; and, if tokens are learned, of texts that may be tested on.
            options["form"] = 3 if self.tokenizer in LEARNED else 2
        return options

    def _table(self, columns: TableColumns) -> TableOptions:
        return TableOptions(columns, self.standardize, self.missing == "indicator")

    def _other_part(self, part: Part, opened: Samples | NaturalPath) -> Self:
        num_classes = self.num_classes
        if isinstance(opened, Samples) and self._learns in _CLASSES:
            num_classes = opened.spec.num_classes
        other = self.model_copy(update={"part": part, "num_classes": num_classes})
        other._as_trained = num_classes != self.num_classes
        return other

    @property
    def _wanted(self) -> Wanted:
        named = self.standardize != "none" or self.missing != "error" or self.group is not None
        return Wanted(
            self.client, self.split_column, self.x, self.y, self._learns, self.kind == "tokens", self.tokenizer,
            self.length, self.vocabulary, self.padding, self.missing, named, self.ignore, self.group,
        )  # fmt: skip

    def _rows(self) -> Rows:
        return read_rows(self.tables(), self._wanted, self.shape, self.labels == "renumbered")

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        if rows.vocabulary:
            found = on_texts(rows.cut, rows.inner, rows.x.shape)
            divided = rows.splits is not None and rows.clients is not None  # else holdout draws what is tested on
            if self.tokenizer in LEARNED and not divided and self.part != "test":
                found.append(_on_held_out(self.tokenizer))
            return found
        notes = list(map(Remark, rows.notes))
        found = [
            *notes,
            *on_columns(rows.unused),
            *([] if rows.table is None else on_categories(rows.table, len(rows.x))),
        ]
        if self._learns not in _CLASSES:
            return found
        counted = self.num_classes is None and rows.known_classes is None
        if rows.table is not None:
            return [*found, *on_labels(rows.y, num_classes, counted)]
        return [*notes, *remarks_on(rows.x, rows.y, num_classes, counted, rows.integers, rows.unused)]

    def _num_classes(self, rows: Rows) -> int:
        if self._learns not in _CLASSES:
            if self.num_classes is not None:
                raise DataError("dataset.num_classes is for classes, and there are none: leave it out")
            return 0
        needed = max(int(rows.y.max()), 0) + 1 if self.labels == "as_found" else rows.num_labels
        if self.num_classes is not None and needed > self.num_classes:
            if self._as_trained:
                raise DataError(
                    f"evaluation.official_test: there is a label {needed - 1} in the split {self.part}, but those of "
                    f"the clients' samples make {self.num_classes} classes: set dataset.num_classes={needed}, or leave "
                    "the option out"
                )
            found = f"there are {needed} labels"
            if self.labels == "as_found":
                found = f"there is a label {needed - 1}; labels are integers from 0, or any with labels=renumbered"
                if self._learns == "mask":
                    found += ", and dataset.ignore for pixels that do not count"
            raise DataError(f"dataset.num_classes is {self.num_classes}, but {found}")
        if self.labels == "renumbered":
            return self.num_classes or needed
        known = rows.known_classes or 0
        if not (self.num_classes or known) and self._learns == "class" and rows.clients is None:
            check_counted(rows.y, ", ".join(map(str, self.files)))
        return self.num_classes or max(needed, known)


def _on_held_out(tokenizer: str | None) -> Remark:
    return Remark(
        f"dataset.tokenizer={tokenizer} learns its tokens before holdout draws validation and test samples, and from "
        "these too: give clients and a column split (train, test), whose test rows are not looked at, or a "
        "tokenizer.json, if tests may have no part in that"
    )
