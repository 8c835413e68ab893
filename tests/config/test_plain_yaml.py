"""A few lines of YAML that stand for more than a memory holds are an error, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from algorithms.registry import Experiment
from rayfl.config import plain_yaml
from rayfl.config.loading import load_config
from rayfl.config.overrides import parse_override
from rayfl.config.plain_yaml import AliasError, read_yaml, write_yaml
from rayfl.errors import ConfigError, DamageError, DataError, RunError
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from rayfl.sweeps.space import parse_space
from rayfl.system.traces import read_devices
from tests.support.experiments import small_experiment

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGED = "a0: &a0 {k: x}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30))
LONG = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 5000)}]\n"
ENDLESS = "a: &a [*a]\n"
HOSTILE = {"lists": BOMB, "merged": MERGED, "long": LONG, "endless": ENDLESS}


@pytest.fixture
def in_seconds() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 30


@pytest.mark.usefixtures("in_seconds")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_bombs_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(AliasError, match="alias"):
        read_yaml(text)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML: .*alias"):
        load_config(Experiment, file, [])
    with pytest.raises(RunError, match=r"config\.yaml cannot be read: .*alias"):
        open_run(str(tmp_path), Experiment)
    with pytest.raises(DamageError, match=r"config\.yaml in .* is damaged: .*alias"):
        load_run(str(tmp_path), {})
    assert any("alias" in problem for problem in verify(Storage(str(tmp_path))).problems)


@pytest.mark.usefixtures("in_seconds")
def test_bombs_in_overrides_are_refused() -> None:
    inner = "[x,x,x,x,x,x,x,x,x]"
    for level in range(12):
        inner = f"[&a{level} {inner},{','.join([f'*a{level}'] * 8)}]"
    with pytest.raises(ConfigError, match=r"is not valid YAML: .*alias"):
        load_config(Experiment, None, [f"model={inner}"])
    with pytest.raises(ConfigError, match=r"is not valid YAML: .*alias"):
        parse_space([f"model.hidden={inner},[3]"])


@pytest.mark.usefixtures("in_seconds")
def test_a_run_whose_configuration_became_one_is_not_continued(tmp_path: Path) -> None:
    import rayfl

    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    rayfl.run(config, **{"train.rounds": 1})
    (tmp_path / "run" / "config.yaml").write_text(BOMB)
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        rayfl.run(config, **{"train.rounds": 1})


@pytest.mark.parametrize(
    "text",
    [
        "", "a: 1", "- 1\n- [x, {y: null}]", "base: &b {lr: 0.1, hidden: [1, 2]}\none: {<<: *b, lr: 1}\ntwo: *b",
        "a: &a [1, 2]\nb: [*a, *a]", "2026-11-21", "a: !!set {x, y}", "a: &a x\n? *a\n: 1", "1: a\n'1': b",
        "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b, x: 3}\nd: {<<: *b, z: {<<: *a, x: 2}}",
    ],
)  # fmt: skip
def test_what_people_write_is_read_as_before(text: str) -> None:
    assert read_yaml(text) == yaml.safe_load(text)
    assert read_yaml(text.encode()) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", ["train: {rounds: 3}\nseed: 1\ntrain: {lr: 0.1}\n", "a:\n- {x: 1, y: 2, x: 1}", '"b": 1\nb: 2\n']
)
def test_what_is_there_twice_is_not_half_lost(text: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=r"'(train|x|b)' is there twice, in line \d and in line \d"):
        read_yaml(text)
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml is not valid YAML: .* is there twice"):
        load_config(Experiment, file, [])


@pytest.mark.usefixtures("in_seconds")
@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_what_is_nested_without_end_is_refused(opening: str, tmp_path: Path) -> None:
    with pytest.raises(RecursionError, match="more than 200 deep"):
        read_yaml(opening * 200_000)
    file = tmp_path / "mine.yaml"
    file.write_text(opening * 300)
    with pytest.raises(ConfigError, match=r"mine\.yaml is not valid YAML: its values are nested more than 200 deep"):
        load_config(Experiment, file, [])


def test_errors_show_their_line_and_what_is_written_is_read() -> None:
    with pytest.raises(yaml.YAMLError, match=r"(?s)line 2, column 4.*b: \[1, 2\n"):
        read_yaml("a: 1\nb: [1, 2\nc: 3\n")
    content = {"b": [1, 2.5, None, True, "010", "2:16", "ä\n"], "a": {"path": "x" * 300}}
    assert read_yaml(write_yaml(content)) == content
    assert list(read_yaml(write_yaml(content))) == ["b", "a"]


def test_a_long_text_without_aliases_is_no_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_yaml, "_MOST", 1000)
    text = json.dumps({"a": list(range(1200))})
    assert len(read_yaml(text)["a"]) == 1200


@pytest.mark.parametrize("name", ["t.json", "t.csv"])
def test_traces_that_are_nested_without_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(DataError, match="t\\."):
        read_devices(str(tmp_path / name))


def test_numbers_to_the_base_of_sixty_are_texts() -> None:
    assert read_yaml("{actors: 2:16, time: 1:30.5, n: 16, x: 1.5, quoted: '2:16'}") == {
        "actors": "2:16",
        "time": "1:30.5",
        "n": 16,
        "x": 1.5,
        "quoted": "2:16",
    }
    assert read_yaml(yaml.safe_dump({"actors": "2:16"})) == {"actors": "2:16"}
    assert parse_override("cluster.num_actors=2:16") == ("cluster.num_actors", "2:16")


def test_numbers_with_zeros_before_them_are_decimal_or_texts() -> None:
    assert read_yaml("[010, -007, 0, 10, 0.5, 00.5, 0x10, 1_000]") == ["010", "-007", 0, 10, 0.5, 0.5, 16, 1000]
    config = load_config(Experiment, "quickstart", ["train.rounds=010", "name=007"])
    assert (config.train.rounds, config.name) == (10, "007")
