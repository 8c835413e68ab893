"""Writes ``docs/methods``: a page per method from its docstring, fields and notes, the index, and README's table.

    python scripts/docs/method_pages.py            writes the pages
    python scripts/docs/method_pages.py --check    says which are out of date, exit status 1 if any

A page is made of the class's docstring, with its formulas set as ``docs/methods/formulas.yaml`` says, of its
hyper-parameters, of its row in ``docs/methods/curves.csv`` (``method_curves.py``), and of the hand-written
``docs/methods/notes/NAME.md``.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from families import family_table
from mathematics import displayed, equation_of, with_formulas, with_symbols
from messages import picture
from small_runs import (
    CLIENTS,
    ELSEWHERE,
    PAGES,
    PICTURES,
    PRESET,
    Curve,
    command_of,
    read_table,
    reference_of,
    settings_of,
)

from algorithms.base import Algorithm
from algorithms.registry import METHODS
from rayfl.cli.catalog import describe_method, first_sentence, hyper_parameters

ROOT = Path(__file__).resolve().parent.parent.parent
NOTES = PAGES / "notes"
TESTS = ROOT / "tests" / "algorithms"
README = ROOT / "README.md"
MADE = "<!-- made by scripts/docs/method_pages.py; the last part is kept in notes/{name}.md -->"
BEGIN, END = "<!-- made by scripts/docs/method_pages.py -->", "<!-- end of what it made -->"


def pages() -> dict[Path, str]:
    """Every page's text."""
    made = {PAGES / f"{name}.md": page(name, method) for name, method in METHODS.items()}
    return {**made, PAGES / "index.md": index(), README: readme()}


def page(name: str, method: type[Algorithm]) -> str:
    """One method's page."""
    note = NOTES / f"{name}.md"
    if not note.exists():
        raise SystemExit(f"{note.relative_to(ROOT)} is missing: write what differs from the paper and from public code")
    summary, _, rest = describe_method(method).partition("\n\n")
    equation = equation_of(name)
    source = f"[algorithms/{_module(method)}.py](../../algorithms/{_module(method)}.py)"
    fields = [
        (field, with_symbols(symbol), default, bounds, with_symbols(meaning, _letters(bounds)))
        for field, symbol, default, bounds, meaning in hyper_parameters(method)
    ]
    parts = [
        MADE.format(name=name),
        f"# {name}",
        _markdown(summary),
        *([displayed(equation)] if equation else []),
        picture(name, METHODS),
        f"```bash\nrayfl run {command_of(settings_of(name))}\n```",
        *_curve(name, read_table()),
        f"Source: {source}. [All methods](index.md).",
        "## The method",
        _markdown(rest),
        "## Hyper-parameters",
        f"`algorithm={name}`, and `algorithm.FIELD=VALUE` for each of:",
        _table(["field", "symbol", "default", "range", "meaning"], fields),
        _kept(method),
        with_symbols(note.read_text(encoding="utf-8").strip()),
    ]
    return "\n\n".join(parts) + "\n"


def _letters(bounds: str) -> list[str]:
    """Values of an option that could be taken for symbols."""
    return [value for value in bounds.split(" | ") if len(value) == 1 and value.isalpha()]


def _curve(name: str, curves: dict[str, Curve]) -> Iterator[str]:
    """The picture of a method's small run, and in words what it shows; nothing before there is one."""
    if not {settings_of(name), reference_of(name)} <= set(curves):
        return
    own, fedavg = curves[settings_of(name)], curves[reference_of(name)]
    beside = "" if name == "fedavg" else f", FedAvg's {fedavg.last:.1f} %"
    shown = f"{name}: {own.last:.1f} %{beside} after round {own.end}"
    others = " ".join(part for part in reference_of(name).split()[1:] if not part.startswith("algorithm="))
    same = f", which has `{others}` too" if others else ""
    clients = CLIENTS.get(ELSEWHERE.get(name, PRESET), 20)
    compared = "" if name == "fedavg" else f", beside FedAvg{same}"
    yield f"![{shown}]({PICTURES.name}/{name}.svg)"
    yield (
        f"The mean accuracy of {clients} clients in that run{compared}: {shown} "
        "([all runs](curves.csv), measured by `python scripts/docs/method_curves.py`). One seed and a small data set: "
        "this shows that the method trains, not which method is better."
    )


def readme() -> str:
    """README.md with the methods as they are now."""
    before, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md: the marks of the methods' table are missing: {BEGIN} and {END}")
    table = family_table(METHODS, "docs/methods/")
    return f"{before}{begin}\n\n**{len(METHODS)} methods** ([list](docs/methods/index.md)):\n\n{table}\n\n{end}{after}"


