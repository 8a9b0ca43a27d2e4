"""`cbmir doctor`: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cbmir
from cbmir import doctor
from cbmir.cli import main

Captured = pytest.CaptureFixture[str]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*args])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend other versions, None for absent, and that no optional module can be imported."""

    def pretend(**versions: str | None) -> None:
        real = metadata.version

        def version(name: str) -> str:
            found = versions.get(name.replace("-", "_"), "real")
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return real(name) if found == "real" else found

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(doctor, "_load", lambda module, problems: None)

    return pretend


def test_here(capsys: Captured) -> None:
    """The development environment has all that `pip install "cbmir[dev]"` brings."""
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "cbmir", "python", "platform", "extras", "packages", "providers", "devices", "codecs", "problems",
    ]  # fmt: skip
    assert report["cbmir"] == cbmir.__version__
    assert list(report["extras"]) == ["cpu", "gpu", "dicom", "train", "export", "demo"]
    assert not any(extra["missing"] for name, extra in report["extras"].items() if name != "gpu")
    assert report["providers"]["cpu"] == {"available": True, "loads": True, "why": ""}
    assert report["devices"][0] == "cpu"
    assert report["codecs"]["JPEG-LS Lossless Image Compression"] == ["pylibjpeg"]
    assert all(report["codecs"].values())
    assert report["packages"]["numpy"] == np.__version__
    assert report["problems"] == []


def test_text(capsys: Captured) -> None:
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"cbmir {cbmir.__version__}, Python 3.")
    assert "  cpu          complete\n" in text
    assert "  cpu          loads\n" in text
    assert "Problems" not in text


def test_missing_and_too_old(installed: Callable[..., None]) -> None:
    installed(timm=None, torch="2.5.9+cpu", gradio=None, pandas="10.0")
    report = doctor.examine()
    assert report["extras"]["train"]["missing"] == ["torch>=2.6 (found 2.5.9+cpu)", "timm"]
    assert report["extras"]["demo"] == {"missing": ["gradio"], "install": 'pip install "cbmir[demo]"'}
    assert "gradio" not in report["packages"]
    text = doctor.text(report)
    assert '  demo         missing gradio: pip install "cbmir[demo]"\n' in text
    assert "  none: no pydicom that works" in text
    assert '  cpu          does not load: not part of the installed ONNX Runtime; pip install "cbmir[cpu]"\n' in text


def test_extras_of_extras_count(installed: Callable[..., None]) -> None:
    installed(pylibjpeg_libjpeg=None)
    assert doctor.examine()["extras"]["dicom"]["missing"] == ["pylibjpeg-libjpeg"]


def test_the_gpu_build_stands_in_for_the_cpu_build(installed: Callable[..., None]) -> None:
    installed(onnxruntime=None, onnxruntime_gpu="1.22")
    extras = doctor.examine()["extras"]
    assert [extras[name]["missing"] for name in ("cpu", "gpu", "export")] == [[], [], []]


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert run("doctor") == 2
    assert "Error: cbmir is on Python's path but not installed" in capsys.readouterr().err


def fake_ort(session: Callable[..., Any]) -> SimpleNamespace:
    """An ONNX Runtime that lists CUDA, and makes sessions by a function of the provider."""
    return SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        SessionOptions=SimpleNamespace,
        InferenceSession=lambda model, options, providers, enable_fallback: session(providers[0]),
    )


def session(provider: str, answer: float = 1.5) -> SimpleNamespace:
    return SimpleNamespace(get_providers=lambda: [provider], run=lambda names, feed: [np.array([answer], np.float32)])


def broken(provider: str) -> SimpleNamespace:
    raise RuntimeError("libcudnn.so.9: cannot open shared object file")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (session, ""),
        (lambda provider: session("CPUExecutionProvider"), "fell back to the CPU"),
        (broken, "RuntimeError: libcudnn"),
        (lambda provider: session(provider, answer=0.0), "answers"),
    ],
    ids=["works", "silent fall back", "raises", "wrong"],
)
def test_a_listed_provider_must_run_a_model(
    make: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"onnxruntime": fake_ort(make)}
    monkeypatch.setattr(doctor, "_load", lambda module, problems: modules.get(module))
    providers = doctor.examine()["providers"]
    assert providers["cuda"]["available"] is True
    assert providers["cuda"]["loads"] is (why == "")
    assert why in providers["cuda"]["why"]
    assert providers["tensorrt"]["available"] is providers["tensorrt"]["loads"] is False
    assert "in place of onnxruntime" in providers["tensorrt"]["why"]


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 2, get_device_name=lambda number: f"Card {number}"),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True)),
    )
    monkeypatch.setattr(doctor, "_load", lambda module, problems: torch if module == "torch" else None)
    assert doctor.examine()["devices"] == ["cpu", "cuda:0 Card 0", "cuda:1 Card 1", "mps"]


def test_what_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    raised = {
        "onnxruntime": ImportError("libonnxruntime.so: cannot open shared object file"),
        "torch": OSError("libgomp.so.1: cannot open shared object file"),
        "pydicom": ModuleNotFoundError("No module named 'fractions'", name="fractions"),
    }

    def import_module(name: str) -> ModuleType:
        raise raised[name]

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    report = doctor.examine()
    assert report["problems"] == [
        "onnxruntime does not import: libonnxruntime.so: cannot open shared object file",
        "torch does not import: libgomp.so.1: cannot open shared object file",
        "pydicom does not import: No module named 'fractions'",
    ]
    assert (report["devices"], report["codecs"]) == ([], {})
    assert "Problems\n  onnxruntime does not import" in doctor.text(report)


def test_absent_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    report = doctor.examine()
    assert report["problems"] == []
    assert not any(provider["loads"] for provider in report["providers"].values())


def test_whatever_an_import_raises_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def import_module(name: str) -> ModuleType:
        raise RuntimeError("built for another version of NumPy")

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    assert run("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["problems"] == [
        f"{name} does not import: built for another version of NumPy" for name in ("onnxruntime", "torch", "pydicom")
    ]


def test_what_imports_and_does_not_work_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an update broke off, or pydicom is 2, which has no `pydicom.pixels`."""
    monkeypatch.setattr(doctor, "_load", lambda module, problems: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pydicom.pixels.decoders.base", None)
    report = doctor.examine()
    assert [problem.split(":")[:2] for problem in report["problems"]] == [
        ["onnxruntime does not work", " AttributeError"],
        ["torch does not work", " AttributeError"],
        ["pydicom does not work", " ModuleNotFoundError"],
    ]
    assert (report["devices"], report["codecs"]) == ([], {})
    assert not any(provider["loads"] for provider in report["providers"].values())
    assert "  none: no pydicom that works" in doctor.text(report)
