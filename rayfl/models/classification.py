"""The contract of a model that classifies."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn


class ClassificationModel(nn.Module):
    """A classifier cut in two: features, then the layers that turn features into logits.

    ``features`` is the input of the first fully connected layer of a convolutional net (FedPHP, section 3.3),
    the last hidden activation of a multilayer perceptron and the last hidden state of a recurrent net.

    Attributes:
        head_module: dotted name of the last linear layer, the head of FedRep, FedPAC, pFedSim, FedBABU and FLOCO.
        classifier_modules: dotted names of the modules that form the classifier block, the larger head that the
            reference code of SuPerFed personalizes; contains ``head_module``.
        feature_channels: channels of the map that ``features`` flattens, channel by channel; None where the features
            are no map, so that each is a channel of its own.
        channels_last: whether images of several channels are laid out channels last for it in training on a CPU:
            convolutions and pooling then read and write whole vectors of the processor. Results differ by round-off.
            The layout is passed on to its maps, of which ``view`` (in place of ``flatten``) refuses some.
        padding: the token that fills texts up, where outputs do not change when columns at the end of a batch that hold
            nothing else are left out, and outputs at each position are left out with them; None: all must be there.
    """

    head_module: str = "head"
    classifier_modules: tuple[str, ...] = ("head",)
    feature_channels: int | None = None
    channels_last: bool = False
    padding: int | None = None

    def chain(self) -> tuple[str, ...]:
        """The dotted names of the linear layers, in order, where the model is no more than these on flattened inputs,
        with ReLU between them, and its features what the last of them reads; else none.

        A model that says so must define this method in its own class: a subclass may compute something else.
        """
        return ()

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Features of shape (b, f) of a batch of inputs (b, *input shape)."""

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Logits of shape (b, C) of a batch of features (b, f)."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (b, C) of a batch of inputs (b, *input shape)."""
        return self.classify(self.features(x))
