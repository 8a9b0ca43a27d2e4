"""Draw docs/architecture.svg, write the tree in docs/architecture.md, and count what CONTRIBUTING.md limits.

    python docs/architecture.py

FLOORS defines the layers of packages; the tests compare it with the imports in the code.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).resolve().parents[1]
SVG = Path(__file__).with_suffix(".svg")
PAGE = Path(__file__).with_suffix(".md")
#: Folder of the repository -> package.
FOLDERS = {
    "src/cbmir": "cbmir",
    "runtime": "cbmir.runtime",
    "training": "cbmir.training",
    "export": "cbmir.export",
    "demo": "cbmir.demo",
}
#: The top of the package, which imports the rest; others may import it for the version.
WAY_IN = ("cbmir", "cbmir.__main__", "cbmir.cli")
TREE = re.compile(r"(?<=<!-- tree -->\n```\n).*?(?=```\n<!-- /tree -->)", re.DOTALL)

GREY, GREEN, BLUE, SAND = "#eceff1", "#e0f2f1", "#e3f2fd", "#fff8e1"
WIDTH, MARGIN, GAP, HEIGHT = 960, 16, 12, 50


@dataclass(frozen=True)
class Room:
    """A package or module of cbmir, and its purpose in a few words."""

    name: str
    words: str
    colour: str


#: From top to bottom. A room imports only from its own floor and those below it.
FLOORS = (
    (Room("cli", "the command line: one file per command", SAND),),
    (
        Room("demo", "the page in the browser", SAND),
        Room("export", "a run to ONNX and TensorRT files", BLUE),
        Room("export.perf", "speed, measured", BLUE),
    ),
    (
        Room("training.comparison", "losses side by side: the paper's tables", BLUE),
        Room("training.readers", "data sets to manifests", BLUE),
        Room("training.phantom", "drawn X-rays", BLUE),
        Room("training.picture_check", "is it an upright chest?", BLUE),
    ),
    (
        Room("training", "harness, model, metrics, evaluation", BLUE),
        Room("training.losses", "one loss per file", BLUE),
        Room("training.encoders", "image to feature map", BLUE),
    ),
    (
        Room("runtime.serving", "HTTP service", GREEN),
        Room("runtime.pacs", "DICOM node, polling, queue", GREEN),
    ),
    (Room("runtime.dicom_output", "SR, secondary capture, KOS, FHIR", GREEN),),
    (Room("runtime", "finder, results, evidence, hot_reload: an image to an answer", GREEN),),
    (
        Room("runtime.gallery", "embeddings on disk, search, filters", GREEN),
        Room("runtime.gallery.milvus", "the same in a Milvus server", GREEN),
    ),
    (
        Room("runtime.imaging", "a file to the model's input", GREEN),
        Room("runtime.engines", "ONNX Runtime, OpenVINO, TensorRT", GREEN),
        Room("runtime.novelty", "how unusual an embedding is", GREEN),
    ),
    (Room("runtime.models", "models that come with cbmir", GREEN),),
    (Room("spine", "errors, labels, card, preprocessing, manifest, files, process", GREY),),
)
ROOMS = {("cbmir." if room.name != "spine" else "") + room.name: room for floor in FLOORS for room in floor}
#: Modules that belong to a lower room than their package.
_LOWER = {"cbmir.runtime.logs": "spine", "cbmir.runtime.sockets": "spine"}


def main() -> None:
    SVG.write_text(draw(), "utf-8")
    PAGE.write_text(TREE.sub(lambda _: tree(), PAGE.read_text("utf-8")), "utf-8")
    for name, (counted, limit) in measures().items():
        print(f"{name}: {len(counted) if isinstance(counted, list) else counted} (limit {limit})")  # noqa: T201
        for line in counted if isinstance(counted, list) else []:
            print(f"  {line}")  # noqa: T201


def place_of(module: str) -> str:
    """Return the room of a module. Raises KeyError if its package has none."""
    if module in WAY_IN or module.startswith("cbmir.cli."):
        return "cbmir.cli"
    if module in _LOWER:
        return _LOWER[module]
    parents = [name for name in ROOMS if module == name or module.startswith(f"{name}.")]
    if not parents and module.count(".") > 1:
        raise KeyError(f"{module}: expected a room for it in docs/architecture.py, found none")
    return max(parents, key=len, default="spine")


def upward(graph: grimp.ImportGraph) -> list[str]:
    """Return the imports from a higher floor, as "importer -> imported"."""
    floor_of = {name: at for at, floor in enumerate(FLOORS) for name, room in ROOMS.items() if room in floor}
    return sorted(
        f"{module} -> {imported}"
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if imported not in WAY_IN and floor_of[place_of(module)] > floor_of[place_of(imported)]
    )


def files() -> dict[Path, int]:
    """Return the package's Python files, relative to the repository, and their numbers of lines."""
    found = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text("utf-8").count("\n") for path in found}


