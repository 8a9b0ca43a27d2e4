"""Importing OpenVINO: without its telemetry, and so that several threads may use it at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from cbmir.errors import require

_LOCK = threading.RLock()  # of sys.modules, while something is hidden


def import_openvino() -> ModuleType:
    """The module `openvino`, without its model converter. Raises MissingDependencyError.

    `import openvino` imports `openvino.tools.ovc`, which reports the import to Google Analytics, writes an identifier
    into the home folder, and takes as long as all the rest. Where it cannot be imported OpenVINO does without, and
    `from openvino.tools.ovc import convert_model` works afterwards as ever.
    """
    with hidden("openvino.tools.ovc"):
        openvino = require("openvino", "openvino")
        # Its table of types is made when one is first asked for, and two threads that do so at once wait for each other
        # for ever (met with 2026.4.1): one holds Python's lock, the other that of the table.
        openvino.Type.u8.to_dtype()
        return openvino


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let importing these modules fail for a while, as if they were not installed; for one thread at a time."""
    with _LOCK:
        before = {name: sys.modules[name] for name in names if name in sys.modules}
        sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None is what makes the import fail
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)
            sys.modules.update(before)
