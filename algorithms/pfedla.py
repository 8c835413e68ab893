"""pFedLA: the server learns, for every client, how much of each client's layer each layer of its own model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.on_demand import OnDemand
from algorithms.parts.generators import linear
from algorithms.parts.partial import part
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree, copy, num_bytes, subtract, weighted_sum, weighted_sums
from rayfl.tasks.base import Batch, Predictor, Task

Layers = Mapping[str, Sequence[str]]
"""By layer of the model, the names of its tensors."""
_TINY = 1e-12


class PFedLA(Algorithm):
    """pFedLA: each layer of a client's model is a mixture of that layer of all clients, by weights that are learned.

    With w_j as client j has trained it last (before that the initial model), client i of the cohort receives

        theta_i^l = sum_j a_ij^l w_j^l,    a_ij^l = h_j^l(v_i; phi_i) / sum_j h_j^l(v_i; phi_i)

    and trains it to w_i. h(v_i; phi_i) is a hypernetwork of client i's own on the server: linear layers with ReLU,
    which read the embedding v_i, and for each layer l of the model one more with ReLU, which makes a number for each
    client.
    With Delta_i^l = theta_i^l - w_i^l the server takes one step of SGD on v_i and phi_i along the gradient of

        sum_l <Delta_i^l, theta_i^l>,    Delta_i and all w_j constants.

    A layer whose numbers are all 0 is the client's own, w_i^l. With ``retained_layers`` (HeurpFedLA) so are, round by
    round, the k layers with the largest a_ii^l: they are not sent to client i, and its weights of them stay. Weight,
    bias and running statistics of a layer have the same weights.

    Server: w_j, v_i and phi_i of all clients that have trained. Client: with ``retained_layers`` w_i. Down: theta_i,
    without what is retained. Up: w_i. Evaluated: theta_i of the models as they are then (``personalized``), also for
    clients never sampled; after training also w_i (``local``). There is no global model.

    References:
        Ma, Zhang, Guo, Xu: Layer-wised Model Aggregation for Personalized Federated Learning, CVPR 2022, its
        hypernetworks and its heuristic variant HeurpFedLA.
    """

    name: Literal["pfedla"] = "pfedla"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Ma et al., CVPR 2022"
    client_keeps: ClassVar[str] = "- (w_k)"
    server_keeps: ClassVar[str] = "w_1..w_K, v_k, phi_k"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "the mean of all clients' models after a local update"

    retained_layers: int = setting(0, "k", "layers that a client keeps of its own in a round (HeurpFedLA)", ge=0)
    embedding_dim: int = setting(100, "", "length of v_i", ge=1)
    trunk_layers: int = setting(3, "", "linear layers of a hypernetwork before those of the layers", ge=1)
    hidden: int = setting(100, "", "width of these layers", ge=1)
    server_lr: float = setting(0.005, "", "learning rate of v_i and phi_i", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.retained_layers > (count := len(layers_of(task.network))):
            raise ConfigError(
                f"algorithm.retained_layers is {self.retained_layers}, but the model has {count} layers: choose that "
                "many or fewer"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        tree, generator = super().init(task, context), context.streams.generator("init.hyper")
        like, clients = next(iter(tree["model"].values())), context.num_clients
        widths = [self.embedding_dim, *[self.hidden] * self.trunk_layers]
        trunk = {str(n): linear(inputs, self.hidden, like, generator) for n, inputs in enumerate(widths[:-1])}
        heads = {
            layer: {
                "weight": torch.from_numpy(generator.uniform(0, 1, (clients, self.hidden))).to(like),
                "bias": like.new_zeros(clients),
            }
            for layer in layers_of(task.network)
        }
        embeddings = torch.from_numpy(generator.standard_normal((clients, self.embedding_dim))).to(like)
        return {**tree, "phi": {"trunk": trunk, "heads": heads}, "embeddings": embeddings}

    def kept_of_client(self, task: Task, clients: int) -> int:
        """See :class:`KeptModels`; of each client there is a hypernetwork, too, whose outputs are of all clients."""
        trunk = (self.embedding_dim + (self.trunk_layers - 1) * self.hidden + self.trunk_layers) * self.hidden
        heads = len(layers_of(task.network)) * clients * (self.hidden + 1)
        size = next(iter(task.network.initialize(0).values())).element_size()
        return super().kept_of_client(task, clients) + size * (trunk + heads + self.embedding_dim)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        layers, models = layers_of(clients.task.network), Models(server, clients.context.num_clients)
        networks = {i: self.network_of(server, i) for i in cohort}
        drawn = [self.weights(networks[i], i) for i in cohort]
        sent = {}
        for i, mixed, (_, retained) in zip(cohort, models.mixtures([w for w, _ in drawn], layers), drawn, strict=True):
            names = [name for layer, of_layer in layers.items() if layer not in retained for name in of_layer]
            sent[i] = part(mixed, names)
        trained = clients.map(self.local_update, cohort, {}, {i: {"model": model} for i, model in sent.items()})
        changes = {str(i): subtract(sent[i], part(reply["model"], sent[i])) for i, reply in trained.items()}
        products = models.products(changes, layers, clients.task.network)
        learned: Tree = {}
        if products:
            learned = clients.on_server(
                self.descend, {"networks": {i: networks[int(i)] for i in products}, "products": products}
            )
        own = {**server.get("own", {}), **{str(i): reply["model"] for i, reply in trained.items()}}
        return {**server, "own": own, "networks": {**server.get("networks", {}), **learned}}

    async def descend(self, server: Server, networks: Tree, products: Tree) -> Tree:
        """v_i and phi_i of each client after one step.

        Args:
            server: the server.
            networks: v_i and phi_i by client.
            products: by client and layer <Delta_i^l, w_j^l> for all clients j.
        """
        found, settings = {}, TrainConfig(lr=self.server_lr)
        for client, network in networks.items():
            reads = {"products": products[client], "own": torch.tensor(int(client))}
            found[client] = await server.train(network, self.objective, frozen=reads, steps=1, settings=settings)
        return found

    def objective(self, network: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """sum_l <Delta_i^l, theta_i^l> = sum_l sum_j a_ij^l <Delta_i^l, w_j^l>."""
        weights = layer_weights(network, frozen["own"], tuple(frozen["products"]))
        return torch.stack([(weights[layer] * of_all).sum() for layer, of_all in frozen["products"].items()]).sum()

    def weights(self, network: Tree, client: int) -> tuple[dict[str, Tensor], list[str]]:
        """a_i by layer, each of shape (K,), and the retained layers, of which the client's own has weight 1.

        Retained are those in which its own share is largest, among equals the first by name.
        """
        own = torch.tensor(client)
        with torch.no_grad():
            found = layer_weights(network, own, tuple(network["heads"]))
        retained = sorted(found, key=lambda layer: (-float(found[layer][client]), layer))[: self.retained_layers]
        alone = {layer: (torch.arange(len(found[layer])) == own).to(found[layer]) for layer in retained}
        return {**found, **alone}, retained

    def network_of(self, server: Tree, client: int) -> Tree:
        """v_i and phi_i as they are now."""
        initial = {"embedding": server["embeddings"][client], **server["phi"]}
        found: Tree = server.get("networks", {}).get(str(client), initial)
        return found

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains what is received, joined to the client's own retained layers."""
        start = model
        if self.retained_layers:
            own = client.state.get("own") or client.initial_model()
            start = {name: model.get(name, leaf) for name, leaf in own.items()}
        trained = await client.train(start, self.local_loss)
        if self.retained_layers:
            client.state["own"] = copy(trained)  # what is sent is the server's
        client.publish(local=Predictor.of(trained))
        return {"model": trained}

    @property
    def local_loss(self) -> Any:
        """The loss of the whole model."""
        return super().objective

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's mixture; for newcomers the mean of all clients' models."""
        models, layers = Models(server, context.num_clients), by_layer(server["model"])

        def mixtures(clients: Sequence[int]) -> dict[int, Tree]:
            weights = [self.weights(self.network_of(server, i), i)[0] for i in clients]
            mixed = models.mixtures(weights, layers)
            return {i: {"mixture": mixture} for i, mixture in zip(clients, mixed, strict=True)}

        everyone, size = range(context.num_clients), num_bytes(server["model"])
        return {"model": models.mean()}, OnDemand(everyone, size, mixtures)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains the mean of all clients' models."""
        return {"mixture": (await self.local_update(client, server["model"]))["model"]}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(server["mixture"] if "mixture" in server else server["model"])}


