"""rayfl itself as a wheel for the nodes of a cluster that has its dependencies, but not this version of it."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import rayfl

_PACKAGES = ("actors", "algorithms", "cluster", "rayfl")
_TIMESTAMP = (2020, 1, 1, 0, 0, 0)


def build_wheel(folder: Path) -> Path:
    """Writes a wheel of the rayfl that is running, installed or from a checkout.

    It differs from a released one on purpose. It names no dependencies, because Ray installs what it is given with
    all of them, which would be another PyTorch on every node. And its version ends with a hash of its content, because
    Ray tells wheels apart by their file names.

    Args:
        folder: where to.

    Returns:
        The file, ``rayfl-<version>+<hash>-py3-none-any.whl``; the same content gives the same bytes.
    """
    home = Path(rayfl.__file__).resolve().parent.parent
    paths = [path for package in _PACKAGES for path in sorted((home / package).rglob("*")) if path.is_file()]
    files = {
        str(path.relative_to(home)): path.read_bytes()
        for path in paths
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    version = f"{rayfl.__version__}+{digest.hexdigest()[:12]}"
    info = f"rayfl-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: rayfl\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rayfl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"rayfl-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), data, zipfile.ZIP_DEFLATED)
    return wheel


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
