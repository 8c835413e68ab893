"""What a client has to learn from: its samples by split, those without labels, and public ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rayfl.examples import UNLABELLED, Examples


class ClientSamples:
    """A client's samples, on the device.

    Args:
        examples: by split; under ``unlabelled`` those without labels, where there are some.
        public: gives the public samples; None where there are none.
    """

    def __init__(self, examples: Mapping[str, Examples], public: Callable[[], Tensor] | None) -> None:
        self._examples = examples
        self._public = public

    @property
    def num_samples(self) -> int:
        """n_k, the number of the client's training samples; of those that have labels, where some have none."""
        return len(self._examples["train"])

    @property
    def num_unlabelled(self) -> int:
        """Returns the number of the client's training samples without labels (section ``labelled``)."""
        return len(self.unlabelled())

    def examples(self, split: str = "train") -> Examples:
        """The client's samples of a split (``train`` or ``validation``), on the device."""
        return self._examples[split]

    def unlabelled(self) -> Examples:
        """Returns the client's training samples without labels, whose ``y`` is -1, on the device; may be empty."""
        return self._examples[UNLABELLED]

    def public(self) -> Tensor:
        """The unlabelled samples that belong to no client (``holdout.public``), on the device; the same for all."""
        if self._public is None:
            raise RuntimeError("there are no public samples here")
        return self._public()
