"""What a method says about the privacy of its clients' samples (``privacy.example_clip_norm``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rayfl.engine.updates.settings import TrainConfig

_UNCHECKED = (
    "all that clients send must come from their samples by noised training alone, and nobody has checked that of "
    "this method (no_example_privacy)"
)


_UNSAID = (
    "nobody has said of this method that its clients send the received model after one training on their loss alone "
    "(no_gradient)"
)


class SamplesOfClients:
    """The part of a method's contract that the privacy of samples, and attacks on it, need.

    Class attributes:
        no_example_privacy: why what clients send cannot be made private by noised training (``Client.train``) alone;
            empty where it can. A class that says nothing itself is refused, whatever it derives from.
        no_gradient: why what clients send is no sum of gradients of their loss, of which the first is at the received
            model (``rayfl invert``); empty where it is. Here too, each class speaks for itself.
        written_as: of a class that a configuration has made of a user's, to have its path for a name: the user's.
    """

    written_as: ClassVar[type | None] = None
    no_example_privacy: ClassVar[str] = _UNCHECKED
    no_gradient: ClassVar[str] = _UNSAID

    def why_no_example_privacy(self) -> str:
        """Returns why samples cannot be private with the method as it is configured; empty where they can."""
        own: str | None = self._said("no_example_privacy")
        if own is not None:
            return own
        sent = getattr(self, "no_privacy", "")  # where clients send more than a model, that is where to begin
        return f"{_UNCHECKED}: {sent}" if sent else _UNCHECKED

    def why_no_gradient(self) -> str:
        """Returns why a client's message tells no gradient of its loss; empty where it does."""
        own = self._said("no_gradient")
        return str(getattr(self, "no_privacy", "") or (_UNSAID if own is None else own))

    def _said(self, name: str) -> str | None:
        """Returns what the class itself says under a name; None if it says nothing."""
        found: str | None = vars(self.written_as or type(self)).get(name)
        return found

    def noised_batches(self, train: TrainConfig, samples: int) -> Mapping[int, int]:
        """Returns how many mini-batches a client draws for a round's training at most, by the steps on each.

        Args:
            train: the section.
            samples: n_k.
        """
        return {1: train.steps_of(samples)}

    def rounds_of_everybody(self, rounds: int) -> int:
        """Returns in how many of the first rounds every client trains as much again, sampled or not."""
        return 0
