"""FedFed: an oracle in plain PyTorch, FedAvg and FedProx, both modes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from algorithms.fedavg import FedAvg
from algorithms.fedfed import FedFed
from algorithms.fedprox import FedProx
from rayfl.engine.gradients.counted_normals import normals
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.params import leaves
from rayfl.tasks.classification import Classification
from tests.support.both_modes import assert_modes_agree
from tests.support.fedfed_toys import CODE, COHORTS, INPUTS, SIZES, SMALL, TRAIN, first_autoencoder, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, assert_close, assert_equal, random_clients

BOUNDED: dict[str, Any] = {"noise": 0.4, "bound": 0.3, "code_weight": 0.2, "shared_weight": 0.7}
BOUNDED |= {"sensitive_weight": 1.5, "input_weight": 0.6, "bound_weight": 3.0}


def logits(tree: dict[str, Tensor], x: Tensor) -> Tensor:
    """The model's outputs, by the paths of its tensors."""
    hidden = torch.relu(x @ tree["model/inner.weight"].T + tree["model/inner.bias"])
    return hidden @ tree["model/head.weight"].T + tree["model/head.bias"]


def layer(tree: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ tree[f"autoencoder/{name}/matrix"].T + tree[f"autoencoder/{name}/offset"]


def code(tree: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    both = layer(tree, "encodes", layer(tree, "reads", x).clamp(min=0))
    return both[:, :CODE], both[:, CODE:]


def robust(tree: dict[str, Tensor], z: Tensor) -> Tensor:
    return layer(tree, "writes", layer(tree, "unfolds", z).clamp(min=0))


def first_loss(tree: dict[str, Tensor], x: Tensor, y: Tensor, drawn: Tensor, options: dict[str, Any]) -> Tensor:
    """The first stage's objective sample by sample, with PyTorch's own Gaussians."""
    method, total = FedFed(**options), x.new_zeros(())
    for i in range(len(y)):
        mean, log_variance = code(tree, x[i : i + 1])
        deviation = log_variance.exp().sqrt()
        features = x[i : i + 1] - robust(tree, mean + deviation * drawn[i, :CODE])
        noisy = features + method.noise * drawn[i, CODE:]
        total = total + method.sensitive_weight * F.cross_entropy(logits(tree, noisy), y[i : i + 1])
        total = total + method.input_weight * F.cross_entropy(logits(tree, x[i : i + 1]), y[i : i + 1])
        total = total + method.bound_weight * max(features.square().mean() - method.bound, x.new_zeros(()))
        apart = kl_divergence(Normal(mean, deviation), Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        total = total + method.code_weight * apart.mean()
    return total / len(y)


def second_loss(
    tree: dict[str, Tensor], own: tuple[Tensor, Tensor], lent: tuple[Tensor, Tensor], anchor: Any, options: Any
) -> Tensor:
    near = sum(((tree[path] - anchor[path]) ** 2).sum() for path in tree)
    value = F.cross_entropy(logits(tree, own[0]), own[1])
    value = value + options.get("shared_weight", 1.0) * F.cross_entropy(logits(tree, lent[0]), lent[1])
    return value + options.get("proximal_weight", 0.0) / 2 * near


VERSIONS: list[dict[str, Any]] = [
    {},
    {**BOUNDED},
    {**BOUNDED, "aggregation": "uniform", "proximal_weight": 0.3, "distillation_epochs": 2},
]


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("options", VERSIONS)
def test_inv_fedfed_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], double: bool) -> None:
    options = {**SMALL, **options}
    dtype = torch.float64 if double else torch.float32
    toy = toy_of(FedFed(**options), data=random_clients(SIZES, dtype=dtype), task=two_layers(double=double))
    streams = toy.context.streams
    server = {path: leaf.clone() for path, leaf in leaves(toy.server) if isinstance(leaf, Tensor)}
    server |= first_autoencoder(toy, next(iter(server.values())))
    shared: dict[str, Tensor] = {}
    for round, cohort in enumerate(COHORTS):
        if round == 2:
            found = []
            for i, n in enumerate(SIZES):
                x = toy.dataset.load(i)["train"].x
                noise = torch.from_numpy(streams.generator("features", round, i).standard_normal((n, INPUTS))).to(dtype)
                found.append(x - robust(server, code(server, x)[0]) + options.get("noise", 0.15) * noise)
            shared = {"x": torch.cat(found), "y": torch.cat([toy.dataset.load(i)["train"].y for i in range(4)])}
            server = {path: leaf for path, leaf in server.items() if path.startswith("model/")}
        total = len(cohort) if options.get("aggregation") == "uniform" else sum(SIZES[i] for i in cohort)
        mean = {path: torch.zeros_like(leaf) for path, leaf in server.items()}
        for i in cohort:
            part, n = toy.dataset.load(i)["train"], SIZES[i]
            tree = {path: leaf.clone().requires_grad_() for path, leaf in server.items()}
            epochs = options.get("distillation_epochs", 1) if round < 2 else 2
            steps = epochs * -(-n // 4)
            plan = plan_batches(n, 4, steps, streams.generator("batches", round, i))
            mix = streams.generator("mix", round, i)
            optimizer: torch.optim.Optimizer
            if round < 2:
                optimizer = torch.optim.Adam(list(tree.values()), lr=options["distillation_lr"])
                keys = torch.from_numpy(mix.integers(256, size=(steps, 4, 7)).astype("float64")).to(dtype)
            else:
                optimizer = torch.optim.SGD(list(tree.values()), lr=0.1, momentum=0.5, weight_decay=0.01)
                drawn = streams.generator("shared", round, i).choice(sum(SIZES), n, replace=False)
                lent = {name: leaf[torch.from_numpy(drawn)] for name, leaf in shared.items()}
                order = [int(place) for _ in range(-(-steps * 4 // n)) for place in mix.permutation(n)]
            for step, index in enumerate(plan.batches(CPU)):
                optimizer.zero_grad()
                x, y = part.x[index], part.y[index]
                if round < 2:
                    rows = torch.stack([normals(key, CODE + INPUTS) for key in keys[step][: len(y)]])
                    first_loss(tree, x, y, rows, options).backward()
                else:
                    places = order[4 * step : 4 * step + len(y)]
                    second_loss(tree, (x, y), (lent["x"][places], lent["y"][places]), server, options).backward()
                optimizer.step()
            share = (1 if options.get("aggregation") == "uniform" else n) / total
            mean = {path: mean[path] + share * tree[path].detach() for path in mean}
        server = mean
        toy.step(cohort)
        expected = {**server, **{f"shared/{name}": leaf for name, leaf in shared.items()}}
        have = {path: leaf for path, leaf in leaves(toy.server) if isinstance(leaf, Tensor)}
        assert_close(have, expected, 1e-12 if double else 1e-5)
    assert not any(toy.states().values())


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, FedAvg()), ({"proximal_weight": 0.3}, FedProx(proximal_weight=0.3)), ({"aggregation": "uniform"}, FedAvg())],
)
def test_inv_fedfed_2_without_shared_features_the_second_stage_is_fedavg_or_fedprox(
    options: dict[str, Any], plain: FedAvg
) -> None:
    plain = plain.model_copy(update={"aggregation": options.get("aggregation", "samples")})
    toy, other = toy_of(FedFed(**SMALL, **options, shared_weight=0)), toy_of(plain)
    for cohort in COHORTS[:2]:
        toy.step(cohort)
    other.server, other.round = {"model": toy.server["model"]}, 2
    for cohort in COHORTS[2:]:
        assert_equal(toy.step(cohort)["model"], other.step(cohort)["model"])
        assert "shared" not in toy.server
    used = toy_of(FedFed(**SMALL, **options))
    for cohort in COHORTS:
        used.step(cohort)
    assert not torch.equal(used.server["model"]["head.weight"], toy.server["model"]["head.weight"])


def test_who_begins_to_share_later_shares_what_the_trained_autoencoder_leaves() -> None:
    late, early = toy_of(FedFed(**SMALL, noise=0, shared_weight=0)), toy_of(FedFed(**SMALL, noise=0))
    for cohort in COHORTS[:3]:
        late.step(cohort), early.step(cohort)
    fork = toy_of(FedFed(**SMALL, noise=0))
    fork.server, fork.round = late.server, 3
    assert_equal(fork.step(COHORTS[3])["shared"], early.server["shared"])


@pytest.mark.parametrize("options", [{}, {**BOUNDED, "proximal_weight": 0.2}, {"shared_weight": 0.0}])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    assert_modes_agree(FedFed(**{**SMALL, **options}), (8, 12, 6, 10), TRAIN, double, 1e-12 if double else 1e-5)


def test_a_whole_batch_of_clients_of_different_sizes_agrees_in_both_modes() -> None:
    train = TRAIN.model_copy(update={"batch_size": None})
    assert_modes_agree(FedFed(**SMALL), SIZES, train, True, 1e-12)


def test_running_statistics_are_those_of_samples_and_features_together_in_both_modes() -> None:
    sizes = (8, 12, 6, 10)  # no last mini-batch of one sample
    looped, stacked = (
        toy_of(FedFed(**SMALL), task=normalized_layers(), data=random_clients(sizes), mode=mode)
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        # a bias before a normalization has no gradient but rounding, which Adam scales up
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
    mean = looped.server["model"]["norm.running_mean"]
    assert not torch.equal(mean, looped.task.network.initialize(0)["norm.running_mean"])


def test_what_is_refused_and_remarked() -> None:
    toy = toy_of(FedFed(**SMALL))
    FedFed().check_task(toy.task)
    texts = Classification(two_layers().network, spec=InputSpec("tokens", (5,), 3, vocabulary=9))
    with pytest.raises(ConfigError, match="fedfed cannot learn task=classification from rows of tokens"):
        FedFed().check_task(texts)
    for option in ("noise", "bound", "shared_weight", "proximal_weight", "distillation_rounds"):
        with pytest.raises(ValueError, match=option):
            FedFed(**{option: -1})  # type: ignore[arg-type]
    assert FedFed(distillation_rounds=4).remarks(toy.context) == ()
    (said,) = FedFed(distillation_rounds=5).remarks(toy.context)
    assert "algorithm.distillation_rounds is 5, and the run has 5 rounds" in said
    (idle,) = FedFed(bound=0.2, bound_weight=0).idle_settings()
    assert "bound_weight" in idle
