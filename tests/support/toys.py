"""Small federated problems with known answers, and a federation in this process to run methods on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.host import ClientHost
from actors.hosting.memory import Spill
from actors.hosting.state import ClientStates
from actors.processes.pool import InlinePool
from algorithms.base import Algorithm
from algorithms.fedavg import FedAvg
from algorithms.parts.proximity import proximity
from rayfl.data.backdoor import Backdoor
from rayfl.data.federated import FederatedDataset
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.views import Views
from rayfl.data.partitions.stage import NoStages, Staged
from rayfl.data.staged import WithStages
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples, InputSpec
from rayfl.messages.aggregators import Mean, Rule
from rayfl.messages.attack import AttackConfig
from rayfl.messages.compressors import Compressor, NoCompression
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.valuation.section import Contribution, NoContribution
from tests.support.toy_networks import two_layers

CPU = torch.device("cpu")


class ListDataset(FederatedDataset):
    """Clients given as (x, y) pairs; everything is training data, the test part repeats it.

    Validation parts are empty, or given as (x, y) pairs too. Labels of public samples are counted up, unless given.
    """

    def __init__(
        self,
        clients: Sequence[tuple[Tensor, Tensor]],
        classes: int = 3,
        public: Tensor | None = None,
        validation: Sequence[tuple[Tensor, Tensor]] | None = None,
        public_labels: Tensor | None = None,
    ) -> None:
        self._clients = list(clients)
        self._validation = [(x[:0], y[:0]) for x, y in clients] if validation is None else list(validation)
        self._public = clients[0][0][:0] if public is None else public
        numbers = torch.arange(len(self._public)) % classes
        self._public_labels = numbers if public_labels is None else public_labels
        self.names = tuple(str(i) for i in range(len(clients)))
        self.spec = InputSpec("image", tuple(clients[0][0].shape[1:]), classes)

    def sizes(self) -> np.ndarray:
        sizes = [len(y) for _, y in self._clients], [len(y) for _, y in self._validation]
        return np.array([[n, v, n] for n, v in zip(*sizes, strict=True)], dtype=np.int64)

    def load_public(self) -> Tensor:
        return self._public

    def public_labels(self) -> np.ndarray:
        return self._public_labels.numpy()

    def load(self, client: int) -> Mapping[str, Examples]:
        x, y = self._clients[client]
        own = Examples(x, y, torch.arange(len(y)) % 2)  # two groups of people, which few methods look at
        return {"train": own, "validation": Examples(*self._validation[client]), "test": own}


def quadratic_clients(points: Sequence[float | Sequence[float]], copies: Sequence[int]) -> ListDataset:
    """QUAD's clients: client k holds ``copies[k]`` copies of its point."""
    rows = [torch.atleast_1d(torch.tensor(p, dtype=torch.float64)) for p in points]
    return ListDataset(
        [(row.repeat(n, 1), torch.zeros(n, dtype=torch.int64)) for row, n in zip(rows, copies, strict=True)], classes=2
    )


def random_clients(
    sizes: Sequence[int],
    inputs: int = 5,
    classes: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    public: int = 0,
) -> ListDataset:
    """Clients with Gaussian inputs whose labels follow a linear rule of the client's own; and public inputs."""
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for n in sizes:
        x = torch.randn(n, inputs, generator=generator, dtype=dtype)
        rule = torch.randn(inputs, classes, generator=generator, dtype=dtype)
        clients.append((x, (x @ rule).argmax(1)))
    return ListDataset(clients, classes, torch.randn(public, inputs, generator=generator, dtype=dtype))


