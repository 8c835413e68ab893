"""A page in a real browser: the script runs, tables can be sorted, figures are drawn, nothing is complained about."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.support.documents import Document, rendered

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")

CLICKS = """
"use strict";
for (const name of ["accuracy %", "accuracy %"]) {
  const buttons = [...document.querySelectorAll("#clients-table th button")];
  const found = buttons.find((b) => b.textContent.replace("\\u00a0", " ") === name);
  found.focus();
  found.click();
}
"""

EDGES = """
"use strict";
const beyond = [...document.querySelectorAll("caption")].filter(
  (c) => c.getBoundingClientRect().right > c.closest(".scroll").getBoundingClientRect().right + 1
);
const [wide, room] = [document.documentElement.scrollWidth, document.documentElement.clientWidth];
document.title = `${document.querySelectorAll("caption").length} captions, ${beyond.length} cut, ${wide - room} px`;
"""


@pytest.fixture(scope="module")
def page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser")
    (out / "report.html").write_text(rendered(finished / "superfed-mm-0"), encoding="utf-8")
    return out / "report.html"


def browse(page: Path, *options: str) -> tuple[str, str]:
    profile = page.parent / "profile"
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, preexec_fn=lambda: os.nice(19)
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def followed_by(script: str, page: Path, name: str) -> Path:
    """The page with a script behind its own."""
    text = page.read_text(encoding="utf-8")
    start = text.index("script-src")
    policy = text[start : text.index('">', start)]
    changed = text.replace(policy, "script-src 'unsafe-inline'")
    page.with_name(name).write_text(changed.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return page.with_name(name)


def test_tables_can_be_sorted_and_nothing_is_complained_about(page: Path) -> None:
    clicked = followed_by(CLICKS, page, "clicked.html")  # the clicks of a reader
    html, complaints = browse(clicked, "--dump-dom")
    assert complaints == ""
    document = Document(html)
    rows = document.tables["clients-table"]
    values = [float(row[2]) for row in rows[1:]]
    assert len(values) == 5
    assert values == sorted(values, reverse=True)
    heading = next(a for tag, a in document.tags if tag == "th" and a.get("aria-sort"))
    assert heading["aria-sort"] == "descending"
    assert document.count("svg") == document.count("figure") > 5


def test_the_pages_own_policy_lets_its_script_run(page: Path) -> None:
    html, complaints = browse(page, "--dump-dom")
    assert complaints == ""
    assert Document(html).count("button") > 10


def test_captions_are_whole_in_a_narrow_window_with_a_scroll_bar(page: Path) -> None:
    html, _ = browse(followed_by(EDGES, page, "edges.html"), "--dump-dom", "--window-size=500,800")
    found = re.search(r"<title>(\d+) captions, 0 cut, 0 px</title>", html)
    assert found, html[:2000]
    assert int(found[1]) > 1


@pytest.mark.parametrize(("scheme", "light"), [("1", True), ("0", False)])
def test_figures_are_drawn_in_light_and_dark(page: Path, scheme: str, light: bool) -> None:
    picture = page.with_name(f"{scheme}.png")
    browse(
        page,
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1200,2400",
        "--hide-scrollbars",
        f"--screenshot={picture}",
    )
    with Image.open(picture) as shot:
        colours = shot.convert("RGB").getcolors(1 << 24) or []
    colours.sort(reverse=True)
    brightness = sum(colours[0][1]) / 3
    assert brightness > 240 if light else brightness < 40
    series = {True: (0x0B, 0x62, 0xA8), False: (0x6C, 0xB0, 0xF0)}[light]
    assert sum(count for count, colour in colours if colour == series) > 300
