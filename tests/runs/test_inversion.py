"""``rayfl invert``: what messages give away of samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from cluster.replay import sent_message
from rayfl.cli.entry import app
from rayfl.cli.outputs import OUTPUTS
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError, RunError
from rayfl.runs.attackable import check_attack
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.gradient_matching import Attack
from rayfl.runs.inversion import displacement, inverted

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Runs digits with one local step on two samples unless told otherwise; each run is made once."""
    folder, made = tmp_path_factory.mktemp("inversion"), dict[str, Path]()

    def run(name: str, **more: Any) -> Path:
        if name not in made:
            train = {"rounds": 2, "clients_per_round": "all", "local_epochs": 1, "batch_size": 2, "lr": 0.1}
            content = {
                "name": name,
                "storage_path": str(folder),
                "dataset": "digits",
                "partition": {"name": "iid", "num_clients": 4},
                "model": {"name": "two_nn", "hidden": [64]},
                "algorithm": "fedavg",
                "tracking": {"tensorboard": False},
                "cluster": {"backend": "inline"},
                **more,
                "train": {**train, "max_local_steps": 1, **more.get("train", {})},
            }
            rayfl.run(content)
            made[name] = folder / name
        return made[name]

    return run


def opened(path: Path) -> RunFolder:
    return open_run(str(path), Experiment)


def asked(run: Path, *options: Any) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["invert", str(run), "--json", "--iterations", "200", *map(str, options)])
    assert found.exit_code == 0, (found.output, found.exception)
    answer: dict[str, Any] = json.loads(found.stdout)
    assert answer.keys() == {"schema", *OUTPUTS["invert"]}
    return answer


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (("--objective", "l2"), ("--round", 2, "--client", 3))),
    ],
)
def test_one_step_gives_its_samples_away(make: Make, options: tuple[Any, ...]) -> None:
    found = asked(make("plain"), *options)
    scores = found["scores"]
    assert found["agreement"] == pytest.approx(1, abs=1e-4) and found["steps"] == 1
    assert scores["samples"] == scores["nearer"] == 2
    assert scores["psnr"] > scores["guess_psnr"] + 10
    assert asked(make("plain"), *options) == found


@pytest.mark.slow
def test_noise_of_a_clients_steps_hides_them(make: Make) -> None:
    privacy = {"example_clip_norm": 1.0, "example_noise_multiplier": 2.0}
    private = make("noised", privacy=privacy, train={"batch_size": 4})
    with_samples = next(client for client in range(4) if _samples(private, client))
    found = asked(private, "--client", with_samples)
    assert found["agreement"] < 0.5
    assert found["scores"]["psnr"] < found["scores"]["guess_psnr"] + 1


def _samples(run: Path, client: int) -> int:
    """How many samples the Poisson mini-batch of round 1 has."""
    found = CliRunner().invoke(app, ["invert", str(run), "--client", str(client), "--iterations", "1", "--json"])
    return json.loads(found.stdout)["scores"]["samples"] if found.exit_code == 0 else 0


def test_messages_are_attacked_as_they_are_sent(make: Make) -> None:
    plain = sent_message(opened(make("plain")), 1, 0)
    changes = {name: plain.sent[name] - plain.received[name] for name in plain.sent}
    norm = torch.stack([change.square().sum() for change in changes.values()]).sum().sqrt()
    clip = {"clip_norm": float(norm) / 4, "noise_multiplier": 1e-3}
    uniform = {"name": "fedavg", "aggregation": "uniform"}
    clipped = sent_message(opened(make("clipped", privacy=clip, algorithm=uniform)), 1, 0)
    for name, change in changes.items():
        torch.testing.assert_close(clipped.sent[name] - clipped.received[name], change / 4, atol=1e-6, rtol=1e-3)
    top = {"name": "top_k", "share": 0.1}
    compressed = sent_message(opened(make("compressed", compression=top)), 1, 0)
    kept = sum(int((compressed.sent[n] != compressed.received[n]).sum()) for n in compressed.sent)
    assert kept <= 0.1 * sum(leaf.numel() for leaf in compressed.sent.values()) + 1
    said = CliRunner().invoke(app, ["invert", str(make("clipped")), "--iterations", "2", "--objective", "l2"])
    assert "this message has none" in said.stderr and "--objective l2 supposes" in said.stderr


@pytest.mark.slow
def test_several_steps_are_taken_for_one_gradient(make: Make) -> None:
    run = make("steps", train={"max_local_steps": 3, "momentum": 0.5, "weight_decay": 0.01})
    found = asked(run)
    assert found["steps"] == 3 and 3 <= found["scores"]["samples"] <= 6
    assert 0.9 < found["agreement"] < 1
    with pytest.raises(ConfigError, match="that needs one local step, and there were 3"):
        inverted(opened(run), 1, 0, sent_message(opened(run), 1, 0), Attack(iterations=1), "inferred")


