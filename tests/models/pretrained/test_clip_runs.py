"""Runs over CLIP: what travels, what leaves in files, and what is refused before a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config, preset_names
from rayfl.engine.engine import clients_for_rows
from rayfl.errors import ConfigError, ModelError, RayflError
from rayfl.examples import InputSpec
from rayfl.models.pretrained import making
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.models.pretrained.peft_files import SETTINGS
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.models.pretrained.text_files import TEXT_HEAD
from rayfl.params import leaves
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.storage.files import Storage
from tests.support.adapter_runs import experiment as over_vit
from tests.support.bases import IMAGES, inputs, section, transformers
from tests.support.clips import ADAPTER, NO_HEAD, PROMPT, clip_base, clip_network, clip_section, expected, write_clip
from tests.support.experiments import outcome
from tests.support.toys import assert_close, assert_equal

CONTEXT = "model.texts.context"
FACTORS, SHARED, BY_CLASS = 4 * 2 * 48 + 4 * 48 * 2, 2 * 48, 10 * 2 * 48
"""Scalars of adapters, and of a context of two vectors."""
OF_FEATURES = 2 * (32 * 32 + 32)


def experiment(
    folder: Path, name: str, method: Any, prompt: dict[str, Any], adapter: Any = "none", **sections: Any
) -> Any:
    """Five clients of scikit-learn's digits, two rounds of three, in this process."""
    model = {"folder": str(clip_base()), "head": NO_HEAD, "adapter": adapter, "prompt": {**PROMPT, **prompt}}
    return over_vit(folder, name, method, model={**model, **sections.pop("model", {})}, **sections)


SENT: dict[str, tuple[Any, dict[str, Any], Any, int]] = {
    "PromptFL": ("fedavg", {"length": 2}, "none", SHARED),
    "each class's own": ("fedavg", {"length": 2, "context": "by_class"}, "none", BY_CLASS),
    "adapters": ("fedavg", {"context": "none"}, ADAPTER, FACTORS),
    "FedCLIP": ("fedavg", {"context": "none"}, "features", OF_FEATURES),
    "CLIP-Adapter": ("superfed", {"context": "none"}, {"name": "features", "form": "residual"}, 2 * 8 * 32),
    "a context beside a network": ("fedper", {"length": 2}, "features", OF_FEATURES),
    "both": ({"name": "fedprox"}, {"length": 2}, ADAPTER, FACTORS + SHARED),
    "own contexts": ("fedper", {"length": 2}, ADAPTER, FACTORS),
    "own adapters": ({"name": "fedper", "head_group": "adapters"}, {"length": 2}, ADAPTER, SHARED),
    "own adapters, mirrored": ({"name": "lg_fedavg"}, {"length": 2}, ADAPTER, SHARED),
    "Ditto": ("ditto", {"length": 2}, "none", SHARED),
    "SuPerFed": ({"name": "superfed", "start": 0.0}, {"length": 2}, "none", SHARED),
}
"""By name: method, prompt, adapter, and how many scalars travel each way."""
BY_CLASS = {"context": "by_class", "start": "template"}
QUICK = ("own contexts", "adapters")
TRAINED = (CONTEXT, "model.vision_model.", "model.feature_adapter.")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n not in QUICK else []) for n in SENT])
@pytest.mark.first_case
def test_messages_have_the_context_and_nothing_frozen_and_stacks_are_looped_clients(name: str, tmp_path: Path) -> None:
    method, prompt, adapter, scalars = SENT[name]
    for mode in ("looped", "vectorized"):
        # AdamW would make steps of their own of gradients that are round-off.
        train = {"optimizer": "sgd", "lr": 0.002}
        rayfl.run(experiment(tmp_path, mode, method, prompt, adapter, engine={"mode": mode}, train=train))
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 2e-5)
    assert one.states.keys() == other.states.keys()
    for client in one.states:
        assert_close(one.states[client], other.states[client], 2e-5)
    sent = [row for row in one.clients.to_pylist() if row["bytes_down"] is not None and row["cohort"] == "selected"]
    assert sent and {(row["bytes_down"], row["bytes_up"]) for row in sent} == {(4 * scalars, 4 * scalars)}
    for tree in (one.server, *one.states.values()):
        names = {path.rpartition("/")[2] for path, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)}
        assert all(leaf.startswith(TRAINED) and (".vision_model." not in leaf or ".lora_" in leaf) for leaf in names)
    if adapter == "none":
        assert "product_error" not in pq.read_table(tmp_path / "looped" / "rounds.parquet").column_names


