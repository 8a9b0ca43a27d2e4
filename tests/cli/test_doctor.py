"""`cbmir doctor`: its report here, and on machines that lack something."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cbmir
from cbmir import machine
from cbmir.choices import ENGINES
from cbmir.cli import doctor
from cbmir.errors import EngineError, installing
from cbmir.runtime import open_engine
from cbmir.runtime.engines.nvidia import Gpu
from cbmir.runtime.engines.registry import why_not
from command_line import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Limit the modules that doctor can import to these."""
    known: dict[str, Any] = {}

    def import_module(name: str) -> Any:
        if name not in known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return known[name]

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    return known


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> Callable[..., None]:
    """Pretend that other versions are installed (None for missing), and that no optional module can be imported."""

    def pretend(**versions: str | None) -> None:
        real = metadata.version

        def version(name: str) -> str:
            found = versions.get(name.replace("-", "_"), "real")
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return real(name) if found == "real" else found

        monkeypatch.setattr(metadata, "version", version)

    return pretend


def test_here(capsys: Captured) -> None:
    """The development environment has everything in the extra `dev`."""
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "cbmir", "python", "platform", "extras", "packages", "engines", "processor", "gpu", "devices", "codecs",
        "problems",
    ]  # fmt: skip
    assert report["cbmir"] == cbmir.__version__
    assert list(report["extras"]) == [
        "cpu", "gpu", "openvino", "tensorrt", "tensorrt-rtx", "dicom", "serve", "train", "export", "quantise",
        "demo",
    ]  # fmt: skip
    assert not any(report["extras"][name]["missing"] for name in ("cpu", "dicom", "train", "export", "demo"))
    import onnxruntime

    assert list(report["engines"]) == list(ENGINES[1:])
    assert report["engines"]["onnxruntime"] == {
        "loads": True, "why": "", "library": f"ONNX Runtime {onnxruntime.__version__}",
    }  # fmt: skip
    assert report["processor"]["name"]
    assert report["devices"][0] == "cpu"
    assert report["codecs"]["JPEG-LS Lossless Image Compression"] is True
    assert all(report["codecs"].values())
    assert report["packages"]["numpy"] == np.__version__
    assert report["problems"] == []


def test_text(capsys: Captured) -> None:
    assert run("doctor") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"cbmir {cbmir.__version__}, Python 3.")
    assert "  cpu          complete\n" in text
    assert "  onnxruntime          loads, ONNX Runtime 1." in text
    assert "Problems" not in text


def test_missing_and_too_old(installed: Callable[..., None]) -> None:
    installed(timm=None, torch="2.5.9+cpu", gradio=None, pandas="10.0")
    report = doctor.examine()
    assert report["extras"]["train"]["missing"] == ["torch>=2.6 (found 2.5.9+cpu)", "timm"]
    assert report["extras"]["demo"] == {"missing": ["gradio"], "install": installing("demo")}
    assert "gradio" not in report["packages"]
    text = doctor.text(report)
    assert f"  demo         missing gradio: {installing('demo')}\n" in text
    assert "  nothing is decoded: pydicom" in text


def test_extras_of_extras_count(installed: Callable[..., None]) -> None:
    installed(prometheus_client=None)
    assert doctor.examine()["extras"]["dicom"]["missing"] == ["prometheus-client"]


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


def test_engines_are_reported_as_auto_sees_them(tiny_model: Path) -> None:
    """Doctor, `why_not` and an engine's own health agree."""
    engines = doctor.examine()["engines"]
    for name, engine in engines.items():
        assert engine["why"] == why_not(name)
        assert engine["loads"] == (engine["why"] == "")
        if name == "tensorrt":  # it does not run .onnx files
            continue
        if engine["loads"]:
            with open_engine(tiny_model, engine=name) as opened:
                assert opened.health().engine == name
        else:
            with pytest.raises(EngineError, match=re.escape(engine["why"])):
                open_engine(tiny_model, engine=name)


def test_the_text_says_why_an_engine_does_not_load(modules: dict[str, Any]) -> None:
    whys = {"openvino": "openvino is not installed; expected it"}
    available = SimpleNamespace(probe=lambda name: ("", whys[name]) if name in whys else (f"Library of {name}", ""))
    modules["cbmir.runtime.engines.registry"] = available
    text = doctor.text(doctor.examine())
    assert "  openvino             openvino is not installed; expected it\n" in text
    assert "  tensorrt             loads, Library of tensorrt\n" in text


