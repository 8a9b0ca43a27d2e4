"""Importing OpenVINO without its telemetry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from cbmir.errors import require


def import_openvino() -> ModuleType:
    """The module `openvino`, without its model converter. Raises MissingDependencyError.

    `import openvino` imports `openvino.tools.ovc`, which reports the import to Google Analytics, writes an identifier
    into the home folder, and takes as long as all the rest. Where it cannot be imported OpenVINO does without, and
    `from openvino.tools.ovc import convert_model` works afterwards as ever.
    """
    with hidden("openvino.tools.ovc"):
        return require("openvino", "openvino")


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let importing these modules fail for a while, as if they were not installed."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None is what makes the import fail
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