def test_a_context_stays_with_the_client_by_fedpers_head(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "fedper", {"length": 2}, ADAPTER))
    done = outcome(tmp_path / "run")
    assert CONTEXT not in done.server["shared"]
    own = [state["personal"] for state in done.states.values()]
    assert len(own) > 1 and all(part.keys() == {CONTEXT} for part in own)
    assert not torch.equal(own[0][CONTEXT], own[1][CONTEXT])


@pytest.mark.slow
def test_actors_have_the_same_frozen_head(tmp_path: Path) -> None:
    for backend in ("inline", "ray"):
        cluster = {"backend": backend, **({"num_actors": 2} if backend == "ray" else {})}
        engine = {"mode": "looped"}
        rayfl.run(experiment(tmp_path, backend, "fedavg", {"context": "none"}, ADAPTER, cluster=cluster, engine=engine))
    assert_equal(outcome(tmp_path / "inline").server, outcome(tmp_path / "ray").server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        {"context": "none"},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"length": 2}, BY_CLASS)),
    ],
)
def test_what_is_exported_is_read_without_rayfl(prompt: dict[str, Any], tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "fedavg", prompt, ADAPTER))
    command, x = CliRunner(), inputs("vit", 4, 0)
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    network, tree = models.parts.task.network, models.predictor(1, "global").built()[0]
    wanted = network.logits(tree, x)
    for format in ("safetensors", "peft", "transformers"):
        out = tmp_path / (f"{format}.safetensors" if format == "safetensors" else format)
        kind = [] if format == "safetensors" else ["--format", format]
        found = command.invoke(app, ["export", str(tmp_path / "run"), "--client", "1", *kind, "--out", str(out)])
        assert found.exit_code == 0, found.output
    whole = safetensors.torch.load_file(tmp_path / "safetensors.safetensors")
    assert_equal({name: whole[name] for name in tree}, tree)
    for folder in ("peft", "transformers"):
        head = safetensors.torch.load_file(tmp_path / folder / TEXT_HEAD)
        assert head.keys() == {"weight"} | ({"context"} if CONTEXT in tree else set())
        if CONTEXT in tree:
            assert torch.equal(head["context"], tree[CONTEXT])
        with safetensors.safe_open(tmp_path / folder / TEXT_HEAD, framework="pt") as file:
            assert json.loads(file.metadata()["classes"]) == list(NAMES)
    assert json.loads((tmp_path / "peft" / SETTINGS).read_text())["modules_to_save"] is None
    merged = transformers.CLIPModel.from_pretrained(tmp_path / "transformers", local_files_only=True).eval()
    with torch.no_grad():
        images = merged.get_image_features(pixel_values=x).pooler_output
    images = images / images.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(images @ head["weight"].T, wanted, rtol=0, atol=5e-5)
    if CONTEXT not in tree:  # the folder is a base, with its tokenizer
        texts = [f"a photo of a {name}." for name in NAMES]
        logits = expected(texts, x, tmp_path / "transformers").logits_per_image
        torch.testing.assert_close(logits, wanted, rtol=0, atol=5e-5)
    again = clip_network({"start": "template"}, folder=str(tmp_path / "transformers"))
    assert again.logits(again.initialize(0), x).shape == (4, 10)


