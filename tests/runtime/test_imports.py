"""The runtime stays light: it imports nothing of training or the demo, and optional parts only when used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cbmir.runtime

HEAVY = ("torch", "torchvision", "lightning", "sklearn", "pandas", "gradio", "matplotlib", "timm", "onnx")
LATER = (
    "pydicom", "onnxruntime", "usearch", "multiprocessing", "sqlite3", "cbmir.runtime.gallery.gallery",
    "cbmir.runtime.gallery.build",
)  # fmt: skip


def loaded(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after some code."""
    code += "; import sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("code", ["import cbmir.runtime", "import cbmir; cbmir.load"])
def test_import_is_light(code: str) -> None:
    assert not loaded(code) & {*HEAVY, *LATER}


def test_libraries_for_results_are_imported_late() -> None:
    assert not loaded("import cbmir.runtime.dicom_output") & {*HEAVY, *LATER, "highdicom"}


def test_an_analysis_needs_no_torch(tiny_model: object, tiny_gallery: object, tiny_manifest: object) -> None:
    code = (
        f"import cbmir, pathlib; finder = cbmir.load({str(tiny_model)!r}, {str(tiny_gallery)!r}, threads=1); "
        f"image = pathlib.Path({str(tiny_manifest)!r}).parent / 'image_20.png'; "
        f"assert len(finder.analyze(image, k=3).neighbours) == 3; finder.close()"
    )
    assert not loaded(code) & {*HEAVY}


def test_the_package_itself_imports_nothing() -> None:
    assert "numpy" not in loaded("import cbmir, cbmir.cli")


def test_public_names() -> None:
    assert all(hasattr(cbmir.runtime, name) for name in cbmir.runtime.__all__)
    assert cbmir.runtime.__all__ == sorted(cbmir.runtime.__all__)


def test_no_library_writes_telemetry_files(tiny_model: Path, tmp_path: Path) -> None:
    """Telemetry of ONNX Runtime and OpenVINO would write files to the home folder."""
    code = (
        "import numpy as np; from cbmir.runtime import open_engine; image = np.zeros((1, 1, 32, 32), np.uint8); "
        f"[open_engine({str(tiny_model)!r}, engine=name, threads=1).run(image) for name in ('onnxruntime', 'openvino')]"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())


PORTABLE = """
import importlib, os, pkgutil, signal, sys
for name in ("resource", "fcntl", "termios", "pwd", "grp", "pty"):
    sys.modules[name] = None
for where, names in ((signal, ("SIGHUP", "SIGKILL", "pthread_sigmask", "sigtimedwait")),
                     (os, ("memfd_create", "sched_getaffinity", "pread", "pwrite", "statvfs", "geteuid"))):
    for name in names:
        delattr(where, name)
import cbmir.cli, cbmir.runtime
for package in (cbmir.cli, cbmir.runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    for name in getattr(package, "__all__", ()):
        getattr(package, name)
from cbmir.errors import UserError
from cbmir.process import signals_held
try:
    with signals_held():
        pass
except UserError as error:
    print(error)
"""


def test_no_linux_only_module_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PORTABLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("expected Linux, whose signals can be waited for")
