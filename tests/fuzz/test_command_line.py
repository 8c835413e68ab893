"""Command lines: each ends with a status that is documented, and no traceback."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.cli.entry import main
from tests.support.fuzz_inputs import QUICK, THOROUGH, TYPED

WORDS = st.sampled_from(
    ["show", "quickstart", "floco", "list", "models", "verify", "data", "stats", "--debug", "-h", "x"]
)
LINES = st.lists(WORDS | TYPED, max_size=4)


def checked_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with a status that it documents, and says what is wrong in words."""
    with monkeypatch.context() as patch:
        patch.delenv("RAYFL_DEBUG", raising=False)
        patch.setattr(sys, "argv", ["rayfl", *(word for word in arguments if word != "--debug")])
        with pytest.raises(SystemExit) as stop:
            main()
    out, err = capsys.readouterr()
    assert stop.value.code in (0, 2), err
    assert "Traceback" not in out + err
    assert (out + err).strip()


@settings(QUICK, max_examples=15)
@given(arguments=LINES)
def test_command_lines(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_line(arguments, monkeypatch, capsys)


@pytest.mark.slow
@settings(THOROUGH, max_examples=200)
@given(arguments=LINES)
def test_command_lines_thoroughly(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_line(arguments, monkeypatch, capsys)
