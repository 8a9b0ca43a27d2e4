"""The models that come with cbmir, by name."""

from __future__ import annotations

from pathlib import Path

#: The file beside this module that each name stands for.
MODELS = {"starter": "starter.onnx"}


def find_model(model: str | Path) -> Path:
    """The file of a model that comes with cbmir, where one of its names is given; any other path as it is.

    A file or folder of that name in the working directory goes first.
    """
    path = Path(model)
    return model_file(str(model)) if str(model) in MODELS and not path.exists() else path


def model_file(name: str) -> Path:
    """Where the file of one of MODELS lies."""
    return Path(__file__).with_name(MODELS[name])
