"""Trials with damage that no kept commit is without, with second copies, and with links and files of others."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from chaos_boundaries import kill_at
from chaos_inline import METHODS, Laboratory, counted, run_with
from chaos_random import killed_after
from chaos_trials import KILLED, MENDABLE, Trial, again, experiment, in_process, recovered, undisturbed

from rayfl.results.schemas import TABLES
from rayfl.runs.damage import STATE
from rayfl.runs.repair import repair
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest
from tests.support.experiments import outcome
from tests.support.toys import assert_equal

_MINE = {"thesis.tex": b"mine", "states-of-mind.parquet": b"mine", "manifest-final.json": b"mine"}


def tables_damaged(laboratory: Laboratory, rng: random.Random) -> Trial:
    """Parts of tables are damaged in all commits, some beside them as well: what is left is the undisturbed run's."""
    trial, folder, config, calm = _killed("tables of all commits damaged", laboratory, rng)
    names = rng.sample(sorted(TABLES), rng.randint(1, len(TABLES)))
    for name in names:
        for file in {part.name for manifest in _manifests(folder) for part in manifest.tables[name]}:
            trial.detail += f", {_damage(folder / 'commits' / file, rng)}"
        if rng.random() < 0.7:
            trial.detail += f", {_damage(folder / f'{name}.parquet', rng)}"
    ended = in_process(undisturbed, config, log=folder.parent / "log")
    if ended.status != 0:
        trial.problem = f"ended with {ended.status}: {ended.answer}"
    else:
        trial.problem = "; ".join(_left(calm, folder))
    return trial


def states_damaged(laboratory: Laboratory, rng: random.Random) -> Trial:
    """Clients' states are damaged in all commits: refused with the way out, repaired, and gone on with."""
    trial, folder, config, calm = _killed("states of all commits damaged, then repaired", laboratory, rng)
    manifests = _manifests(folder)
    if not all(found.states for found in manifests):
        trial.struck = False  # the method's clients have none so early
        return recovered(trial, config, calm, folder.parent / "log")
    shared = sorted(set.intersection(*({file.name for file in found.states.values()} for found in manifests)))
    # In one that all commits name, or in one of each commit: none is whole afterwards.
    each = {rng.choice(sorted(found.states.items()))[1].name for found in manifests}
    chosen = {rng.choice(shared)} if shared else each
    lost = manifests[-1].clients_in(chosen)
    for name in chosen:
        trial.detail += f", {_damage(folder / 'commits' / name, rng)}"
    ended = in_process(undisturbed, config, log=folder.parent / "log")
    if ended.status != MENDABLE or f"rayfl repair {folder}" not in str(ended.answer):
        trial.problem = f"ended with {ended.status} and no word of repair: {ended.answer}"
        return trial
    storage = Storage(str(folder))
    repair(CommitStore(storage), storage)
    ended = in_process(again, config, calm, log=folder.parent / "log")
    if ended.status != 0 or not isinstance(ended.answer, tuple):
        trial.problem = f"the repaired run ended with {ended.status}: {ended.answer}"
        return trial
    trial.recover_s = ended.answer[0]
    rows = [row for row in pq.read_table(folder / "damage.parquet").to_pylist() if row["lost"] == STATE]
    problems = [*verify(storage).problems, *_different_before(calm, folder, manifests[-1].rounds_completed)]
    if {row["client"] for row in rows} != set(lost):
        problems.append(f"clients {lost} have lost their states, on record are {rows}")
    trial.problem = "; ".join(problems)
    return trial


def server_damaged(laboratory: Laboratory, rng: random.Random) -> Trial:
    """The server's model is damaged in all commits: refused, also by repair, until a file is put back."""
    fault = "server's model of all commits damaged, then put back"
    trial, folder, config, calm = _killed(fault, laboratory, rng)
    storage, kept = Storage(str(folder)), folder.parent / "kept"
    shutil.copytree(folder / "commits", kept)
    for manifest in _manifests(folder):
        trial.detail += f", {_damage(folder / 'commits' / manifest.server.name, rng)}"
    before = _contents(folder / "commits")
    ended = in_process(undisturbed, config, log=folder.parent / "log")
    mended = in_process(repair, CommitStore(storage), storage, log=folder.parent / "log")
    if (ended.status, mended.status) != (MENDABLE, MENDABLE) or _contents(folder / "commits") != before:
        trial.problem = f"ended with {ended.status} and {mended.status}: {ended.answer}; {mended.answer}"
        return trial
    for path in kept.iterdir():
        shutil.copy(path, folder / "commits" / path.name)
    return recovered(trial, config, calm, folder.parent / "log")


