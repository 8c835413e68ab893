"""Coverage-guided fuzzing of everything that rayfl reads, with atheris (``pip install atheris``).

    python scripts/chaos/fuzz.py TARGET [--seconds 60] [--corpus FOLDER]
    python scripts/chaos/fuzz.py all --seconds 60

The checks are those of the tests in ``tests/fuzz``: every input gives a result, or an error of rayfl's own that names
the place. An input that gives anything else is left as a file ``crash-*`` in the corpus folder, and the exit status is
not zero. TARGET: override, config, partition, tree, manifest, leaf; ``all`` takes them in turn.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["rayfl", "algorithms", "yaml"]):
    import rayfl.cli.entry  # noqa: F401
from tests.fuzz import test_config, test_files, test_leaf

Check = Callable[[bytes], None]


def targets(folder: Path) -> dict[str, tuple[Check, list[bytes]]]:
    """By name: the check of an input, and the inputs to begin with.

    Args:
        folder: a new folder for the files that checks write.
    """
    leaf, commits = folder / "leaf", folder / "commits"
    newest = commits / "commits" / "manifest-000002.json"
    store = test_files.two_commits(commits)
    whole = newest.read_bytes()

    def manifest(data: bytes) -> None:
        newest.write_bytes(whole)
        test_files.checked_replacement(commits, store, newest, data)

    user = json.dumps({"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.5] * 784], "y": [1]}}})
    typed = [f"{path}=1".encode() for path in test_config.PATHS]
    return {
        "override": (lambda data: test_config.checked_text(data.decode("utf-8", "replace")), typed),
        "config": (lambda data: test_config.checked_file(folder, data), [test_config.CONFIG]),
        "partition": (lambda data: test_files.checked_partition(folder, data), [test_files.PARTITION]),
        "tree": (test_files.checked_tree, [test_files.treefile.dumps(test_files.TREE)]),
        "manifest": (manifest, [whole]),
        "leaf": (lambda data: test_leaf.checked_leaf(leaf, "femnist", data), [user.encode()]),
    }


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Fuzzes one target in this process, which libFuzzer ends."""
    with tempfile.TemporaryDirectory() as folder:
        check, seeds = targets(Path(folder))[name]
        own = corpus / name
        own.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (own / f"seed-{number}").write_bytes(seed)
        flags = [f"-max_total_time={seconds}", f"-artifact_prefix={corpus}/{name}-", "-max_len=8192", "-rss_limit_mb=0"]
        atheris.Setup([sys.argv[0], *flags, str(own)], check)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60, help="for every target")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "rayfl-corpus")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = list(targets(Path(folder)))
    if arguments.target == "all":
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--corpus", str(arguments.corpus)]
        failed = [name for name in names if subprocess.run([*command, name]).returncode]
        print(f"{len(names)} targets, {arguments.seconds} s each, failed: {', '.join(failed) or 'none'}")
        raise SystemExit(bool(failed))
    if arguments.target not in names:
        parser.error(f"no target {arguments.target!r}; there are {', '.join(names)}, all")
    fuzz(arguments.target, arguments.seconds, arguments.corpus)


if __name__ == "__main__":
    main()