def two_camps(clients: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of clients of even and of odd numbers, who give the same inputs other labels, 40 each."""
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    found = []
    for client in range(clients):
        x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
        found.append((x, ((x @ rule).argmax(1) + client % 2) % 3))
    return found


@dataclass(frozen=True)
class RelabelledStreams(RandomStreams):
    """Streams keyed by another id than the client's own.

    Attributes:
        original: the id that stands for client k at position k; further clients keep theirs.
    """

    original: tuple[int, ...] = ()

    def _digest(self, name: str, round: int, client: int) -> bytes:
        # the endpoints of a simplex are counted in the client's place
        known = 0 <= client < len(self.original) and name != "init.endpoint"
        return super()._digest(name, round, self.original[client] if known else client)


@dataclass
class Toy:
    """An experiment in this process, stepped by hand.

    Attributes:
        algorithm: the method.
        dataset: the clients.
        task: what is learned.
        train: the training section.
        hosts: number of in-process hosts.
        mode: looped or vectorized.
        seed: experiment seed.
        streams: the random streams, in place of those of ``seed``.
        spill: bounds the memory for states (of one host).
        data_memory: bytes of samples that stay loaded.
        augmentation: of training images.
        views: of training images, that the method compares.
        stages: how the clients' samples change over rounds.
        device: where clients train.
        unseen: how many of the clients, the last ones, take no part in training.
        unseen_epochs: their local epochs when they join.
        privacy: of what clients send.
        compression: of what clients send.
        aggregator: what stands for the mean.
        attack: what malicious clients do.
        contribution: how clients are valued; the server then keeps their messages.
        backdoor: with whose trigger test samples are scored once more; the task then has the measures of backdoors.
        input_attack: what changes validation and test samples when they are scored once more; the same.
    """

    algorithm: Algorithm
    dataset: FederatedDataset
    task: Any
    train: TrainConfig
    hosts: int = 1
    mode: str = "looped"
    seed: int = 0
    streams: RandomStreams | None = None
    spill: Spill | None = None
    data_memory: int | None = None
    augmentation: Augmentation | None = None
    views: Views | None = None
    stages: NoStages | Staged = field(default_factory=NoStages)
    device: torch.device = CPU
    unseen: int = 0
    unseen_epochs: int | None = None
    compile: bool = False
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    compression: NoCompression | Compressor = field(default_factory=NoCompression)
    aggregator: Rule = field(default_factory=Mean)
    attack: AttackConfig = field(default_factory=AttackConfig)
    contribution: Contribution = field(default_factory=NoContribution)
    backdoor: Backdoor | None = None
    input_attack: InputAttack | None = None
    server: Tree = field(init=False)
    federation: Federation = field(init=False)
    client_hosts: list[ClientHost] = field(init=False)
    round: int = field(init=False, default=0)
    moved_norm: float | None = field(init=False, default=None)
    remembered: Tree = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        k = self.dataset.num_clients - self.unseen
        streams = self.streams or RandomStreams(self.seed)
        dataset = self.dataset
        if isinstance(self.stages, Staged):
            dataset = WithStages(dataset, dataset, self.stages, streams, k)
        self.context = RoundContext(
            0,
            self.train.rounds,
            k,
            self.train,
            streams,
            augmentation=self.augmentation,
            views=self.views,
            stages=self.stages,
            unseen=self.unseen,
            unseen_epochs=self.unseen_epochs,
            privacy=self.privacy,
            compression=self.compression,  # type: ignore[arg-type]
            aggregator=self.aggregator,  # type: ignore[arg-type]
            attack=self.attack,
            attackers=self.attack.attackers(k, streams),
            contribution=self.contribution,
        )
        self.client_hosts = [
            ClientHost(
                self.algorithm,
                Engine(self.task, self.device, EngineConfig(mode=self.mode, width=8, compile=self.compile)),  # type: ignore[arg-type]
                dataset,
                self.context,
                ClientStates(None, i, self.spill),
                batch_size=256,
                data_memory=self.data_memory,
                backdoor=self.backdoor,
                input_attack=self.input_attack,
            )
            for i in range(self.hosts)
        ]
        sizes = self.dataset.sizes()
        if self.algorithm.learns_unlabelled:
            sizes[:, 0] += self.dataset.unlabelled_sizes()
        hosts = Hosts(InlinePool(self.client_hosts))
        counted = (lambda round: dataset.at(dataset.stage_of(round)).sizes()[:, 0]) if self.stages.active else None
        self.federation = Federation(hosts, self.task, self.context, sizes, samples_in=counted)
        norm = PrivateNorm(self.task.network, self.train.private_norm, streams)
        self.server = norm.withheld(self.algorithm.init(self.task, self.context))

    def cohort(self, round: int) -> list[int]:
        """The clients sampled in a round, ascending."""
        generator = self.context.streams.generator("sampling", round)
        chosen = generator.choice(self.context.num_clients, size=self.context.cohort_size, replace=False)
        return sorted(int(c) for c in chosen)

    def step(self, cohort: Sequence[int] | None = None) -> Tree:
        """Runs one round and returns the server's tree."""
        self.federation.begin_round(self.round, ("test",), moved_norm=self.moved_norm, remembered=self.remembered)
        chosen = self.cohort(self.round) if cohort is None else list(cohort)
        self.server = {**self.server, **self.algorithm.round(self.server, chosen, self.federation)}
        self.moved_norm, self.remembered = self.federation.next_norm or self.moved_norm, self.federation.remembered
        self.round += 1
        return self.server

    def run(self, rounds: int | None = None) -> Tree:
        """Runs all (or the given number of) rounds."""
        for _ in range(self.train.rounds if rounds is None else rounds):
            self.step()
        return self.server

    def states(self) -> dict[int, Tree]:
        """All client states."""
        return self.federation.held_states()

    def scores(self, final: bool = False, split: str = "test", newcomers: bool = False) -> dict[int, dict[str, Any]]:
        """Statistics by client and model, after the rounds so far; of clients that train, or of newcomers."""
        self.federation.begin_round(max(self.round - 1, 0))
        common, own = self.algorithm.served(self.server, self.context)
        whose = self.context.newcomers if newcomers else None
        found = self.federation.evaluate(common, (split,), final, own, whose, newcomers=newcomers)
        return {client: splits[split] for client, splits in found.items()}


def ragged_toy(
    mode: str,
    device: torch.device = CPU,
    algorithm: Any = None,
    hosts: int = 1,
    privacy: PrivacyConfig | None = None,
    **options: Any,
) -> Toy:
    """Four clients of several sizes and MLP2, two rounds of three clients."""
    settings = {"rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 5, "lr": 0.1, **options}
    data = random_clients([17, 3, 12, 9], seed=1)
    limits = privacy or PrivacyConfig()
    return Toy(
        algorithm or FedAvg(), data, two_layers(), TrainConfig(**settings), hosts, mode, device=device, privacy=limits
    )


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    """Two trees are equal to the bit."""
    if isinstance(left, Mapping):
        assert isinstance(right, Mapping) and set(left) == set(right), f"{path}: {set(left)} != {set(right)}"
        for key in left:
            assert_equal(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), f"{path}: differ by {(left - right).abs().max()}"
    else:
        assert left == right, f"{path}: {left} != {right}"


def assert_close(left: Any, right: Any, atol: float = 1e-10, path: str = "") -> None:
    """Two trees differ by at most ``atol``."""
    if isinstance(left, Mapping):
        assert set(left) == set(right), f"{path}: {set(left)} != {set(right)}"
        for key in left:
            assert_close(left[key], right[key], atol, f"{path}/{key}")
    elif isinstance(left, Tensor) and left.dtype == torch.bool:
        assert torch.equal(left, right), f"{path}: {int((left ^ right).sum())} differ"
    elif isinstance(left, Tensor) and not left.numel():
        assert left.shape == right.shape, path
    elif isinstance(left, Tensor):
        assert (left - right).abs().max() <= atol, f"{path}: differ by {(left - right).abs().max()}"
    else:
        assert abs(left - right) <= atol, f"{path}: {left} != {right}"


def distance(form: str, model: Tree, anchor: Tree) -> Tensor:
    """A proximal term without its weight; a scalar."""
    term, task = proximity(form, "model", "anchor"), SimpleNamespace(network=SimpleNamespace(buffer_names=()))
    return term({"model": model}, None, task, {"anchor": anchor})
