"""Draws ``docs/images/floors.svg``: the folders of the code, floor over floor, and what imports what.

    python scripts/docs/floors.py            writes the picture
    python scripts/docs/floors.py --check    says whether it is out of date, exit status 1 if so

The floors are the layers that ``lint-imports`` keeps (``pyproject.toml``); the lines are the imports of today, without
those that lead where a way over other folders leads too.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp
from jinja2 import Environment

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "images" / "floors.svg"

WIDTH, FLOOR, HEIGHT, MARGIN = 960, 62, 34, 16
"""Of the picture, of a floor, of a room, and around all; pixels."""
SHIFTS = (0, 130, -130)

TEMPLATE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" role="img"
  font-family="system-ui, sans-serif" font-size="13">
<title>Folders of the code on their floors; every import goes down</title>
<style>
  .floor { fill: #f3f4f8 } .room { fill: #fff; stroke: #6b7290 } text { fill: #1c2033 } .import { stroke: #6f7bc8 }
  @media (prefers-color-scheme: dark) {
    .floor { fill: #23263a } .room { fill: #2f3350; stroke: #9aa3d0 } text { fill: #eef0fb } .import { stroke: #8f9bea }
  }
</style>
{% for y in floors -%}
<rect class="floor" x="{{ margin }}" y="{{ y }}" width="{{ width - 2 * margin }}" height="{{ floor - 6 }}" rx="6"/>
{% endfor -%}
{% for line in lines -%}
<path class="import" d="{{ line.path }}" fill="none" stroke-opacity="0.6" stroke-width="{{ line.width }}"/>
{% endfor -%}
{% for room in rooms -%}
<rect class="room" x="{{ room.x }}" y="{{ room.y }}" width="{{ room.width }}" height="{{ room_height }}" rx="5"/>
<text x="{{ room.x + room.width / 2 }}" y="{{ room.y + 22 }}" text-anchor="middle">{{ room.name }}</text>
{% endfor -%}
</svg>
"""


def floors() -> list[list[str]]:
    """The folders and modules of each floor, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers: list[str] = settings["contracts"][0]["layers"]
    return [[name.strip() for name in layer.split("|")] for layer in layers]


def imports(rooms: Sequence[str]) -> Mapping[tuple[str, str], int]:
    """How many modules of one room import modules of another."""
    graph = grimp.build_graph("rayfl", "actors", "algorithms", "cluster", cache_dir=None)
    inside = {room: {room, *graph.find_descendants(room)} for room in rooms}
    room_of = {module: room for room, modules in inside.items() for module in modules}
    found: dict[tuple[str, str], int] = {}
    for module, room in sorted(room_of.items()):
        others = {room_of[name] for name in graph.find_modules_directly_imported_by(module) if name in room_of}
        for other in sorted(others - {room}):
            found[room, other] = found.get((room, other), 0) + 1
    return found


def shortest(found: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The imports between rooms that no way over a third room stands for."""

    def below(room: str) -> set[str]:
        children = {lower for upper, lower in found if upper == room}
        return children.union(*map(below, children))

    reached = {room: below(room) for room in {room for pair in found for room in pair}}
    return {
        (upper, lower): count
        for (upper, lower), count in found.items()
        if not any(lower in reached[other] for one, other in found if one == upper)
    }


def picture() -> str:
    """The picture as SVG."""
    storeys = floors()
    places: dict[str, tuple[float, float, float]] = {}
    for level, rooms in enumerate(storeys):
        widths = [24 + 7.6 * len(room) for room in rooms]
        gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(rooms) + 1)
        # Single rooms are shifted, so that lines do not run through the rooms below.
        x = MARGIN + gap + SHIFTS[level % len(SHIFTS)] * (len(rooms) == 1)
        for room, width in zip(rooms, widths, strict=True):
            places[room] = (round(x, 1), MARGIN + level * FLOOR + 11, round(width, 1))
            x += width + gap
    lines = []
    for (upper, lower), count in shortest(imports(list(places))).items():
        (x1, y1, w1), (x2, y2, w2) = places[upper], places[lower]
        start, end, middle = x1 + w1 / 2, x2 + w2 / 2, (y1 + HEIGHT + y2) / 2
        path = f"M{start:.0f},{y1 + HEIGHT} C{start:.0f},{middle:.0f} {end:.0f},{middle:.0f} {end:.0f},{y2}"
        lines.append({"path": path, "width": min(1 + count // 6, 5)})
    values = {
        "width": WIDTH,
        "height": 2 * MARGIN + len(storeys) * FLOOR,
        "margin": MARGIN,
        "floor": FLOOR,
        "room_height": HEIGHT,
        "floors": [MARGIN + level * FLOOR for level in range(len(storeys))],
        "lines": lines,
        "rooms": [{"name": name, "x": x, "y": y, "width": width} for name, (x, y, width) in places.items()],
    }
    return Environment(autoescape=True).from_string(TEMPLATE).render(values)


def main(arguments: Sequence[str]) -> int:
    """The script's exit status."""
    text = picture()
    if "--check" not in arguments:
        PICTURE.write_text(text, encoding="utf-8")
        return 0
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != text:
        print(f"{PICTURE.relative_to(ROOT)} is out of date")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
