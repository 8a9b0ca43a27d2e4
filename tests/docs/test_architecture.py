"""docs/architecture.* matches the code, and the code follows the rules in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from script_files import load_script

grimp = pytest.importorskip("grimp")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "docs/architecture.py")


@pytest.fixture(scope="module")
def graph() -> Any:
    return grimp.build_graph("cbmir", cache_dir=None)


def test_the_picture_and_the_tree_are_up_to_date(script: ModuleType) -> None:
    assert script.draw() == script.SVG.read_text("utf-8"), "run: python docs/architecture.py"
    assert script.TREE.findall(script.PAGE.read_text("utf-8")) == [script.tree()], "run: python docs/architecture.py"


def test_every_room_imports_from_its_floor_and_below(script: ModuleType, graph: Any) -> None:
    assert script.upward(graph) == []


def test_an_import_of_a_higher_floor_is_found(script: ModuleType) -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (
        ("cbmir.runtime.gallery.gallery", "cbmir.runtime.finder"),
        ("cbmir.runtime.finder", "cbmir.runtime.gallery.gallery"),
        ("cbmir.cli.train", "cbmir.training.harness"),
    ):
        graph.add_import(importer=importer, imported=imported)
    assert script.upward(graph) == ["cbmir.runtime.gallery.gallery -> cbmir.runtime.finder"]


def test_a_new_package_needs_a_room(script: ModuleType) -> None:
    with pytest.raises(KeyError, match=r"cbmir\.new"):
        script.place_of("cbmir.new.module")


def test_the_code_follows_the_rules(script: ModuleType, graph: Any) -> None:
    over = {
        name: counted
        for name, (counted, limit) in script.measures(graph).items()
        if (len(counted) if isinstance(counted, list) else counted) > limit
    }
    assert not over


def test_a_class_name_has_one_meaning(script: ModuleType) -> None:
    places = defaultdict(list)
    for file in script.files():
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(file))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_every_file_of_where_to_look_exists(script: ModuleType) -> None:
    named = re.findall(r"`((?:src/cbmir|cli|runtime|training|export|demo)/[\w/.]*)`", script.PAGE.read_text("utf-8"))
    assert len(named) > 25
    assert [name for name in named if not (ROOT / re.sub(r"^cli/", "src/cbmir/cli/", name)).exists()] == []


def test_pytest_enters_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    """By default it leaves out folders with names such as `build`."""
    skipped = [name for name in request.config.getini("norecursedirs") if name != "node_modules"]
    tests = Path(__file__).parents[1]
    folders = {folder for file in tests.rglob("test_*.py") for folder in file.relative_to(tests).parts[:-1]}
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in skipped)]
