"""The picture of the floors is the one that the script draws now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_picture_is_up_to_date() -> None:
    script = [sys.executable, "scripts/docs/floors.py", "--check"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}run python scripts/docs/floors.py"
