"""The command ``rayfl new``: files to begin a method, data, a network or a task of one's own with."""

from __future__ import annotations

import ast
import importlib.util
import keyword
import os
import shlex
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.errors import ConfigError
from rayfl.tracking import terminal

Kind = Literal["method", "data", "model", "task"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(new)


def new(
    kind: Annotated[Kind, typer.Argument(help="What of your own to begin.")],
    name: Annotated[str, typer.Argument(help="Its name, which is also its module's: lower case, such as my_method.")],
    folder: Annotated[Path, typer.Option(callback=at_home, help="Where the files go; made if it is missing.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a small method, data set, model or task to change into your own: code, a configuration and tests."""
    files = made(kind, name)
    there = [str(folder / file) for file in files if (folder / file).exists()]
    if there:
        raise ConfigError(f"{', '.join(there)}: already there, and never overwritten; choose another name or --folder")
    check_name(name, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--folder: {folder} cannot be written to: {error}") from error
    if as_json:
        write_json("new", {"kind": kind, "files": [str(folder / file) for file in files]})
        return
    lines = [f"wrote {folder / file}" for file in files]
    if folder.resolve() != Path.cwd():
        lines.append(f"\ncd {shlex.quote(str(folder))}")
    else:
        lines.append("")
    lines += [f"rayfl run {name}.yaml", f"python -m pytest test_{name}.py"]
    terminal.out().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def made(kind: Kind, name: str) -> dict[str, str]:
    """The files of a kind by their names: a module, a configuration, and tests.

    Args:
        kind: what to begin.
        name: a lower-case Python name.

    Raises:
        ConfigError: the name is none that a module can have, or one of something that the module imports.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ConfigError(
            f"{name!r} cannot be the name of a Python module and a function: use lower-case letters, digits and "
            "underscores, and begin with a letter, as in my_method"
        )
    import jinja2

    templates = resources.files("rayfl.cli") / "templates"
    environment = jinja2.Environment(  # noqa: S701 - what is written are programs, and no pages
        loader=jinja2.FunctionLoader(lambda file: (templates / f"{file}.jinja").read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    title = "".join(word.capitalize() for word in name.split("_"))
    files = {f"{kind}.py": f"{name}.py", f"{kind}.yaml": f"{name}.yaml", f"test_{kind}.py": f"test_{name}.py"}
    found = {to: environment.get_template(file).render(name=name, title=title) for file, to in files.items()}
    _check_imported(name, title, found[f"{name}.py"])
    return found


def _check_imported(name: str, title: str, text: str) -> None:
    """Refuses names that would stand for something else, too, that the module imports."""
    for line in ast.parse(text).body:
        for imported in line.names if isinstance(line, ast.Import | ast.ImportFrom) else ():
            if (called := imported.asname or imported.name) in (name, title):
                raise ConfigError(f"{name!r}: the file imports something else called {called}; choose another name")


def check_name(name: str, folder: Path) -> None:
    """Refuses a name under which Python would import another module.

    Raises:
        ConfigError: naming that module's file.
    """
    found = importlib.util.find_spec(name)
    places = [] if found is None else [found.origin or "", *(found.submodule_search_locations or [])]
    places = [place for place in places if os.path.isabs(place)]
    own = any(os.path.realpath(Path(place).parent) == os.path.realpath(folder) for place in places)
    if found is not None and not own:
        where = places[0] if places else "built in"
        raise ConfigError(
            f"{name!r} is the name of a module that Python has already ({where}), and would import in place of yours: "
            "choose another one"
        )