class Models:
    """The models w_j of all clients, of which those that have not trained are one and the same.

    Args:
        server: the server's tree.
        count: K.
    """

    def __init__(self, server: Tree, count: int) -> None:
        own: Tree = server.get("own", {})
        self._trees = [*own.values(), server["model"]]
        self._places = torch.full((count,), len(own))
        self._places[torch.tensor([int(i) for i in own], dtype=torch.long)] = torch.arange(len(own))

    def mixtures(self, weights: Sequence[Mapping[str, Tensor]], layers: Layers) -> list[Tree]:
        """sum_j a_ij^l w_j^l in each layer l, for each i of ``weights``; tensors in the order of a model."""
        found: list[Tree] = [{} for _ in weights]
        for layer, names in layers.items() if weights else ():
            shares = torch.stack([own[layer].double().cpu() for own in weights])
            shares = shares / shares.sum(1, keepdim=True)  # of equal models mixtures are that model in float32, too
            collected = torch.zeros(len(weights), len(self._trees), dtype=torch.float64)
            collected.index_add_(1, self._places, shares)
            for own, mixed in zip(found, weighted_sums([part(t, names) for t in self._trees], collected), strict=True):
                own |= mixed
        return [part(own, self._trees[-1]) for own in found]

    def mean(self) -> Tree:
        """The mean of all, those that have not trained among them."""
        shares = torch.bincount(self._places, minlength=len(self._trees)).double() / len(self._places)
        return weighted_sum(self._trees, shares.tolist())

    def products(self, changes: Mapping[str, Tree], layers: Layers, network: Network) -> dict[str, dict[str, Tensor]]:
        """<Delta_i^l, w_j^l> for each i, each layer l of which it was sent parameters, and all j, of shape (K,)."""
        found: dict[str, dict[str, Tensor]] = {}
        for layer, names in layers.items():
            learned = [name for name in names if name in network.parameter_names]
            of_all = {name: torch.stack([tree[name].flatten() for tree in self._trees]) for name in learned}
            for i, change in changes.items():
                if sent := [name for name in learned if name in change]:
                    of_each = sum((of_all[name] * change[name].flatten()).sum(1) for name in sent)
                    found.setdefault(i, {})[layer] = torch.as_tensor(of_each)[self._places]
        return found


def layers_of(network: Network) -> dict[str, list[str]]:
    """The names of a model's tensors by layer: what stands before the last point of a name."""
    return by_layer((*network.parameter_names, *network.buffer_names))


def by_layer(names: Any) -> dict[str, list[str]]:
    """See :func:`layers_of`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def layer_weights(network: Mapping[str, Any], own: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """a^l of shape (K,): the hypernetwork's numbers of a layer over their sum; where all are 0, the client's own is 1.

    Args:
        network: ``embedding`` v, ``trunk`` and ``heads``.
        own: the client, a scalar.
        layers: which of the heads.
    """
    hidden = network["embedding"]
    for layer in network["trunk"].values():
        hidden = F.linear(hidden, layer["weight"], layer["bias"]).relu()
    found = {}
    for name in layers:
        numbers = F.linear(hidden, network["heads"][name]["weight"], network["heads"][name]["bias"]).relu()
        alone = (torch.arange(len(numbers), device=numbers.device) == own).to(numbers)
        total = numbers.sum()
        found[name] = torch.where(total > 0, numbers / total.clamp_min(_TINY), alone)
    return found
