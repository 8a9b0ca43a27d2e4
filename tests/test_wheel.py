"""The wheel that users get: it contains the whole tree, and its runtime works without PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cbmir.manifest import read_manifest
from dicom_files import make_dicom

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("demo", "export", "runtime", "training")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy without the symlinks in src/cbmir, as on a system that has no symlinks."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    rubbish = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PARTS:
        shutil.copytree(ROOT / name, source / name, ignore=rubbish)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", *PARTS))
    # Without isolation, the build uses the installed setuptools and no network.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(output), str(source)], check=True, capture_output=True)
    (path,) = output.glob("*.whl")
    return path


def test_the_wheel_contains_the_tree(wheel: Path) -> None:
    spine = ROOT / "src" / "cbmir"
    expected = {f"cbmir/{file.relative_to(spine).as_posix()}" for file in (spine / "cli").rglob("*.py")}
    expected |= {f"cbmir/{file.name}" for file in spine.iterdir() if file.is_file()}
    for part in PARTS:
        expected |= {f"cbmir/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / part).rglob("*.py")}
    expected |= {"cbmir/runtime/imaging/picture_check.npz", "cbmir/runtime/models/starter.onnx"}
    for data in ("demo/page/static", "training/comparison/report/templates"):
        expected |= {f"cbmir/{data}/{file.name}" for file in (ROOT / data).iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (facts,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {"cbmir/py.typed", "cbmir/training/losses/proxy.py"} < expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in facts


#: The environment for new interpreters: PYTHONPATH would add packages that must be absent.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    def build(what: str, source: Path) -> Path:
        code = f"from setuptools.build_meta import build_{what} as build; print(build({str(tmp_path)!r}))"
        made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=source)
        return tmp_path / made.stdout.split()[-1]

    clone = tmp_path / "clone"
    tracked = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True, cwd=ROOT).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists() and not name.startswith(("docs/", "tests/", "benchmarks/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    with tarfile.open(build("sdist", clone)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked)) as mine, zipfile.ZipFile(wheel) as theirs:
        assert {one.filename: one.CRC for one in mine.infolist() if "dist-info" not in one.filename} == {
            one.filename: one.CRC for one in theirs.infolist() if "dist-info" not in one.filename
        }


def link_requirements(site: Path, *extras: str) -> None:
    """Link the requirements of the cbmir in `site` with some extras, also indirect ones, from this environment: the
    packages that pip would install, without a package index."""
    (info,) = site.glob("cbmir-*.dist-info")
    cbmir = PathDistribution(info)
    done: set[str] = set()
    waiting: list[tuple[Distribution, set[str]]] = [(cbmir, {*extras, ""})]
    while waiting:
        distribution, wanted_by = waiting.pop()
        for requirement in map(Requirement, distribution.requires or []):
            wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": name}) for name in wanted_by)
            if wanted and requirement.name == "cbmir":  # an extra that includes another
                waiting.append((cbmir, set(requirement.extras)))
                continue
            if not wanted or canonicalize_name(requirement.name) in done:
                continue
            done.add(canonicalize_name(requirement.name))
            found = metadata.distribution(requirement.name)
            for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
            waiting.append((found, {*requirement.extras, ""}))


def test_a_query_without_torch(
    wheel: Path, tmp_path: Path, tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path
) -> None:
    """Use the wheel with only the extra `cpu`, in a new environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    link_requirements(site, "cpu")
    code = (
        "import importlib.util as u, cbmir.runtime; print(cbmir.runtime.__file__); "
        "print([m for m in ('torch', 'pandas', 'sklearn', 'gradio', 'pydicom', 'lightning') if u.find_spec(m)])"
    )
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, env=CLEAN)
    file, present = found.stdout.splitlines()
    assert file.startswith(str(site)) and present == "[]"
    image = tiny_manifest.parent / "image_20.png"
    command = [python, "-m", "cbmir", "query", tiny_model, tiny_gallery, image, "-k", "3", "--json"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=CLEAN)
    assert len(json.loads(answer.stdout)[0]["neighbours"]) == 3

    refused = subprocess.run(
        [python, "-m", "cbmir", "train", tiny_manifest, "-o", "run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=CLEAN,
    )
    assert refused.returncode == 2 and 'extra "train"' in refused.stderr


#: An integrator's process: results of a file, the node with a sender, and the other modules of points 1 to 4.
INTEGRATOR = """
import sys, time
from pathlib import Path
import pynetdicom
from pydicom import dcmread
from cbmir.runtime import Finder
from cbmir.runtime.dicom_output import make_results
from cbmir.runtime.hot_reload import ReloadableFinder
from cbmir.runtime.pacs import polling
from cbmir.runtime.pacs.intake import Intake
from cbmir.runtime.pacs.storage_scp import StorageScp
from cbmir.runtime.pacs.destinations import Folder
from cbmir.runtime.pacs.queue import DurableQueue
from cbmir.runtime.pacs.worker import Workers
from cbmir.runtime.serving.app import create_app
from cbmir.runtime.serving.settings import Settings

model, gallery, file, folder = map(Path, sys.argv[1:])
live = ReloadableFinder(lambda: Finder.open(model, gallery, threads=1))
with live.use() as finder:
    data = file.read_bytes()
    results = make_results(data, finder.analyze(data), finder, kinds=("sr", "sc", "kos", "fhir"))
    assert results.sr.StudyInstanceUID == results.sc.StudyInstanceUID == dcmread(file).StudyInstanceUID
    assert results.fhir
with DurableQueue(folder / "queue", quiet=0) as queue:
    node, workers = StorageScp(Intake(queue, live), port=0), Workers(queue, live, Folder(folder / "out"), count=1)
    workers.start()
    node.start()
    sender = pynetdicom.AE(ae_title="SENDER")
    dataset = dcmread(file)
    sender.add_requested_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
    association = sender.associate("127.0.0.1", node.port, ae_title="CBMIR")
    assert association.send_c_store(dataset).Status == 0
    association.release()
    until = time.monotonic() + 60
    while not list((folder / "out").rglob("*.dcm")):
        assert time.monotonic() < until
        time.sleep(0.05)
    node.stop()
    workers.stop()
assert create_app(live, Settings()).title == "cbmir"
assert not {"torch", "pandas", "gradio", "lightning"} & set(sys.modules)
"""


def check_integrator(python: Path, folder: Path, model: Path, gallery: Path) -> None:
    """Run points 1 to 4 with an environment's Python: files, results, node, HTTP service, and a folder as data set."""
    (folder / "studies").mkdir()
    file = folder / "studies" / "chest.dcm"
    file.write_bytes(make_dicom(PatientID="patient_01", SOPInstanceUID="1.2.826.0.1.3680043.10.1.7"))

    def run(*command: object) -> str:
        done = subprocess.run([python, *command], capture_output=True, text=True, cwd=folder, env=CLEAN)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-c", INTEGRATOR, model, gallery, file, folder)
    cbmir = ("-m", "cbmir")
    run(*cbmir, "pacs", "analyze", file, "-o", "results", "--model", model, "--gallery", gallery, "--sr", "--fhir")
    assert {path.name for path in (folder / "results").iterdir()} == {"chest.sr.dcm", "chest.fhir.json"}
    run(*cbmir, "data", "dicom", "studies", "-o", "manifest.csv")
    assert len(read_manifest(folder / "manifest.csv")) == 1
    with served(python, folder, "serve", "--model", model, "--gallery", gallery) as url:
        request = urllib.request.Request(f"{url}/v1/analyze", data=file.read_bytes(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)["findings"]) == 3


@contextmanager
def served(python: Path, folder: Path, *command: object) -> Iterator[str]:
    """Run a command of cbmir, and yield its address."""
    with subprocess.Popen(
        [python, "-m", "cbmir", *command, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env=CLEAN,
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[0].rstrip("/")
        finally:
            server.terminate()


@pytest.mark.slow
def test_all_pacs_features_without_torch(wheel: Path, tmp_path: Path, tiny_model: Path, tiny_gallery: Path) -> None:
    """Use the wheel with the extras `cpu` and `dicom`, in a new environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    link_requirements(site, "cpu", "dicom")
    check_integrator(python, tmp_path, tiny_model, tiny_gallery)


def find_python(version: str) -> Path:
    """An interpreter of this version: the current one, pyenv's, or one on the PATH."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    for found in [
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"),
        shutil.which(f"python{version}"),
    ]:
        if found is not None and subprocess.run([found, "-m", "venv", "-h"], capture_output=True).returncode == 0:
            return Path(found)
    pytest.skip(f"there is no Python {version} here")


PYTHONS = pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])


