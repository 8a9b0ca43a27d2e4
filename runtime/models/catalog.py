"""The models that come with cbmir, by name."""

from __future__ import annotations

from pathlib import Path

#: Names of models, and the files beside this module.
MODELS = {"starter": "starter.onnx"}


def find_model(model: str | Path) -> Path:
    """Return the file of a model that comes with cbmir, given its name; any other path is returned unchanged.

    A file or folder of that name in the working directory comes first.
    """
    path = Path(model)
    return model_file(str(model)) if str(model) in MODELS and not path.exists() else path


def model_file(name: str) -> Path:
    """Return the path of one of MODELS."""
    return Path(__file__).with_name(MODELS[name])
