"""Features that were made of images before stand for the images: same logits, same runs; what needs images says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits
from torch.func import vmap

import rayfl
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.models.pretrained.clip import ClipNetwork
from tests.support.adapter_runs import experiment as over_vit
from tests.support.bases import inputs, trained
from tests.support.clips import ADAPTER, NO_HEAD, PROMPT, clip_base, clip_network, clip_section
from tests.support.experiments import outcome
from tests.support.toys import assert_close

FEATURES = InputSpec("image", (32,), 10)
MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "a context": ({"length": 2}, "none"),
    "contexts": ({"length": 2, "context": "by_class"}, "none"),
    "FedCLIP": ({"context": "none"}, "features"),
    "CLIP-Adapter and a context": ({"length": 2}, {"name": "features", "form": "residual"}),
}


def reading_features(prompt: dict[str, Any], adapter: Any = "none") -> ClipNetwork:
    found = clip_section(prompt, adapter=adapter).network(FEATURES)
    assert isinstance(found, ClipNetwork)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_images(name: str) -> None:
    prompt, adapter = MODELS[name]
    whole, short = clip_network(prompt, adapter=adapter), reading_features(prompt, adapter)
    tree, x = trained(whole, 2), inputs("vit", 6, 0)
    made = whole.plain_features(tree, x)
    assert whole.reads_images and not short.reads_images and made.shape == (6, 32)
    assert short.initialize(3).keys() == whole.initialize(3).keys()
    torch.testing.assert_close(short.logits(tree, made), whole.logits(tree, x), rtol=0, atol=1e-5)
    both = {key: torch.stack([leaf, 1.1 * leaf]) for key, leaf in tree.items()}
    stacked = vmap(short.logits)(both, made.view(2, 3, 32))
    wanted = vmap(whole.logits)(both, x.view(2, 3, *x.shape[1:]))
    torch.testing.assert_close(stacked, wanted, rtol=0, atol=1e-5)
    assert (short.rows_per_sample, whole.rows_per_sample) == (1, 17)


def experiment(folder: Path, name: str, method: Any, prompt: dict[str, Any], adapter: Any, **sections: Any) -> Any:
    model = {"folder": str(clip_base()), "head": NO_HEAD, "adapter": adapter, "prompt": {**PROMPT, **prompt}}
    return over_vit(folder, name, method, model=model, **sections)


def written(folder: Path) -> dict[str, Any]:
    """The section of a data set with features of scikit-learn's digits, in their order."""
    net, digits = clip_network({"length": 2}), load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    made = net.plain_features(net.initialize(0), images).numpy()
    rows = pa.FixedSizeListArray.from_arrays(made.ravel(), 32)
    pq.write_table(pa.table({"x": rows, "y": digits.target}), folder / "features.parquet")
    return {"name": "parquet", "path": str(folder / "features.parquet"), "root": str(folder)}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fedavg", "FedCLIP"),
        pytest.param("ditto", "a context", marks=pytest.mark.slow),
        pytest.param("fedpgp", "contexts", marks=pytest.mark.slow),
        pytest.param({"name": "pfedmoap", "peers": 1}, "contexts", marks=pytest.mark.slow),
    ],
)
def test_runs_are_those_on_the_images(method: Any, name: str, tmp_path: Path) -> None:
    prompt, adapter = MODELS[name]
    train = {"optimizer": "sgd", "lr": 0.002}
    rayfl.run(experiment(tmp_path, "images", method, prompt, adapter, train=train))
    rayfl.run(experiment(tmp_path, "features", method, prompt, adapter, train=train, dataset=written(tmp_path)))
    one, other = outcome(tmp_path / "images"), outcome(tmp_path / "features")
    assert_close(one.server, other.server, 2e-5)
    assert one.states.keys() == other.states.keys()
    for client in one.states:
        assert_close(one.states[client], other.states[client], 2e-5)


def test_vectors_of_another_width_and_adapters_in_the_tower_are_refused() -> None:
    with pytest.raises(ModelError, match="needs images, or vectors of the 32 features that the base makes of them"):
        clip_section({"length": 2}).network(InputSpec("image", (33,), 10))
    with pytest.raises(ModelError, match=r"model\.adapter=lora is in the image tower, and the data are features"):
        clip_section({"length": 2}, adapter=ADAPTER).network(FEATURES)
    with pytest.raises(ModelError, match=r"model\.adapter=ia3 is in the image tower"):
        clip_section({"length": 2}, adapter="ia3").network(FEATURES)


def test_what_looks_at_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedOTP matches texts with the patches of images, and the data are features"):
        rayfl.run(experiment(tmp_path, "run", "fedotp", {"length": 2}, "none", dataset=written(tmp_path)))
