"""PACFL: clients are clustered before they train, by the angles between the subspaces that their samples span."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.clusters import ClusterModels, Linkage, hierarchical_clusters, nearest_cluster
from algorithms.parts.kept_models import largest_model
from algorithms.parts.subspaces import Proximity, angles, proximity_matrix, signature
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait


class PACFL(ClusterModels):
    """PACFL: federated averaging in clusters of clients whose samples span similar subspaces.

    Before the first round every client, sampled or not, sends its signature U_k: of each of its classes, the first p
    left singular vectors u_ka of the matrix whose columns are the samples. The server takes the angles

        A_kl = min_{a, b} arccos |<u_ka, u_lb>|,

    or with ``proximity`` another one. It begins with a cluster for each client and merges the nearest two until they
    are more than beta apart. From then on the members of a cluster train its model, which begins as w_0:

        w_c <- sum_k n_k w_k / sum_k n_k,    k in S with c_k = c.

    A model of whose cluster nobody is sampled stays. Samples are those that the model gets, without augmentation. The
    vectors are found in float64 on the CPU; their signs, and angles beyond five decimals of a degree, do not matter. A
    class of fewer samples than p, or of dependent ones, gives as many vectors as its rank. A client without any vector
    is at a right angle to all.

    Server: w_c, c_k, U_k. Client: nothing. Down: w_c and c. Up: w_k and n_k, and U_k before the first round. Evaluated:
    the model of the client's cluster (``personalized``), also for clients never sampled; with ``finetune_epochs`` also
    this model after fine-tuning (``finetuned``). There is no global model. A newcomer takes the model of the cluster
    that is nearest by ``linkage``, however far that is; the clusters stay.

    References:
        Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin: Efficient Distribution Similarity Identification in
        Clustered Federated Learning via Principal Angles Between Client Data Subspaces, AAAI 2023.
    """

    name: Literal["pacfl"] = "pacfl"
    no_privacy: ClassVar[str] = "its clients send singular vectors of their samples"
    citation: ClassVar[str] = "Vahidian et al., AAAI 2023"
    server_keeps: ClassVar[str] = "w_c, c_k, U_k"
    newcomer: ClassVar[str] = "the model of the cluster with the nearest subspaces"
    kept_on_server: ClassVar[str] = (
        "singular vectors of each client's samples, and a model of each cluster (as many as clients, at most)"
    )

    vectors: int = setting(3, "p", "singular vectors of each class", ge=1, kept=True)
    threshold: float = setting(
        10.0,
        "beta",
        "clusters further apart than this many degrees are not merged; 0: only clients that are equal share a model",
        ge=0,
        kept=True,
        only={"clusters": (None,)},
    )
    clusters: int | None = setting(
        None, "Z", "merge until there are at most that many clusters; null: by the threshold", ge=1, kept=True
    )
    proximity: Proximity = setting(
        "vectors",
        "A",
        "vectors: least angle between a vector of each (authors' code); subspaces: smallest principal angle of the "
        "spans of all vectors (paper, eq. 2); sum: of the angles between vectors of the same class and rank (paper, "
        "eq. 3), 90 degrees for each that only one client has",
        kept=True,
        unless={"clusters": (1,)},
    )
    by_class: bool = setting(
        True, "", "singular vectors of the samples of each class, or of all samples together", kept=True
    )
    linkage: Linkage = setting(
        "average",
        "",
        "distance of two clusters: average over pairs of clients; weighted: mean of those of the two that were merged "
        "(authors' code); complete: largest; single: least",
        kept=True,
        unless={"clusters": (1,)},
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of a cluster's mean: samples n_k / sum over its clients in the cohort, or uniform"
    )

    def needed(self) -> Mapping[Trait, str]:
        why = "signatures are by class, which algorithm.by_class=false changes"
        return {"classes": why} if self.by_class else {}

    def check_task(self, task: Task) -> None:
        spec = getattr(task, "spec", None)
        if spec is not None and spec.kind == "tokens":
            raise ConfigError(
                f"algorithm: pacfl cannot learn task={task.name} from rows of tokens: their numbers are names, and "
                "span no subspace. Choose another method, such as hypcluster or cfl"
            )
        if spec is not None and spec.kind == "graph":
            raise ConfigError(
                f"algorithm: pacfl cannot learn task={task.name} from graphs: nodes are in no order, so that equal "
                "graphs may span other subspaces. Choose another method, such as hypcluster or cfl"
            )
        super().check_task(task)

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        """See :class:`KeptModels`; vectors are in float64, and numbers beside them do not count."""
        everybody, spec = context.num_clients, getattr(task, "spec", None)
        groups = spec.num_classes if spec is not None and self.by_class else 1
        vectors = 0 if spec is None else 8 * self.vectors * groups * math.prod(spec.shape)
        return everybody * vectors + min(self.clusters or everybody, everybody) * largest_model(task)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"models": {"0": super().init(task, context)["model"]}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        found = {} if "clusters" in server else self.clustered(server["models"]["0"], clients)
        models, numbers = ({**server, **found}[key] for key in ("models", "clusters"))
        own = {client: numbers[str(client)] for client in cohort}
        payloads = {client: {"model": models[str(number)], "cluster": number} for client, number in own.items()}
        means = clients.means(self.local_update, cohort, broadcast={}, payloads=payloads)
        return {**found, "models": {**models, **means}}

    def clustered(self, model: Tree, clients: Clients) -> Tree:
        """Returns the signatures of all clients, their clusters, and the clusters' models.

        Args:
            model: w_0, with which every cluster begins.
            clients: all are asked, sampled or not.
        """
        everyone = range(clients.context.num_clients)
        replies = clients.map(self.describe, everyone, broadcast={}, required=True)
        matrix = proximity_matrix(list(replies.values()), self.proximity)
        groups = hierarchical_clusters(matrix, self.linkage, self.threshold, self.clusters)
        numbers = {client: number for number, members in enumerate(groups) for client in members}
        return {
            "signatures": {str(client): one for client, one in replies.items()},
            "clusters": {str(client): numbers[client] for client in everyone},
            "models": {str(number): model for number in range(len(groups))},
        }

    async def describe(self, client: Client) -> Tree:
        """Returns the client's signature U_k."""
        return self.signature_of(client)

    def signature_of(self, client: Client) -> Tree:
        """Returns the singular vectors of the client's training samples and their classes."""
        samples = client.examples("train")
        return signature(samples.x, samples.y if self.by_class else None, self.vectors)

    async def local_update(self, client: Client, model: Tree, cluster: int) -> Weighted:
        """Trains the model of the client's cluster."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return Weighted(trained, weight, group=str(cluster))

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's cluster's model; to newcomers all of them, with what tells which is nearest."""
        models, numbers = server["models"], server.get("clusters", {})
        own = {k: {"model": models[str(numbers.get(str(k), 0))]} for k in range(context.num_clients)}
        late = {key: server[key] for key in ("models", "clusters", "signatures")} if numbers else {"model": models["0"]}
        return {}, own | dict.fromkeys(context.newcomers, late)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"] if "model" in server else self.nearest_model(client, server)
        return await self.rows(client, model)

    def nearest_model(self, client: Client, server: Tree) -> Tree:
        """Returns the model of the cluster that a newcomer is nearest to, of equal ones the first."""
        numbers = server["clusters"]
        signatures = [server["signatures"][known] for known in numbers]
        (row,) = angles([self.signature_of(client)], signatures, self.proximity)
        found: Tree = server["models"][str(nearest_cluster(row, list(numbers.values()), self.linkage))]
        return found
