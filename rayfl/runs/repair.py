"""Makes a run continue whose clients' states are damaged: these clients begin again. A server's model is never made up.

Nothing but the run's files is used, and no code of the run is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayfl.errors import DamageError
from rayfl.runs.damage import mended
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import CheckedCommit, StoredFile, manifest_name
from rayfl.storage.tables import publish_table


def repair(store: CommitStore, storage: Storage) -> list[str]:
    """Makes every commit whole whose server's model is, and gives up the others; call it with the run's lease.

    A client whose state is damaged has the one that an older commit names, where that is whole, and otherwise none, as
    if it had never been sampled. What was lost is in the table ``damage`` afterwards.

    Args:
        store: the run's commits.
        storage: its folder.

    Returns:
        What was done, a sentence each; none where the run can be continued without.

    Raises:
        DamageError: when no commit has a whole server's model; nothing is changed then.
        RunError: when a commit is of another format version, or nothing can be written.
    """
    problems = store.missing_newest()
    commits = list(store.survey(True, problems))
    if any(found.trainable for found in commits) or not (commits or problems):
        return []
    whole = [found for found in commits if found.has_server]
    if not whole:
        problems += [problem for found in commits for problem in found.lost.values()]
        raise DamageError(
            f"{storage.uri} has no commit with a whole server's model, and none is made up: "
            f"{'; '.join(dict.fromkeys(problems))}. Restore these files, or start over under another name"
        )
    for found in reversed(whole):
        made = mended(store, storage, found, older_states(found, commits))
        store.replace_manifest(made.manifest)
    kept = [manifest_name(found.manifest.rounds_completed) for found in whole]
    given_up = [name for name in store.manifests() if name not in kept]
    store.drop_after(whole[0].manifest.rounds_completed)
    store.give_up(given_up)
    for table in made.manifest.tables:
        publish_table(store, storage, made.manifest, table)
    return [
        *made.said,
        *(f"{name} is given up: its server's model is damaged, or it cannot be read" for name in given_up),
    ]


def mend_tables(store: CommitStore, storage: Storage) -> list[str]:
    """Makes every commit whole of which only rows of tables are lost; call it with the run's lease.

    Returns:
        What was done to the newest of them, a sentence each.
    """
    said: Sequence[str] = ()
    for found in reversed(list(store.survey(True, []))):
        if found.lost and found.trainable:
            made = mended(store, storage, found)
            store.replace_manifest(made.manifest)
            said = made.said
    return list(said)


def older_states(found: CheckedCommit, commits: Sequence[CheckedCommit]) -> Mapping[int, StoredFile]:
    """The newest whole states, in commits before this one, of the clients whose states it has lost."""
    rounds, states = found.manifest.rounds_completed, dict[int, StoredFile]()
    for client in found.manifest.clients_in(found.lost):
        for other in commits:
            file = other.manifest.states.get(client)
            if other.manifest.rounds_completed < rounds and file is not None and file.name not in other.lost:
                states[client] = file
                break
    return states
