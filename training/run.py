"""The RUN folder: config.json, checkpoints/{last,best}.ckpt, metrics.csv, curves.png, and card.json when finished."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbmir.card import ModelCard
from cbmir.errors import CardError, RunError
from cbmir.files import write_json
from cbmir.manifest import Manifest, read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.training.config import TrainConfig, proxy_counts
from cbmir.training.dataset import label_array, training_targets
from cbmir.training.encoder import build_encoder, encoder_of
from cbmir.training.losses import HASHING_LOSSES, LOSSES, ONE_PROXY_LOSSES
from cbmir.training.losses.targets import with_negative_class
from cbmir.training.model import HashHead, HashingModel, LinearHead, ProxyHead, RetrievalModel
from cbmir.training.splits import check_splits, fold_splits


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of a run lie."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def card(self) -> Path:
        return self.path / "card.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last(self) -> Path:
        return self.checkpoints / "last.ckpt"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best.ckpt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    def read_config(self) -> TrainConfig:
        """Raises RunError when the folder is no run."""
        try:
            return TrainConfig.from_json(json.loads(self.config.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self.path}: expected a folder made by 'cbmir train', found {error}") from error

    def write_config(self, config: TrainConfig) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config, config.to_json())

    def read_card(self) -> ModelCard:
        """Raises RunError when the run is not finished."""
        if not self.card.exists():
            raise RunError(f"{self.path}: this run is not finished; finish it with 'cbmir train … --resume'")
        return ModelCard.loads(self.card.read_text("utf-8"), str(self.card))


def training_manifest(config: TrainConfig) -> Manifest:
    """The manifest that a run trains on, with the splits of its fold. Raises RunError when the table has changed."""
    manifest = read_manifest(config.manifest)
    if manifest.fingerprint != config.manifest_fingerprint:
        raise RunError(
            f"{config.manifest}: the manifest has changed since this run began; restore it or start another run"
        )
    return with_fold(manifest, config.fold)


def with_fold(manifest: Manifest, fold: str) -> Manifest:
    """The manifest with the splits of fold "i/n", or as it is for an empty string; always patient-disjoint."""
    if fold:
        number, _, folds = fold.partition("/")
        if not (number.isdigit() and folds.isdigit()):
            raise RunError(f"expected a fold such as 1/5, found {fold!r}")
        patients = [row.patient_id for row in manifest]
        manifest = manifest.with_splits(fold_splits(patients, fold=int(number), folds=int(folds)))
    check_splits(manifest)
    return manifest


def build_model(config: TrainConfig, targets: Tensor, *, weights: str) -> tuple[RetrievalModel, torch.nn.Module]:
    """The model and its loss; `targets` are the training set's, [N, C] in {0, 1, NaN}."""
    encoder, dim = build_encoder(config.encoder, weights)
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
    """The best model of a finished run, in evaluation mode on the CPU, with its card. Raises RunError."""
    folder = RunFolder(run)
    config, card = folder.read_config(), folder.read_card()
    if card.head == "hash":
        raise RunError(f"{run}: a hashing model ({config.loss}) is the benchmark's alone; use a loss of 'cbmir train'")
    dim = card.embedding_dim
    head: ProxyHead | LinearHead
    if card.head == "linear":
        head = LinearHead(dim, len(card.labels))
    else:
        head = ProxyHead(dim, card.proxies_per_class, len(card.labels), card.sigma)
    model = RetrievalModel(encoder_of(card), head)
    model.load_state_dict(best_state(folder))
    model.eval()
    if embedding_fingerprint(model, card.preprocess) != card.weights:
        raise CardError(f"{folder.best}: the weights are not those that {folder.card} describes; train the run again")
    return model, card, config


def best_state(folder: RunFolder) -> dict[str, Any]:
    """The model's state dict from best.ckpt. Raises RunError when there is none or it is damaged."""
    try:
        checkpoint = torch.load(folder.best, map_location="cpu", weights_only=True)
        state = checkpoint["state_dict"]
    except Exception as error:  # torch.load raises whatever the unpickler meets
        raise RunError(f"{folder.best}: expected a checkpoint, found {type(error).__name__}: {error}") from error
    return {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}


def embedding_fingerprint(model: RetrievalModel, spec: PreprocessSpec) -> str:
    """SHA-256 of the encoder's weights and of the preprocessing: the name of the embedding space."""
    digest = hashlib.sha256(json.dumps(spec.to_json(), sort_keys=True).encode())
    for name, value in sorted(model.encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def split_rows(manifest: Manifest, *splits: str) -> list[int]:
    """Positions of the rows of the named splits."""
    return [position for position, row in enumerate(manifest.rows) if row.split in splits]


def split_targets(manifest: Manifest, *splits: str) -> Tensor:
    """Training targets of the named splits, float32 [N, C] in {0, 1, NaN}."""
    return training_targets(label_array(manifest)[split_rows(manifest, *splits)])
