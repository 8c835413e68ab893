"""Questions and answers that are made up from the seed, of which each client has some answers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.data.sources.tokens.instruction_texts import Encoder, encoder_of
from rayfl.data.sources.tokens.tokenizers import BYTES
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, InputSpec, byte_tokens
from rayfl.metrics.language import IGNORED
from rayfl.randomness import RandomStreams

COLOURS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
QUESTIONS = ("What colour is a {}? ", "A {} is of which colour? ", "Name the colour of a {}: ")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class ColourSource(MadeUpSource):
    """Questions about the colours of made-up things, of which each client has some of its own.

    Things are words of three letters. A common table says their colours; each client has another colour, drawn for it,
    for a share ``own`` of them.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "samples")

    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    samples: int = Field(default=60, ge=1, description="Questions of a client.")
    things: int = Field(default=12, ge=1, le=500, description="Things whose colours are asked for.")
    own: float = Field(default=0.5, ge=0, le=1, description="Share of the things that have a client's own colour.")

    @property
    def least_bytes(self) -> int:
        longest = max(len(question.format("abc")) for question in QUESTIONS) + max(map(len, COLOURS))
        return self.num_clients * self.samples * 16 * longest

    def decoder(self) -> Encoder:
        """See the base class."""
        return encoder_of(BYTES, "auto")

    def table(self, client: int, streams: RandomStreams) -> dict[str, str]:
        """A client's colours by thing."""
        names, common = self._common(streams)
        colours = self._colours(streams.generator("synthetic", client=client), common)
        return {name: COLOURS[colour] for name, colour in zip(names, colours, strict=True)}

    def _common(self, streams: RandomStreams) -> tuple[list[str], np.ndarray]:
        """The things, and which colour each has for all."""
        generator = streams.generator("synthetic")
        words = [a + e + o for a in _CONSONANTS for e in _VOWELS for o in _CONSONANTS]
        names = [words[place] for place in generator.permutation(len(words))[: self.things]]
        return names, generator.integers(len(COLOURS), size=self.things)

    def _colours(self, generator: np.random.Generator, common: np.ndarray) -> np.ndarray:
        """Which colour each thing has for a client."""
        changed = generator.permutation(self.things)[: round(self.own * self.things)]
        colours = common.copy()
        colours[changed] = (common[changed] + generator.integers(1, len(COLOURS), size=len(changed))) % len(COLOURS)
        return colours

    def _asked(
        self, client: int, streams: RandomStreams
    ) -> tuple[list[tuple[int, list[int]]], np.ndarray, np.random.Generator]:
        """A client's questions, its colours, and its generator.

        Returns:
            By question, its thing and its tokens; by thing, the client's colour; and the generator that has drawn them.
        """
        names, common = self._common(streams)
        generator = streams.generator("synthetic", client=client)
        colours = self._colours(generator, common)
        things = generator.integers(self.things, size=self.samples)
        questions = generator.integers(len(QUESTIONS), size=self.samples)
        asked = [
            (int(thing), byte_tokens(QUESTIONS[question].format(names[thing])))
            for thing, question in zip(things, questions, strict=True)
        ]
        return asked, colours, generator


def answer_of(colour: int) -> list[int]:
    """The tokens of an answer, with its end."""
    return [*byte_tokens(COLOURS[colour]), END_OF_BYTES]


def as_rows(texts: Sequence[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and answers as tokens and as the next tokens of the answers, int64 of shape (N, T) each."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = np.zeros((len(texts), longest), dtype=np.int64)
    asked = np.zeros((len(texts), longest), dtype=bool)
    for place, (prompt, answer) in enumerate(texts):
        stop = len(prompt) + len(answer)
        tokens[place, :stop] = [*prompt, *answer]
        asked[place, len(prompt) : stop] = True
    return tokens[:, :-1], np.where(asked[:, 1:], tokens[:, 1:], IGNORED)


class SyntheticInstructionsSource(ColourSource):
    """Questions about the colours of made-up things, and answers: prompts and responses of a language model, in bytes.

    See :class:`ColourSource`. A sample is one of three questions about one of the things, both drawn uniformly, and the
    client's answer. What is learned is the next byte of the answer, and its end.
    """

    name: Literal["synthetic_instructions"] = Field(
        default="synthetic_instructions", description="Made-up questions and answers in bytes, a language model's."
    )

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' samples, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        texts = []
        for client in range(self.num_clients):
            asked, colours, _ = self._asked(client, streams)
            texts += [(question, answer_of(colours[thing])) for thing, question in asked]
        x, y = as_rows(texts)
        spec = InputSpec("tokens", x.shape[1:], BYTE_TOKENS, BYTE_TOKENS, "tokens", padding=0)
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))
