"""The files that an export leaves in a folder: which are models, and which of them belong together by their stem."""

from __future__ import annotations

import re
from pathlib import Path

#: What `cbmir export` ends the names of its models in, the longer ones first where one ends in another.
ENDINGS = (".plan", ".fp16.onnx", ".int8.onnx", ".openvino-bf16.xml", ".openvino-int8.xml", ".onnx")


def model_files(folder: Path) -> list[Path]:
    """The model files of a folder by their names; hidden ones are of an export that is under way."""
    files = (file for file in folder.iterdir() if not file.name.startswith("."))
    return sorted(file for file in files if file.name.endswith(ENDINGS))


def ending(file: Path) -> str:
    """That of ENDINGS in which the name ends, or else its suffix."""
    return next((one for one in ENDINGS if file.name.endswith(one)), file.suffix)


def stem(file: Path) -> str:
    """The name without its ending: model, of model.fp16.onnx and of model.sm86.plan."""
    name = file.name.removesuffix(ending(file))
    return re.sub(r"\.sm\d+$", "", name) if file.suffix == ".plan" else name