@pytest.fixture
def environment(version: str, tmp_path: Path) -> Iterator[Path]:
    """The Python of an empty environment, which is deleted after the test: with PyTorch it takes gigabytes."""
    subprocess.run([find_python(version), "-m", "venv", tmp_path / "venv"], check=True, env=CLEAN)
    yield tmp_path / "venv" / "bin" / "python"
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.release
@PYTHONS
def test_what_pip_installs(
    wheel: Path, tmp_path: Path, tiny_model: Path, tiny_gallery: Path, version: str, environment: Path
) -> None:
    """Run `pip install "cbmir[cpu,dicom]"` with the package index; prints the environment's size."""
    pip = [environment, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", f"{wheel}[cpu,dicom]"], check=True, env=CLEAN)
    size = sum(path.lstat().st_size for path in (tmp_path / "venv").rglob("*") if path.is_file())
    packages = json.loads(subprocess.check_output([*pip, "list", "--format", "json"], env=CLEAN))
    print(f"\nPython {version}, cbmir[cpu,dicom]: {size / 2**20:.0f} MiB, {len(packages)} packages")  # noqa: T201
    names = {package["name"].lower() for package in packages}
    assert not {"torch", "torchvision", "lightning", "pandas", "scikit-learn", "gradio"} & names
    check_integrator(environment, tmp_path, tiny_model, tiny_gallery)


TRAIN = (
    "data phantom -n 48 --size 64 -o phantoms",
    "train phantoms/manifest.csv -o run --encoder resnet18 --image-size 64 --epochs 1",
)
QUERY = "query MODEL GALLERY IMAGE"
#: Extra -> a module that it installs, and commands of cbmir that need it.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("cbmir.runtime.engines.ort", (QUERY,)),
    "gpu": ("cbmir.runtime.engines.ort", (QUERY,)),
    "openvino": ("cbmir.runtime.engines.openvino", (QUERY,)),
    "tensorrt": ("tensorrt", ()),
    "tensorrt-rtx": ("tensorrt_rtx_bindings", ()),
    "serve": ("cbmir.runtime.serving.server", ("serve --model MODEL --gallery GALLERY",)),
    "dicom": ("cbmir.runtime.pacs.service", ("data dicom studies -o manifest.csv",)),
    "demo": ("cbmir.demo.server", ("demo MODEL GALLERY",)),
    "train": ("cbmir.training.comparison.runner", TRAIN),
    "export": ("cbmir.export.export", (*TRAIN, "export run -o trained.onnx")),
    "quantise": (
        "cbmir.export.quantize_ort",
        (*TRAIN, "export run -o trained.onnx --int8 --openvino int8 --accept-parity-loss"),
    ),
    "milvus": ("cbmir.runtime.gallery.milvus.gallery", ("index build MODEL MANIFEST -o milvus:./gallery.db",)),
    "distributed": ("ray", ("index build MODEL MANIFEST -o built --ray auto",)),
}
NEED_AN_ENGINE = {"serve", "demo", "milvus", "distributed"}
#: Extra for NVIDIA GPUs -> the engine that reports what this machine lacks.
GPU_ENGINE = {"gpu": "onnxruntime-cuda", "tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt"}