def copy_damaged(laboratory: Laboratory, rng: random.Random) -> Trial:
    """With two copies, any files are damaged or lost in one of the two folders."""
    fault, two = "files damaged in one of two copies", {"copies": 2}
    trial, folder, config, calm = _killed(fault, laboratory, rng, storage=two)
    place = rng.choice((folder, folder / "copy"))
    files = sorted([*(place / "commits").iterdir(), place / "config.yaml", place / "partition.parquet"])
    for path in rng.sample(files, rng.randint(1, len(files))):
        # What an edited configuration says cannot be told from what it said.
        if path.name == "config.yaml":
            path.unlink()
        else:
            trial.detail += f", {_damage(path, rng)}"
    trial.detail += f" in {place.name}"
    return recovered(trial, config, calm, folder.parent / "log")


def killed_with_copies(laboratory: Laboratory, rng: random.Random) -> Trial:
    """The process is killed at one boundary of a system call of a run with two copies."""
    calm, _ = laboratory.calm("scaffold", 2)
    folder = laboratory.folder()
    config = experiment(folder, "scaffold", 2) | {"storage": {"copies": 2}}
    total = laboratory.noted("boundaries of two copies", _count)
    number = rng.randrange(total)
    trial = Trial("process killed at a boundary, with two copies", f"boundary {number} of {total}")
    ended = in_process(run_with, kill_at(number), config, log=folder / "log")
    if ended.status != KILLED:
        trial.problem = f"ended with {ended.status} where it should have been killed: {ended.answer}"
        return trial
    return recovered(trial, config, calm, folder / "log")


def commits_linked(laboratory: Laboratory, rng: random.Random) -> Trial:
    """``commits`` leads to somebody's folder: refused, and nothing there changes; then it is put back."""
    trial, folder, config, calm = _killed("commits/ is a link to another folder", laboratory, rng)
    elsewhere, aside = _of_others(folder.parent / "elsewhere"), folder.parent / "aside"
    if rng.random() < 0.5:
        shutil.copytree(folder / "commits", elsewhere, dirs_exist_ok=True)
    (folder / "commits").rename(aside)
    (folder / "commits").symlink_to(elsewhere)
    before = _contents(elsewhere)
    ended = in_process(undisturbed, config, log=folder.parent / "log")
    if ended.status != MENDABLE or "is a link to" not in str(ended.answer) or _contents(elsewhere) != before:
        trial.problem = (
            f"ended with {ended.status}: {ended.answer}; the other folder has {sorted(_contents(elsewhere))}"
        )
        return trial
    (folder / "commits").unlink()
    aside.rename(folder / "commits")
    return recovered(trial, config, calm, folder.parent / "log")


def log_linked(laboratory: Laboratory, rng: random.Random) -> Trial:
    """``rayfl.log`` leads out of the folder, and files of others lie among the commits: all stay as they are."""
    fault = "rayfl.log is a link, and others' files in commits/"
    trial, folder, config, calm = _killed(fault, laboratory, rng)
    mine = folder.parent / "mine"
    mine.write_bytes(b"mine")
    (folder / "rayfl.log").unlink(missing_ok=True)
    (folder / "rayfl.log").symlink_to(mine)
    for name, content in _MINE.items():
        (folder / "commits" / name).write_bytes(content)
    trial = recovered(trial, config, calm, folder.parent / "log")
    left = {name: (folder / "commits" / name).read_bytes() for name in _MINE if (folder / "commits" / name).exists()}
    if mine.read_bytes() != b"mine" or left != _MINE:
        trial.problem = f"{trial.problem}; changed or deleted: {mine.read_bytes()!r}, {left}"
    return trial


