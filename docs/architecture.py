"""Draws docs/architecture.svg: the packages of cbmir, and which imports which, as the code says (`grimp`).

python docs/architecture.py

Where a package stands is said here; the arrows are found. A package that has no place yet is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

SVG = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 960, 730
#: Modules beside the spine that stand with the command line: the way in.
WAY_IN = ("cbmir", "cbmir.__main__")


@dataclass(frozen=True)
class Box:
    """Where a package stands, in pixels, and what it is in a few words."""

    x: int
    y: int
    width: int
    height: int
    words: str
    colour: str = "#e0f2f1"


#: Packages that hold others, whose modules of their own stand in a box within.
FRAMES = {
    "cbmir.training": Box(330, 196, 606, 190, "training: from a data set to a model", "#f1f8f7"),
    "cbmir.runtime": Box(24, 420, 912, 206, "runtime: from an image to an answer; never PyTorch", "#f1f8f7"),
}
BOXES = {
    "cbmir.cli": Box(24, 20, 912, 54, "the command line, cbmir.load, cbmir doctor"),
    "cbmir.demo": Box(24, 300, 190, 62, "the page in the browser"),
    "cbmir.export": Box(536, 110, 194, 56, "a run to files that answer alike"),
    "cbmir.training.comparison": Box(350, 228, 170, 56, "the paper's comparison"),
    "cbmir.training": Box(550, 228, 178, 56, "harness, model, metrics"),
    "cbmir.training.losses": Box(758, 228, 158, 56, "one a file"),
    "cbmir.training.readers": Box(350, 314, 250, 56, "data sets to manifests"),
    "cbmir.training.phantom": Box(666, 314, 250, 56, "X-rays that are drawn"),
    "cbmir.runtime.serving": Box(44, 452, 190, 56, "HTTP"),
    "cbmir.runtime.pacs": Box(270, 452, 190, 56, "DICOM node, follower"),
    "cbmir.runtime.dicom_output": Box(496, 452, 190, 56, "SR, SC, KOS, FHIR"),
    "cbmir.runtime.gallery": Box(722, 452, 194, 56, "SQLite, index, Milvus"),
    "cbmir.runtime": Box(44, 552, 872, 56, "read → preprocess → engine → gallery → result"),
    # The modules beside the packages, which all may import: drawn once, without arrows.
    "spine": Box(24, 656, 912, 54, "errors, files, labels, preprocessing, card, manifest …", "#eceff1"),
}


def main() -> None:
    SVG.write_text(draw(imports()), "utf-8")


def imports() -> set[tuple[str, str]]:
    """(package, package that it imports), each pair once, from every import in the code."""
    graph = grimp.build_graph("cbmir", cache_dir=None)
    pairs = {
        (place_of(module), place_of(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if imported not in WAY_IN  # for the version
    }
    return {(one, other) for one, other in pairs if one != other and other != "spine"}


def place_of(module: str) -> str:
    """The box that a module stands in. Raises KeyError for a module that none was drawn for."""
    if module in WAY_IN:
        return "cbmir.cli"
    parents = [name for name in BOXES if module == name or module.startswith(f"{name}.")]
    if not parents and module.count(".") > 1:
        raise KeyError(f"{module}: expected a box for it in docs/architecture.py, found none")
    return max(parents, key=len, default="spine")


def frame_of(place: str) -> str | None:
    return next((name for name in FRAMES if place == name or place.startswith(f"{name}.")), None)


def arrows(pairs: set[tuple[str, str]]) -> list[tuple[Box, Box]]:
    """Those between boxes of one frame, and those between frames that no longer way implies."""
    frames = {(frame_of(one) or one, frame_of(other) or other) for one, other in pairs}
    frames = {(one, other) for one, other in frames if one != other}
    frames = {pair for pair in frames if not _implied(pair, frames)}
    within = {pair for pair in pairs if frame_of(pair[0]) is not None and frame_of(pair[0]) == frame_of(pair[1])}
    outer = BOXES | FRAMES
    return [(outer[one], outer[other]) for one, other in sorted(frames)] + [
        (BOXES[one], BOXES[other]) for one, other in sorted(within)
    ]


def _implied(pair: tuple[str, str], pairs: set[tuple[str, str]]) -> bool:
    """Whether two other pairs lead there. Frames import each other in one direction only (import-linter)."""
    one, other = pair
    return any((one, middle) in pairs and (middle, other) in pairs for middle in BOXES)


def draw(pairs: set[tuple[str, str]]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img" '
        'aria-label="The packages of cbmir, and which imports which">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#37474f"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff"/>',
    ]
    lines += [line for frame in FRAMES.values() for line in _frame(frame)]
    lines += [
        f'<path d="{_line(*pair)}" fill="none" stroke="#37474f" stroke-width="1.3" marker-end="url(#head)"/>'
        for pair in arrows(pairs)
    ]
    lines += [line for name, box in BOXES.items() for line in _box(name, box)]
    return "\n".join([*lines, "</svg>", ""])


def _frame(box: Box) -> list[str]:
    return [
        _rectangle(box, "#80cbc4"),
        f'<text x="{box.x + 12}" y="{box.y + 21}" font-size="13" fill="#00695c">{escape(box.words)}</text>',
    ]


def _box(name: str, box: Box) -> list[str]:
    middle = box.x + box.width / 2
    return [
        _rectangle(box, "#00897b" if name != "spine" else "#78909c"),
        f'<text x="{middle:g}" y="{box.y + 24}" font-size="14" font-weight="bold" text-anchor="middle" fill="#263238">'
        f"{name.removeprefix('cbmir.')}</text>",
        f'<text x="{middle:g}" y="{box.y + 43}" font-size="12" text-anchor="middle" fill="#37474f">'
        f"{escape(box.words)}</text>",
    ]


def _rectangle(box: Box, stroke: str) -> str:
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" fill="{box.colour}" '
        f'stroke="{stroke}"/>'
    )


def _line(one: Box, other: Box) -> str:
    """From an edge of one box to the facing edge of the other: straight where they overlap, an arc over what stands
    between two of a row."""
    left, right = max(one.x, other.x), min(one.x + one.width, other.x + other.width)
    if left < right:  # one above the other
        x = (left + right) / 2
        start, end = (one.y + one.height, other.y) if one.y < other.y else (one.y, other.y + other.height)
        return f"M{x:g} {start}L{x:g} {end}"
    if one.y == other.y:
        start, end = (one.x + one.width, other.x) if one.x < other.x else (one.x, other.x + other.width)
        y = one.y + one.height / 2
        if not any(_between(box, one, other) for box in BOXES.values()):
            return f"M{start} {y:g}L{end} {y:g}"
        bottom = one.y + one.height
        apart = other.x - one.x
        leave, reach = one.x + one.width * (0.9 - abs(apart) / 2500), other.x + other.width * 0.4
        deep = bottom + abs(apart) * 0.06
        return f"M{leave:g} {bottom}C{leave:g} {deep:g} {reach:g} {deep:g} {reach:g} {bottom}"
    start_x = one.x + one.width * (0.7 if one.x < other.x else 0.3)
    end_x = other.x + other.width * (0.3 if one.x < other.x else 0.7)
    start, end = (one.y + one.height, other.y) if one.y < other.y else (one.y, other.y + other.height)
    return f"M{start_x:g} {start}L{end_x:g} {end}"


def _between(box: Box, one: Box, other: Box) -> bool:
    places = sorted((one.x, box.x, other.x))
    return box.y == one.y and places[1] == box.x and box.x not in (one.x, other.x)


if __name__ == "__main__":
    main()