def test_a_context_alone_leaves_as_a_file_of_tensors(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", "fedavg", {"length": 2}))
    words = ["export", str(tmp_path / "run"), "--client", "1", "--format", "peft", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code and "adapter=none has no adapter: leave --format out" in str(found.exception)
    assert not (tmp_path / "out").exists()


def refused(prompt: dict[str, Any] | None, message: str, spec: InputSpec = IMAGES, **options: Any) -> None:
    with pytest.raises(ModelError, match=message):
        clip_section(prompt, **options).network(spec)


def test_texts_that_do_not_fit_are_refused() -> None:
    refused({"classes": None}, r"model\.prompt\.classes: name the 10 classes")
    bare = PretrainedModel.model_validate({"folder": str(clip_base()), "head": NO_HEAD})
    with pytest.raises(ModelError, match=r"model\.prompt\.classes: name the 10 classes"):
        bare.network(IMAGES)
    refused({"classes": ["zero", "one"]}, "2 names are given, and the data set has 10")
    refused({"classes": [*NAMES[:8], "hare", "owl"]}, "'hare' and 'owl' are the same tokens to the base")
    refused({"length": 60}, r"the text of 'zero' has 64 tokens, and the base reads at most 32: .*model\.prompt\.length")
    refused(
        {"context": "none", "template": "a " * 40 + "{}"}, "the base reads at most 32: choose shorter", adapter=ADAPTER
    )
    refused({"template": "a photo{}"}, "does not part the words before {} from the name in 'a photozero'")
    refused({"sha256": "0" * 64}, r"but model\.prompt\.sha256 is 0000")
    refused({"context": "none"}, r"model\.prompt\.context=none and model\.adapter=none leave nothing to train")
    refused(None, r"has no last layers, .* set model\.head\.train=false", head={"train": True})
    refused(None, "images of 8 x 8 pixels", InputSpec("image", (1, 28, 28), 10))
    refused(None, "tells by texts which of several classes", InputSpec("image", (1, 8, 8), 10, target="labels"))
    refused(None, "needs images of shape", InputSpec("tokens", (12,), 10, vocabulary=5))
    refused(None, r"name=prompt is for texts and for images of vit, not of clip", adapter={"name": "prompt"})
    refused(None, "no linear layer is called 'score'", adapter={**ADAPTER, "targets": ["score"]})
    with pytest.raises(ModelError, match=r"model\.prompt: vit does not tell classes by texts: leave it out"):
        section("vit", prompt=PROMPT).network(IMAGES)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"template": "a photo"}, "template must have {} once"),
        ({"context": "none", "length": 3}, "context=none has none: leave them out"),
        ({"start": "template", "length": 3}, "leave length out"),
        ({"start": "template", "template": "{}"}, "needs words before the name"),
        ({"classes": ["one", "one"]}, "stands there twice"),
    ],
)
def test_options_in_vain_are_refused(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_section(prompt)


def test_a_folder_without_its_own_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "base")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(None, r"has no tokenizer that can be read", folder=str(folder))
    other = write_clip(tmp_path / "other", eos_token_id=5)
    refused(None, "does not end texts with the token 5", folder=str(other))


