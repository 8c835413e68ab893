"""What commands print for programs: one object each, with the fields of its schema, and exit statuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS
from rayfl.cli.catalog import Kind
from rayfl.cli.entry import app
from rayfl.cli.outputs import OUTPUTS
from rayfl.cli.paths import at_home
from rayfl.errors import ConfigError
from rayfl.runs.finding import load_run
from tests.data.sources.leaf.test_leaf_words import tweets
from tests.support.experiments import small_experiment
from tests.support.leaf_sources import document, write_source

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "numpy", "pyarrow", "sklearn", "torchvision", "matplotlib")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    experiment = {**small_experiment(folder, "run", "fedavg", backend="inline"), "storage": {"keep_commits": 4}}
    return Path(rayfl.run(experiment).path)


def asked(name: str, *arguments: object, status: int = 0) -> dict[str, Any]:
    """The object that a command prints, which must be all that it prints."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("schema") == f"rayfl.{name}/1"
    assert found.keys() == OUTPUTS[name].keys()
    return found


def test_list_has_methods_first_and_presets_where_they_are_asked_for() -> None:
    kinds = asked("list", "list")["kind"]
    assert list(kinds)[:5] == ["algorithms", "datasets", "partitions", "tasks", "models"]
    assert {*kinds, "methods", "presets", "tables"} == set(get_args(Kind))
    (scaffold,) = [entry for entry in kinds["algorithms"] if entry["name"] == "scaffold"]
    assert set(scaffold) == {"name", "about", "source", "keeps"} and "ICML" in scaffold["source"]
    presets = asked("list", "list", "presets")["kind"]["presets"]
    assert {"name": "quickstart", "about": "SuPerFed on scikit-learn's digits"} in presets
    text = CliRunner().invoke(app, ["list"]).output
    assert text.startswith("algorithms") and "quickstart" not in text and "rayfl list presets" in text


def test_what_is_listed_of_methods_is_what_their_classes_have() -> None:
    from rayfl.cli.catalog import catalog, first_sentence

    assert catalog("algorithms") == [
        (name, first_sentence(m), m.citation, f"client: {m.client_keeps}; server: {m.server_keeps}")
        for name, m in sorted(METHODS.items())
    ]


def test_show_clients_verify_and_replay(run: Path) -> None:
    assert asked("show-configuration", "show", run)["configuration"]["train"]["rounds"] == 4
    fields = asked("show-method", "show", "fedprox")["fields"]
    assert any(field["symbol"] == "mu" for field in fields)
    listed = asked("clients", "clients", run, "--limit", 2, "--sort", "loss")
    assert len(listed["clients"]) == 2 and listed["evaluated"] == 5
    assert listed["clients"][0]["loss"] <= listed["clients"][1]["loss"]
    assert asked("verify", "verify", run)["whole"] is True
    client = next(row["client"] for row in asked("clients", "clients", run)["clients"] if row["last"] == 4)
    replayed = asked("replay", "replay", run, "--round", 4, "--client", client)
    assert replayed["differences"] == {} and replayed["compared"]


def test_run_export_fork_diff_and_verify_of_a_damaged_run(run: Path, tmp_path: Path) -> None:
    made = asked("run", "run", run)
    rows = load_run(str(run), {}).rounds.to_pylist()
    last = [row for row in rows if (row["round"], row["split"], row["cohort"]) == (4, "test", "all")]
    assert [row["top1"] for row in made["summary"]] == [row["top1"] for row in last]
    assert (made["rounds_completed"], made["rounds"], made["skipped"], made["damage"]) == (4, 4, 0, [])
    exported = asked("export", "export", run, "--client", 1, "--out", tmp_path / "model.safetensors")
    assert Path(exported["file"]).exists() and exported["parameters"] > 0
    fork = f"storage_path={tmp_path}"
    forked = asked("fork", "fork", run, "--round", 3, "--name", "forked", "train.lr=0.05", fork)
    assert (forked["round"], forked["rounds"]) == (3, 4)
    different = asked("diff", "diff", run, forked["folder"], status=1)
    assert {"field": "train.lr", "first": 0.1, "second": 0.05} in different["differences"]
    assert different["same_results"] is False
    for path in (tmp_path / "forked" / "commits").glob("server-*"):
        path.write_bytes(b"")
    assert asked("verify", "verify", forked["folder"], status=1)["problems"]


def test_commands_that_are_printed_can_be_copied(tmp_path: Path) -> None:
    folder = tmp_path / "a b's"
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(small_experiment(folder, "run", "fedavg", backend="inline")))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "made.yaml"), "train.rounds=1", "tracking.tensorboard=true"])
    lines = dict(line.split(":", 1) for line in done.output.splitlines() if ":" in line)
    assert shlex.split(lines["report"]) == ["rayfl", "report", str(folder / "run")]
    assert shlex.split(lines["TensorBoard"]) == ["tensorboard", "--logdir", str(folder)]
    forked = CliRunner().invoke(app, ["fork", str(folder / "run"), "--name", "forked", "train.rounds=2"])
    assert shlex.split(forked.output.partition("go on: ")[2]) == ["rayfl", "run", str(folder / "forked")]


