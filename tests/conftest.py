"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import CARD_KEY, HEAD_KEY, Calibration, ModelCard
from cbmir.errors import MissingDependencyError
from cbmir.files import write_json
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime.engines import nvidia
from cbmir.runtime.engines.openvino import import_openvino
from made_once import made_once
from set_up import find_chromium

ROOT = Path(__file__).resolve().parent.parent

os.environ.update(RAY_worker_niceness="0")  # with Ray's default, 15, it gets hardly any CPU beside other tests


#: Files whose tests take minutes. They run first, so that no process is left with one of them at the end.
_LONG = (
    "tests/test_end_to_end.py",
    "tests/cli/test_benchmark.py",
    "tests/training/test_distillation.py",
    "tests/training/test_harness.py",
    "tests/export/test_export.py",
    "tests/demo/test_browser_images.py",
    "tests/demo/test_browser_page.py",
    "tests/training/comparison/test_cells.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONG.index(file) if (file := item.nodeid.split("::")[0]) in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore the logging configuration, which the command line changes."""
    root, ours = logging.getLogger(), logging.getLogger("cbmir")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_open() -> Iterator[None]:
    """Collect garbage after each module, so that unclosed resources are reported there and not in another test. Older
    objects are frozen: with PyTorch imported, collecting them takes seconds."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_loop_left() -> Iterator[None]:
    """Close the event loop that Gradio opens and leaves behind; otherwise another test would report it."""
    yield
    loop = getattr(getattr(asyncio.get_event_loop_policy(), "_local", None), "_loop", None)
    if loop is not None and not loop.is_running():
        loop.close()
        asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository. Skips if it is missing; fails in CI."""
    folder = ROOT.parent / "shared"
    if folder.is_dir():
        return folder
    if os.environ.get("CBMIR_REQUIRE_SHARED") == "1":
        pytest.fail(f"{folder} is required here (CBMIR_REQUIRE_SHARED=1) and is missing")
    pytest.skip("the real X-rays (../shared) are not here")


@pytest.fixture(scope="session")
def openvino() -> ModuleType:
    """OpenVINO without telemetry. Skips if it is missing; fails in CI."""
    try:
        return import_openvino()
    except MissingDependencyError as error:
        if os.environ.get("CBMIR_REQUIRE_SHARED") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the NVIDIA driver."""

    def absent(library: str) -> Any:
        raise OSError(f"{library}: cannot open shared object file")

    monkeypatch.setattr(nvidia, "ctypes", SimpleNamespace(CDLL=absent))


def require_programs(*programs: str) -> None:
    """Skip the test if a PACS program, or a library given by its path, is missing; fail in CI."""
    absent = [name for name in programs if not (Path(name).exists() if "/" in name else shutil.which(name))]
    if absent and os.environ.get("CBMIR_REQUIRE_PACS") == "1":
        pytest.fail(f"{', '.join(absent)}: required here (CBMIR_REQUIRE_PACS=1) and missing; 'make test' installs them")
    if absent:
        pytest.skip(f"{', '.join(absent)}: not installed")


@pytest.fixture(scope="session")
def require_pacs() -> Callable[..., None]:
    """`require_programs`, for tests that need Orthanc, dcmtk, dciodvfy or a network namespace."""
    return require_programs


CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium driven by Playwright. Skips if there is none; fails in CI.

    It is module-scoped, since Playwright's event loop runs in this thread while it is open, and excludes others.
    """
    chromium = find_chromium()
    if chromium is None:
        if os.environ.get("CBMIR_REQUIRE_BROWSER") == "1":
            pytest.fail("Chromium is required here (CBMIR_REQUIRE_BROWSER=1) and is missing")
        pytest.skip("Chromium is not installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def demo_process(model: Path, gallery: Path, *options: str) -> Iterator[str]:
    """Run `cbmir demo` in its own process, and yield its address. Ctrl-C must end it with exit code 0."""
    command = [sys.executable, "-m", "cbmir", "demo", str(model), str(gallery), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        try:
            assert first.startswith("http://127.0.0.1:"), first
            yield first.split()[0]
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors
        assert "Traceback" not in errors, errors


@pytest.fixture(scope="session")
def running_demo() -> Callable[..., AbstractContextManager[str]]:
    """`demo_process`, for tests of pages."""
    return demo_process


TINY_CARD = ModelCard(
    labels=LabelSet(("Effusion", "Mass", "Nodule")),
    preprocess=PreprocessSpec.for_image_size(32),
    encoder="tiny",
    embedding_dim=8,
    head="proxy",
    sigma=0.7,
    proxies_per_class=(2, 2, 2, 2),
    negative_proxies=True,
    thresholds=(0.5, 0.9, None),
    calibration=(Calibration(4.0, -2.0), Calibration(8.0, -6.0), None),
    fingerprint="tiny-0",
)


def write_tiny_model(path: Path, *, seed: int = 0, metadata: dict[str, str] | None = None, **card: Any) -> Path:
    """Write a real ONNX model: one convolution (stride 4, so an 8x8 feature map), ReLU, mean, L2 norm, and proxy scores
    unless the card has no labels. `card` changes fields of TINY_CARD, `metadata` those of the file; None removes
    one."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    info = TINY_CARD.with_(**card)
    dim, size, classes = info.embedding_dim, info.preprocess.crop, len(info.labels)
    drawn = classes or len(TINY_CARD.labels)  # the same encoder even without labels
    proxies = np.abs(rng.normal(size=(2 * drawn + 2, dim))).astype(np.float32)
    proxies /= np.linalg.norm(proxies, axis=1, keepdims=True)
    constants = {
        "scale": np.float32(2 / 255), "one": np.float32(1), "tiny": np.float32(1e-12), "cells": np.array([2, 3]),
        "columns": np.array([1]), "last": np.array([2]), "kernel": rng.normal(size=(dim, 1, 5, 5)).astype(np.float32),
        "proxies": proxies[: 2 * drawn].T.copy(), "by_class": np.array([-1, classes, 2]),
        "slope": np.float32(1 / info.sigma**2),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        node("Cast", ["image"], ["grey"], to=TensorProto.FLOAT),
        node("Mul", ["grey", "scale"], ["scaled"]),
        node("Sub", ["scaled", "one"], ["centred"]),
        node("Conv", ["centred", "kernel"], ["conv"], strides=[4, 4], pads=[2, 2, 2, 2]),
        node("Relu", ["conv"], ["feature_map"]),
        node("ReduceMean", ["feature_map", "cells"], ["mean"], keepdims=0),
        node("ReduceL2", ["mean", "columns"], ["length"], keepdims=1),
        node("Max", ["length", "tiny"], ["norm"]),
        node("Div", ["mean", "norm"], ["embedding"]),
        node("MatMul", ["embedding", "proxies"], ["cosine"]),
        node("Sub", ["cosine", "one"], ["shifted"]),  # exp(-(2 - 2 cos) / (2 sigma^2)) = exp((cos - 1) / sigma^2)
        node("Mul", ["shifted", "slope"], ["exponent"]),
        node("Exp", ["exponent"], ["similarity"]),
        node("Reshape", ["similarity", "by_class"], ["of_classes"]),
        node("ReduceMax", ["of_classes", "last"], ["scores"], keepdims=0),
    ]
    if not classes:
        nodes = nodes[: next(at for at, made in enumerate(nodes) if made.output[0] == "embedding") + 1]
        proxies = proxies[:0]
    side = size // 4
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "tiny",
        [value("image", TensorProto.UINT8, ["N", 1, size, size])],
        [
            value("embedding", TensorProto.FLOAT, ["N", dim]),
            *([value("scores", TensorProto.FLOAT, ["N", classes])] if classes else []),
            value("feature_map", TensorProto.FLOAT, ["N", dim, side, side]),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    head = base64.b64encode(proxies.astype("<f4").tobytes()).decode()
    for key, text in ({CARD_KEY: info.dumps(), HEAD_KEY: head} | (metadata or {})).items():
        if text is not None:
            model.metadata_props.add(key=key, value=text)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def tiny_xray(seed: int, side: int = 64) -> NDArray[np.uint8]:
    """A smooth random grey image uint8 [side, side], distinct enough for the tiny model."""
    blobs = np.random.default_rng(seed).integers(0, 256, (6, 6), dtype=np.uint8)
    return np.array(Image.fromarray(blobs).resize((side, side), Image.Resampling.BICUBIC))


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., Path]:
    """`write_tiny_model`, for tests that need a modified model."""
    return write_tiny_model


@pytest.fixture(scope="session")
def make_xray() -> Callable[..., NDArray[np.uint8]]:
    """`tiny_xray`, for tests that need more images."""
    return tiny_xray


@pytest.fixture(scope="session")
def inverted_chest() -> NDArray[np.uint8]:
    """A drawn chest X-ray with dark bone, uint8 [128, 128], about which the picture check is certain."""
    from cbmir.training.phantom import describe, draw

    return 255 - draw(next(iter(describe(1, seed=77))), 128)


@pytest.fixture(scope="session")
def tiny_card() -> ModelCard:
    """The card of `tiny_model`."""
    return TINY_CARD


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX model with 3 labels, 32x32 input and 8 dimensions, which answers in a millisecond."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


#: The card fields of an embedding model.
WITHOUT_FINDINGS: dict[str, Any] = {
    "labels": LabelSet(()), "head": "none", "proxies_per_class": (), "negative_proxies": False, "thresholds": (),
    "calibration": (), "fingerprint": "embedding-0",
}  # fmt: skip


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_model` without findings."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "embedding.onnx", **WITHOUT_FINDINGS)


@pytest.fixture(scope="session")
def tiny_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of 12 patients (two each, the last two patients in the test split), with labels and reports."""
    folder = tmp_path_factory.mktemp("xrays")
    rows = []
    for number in range(24):
        image = folder / f"image_{number:02}.png"
        Image.fromarray(tiny_xray(number)).save(image)
        patient = number // 2
        rows.append(
            Row(
                image=image,
                patient_id=f"patient_{patient:02}",
                labels=(number % 2, (0, 1, -1)[number % 3], None if number % 5 else 1),
                view="PA",
                split="test" if patient >= 10 else "train",
                report=f"Report {number}.\nSecond line.",
            )
        )
    write_manifest(Manifest(TINY_CARD.labels, tuple(rows)), folder / "manifest.csv")
    return folder / "manifest.csv"


def built_gallery(path: Path, model: Path, manifest: Path) -> Path:
    from cbmir.runtime import build_gallery, open_engine

    with open_engine(model, threads=1) as engine:
        build_gallery(engine, read_manifest(manifest), path)
    return path


@pytest.fixture(scope="session")
def tiny_gallery(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_manifest: Path) -> Path:
    """20 training images of `tiny_manifest`, indexed by `tiny_model`. Read-only: tests build their own to change."""
    return built_gallery(tmp_path_factory.mktemp("galleries") / "gallery", tiny_model, tiny_manifest)


@pytest.fixture(scope="session")
def embedding_gallery(tmp_path_factory: pytest.TempPathFactory, embedding_model: Path, tiny_manifest: Path) -> Path:
    """20 training images of `tiny_manifest`, indexed by `embedding_model`. Read-only."""
    return built_gallery(tmp_path_factory.mktemp("galleries") / "gallery", embedding_model, tiny_manifest)


@pytest.fixture
def examples(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, make_xray: Callable[..., NDArray[np.uint8]],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """Change to a folder with the files that most examples of the documentation use."""
    from dicom_files import make_dicom

    shutil.copy(tiny_model, tmp_path / "model.onnx")
    shutil.copytree(tiny_gallery, tmp_path / "gallery")
    tags = {"WindowCenter": 128, "WindowWidth": 256, "PatientID": "patient_01", "SOPInstanceUID": "1.2.826.0.1.7"}
    (tmp_path / "chest.dcm").write_bytes(make_dicom(make_xray(100), **tags))
    Image.fromarray(make_xray(100)).save(tmp_path / "chest.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tiny_run(folder: Path, manifest: Path, *, card: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write a finished, untrained run of a ResNet18 at 32x32. `card` changes fields of the card, `config` options."""
    import torch

    from cbmir.training.config import TrainConfig
    from cbmir.training.dataset import split_targets
    from cbmir.training.run import RunFolder, build_model, embedding_fingerprint
    from cbmir.training.splits import with_fold

    run = RunFolder(folder)
    table = read_manifest(manifest)
    options: dict[str, Any] = {"encoder": "resnet18", "image_size": 32} | config
    made = TrainConfig(str(manifest), table.fingerprint, table.labels.names, **options)
    run.write_config(made)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, _ = build_model(made, split_targets(with_fold(table, made.fold), "train"), weights="none")
    linear = made.loss == "bce"
    facts: dict[str, Any] = {
        "labels": table.labels,
        "preprocess": made.preprocess,
        "encoder": made.encoder,
        "embedding_dim": 512,
        "head": model.head.kind,
        "sigma": made.sigma,
        "proxies_per_class": () if linear else model.head.counts,
        "negative_proxies": made.negative_proxies and not linear,
        "fingerprint": embedding_fingerprint(model, made.preprocess),
        "versions": {"cbmir": "0", "torch": torch.__version__},
    }
    write_json(run.card, TINY_CARD.with_(**facts | (card or {})).to_json())
    run.checkpoints.mkdir()
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 0}, run.best)
    return folder


@pytest.fixture(scope="session")
def make_tiny_run() -> Callable[..., Path]:
    """`write_tiny_run`, for tests that need a modified run."""
    return write_tiny_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_manifest: Path) -> Path:
    """A finished, untrained run on fold 1/2 of `tiny_manifest`. Read-only."""
    return write_tiny_run(tmp_path_factory.mktemp("runs") / "run", tiny_manifest, fold="1/2")


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A folder with the export of `tiny_run`: model.onnx, model.fp16.onnx and parity.json. Read-only."""
    from cbmir.export import ExportOptions, export_run

    return made_once(tmp_path_factory, "exports", lambda at: export_run(tiny_run, at, ExportOptions(fp16=True)))


@pytest.fixture
def quick_graph(tiny_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports of `tiny_run` reuse the graphs of `tiny_export`; all other steps are real."""
    from cbmir.export import export

    files = {"float32": "model.onnx", "float16": "model.fp16.onnx"}

    def take(model: object, card: object, precision: str = "float32") -> bytes:
        return (tiny_export / files[precision]).read_bytes()

    monkeypatch.setattr(export, "to_onnx", take)