def test_the_length_of_a_message_is_that_of_its_gradients() -> None:
    """The way of SGD from 0 where every gradient is 1, as PyTorch goes it."""
    tried: list[dict[str, Any]] = [{}, {"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.3}]
    for options in [*tried, {"momentum": 0.8, "nesterov": True}]:
        place = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD([place], lr=1, **options)
        for _ in range(4):
            place.grad = torch.ones(())
            optimizer.step()
        assert displacement(TrainConfig(**options), 4) == pytest.approx(-place.item(), rel=1e-6)


def test_labels_can_be_inferred(make: Make) -> None:
    single = make("single", train={"batch_size": 1})
    for client in range(4):
        assert (
            asked(single, "--client", client, "--labels", "inferred", "--iterations", 1)["scores"]["labels_right"] == 1
        )


def test_the_samples_are_those_that_the_client_trained_on(make: Make) -> None:
    run = opened(make("plain"))
    found = inverted(run, 1, 1, sent_message(run, 1, 1), Attack(iterations=1))
    own = run.parts.dataset.load(1)["train"]
    np.testing.assert_array_equal(found.originals, own.x[found.places].numpy())
    np.testing.assert_array_equal(found.labels, own.y[found.places].numpy())
    others = [run.parts.dataset.load(client)["train"] for client in (0, 2, 3)]
    means = [torch.cat([part.x[part.y == int(label)] for part in others]).mean(0) for label in found.labels]
    errors = [np.square(found.originals[place] - mean.numpy()).mean() for place, mean in enumerate(means)]
    np.testing.assert_allclose(found.guesses, errors, rtol=1e-5)


def test_normalized_images_are_in_units_of_their_pixels(make: Make) -> None:
    run = opened(make("normalized", transform={"normalize": "dataset"}))
    found = inverted(run, 1, 0, sent_message(run, 1, 0), Attack(iterations=200))
    assert found.originals.min() == pytest.approx(0, abs=1e-5) and found.originals.max() == pytest.approx(1, abs=1e-5)
    assert found.scores()["psnr"] > found.scores()["guess_psnr"] + 5


def test_vectors_have_no_ratio(make: Make, tmp_path: Path) -> None:
    run = make("vectors", **VECTORS)
    found = asked(run, "--client", 1, "--out", tmp_path / "vectors.png")
    scores = found["scores"]
    assert scores["psnr"] is None and scores["guess_psnr"] is None
    assert scores["mse"] < 0.1 * scores["guess_mse"]
    assert Path(found["file"]).stat().st_size > 1000


VECTORS: dict[str, Any] = {
    "dataset": {"name": "synthetic", "num_clients": 4},
    "partition": "natural",
    "model": {"name": "tabular_mlp", "hidden": [64]},
    "train": {"batch_size": 1},
}


def test_the_table_and_the_figure(make: Make, tmp_path: Path) -> None:
    options = ["--iterations", "30", "--out", str(tmp_path / "found.png")]
    found = CliRunner().invoke(app, ["invert", str(make("plain")), *options])
    assert found.exit_code == 0, found.output
    assert "fedavg, round 1, client 0: 1 local step on 2 samples, labels known" in found.stdout
    assert "PSNR" in found.stdout and "MSE of a guess" in found.stdout
    assert (tmp_path / "found.png").stat().st_size > 1000
    refused = CliRunner().invoke(app, ["invert", str(make("plain")), "--out", str(tmp_path / "found.txt")])
    assert isinstance(refused.exception, ConfigError) and ".png" in str(refused.exception)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("scaffold", {"algorithm": "scaffold"}, "clients of scaffold send is no gradient of their loss"),
        (
            "fedsam",
            {"algorithm": "fedsam"},
            r"fedsam send is no gradient of their loss: nobody has said .* \(no_gradient\)",
        ),
        ("fedper", {"algorithm": "fedper"}, r"fedper send is no gradient .* after one training on their loss alone"),
        ("adam", {"train": {"optimizer": "adam"}}, r"train.optimizer=adam are no gradients"),
        ("augmented", {"augment": {"crop": 1}}, "changed images"),
        ("kept", {"train": {"momentum": 0.5, "persist_optimizer": True}}, "momentum of earlier rounds"),
        ("malicious", {"attack": {"share": 0.5, "message": "sign_flip"}}, "is malicious"),
    ],
)
@pytest.mark.two_cases
def test_what_is_no_gradient_is_refused(make: Make, name: str, more: dict[str, Any], why: str) -> None:
    run = opened(make(name, **more))
    client = min(run.parts.attackers, default=0)
    with pytest.raises(ConfigError, match=why):
        check_attack(run, client, "known")


def test_tokens_and_other_tasks_are_refused(make: Make) -> None:
    texts = {
        "dataset": {"name": "synthetic_text", "num_clients": 3, "texts": 20, "length": 8, "vocabulary": 9},
        "task": "language_model", "partition": "natural", "model": {"name": "window_lm", "embedding": 4, "hidden": 8},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="its inputs are tokens"):
        check_attack(opened(make("texts", **texts)), 0, "known")
    survival = {
        "dataset": {"name": "synthetic_survival", "num_clients": 3, "samples": 30, "dimension": 4},
        "task": "survival", "partition": "natural", "model": {"name": "tabular_mlp"}, "train": {"batch_size": 10},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="a run of survival; invert is for task=classification"):
        check_attack(opened(make("survival", **survival)), 0, "known")


def test_rounds_and_clients_that_are_not_there(make: Make) -> None:
    run = opened(make("plain"))
    with pytest.raises(ConfigError, match="has rounds 1 to 2, not 3"):
        sent_message(run, 3, 0)
    with pytest.raises(ConfigError, match="client 7 took no part"):
        sent_message(run, 1, 7)
    still = opened(make("still", train={"lr": 0.0}))
    with pytest.raises(RunError, match="learning rate of round 1 is 0"):
        inverted(still, 1, 0, sent_message(still, 1, 0), Attack(iterations=1))
    many = opened(make("many", train={"max_local_steps": None, "batch_size": None}))
    with pytest.raises(ConfigError, match="invert looks for 256 at most"):
        inverted(many, 1, 0, sent_message(many, 1, 0), Attack(iterations=1))
