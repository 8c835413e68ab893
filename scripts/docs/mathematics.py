"""Mathematics of the pages on methods: TeX for the formulas of docstrings, and for symbols within a text."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

FORMULAS = Path(__file__).resolve().parents[2] / "docs" / "methods" / "formulas.yaml"
_GREEK = (
    *("alpha", "beta", "gamma", "delta", "kappa", "lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau", "theta"),
    *("eta", "epsilon", "zeta", "Delta", "Lambda", "Sigma", "Omega"),
)
_NAMES = {**{name: f"\\{name}" for name in _GREEK}, "eps": "\\varepsilon", "phi": "\\varphi"}
_NAMES |= {"sum": "\\sum"} | {f"{letter}bar": f"\\bar {letter}" for letter in "vwxz"} | {"ghat": "\\hat g"}
_SYMBOL = re.compile(
    r"(?<![\w$\\^'-])(?<![a-z]\.)([A-Za-z]+)((?:[_^](?:[A-Za-z]+|\d+|\+))*)(?!\w|\^|-|'(?!s\b)|\.[a-z])"
)
_NORM = re.compile(r"\|\|((?:\$[^$`\n]+\$|[-+(). \d])+?)\|\|(?:([_^])([12]))?")
_POWER = re.compile(r"(?<![\w.$^])(\d[\d.]*)\^(-?\d+(?:\.\d+)?|t\b)")
_OPTION = re.compile(r"[a-z]{4,}(?:_[a-z]{4,})+")
_WORDS = ("a", "A", "I")
_INDENTED = re.compile(r"(?:^    +\S.*(?:\n|\Z))+", re.MULTILINE)


@cache
def _written() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FORMULAS.read_text(encoding="utf-8"))
    return content


def equation_of(name: str) -> str | None:
    """The equation that a method's page begins with, as TeX; None if its docstring has formulas."""
    found: str | None = _written()["equation"].get(name)
    return found


def formulas_of(docstring: str) -> list[str]:
    """The formulas of a docstring: its indented lines."""
    return [line.strip() for block in _INDENTED.findall(docstring) for line in block.splitlines()]


def with_formulas(docstring: str) -> str:
    """A docstring whose indented lines are set as mathematics.

    Raises:
        SystemExit: a line has no TeX.
    """
    return _INDENTED.sub(lambda block: _block([_tex(line.strip()) for line in block[0].splitlines()]), docstring)


def _tex(formula: str) -> str:
    found: str | None = _written()["formulas"].get(formula)
    if found is None:
        raise SystemExit(f"{FORMULAS.name} has no TeX for the formula {formula!r}")
    return found


def _block(lines: list[str]) -> str:
    if len(lines) > 1:
        lines = ["\\begin{gathered}", " \\\\\n".join(lines), "\\end{gathered}"]
    return "\n".join(["$$", *lines, "$$", ""])


def displayed(tex: str) -> str:
    """A formula on lines of its own."""
    return _block([tex]).rstrip()


def with_symbols(text: str, values: Collection[str] = ()) -> str:
    """A text whose mathematics is set: symbols (``w_k``, ``lambda``, single letters), norms, powers of numbers.

    Args:
        text: one or more paragraphs.
        values: words that are values of an option, which are set as code; so are names of options (``macro_momentum``).
    """
    parts = re.split(r"(`[^`]*`|^\$\$\n(?:.*\n)*?\$\$$)", text, flags=re.MULTILINE)
    made = "".join(part if part[:1] in ("`", "$") else _set(part, values) for part in parts)
    made = re.sub(r"\$\.\.\$", r" \\ldots ", made)
    return _NORM.sub(_norm, made)


def _set(text: str, values: Collection[str]) -> str:
    return _POWER.sub(r"$\1^{\2}$", _SYMBOL.sub(partial(_symbol, values=values), text))


def _norm(match: re.Match[str]) -> str:
    inner = r"\cdot" if match[1] == "." else match[1].replace("$", "")
    return f"$\\lVert {inner} \\rVert" + (f"{match[2]}{{{match[3]}}}$" if match[2] else "$")


def _symbol(match: re.Match[str], values: Collection[str]) -> str:
    base, marks = match[1], match[2]
    if match[0] in values or (base not in _NAMES and _OPTION.fullmatch(match[0])):
        return f"`{match[0]}`"
    if base == "sum" and not marks:
        return match[0]
    option = len(base) > 1 and base.islower() and re.search("[A-Za-z]{2}", marks)  # such as server_lr
    plain = not marks and (len(base) > 1 or base in _WORDS)
    if base not in _NAMES and (option or plain):
        return match[0]
    made = "".join(f"{mark}{{{_name(word)}}}" for mark, word in re.findall(r"([_^])([A-Za-z]+|\d+|\+)", marks))
    return f"${_name(base)}{made}$"


def _name(word: str) -> str:
    if word in _NAMES:
        return _NAMES[word]
    return word if len(word) < 3 and word != "ft" else f"\\mathrm{{{word}}}"
