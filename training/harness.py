"""Training with Lightning, from a manifest to a finished RUN folder.

Checkpoints survive a killed process and a full disk, and the RUN folder may be moved.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L  # noqa: N812 -- the name that its documentation uses
import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

from cbmir.errors import RunError, SplitError, TrainingError
from cbmir.files import is_empty, replacing
from cbmir.manifest import Manifest
from cbmir.training import metrics
from cbmir.training.config import TrainConfig, resolve_precision
from cbmir.training.dataset import TrainingImages, cache_folder, cached_images, label_array, split_rows, split_targets
from cbmir.training.distillation import build_student, load_teacher
from cbmir.training.encoders.stages import finer_stage
from cbmir.training.evaluate import on_fastest_device
from cbmir.training.model import RetrievalModel
from cbmir.training.run import RunFolder, build_model, load_checkpoint, training_manifest
from cbmir.training.splits import EVERY_IMAGE
from cbmir.training.validation import MEASURED, HeldOut, Validation, write_card

log = logging.getLogger("cbmir")

#: Share of all steps during which the learning rate of a cosine schedule rises.
_WARM_UP = 0.07
_HEAD = ("model.encoder.projection.", "model.head.", "loss.")


def train(config: TrainConfig, run: Path, *, resume: bool = False, folds: HeldOut | None = None) -> RunFolder:
    """Train a model, and finish its run with the best checkpoint (by AUC and corrected nDCG on validation), thresholds,
    calibration and card.

    Args:
        run: A new or empty folder, or the folder of a stopped run.
        resume: Continue from the last complete epoch; the result is the same as without the interruption.
        folds: Cross-validation results of such a model, only if every image trains (`config.fold` is `all`). The last
            epoch is then kept.

    Raises:
        RunError: The folder is in use, or the run started with other options.
        SplitError: A split has no images or no positive labels, or shares a patient with another.
        ManifestError: An image cannot be read.
        EncoderError: The encoder or its weights do not fit.
        TrainingError: The loss became NaN.
    """
    folder = RunFolder(run)
    if first_process():
        _check_folder(folder, config, resume)
    if resume and folder.card.exists():
        log.info("%s is already finished.", run)
        return folder
    if (config.fold == EVERY_IMAGE) is (folds is None):
        raise RunError("expected a fold such as 1/5; 'cbmir final' trains on every image")
    manifest = training_manifest(config)
    _check_learnable(manifest, held_out=folds is None)
    L.seed_everything(config.seed, verbose=False)
    teacher = load_teacher(config, manifest) if config.distill else None
    weights = "none" if folder.last.exists() else config.weights
    if teacher is None:
        model, loss = build_model(config, split_targets(manifest, "train"), weights=weights)
        if config.linear_fit:
            finer_stage(model.encoder)  # fail now, not after training
    else:
        model, loss = build_student(config, teacher, weights=weights)
    images = cached_images(manifest, config.preprocess, cache_folder(config.manifest))  # last: may take an hour
    data = TrainingImages(
        images, np.array(split_rows(manifest, "train")), label_array(manifest), config.preprocess, config.seed,
        full=config.augment == "full",
    )  # fmt: skip
    model.to(memory_format=torch.channels_last)  # 1.6 times as fast on a CPU, and uses tensor cores on a GPU
    validation = Validation(config, manifest, images, teacher, folds)
    task = RetrievalTask(model, loss, validation, folder)
    trainer = _trainer(config, folder)
    if teacher is not None:  # Lightning only moves the student
        teacher.model.to(trainer.strategy.root_device).to(memory_format=torch.channels_last)
    log.info(
        "Training %s (weights: %s) with loss %s on %d images of %d patients; %s, %s.",
        config.encoder, config.weights, config.loss, len(data), len({r.patient_id for r in manifest.split("train")}),
        trainer.strategy.root_device.type, resolve_precision(config.precision),
    )  # fmt: skip
    if first_process():  # only now, so that rejected options do not create a run
        folder.write_config(config)
    with warnings.catch_warnings():
        # Images come decoded from a memory map, so worker processes are not needed.
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        warnings.filterwarnings("ignore", ".*number of training batches.*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", ".*Checkpoint directory .* exists and is not empty.*")
        # Lightning 2.6 uses features that torch 2.14 and torchmetrics have deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        last = folder.last if folder.last.exists() else None
        if last is None or not _stopped_early(last):
            try:
                trainer.fit(task, _loader(data, config, trainer), ckpt_path=last, weights_only=True)
            except SystemExit:  # Lightning turns Ctrl-C into status 1, and SIGTERM into 0
                raise KeyboardInterrupt from None
    if trainer.is_global_zero:
        model.load_state_dict(folder.best_state())
        on_fastest_device(model)  # Lightning moved it back to the CPU
        if config.linear_fit:
            model = validation.fitted(model)
            folder.write_fitted(model)
        write_card(folder, validation, model)
    return folder


def _rise_and_fall(share: float) -> float:
    """Return the learning rate after a share of all steps, relative to its peak: a linear rise, then a cosine decay."""
    if share < _WARM_UP:
        return share / _WARM_UP
    return max((1 + math.cos(math.pi * min((share - _WARM_UP) / (1 - _WARM_UP), 1))) / 2, 1e-3)


def first_process() -> bool:
    """Return whether this process writes files. Lightning runs the same command once for each device."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


