"""Augmentation: what it does to images, that it is the same everywhere, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.pfedme import PFedMe
from algorithms.superfed import SuPerFed
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.transform import Normalization, TransformConfig
from rayfl.data.images.variations import Variations
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.problems import SmallCNN
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal

IMAGE = InputSpec("image", (1, 6, 6), 4)
SIZES = (9, 17, 4, 12)
TRAIN = TrainConfig(rounds=3, clients_per_round=3, local_epochs=2, batch_size=5, lr=0.1, momentum=0.5)
EVERYTHING = AugmentConfig(crop=2, flip=True, rotate=30)


def augmentation(config: AugmentConfig, spec: InputSpec = IMAGE, black: Sequence[float] = (0.0,)) -> Augmentation:
    built = config.build(spec, np.array(black, dtype=np.float32))
    assert built is not None
    return built


def pictures(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def image_clients(sizes: Sequence[int] = SIZES) -> ListDataset:
    generator = torch.Generator().manual_seed(3)
    return ListDataset(
        [(torch.rand(n, 1, 6, 6, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes],
        classes=4,
    )


def toy(config: AugmentConfig | None, algorithm: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(
        algorithm or FedAvg(),
        image_clients(),
        Classification(Network(SmallCNN)),
        train,
        augmentation=None if config is None else config.build(IMAGE, np.zeros(1, dtype=np.float32)),
        **options,
    )


@pytest.mark.parametrize("padding", ["black", "reflect"])
@pytest.mark.parametrize("shift", [(0, 0), (-2, 1), (2, 2), (0, -2)])
def test_a_crop_is_a_window_of_the_padded_image(padding: Any, shift: tuple[int, int]) -> None:
    x = pictures(1, 3, 5, 7)
    apply = augmentation(AugmentConfig(crop=2, padding=padding), InputSpec("image", (3, 5, 7), 4), (0.5, 1.0, -2.0))
    if padding == "reflect":
        padded = nn.functional.pad(x, (2, 2, 2, 2), mode="reflect")
    else:
        black = torch.tensor([0.5, 1.0, -2.0])[None, :, None, None]
        padded = nn.functional.pad(x - black, (2, 2, 2, 2)) + black
    down, right = shift
    window = padded[:, :, 2 + down : 7 + down, 2 + right : 9 + right]
    torch.testing.assert_close(apply(x, {"shift": torch.tensor([shift])}), window)


def test_a_flip_mirrors_left_and_right() -> None:
    x = pictures(2, 1, 6, 6)
    flipped = augmentation(AugmentConfig(flip=True))(x, {"flip": torch.tensor([True, False])})
    assert torch.equal(flipped, torch.stack([x[0].flip(-1), x[1]]))


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_a_rotation_by_quarters_moves_whole_pixels(quarters: int) -> None:
    x = pictures(1, 2, 6, 6)
    angle = np.pi / 2 * quarters
    turn = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float64)
    spec = InputSpec("image", (2, 6, 6), 4)
    turned = augmentation(AugmentConfig(rotate=180), spec, (0.0, 0.0))(x, {"turn": turn})
    assert any(torch.equal(turned, torch.rot90(x, k, (2, 3))) for k in (quarters, -quarters))


def test_corners_of_a_rotated_image_are_black() -> None:
    x = torch.ones(1, 1, 9, 9)
    turn = torch.tensor([[np.cos(np.pi / 4), np.sin(np.pi / 4)]], dtype=torch.float64)
    turned = augmentation(AugmentConfig(rotate=45), InputSpec("image", (1, 9, 9), 2), (-3.0,))(x, {"turn": turn})
    assert turned[0, 0, 0, 0] == -3 and turned[0, 0, 4, 4] == 1
    assert set(turned.unique().tolist()) == {-3.0, 1.0}


@given(
    crop=st.integers(0, 5),
    padding=st.sampled_from(["black", "reflect"]),
    flip=st.booleans(),
    rotate=st.sampled_from([0.0, 20.0, 180.0]),
    count=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_every_pixel_is_one_of_the_image_or_black(
    crop: int, padding: Any, flip: bool, rotate: float, count: int, seed: int
) -> None:
    config = AugmentConfig(crop=crop, padding=padding if crop else "black", flip=flip, rotate=rotate)
    built = config.build(IMAGE, np.array([7.0], dtype=np.float32))
    assert (built is None) == (config == AugmentConfig())
    if built is None:
        return
    x = pictures(count, 1, 6, 6)
    drawn = built.draw(np.random.default_rng(seed), count)
    changed = built(x, drawn)
    assert changed.shape == x.shape
    for before, after in zip(x, changed, strict=True):
        assert set(after.flatten().tolist()) <= {*before.flatten().tolist(), 7.0}
    for i in range(count):
        alone = built(x[i : i + 1], {name: values[i : i + 1] for name, values in drawn.items()})
        assert torch.equal(alone, changed[i : i + 1])


def test_draws_are_uniform_and_within_their_limits() -> None:
    drawn = augmentation(AugmentConfig(crop=4, flip=True, rotate=20)).draw(np.random.default_rng(0), 20_000)
    shares = torch.bincount(drawn["shift"].flatten() + 4) / 40_000
    assert len(shares) == 9 and (shares - 1 / 9).abs().max() < 0.01
    assert abs(drawn["flip"].double().mean() - 0.5) < 0.02
    angles = torch.atan2(drawn["turn"][:, 1], drawn["turn"][:, 0]).rad2deg()
    assert angles.abs().max() <= 20 and abs(angles.mean()) < 0.5 and angles.abs().mean() == pytest.approx(10, abs=0.3)


def test_black_is_a_pixel_of_value_0_as_the_model_sees_it() -> None:
    transform = TransformConfig(normalize=Normalization(mean=(0.5, 0.25), std=(0.5, 2.0)))
    preprocess = transform.build(InputSpec("image", (2, 3, 3), 2), lambda: pytest.fail("moments are not needed"))
    np.testing.assert_allclose(preprocess.black, [-1, -0.125])
    np.testing.assert_array_equal(preprocess.black, preprocess(np.zeros((1, 2, 3, 3), dtype=np.uint8))[0, :, 0, 0])


METHODS = pytest.mark.parametrize(
    "algorithm",
    [FedAvg(finetune_epochs=1), SuPerFed(mode="mm", start=0.0), PFedMe(inner_steps=3, proximal_weight=1.0)],
    ids=["fedavg", "superfed", "pfedme"],
)


def fitting(algorithm: Any) -> TrainConfig:
    return TRAIN.model_copy(update={"momentum": 0.0}) if isinstance(algorithm, PFedMe) else TRAIN


@METHODS
@pytest.mark.parametrize("config", [EVERYTHING, AugmentConfig(crop=3, padding="reflect")], ids=["all", "reflect"])
@pytest.mark.two_cases
def test_looped_and_vectorised_agree(algorithm: Any, config: AugmentConfig) -> None:
    train = fitting(algorithm)
    looped = toy(config, algorithm, train, mode="looped")
    vectorized = toy(config, algorithm, train, mode="vectorized")
    assert_close(looped.run(), vectorized.run(), 1e-5)
    assert_close(
        {str(client): state for client, state in looped.states().items()},
        {str(client): state for client, state in vectorized.states().items()},
        1e-5,
    )


@METHODS
@pytest.mark.two_cases
def test_one_and_three_hosts_give_the_same_bits(algorithm: Any) -> None:
    train = fitting(algorithm)
    one, three = toy(EVERYTHING, algorithm, train, hosts=1), toy(EVERYTHING, algorithm, train, hosts=3)
    assert_equal(one.run(), three.run())
    alone, shared = one.scores(), three.scores()
    for client, rows in alone.items():
        for model, statistics in rows.items():
            assert statistics.vector.tolist() == shared[client][model].vector.tolist()


@METHODS
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.two_cases
def test_without_it_results_are_those_of_an_experiment_that_never_heard_of_it(algorithm: Any, mode: str) -> None:
    train = fitting(algorithm)
    assert_equal(toy(None, algorithm, train, mode=mode).run(), toy(AugmentConfig(), algorithm, train, mode=mode).run())


def test_it_changes_training_and_not_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, augmented = toy(None), toy(EVERYTHING)
    assert_equal(plain.server, augmented.server)
    assert (plain.run()["model"]["head.weight"] - augmented.run()["model"]["head.weight"]).abs().max() > 1e-3


def test_streams_are_told_apart_by_round_client_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []
    generator = RandomStreams.generator

    def noting(self: RandomStreams, name: str, round: int = -1, client: int = -1) -> Any:
        if name.startswith("augment"):
            asked.append((name, round, client))
        return generator(self, name, round, client)

    monkeypatch.setattr(RandomStreams, "generator", noting)
    run = toy(EVERYTHING, FedAvg(finetune_epochs=1))
    run.step([0, 2])
    run.step([2, 3])
    run.scores(final=True)
    training = [("augment", 0, 0), ("augment", 0, 2), ("augment", 1, 2), ("augment", 1, 3)]
    assert asked == training + [("augment.finetune", 1, client) for client in range(4)]


def test_repeated_steps_see_a_mini_batch_changed_alike() -> None:
    built = augmentation(EVERYTHING)
    once = Variations.of_steps(built, [0, 3, 5], 1, np.random.default_rng(5))
    twice = Variations.of_steps(built, [0, 3, 6, 8, 10], 2, np.random.default_rng(5))
    for name, values in once.drawn.items():
        assert torch.equal(twice.drawn[name], torch.cat([values[:3], values[:3], values[3:], values[3:]]))


def test_epoch_by_epoch_is_the_same_as_in_one_piece() -> None:
    tuned = FedAvg(finetune_epochs=3)
    by_epoch = FedAvg(finetune_epochs=3, finetune_select="best_val")
    results = []
    for algorithm in (tuned, by_epoch):  # without validation samples, the last epoch is taken
        run = toy(EVERYTHING, algorithm)
        run.step([0, 1])
        results.append({c: rows["finetuned"].vector.tolist() for c, rows in run.scores(final=True).items()})
    assert results[0] == results[1]


def test_full_batches_and_clients_without_steps() -> None:
    train = TRAIN.model_copy(update={"batch_size": None})
    assert_close(toy(EVERYTHING, train=train).run(), toy(EVERYTHING, train=train, mode="vectorized").run(), 1e-5)
    idle = TRAIN.model_copy(update={"local_epochs": 0})
    for mode in ("looped", "vectorized"):
        run = toy(EVERYTHING, train=idle, mode=mode)
        before = run.server["model"]
        assert_equal(run.run()["model"], before)
