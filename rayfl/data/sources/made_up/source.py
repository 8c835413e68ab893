"""Data that are made up from the seed, with clients that differ: labels and risks of linear models, texts of chains."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.targets import next_tokens
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams


class SyntheticLabelsSource(MadeUpSource):
    """Vectors with several labels from linear models, of which each client has its own, near a common one.

    A sample x ~ N(c_k, 1) of client k has label l where x . w_kl > b, with w_kl = w_l + beta v_kl, all entries drawn
    from N(0, 1), c_k from N(0, 1/4), and b so that about a third of the samples of an average client have a label.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "samples", "dimension")

    name: Literal["synthetic_labels"] = Field(
        default="synthetic_labels", description="Made-up vectors with several labels each."
    )
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    samples: int = Field(default=100, ge=1, description="Samples of a client.")
    dimension: int = Field(default=20, ge=1, description="Numbers in one input.")
    labels: int = Field(default=5, ge=1, le=1000, description="Number of labels.")
    beta: float = Field(default=0.7, ge=0, le=1e6, description="How much the clients' models differ.")

    @property
    def least_bytes(self) -> int:
        return self.num_clients * self.samples * 4 * (self.dimension + self.labels)

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' samples, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        common = streams.generator("synthetic").normal(size=(self.dimension, self.labels))
        drawn = [self._client(client, common, streams) for client in range(self.num_clients)]
        spec = InputSpec("image", (self.dimension,), self.labels, target="labels")
        x, y = (np.concatenate(column) for column in zip(*drawn, strict=True))
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))

    def _client(self, client: int, common: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        generator = streams.generator("synthetic", client=client)
        own = common + self.beta * generator.normal(size=common.shape)
        x = 0.5 * generator.normal(size=self.dimension) + generator.normal(size=(self.samples, self.dimension))
        # Without BLAS, whose sums depend on its number of threads: all processes have to find the same labels.
        scores = np.einsum("nd,dl->nl", x, own)
        bound = 0.43 * np.sqrt(1.25 * self.dimension * (1 + self.beta**2))  # the upper third of N(0, that variance)
        return x.astype(np.float32), (scores > bound).astype(np.float32)


class SyntheticSurvivalSource(MadeUpSource):
    """Patients whose risks are linear in their numbers, of which each client has its own, near common ones.

    A patient x ~ N(0, 1) of client k has the constant hazard exp(x . w_k) / 1000 a day, with w_k = (w + beta v_k) /
    sqrt(1 + beta^2), all entries drawn from N(0, 1). The patient is seen until a day drawn uniformly from 100 to 3000.
    The target is the day of death and 1, or the last day and 0 where death comes after it.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "samples", "dimension")

    name: Literal["synthetic_survival"] = Field(
        default="synthetic_survival", description="Made-up patients with times and events."
    )
    num_clients: int = Field(default=12, ge=1, description="Number of clients.")
    samples: int = Field(default=100, ge=1, description="Patients of a client.")
    dimension: int = Field(default=5, ge=1, description="Numbers about a patient.")
    beta: float = Field(default=1.0, ge=0, le=1e6, description="How much the clients' risks differ.")

    @property
    def least_bytes(self) -> int:
        return self.num_clients * self.samples * 4 * (self.dimension + 2)

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' patients, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        common = streams.generator("synthetic").normal(size=self.dimension)
        drawn = [self._client(client, common, streams) for client in range(self.num_clients)]
        x, y = (np.concatenate(column) for column in zip(*drawn, strict=True))
        spec = InputSpec("image", (self.dimension,), 1, target="survival")
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))

    def _client(self, client: int, common: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        generator = streams.generator("synthetic", client=client)
        own = (common + self.beta * generator.normal(size=common.shape)) / np.sqrt(1 + self.beta**2)
        x = generator.normal(size=(self.samples, self.dimension))
        # Without BLAS, whose sums depend on its number of threads: all processes have to find the same times.
        death = generator.exponential(1000 * np.exp(-np.einsum("nd,d->n", x, own)))
        end = generator.uniform(100, 3000, self.samples)
        return x.astype(np.float32), np.stack([np.minimum(death, end), death <= end], 1).astype(np.float32)


class SyntheticTextSource(MadeUpSource):
    """Texts of Markov chains, of which each client has its own, near a common one.

    The next token follows the distribution (1 - own) P[t] + own Q_k[t] of the token t before it; the rows of the common
    P and of the client's Q_k are drawn from a Dirichlet distribution. The first token is uniform. Token 0 does not
    occur: it is padding. What is learned is the next token.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "texts", "length")

    name: Literal["synthetic_text"] = Field(default="synthetic_text", description="Made-up texts, a language model's.")
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    texts: int = Field(default=30, ge=1, description="Texts of a client.")
    length: int = Field(default=24, ge=1, description="Tokens that are predicted of a text.")
    vocabulary: int = Field(default=20, ge=3, le=30_000, description="Distinct tokens, 0 (padding) included.")
    concentration: float = Field(default=0.1, gt=0, description="Of the Dirichlet distributions: small for few tokens.")
    own: float = Field(default=0.5, ge=0, le=1, description="How much of a client's chain is its own.")

    @property
    def least_bytes(self) -> int:
        return self.num_clients * self.texts * 8 * (self.length + 1)

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' texts, one client after the other; uses the stream ``synthetic``, also of each client."""
        self.check_room()
        x, y = next_tokens(np.concatenate([self._texts(client, streams) for client in range(self.num_clients)]))
        spec = InputSpec("tokens", (self.length,), self.vocabulary, self.vocabulary, "tokens")
        return Samples(x, y, spec, client_names(self.num_clients, self.texts))

    def chain(self, client: int, streams: RandomStreams) -> np.ndarray:
        """Probabilities of the next token by the token before it, of the tokens from 1; shape (V - 1, V - 1)."""
        return self._chain(streams.generator("synthetic", client=client), streams)

    def _chain(self, generator: np.random.Generator, streams: RandomStreams) -> np.ndarray:
        prior = np.full(self.vocabulary - 1, self.concentration)
        common = streams.generator("synthetic").dirichlet(prior, size=len(prior))
        mixed: np.ndarray = (1 - self.own) * common + self.own * generator.dirichlet(prior, size=len(prior))
        return mixed

    def _texts(self, client: int, streams: RandomStreams) -> np.ndarray:
        generator = streams.generator("synthetic", client=client)
        bounds = np.cumsum(self._chain(generator, streams), axis=1)
        texts = np.empty((self.texts, self.length + 1), dtype=np.int64)
        texts[:, 0] = generator.integers(self.vocabulary - 1, size=self.texts)
        for place in range(self.length):
            drawn = generator.random(self.texts)
            # The row's total may round to just below 1.
            following = (drawn[:, np.newaxis] >= bounds[texts[:, place]]).sum(1)
            texts[:, place + 1] = np.minimum(following, self.vocabulary - 2)
        return texts + 1


def client_names(clients: int, samples: int) -> np.ndarray:
    """The client of every sample, where all have as many, one client after the other."""
    digits = len(str(clients - 1))
    return np.repeat(np.array([f"{client:0{digits}d}" for client in range(clients)]), samples)
