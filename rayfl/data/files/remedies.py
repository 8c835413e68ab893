"""How to get a file of natural clients that is absent or damaged."""

from __future__ import annotations

import shlex
from pathlib import Path

_LEAF = ("femnist", "shakespeare", "sent140", "celeba", "synthetic", "reddit")
_FURTHER = {"celeba": " --images IMAGES", "reddit": " --sequences"}
_TFF = ("tff-stackoverflow", "tff-shakespeare", "tff-emnist-digits", "tff-emnist", "tff-cifar100")


def remedy(path: Path) -> str:
    """Returns how to get a file in place of one that cannot be used.

    Args:
        path: the file. Its name may say what it has to hold, as ``femnist-80.parquet`` does; the command is then whole
            but for the places of the source and of its images, and in the form that the preset of the data set needs.
    """
    if path.suffix == ".arrow":
        return "delete it and make it again with `rayfl data prepare`"
    kind = next((kind for kind in (*_LEAF, *_TFF) if f"{path.stem}-".startswith(f"{kind}-")), None)
    further = _FURTHER.get(kind or "", "")
    what = f" {kind.removeprefix('tff-')} SOURCE{further} --out {shlex.quote(str(path))}" if kind else ""
    if path.name.startswith("tff-"):
        return f"make one from TFF's archive with `rayfl data import-tff{what}`"
    return f"make one from LEAF's JSON with `rayfl data import-leaf{what}`"
