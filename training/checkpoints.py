"""Checkpoints that survive a kill, a full disk and a folder that was moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from cbmir.files import replacing


def callbacks(folder: Path, patience: int) -> list[Callback]:
    """best.ckpt by validation nDCG, last.ckpt after every epoch, and the end when nothing gets better."""
    common: dict[str, Any] = {"dirpath": folder, "save_on_train_epoch_end": True, "enable_version_counter": False}
    return [
        MovableCheckpoint(filename="best", monitor="val_ndcg", mode="max", **common),
        # after the stopping, so that last.ckpt knows of it
        EarlyStopping("val_ndcg", mode="max", patience=patience, check_on_train_epoch_end=True),
        MovableCheckpoint(filename="last", monitor=None, **common),
    ]


class MovableCheckpoint(ModelCheckpoint):
    """Keeps what it knows of the best epoch when the run's folder has been moved; Lightning would forget it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        file = str(Path(str(self.dirpath)) / f"{self.filename}.ckpt")
        here = {"dirpath": self.dirpath, "best_model_path": file, "kth_best_model_path": file}
        scores = list(state_dict["best_k_models"].values())
        kept = {file: scores[0]} if scores else {}
        super().load_state_dict(state_dict | here | {"best_k_models": kept})


class ReplacingCheckpointIO(TorchCheckpointIO):
    """Writes beside the file, then renames. Lightning's own way goes through the system's folder for temporary files,
    and the move from there to another file system is a copy that a kill can cut off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save(checkpoint, temporary)


def stopped_early(last: Path) -> bool:
    """Whether training had ended for want of progress when this checkpoint was written."""
    states = torch.load(last, map_location="cpu", weights_only=True)["callbacks"]
    return any(state["stopped_epoch"] > 0 for name, state in states.items() if name.startswith("EarlyStopping"))