class RetrievalTask(L.LightningModule):
    """The paper's training step (Algorithm 1), with `Validation` after each epoch. If there is a teacher, its pooled
    features replace the labels as the targets of the loss."""

    def __init__(self, model: RetrievalModel, loss: torch.nn.Module, validation: Validation, folder: RunFolder) -> None:
        super().__init__()
        self.model, self.loss, self.validation, self.folder = model, loss, validation, folder
        self.config, self.teacher = validation.config, validation.teacher
        self.average = None
        if self.config.average:
            self.average = AveragedModel(model, multi_avg_fn=self._move, use_buffers=True).requires_grad_(False)
        self.started = 0.0

    def configure_optimizers(self) -> OptimizerLRScheduler:
        config, groups = self.config, list[dict[str, Any]]()
        for is_head in (False, True):
            own = [p for name, p in self.named_parameters() if p.requires_grad and name.startswith(_HEAD) is is_head]
            rate = config.lr * (config.head_rate if is_head else 1)
            # Weight decay applies to weights only, not to one-dimensional scales and shifts.
            groups += [
                {"params": [p for p in own if (p.ndim > 1) is decays], "lr": rate,
                 "weight_decay": config.weight_decay if decays else 0.0}
                for decays in (True, False)
            ]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.999))
        if config.schedule == "constant":
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches) * config.epochs // int(self.trainer.max_epochs or 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rise_and_fall(step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _move(self, average: Sequence[Tensor], current: Sequence[Tensor], updates: Tensor | int) -> None:
        """Update the moving average. Its window is short at first, so that it soon forgets the initial weights."""
        decay = min(self.config.average, (1 + int(updates)) / (10 + int(updates)))
        for own, now in zip(average, current, strict=True):
            # Integer buffers are copied: indices and counts have no average.
            own.lerp_(now, 1 - decay) if own.is_floating_point() else own.copy_(now)

    def on_train_batch_end(self, *_: object) -> None:
        if self.average is not None:
            self.average.update_parameters(self.model)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        torch.manual_seed(self.config.seed + (self.global_step << 32))  # dropout is the same in a resumed run
        image, targets = batch
        if self.teacher is not None:
            targets = self.teacher.pooled(image)
        embedding, pooled, _ = self.model.features(image)
        # The loss is computed in float32 at any precision (docs/method.md, "The loss").
        with torch.autocast(image.device.type, enabled=False):
            loss: Tensor = self.loss(self.model.head, pooled.float(), embedding.float(), targets)
        if not torch.isfinite(loss):
            raise TrainingError(
                f"the loss became {loss.item()} in epoch {self.current_epoch}; try a lower --lr or --precision 32"
            )
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(image), sync_dist=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.started = time.time()

    def on_train_epoch_end(self) -> None:
        judged = self.model if self.average is None else cast(RetrievalModel, self.average.module)
        for name, value in self.validation.measure(judged).items():
            # Average over the processes, so that they agree on the best epoch.
            self.log(name, torch.tensor(value, device=self.device), prog_bar=True, sync_dist=True)
        known = self.trainer.callback_metrics
        measured = {name: float(known[name]) for name in ("train_loss", *MEASURED) if name in known}
        if self.trainer.is_global_zero:
            seconds = time.time() - self.started
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            row = {"epoch": self.current_epoch, "lr": f"{rate:.3g}", "seconds": f"{seconds:.1f}"}
            self.folder.append_epoch(row | {name: f"{value:.6f}" for name, value in measured.items()})
            self.folder.draw_curves()
            shown = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
            log.info("epoch %d: %s (%.0f s)", self.current_epoch, shown, seconds)


