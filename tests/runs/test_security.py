"""Names and files from others lead nowhere: no code is run, and nothing is read or written outside of the folder."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app, main
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, DamageError, DataError, RunError
from rayfl.storage import treefile
from rayfl.storage.files import Storage
from tests.support.experiments import small_experiment

ROOT = Path(__file__).parents[2]
PACKAGES = ("rayfl", "actors", "algorithms", "cluster")

OUTWARD = ["../x", "..", "/etc/passwd", "a/../../x", "a/./b", "a//b", "", "a\0b", "./a", "a/"]
NAMES = [
    *("../x", "..", ".", "/tmp/x", "a/b", "a\\b", "a\0b", "", " ", ".hidden", "-rf", "a\n", "a b", "a;b", "$(x)"),
    *("é", "\u202egnp.exe", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "a" * 101),
]


def everything_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("path", OUTWARD)
def test_no_path_leads_out_of_the_storage(path: str, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "inner"))
    storage.write("here", b"x")
    (tmp_path / "x").write_bytes(b"secret")
    before = everything_in(tmp_path)
    for attempt in (
        lambda: storage.write(path, b"y"),
        lambda: storage.create(path, b"y"),
        lambda: storage.read(path),
        lambda: storage.digest(path),
        lambda: storage.modified(path),
        lambda: storage.exists(path),
        lambda: storage.names(path),
        lambda: storage.delete(path),
        lambda: storage.inside(path),
    ):
        with pytest.raises(RunError, match=re.escape(repr(path))):
            attempt()
    assert everything_in(tmp_path) == before


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_whatever_a_path_is_the_file_is_in_the_folder(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    folder = tmp_path_factory.mktemp("storage") / "inner"
    try:
        Storage(str(folder)).write(path, b"x")
    except (RunError, UnicodeEncodeError):
        return
    written = [found for found in folder.parent.rglob("*") if found.is_file()]
    assert len(written) == 1
    assert written[0].resolve().is_relative_to(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_runs_name_is_a_plain_name(name: str, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, name, "fedavg", backend="inline")
    with pytest.raises(ConfigError, match="name"):
        rayfl.run(config)
    assert everything_in(tmp_path) == set()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=120))
def test_a_name_that_is_accepted_is_a_folder_of_that_name(name: str) -> None:
    try:
        config = load_config(Experiment, small_experiment(Path("/runs"), name, "fedavg"), {})
    except ConfigError:
        return
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name)
    assert Storage(config.storage_path).inside(config.run_name).local_path == Path("/runs") / name


CLIENTS = ["../../outside", "/absolute", "..", "é\u202e", "a/b", "C:\\x", "\n", "x" * 500, "[red]\x1b[31m\x9b2J[/x]"]
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def test_clients_names_are_values_and_never_paths(tmp_path: Path) -> None:
    """A natural data set whose clients have the worst of names."""
    from rayfl.data.sources.leaf import import_leaf

    source = tmp_path / "source"
    for part in ("train", "test"):
        (source / part).mkdir(parents=True)
        user_data = {name: {"x": [[0.5] * 784] * 4, "y": [n % 3] * 4} for n, name in enumerate(CLIENTS)}
        content = {"users": CLIENTS, "num_samples": [4] * len(CLIENTS), "user_data": user_data}
        (source / part / "all.json").write_text(json.dumps(content))
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    import_leaf("femnist", source, data / "femnist.parquet")
    before = everything_in(tmp_path)
    config = {
        **small_experiment(runs, "run", "scaffold", backend="inline"),
        "dataset": {"name": "leaf", "path": str(data / "femnist.parquet")},
        "partition": {"name": "natural"},
        "train": {"rounds": 1, "clients_per_round": 3, "lr": 0.1, "batch_size": 4},
    }
    result = rayfl.run(config)
    assert set(result.clients["name"].to_pylist()) <= set(CLIENTS)
    new = everything_in(tmp_path) - before
    assert all(path.is_relative_to(runs / "run") or path in (runs, runs / "run") for path in new)
    assert not any(re.search("outside|absolute", str(path.relative_to(tmp_path))) for path in new)
    for command in (["clients", result.path], ["diff", result.path, "quickstart"], ["report", result.path]):
        shown = CliRunner().invoke(app, command).output
        assert not UNSEEN.search(shown), command
    shown = CliRunner().invoke(app, ["clients", result.path], env={"COLUMNS": "200"}).output
    assert r"[red]\x1b[31m\x9b2J[/x]" in shown and r"é\u202e" in shown


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [
        ("RAYFL_DATA", ["run", "mnist-pathological"]),
        ("RAYFL_DATA", ["data", "list"]),
        ("RAYFL_DATA", ["doctor"]),
        ("RAY_ADDRESS", ["run", "quickstart"]),
        ("RAY_API_SERVER_ADDRESS", ["status"]),
    ],
)
def test_what_variables_hold_does_nothing_to_the_terminal(
    variable: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "/none/\x1b[31m\x9bred")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(sys, "argv", ["rayfl", *arguments, *(["name=x"] if arguments[0] == "run" else [])])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        main()
    shown = "".join(capsys.readouterr())
    assert not UNSEEN.search(shown)
    assert r"\x1b[31m" in shown.replace("\n", "")


CODE = b"cos\nsystem\n(S'touch trapped'\ntR."


@pytest.mark.parametrize("content", [CODE, b"\x80\x04" + CODE, b"PK\x03\x04" + CODE])
def test_a_pickle_is_no_tree(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamageError):
        treefile.loads(content, "file")
    assert everything_in(tmp_path) == set()


def header(**fields: object) -> bytes:
    text = json.dumps({"__metadata__": {"rayfl": json.dumps(fields)}}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        header(numbers={}, order=["a"]),
        header(numbers={"a": 1}, order=[1]),
        header(numbers={"a": 1, "a/b": 2}, order=["a", "a/b"]),
        header(numbers={}, order=[["a"]]),
        header(),
        header(numbers=None, order=None),
        (1 << 62).to_bytes(8, "little") + b"{}",
        (9999).to_bytes(8, "little") + b"[" * 9999,
    ],
)
def test_a_crafted_tree_is_damage(data: bytes) -> None:
    with pytest.raises(DamageError, match="file is damaged"):
        treefile.loads(data, "file")


KEYS = [
    *(
        "s3://key:hush@bucket/runs",
        "s3://key:@bucket/runs?region=x",
        "s3://bucket/runs?access_key=hush&secret_key=hush",
    ),
    *(
        "s3://bucket/runs?region=x&AWS_SECRET_ACCESS_KEY=hush",
        "gs://bucket/runs?access_token=hush",
        "abfs://a/b?sig=hush",
    ),
    *("s3://bucket/runs?session%5Ftoken=hush", "abfs://a/b?account_key=hush", "s3://bucket/runs?password"),
]


@pytest.mark.parametrize("path", KEYS)
def test_keys_are_not_written_into_configurations(path: str) -> None:
    for field in ("storage_path", "tracking.mlflow.tracking_uri"):
        with pytest.raises(ConfigError, match=f"{field}: keys do not belong here") as caught:
            load_config(Experiment, None, {field: path})
        assert "hush" not in str(caught.value)


PATHS = [
    *("s3://bucket/a:b@c", "/runs/key=x?secret=y", "s3://bucket/token?region=eu&endpoint_override=localhost:9000"),
    *("s3://bucket/runs?scheme=http&tls_verify_certificates=false", "gs://anonymous@bucket/runs?project_id=x"),
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_without_keys_are_taken(path: str) -> None:
    assert load_config(Experiment, None, {"storage_path": path}).storage_path == path


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [trapped]", "!!python/name:os.system"])
def test_a_configuration_is_plain_data(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(f"dataset: digits\nmodel: {text}\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(Experiment, tmp_path / "config.yaml", [])
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(Experiment, None, [f"model={text}"])
    assert not (tmp_path / "trapped").exists()


def test_weights_that_are_a_pickle_are_refused(tmp_path: Path) -> None:
    from rayfl.models.weights import load_weights

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "trapped"),))

    torch.save({"a": Trap()}, tmp_path / "weights.pt")
    module = torch.nn.Linear(1, 1)
    with pytest.raises(rayfl.RayflError, match="cannot be read"):
        load_weights(module, str(tmp_path / "weights.pt"), "head", "model")
    assert not (tmp_path / "trapped").exists()


def test_a_partition_of_others_is_checked(tmp_path: Path) -> None:
    pq.write_table(pa.table({"client": ["../x"], "split": ["train"], "sample": [0]}), tmp_path / "partition.parquet")
    config = small_experiment(tmp_path / "runs", "run", "fedavg", backend="inline")
    config["partition"] = {"name": "file", "path": str(tmp_path / "partition.parquet")}
    with pytest.raises(DataError, match=r"is not a partition.parquet"):
        rayfl.run(config)


PICKLED_WITHIN_CALLS = {ROOT / "actors" / "processes" / "shared_memory.py"}
"""Messages among a run's own processes, which are an argument or the result of one of Ray's calls: pickled anyway."""

FORBIDDEN = {
    r"\bpickle\b|cloudpickle|\bdill\b|joblib\.load": "unpickles",
    r"allow_pickle\s*=\s*True|weights_only\s*=\s*False": "unpickles",
    r"(?<!safetensors\.)torch\.load\((?![^()]*(\([^()]*\)[^()]*)*weights_only=True)": "unpickles",
    r"(?<![\w.])(eval|exec)\(": "runs text as code",
    r"shell\s*=\s*True|os\.system|os\.popen": "runs a shell",
    r"mktemp\(": "makes a temporary name that somebody else may take",
    r"yaml\.(unsafe_|full_)?load\((?!.*SafeLoader)": "reads YAML that can name code",
    r"extractall\((?![^)]*filter=)": "unpacks an archive wherever its names lead",
}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_the_code_never(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group(0)} {FORBIDDEN[pattern]}"
        for package in PACKAGES
        for path in sorted(
            {*(ROOT / package).rglob("*.py")} - (PICKLED_WITHIN_CALLS if "cloudpickle" in pattern else set())
        )
        for match in re.finditer(pattern, _without_comments(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def _without_comments(source: str) -> str:
    """Code without docstrings and comments, which may speak of what is not done."""
    return re.sub(r'"""(?:.|\n)*?"""|#.*', "", source)
