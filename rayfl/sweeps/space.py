"""The overrides of a sweep: lists, ranges and distributions in place of single values.

``algorithm=fedavg,superfed``, ``seed=0:5`` and ``train.lr=log(0.001, 0.1)`` span a space of points, each of which is
the overrides of one experiment.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from rayfl.config.overrides import refuse_undone
from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams

_RANGE = re.compile(r"^(-?\d+):(-?\d+)(?::(\d+))?$")
_CALL = re.compile(r"^(log|uniform|choice)\((.*)\)$", re.DOTALL)
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""A number for Python and for YAML 1.2, but a text for the YAML 1.1 of PyYAML where it lacks a point or a sign."""
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_DIGITS = 6
_LARGEST = 100_000
_PLACES = ("name", "storage_path", "cluster")

Kind = Literal["log", "uniform", "choice"]


@dataclass(frozen=True)
class Draw:
    """A value drawn at random, once per sample.

    Attributes:
        kind: ``log`` (uniform in the logarithm), ``uniform`` or ``choice``.
        arguments: the two ends, or what is chosen from.
    """

    kind: Kind
    arguments: tuple[Any, ...]

    def value(self, streams: RandomStreams, path: str, sample: int) -> Any:
        """A function of (seed, path, sample) alone; numbers have six digits, so that they can be copied."""
        generator = streams.generator(f"sweep.{path}", sample)
        if self.kind == "choice":
            return self.arguments[int(generator.integers(len(self.arguments)))]
        low, high = self.arguments
        if self.kind == "log":
            return float(f"{math.exp(generator.uniform(math.log(low), math.log(high))):.{_DIGITS}g}")
        return float(f"{generator.uniform(low, high):.{_DIGITS}g}")


@dataclass(frozen=True)
class Space:
    """What a sweep runs through.

    Attributes:
        axes: by path, in the order they were given: a tuple of values (one for a plain override), or a draw.
    """

    axes: dict[str, tuple[Any, ...] | Draw]

    @property
    def varied(self) -> tuple[str, ...]:
        """The paths that have more than one value."""
        return tuple(path for path, axis in self.axes.items() if isinstance(axis, Draw) or len(axis) > 1)

    @property
    def random(self) -> tuple[str, ...]:
        """The paths whose values are drawn."""
        return tuple(path for path, axis in self.axes.items() if isinstance(axis, Draw))

    def points(self, samples: int | None, seed: int) -> list[dict[str, Any]]:
        """The overrides of every experiment: each sample of the random values with each combination of the others.

        So seeds, and methods, are compared at the same random values.

        Args:
            samples: how often random values are drawn; None without any.
            seed: of the draws; more samples of one seed begin with the fewer.

        Raises:
            ConfigError: random values without a number of samples or the reverse, or too many points.
        """
        if self.random and samples is None:
            raise ConfigError(f"{self.random[0]} is drawn at random: say how often with --samples")
        if samples is not None and not self.random:
            raise ConfigError("--samples needs a value that is drawn: log(a,b), uniform(a,b) or choice(a,b,...)")
        if samples is not None and samples < 1:
            raise ConfigError(f"--samples must be at least 1 (got {samples})")
        lists = [axis for axis in self.axes.values() if not isinstance(axis, Draw)]
        count = math.prod(len(values) for values in lists) * (samples or 1)
        if count > _LARGEST:
            raise ConfigError(f"the sweep has {count} experiments, more than {_LARGEST}: leave out some values")
        streams = RandomStreams(seed)
        return [point for sample in range(samples or 1) for point in self._combinations(streams, sample)]

    def _combinations(self, streams: RandomStreams, sample: int) -> Iterator[dict[str, Any]]:
        choices = [
            (axis.value(streams, path, sample),) if isinstance(axis, Draw) else axis for path, axis in self.axes.items()
        ]
        for values in itertools.product(*choices):
            yield dict(zip(self.axes, values, strict=True))


def parse_space(overrides: Sequence[str]) -> Space:
    """The space of some overrides.

    Args:
        overrides: ``path=value``, where a value is YAML, several with commas between them, an integer range ``a:b``
            (without b; ``a:b:step``) or ``log(a,b)``, ``uniform(a,b)``, ``choice(a,b,...)``. What is in quotes,
            brackets or braces is one value.

    Raises:
        ConfigError: naming the override and what it should look like.
    """
    axes: dict[str, tuple[Any, ...] | Draw] = {}
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {text!r} must look like train.rounds=10 or seed=0:5")
        if path in axes:
            raise ConfigError(f"{path} is given twice: put all its values into one override, {path}=a,b,c")
        axis = axes[path] = _axis(text, value.strip())
        several = isinstance(axis, Draw) or len(axis) > 1
        if several and path.partition(".")[0] in _PLACES:
            raise ConfigError(f"{text}: results do not depend on {path}, so a sweep over it has nothing to compare")
    refuse_undone(list(axes.items()))
    return Space(axes)


def _axis(text: str, value: str) -> tuple[Any, ...] | Draw:
    call = _CALL.match(value)
    parts = _split(text, call.group(2) if call else value)
    if call:
        kind: Any = call.group(1)
        return _draw(text, kind, tuple(_yaml(text, part) for part in parts))
    values = tuple(found for part in parts for found in _values(text, part))
    if len({repr(found) for found in values}) < len(values):
        raise ConfigError(f"{text} has a value twice")
    return values


def _draw(text: str, kind: Kind, arguments: tuple[Any, ...]) -> Draw:
    if kind == "choice":
        if len(arguments) < 2:
            raise ConfigError(f"{text}: choice(a,b,...) needs two values or more")
        return Draw(kind, arguments)
    numbers = [float(a) for a in arguments if isinstance(a, int | float) and not isinstance(a, bool)]
    if len(arguments) != 2 or len(numbers) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigError(f"{text}: {kind}(a,b) needs two numbers, the lower one first")
    if kind == "log" and numbers[0] <= 0:
        raise ConfigError(f"{text}: log(a,b) needs numbers above 0")
    return Draw(kind, tuple(numbers))


def _values(text: str, part: str) -> list[Any]:
    found = _RANGE.match(part)
    if not found:
        return [_yaml(text, part)]
    start, stop, step = int(found.group(1)), int(found.group(2)), int(found.group(3) or 1)
    if step < 1 or stop <= start or (stop - start) / step > _LARGEST:
        raise ConfigError(
            f"{text}: the range a:b goes from a up to b - 1, so b must be larger (at most {_LARGEST} long)"
        )
    return list(range(start, stop, step))


def _yaml(text: str, part: str) -> Any:
    try:
        return float(part) if _EXPONENT.fullmatch(part) else read_yaml(part)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {text!r}: {part!r} is not valid YAML: {error}") from None


def _split(text: str, value: str) -> list[str]:
    """The parts between commas that stand in no brackets and no quotes."""
    parts, open_brackets, quote = [""], list[str](), ""
    for character in value:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _BRACKETS:
            open_brackets.append(_BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets:
            parts.append("")
            continue
        parts[-1] += character
    if quote or open_brackets:
        raise ConfigError(f"override {text!r}: {quote or open_brackets[-1]} is missing")
    stripped = [part.strip() for part in parts]
    if len(stripped) > 1 and not all(stripped):
        raise ConfigError(f"override {text!r}: there is nothing between two commas, or after the last")
    return stripped