class EpochSampler(DistributedSampler[Any]):
    """A sampler that shuffles by seed and epoch across all processes, and passes the epoch to the dataset."""

    dataset: TrainingImages

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.dataset.epoch = epoch


class MovableCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that remembers the best epoch after the run's folder has moved; Lightning would forget it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        file = str(Path(str(self.dirpath)) / f"{self.filename}.ckpt")
        here = {"dirpath": self.dirpath, "best_model_path": file, "kth_best_model_path": file}
        scores = list(state_dict["best_k_models"].values())
        kept = {file: scores[0]} if scores else {}
        super().load_state_dict(state_dict | here | {"best_k_models": kept})


class ReplacingCheckpointIO(TorchCheckpointIO):
    """A checkpoint writer that writes beside the file, then renames. Lightning writes to the system's temporary folder;
    moving the file from there to another file system is a copy, which a kill can interrupt."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            torch.save(checkpoint, temporary)


def _check_folder(folder: RunFolder, config: TrainConfig, resume: bool) -> None:
    if not folder.config.exists():
        if not is_empty(folder.path):
            raise RunError(f"{folder.path}: expected a new or empty folder for the run, found files; choose another -o")
        if resume:
            log.info("%s is new: nothing to resume, starting.", folder.path)
        return
    if not resume:
        raise RunError(
            f"{folder.path}: this folder already holds a run; continue it with --resume, or choose another -o"
        )
    differences = folder.read_config().differences(config)
    if differences:
        raise RunError(
            f"{folder.path}: --resume needs the options that the run began with; different: {'; '.join(differences)}"
        )


def _check_learnable(manifest: Manifest, *, held_out: bool) -> None:
    for split in ("train", "val") if held_out else ("train",):
        if not manifest.split(split).rows:
            raise SplitError(f"expected images in split {split!r}, found none; assign splits, or use --fold 1/5")
    if not (label_array(manifest.split("train")) == 1).any():
        raise SplitError("expected positive labels in split 'train', found none; there is nothing to learn")
    if held_out and not metrics.positives(label_array(manifest.split("val"))).any():
        raise SplitError("expected positive labels in split 'val', found none; the best epoch is chosen by them")


def _trainer(config: TrainConfig, folder: RunFolder) -> L.Trainer:
    terminal = sys.stderr.isatty()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    checkpoint: dict[str, Any] = {
        "dirpath": folder.checkpoints, "save_on_train_epoch_end": True, "enable_version_counter": False,
    }  # fmt: skip
    measured = config.fold != EVERY_IMAGE
    choice = MEASURED[-1] if measured else "epoch"  # without validation, keep the last epoch
    stopping = EarlyStopping(MEASURED[-1], mode="max", patience=config.patience, check_on_train_epoch_end=True)
    return L.Trainer(
        max_epochs=config.stop_after or config.epochs,
        devices=config.devices if config.devices == "auto" else int(config.devices),
        accelerator="auto",
        precision=resolve_precision(config.precision),
        gradient_clip_val=5.0,
        use_distributed_sampler=False,
        callbacks=[
            MovableCheckpoint(filename="best", monitor=choice, mode="max", **checkpoint),
            *([stopping] if measured else []),
            # after the others, so that last.ckpt holds their state
            MovableCheckpoint(filename="last", monitor=None, **checkpoint),
            *([TQDMProgressBar()] if terminal else []),
        ],
        plugins=[ReplacingCheckpointIO()],
        logger=False,
        enable_progress_bar=terminal,
        enable_model_summary=False,
    )


def _stopped_early(last: Path) -> bool:
    """Return whether training had stopped early when this checkpoint was written."""
    states = load_checkpoint(last)["callbacks"]
    return any(state["stopped_epoch"] > 0 for name, state in states.items() if name.startswith("EarlyStopping"))


def _loader(data: TrainingImages, config: TrainConfig, trainer: L.Trainer) -> DataLoader[Any]:
    sampler = EpochSampler(data, trainer.world_size, trainer.global_rank, shuffle=True, seed=config.seed)
    size = -(-config.batch_size // trainer.world_size)  # a batch is divided among all processes
    # Drop a last batch of a single image: it has no batch statistics.
    return DataLoader(data, size, sampler=sampler, drop_last=len(sampler) % size == 1)
