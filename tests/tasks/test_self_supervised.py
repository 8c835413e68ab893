"""Learning without labels: losses through the networks, and evaluation beside training samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.variations import Variations
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import MethodError, ModelError
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.representations import spread
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.siamese import Heads, siamese
from rayfl.models.zoo import TwoNN
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor
from rayfl.tasks.self_supervised import ObjectiveName, SelfSupervised, ViewLoss
from tests.metrics.test_representations import knn_by_loops, nt_xent_by_loops

torch.set_num_threads(1)
SPEC = InputSpec("image", (1, 4, 4), 3)
OBJECTIVES: tuple[ObjectiveName, ...] = ("simsiam", "simclr", "byol")
NORMS = ("batch", "none")


def made(objective: ObjectiveName = "simsiam", norm: Any = "batch", views: bool = True) -> SelfSupervised:
    heads = Heads(3, 5, 3 if objective == "simsiam" else 2, objective != "simclr", norm)
    network = siamese(TwoNN(hidden=(6,)).network(SPEC), heads, SPEC, "two_nn")
    task = SelfSupervised(network, (), SPEC, ViewLoss(objective, 0.4), neighbours=4)
    augmentation = AugmentConfig(crop=1, flip=True, jitter=1).build(SPEC, np.zeros(1, np.float32), views=2)
    assert augmentation is not None
    task.views = Variations.of_evaluation(augmentation, np.random.default_rng(0)) if views else None
    return task


def images(count: int, *views: int, seed: int = 0) -> Tensor:
    return torch.rand(count, *views, *SPEC.shape, generator=torch.Generator().manual_seed(seed))


def doubled(tree: Tree) -> dict[str, Tensor]:
    return {name: leaf.double() for name, leaf in tree.items()}


def plain(task: SelfSupervised, tree: Tree) -> nn.Module:
    """The same network of PyTorch's own modules, in float64 and training mode."""
    norm, simsiam = "projector.1.running_mean" in tree, task.objective.name == "simsiam"

    def layers(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.ReLU()]

    model = nn.Module()
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU())
    projector = nn.Sequential(*layers(6), *(layers(5) if simsiam else []), nn.Linear(5, 3))
    if simsiam and norm:
        projector.append(nn.BatchNorm1d(3, affine=False))
    model.encoder, model.projector = encoder, projector
    if task.objective.predicts:
        model.predictor = nn.Sequential(*layers(3), nn.Linear(5, 3))
    names = [name for name in model.state_dict() if "num_batches" not in name]
    assert len(names) == len(tree)
    order = [name for kind in ("encoder", "projector", "predictor") for name in names if name.startswith(kind)]
    encoders = (name for name in tree if name.startswith("encoder"))  # these have other names in the tree
    values = {name: tree[next(encoders) if name.startswith("encoder") else name].clone() for name in order}
    model.load_state_dict(values, strict=False)
    return model.double()


def by_hand(task: SelfSupervised, model: Any, x: Tensor) -> Tensor:
    """The mean loss of a mini-batch, of shape (b, 2, ...), by plain PyTorch."""
    if task.objective.name == "simclr":
        both = model.projector(model.encoder(x.flatten(0, 1))).view(-1, 2, 3)
        z = normalize(both.flatten(0, 1), dim=-1)
        logits = (z @ z.T / 0.4).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return nn.functional.cross_entropy(logits, torch.arange(len(z)).view(-1, 2).flip(1).flatten())
    z = [model.projector(model.encoder(x[:, view])) for view in (0, 1)]
    p = [model.predictor(one) for one in z]
    cosines = [nn.functional.cosine_similarity(p[v], z[1 - v].detach(), dim=-1).mean() for v in (0, 1)]
    return -sum(cosines) / 2 if task.objective.name == "simsiam" else sum(2 - 2 * one for one in cosines)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("norm", NORMS)
def test_loss_gradient_and_running_statistics_are_plain_pytorchs(objective: ObjectiveName, norm: str) -> None:
    task = made(objective, norm)
    tree = doubled(task.network.initialize(1))
    model, x = plain(task, tree), images(7, 2).double()
    expected = by_hand(task, model, x)
    leaves = {n: leaf.clone().requires_grad_(n in task.network.parameter_names) for n, leaf in tree.items()}
    found = task.loss(leaves, Batch(x, torch.zeros(7, dtype=torch.int64)))
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    slopes = torch.autograd.grad(found, [leaves[name] for name in task.network.parameter_names], materialize_grads=True)
    wanted = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    assert sum(map(torch.Tensor.numel, slopes)) == sum(map(torch.Tensor.numel, wanted))
    for slope, one in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(slope, one, rtol=1e-7, atol=1e-10)
    state = model.state_dict()
    for name in task.network.buffer_names:
        torch.testing.assert_close(leaves[name], state[name])


