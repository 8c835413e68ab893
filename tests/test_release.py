"""A release: one version, a changelog that begins with it, and a wheel that works in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import rayfl

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "algorithms", "cluster", "rayfl")
PIP = ("-m", "pip", "--disable-pip-version-check")
PINS = ("--constraint", str(ROOT / "constraints.txt"))
EXTRAS = "cluster,sweep,transformers,hf,timm"


def called(folder: Path, *command: object, status: int = 0) -> str:
    """What a command prints that must end with this status; nothing of this environment reaches it."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RAYFL_DATA", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**environment, "HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def source(folder: Path) -> Path:
    """A copy of what a wheel is made of: building it leaves files beside them."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, made with the setuptools that is here."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("making a wheel needs setuptools 77 or newer")
    made, out = source(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    called(out, sys.executable, *PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", out, made)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture
def index(tmp_path: Path) -> Iterator[None]:
    """Skips where packages cannot be had."""
    asked = ["download", "-q", "--no-deps", "--dest", str(tmp_path / "asked"), "iniconfig"]
    if subprocess.run([sys.executable, *PIP, *asked], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    yield
    for folder in tmp_path.glob("env*"):  # 6 GB
        shutil.rmtree(folder)


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == rayfl.__version__ and len(set(headings)) == len(headings)


def test_the_version_stands_in_one_place() -> None:
    assert 'version = { attr = "rayfl.version.VERSION" }' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assigned = [path for path in (ROOT / "rayfl").rglob("*.py") if re.search(r'^VERSION = "', path.read_text(), re.M)]
    assert assigned == [ROOT / "rayfl" / "version.py"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == rayfl.__version__


def test_names_that_go_with_the_next_release_are_still_to_go() -> None:
    """Old names warn that they go in 0.3: by then they must be gone."""
    from rayfl import renamed

    assert Version(rayfl.__version__) < Version("0.3") or not (renamed.MODULES or renamed.NAMES)


def test_a_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Templates, presets, pages and marks of types are no Python, and easily forgotten."""
    assert wheel.name == f"rayfl-{rayfl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry = archive.read(f"rayfl-{rayfl.__version__}.dist-info/entry_points.txt").decode()
    here = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    assert packed == {str(path) for path in here if "__pycache__" not in path.parts}
    assert "rayfl = rayfl.__main__:main" in entry


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_wheel_installs_in_an_empty_environment(wheel: Path, index: None, tmp_path: Path) -> None:
    """First without extras: quickstart runs, a sweep says what it needs. Then with them."""
    called(tmp_path, sys.executable, "-m", "venv", tmp_path / "env")
    python, command = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "rayfl"
    called(tmp_path, python, *PIP, "install", "-q", *PINS, wheel)
    called(tmp_path, python, *PIP, "check")
    assert called(tmp_path, command, "--version") == f"rayfl {rayfl.__version__}\n"
    assert str(tmp_path / "env") in called(tmp_path, python, "-c", "import cluster; print(cluster.__file__)")
    text = called(tmp_path, command, "run", "train.rounds=3")
    assert "Test data after round 3" in text and "run folder:" in text
    assert "#SBATCH" in called(tmp_path, command, "cluster", "template", "slurm")
    assert called(tmp_path, command, "report", *(tmp_path / "ray_results").glob("superfed-*"))
    sweep = ["sweep", "quickstart", "seed=0:2", "train.rounds=1"]
    assert "pip install 'rayfl[sweep]'" in called(tmp_path, command, *sweep, status=2)
    assert "pip install 'rayfl[cluster]'" in called(tmp_path, command, "submit", "quickstart", status=2)
    make = ["model", "make", "tiny-vit", "--out", tmp_path / "base"]
    assert "pip install 'rayfl[transformers]'" in called(tmp_path, command, *make, status=2)
    called(tmp_path, python, *PIP, "install", "-q", *PINS, f"{wheel}[{EXTRAS}]")
    called(tmp_path, python, *PIP, "check")
    assert "2" in called(tmp_path, command, *sweep)
    called(tmp_path, command, *make)
    adapters = ["run", "quickstart-lora", f"model.folder={tmp_path / 'base'}", "train.rounds=1"]
    assert "Test data after round 1" in called(tmp_path, command, *adapters)
    assert "no Ray dashboard at" in called(
        tmp_path, command, "submit", "quickstart", "--address", "http://127.0.0.1:9", status=2
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_pins_resolve_for_every_python(python: str, wheel: Path, index: None, tmp_path: Path) -> None:
    """Nothing is installed: pip finds a wheel of every dependency, in the pinned version."""
    asked = ["--python-version", python, "--only-binary", ":all:", "--target", tmp_path / "nowhere"]
    dry = ["install", "-q", "--dry-run", "--ignore-installed"]
    called(tmp_path, sys.executable, *PIP, *dry, *asked, *PINS, wheel)
