"""Importing OpenVINO."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

#: Eight threads ask for the first type at once, and take turns as often as Python lets them.
_AT_ONCE = """
import sys, threading
from cbmir.runtime.engines.openvino_import import import_openvino

openvino = import_openvino()
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)

def ask():
    barrier.wait()
    openvino.Type.u8.to_dtype()

threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_inferences_of_several_threads_do_not_wait_for_each_other(openvino: ModuleType) -> None:
    """Without the mend 14 of 15 such processes hang, so three pass by chance once in three thousand."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", _AT_ONCE], check=True, timeout=60)
