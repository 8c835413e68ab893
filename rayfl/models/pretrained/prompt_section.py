"""The texts by which CLIP tells classes, and what of them is trained: the section ``model.prompt``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.naming.lists import EACH_ONCE
from rayfl.naming.texts import Checksum

PLACE = "{}"
"""Stands for the name of a class in a template."""

LENGTH = 16
"""Context vectors unless another number is asked for, as in CoOp."""


class PromptConfig(BaseModel):
    """The classes' texts. A context is vectors in the place of the words before a class's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: Annotated[tuple[Annotated[str, Field(min_length=1)], ...] | None, EACH_ONCE] = Field(
        default=None,
        description="Names of the classes, in the order of their numbers; underscores stand for blanks; null: the "
        "data's own names, where these have some.",
    )
    template: str = Field(
        default="a photo of a {}.", description="What is said of a class: a text with {} in the place of its name."
    )
    context: Literal["none", "shared", "by_class"] = Field(
        default="shared",
        description="What is trained in the place of the template's words before the name: nothing, so that texts are "
        "the template's; vectors that all classes have in common; or vectors of each class.",
    )
    length: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description=f"How many vectors a context has; null: {LENGTH}, or with start=template as many as its words have "
        "tokens.",
    )
    start: Literal["drawn", "template"] = Field(
        default="drawn",
        description="What a context is at first: drawn from the seed, normal with standard deviation 0.02; or the "
        "embeddings of the template's words before the name.",
    )
    sha256: Checksum | None = Field(
        default=None,
        description="Checksum of the tokens that the texts are made of: found out and recorded, and what results "
        "depend on.",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> PromptConfig:
        if self.template.count(PLACE) != 1:
            raise ValueError(f"template must have {PLACE} once, in the place of the class's name")
        if self.context == "none" and (self.length is not None or self.start != "drawn"):
            raise ValueError("length and start are of a context, and context=none has none: leave them out")
        if self.start == "template":
            if self.length is not None:
                raise ValueError("a context that starts as the template's words has as many tokens: leave length out")
            if self.template.startswith(PLACE):
                raise ValueError("start=template needs words before the name in template")
        return self

    @property
    def drawn(self) -> int | None:
        """How many context vectors are drawn; 0 without a context, None where the template's words say how many."""
        if self.context == "none":
            return 0
        return None if self.start == "template" else self.length or LENGTH

    def text_of(self, name: str) -> str:
        """What is said of a class."""
        return self.template.replace(PLACE, self.spoken(name))

    @staticmethod
    def spoken(name: str) -> str:
        """A class's name as a text has it."""
        return name.replace("_", " ")
