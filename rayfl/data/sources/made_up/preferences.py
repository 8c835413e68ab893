"""Pairs of answers that are made up from the seed, of which each client prefers some of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.instructions import COLOURS, ColourSource, answer_of, as_rows
from rayfl.data.sources.made_up.source import client_names
from rayfl.examples import BYTE_TOKENS, InputSpec
from rayfl.randomness import RandomStreams


class SyntheticPreferencesSource(ColourSource):
    """Questions about the colours of made-up things, each with an answer that is preferred to another, in bytes.

    Things, colours and questions are those of ``synthetic_instructions``. The answer that a client prefers is its own
    colour of the thing. The other answer is the common one where the client's own differs from it, and else a colour
    drawn uniformly from all others.
    """

    name: Literal["synthetic_preferences"] = Field(
        default="synthetic_preferences", description="Made-up pairs of answers in bytes, to align a language model."
    )

    @property
    def least_bytes(self) -> int:
        return 2 * super().least_bytes

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' pairs, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        _, common = self._common(streams)
        texts = []
        for client in range(self.num_clients):
            asked, colours, generator = self._asked(client, streams)
            drawn = generator.integers(1, len(COLOURS), size=self.samples)
            for (thing, question), further in zip(asked, drawn, strict=True):
                own, other = colours[thing], common[thing]
                if other == own:
                    other = (own + further) % len(COLOURS)
                texts += [(question, answer_of(own)), (question, answer_of(other))]
        x, y = (rows.reshape(-1, 2, rows.shape[1]) for rows in as_rows(texts))
        spec = InputSpec("tokens", x.shape[1:], BYTE_TOKENS, BYTE_TOKENS, "preference", padding=0)
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))
