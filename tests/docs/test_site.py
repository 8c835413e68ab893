"""The documentation as a site: it builds without a warning, links lead somewhere, and nothing comes from a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rayfl

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,  # test_links.py follows the links of the pages as they are written
    pytest.mark.skipif(
        find_spec("material") is None or find_spec("mkdocstrings") is None,
        reason="the site needs the extra docs: pip install --constraint constraints.txt --editable '.[docs]'",
    ),
]


class Page(HTMLParser):
    """The links, the places they can lead to, and what a browser fetches by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical" and "href" in given:
            self.fetched.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # Any attempt to reach the network fails at once.
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_internal_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    wrong, followed = [], 0
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data") or link == "javascript:void(0)":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            followed += 1
            known = target in pages and (not parts.fragment or unquote(parts.fragment) in pages[target].places)
            if not (known or (target.is_file() and target.suffix != ".html") or parts.fragment == "__search"):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong
    assert followed > 1000


def test_a_browser_fetches_nothing_from_elsewhere(pages: dict[Path, Page]) -> None:
    fetched = {link for page in pages.values() for link in page.fetched if urlsplit(link).scheme or link[:2] == "//"}
    assert fetched == set()


def test_every_page_is_there(site: Path) -> None:
    made = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")} - {Path("404.md")}
    sources = {path for path in made if path.parts[0] == "source"}
    assert {path.stem for path in sources} == {path.stem for path in (ROOT / "algorithms").glob("*.py")} - {"__init__"}
    made -= sources
    docs = ROOT / "docs"
    written = {path.relative_to(docs) for path in docs.rglob("*.md") if "notes" not in path.parts}
    assert made == written


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = Page(site / "api.html")
    names = {place.rpartition(".")[2] for place in page.places}
    assert set(rayfl.__all__) - {"__version__"} <= names


def browse(page: Path, folder: Path, query: str = "") -> tuple[str, str]:
    """What a browser makes of a page in a folder, and what it complains about; without any network."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium on the PATH")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    settings = ["--allow-file-access-from-files", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"]
    profile = [f"--user-data-dir={folder}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*command, *settings, *profile, page.as_uri() + query], capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_formulas_are_mathematics_in_a_browser(site: Path, tmp_path: Path) -> None:
    """KaTeX has set every formula of some pages, with MathML for screen readers, and complains about none."""
    for name in ("superfed", "fedfusion", "gpfl", "per_fedavg", "fedavg"):
        html, complaints = browse(site / "methods" / f"{name}.html", tmp_path)
        assert complaints == "" and "katex-error" not in html, name
        formulas = len(re.findall(r'class="arithmatex"', html))
        assert formulas == html.count('class="katex"') == html.count("<math ") > 5, name


def test_the_search_finds_from_a_folder(site: Path, tmp_path: Path) -> None:
    html, complaints = browse(site / "index.html", tmp_path, "?q=staleness")
    assert complaints == ""
    found = re.findall(r'href="([^"?#]+)[^"]*" class="md-search-result__link"', html)
    assert any(link.endswith("methods/fedbuff.html") for link in found), found
    assert not [link for link in found if "/source/" in link]
