"""Hooks of mkdocs: a page for each method's source, to which the links to ``algorithms/`` lead on the site.

In a checkout the same links lead to the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
_OPTION = re.compile(r"(?:(?<=<code>)|(?<= ))--[\w-]+(?=[^<>]*</code>)")
_LINK = re.compile(r"\]\(\.\./\.\./algorithms/(\w+)\.py\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of sources."""
    for path in sorted((ROOT / "algorithms").glob("*.py")):
        if path.stem != "__init__":
            files.append(File.generated(config, f"source/{path.stem}.md", content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of ``algorithms/`` to their pages; the wide table of methods has the whole width."""
    if page.file.src_uri == "methods/index.md":
        page.meta["hide"] = ["toc"]
    return _LINK.sub(r"](../source/\1.md)", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps the name of an option on one line: browsers break lines after a hyphen."""
    return _OPTION.sub(r'<span class="option">\g<0></span>', html)


def source_page(path: Path) -> str:
    """A file as a page; it is left out of the search, where it would drown the texts."""
    name = path.relative_to(ROOT)
    back = "[all methods](../methods/index.md)"
    code = path.read_text(encoding="utf-8").rstrip()
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n{back}\n\n````python\n{code}\n````\n"
