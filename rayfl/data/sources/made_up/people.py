"""Two groups of people whose labels follow different rules, made up from the seed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_Share = Annotated[float, Field(ge=0, le=1)]


class SyntheticGroupsSource(MadeUpSource):
    """Vectors of a majority and a minority with one of two labels each, which the groups do not have equally often.

    A sample x ~ N(s 1/sqrt(D), I) of the minority, or N(0, I) of the majority, has the score x . w_a + e, with e ~
    N(0, noise^2), w_a of length 1, and the cosine of the two groups' w_a ``likeness``. In each group the highest scores
    have the label 1, less often in the minority: a model that knows the group, or guesses it from the shift s, predicts
    1 less often for it, even where its labels are 1. A partition divides the samples, such as one by group.
    """

    amounts: ClassVar[tuple[str, ...]] = ("samples", "dimension")

    name: Literal["synthetic_groups"] = Field(
        default="synthetic_groups", description="Made-up people of two groups, with labels of two classes."
    )
    samples: int = Field(default=4000, ge=10, description="Number of samples.")
    dimension: int = Field(default=10, ge=2, description="Numbers in one input, without the group.")
    minority: float = Field(default=0.3, gt=0, lt=1, description="Share of the samples that are of the minority.")
    positive: tuple[_Share, _Share] = Field(
        default=(0.5, 0.2), description="Shares of the majority and of the minority that have the label 1."
    )
    likeness: float = Field(
        default=0.8, ge=-1, le=1, description="How alike the groups' labels are: 1, the same rule; 0, unrelated ones."
    )
    noise: float = Field(default=1.0, ge=0, le=1e6, description="How much of the score inputs do not say.")
    shift: float = Field(default=1.0, ge=0, le=1e6, description="How far the groups' inputs are apart.")
    group_input: bool = Field(default=True, description="Whether inputs have one more number, 1 for the minority.")

    @property
    def least_bytes(self) -> int:
        return self.samples * (4 * self.dimension + 16)

    def open(self, streams: RandomStreams) -> Samples:
        """All samples, in random order: x float32 of shape (N, dimension); uses the stream ``synthetic``."""
        self.check_room()
        generator = streams.generator("synthetic")
        count = min(max(round(self.minority * self.samples), 1), self.samples - 1)
        group = generator.permutation((np.arange(self.samples) < count).astype(np.int64))
        first, second = generator.normal(size=(2, self.dimension))
        first /= np.sqrt((first**2).sum())
        second -= (second * first).sum() * first
        second /= np.sqrt((second**2).sum())
        rules = np.stack([first, self.likeness * first + np.sqrt(1 - self.likeness**2) * second])
        x = generator.normal(size=(self.samples, self.dimension))
        x += group[:, np.newaxis] * self.shift / np.sqrt(self.dimension)
        # Without BLAS, whose sums depend on its number of threads: all processes have to find the same labels.
        scores = np.einsum("nd,nd->n", x, rules[group]) + self.noise * generator.normal(size=self.samples)
        y = np.zeros(self.samples, dtype=np.int64)
        for number, share in enumerate(self.positive):
            own = np.flatnonzero(group == number)
            y[own[np.argsort(-scores[own], kind="stable")[: round(share * len(own))]]] = 1
        if self.group_input:
            x = np.concatenate([x, group[:, np.newaxis]], axis=1)
        spec = InputSpec("image", (x.shape[1],), 2, groups=("majority", "minority"))
        return Samples(x.astype(np.float32), y, spec, group=group)
