"""The RUN folder (config.json, checkpoints/, metrics.csv, curves.png, and card.json when finished), and the run's
manifest, model and loss."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbmir.card import ModelCard
from cbmir.errors import CardError, ManifestError, RunError, require
from cbmir.files import replacing, write_json
from cbmir.input_file import open_input, read_json, read_text
from cbmir.manifest import Manifest, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.text_table import read_table
from cbmir.training.config import TrainConfig, proxy_counts
from cbmir.training.encoders.encoder import build_encoder, encoder_of, grey_range_of
from cbmir.training.losses import HASHING_LOSSES, LOSSES, ONE_PROXY_LOSSES
from cbmir.training.losses.targets import with_negative_class
from cbmir.training.model import HashHead, HashingModel, LinearHead, ProxyHead, RetrievalModel, head_of
from cbmir.training.splits import with_fold

COLUMNS = ("epoch", "train_loss", "val_auc", "val_corrected_ndcg", "val_choice", "lr", "seconds")


class RunFolder:
    """The files of a run, with methods that read and write them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.card = path / "config.json", path / "card.json"
        self.checkpoints = path / "checkpoints"
        self.last, self.best = self.checkpoints / "last.ckpt", self.checkpoints / "best.ckpt"
        self.fitted = self.checkpoints / "fitted.pt"
        self.metrics, self.curves = path / "metrics.csv", path / "curves.png"

    def read_config(self) -> TrainConfig:
        """Read the run's options. Raises RunError if the folder is not a run."""
        try:
            return TrainConfig.from_json(read_json(self.config))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self.path}: expected a folder made by 'cbmir train', found {error}") from error

    def write_config(self, config: TrainConfig) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config, asdict(config))

    def read_card(self) -> ModelCard:
        """Read the card of a finished run. Raises RunError for an unfinished one."""
        if not self.card.exists():
            raise RunError(f"{self.path}: this run is not finished; finish it with 'cbmir train … --resume'")
        try:
            return ModelCard.loads(read_text(self.card), str(self.card))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.card}: expected the card of a finished run, found {error}") from error

    def best_state(self) -> dict[str, Any]:
        """Read the trained network's state dict from best.ckpt: the moving average of the weights if the run keeps one.

        Raises RunError if the file is missing or damaged.
        """
        state = load_checkpoint(self.best)["state_dict"]
        averaged = any(key.startswith("average.module.") for key in state)
        prefix = "average.module." if averaged else "model."
        return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

    def write_fitted(self, model: RetrievalModel) -> None:
        """Save the finished model of a run with a linear fit."""
        with replacing(self.fitted) as temporary:
            torch.save(model.state_dict(), temporary)

    def finished_state(self, config: TrainConfig) -> dict[str, Any]:
        """Read the finished model's state dict: the linear fit's, or `best_state`. Raises RunError like it."""
        return load_checkpoint(self.fitted) if config.linear_fit else self.best_state()

    def read_epochs(self) -> list[dict[str, str]]:
        """Read the rows of metrics.csv; values not measured are empty. Raises RunError for any other table."""
        try:
            rows = [dict(zip(COLUMNS, row, strict=True)) for row in read_table(self.metrics, recognise=False).rows]
            _ = [(int(row["epoch"]), *map(float, filter(None, row.values()))) for row in rows]
        except (ManifestError, ValueError) as error:
            raise RunError(f"{self.metrics}: expected the epochs of a run, found another table: {error}") from error
        return rows

    def append_epoch(self, values: dict[str, Any]) -> None:
        """Add the row of an epoch, replacing rows of this and later epochs that a stopped run left behind."""
        rows = self.read_epochs() if self.metrics.exists() else []
        rows = [row for row in rows if int(row["epoch"]) < values["epoch"]]
        with replacing(self.metrics) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows([*rows, values])

    def draw_curves(self) -> None:
        """Plot the loss, and AUC and corrected nDCG on the validation split, by epoch; mark the chosen epoch.

        If every image trains, plot only the loss.
        """
        require("matplotlib", "train")
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = self.read_epochs()
        epochs = [int(row["epoch"]) for row in rows]
        held_out = bool(rows[0]["val_choice"])
        figure = Figure(figsize=(9 if held_out else 4.5, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, *more = figure.subplots(1, 1 + held_out, squeeze=False)[0]
        left.plot(epochs, [float(row["train_loss"]) for row in rows], "k.-")
        left.set(xlabel="epoch", ylabel="training loss")
        for right in more:
            ndcg = [float(row["val_corrected_ndcg"]) for row in rows]
            right.plot(epochs, ndcg, "k.-", label="corrected nDCG")
            right.plot(epochs, [float(row["val_auc"]) for row in rows], "s--", color="tab:blue", ms=3, label="AUC")
            best = max(range(len(rows)), key=lambda i: float(rows[i]["val_choice"]))
            right.axvline(epochs[best], color="grey", lw=0.8)
            note = f"chosen: {ndcg[best]:.3f}"
            right.annotate(note, (epochs[best], ndcg[best]), textcoords="offset points", xytext=(4, -12))
            right.set(xlabel="epoch", ylabel="on the validation split", ylim=(min(0, *ndcg), 1))
            right.legend(loc="lower right")
        with replacing(self.curves) as temporary:
            figure.savefig(temporary, dpi=120, format="png")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint: tensors and plain values, never code. Raises RunError if the file is not one."""
    try:
        with open_input(path) as stream:
            loaded: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
        return loaded
    except Exception as error:  # torch.load may raise anything
        raise RunError(f"{path}: expected a checkpoint, found {type(error).__name__}: {error}") from error


def training_manifest(config: TrainConfig) -> Manifest:
    """Read the manifest of a run, with the splits of its fold. Raises RunError if the table has changed."""
    manifest = read_manifest(config.manifest)
    if manifest.fingerprint != config.manifest_fingerprint:
        raise RunError(
            f"{config.manifest}: the manifest has changed since this run began; restore it or start another run"
        )
    return with_fold(manifest, config.fold)


def encoder_for(config: TrainConfig, weights: str) -> tuple[torch.nn.Module, int]:
    """Build a run's encoder with `weights` (`build_encoder`); return it and its dimension."""
    grey_range = grey_range_of(config.encoder, config.grey_range)
    return build_encoder(config.encoder, weights, image_size=config.image_size, grey_range=grey_range)


def build_model(config: TrainConfig, targets: Tensor, *, weights: str) -> tuple[RetrievalModel, torch.nn.Module]:
    """Build the model and its loss for the training set's `targets`, [N, C] in {0, 1, NaN}."""
    encoder, dim = encoder_for(config, weights)
    loss = LOSSES[config.loss](targets, negative=config.negative_proxies, balanced=config.balanced)
    labels = len(config.labels)
    if config.loss in HASHING_LOSSES:
        return HashingModel(encoder, HashHead(dim, config.code_bits, labels, classifier=config.loss == "osdh")), loss
    if config.loss == "bce":
        return RetrievalModel(encoder, LinearHead(dim, labels)), loss
    classes = with_negative_class(targets) if config.negative_proxies else targets
    counts = proxy_counts("1" if config.loss in ONE_PROXY_LOSSES else config.proxies_per_class, classes)
    return RetrievalModel(encoder, ProxyHead(dim, counts, labels, config.sigma)), loss


def load_model(run: Path) -> tuple[RetrievalModel, ModelCard, TrainConfig]:
    """Load the model of a finished run, in evaluation mode on the CPU, with its card and options.

    Raises:
        RunError: The folder is not a finished run, or holds a hashing model.
        CardError: The weights do not match the card.
    """
    folder = RunFolder(run)
    config, card = folder.read_config(), folder.read_card()
    if card.head == "hash":
        raise RunError(f"{run}: a hashing model ({config.loss}) is only for the benchmark; use a loss of 'cbmir train'")
    model = RetrievalModel(encoder_of(card), head_of(card))
    model.load_state_dict(folder.finished_state(config))
    model.eval()
    if embedding_fingerprint(model, card.preprocess) != card.weights:
        raise CardError(f"{folder.best}: the weights are not those that {folder.card} describes; train the run again")
    return model, card, config


def embedding_fingerprint(model: RetrievalModel, spec: PreprocessSpec) -> str:
    """Return the SHA-256 of the encoder's weights and the preprocessing, which identifies the embedding space."""
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode())
    for name, value in sorted(model.encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
