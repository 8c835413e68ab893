"""Files outside of a run's folder that it is tied to by their checksums: pretrained models and tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayfl.data.sources.tokens.chat_texts import CHAT
from rayfl.data.sources.tokens.tokenizers import tokenizer_digest
from rayfl.errors import ModelError
from rayfl.models.pretrained.folder import BaseFolder, bases_in
from rayfl.storage.run_folder import CONFIG


@dataclass(frozen=True)
class Outside:
    """What was found of one of them.

    Attributes:
        files: how many files were read.
        bytes: how many bytes they have.
        problem: what is wrong; empty if nothing is.
        note: what is worth knowing, and not wrong.
    """

    files: int = 0
    bytes: int = 0
    problem: str = ""
    note: str = ""


def outside_files(content: Mapping[str, Any]) -> Iterator[Outside]:
    """Reads what lies on this machine of the files that a recorded configuration names by checksums.

    Args:
        content: of ``config.yaml``.
    """
    for folder, checksum in bases_in(content.get("model")):
        try:
            base = BaseFolder(folder)
            found = base.digest()
        except ModelError as error:
            yield Outside(note=f"the base {checksum} was not looked at: {error}")
            continue
        problem = ""
        if found != checksum:
            problem = (
                f"the base in {folder} has the checksum {found}, but model.base in {CONFIG} is {checksum}: its weights "
                "or its config.json were changed, and the run is not continued with it"
            )
        yield Outside(len(base.files), base.bytes, problem)
    section = content.get("dataset")
    section = section if isinstance(section, Mapping) else {}
    tokenizer, known = section.get("tokenizer"), section.get("tokenizer_sha256")
    if isinstance(tokenizer, str) and isinstance(known, str):
        own = tokenizer_digest(tokenizer, section.get("template") == CHAT)
        if own is None:
            yield Outside(note=f"the tokenizer {known} was not looked at: {tokenizer} is not there")
        elif own != known:
            yield Outside(
                files=1,
                problem=f"the tokenizer {tokenizer} has the checksum {own}, but dataset.tokenizer_sha256 in {CONFIG} "
                f"is {known}: it was changed, and the run is not continued with it",
            )
        else:
            yield Outside(files=1)
