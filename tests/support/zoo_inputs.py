"""Inputs of the zoo's models."""

from __future__ import annotations

from rayfl.examples import InputSpec


def image(channels: int, side: int, classes: int) -> InputSpec:
    return InputSpec("image", (channels, side, side), classes)


def text(vocabulary: int) -> InputSpec:
    return InputSpec("tokens", (80,), vocabulary, vocabulary=vocabulary)
