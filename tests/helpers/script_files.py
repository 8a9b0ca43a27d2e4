"""Scripts outside the package, loaded by their path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import pytest


def load_script(path: Path) -> ModuleType:
    """Load a script, and restore `sys.path` if the script changes it."""
    before = sys.path[:]
    spec = util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@contextmanager
def imported_script(path: Path) -> Iterator[ModuleType]:
    """A script with its folder on `sys.path`, so that the script and its child processes can import modules there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        yield import_module(path.stem)
        del sys.modules[path.stem]
