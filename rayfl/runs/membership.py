"""Which samples a run's models were trained on, as far as their losses tell: membership inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from rayfl.data.partitions.arriving import GroupStages
from rayfl.engine.scoring.sample_losses import sample_losses
from rayfl.errors import ConfigError
from rayfl.metrics.membership import Membership, membership
from rayfl.runs.committed import CommittedModels, check_client, personalized_predictor, task_of

Found = tuple[int, str, np.ndarray, np.ndarray]
"""A client, its model's row, and the losses of its members and of others."""


def losses_of(
    models: CommittedModels,
    model: str | None = None,
    clients: Sequence[int] = (),
    others: Literal["test", "validation"] = "test",
    samples: int = 500,
) -> Iterator[Found]:
    """Yields the losses of clients' models on samples that they were trained on, and on others of the same client.

    Args:
        models: of a run.
        model: a row of the tables; None: each method's personalized model.
        clients: whose; none: all of those that have taken part in a round and have samples of both kinds.
        others: the split that was not trained on.
        samples: of each kind and client at most, drawn at random (stream ``inspection``).

    Raises:
        ConfigError: for an unknown client or model, one that was held out from training, has not taken part in a round
            or lacks samples, a task whose loss compares samples, or one whose splits have one graph.
    """
    parts = models.parts
    if parts.task.compares_samples or parts.task.measures.compares:
        raise ConfigError(
            f"{models.run.uri}: task={parts.task.name} compares samples with each other: none has a loss by itself"
        )
    if parts.dataset.spec.target == "nodes":
        raise ConfigError(
            f"{models.run.uri}: a client's sample is its whole graph, which is read in training and in tests alike, so "
            "that none is a sample that was not trained on"
        )
    idle = models.idle or frozenset()
    for client in clients:
        check_client(models.run, client)
        why = "was held out from training" if client >= parts.num_clients else "has taken part in no round until then"
        if client >= parts.num_clients or client in idle:
            raise ConfigError(f"client {client} {why}: none of its samples is a member")
    for client in clients or sorted(set(range(parts.num_clients)) - idle):
        lacking = [split for split in ("train", others) if not len(models.dataset.load(client)[split])]
        if lacking and clients:
            raise ConfigError(f"client {client} has no samples in the split {lacking[0]}")
        if not lacking:
            row, predictor = personalized_predictor(models, client, model)
            task = task_of(predictor, parts.task)
            drawn = (models.pooled(split, samples, [client]) for split in ("train", others))
            members, unseen = (sample_losses(predictor, task, examples) for examples in drawn)
            yield client, row, members, unseen


def caveat(models: CommittedModels) -> str:
    """Returns what else than training tells members from others, in words; empty where nothing is known."""
    config = models.run.config
    if config.noise.ratio:
        ratio = config.noise.ratio
        return f"training labels have noise (noise.ratio={ratio:g}) and others have not, which losses tell, too"
    if config.attack.on and (config.attack.labels != "honest" or config.attack.backdoor is not None):
        return "malicious clients trained on other samples than they have here, so that theirs are no members"
    if isinstance(config.stages, GroupStages) and config.stages.memory != "all":
        return f"members are of the last stage's {config.stages.name} and others of all, which losses tell, too"
    if models.idle is None:
        return "who took part in each round is not known of this run: clients that never did may be among these"
    if models.idle:
        return f"{len(models.idle)} of {models.parts.num_clients} clients had been in no round, and are left out"
    return ""


def summary(found: Sequence[Found]) -> dict[str, Any]:
    """Returns the scores of an attacker: of each client's model by itself, and of all samples together.

    Args:
        found: of clients, at least one.
    """
    alone = {client: membership(members, others) for client, _, members, others in found}
    together = membership(*(np.concatenate([one[place] for one in found]) for place in (2, 3)))
    most = max(alone, key=lambda client: alone[client].auc)
    scores: dict[str, Any] = {
        "clients": len(alone), "members": together.members, "others": together.others,
        "most_exposed": most, "most_exposed_auc": alone[most].auc, "at_low_rate": together.at_low_rate,
    }  # fmt: skip
    for name in ("auc", "advantage"):
        values = [getattr(one, name) for one in alone.values()]
        scores |= {name: float(np.mean(values)), f"{name}_std": float(np.std(values))}
        scores[f"pooled_{name}"] = getattr(together, name)
    return scores


def by_client(found: Sequence[Found]) -> list[tuple[int, Membership]]:
    """Returns each client's own scores."""
    return [(client, membership(members, others)) for client, _, members, others in found]