def index() -> str:
    """The list of all methods, with what each keeps and how many tests of its invariants there are."""
    rows = [
        [
            f"[`{name}`]({name}.md)",
            with_symbols(first_sentence(method)),
            method.citation,
            with_symbols(method.client_keeps),
            with_symbols(method.server_keeps),
            str(own_invariants(method)),
        ]
        for name, method in sorted(METHODS.items())
    ]
    heads = ["name", "method", "paper", "client keeps", "server keeps", "invariant tests"]
    return (
        "\n\n".join(
            [
                BEGIN,
                "# Methods",
                family_table(METHODS, ""),
                "Every method's invariants (identities that its definition implies: reductions to other methods, "
                "conservation laws, fixed points, closed-form gradients) are tests named after them, "
                "`test_inv_...`, in `tests/algorithms/test_NAME.py`. The last column counts them; "
                f"{framework_invariants()} more, of the framework, are run for every method "
                "(`tests/algorithms/test_framework.py`).",
                _table(heads, rows),
            ]
        )
        + "\n"
    )


def own_invariants(method: type[Algorithm]) -> int:
    """Invariant tests of a method, wherever they are: an invariant's name begins with its method's (``pac_3``)."""
    names = {name for file in TESTS.rglob(f"test_{_module(method)}*.py") for name in _invariants(file)}
    kinds = Counter(_kind(name) for name in names)
    others = {_main_kind(other) for other in METHODS.values() if other is not method}
    own = set(kinds) - (others - {_main_kind(method)})
    return sum(_kind(name) in own for file in TESTS.rglob("test_*.py") for name in _invariants(file))


def framework_invariants() -> int:
    """Invariant tests that are run for every method."""
    return len(_invariants(TESTS / "test_framework.py"))


def _main_kind(method: type[Algorithm]) -> str:
    kinds = Counter(_kind(name) for name in _invariants(TESTS / f"test_{_module(method)}.py"))
    return kinds.most_common(1)[0][0] if kinds else ""


def _module(method: type[Algorithm]) -> str:
    return Path(inspect.getfile(method)).stem


def _kind(name: str) -> str:
    return name.removeprefix("test_inv_").partition("_")[0]


@cache
def _invariants(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [name for name in functions if name.startswith("test_inv_")]


def _kept(method: type[Algorithm]) -> str:
    client, server = with_symbols(method.client_keeps), with_symbols(method.server_keeps)
    newcomer = f"has {method.newcomer}" if not method.no_newcomers else f"is refused: {method.no_newcomers}"
    private, robust = "clips what clients send and adds noise", "are possible"
    if method.no_privacy:
        private, robust = f"is refused: {method.no_privacy}", "are refused for the same reason"
    messages = f"[Compression](../compression.md), attacks on messages and [robust rules](../attacks.md) {robust}"
    if method.own_rule:
        messages = (
            "[Compression](../compression.md), but for secure aggregation, and [attacks on messages](../attacks.md) "
            f"are possible; robust rules are not: {method.own_rule}"
        )
    why_not = method().why_no_example_privacy()
    of_samples = f"is refused: {why_not}" if why_not else "is possible"
    return (
        f"## What persists\n\nClient: {client}. Server: {server}.\n\n"
        f"A client held out from training (`evaluation.unseen_clients`) {newcomer}.\n\n"
        f"[Differential privacy](../privacy.md) {private}. That "
        f"[of samples](../privacy.md#samples-in-place-of-clients) {of_samples}. "
        f"{messages}."
    )


def _markdown(docstring: str) -> str:
    """A docstring with its formulas set, and its references as a section."""
    text, sign, references = docstring.partition("\nReferences:")
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", with_formulas(text)).replace("``", "`")
    text = with_symbols(text) + sign + references
    return re.sub(r"^References:\n((?:    .*\n?|\n)+)", _references, text, flags=re.MULTILINE)


def _references(match: re.Match[str]) -> str:
    return "## References\n\n" + inspect.cleandoc(match.group(1))


def _table(heads: list[str], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    """Writes or checks the pages; returns the exit status."""
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in PAGES.glob("*.md") if path not in made]
    if "--check" in arguments:
        for path in stale:
            print(f"out of date: {path.relative_to(ROOT)}")
        return int(bool(stale))
    for path in stale:
        if path in made:
            path.write_text(made[path], encoding="utf-8")
        else:
            path.unlink()
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
