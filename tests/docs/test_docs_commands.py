"""Every command and every Python block of README.md and docs/ does what it did when the page was written.

A ``rayfl`` command runs in this process, in a scratch folder, with two rounds. What cannot be run here is in
``EXCUSED`` with the reason; of that, too, ``rayfl`` commands are parsed, and their configurations validated. A command
that is in neither fails: give it what it needs in ``docs_world.py``, or a reason here.
"""

from __future__ import annotations

import fnmatch
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cluster.run
import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.cli.entry import app, load_experiment
from rayfl.config.loading import load_config
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.support.commands import leaves
from tests.support.docs_blocks import PAGES, ROOT, Block, Command, blocks, commands, parsed, temporary_environment
from tests.support.docs_world import TINY, furnish, model_of

EXCUSED = {
    "rayfl reproduce *": "takes long; tests/reproduction has a tiny table",
    "rayfl sweep *": "starts Ray; tests/cluster has sweeps",
    "rayfl submit *": "needs a cluster; tests/cluster has one",
    "rayfl status": "needs a cluster",
    "rayfl logs *": "needs a cluster",
    "rayfl stop *": "needs a cluster",
    "rayfl doctor --address *": "needs a cluster",
    "rayfl data prepare *": "downloads, or needs the authors' archives; tests/data has stand-ins",
    **dict.fromkeys(
        ("rayfl data import-tff * tff/*", "rayfl data import-tff * *.tar.bz2*"),
        "reads HDF5, for which a package may be missing; tests/data/sources/tff has stand-ins",
    ),
    "make *": "installs, or takes long",
    "python -m venv *": "installs",
    "source .venv/*": "installs",
    "pip *": "installs",
    "python scripts/*": "takes hours",
    "tensorboard *": "does not end",
    "ray *": "starts a cluster",
    "ssh *": "needs another machine",
    "scp *": "needs another machine",
    "chmod *": "is about a token of Ray's",
    "sbatch *": "needs SLURM",
    "docker *": "needs a docker daemon",
    "kubectl *": "needs Kubernetes",
}
"""Patterns of commands that are not run, and why."""

FAILS = {"diff": 1, "doctor": 1}
"""Commands whose exit status may say that they found something."""

SLOW = {
    *("README.md", "commands.md", "plots.md", "report.md", "inspect.md", "cluster.md", "adapters.md"),
    *("reproduction.md", "tasks.md", "optimizers.md", "privacy.md", "scale.md", "attacks.md", "compression.md"),
    *("data-leaf.md", "go-on.md", "system.md", "selection.md", "long-tail.md", "data.md"),
    "group-fairness.md",
    *("models.md", "semi-supervised.md", "contribution.md", "stages.md"),
}
"""Pages that take long: `make test-all` runs them."""

_ON_LONG_PAGES = [pytest.mark.slow, pytest.mark.timeout(900)]

