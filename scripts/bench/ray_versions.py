"""Does rayfl work with these versions of Ray? A Markdown table of what was run with each, and the result.

    python scripts/bench/ray_versions.py VERSION [VERSION ...] [--folder FOLDER] [--only CHECK,CHECK,...]

A version is a number, or ``newest`` for the newest that the package index has. `make ray-versions` runs it with the
oldest Ray that rayfl takes, the first with which jobs and sweeps work, and the newest.

Makes a virtual environment per version, with that Ray (from the package index, 0.2 GB on disk) and, in addition, this
environment's packages: only Ray differs. What a version of Ray requires and this environment does not have goes into
the version's own environment too. Output of the checks is in ``FOLDER/VERSION/CHECK.txt``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
_PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
CHECKS = {
    "run": ["-m", "rayfl", "run", "quickstart", "train.rounds=2"],
    "bits": [
        *_PYTEST,
        *(
            f"tests/cluster/{name}.py"
            for name in ("processes/test_same_bits", "rounds/test_session", "rounds/test_resume")
        ),
    ],
    "privacy": [*_PYTEST, "tests/cluster/rounds/test_privacy.py"],
    "recovery": [*_PYTEST, "tests/cluster/rounds/test_recovery.py"],
    "sweep": [*_PYTEST, "tests/cluster/sweep/test_sweep.py"],
    "jobs": [*_PYTEST, "-m", "slow", "tests/cluster/jobs/test_job_on_a_head.py"],
}
"""What is run with each version: arguments of Python. ``sweep`` needs Ray Tune, ``jobs`` the dashboard and tokens."""
_LIMIT_S = 900
NEWEST = "newest"


def main() -> None:
    """Makes the environments and prints a row per version and check, as they end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--folder", type=Path, help="for environments and output; default: a new temporary one")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, separated by commas")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if unknown := set(names) - set(CHECKS):
        parser.error(f"no checks {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    folder = (chosen.folder or Path(tempfile.mkdtemp(prefix="ray-versions-"))).resolve()
    print(f"environments and output: {folder}", file=sys.stderr)
    print("| Ray | check | result | seconds |\n|---|---|---|---|", flush=True)
    passed = True
    for version in [newest() if version == NEWEST else version for version in chosen.versions]:
        python, added = environment(folder / version, version)
        if added:
            print(f"Ray {version} also got: {', '.join(added)}", file=sys.stderr)
        for name in names:
            begun = time.perf_counter()
            fine, result = check(python, CHECKS[name], folder / version / f"{name}.txt")
            passed &= fine
            print(f"| {version} | {name} | {result} | {time.perf_counter() - begun:.0f} |", flush=True)
    sys.exit(0 if passed else 1)


def newest() -> str:
    """The newest release of Ray that the package index has for this Python."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "ray", "--disable-pip-version-check"]
    answer = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    found = re.match(r"ray \(([0-9.]+)\)", answer)
    if found is None:
        sys.exit(f"the package index does not say which Ray is the newest: {answer!r}")
    return found.group(1)


def environment(folder: Path, version: str) -> tuple[Path, list[str]]:
    """A virtual environment with this version of Ray and, behind it, this environment's packages.

    Args:
        folder: of the environment; one that was completed before is used again.
        version: of Ray.

    Returns:
        Its Python, and what Ray requires that had to be installed in addition.
    """
    python = folder / "bin" / "python"
    added: list[str] = []
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    link = packages / "zz-behind.pth"
    if not link.exists():
        venv.create(folder, clear=True)
        _install(python, [f"ray=={version}"])
        added = _missing(packages)
        if added:
            _install(python, added)
        # Unlike a path by itself, this also follows the links of editable installations.
        link.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    found = subprocess.run([python, "-c", "import ray; print(ray.__version__)"], capture_output=True, text=True)
    if found.stdout.strip() != version:
        sys.exit(f"{folder} has Ray {found.stdout.strip() or found.stderr}, not {version}: delete it")
    return python, added


def check(python: Path, arguments: Sequence[str], output: Path) -> tuple[bool, str]:
    """Runs a check.

    Args:
        python: of the environment.
        arguments: see ``CHECKS``.
        output: file for what it prints.

    Returns:
        Whether it passed, and pytest's counts, or of a run the first digits of its table's SHA-256, or what went wrong.
    """
    runs = output.parent / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    is_run = arguments[1] == "rayfl"
    status = _status([str(python), *arguments, *([f"storage_path={runs}"] if is_run else [])], output)
    if status is None:
        return False, f"not done in {_LIMIT_S} s"
    last = (output.read_text(errors="replace").strip().splitlines() or [""])[-1].strip("= ")
    if not is_run:
        return status == 0, last.partition(" in ")[0]
    if status:
        return False, f"exit status {status}: {last}"
    (table,) = runs.glob("*/clients.parquet")
    return True, f"clients.parquet {hashlib.sha256(table.read_bytes()).hexdigest()[:8]}"


def _status(command: Sequence[str], output: Path) -> int | None:
    """A command's exit status; None: it took too long, and was ended."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.wait()


def _install(python: Path, requirements: Sequence[str]) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True, stdout=sys.stderr)


def _missing(packages: Path) -> list[str]:
    """What the Ray in this folder requires, and this environment does not have in such a version."""
    (ray,) = metadata.distributions(name="ray", path=[str(packages)])
    found = []
    for text in ray.requires or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(text)
    return found


if __name__ == "__main__":
    main()
