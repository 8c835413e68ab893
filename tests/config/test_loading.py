from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.floco import Floco
from algorithms.registry import Experiment
from algorithms.superfed import SuPerFed
from rayfl.config.loading import load_config, preset_names, to_yaml
from rayfl.errors import ConfigError

MINIMAL = {
    "dataset": "digits",
    "partition": {"name": "iid", "num_clients": 4},
    "model": "two_nn",
    "algorithm": "fedavg",
}


def problems(source: object = None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid_and_survives_a_round_trip_through_yaml(preset: str, tmp_path: Path) -> None:
    config = load_config(Experiment, preset, [])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    again = load_config(Experiment, file, [])
    assert again == config
    assert again.fingerprint() == config.fingerprint()
    assert pickle.loads(pickle.dumps(config)) == config  # notebooks keep results so


def test_no_source_is_the_quickstart() -> None:
    assert load_config(Experiment, None, []) == load_config(Experiment, "quickstart", [])


def test_dotted_overrides_change_single_values_and_a_bare_name_replaces_a_section() -> None:
    config = load_config(
        Experiment, "mnist-pathological", ["algorithm=floco", "algorithm.radius=0.2", "train.rounds=10", "seed=3"]
    )
    assert config.algorithm == Floco(radius=0.2)
    assert (config.train.rounds, config.train.local_epochs, config.seed) == (10, 10, 3)
    config = load_config(Experiment, "quickstart", {"algorithm.mode": "lm"})
    assert isinstance(config.algorithm, SuPerFed)
    assert (config.algorithm.mode, config.algorithm.start) == ("lm", 0.3)


def test_values_are_yaml() -> None:
    config = load_config(
        Experiment, MINIMAL, ["train.batch_size=null", "model.hidden=[5, 6]", "evaluation.splits=[test]"]
    )
    assert config.train.batch_size is None
    assert config.model.hidden == (5, 6)
    assert config.evaluation.splits == ("test",)


def test_all_problems_are_reported_at_once_with_path_allowed_values_and_nearest_name() -> None:
    text = problems(
        "quickstart",
        "algorithm=flocco",
        "train.round=3",
        "train.lr=-1",
        "evaluation.splits=[tets]",
        "model.hiden=[3]",
        "cluster.num_actors=0",
        "foo=1",
    )
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert "preset quickstart" in lines
    assert "7 problems" in lines["preset quickstart"]
    assert "did you mean 'floco'?" in lines["algorithm"]
    assert "superfed" in lines["algorithm"]
    assert "did you mean 'rounds'?" in lines["train.round"]
    assert "greater than or equal to 0" in lines["train.lr"]
    assert "allowed: train, validation, test" in lines["evaluation.splits.0"]
    assert "did you mean 'hidden'?" in lines["model.hiden"]
    assert "auto" in lines["cluster.num_actors"]
    assert "allowed: aggregator, algorithm, attack, augment, cl" in lines["foo"]


def test_text_of_a_section_or_a_list_is_told_to_be_text() -> None:
    """As it is in a shell's command, given to Python."""
    for path, text in (
        ("partition", "{name: iid, num_clients: 5}"),
        ("holdout", "{test: 0.2}"),
        ("evaluation.splits", "[train, test]"),
        ("transform.normalize", "{mean: [0.5], std: [0.5]}"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(Experiment, "quickstart", {path: text})
        said = str(caught.value)
        assert said.count("in Python give a dict or a list") == 1 and "rayfl sweep" not in said
        load_config(Experiment, "quickstart", [f"{path}={text}"])
    assert "in Python" not in problems("quickstart", "partition=iidd", "seed=x")


@pytest.mark.parametrize(
    "override", ["seed=0,1", "seed=0:5", "train.batch_size=10,20", "train.lr=log(0.01,1)", "algorithm=fedavg,ditto"]
)
def test_several_values_are_for_sweeps(override: str) -> None:
    assert problems("quickstart", override).count("several values are for `rayfl sweep`") == 1
    assert "rayfl sweep" not in problems("quickstart", "seed=x", "engine.mode=x", "name=a,b", "algorithm=x")


@pytest.mark.parametrize("value", ["123", "2026-11-26", "yes"])
def test_a_name_that_yaml_takes_for_something_else_needs_quotes(value: str) -> None:
    assert """put it in quotes, 'name="TEXT"'""" in problems("quickstart", f"name={value}")
    assert load_config(Experiment, "quickstart", [f'name="{value}"']).name == value


def test_missing_sections_and_names() -> None:
    text = problems({"dataset": {}, "model": "two_nn"})
    assert "algorithm: required" in text
    assert "dataset: needs a name" in text


def test_an_option_without_its_section_is_found() -> None:
    text = problems("quickstart", "rounds=2", "alpha=0.1")
    assert "rounds: unknown (did you mean stages.rounds or train.rounds?)" in text
    assert "alpha: unknown (did you mean " in text and "partition.alpha" in text


def test_a_task_without_a_name_is_the_default_one() -> None:
    chosen = load_config(Experiment, "quickstart", ["task.metrics=[auroc]"])
    assert (chosen.task.name, chosen.task.metrics) == ("classification", ("auroc",))
    assert chosen == load_config(Experiment, "quickstart", ["task=classification", "task.metrics=[auroc]"])


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden", "x" * 101, "a\0b"])
def test_run_names_cannot_leave_the_storage_path(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        load_config(Experiment, MINIMAL, {"name": name})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"- 1\n- 2\n", "must be a mapping"),
        (b"1: 2\n", "must be a mapping"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_unreadable_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    text = problems(file)
    assert str(file) in text
    assert message in text


def test_unknown_presets_and_malformed_overrides() -> None:
    assert "did you mean 'quickstart'?" in problems("quikstart")
    assert "must look like" in problems("quickstart", "train.rounds")
    assert "is a value, not a section" in problems("quickstart", "partition.name.x=1")
    assert "not valid YAML" in problems("quickstart", "train.rounds=[")


def test_options_that_do_not_go_together_are_named_without_the_whole_section() -> None:
    text = problems("quickstart", "train.min_local_steps=5", "train.max_local_steps=2")
    assert text.endswith("train: max_local_steps=2 is less than min_local_steps=5: raise it, or leave one of both out")


def test_a_value_in_place_of_a_section_is_told_what_a_section_takes() -> None:
    assert "partition: is a section: set partition=NAME or partition.OPTION=VALUE (got None)" in problems(
        "quickstart", "partition=null"
    )
    assert "holdout: is a section: set holdout.OPTION=VALUE (got 0.2)" in problems("quickstart", "holdout=0.2")
    assert "train.schedule: is a section: set train.schedule.name=NAME or train.schedule.OPTION=VALUE" in problems(
        "quickstart", "train.schedule=cosine"
    )
    text = problems("quickstart", "transform.normalize=always")
    assert "1 problem\n  transform.normalize: 'always' is not allowed; allowed: none, dataset, or is a section" in text


def test_the_fingerprint_covers_what_changes_results_and_nothing_else() -> None:
    base = load_config(Experiment, MINIMAL, [])
    same = [
        "name=x",
        "storage_path=/elsewhere",
        "cluster.num_actors=3",
        "storage.commit_every=5",
        "max_failures=0",
        "engine.width=4",
    ]
    other = [
        "seed=1",
        "train.lr=0.2",
        "model.hidden=[3]",
        "algorithm=scaffold",
        "evaluation.every=3",
        "engine.mode=looped",
        "engine.precision=bfloat16",
    ]
    assert load_config(Experiment, MINIMAL, same).fingerprint() == base.fingerprint()
    for override in other:
        assert load_config(Experiment, MINIMAL, [override]).fingerprint() != base.fingerprint()
    assert load_config(Experiment, MINIMAL, ["seed=1"]).run_name != base.run_name


INFINITE = {
    "train.lr": ["1e400", "'1e400'", ".inf", "-.inf"],
    "train.max_grad_norm": [".inf"],
    "clients.deadline_s": [".inf", "1e999"],
    "cluster.startup_timeout_s": [".inf"],
    "storage.lease_timeout_s": [".inf"],
    "algorithm": ["{name: fedprox, proximal_weight: .inf}"],
    "partition": ["{name: dirichlet, num_clients: 3, alpha: .inf}"],
    "system": ["{name: sampled, deadline_s: .inf}"],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in INFINITE.items() for value in values])
def test_numbers_are_finite(path: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, "quickstart", [f"{path}={value}"])
    assert re.search(rf"  {path}[\w.]*: (must be a finite number|should be) .*\(got -?inf\)", str(caught.value))


@pytest.mark.parametrize(
    ("overrides", "path", "name"),
    [
        (["evaluation.splits=[test, test]"], "evaluation.splits", "'test'"),
        (["task.name=classification", "task.metrics=[auroc, auroc]"], "task.metrics", "'auroc'"),
        (["dataset={name: parquet, path: a.csv, x: [age, bmi, age]}"], "dataset.x", "'age'"),
        (["dataset={name: parquet, path: a.csv, y: [y1, y1]}"], "dataset.y", "'y1'"),
        (["dataset={name: parquet, paths: [a.csv, a.csv]}"], "dataset.paths", "'a.csv'"),
        (["dataset={name: arrays, path: a.csv, y: [y1, y1]}"], "dataset.y", "'y1'"),
        (["dataset={name: huggingface, path: a, train: [train, train]}"], "dataset.train", "'train'"),
        (["dataset={name: instructions, paths: [a, a], tokenizer: bytes}"], "dataset.paths", "'a'"),
        (["model={name: pretrained, folder: a, adapter: {trains: [a, a]}}"], "model.adapter.trains", "'a'"),
        (["model={name: pretrained, folder: a, adapter: {targets: [q, v, q]}}"], "model.adapter.targets", "'q'"),
        (["model={name: pretrained, folder: a, adapter: {layers: [1, 0, 1]}}"], "model.adapter.layers", "1"),
    ],
)
def test_a_name_stands_once_in_a_list(overrides: list[str], path: str, name: str) -> None:
    words = rf"^  {re.escape(path)}: {re.escape(name)} stands there twice: name it once \(got [^)]*\)$"
    with pytest.raises(ConfigError, match=re.compile(words, re.MULTILINE)):
        load_config(Experiment, "quickstart", overrides)


def test_truth_values_are_no_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, "quickstart", ["train.rounds=true", "train.lr=off", "model.hidden=[8, yes]"])
    assert set(str(caught.value).splitlines()[1:]) == {
        "  train.rounds: must be a number (got true)",
        "  train.lr: must be a number (got false)",
        "  model.hidden.1: must be a number (got true)",
    }
    assert load_config(Experiment, "quickstart", {"tracking.flops": True}).tracking.flops is True


def test_what_is_no_number_is_refused_everywhere() -> None:
    """All numbers of a configuration, its method and its sections, whatever their fields allow."""
    content = load_config(Experiment, "quickstart", ["algorithm=superfed"]).model_dump(mode="json")
    floats = {path: value for path, value in flat(content).items() if isinstance(value, float)}
    assert len(floats) > 10
    for path in floats:
        for value in (float("nan"), float("inf")):
            with pytest.raises(ConfigError, match=re.escape(path)):
                load_config(Experiment, content, {path: value})


def flat(content: Any, place: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    if not isinstance(content, dict):
        return {place: content}
    return {path: value for key in content for path, value in flat(content[key], f"{place}.{key}".lstrip(".")).items()}


def test_code_that_actors_cannot_import_is_refused_with_the_way_to_name_it() -> None:
    for section, given in {"algorithm": Floco, "model": torch.nn.Linear(2, 2), "dataset": problems}.items():
        said = problems(MINIMAL | {section: given})
        assert said.startswith(f"{section} is the object ") and f"{section}='my_module:" in said
    said = problems(MINIMAL | {"dataset": "__main__:cells"})
    assert "__main__:cells is code of a notebook or script, which actors cannot import" in said
    inline = load_config(Experiment, MINIMAL | {"dataset": "__main__:cells"}, ["cluster.backend=inline"])
    assert inline.cluster.backend == "inline"