def test_every_path_may_begin_at_home(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert asked("plot", "plot", "clients", run, "--out=~/a.png")["figure"] == str(tmp_path / "a.png")
    assert (tmp_path / "a.csv").exists()

    def functions(group: Any) -> Iterator[Any]:
        yield from (command.callback for command in group.registered_commands)
        for inner in group.registered_groups:
            yield from functions(inner.typer_instance)

    hints = [hint for function in functions(app) for hint in get_type_hints(function, include_extras=True).values()]
    paths = [hint for hint in hints if get_origin(hint) is Annotated and "Path" in str(get_args(hint)[0])]
    assert len(paths) > 15 and all(get_args(hint)[1].callback is at_home for hint in paths)
    assert at_home(["~/b"]) == [tmp_path / "b"] and at_home(None) is None
    # Path("s3://bucket/x") is s3:/bucket/x, under which a local folder would be made.
    for address in ("s3://bucket/x.png", "file:///x.png"):
        done = CliRunner().invoke(app, ["plot", "clients", str(run), f"--out={address}"])
        assert isinstance(done.exception, ConfigError) and "a path on this machine is needed" in str(done.exception)


def test_data_and_doctor(tmp_path: Path) -> None:
    assert asked("data-list", "data", "list", "--root", tmp_path)["files"] == []
    assert asked("data-stats", "data", "stats", "quickstart")["clients"] == 20
    assert asked("data-verify", "data", "verify", "--root", tmp_path)["files"] == []
    done = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path), "--json"])
    assert done.exit_code in (0, 1)
    assert {"what", "verdict", "found", "fix"} == set(json.loads(done.stdout)["findings"][0])


def test_every_command_has_it() -> None:
    def lacking(command: Any, name: str) -> Iterator[str]:
        for part, inner in getattr(command, "commands", {}).items():
            yield from lacking(inner, f"{name} {part}")
        if not hasattr(command, "commands") and not any("--json" in option.opts for option in command.params):
            yield name

    assert list(lacking(get_command(app), "rayfl")) == []


def test_figures_reports_templates_and_repairs(run: Path, tmp_path: Path) -> None:
    drawn = asked("plot", "plot", "curves", run, "--x", "rounds", "--out", tmp_path / "curves.png")
    assert (drawn["kind"], drawn["runs"]) == ("curves", [str(run)])
    assert Path(drawn["figure"]).stat().st_size > 1000 and '"top1"' in Path(drawn["numbers"]).read_text()
    made = asked("report", "report", run, "--out", tmp_path / "report", "--format", "csv")
    assert Path(made["report"]).suffix == ".html" and made["tables"]
    assert all(Path(file).is_file() for file in (made["report"], *made["tables"]))
    template = asked("cluster-template", "cluster", "template", "kuberay", "--out", tmp_path / "job.yaml")
    assert Path(template["file"]).read_text() == template["text"] and "no node can pull" in template["warnings"][0]
    printed = asked("cluster-template", "cluster", "template", "slurm")
    assert (printed["file"], printed["warnings"]) == (None, []) and printed["text"].startswith("#!")
    assert asked("repair", "repair", run)["repaired"] == []
    shown = asked("data-show", "data", "show", run, "--out", tmp_path / "partition.png")
    assert shown["clients"] == 5 and Path(shown["file"]).is_file()


def test_data_that_are_made(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[0.0, 1.0]] * 8, "y": [0, 1] * 4}), tmp_path / "own.parquet")
    prepared = asked(
        "data-prepare", "data", "prepare", "parquet", f"path={tmp_path / 'own.parquet'}", "--root", tmp_path / "root"
    )
    assert prepared["dataset"] == "parquet" and Path(prepared["file"]).is_file()
    source = write_source(tmp_path / "leaf", document(ann=tweets("a b a"), bob=tweets()))
    arguments = ("sent140", source, "--out", tmp_path / "sent140.parquet")
    imported = asked("data-import", "data", "import-leaf", *arguments)
    assert (imported["clients"], imported["samples"]) == (1, {"train": 1, "test": 0})
    assert "have no sample here" in imported["warnings"][0] and Path(imported["file"]).is_file()


def test_what_cannot_go_together_is_refused(run: Path) -> None:
    for command in (["clients", str(run), "--csv"], ["logs", "any", "--follow"], ["submit", "quickstart", "--wait"]):
        done = CliRunner().invoke(app, [*command, "--json"])
        assert isinstance(done.exception, ConfigError), command


def test_the_page_for_agents_has_every_schema_with_its_fields() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    for name, fields in OUTPUTS.items():
        row = f"| `rayfl.{name}/1` | {'; '.join(f'`{field}`: {about}' for field, about in fields.items())} |"
        assert row in text, row
    assert set(re.findall(r"`rayfl\.([\w-]+)/1` \|", text)) == set(OUTPUTS)


def test_llms_txt_has_every_page_and_no_other() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((.+?)\)", text)
    assert all((ROOT / "docs" / page).is_file() for page in linked)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages | {"methods/index.md"} == set(linked)
    assert f"{len(METHODS)} methods" in " ".join(text.split())


def test_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"rayfl {rayfl.__version__}\n")


def test_exit_statuses() -> None:
    """2 for what the caller can mend, with one message on standard error; nothing on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "rayfl", "show", "quickstrat", "--json"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "did you mean 'quickstart'?" in done.stderr


def test_neither_pytorch_nor_ray_is_imported() -> None:
    """By the commands' module, and by what shells complete and people look up; one process tries one after another."""
    code = "import sys, rayfl, rayfl.cli.entry\n"
    for command in (None, ["--version"], ["list", "presets"], ["list"], ["list", "--json"]):
        code += f"rayfl.cli.entry.app({command}, standalone_mode=False)\n" if command else ""
        code += f"if found := [m for m in {HEAVY!r} if m in sys.modules]: sys.exit(str(({command}, found)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == ""


def test_the_citation_is_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (found["cff-version"], found["version"]) == ("1.2.0", rayfl.__version__)
    assert found["authors"] and found["title"] and found["license"] == "Apache-2.0" and found["message"]