def test_byol_with_a_target_network_compares_with_its_projections() -> None:
    task = made("byol")
    x, tree, other = images(5, 2).double(), *(doubled(task.network.initialize(seed)) for seed in (1, 2))
    batch = Batch(x, torch.zeros(5))
    outputs, target = (task.logits({n: leaf.clone() for n, leaf in one.items()}, batch) for one in (tree, other))
    p, z = outputs[..., 3:], target[..., :3]
    cosines = nn.functional.cosine_similarity(p, z.flip(1), dim=-1)
    expected = (2 - 2 * cosines).sum(1).mean()
    assert float(task.loss_towards(outputs, target, batch)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("batch_size", [4, 100])
def test_samples_are_scored_beside_training_samples_in_whatever_batches(
    objective: ObjectiveName, batch_size: int
) -> None:
    task = made(objective)
    model = task.network.initialize(1)
    samples, training = (Examples(images(n, seed=n), torch.arange(n) % 3) for n in (9, 13))
    found = evaluate({"own": Predictor.of(model)}, samples, task, batch_size, training=training)["own"]
    features, known = (normalize(task.network.features(model, one.x), dim=-1) for one in (samples, training))
    votes = knn_by_loops(features.detach(), known.detach(), training.y.tolist(), 4, 0.1, own=False)
    metrics = found.metrics()
    assert metrics["knn_top1"] == pytest.approx(
        np.mean([a == b for a, b in zip(votes, samples.y.tolist(), strict=True)])
    )
    assert metrics["feature_std"] == pytest.approx(float(spread(features)), rel=1e-5)
    assert task.views is not None
    both = task.views.of_samples(samples.x, torch.arange(9))
    assert both.shape == (9, 2, *SPEC.shape) and not torch.equal(both[:, 0], both[:, 1])
    outputs = task.outputs(model, both).detach()
    if objective == "simclr":
        expected = np.mean(nt_xent_by_loops(outputs, 0.4))
    else:
        expected = float(task.objective(outputs).mean())
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    alone = evaluate({"own": Predictor.of(model)}, training, task, batch_size, training=training, own=True)["own"]
    left_out = knn_by_loops(known.detach(), known.detach(), training.y.tolist(), 4, 0.1, own=True)
    hits = [a == b for a, b in zip(left_out, training.y.tolist(), strict=True)]
    assert alone.metrics()["knn_top1"] == pytest.approx(np.mean(hits))


def test_several_models_have_the_mean_of_their_cosines_and_losses() -> None:
    task = made()
    models = [task.network.initialize(seed) for seed in (1, 2)]
    samples, training = (Examples(images(n, seed=n), torch.arange(n) % 3) for n in (6, 8))
    one, other, both = (
        evaluate({"own": Predictor.of(*some)}, samples, task, 100, training=training)["own"].metrics()["loss"]
        for some in (models[:1], models[1:], models)
    )
    assert both == pytest.approx((one + other) / 2, rel=1e-6)
    features, known = (task.predictions(models, part.x) for part in (samples, training))
    each = [task.predictions([model], samples.x) @ task.predictions([model], training.x).T for model in models]
    torch.testing.assert_close(features @ known.T, sum(each) / 2)


def test_without_training_samples_there_is_no_vote() -> None:
    task = made()
    samples = Examples(images(6), torch.arange(6) % 3)
    found = evaluate({"own": Predictor.of(task.network.initialize(0))}, samples, task, 4)["own"].metrics()
    assert np.isnan(found["knn_top1"]) and np.isfinite(found["loss"])


def test_images_without_views_are_refused() -> None:
    task = made()
    with pytest.raises(MethodError, match="learns from two views of each image"):
        task.loss(task.network.initialize(0), Batch(images(3), torch.zeros(3)))
    combined = Predictor.of(task.network.initialize(0), combine=lambda models, x, task: x)
    with pytest.raises(MethodError, match="a mixture of outputs has none"):
        evaluate({"own": combined}, Examples(images(3), torch.arange(3)), task, 4)


class Pooled(ClassificationModel):
    """A model whose head is applied to each row of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        return x[:, 0]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


def test_a_network_whose_last_layer_reads_no_vector_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model rows: .* its last layer reads features of shape \(4, 4\)"):
        siamese(Network(Pooled), Heads(), SPEC, "rows")