def module_of(file: Path) -> str:
    folder = next(folder for folder in FOLDERS if file.is_relative_to(folder))
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in parts if part != "__init__")])


def tree() -> str:
    """Return the folders of the package and their files, as shown in docs/architecture.md."""
    rooms: dict[Path, list[str]] = {}
    for file in files():
        rooms.setdefault(file.parent, [])
        if not file.stem.startswith("__"):
            rooms[file.parent].append(file.stem)
    lines = []
    for folder, names in rooms.items():
        top = next(Path(top) for top in FOLDERS if folder.is_relative_to(top))
        depth = len(folder.relative_to(top).parts)
        head = "  " * depth + (folder.name if depth else str(folder)) + "/"
        lines.append(textwrap.fill(" ".join(names), 110, initial_indent=f"{head:19} ", subsequent_indent=" " * 20))
    return "\n".join(lines) + "\n"


def measures(graph: grimp.ImportGraph | None = None) -> dict[str, tuple[list[str] | int, int]]:
    """Return the limits of CONTRIBUTING.md: name -> (list or count, limit)."""
    graph = graph or grimp.build_graph("cbmir", cache_dir=None)
    counted = files()
    folders = {file.parent for file in counted}
    crowded = {folder: sum(file.parent == folder for file in counted) for folder in folders}
    lonely = [
        f"{file}, {lines} lines"
        for file, lines in counted.items()
        if lines < 60
        and not file.stem.startswith("__")
        and len(graph.find_modules_that_directly_import(module_of(file))) < 2
    ]
    scripts = list((ROOT / "demo/page/static").glob("*.js")) + sorted((ROOT / "docs").rglob("*.py"))
    return {
        "lines of Python and JavaScript": (
            sum(counted.values()) + sum(path.read_text("utf-8").count("\n") for path in scripts),
            40_250,  # 30,000 at first, plus later features
        ),
        "files in runtime/ itself": (crowded[Path("runtime")], 9),
        "files in the fullest folder": (max(crowded.values()), 18),
        "files over 400 lines": ([f"{file}, {lines} lines" for file, lines in counted.items() if lines > 400], 0),
        "files under 60 lines with one importer": (lonely, 15),
    }


def draw() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {MARGIN + len(FLOORS) * (HEIGHT + GAP)}" '
        'font-family="sans-serif" role="img" aria-label="The rooms of cbmir: each imports from those below it">',
        '<rect width="100%" height="100%" rx="12" fill="#fff"/>',
    ]
    for at, floor in enumerate(FLOORS):
        wide = (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor)
        for across, room in enumerate(floor):
            lines += _box(room, MARGIN + across * (wide + GAP), MARGIN + at * (HEIGHT + GAP), wide)
    return "\n".join([*lines, "</svg>", ""])


def _box(room: Room, x: float, y: float, wide: float) -> list[str]:
    middle = x + wide / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{HEIGHT}" rx="8" fill="{room.colour}" stroke="#78909c"/>',
        f'<text x="{middle:g}" y="{y + 21:g}" font-size="14" font-weight="bold" text-anchor="middle" fill="#263238">'
        f"{room.name}</text>",
        f'<text x="{middle:g}" y="{y + 39:g}" font-size="12" text-anchor="middle" fill="#37474f">'
        f"{escape(room.words)}</text>",
    ]


if __name__ == "__main__":
    main()