def folder_of_others(laboratory: Laboratory, rng: random.Random) -> Trial:
    """The run's folder is somebody else's, perhaps with a folder ``commits``: refused, and nothing there changes."""
    method = rng.choice(METHODS)
    calm, _ = laboratory.calm(method)
    place = laboratory.folder()
    config, folder = experiment(place, method), place / "run"
    inside = rng.choice(("", "commits", "results"))
    _of_others(folder / inside)
    trial = Trial("folder of somebody else", f"{method}, files in {inside or 'the folder itself'}")
    before = _contents(folder)
    ended = in_process(undisturbed, config, log=place / "log")
    if ended.status != MENDABLE or _contents(folder) != before:
        trial.problem = f"ended with {ended.status}: {ended.answer}; there is {sorted(_contents(folder))}"
        return trial
    shutil.rmtree(folder)
    return recovered(trial, config, calm, place / "log")


def _killed(
    fault: str, laboratory: Laboratory, rng: random.Random, **sections: Any
) -> tuple[Trial, Path, dict[str, Any], Path]:
    """A trial, the folder of its run, which was killed after its second or third commit, and the undisturbed run's."""
    method = rng.choice(METHODS)
    calm, _ = laboratory.calm(method)
    place = laboratory.folder()
    config = experiment(place, method) | sections
    in_process(killed_after, config, rng.randint(2, 3), log=place / "log")
    return Trial(fault, method), place / "run", config, calm


def _manifests(folder: Path) -> list[Manifest]:
    store = CommitStore(Storage(str(folder)))
    return [store.read_manifest(name) for name in store.manifests()]


def _damage(path: Path, rng: random.Random) -> str:
    """Flips a bit of a file, cuts it off or deletes it; says which."""
    how = rng.choice(("bit", "end", "all"))
    content = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if how == "all" or not content:
        path.unlink(missing_ok=True)
    elif how == "end":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    return f"{path.name}: {how}"


def _left(calm: Path, folder: Path) -> Iterator[str]:
    """What is not as in the undisturbed run but for the rows that are on record as lost."""
    before, after = outcome(calm), outcome(folder)
    for name in ("server", "states"):
        try:
            assert_equal(getattr(before, name), getattr(after, name))
        except AssertionError:
            yield f"another {name}"
    path = folder / "damage.parquet"
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []
    for name in TABLES:
        whole: pa.Table = getattr(before, name)
        for row in rows:
            if row["lost"] == name:
                early = pc.less(whole["round"], row["first_round"])
                whole = whole.filter(pc.or_(early, pc.greater(whole["round"], row["last_round"])))
        if not getattr(after, name).equals(whole):
            yield f"{name} has other rows than its record of what is lost says"
    yield from verify(Storage(str(folder))).problems


def _different_before(calm: Path, folder: Path, rounds: int) -> Iterator[str]:
    """Tables whose rows up to a round are not those of the undisturbed run."""
    for name in TABLES:
        both = [pq.read_table(place / f"{name}.parquet") for place in (calm, folder)]
        early = [table.filter(pc.less_equal(table["round"], rounds)) for table in both]
        if not early[0].equals(early[1]):
            yield f"{name} has other rows before the repair"


def _of_others(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _MINE.items():
        (folder / name).write_bytes(content)
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _count(place: Path) -> int:
    config = experiment(place, "scaffold", 2) | {"storage": {"copies": 2}}
    ended = in_process(counted, config, log=place / "log")
    if ended.status != 0:
        raise RuntimeError(f"the boundaries could not be counted: {ended.answer}")
    return len(ended.answer[0])


DAMAGE: dict[str, Callable[[Laboratory, random.Random], Trial | None]] = {
    "tables": tables_damaged,
    "states": states_damaged,
    "server": server_damaged,
    "copies": copy_damaged,
    "copies-kill": killed_with_copies,
    "link": commits_linked,
    "log-link": log_linked,
    "others": folder_of_others,
}
"""Trials of this module, by name."""
