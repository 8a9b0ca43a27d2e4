"""`cbmir doctor`: report what is installed, what works here, and how to install the rest.

Broken packages do not stop it: each becomes a line of the report.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from cbmir import __version__
from cbmir.choices import ENGINES
from cbmir.cli.options import command, json_option, print_answer
from cbmir.errors import EngineError, MissingDependencyError, installing

EXTRAS = (
    "cpu", "gpu", "openvino", "tensorrt", "tensorrt-rtx", "dicom", "serve", "train", "export", "quantise",
    "demo",
)  # fmt: skip
#: Other builds of a package, which satisfy the same requirement.
_STANDS_IN = {"onnxruntime": "onnxruntime-gpu"}
#: Matrix instructions of processors by their names in /proc/cpuinfo, and what they speed up.
_MATRIX = {
    "amx_bf16": "bfloat16 in tiles: OpenVINO bf16 at its best",
    "amx_int8": "int8 in tiles: int8 files at their best",
    "avx512_bf16": "bfloat16 in vectors: OpenVINO bf16",
    "avx512_vnni": "int8 in vectors: int8 files",
}


@command("cbmir doctor", "cbmir doctor --json > doctor.json")
@json_option
def doctor(as_json: bool) -> None:
    """Show what is installed here, which engines and devices work, and how to install what is missing."""
    report = examine()
    print_answer(as_json, report, text(report))


def examine() -> dict[str, Any]:
    """Return the report of `cbmir doctor` in JSON types.

    `engines` are the results of `probe`, which `auto` uses too; `codecs` are DICOM transfer syntaxes, each with whether
    it can be decoded; `problems` are packages besides the engines that are installed but do not import or work. Raises
    MissingDependencyError if cbmir is on the path but not installed.
    """
    problems: list[str] = []
    unknown = {"name": platform.processor() or platform.machine(), "matrix": {}}
    return {
        "cbmir": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "extras": {
            extra: {"missing": list(_missing("cbmir", extra)), "install": installing(extra)} for extra in EXTRAS
        },
        "packages": _packages(),
        "engines": _ask("cbmir.runtime.engines.registry", _engines, {}, problems),
        "processor": _ask("cbmir.machine", _processor, unknown, problems),
        "gpu": _ask("cbmir.runtime.engines.nvidia", _gpu, "", problems),
        "devices": _ask("torch", _devices, [], problems),
        "codecs": _ask("pydicom", _codecs, {}, problems),
        "problems": problems,
    }


def text(report: dict[str, Any]) -> str:
    """Return the report of `examine` as text."""
    lines = [f"cbmir {report['cbmir']}, Python {report['python']}, {report['platform']}", "", "Extras"]
    for name, extra in report["extras"].items():
        wanted = f"missing {', '.join(extra['missing'])}: {extra['install']}"
        lines.append(f"  {name:<12} {wanted if extra['missing'] else 'complete'}")
    lines += ["", "Engines"]
    for name, engine in report["engines"].items():
        lines.append(f"  {name:<20} {'loads, ' + engine['library'] if engine['loads'] else engine['why']}")
    processor = report["processor"]
    lines += ["", "Processor and GPU", f"  {processor['name']}"]
    matrix = [f"  {name:<12} {gain}" for name, gain in processor["matrix"].items()]
    lines += matrix or ["  no matrix instructions known"]
    lines.append(f"  {report['gpu'] or 'no NVIDIA GPU with a driver'}")
    lines += ["", "PyTorch devices", *(f"  {device}" for device in report["devices"] or ["none"])]
    lines += ["", "DICOM compression"]
    for name, is_decoded in report["codecs"].items():
        lines.append(f"  {'decoded' if is_decoded else 'no decoder':<12} {name}")
    if not report["codecs"]:
        lines.append("  nothing is decoded: pydicom or imagecodecs does not work")
    lines += ["", "Packages", *(f"  {name:<24} {version}" for name, version in report["packages"].items())]
    if report["problems"]:
        lines += ["", "Problems", *(f"  {problem}" for problem in report["problems"])]
    return "\n".join(lines)


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of an extra of an installed distribution; "" stands for those that always apply."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"{distribution} is on Python's path but not installed; in its repository: pip install -e ."
        ) from error
    for one in map(Requirement, requirements):
        always, wanted = (one.marker is None or one.marker.evaluate({"extra": name}) for name in ("", extra))
        if wanted and always == (extra == ""):
            yield one


def _missing(distribution: str, extra: str) -> Iterator[str]:
    """Yield the requirements of an extra (and of its nested extras) that are missing or of a wrong version."""
    for one in _requirements(distribution, extra):
        version = _version(one.name)
        if version is None:
            yield one.name
        elif not one.specifier.contains(version, prereleases=True):
            yield f"{one.name}{one.specifier} (found {version})"
        else:
            for nested in sorted(one.extras):
                yield from _missing(one.name, nested)


def _version(name: str) -> str | None:
    for candidate in filter(None, (name, _STANDS_IN.get(name))):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def _packages() -> dict[str, str]:
    """Return name -> version of the installed packages that cbmir or one of its extras requires."""
    names = [one.name for extra in ("", *EXTRAS) for one in _requirements("cbmir", extra)]
    return {name: version for name in sorted(set(names)) if (version := _version(name))}


def _ask(module: str, question: Callable[[Any], Any], otherwise: Any, problems: list[str]) -> Any:
    """Call `question` with a module. Return `otherwise` if the module is missing, or broken (added to `problems`)."""
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  a broken package may raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == module):
            problems.append(f"{module} does not import: {error}")
        return otherwise
    try:
        return question(loaded)
    except Exception as error:  # noqa: BLE001  as above
        problems.append(f"{module} does not work: {type(error).__name__}: {error}")
        return otherwise


def _engines(available: Any) -> dict[str, dict[str, Any]]:
    probed = {name: available.probe(name) for name in ENGINES if name != "auto"}
    return {name: {"loads": not why, "why": why, "library": library} for name, (library, why) in probed.items()}


def _processor(machine: Any) -> dict[str, Any]:
    """Return the processor's name, and what its matrix instructions speed up."""
    found = machine.describe_machine()
    matrix = {feature: gain for feature, gain in _MATRIX.items() if feature in found["features"]}
    return {"name": found["processor"], "matrix": matrix}


def _gpu(nvidia: Any) -> str:
    """Return a description of the first NVIDIA GPU; "" without one."""
    try:
        gpu = nvidia.current_gpu()
    except EngineError:
        return ""
    return f"{gpu.name}, {gpu.target}, {gpu.memory / 2**30:.0f} GiB"


def _devices(torch: Any) -> list[str]:
    cuda = [f"cuda:{number} {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _codecs(pydicom: Any) -> dict[str, bool]:
    """Return compressed transfer syntax -> whether it can be decoded. (Uncompressed ones only need pydicom.)"""
    from pydicom.uid import UID

    from cbmir.runtime.imaging.dicom_pixels import COMPRESSED

    imagecodecs = importlib.import_module("imagecodecs")
    return {UID(syntax).name: bool(getattr(imagecodecs, codec).available) for syntax, codec in COMPRESSED.items()}
