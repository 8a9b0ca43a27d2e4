"""The tree of errors: as drawn, with the exit codes it promises."""

from __future__ import annotations

import inspect
import re

import pytest

from cbmir import errors


def drawn_tree() -> dict[str, str | None]:
    """Class -> parent, as the module's docstring draws them (four columns a level)."""
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        if match := re.match(r"[ ]{4}((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+Error)\b", line):
            level = len(match[1]) // 4
            path[level:] = [match[2]]
            tree[match[2]] = path[level - 1] if level else None
    return tree


def test_the_drawing_is_the_code() -> None:
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    defined = {
        name: None if kind is errors.CbmirError else kind.__base__.__name__  # type: ignore[union-attr]
        for name, kind in classes.items()
    }
    assert drawn_tree() == defined
    assert len(defined) > 15
    assert all(kind.__doc__ for kind in classes.values())


def test_the_drawing_says_the_exit_codes() -> None:
    drawing = errors.__doc__ or ""
    for name, parent in drawn_tree().items():
        kind = getattr(errors, name)
        assert kind.exit_code == (2 if issubclass(kind, errors.UserError) else 1)
        if parent == "CbmirError":
            (line,) = (line for line in drawing.splitlines() if f"── {name} " in line)
            assert line.endswith(f"(exit {kind.exit_code})")


def test_require_imports() -> None:
    assert errors.require("json", "all").loads("1") == 1


def test_require_names_the_command() -> None:
    with pytest.raises(errors.MissingDependencyError, match=r'pip install "cbmir\[train\]"') as caught:
        errors.require("no_such_module_of_ours.part", "train")
    assert str(caught.value).startswith("no_such_module_of_ours is needed")
