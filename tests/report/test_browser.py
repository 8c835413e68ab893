"""A page in a real browser: the script runs, tables can be sorted, figures are drawn, nothing is complained about."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from algorithms.registry import METHODS
from rayfl.report.comparison import compare
from rayfl.report.drawing import styled
from rayfl.report.page import render
from rayfl.report.rows import RowKey, final_by_key
from rayfl.report.several import page_of_runs
from rayfl.runs.finding import load_run
from tests.support.documents import Document, rendered

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH"),
    pytest.mark.usefixtures("drawn_figures"),
]

A4_PX = 680  # between its margins
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

WIDTH = 'document.title = document.querySelector("#comparison-table").offsetWidth;'

LOOKING = """
"use strict";
const fire = (target, kind, x, y) =>
  target.dispatchEvent(
    new MouseEvent(kind, { bubbles: true, cancelable: true, clientX: x, clientY: y, movementX: 1, button: 0 })
  );
const wait = () => fetch("WAITING", { mode: "no-cors" });
const until = async (there) => {
  for (let times = 0; times < 300 && !there(); times++) await wait();
};
const over = (figure) => {
  const found = figure.querySelector(".u-over");
  return [found, found.getBoundingClientRect()];
};
addEventListener("load", async () => {
  await wait();
  const figures = [...document.querySelectorAll("figure.alive")];
  const [progress, clients] = [figures[0], figures.find((one) => one.querySelector(".chosen"))];
  const found = { alive: figures.length, hidden: getComputedStyle(progress.querySelector(".picture")).display };
  let [chart, box] = over(progress);
  fire(chart, "mouseenter", box.left + 5, box.top + 20);
  fire(chart, "mousemove", box.right - 1, box.top + 20);
  await wait();
  found.values = [...progress.querySelectorAll(".legend button")].map((one) => one.textContent);
  found.where = progress.querySelector(".where").textContent;
  fire(chart, "mousedown", box.left + 40, box.top + 20);
  fire(chart, "mousemove", box.left + 200, box.top + 30);
  await wait();
  fire(document, "mouseup", box.left + 200, box.top + 30);
  await wait();
  found.zoomed = !progress.querySelector(".reset").hidden;
  progress.querySelector(".reset").click();
  found.back = progress.querySelector(".reset").hidden;
  const entry = progress.querySelector(".legend button");
  entry.click();
  found.pressed = entry.getAttribute("aria-pressed");
  progress.querySelectorAll(".against button")[1].click();
  found.against = [...progress.querySelectorAll(".against button")].map((one) => one.getAttribute("aria-pressed"));
  [chart, box] = over(clients);
  for (let y = 0; y < box.height && !clients.querySelector(".client h4"); y += 6) {
    fire(chart, "mousedown", box.right - 2, box.top + y);
    fire(document, "mouseup", box.right - 2, box.top + y);
    fire(chart, "click", box.right - 2, box.top + y);
  }
  found.clicked = clients.querySelector("select").value;
  const list = clients.querySelector("select");
  list.value = "3";
  list.dispatchEvent(new Event("change"));
  await until(() => clients.querySelector(".client .u-over"));
  found.client = [...clients.querySelectorAll(".client dd")].map((one) => one.textContent);
  found.said = clients.querySelector("[role=status]").textContent;
  found.curve = clients.querySelector(".client .u-over") !== null;
  const cells = [...clients.querySelectorAll(".bars tr")].map((one) => [...one.cells]);
  found.labels = cells.map(([label, count]) => [label.textContent, count.textContent]);
  progress.querySelector(".swap button").click();
  found.picture = getComputedStyle(progress.querySelector(".picture")).display;
  found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = JSON.stringify(found);
});
"""

DISPLAYED = """
"use strict";
addEventListener("load", () => setTimeout(() => {
  const of = (name) => [...document.querySelectorAll(`.${name}`)].map((one) => getComputedStyle(one).display);
  const names = ["picture", "chart", "chosen", "swap"];
  document.title = JSON.stringify(Object.fromEntries(names.map((name) => [name, of(name)])));
}, 200));
"""


class Waiting(BaseHTTPRequestHandler):
    """Answers after a tenth of a second.

    A page's timers run on virtual time, which a busy machine's frames cannot keep up with; it stands still while a
    request is open.
    """

    def do_GET(self) -> None:
        time.sleep(0.1)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def waiting() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Waiting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


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
    changed = text.replace(policy, "connect-src *; script-src 'unsafe-inline'")
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


@pytest.mark.parametrize("width", [pytest.param(1200, marks=pytest.mark.slow), 390])
def test_a_reader_can_look_into_charts(page: Path, finished: Path, waiting: str, width: int) -> None:
    looked = followed_by(LOOKING.replace("WAITING", waiting), page, f"looking-{width}.html")
    html, complaints = browse(looked, "--dump-dom", f"--window-size={width},1600", "--virtual-time-budget=6000")
    assert complaints == ""
    found = json.loads(unescape(html[html.index("<title>") + 7 : html.index("</title>")]))
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    assert (found["alive"], found["hidden"], found["picture"], found["wide"]) == (6, "none", "block", 0)
    accuracy = 100 * final_by_key(run)[RowKey("global")]["top1"]
    assert found["values"][0] == f"global {accuracy:.2f}"
    assert found["where"] == "rounds completed: 4"
    assert (found["zoomed"], found["back"]) == (True, True)
    assert (found["pressed"], found["against"]) == ("false", ["false", "true", "false"])
    assert found["clicked"] in {"0", "1", "2", "3", "4"}
    assert found["client"] == next(row for row in Document(html).tables["clients-table"] if row[0] == "3")
    assert found["curve"]
    assert found["said"] == "Client 3 is shown"
    partition = run.partition
    assert partition is not None
    assert sum(int(count) for _, count in found["labels"]) == sum(c == 3 for c in partition["client"].to_pylist())
    assert len(found["labels"]) == 2  # classes_per_client


def test_without_scripts_the_page_has_its_pictures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    still = page.with_name("still.html")
    still.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL), encoding="utf-8")
    html, _ = browse(still, "--dump-dom")
    document = Document(html)
    assert document.count("svg") == document.count("figure") > 5
    assert document.count("button") == 0
    assert not any("alive" in str(a.get("class", "")) for tag, a in document.tags if tag == "figure")
    assert len(text.encode()) < 1_500_000


def test_on_paper_the_page_has_its_pictures_in_place_of_charts(page: Path) -> None:
    """What the style sheet says for paper is applied to the screen, where it can be asked for."""
    paper = page.with_name("paper.html")
    paper.write_text(page.read_text(encoding="utf-8").replace("@media print", "@media screen"), encoding="utf-8")
    html, _ = browse(followed_by(DISPLAYED, paper, "displayed.html"), "--dump-dom", "--virtual-time-budget=3000")
    shown = json.loads(unescape(html[html.index("<title>") + 7 : html.index("</title>")]))
    assert set(shown["picture"]) == {"block"} and len(shown["picture"]) > 5
    assert set(shown["chart"]) == set(shown["chosen"]) == set(shown["swap"]) == {"none"}


def test_the_pages_own_policy_lets_its_script_run(page: Path) -> None:
    html, complaints = browse(page, "--dump-dom")
    assert complaints == ""
    assert Document(html).count("button") > 10


def test_captions_are_whole_in_a_narrow_window_with_a_scroll_bar(page: Path) -> None:
    html, _ = browse(followed_by(EDGES, page, "edges.html"), "--dump-dom", "--window-size=500,800")
    found = re.search(r"<title>(\d+) captions, 0 cut, 0 px</title>", html)
    assert found, html[:2000]
    assert int(found[1]) > 1


@pytest.mark.slow
def test_on_paper_a_table_of_17_columns_is_whole(finished: Path, page: Path) -> None:
    several = page.with_name("several.html")
    names = ("fedavg-0", "fedavg-1", "superfed-mm-0", "superfed-mm-1")
    runs = [load_run(str(finished / name), METHODS) for name in names]
    with styled():
        text = render(page_of_runs(runs, compare(runs)))
    several.write_text(text.replace("@media print", "@media screen"), encoding="utf-8")
    html, _ = browse(followed_by(WIDTH, several, "wide.html"), "--dump-dom", f"--window-size={A4_PX},800")
    assert len(Document(html).tables["comparison-table"][1]) == 17
    assert int(html.partition("<title>")[2].partition("<")[0]) <= A4_PX


@pytest.mark.parametrize(("scheme", "light"), [pytest.param("1", True, marks=pytest.mark.slow), ("0", False)])
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


@pytest.mark.slow
def test_the_legend_shows_the_dashes_that_tell_32_curves_apart(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    start = text.index(">", text.index('<script type="application/json"')) + 1
    chart = json.loads(text[start : text.index("</script>", start)])
    chart["series"] = [{**chart["series"][0], "label": f"curve {number}"} for number in range(32)]
    many = page.with_name("many.html")
    many.write_text(text[:start] + json.dumps(chart) + text[text.index("</script>", start) :], encoding="utf-8")
    html, complaints = browse(many, "--dump-dom")
    assert complaints == ""
    looks = re.findall(r'<span class="swatch" style="([^"]*)"></span>curve \d', html)
    assert len(looks) == len(set(looks)) == 32
