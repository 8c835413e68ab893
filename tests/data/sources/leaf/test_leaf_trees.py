"""Files of a folder or a zip archive, which cannot lead out of it."""

from __future__ import annotations

import re
import stat
import zipfile
from pathlib import Path

import pytest

from rayfl.data.sources.preparation.trees import open_tree
from rayfl.errors import DataError

BOMB = 1234567
FILES = {"b.png": b"1", "deep/er/a.png": b"22", "deep/c.txt": b""}


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.mkdir("deep")
        for name, content in files.items():
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_a_tree_is_its_files_sorted(tmp_path: Path, zipped: bool) -> None:
    root = archive(tmp_path / "z", FILES) if zipped else folder(tmp_path / "f", FILES)
    tree = open_tree(root, 2)
    assert tree.names == ("b.png", "deep/c.txt", "deep/er/a.png")
    assert {name: tree.read(name) for name in tree.names} == FILES
    with pytest.raises(DataError, match=r"none\.png cannot be read"):
        tree.read("none.png")


@pytest.mark.parametrize("name", ["../a.png", "a/../../b.png", "/etc/passwd", "C:/a.png", "c:a.png", "a\\..\\b.png"])
def test_a_member_that_leads_out_of_its_archive_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"the member .* leads out of the archive"):
        _ = open_tree(archive(tmp_path / "z", {name: b"1"}), 9).names


def test_links_are_refused(tmp_path: Path) -> None:
    member = zipfile.ZipInfo("a.png")
    member.create_system = 3
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "z", "w") as file:
        file.writestr(member, "/etc/passwd")
    with pytest.raises(DataError, match=r"z: the member 'a\.png' is a link"):
        _ = open_tree(tmp_path / "z", 99).names
    for target in (tmp_path, tmp_path / "z"):
        root = folder(tmp_path / f"f {target.name}", FILES)
        (root / "deep" / "link").symlink_to(target)
        with pytest.raises(DataError, match="deep/link is a link"):
            _ = open_tree(root, 9).names


def test_large_files_are_refused_whatever_an_archive_declares(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"f/b\.png is larger than 9 bytes"):
        open_tree(folder(tmp_path / "f", {"b.png": bytes(10)}), 9).read("b.png")
    bomb = archive(tmp_path / "z", {"b.png": bytes(BOMB)})
    with pytest.raises(DataError, match=r"z/b\.png is larger than 1,000 bytes"):
        _ = open_tree(bomb, 1000).names
    # The declared size changed to 5, in the local header and in the directory.
    size = BOMB.to_bytes(4, "little")
    content = bomb.read_bytes()
    assert content.count(size) == 2
    bomb.write_bytes(content.replace(size, (5).to_bytes(4, "little")))
    tree = open_tree(bomb, 1000)
    assert tree.names == ("b.png",)
    with pytest.raises(DataError, match=r"z/b\.png (cannot be read|is larger)"):
        tree.read("b.png")


def test_encrypted_repeated_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "z", {"a.png": b"1"})
    content = bytearray(path.read_bytes())
    # The flag in every entry of the directory.
    for entry in re.finditer(rb"PK\x01\x02", bytes(content)):
        content[entry.start() + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is encrypted"):
        _ = open_tree(path, 9).names
    twice = archive(tmp_path / "y", {"a.png": b"1"})
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(twice, "a") as file:
        file.writestr("a.png", b"2")
    with pytest.raises(DataError, match=r"y: the member 'a\.png' is there twice"):
        _ = open_tree(twice, 9).names
    (tmp_path / "x").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="x is not a readable zip archive"):
        open_tree(tmp_path / "x", 9)
    flipped = archive(tmp_path / "w", {"a.png": b"123456789" * 9}).read_bytes()
    start = flipped.index(b"a.png") + len(b"a.png")
    (tmp_path / "w").write_bytes(flipped[:start] + bytes([flipped[start] ^ 0xFF]) + flipped[start + 1 :])
    with pytest.raises(DataError, match=r"w/a\.png cannot be read"):
        open_tree(tmp_path / "w", 99).read("a.png")