def install(python: Path, what: str) -> None:
    """Install with uv if available, which caches downloads for the next environment, else with pip."""
    pip = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
    done = subprocess.run([*pip, "-q", what], capture_output=True, text=True, env=CLEAN)
    if done.returncode and "pypi.nvidia.com" in done.stderr:
        pytest.skip("tensorrt's libraries come from pypi.nvidia.com, which cannot be reached")
    assert done.returncode == 0, done.stderr


@pytest.mark.release
@pytest.mark.parametrize("extra", EXTRAS)
@PYTHONS
def test_each_extra_works_alone(
    wheel: Path,
    tmp_path: Path,
    tiny_model: Path,
    tiny_gallery: Path,
    tiny_manifest: Path,
    environment: Path,
    extra: str,
) -> None:
    """Run `pip install "cbmir[EXTRA]"` with the package index, and the smallest commands that need the extra."""
    module, commands = EXTRAS[extra]
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "chest.dcm").write_bytes(make_dicom(PatientID="patient_01"))
    files = {
        "MODEL": tiny_model,
        "GALLERY": tiny_gallery,
        "MANIFEST": tiny_manifest,
        "IMAGE": tiny_manifest.parent / "image_20.png",
    }

    def run(*command: object) -> str:
        done = subprocess.run([environment, *command], capture_output=True, text=True, cwd=tmp_path, env=CLEAN)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    install(environment, f"{wheel}[{extra}]")
    report = json.loads(run("-m", "cbmir", "doctor", "--json"))
    assert extra not in report["extras"] or not report["extras"][extra]["missing"]
    assert not report["problems"]
    if extra in GPU_ENGINE:
        engine = report["engines"][GPU_ENGINE[extra]]
        assert engine["loads"] or "GPU" in engine["why"] or "driver" in engine["why"], engine
    run("-c", f"import {module}")
    if extra in NEED_AN_ENGINE:
        install(environment, f"{wheel}[cpu]")
    for command in commands:
        words = [files.get(word, word) for word in command.split()]
        if words[0] in ("serve", "demo"):
            with served(environment, tmp_path, *words) as url, urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.status == 200
        else:
            run("-m", "cbmir", *words)