def test_matrix_instructions_are_explained(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some Processor\nflags\t\t: fpu avx2 avx512_vnni amx_bf16\n\nmodel name\t: B\n")

    def on(file: Path) -> SimpleNamespace:
        return SimpleNamespace(describe_machine=lambda: machine.describe_machine(file))

    found = doctor._processor(on(cpuinfo))
    assert found["name"] == "Some Processor"
    assert list(found["matrix"]) == ["amx_bf16", "avx512_vnni"]
    assert doctor._processor(on(tmp_path / "missing"))["matrix"] == {}


def test_the_nvidia_gpu_is_named(modules: dict[str, Any]) -> None:
    modules["cbmir.runtime.engines.nvidia"] = SimpleNamespace(current_gpu=lambda: Gpu("Card", "sm90", 80 << 30))
    report = doctor.examine()
    assert report["gpu"] == "Card, sm90, 80 GiB"
    assert "  Card, sm90, 80 GiB\n" in doctor.text(report)


def test_gpus_are_listed(modules: dict[str, Any]) -> None:
    modules["torch"] = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 2, get_device_name=lambda number: f"Card {number}"),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True)),
    )
    assert doctor.examine()["devices"] == ["cpu", "cuda:0 Card 0", "cuda:1 Card 1", "mps"]


def test_a_module_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    raised = {
        "cbmir.runtime.engines.registry": ImportError("libjpeg.so: cannot open shared object file"),
        "cbmir.machine": ImportError("libjpeg.so: cannot open shared object file"),
        "cbmir.runtime.engines.nvidia": ImportError("libjpeg.so: cannot open shared object file"),
        "torch": OSError("libgomp.so.1: cannot open shared object file"),
        "pydicom": ModuleNotFoundError("No module named 'fractions'", name="fractions"),
    }

    def import_module(name: str) -> ModuleType:
        raise raised[name]

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    report = doctor.examine()
    assert report["problems"] == [
        "cbmir.runtime.engines.registry does not import: libjpeg.so: cannot open shared object file",
        "cbmir.machine does not import: libjpeg.so: cannot open shared object file",
        "cbmir.runtime.engines.nvidia does not import: libjpeg.so: cannot open shared object file",
        "torch does not import: libgomp.so.1: cannot open shared object file",
        "pydicom does not import: No module named 'fractions'",
    ]
    assert (report["engines"], report["gpu"], report["devices"], report["codecs"]) == ({}, "", [], {})
    assert "Problems\n  cbmir.runtime.engines.registry does not import" in doctor.text(report)


@pytest.mark.usefixtures("modules")
def test_a_missing_module_is_not_a_problem() -> None:
    report = doctor.examine()
    assert report["problems"] == []
    assert report["engines"] == {}
    assert report["processor"]["matrix"] == {}


def test_any_error_of_an_import_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def import_module(name: str) -> ModuleType:
        raise RuntimeError("built for another version of NumPy")

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=import_module))
    assert run("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["problems"] == [
        f"{name} does not import: built for another version of NumPy"
        for name in (
            "cbmir.runtime.engines.registry",
            "cbmir.machine",
            "cbmir.runtime.engines.nvidia",
            "torch",
            "pydicom",
        )
    ]


def test_a_module_that_imports_but_does_not_work_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens after an interrupted update."""
    empty = SimpleNamespace(import_module=lambda name: SimpleNamespace())
    monkeypatch.setattr(doctor, "importlib", empty)
    report = doctor.examine()
    assert [problem.split(":")[:2] for problem in report["problems"]] == [
        ["cbmir.runtime.engines.registry does not work", " AttributeError"],
        ["cbmir.machine does not work", " AttributeError"],
        ["cbmir.runtime.engines.nvidia does not work", " AttributeError"],
        ["torch does not work", " AttributeError"],
        ["pydicom does not work", " AttributeError"],
    ]
    assert (report["devices"], report["codecs"]) == ([], {})
    assert report["engines"] == {}
    assert "  nothing is decoded: pydicom" in doctor.text(report)