OWN_MODULES = ("my_module", "my_data", "my_optimizers", "mine", "remembering")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with the current folder in it, which is the data root as well."""
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "ray_results").mkdir()
    for name, value in temporary_environment(tmp_path, folder).items():
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAYFL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster.run, "load_config", _tiny)
    monkeypatch.chdir(folder)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


def _tiny(schema: Any, source: Any, overrides: Any) -> Any:
    """What ``rayfl.run`` reads: two rounds; a configuration that was written by a run stays what it is."""
    return load_config(schema, source, overrides if isinstance(source, dict) else {**overrides, **TINY})


def excuse(command: Command) -> str | None:
    """The pattern that excuses a command."""
    return next((pattern for pattern in EXCUSED if fnmatch.fnmatchcase(command.text, pattern)), None)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=_ON_LONG_PAGES * (page.name in SLOW)) for page in PAGES]
)
def test_the_page_does_what_it_says(page: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "work"
    furnish(home, folder, "\n".join(block.text for block in blocks(page)))
    for block in blocks(page):
        if block.language == "python":
            run_python(block, folder)
            continue
        found, folder = commands(block, folder, home)
        for command in found:
            monkeypatch.chdir(command.folder)
            if excuse(command) is not None:
                check(command)
            elif command.words[0] == "rayfl":
                run(command)
            elif command.words[0] == "python" and command.words[1].startswith("examples/"):
                monkeypatch.setattr(sys, "argv", list(command.words[1:]))
                runpy.run_path(str(ROOT / command.words[1]), run_name="__main__")
            else:
                pytest.fail(f"{page.name}: no test runs `{command.text}`, and EXCUSED in {__file__} has no reason")
        monkeypatch.chdir(folder)


def run(command: Command) -> None:
    """Runs a ``rayfl`` command; runs of experiments are made short."""
    name, given = parsed(command.words)
    words = list(command.words[1:])
    if name == "run" and not str(given["config"]).endswith("/config.yaml"):  # the run of such a file is finished
        words += [f"{path}={value}" for path, value in TINY.items()]
        if any("assignment_round=" in word for word in words):
            words.append("algorithm.assignment_round=1")
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code in (0, FAILS.get(name, 0)), f"{command.text}\n{done.output}"
    if given.get("out") is not None:
        assert Path(str(given["out"])).exists(), f"{command.text} left no {given['out']}"


def run_python(block: Block, folder: Path) -> None:
    """Runs a block, and saves it where it has a name."""
    if block.file is not None:
        (folder / block.file).write_text(block.text)
    if "to_pandas" in block.text:
        pytest.importorskip("pandas", reason="the block makes a DataFrame: pip install pandas (in the extra docs)")
    exported = folder / "model.safetensors"
    given = {"model": model_of(exported)} if exported.exists() else {}
    exec(compile(block.text, "a block", "exec"), {"__name__": "a_block", **given})  # that is what the test is about


def check(command: Command) -> None:
    """What can be said about a command without running it."""
    if command.words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(command.words[1:]) <= set(targets), f"the Makefile has no {command.text}"
    elif command.text.startswith("python scripts/"):
        assert (ROOT / command.words[1]).is_file(), f"there is no {command.words[1]}"
        if command.words[1].endswith("compare_methods.py"):
            check_comparison(list(command.words[2:]))
    elif command.words[0] == "rayfl":
        name, given = parsed(command.words)
        if name == "sweep":
            space = parse_space(given["overrides"] or [])
            options = {key: given[key] for key in ("samples", "draw_seed")}
            assert plan_sweep(Experiment, str(given["config"]), space, **options).trials
        elif name == "submit":
            load_experiment(given["config"], given["overrides"])


def check_comparison(words: list[str]) -> None:
    """Every method's configuration is valid."""
    script = runpy.run_path(str(ROOT / "scripts" / "bench" / "compare_methods.py"))
    preset, *rest = words
    methods = sorted(METHODS)
    if "--methods" in rest:
        place = rest.index("--methods")
        methods = rest[place + 1].split(",")
        del rest[place : place + 2]
    for method in methods:
        assert load_config(Experiment, preset, script["_settings"](method, rest)).algorithm.name == method


def test_no_excuse_is_left_over(tmp_path: Path) -> None:
    """Every pattern is still used, and none excuses what is run for another reason."""
    found = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
        for command in commands(block, tmp_path, tmp_path)[0]
    ]
    assert len(found) > 80
    assert {excuse(command) for command in found} - {None} == set(EXCUSED)


def test_a_command_without_an_excuse_is_noticed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = home / "new.md"
    page.write_text("```bash\nfrobnicate --all   # a comment\n```\n")
    with pytest.raises(pytest.fail.Exception, match="no test runs `frobnicate --all`"):
        test_the_page_does_what_it_says(page, home, monkeypatch)


def test_loops_wildcards_and_folders_are_the_shells_own(home: Path) -> None:
    (home / "a-1").mkdir()
    page = home / "new.md"
    page.write_text('```bash\nfor n in 1 2; do\n  rayfl show "x $n"\ndone\ncd ~\nrayfl verify a-* > out.csv\n```\n')
    found, folder = commands(blocks(page)[0], home / "work", home)
    assert [command.words[1:] for command in found] == [("show", "x 1"), ("show", "x 2"), ("verify", "a-1")]
    assert (found[0].folder, folder) == (home / "work", home)


def test_every_command_has_an_example(tmp_path: Path) -> None:
    """``docs/commands.md`` promises it."""
    page = ROOT / "docs" / "commands.md"
    shown = {
        command.words[1:]
        for block in blocks(page)
        for command in commands(block, tmp_path, tmp_path)[0]
        if command.words[0] == "rayfl"
    }
    missing = [" ".join(leaf) for leaf in leaves() if leaf not in {words[: len(leaf)] for words in shown}]
    assert missing == []


def test_names_that_pages_import_are_public() -> None:
    """``rayfl.NAME`` and ``from rayfl import NAME`` in blocks name what the package offers."""
    used: set[str] = set()
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                used |= set(re.findall(r"\brayfl\.(\w+)\(", block.text))
                for line in re.findall(r"^from rayfl import (.*)$", block.text, re.MULTILINE):
                    used |= {name.strip() for name in line.split(",")}
    assert used <= set(rayfl.__all__)
