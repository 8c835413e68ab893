"""The commands ``rayfl data prepare``, ``list``, ``verify`` and ``show``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayfl.cli.entry import app, main
from rayfl.data.files.whole import file_digest
from tests.support.image_files import packed, tiny_files


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["rayfl", "data", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    return capsys.readouterr().err


def table(path: Path) -> Path:
    y = np.arange(40) % 4
    pq.write_table(pa.table({"x": np.eye(4)[y].tolist(), "y": y}), path)
    return path


def test_prepare_list_verify_and_damage(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing is prepared" in command("list")
    archive = tmp_path / "tiny.zip"
    archive.write_bytes(packed(tiny_files()))
    text = refused(monkeypatch, capsys, "prepare", "tiny_imagenet", "--source", str(archive))
    assert "has the sha256" in text
    folder = data_root / "prepared"
    assert not list(folder.glob("*.arrow"))
    options = ["--source", str(archive), "--sha256", file_digest(archive), "--offline"]
    assert command("prepare", "tiny_imagenet", *options).strip() == f"tiny_imagenet -> {folder / 'tiny_imagenet.arrow'}"
    path = table(tmp_path / "t.parquet")
    assert "parquet -> " in command("prepare", "parquet", f"path={path}")
    listed = command("list")
    for expected in (
        "tiny_imagenet: 200 train + 2 test, 3 x 64 x 64, 200 classes, 2.5 MB",
        f"    prepared/tiny_imagenet.arrow, made from {archive}",
        "parquet: 40 train, 4, 4 classes, 0.0 MB",
    ):
        assert expected in listed
    assert command("verify").count("good") == 2
    content = bytearray((folder / "tiny_imagenet.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "tiny_imagenet.arrow").write_bytes(content)
    assert "1 of 2 files are not what they were" in refused(monkeypatch, capsys, "verify")
    command("verify", str(next(folder.glob("parquet-*.arrow"))))
    command("prepare", "tiny_imagenet", *options, "--force")
    assert "DAMAGED" not in command("verify")


def test_another_root(tmp_path: Path, data_root: Path) -> None:
    path = table(tmp_path / "t.parquet")
    command("prepare", "parquet", f"path={path}", "--root", str(tmp_path / "other"))
    assert "40 train" in command("list", "--root", str(tmp_path / "other")).replace("\n", " ")
    assert "nothing is prepared" in command("list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "cifar1"], "did you mean 'cifar10'"),
        (["prepare", "emnist", "split=all"], "dataset.split"),
        (["prepare", "emnist", "split"], "must look like split=balanced"),
        (["prepare", "digits"], "it needs no preparation"),
        (["prepare", "leaf", "path=f.parquet"], "import-leaf"),
        (["prepare", "cifar10", "--offline"], "nothing is downloaded offline"),
        (["prepare", "cifar10", "--sha256", "0"], "leave it out"),
        (["prepare", "parquet", "path=none.parquet"], "cannot be read"),
        (["prepare", "parquet", "path=none.parquet", "--source", "x"], "--source: the files of parquet"),
        (["show", "quickstart", "--out", "p.bmp"], "must end in"),
        (["show", "nonsense"], "neither a file nor a preset"),
        (["verify", "/nowhere.arrow"], "1 of 1 files"),
    ],
)
def test_what_a_user_can_mend_is_one_message(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(monkeypatch, capsys, *arguments)
    assert message in text.replace("\n", " ") and "Traceback" not in text


def test_show_writes_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "p.png"
    text = command("show", "quickstart", "partition.num_clients=7", "--out", str(out))
    assert text.strip() == f"7 clients -> {out}"
    assert out.read_bytes().startswith(b"\x89PNG")
