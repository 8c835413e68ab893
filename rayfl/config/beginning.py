"""The section ``init`` of a configuration: the run from whose model, or commit, another run begins."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from rayfl.errors import ConfigError, RunError
from rayfl.messages.privacy import PrivacyConfig
from rayfl.naming.texts import Checksum, has_keys
from rayfl.params import Tree
from rayfl.storage import treefile
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest, manifest_name

FILE = "initial.safetensors"
"""Where a run's folder has the model that it begins from, so that it needs the other run no more."""


class _Beginning(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int | None = Field(None, ge=1, description="after which round; null: the newest commit")
    what: Literal["model", "commit"] = Field(
        "model",
        description="model: the server's model, in place of the initial one of server and clients; commit: everything "
        "that `rayfl fork` has put into the folder",
    )
    sha256: Checksum | None = Field(
        None, description="of what the run begins from: found out, and what results depend on"
    )

    @property
    def source(self) -> str | None:
        """The other run's folder."""
        found: str | None = getattr(self, "from")
        return found

    @property
    def identity(self) -> dict[str, Any]:
        """Returns what counts in a fingerprint: not where the other run lies."""
        return {"what": self.what, "sha256": self.sha256}

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        defaults = {name: type(self).model_fields[name].default for name in ("round", "what", "sha256")}
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.source is None and given:
            raise ValueError(f"{' and '.join(given)} need from, the folder of a run")
        if self.source is not None and has_keys(self.source):
            raise ValueError("keys do not belong here: give them in the environment (AWS_ACCESS_KEY_ID, ...)")
        if self.what == "commit" and self.sha256 is None:
            raise ValueError("what=commit is for `rayfl fork`, which makes such a run's folder; leave it out")
        return self


if TYPE_CHECKING:

    class InitConfig(_Beginning):
        """The other run."""
else:
    # A class body cannot have a field of this name.
    InitConfig = create_model(
        "InitConfig",
        __base__=_Beginning,
        __doc__="The run from which this one begins.",
        **{"from": (str | None, Field(None, min_length=1, description="folder of another run: a path or a URI"))},
    )


def settled(init: InitConfig) -> InitConfig:
    """The section with the round and the checksum of the model, which it is to have from now on.

    Raises:
        ConfigError: there is no such run or commit, or its server has no model.
    """
    if init.source is None or init.sha256 is not None:
        return init
    try:
        manifest, content = model_of(init.source, init.round)
    except RunError as error:
        raise ConfigError(f"init.from: {error}") from None
    found = {"round": manifest.rounds_completed, "sha256": hashlib.sha256(content).hexdigest()}
    return init.model_copy(update=found)


def branch_of(init: InitConfig, privacy: PrivacyConfig) -> str:
    """What tells the rounds' random numbers of a private run from those of the run whose model it begins with.

    With the same noise in both, the difference of their models would have none.
    """
    noised = privacy.noise_multiplier or privacy.example_noise_multiplier
    return f".{init.sha256}" if noised and init.source is not None and init.what == "model" else ""


def model_of(uri: str, round: int | None) -> tuple[Manifest, bytes]:
    """A commit of a run, and the server's model in it as a file.

    Raises:
        RunError: there is none, or its server has no model.
    """
    storage = Storage(uri.rstrip("/") or uri)
    store = CommitStore(storage)
    names = store.manifests()
    if not names:
        raise RunError(f"{storage.uri} has no commit: give the folder of a run that has begun")
    if round is not None and manifest_name(round) not in names:
        kept = ", ".join(str(int(name[9:-5])) for name in names)
        raise RunError(f"{storage.uri} has no commit of round {round}; kept are those of rounds {kept}")
    manifest = store.latest() if round is None else store.read_manifest(manifest_name(round))
    assert manifest is not None
    model = store.read_server(manifest).get("model")
    if not isinstance(model, dict):
        raise RunError(f"the server of {storage.uri} keeps no model that another run could begin from")
    return manifest, treefile.dumps(model)


def initial_model(init: InitConfig, folder: Storage) -> Tree | None:
    """The model that a run begins from; None where it begins from a new one.

    Args:
        init: the section of its configuration, settled.
        folder: the run's.

    Raises:
        RunError: the model is not the one that the configuration means, or is not to be had.
    """
    if init.source is None or (init.what == "commit" and not folder.exists(FILE)):
        return None
    return treefile.loads(initial_file(init, folder), FILE)


def initial_file(init: InitConfig, folder: Storage) -> bytes:
    """The file of that model, from the run's own folder or, before it begins, from the other run."""
    assert init.source is not None
    if folder.exists(FILE):
        content, where = folder.read(FILE), f"{folder.uri}/{FILE}"
    else:
        content, where = model_of(init.source, init.round)[1], f"the commit of round {init.round} in {init.source}"
    if init.what == "model" and hashlib.sha256(content).hexdigest() != init.sha256:
        raise RunError(
            f"{where} has another model than init.sha256={init.sha256} says: it was changed. Restore it, or leave "
            "init.sha256 out to begin a new run"
        )
    return content
