"""Questions and answers that are made up from the seed, of which each client has some answers of its own."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples, Source
from rayfl.data.sources.instruction_texts import Encoder, encoder_of
from rayfl.data.sources.made_up import client_names
from rayfl.data.sources.tokenizers import BYTES
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, InputSpec, byte_tokens
from rayfl.metrics.language import IGNORED
from rayfl.randomness import RandomStreams

COLOURS = ("red", "blue", "green", "black", "white", "pink", "gold", "grey")
QUESTIONS = ("What colour is a {}? ", "A {} is of which colour? ", "Name the colour of a {}: ")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class SyntheticInstructionsSource(Source):
    """Questions about the colours of made-up things, and answers: prompts and responses of a language model, in bytes.

    Things are words of three letters. A common table says their colours; each client has another colour, drawn for it,
    for a share ``own`` of them. A sample is one of three questions about one of the things, both drawn uniformly, and
    the client's answer. What is learned is the next byte of the answer, and its end.
    """

    name: Literal["synthetic_instructions"] = Field(
        default="synthetic_instructions", description="Made-up questions and answers in bytes, a language model's."
    )
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    samples: int = Field(default=60, ge=1, description="Questions of a client.")
    things: int = Field(default=12, ge=1, le=500, description="Things whose colours are asked for.")
    own: float = Field(default=0.5, ge=0, le=1, description="Share of the things that have a client's own colour.")

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' samples, one client after the other; uses the stream ``synthetic``, also of each client."""
        names, common = self._common(streams)
        rows = [self._client(client, names, common, streams) for client in range(self.num_clients)]
        samples = [sample for row in rows for sample in row]
        longest = max(len(prompt) + len(answer) for prompt, answer in samples)
        tokens = np.zeros((len(samples), longest), dtype=np.int64)
        asked = np.zeros((len(samples), longest), dtype=bool)
        for place, (prompt, answer) in enumerate(samples):
            stop = len(prompt) + len(answer)
            tokens[place, :stop] = [*prompt, *answer]
            asked[place, len(prompt) : stop] = True
        y = np.where(asked[:, 1:], tokens[:, 1:], IGNORED)
        spec = InputSpec("tokens", (longest - 1,), BYTE_TOKENS, BYTE_TOKENS, "tokens", padding=0)
        return Samples(tokens[:, :-1], y, spec, client_names(self.num_clients, self.samples))

    def decoder(self) -> Encoder:
        """See the base class."""
        return encoder_of(BYTES, "auto")

    def table(self, client: int, streams: RandomStreams) -> dict[str, str]:
        """A client's colours by thing."""
        names, common = self._common(streams)
        return self._table(streams.generator("synthetic", client=client), names, common)

    def _common(self, streams: RandomStreams) -> tuple[list[str], np.ndarray]:
        """The things, and which colour each has for all."""
        generator = streams.generator("synthetic")
        words = [a + e + o for a in _CONSONANTS for e in _VOWELS for o in _CONSONANTS]
        names = [words[place] for place in generator.permutation(len(words))[: self.things]]
        return names, generator.integers(len(COLOURS), size=self.things)

    def _table(self, generator: np.random.Generator, names: list[str], common: np.ndarray) -> dict[str, str]:
        changed = generator.permutation(self.things)[: round(self.own * self.things)]
        colours = common.copy()
        colours[changed] = (common[changed] + generator.integers(1, len(COLOURS), size=len(changed))) % len(COLOURS)
        return {name: COLOURS[colour] for name, colour in zip(names, colours, strict=True)}

    def _client(
        self, client: int, names: list[str], common: np.ndarray, streams: RandomStreams
    ) -> list[tuple[list[int], list[int]]]:
        generator = streams.generator("synthetic", client=client)
        colours = self._table(generator, names, common)
        things = generator.integers(self.things, size=self.samples)
        questions = generator.integers(len(QUESTIONS), size=self.samples)
        return [
            (
                byte_tokens(QUESTIONS[question].format(names[thing])),
                [*byte_tokens(colours[names[thing]]), END_OF_BYTES],
            )
            for thing, question in zip(things, questions, strict=True)
        ]