def test_methods_that_need_a_linear_head_say_so(tmp_path: Path) -> None:
    for method, adapter, message in (
        ("ccvr", "none", "needs the last layer's weight to be trained"),
        ({"name": "fednh"}, ADAPTER, "which this model makes of a context of texts"),
        ({"name": "fedetf"}, ADAPTER, "which this model makes of a context of texts"),
        ({"name": "feddpa", "local_epochs": 1}, ADAPTER, r"set model\.prompt\.context=none"),
        ("fedper", "none", "all that this model trains, so that no body is left"),
        ("hetlora", "none", "needs a model with adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            rayfl.run(experiment(tmp_path, "run", method, {"length": 2}, adapter))


def test_the_tokens_identify_a_run_and_are_not_exchanged(tmp_path: Path) -> None:
    moved = tmp_path / "base"
    shutil.copytree(clip_base(), moved)
    made = [
        load_config(Experiment, experiment(tmp_path, "run", "fedavg", prompt, model={"folder": str(place)}), {})
        for place, prompt in ((clip_base(), {}), (moved, {}), (moved, {"template": "a picture of a {}."}))
    ]
    assert made[0].fingerprint() == made[1].fingerprint() != made[2].fingerprint()
    assert made[0].model.prompt.sha256 == made[1].model.prompt.sha256 != made[2].model.prompt.sha256
    rayfl.run(experiment(tmp_path, "run", "fedavg", {"length": 2}, model={"folder": str(moved)}))
    file = moved / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["one"], words["two"] = words["two"], words["one"]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"but model\.prompt\.sha256 is"):
        rayfl.run(str(tmp_path / "run"), train__rounds=3)


def test_names_of_classes_are_taken_from_the_data(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((40, 64)).astype(np.float32)
    names = [["six", "two", "zero"][k % 3] for k in range(40)]
    inputs = pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), 64)
    pq.write_table(pa.table({"image": inputs, "label": names}), tmp_path / "rows.parquet")
    data = {"name": "parquet", "path": str(tmp_path / "rows.parquet"), "shape": [1, 8, 8], "labels": "renumbered"}
    content = experiment(tmp_path, "run", "fedavg", {"classes": None, "length": 2})
    content["dataset"], content["partition"] = {**data, "root": str(tmp_path)}, {"name": "iid", "num_clients": 4}
    with pytest.raises(ModelError, match=r"name the 3 classes, .* rayfl data prepare"):
        rayfl.run(content)
    rayfl.run({**content, "name": "again"})  # the data are prepared now
    config = open_run(str(tmp_path / "again"), Experiment).config
    assert config.model.prompt.classes == ("six", "two", "zero")


def test_stacks_have_room_for_the_texts() -> None:
    plain, texts = (
        Experiment.model_fields["task"].default.task([clip_network(prompt, adapter=ADAPTER)], IMAGES)
        for prompt in ({"context": "none"}, {"length": 2})
    )
    rows = 17 * 10 + 10 * 6
    assert clients_for_rows(5 * rows, texts, 10) == 5 < clients_for_rows(5 * rows, plain, 10)  # type: ignore[operator]


@pytest.mark.slow
def test_the_command_line_makes_and_describes_a_small_clip(tmp_path: Path) -> None:
    command = CliRunner()
    made = command.invoke(app, ["model", "make", "tiny-clip", "--out", str(tmp_path / "clip")])
    assert made.exit_code == 0, made.output
    assert float(made.output.split("accuracy:")[1].split()[0]) > 0.8
    seen = command.invoke(app, ["model", "inspect", str(tmp_path / "clip")])
    assert "clip, for images" in seen.output and "q_proj, v_proj in vision_model" in seen.output
    assert "made of the classes' texts (model.prompt)" in seen.output
    shown = command.invoke(app, ["show", "quickstart-clip", f"model.folder={tmp_path / 'clip'}"])
    assert shown.exit_code == 0 and "by_class" in shown.output
    # What a prompt that is learned on all ten digits adds to the base, which knows five of them.
    short = {"cluster.backend": "inline", "tracking.tensorboard": False, "storage_path": str(tmp_path)}
    first = {"train.rounds": 1, "train.lr": 1e-12, "train.optimizer": "sgd"}
    scores = {}
    for name, way in (("zero-shot", first), ("learned", {"train.rounds": 10})):
        rayfl.run("quickstart-clip", **{"model.folder": str(tmp_path / "clip"), "name": name, **short, **way})
        table = pq.read_table(tmp_path / name / "clients.parquet").to_pylist()
        last = max(row["round"] for row in table)
        own = [
            row["top1"] for row in table if row["round"] == last and row["split"] == "test" and row["cohort"] == "all"
        ]
        scores[name] = float(np.mean(own))
    assert scores["zero-shot"] > 0.3 and scores["learned"] > scores["zero-shot"] + 0.03, scores


def test_the_preset_says_how_its_base_is_made(tmp_path: Path) -> None:
    assert "quickstart-clip" in preset_names()
    with pytest.raises(RayflError, match="rayfl model make tiny-clip --out"):
        rayfl.run("quickstart-clip", model__folder=str(tmp_path / "tiny-clip"), storage_path=str(tmp_path))
    assert "tiny-clip" in making.MAKERS and not Storage(str(tmp_path / "run")).exists("config.yaml")
