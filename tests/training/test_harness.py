"""Training on images that can be learnt in seconds: finished, resumed and refused runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from cbmir.choices import RECIPES
from cbmir.errors import CardError, EncoderError, RunError, SplitError, TrainingError
from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.config import TrainConfig, proxy_counts, resolve_precision
from cbmir.training.harness import RetrievalTask, train
from cbmir.training.run import RunFolder, build_model, load_model
from cbmir.training.splits import with_fold
from cbmir.training.validation import MEASURED, Validation
from stopped_training import train_until


def config(manifest: Path, **options: Any) -> TrainConfig:
    table = read_manifest(manifest)
    small = {"encoder": "timm:test_resnet", "image_size": 32, "batch_size": 8, "epochs": 3, "lr": 1e-2, "devices": "1"}
    own = {"manifest": str(manifest), "manifest_fingerprint": table.fingerprint, "labels": table.labels.names}
    return TrainConfig(**(own | small | options))


@pytest.fixture(scope="module")
def finished(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(config(squares, epochs=6), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SIGTERMException])
def test_a_stopped_run_is_an_interruption(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The command then says so, and exits with status 130. Lightning would exit with 1, and after SIGTERM with 0."""

    def stop(task: RetrievalTask, batch: object) -> None:
        raise error

    monkeypatch.setattr(RetrievalTask, "training_step", stop)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config(squares), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from now on


def test_a_finished_run_has_the_documented_files(finished: RunFolder) -> None:
    names = sorted(p.relative_to(finished.path).as_posix() for p in finished.path.rglob("*") if p.is_file())
    assert names == [
        "card.json", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.json", "curves.png", "metrics.csv",
    ]  # fmt: skip
    assert [row["epoch"] for row in finished.read_epochs()] == [str(n) for n in range(6)]


def test_training_improves_the_model(finished: RunFolder) -> None:
    card, epochs = finished.read_card(), finished.read_epochs()
    assert max(float(row["val_auc"]) for row in epochs) > 0.95
    choice = [float(row["val_choice"]) for row in epochs]
    best = card.training["best_epoch"]
    assert best == choice.index(max(choice))
    ndcg, auc = (float(epochs[best][name]) for name in ("val_corrected_ndcg", "val_auc"))
    assert choice[best] == pytest.approx((2 * auc - 1 + ndcg) / 2, abs=1e-5)
    measured = card.metrics["val all queries"]
    both = [measured[name]["value"] for name in ("corrected_ndcg", "corrected_jaccard_ndcg")]
    assert sum(both) / 2 == pytest.approx(ndcg, abs=1e-3)
    assert card.metrics["val auc"]["value"] == pytest.approx(auc, abs=1e-3)
    assert all(threshold is not None for threshold in card.thresholds)
    assert all(c is not None and c.slope >= 0 for c in card.calibration)
    assert list(card.operating_points) == ["sensitive", "balanced", "specific"]
    assert card.at("balanced").thresholds == tuple(
        point and point.threshold for point in card.operating_points["balanced"]
    )
    assert all(point and point.sensitivity >= 0.9 for point in card.operating_points["sensitive"])
    assert all(point and point.specificity >= 0.9 for point in card.operating_points["specific"])
    assert [sum(count.values()) for count in card.training["validation_labels"].values()] == [12, 12]
    assert card.training["images"] == {"train": 48, "val": 12, "test": 12}


def test_the_model_is_loaded_with_its_card(finished: RunFolder) -> None:
    model, card, _ = load_model(finished.path)
    image = torch.zeros(2, 1, 32, 32, dtype=torch.uint8)
    embedding, scores, feature_map = model(image)
    assert embedding.shape == (2, card.embedding_dim) and scores.shape == (2, 2)
    assert embedding.norm(dim=1).tolist() == pytest.approx([1, 1])
    mean = feature_map.mean(dim=(2, 3))
    assert torch.allclose(mean / mean.norm(dim=1, keepdim=True), embedding, atol=1e-6)


def test_weights_that_do_not_match_the_card_are_refused(finished: RunFolder, tmp_path: Path) -> None:
    import shutil

    copy = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "copy")))
    checkpoint = torch.load(copy.best, weights_only=True)
    key = next(
        k for k, v in checkpoint["state_dict"].items() if k.startswith("model.encoder") and v.is_floating_point()
    )
    checkpoint["state_dict"][key] += 1
    torch.save(checkpoint, copy.best)
    with pytest.raises(CardError, match="train the run again"):
        load_model(copy.path)
    copy.best.write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"best\.ckpt"):
        load_model(copy.path)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["timm:test_resnet", "efficientnet_b0"])
def test_a_stopped_run_resumes_to_the_same_weights(encoder: str, squares: Path, tmp_path: Path) -> None:
    """EfficientNet drops layers at random."""
    options = config(squares, encoder=encoder)
    whole = train(options, tmp_path / "whole")
    train_until(1, options, tmp_path / "stopped")
    with pytest.raises(RunError, match="not finished"):
        load_model(tmp_path / "stopped")
    with pytest.raises(RunError, match="--resume"):
        train(options, tmp_path / "stopped")
    resumed = train(options, tmp_path / "stopped", resume=True)
    assert _without_seconds(resumed) == _without_seconds(whole)
    assert resumed.read_card().fingerprint == whole.read_card().fingerprint


def _without_seconds(run: RunFolder) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.read_epochs()]


def worse_every_epoch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keep the first epoch the best. Returns a list that collects the epochs trained from now on."""
    started: list[int] = []
    start = RetrievalTask.on_train_epoch_start

    def record(task: RetrievalTask) -> None:
        started.append(task.current_epoch)
        start(task)

    monkeypatch.setattr(RetrievalTask, "on_train_epoch_start", record)
    monkeypatch.setattr(Validation, "measure", lambda self, model: dict.fromkeys(MEASURED, 1 / (1 + started[-1])))
    return started


@pytest.mark.slow
def test_resume_continues_after_the_last_epoch_not_the_best(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, run = config(squares, epochs=4), tmp_path / "run"
    started = worse_every_epoch(monkeypatch)
    train_until(2, options, run)
    started.clear()
    moved = run.rename(tmp_path / "moved")
    finished = train(options, moved, resume=True)
    assert started == [2, 3]
    assert finished.read_card().training["best_epoch"] == 0, "the best epoch is remembered in the moved folder"


def test_a_run_killed_after_early_stopping_trains_no_more(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, run = config(squares, epochs=9, patience=1), tmp_path / "run"
    started = worse_every_epoch(monkeypatch)
    train(options, run)
    assert started == [0, 1]
    RunFolder(run).card.unlink()
    train(options, run, resume=True)
    assert started == [0, 1] and RunFolder(run).card.exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from cbmir.training import harness
from cbmir.training.config import TrainConfig
import json
torch.set_num_threads(1)
step = harness.RetrievalTask.training_step
def killed(task, batch, index):
    if task.current_epoch == 1 and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(task, batch, index)
harness.RetrievalTask.training_step = killed
harness.train(TrainConfig.from_json(json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_run_killed_within_an_epoch_resumes(squares: Path, tmp_path: Path) -> None:
    options, run = config(squares), tmp_path / "killed"
    command = [sys.executable, "-c", _KILLED, json.dumps(asdict(options)), str(run)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -9
    assert train(options, run, resume=True).read_card().fingerprint


def test_resume_of_a_finished_run_changes_nothing(finished: RunFolder) -> None:
    before = finished.card.stat().st_mtime_ns
    train(finished.read_config(), finished.path, resume=True)
    assert finished.card.stat().st_mtime_ns == before


def test_resume_refuses_other_options(finished: RunFolder, squares: Path) -> None:
    with pytest.raises(RunError, match=r"lr: 0\.01 -> 0\.1"):
        train(config(squares, epochs=6, lr=0.1), finished.path, resume=True)


def test_a_folder_with_other_files_is_left_alone(squares: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match="new or empty folder"):
        train(config(squares), tmp_path)


@pytest.mark.parametrize("loss", ["bce", "ml-proxy-nca"])
def test_the_baselines_train(loss: str, squares: Path, tmp_path: Path) -> None:
    run = train(config(squares, loss=loss, epochs=1), tmp_path / "run")
    model, card, _ = load_model(run.path)
    assert card.head == ("linear" if loss == "bce" else "proxy")
    assert card.proxies_per_class == (() if loss == "bce" else (1, 1, 1))
    assert model.head.rows().shape == (2 if loss == "bce" else 3, card.embedding_dim)


def test_bf16_and_folds(squares: Path, tmp_path: Path) -> None:
    run = train(config(squares, epochs=1, precision="bf16-mixed", fold="2/3"), tmp_path / "run")
    facts = run.read_card().training
    assert facts["precision"] == "bf16-mixed" and facts["fold"] == "2/3"
    assert facts["images"]["test"] == 24


@pytest.mark.release
def test_two_processes_train_one_model(squares: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "cbmir", "train", str(squares), "-o", str(tmp_path / "run"), "--encoder",
        "timm:test_resnet", "--image-size", "32", "--batch-size", "16", "--epochs", "2", "--devices", "2",
    ]  # fmt: skip
    result = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(RunFolder(tmp_path / "run").read_epochs()) == 2
    load_model(tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_the_run(
    squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cbmir.training.losses import MultiLabelProxyLoss

    monkeypatch.setattr(MultiLabelProxyLoss, "forward", lambda self, h, p, e, t: e.sum() * float("nan"))
    with pytest.raises(TrainingError, match="lower --lr"):
        train(config(squares), tmp_path / "run")


def test_a_patient_in_two_splits_is_refused(squares: Path, tmp_path: Path) -> None:
    manifest = read_manifest(squares)
    splits = [row.split for row in manifest]
    splits[1] = "val"
    leaking = squares.parent / "leaking.csv"
    write_manifest(manifest.with_splits(splits), leaking)
    with pytest.raises(SplitError, match="p0"):
        train(config(leaking), tmp_path / "run")


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_split_is_refused(split: str, squares: Path, tmp_path: Path) -> None:
    manifest = read_manifest(squares)
    empty = squares.parent / "empty.csv"
    write_manifest(manifest.with_splits(["test" if r.split == split else r.split for r in manifest]), empty)
    with pytest.raises(SplitError, match=f"'{split}'"):
        train(config(empty), tmp_path / "run")


def test_a_changed_manifest_is_refused(squares: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has changed"):
        train(config(squares, manifest_fingerprint="other"), tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 0},
        {"lr": -1.0},
        {"proxies_per_class": "0"},
        {"proxies_per_class": "many"},
        {"loss": "ml-proxy-nca", "class_weights": True},
        {"seed": -1},
        {"weight_decay": -1.0},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], squares: Path) -> None:
    with pytest.raises(RunError, match="expected"):
        config(squares, **options)


def test_an_invalid_fold_is_refused(squares: Path) -> None:
    for fold in ("1", "a/b", "6/5"):
        with pytest.raises((RunError, SplitError), match="fold"):
            with_fold(read_manifest(squares), fold)


def test_proxy_counts() -> None:
    """auto gives one proxy below 64 positives, and one more per doubling, at most eight."""
    columns = [3, 63, 64, 127, 128, 4000]
    targets = torch.zeros(4000, len(columns))
    for column, positive in enumerate(columns):
        targets[:positive, column] = 1
    assert proxy_counts("auto", targets) == (1, 1, 2, 2, 3, 7)
    assert proxy_counts("3", targets) == (3,) * 6


def test_auto_precision_on_a_cpu_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_precision("auto") == "32-true"
    assert resolve_precision("bf16-mixed") == "bf16-mixed"
    with pytest.raises(RunError, match="CUDA"):
        resolve_precision("16-mixed")


def test_config_of_another_version_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    data = json.loads(finished.config.read_text()) | {"wings": 2}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match="wings"):
        RunFolder(tmp_path).read_config()
    with pytest.raises(RunError, match="cbmir train"):
        RunFolder(tmp_path / "nowhere").read_config()


def test_crops_differ_between_epochs_and_images_and_are_reproducible(squares: Path) -> None:
    from cbmir.preprocessing import PreprocessSpec
    from cbmir.training.dataset import TrainingImages

    spec = PreprocessSpec(resize=40, crop=32)
    images = np.arange(2 * 40 * 40, dtype=np.uint8).reshape(2, 40, 40)
    data = TrainingImages(images, np.array([0, 0, 1]), np.zeros((2, 1), np.float32), spec, seed=0)
    first = [data[i][0] for i in range(3)]
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, data[i][0]) for i, a in enumerate(first))
    data.epoch = 1
    assert not torch.equal(first[0], data[0][0])


@pytest.mark.slow
def test_the_recipe_fitted_ends_with_a_linear_fit(squares: Path, tmp_path: Path) -> None:
    """It has averaged weights, a schedule and full augmentation. A resumed run ends like an uninterrupted one."""
    recipe = RECIPES["fitted"] | {"batch_size": 8, "epochs": 4, "lr": 1e-2, "projection": 16}
    options = config(squares, **recipe)
    whole = train(options, tmp_path / "whole")
    rates = [float(row["lr"]) for row in whole.read_epochs()]
    assert rates[0] > rates[1] > rates[-1] > 0, "it has risen within the first epoch, and falls"
    card = whole.read_card()
    assert (card.head, card.embedding_dim, card.training["linear_fit"]) == ("linear", 16, True)
    assert card.metrics["val auc"]["value"] > 0.9
    model, _, _ = load_model(whole.path)
    embedding, scores, feature_map = model(torch.zeros(2, 1, 32, 32, dtype=torch.uint8))
    assert (embedding.shape, scores.shape, feature_map.shape[1]) == ((2, 16), (2, 2), 16)
    averaged, trained = whole.best_state(), torch.load(whole.best, weights_only=True)["state_dict"]
    assert any(not torch.equal(value, trained[f"model.{name}"]) for name, value in averaged.items())

    train_until(2, options, tmp_path / "stopped")
    resumed = train(options, tmp_path / "stopped", resume=True)
    assert _without_seconds(resumed) == _without_seconds(whole)
    assert resumed.read_card().fingerprint == card.fingerprint


def test_only_weights_decay_and_the_head_learns_faster(squares: Path, tmp_path: Path) -> None:
    options = config(squares, lr=1e-3, head_rate=10.0, weight_decay=0.1, loss="bce")
    model, loss = build_model(options, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), weights="none")
    table = read_manifest(squares)
    task = RetrievalTask(model, loss, Validation(options, table, np.zeros((len(table), 39, 39), np.uint8)),
                         RunFolder(tmp_path))  # fmt: skip
    optimizer = task.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    named = {name: found[id(p)] for name, p in model.named_parameters()}
    assert len(named) == len(found)
    for name, (rate, decay) in named.items():
        assert rate == pytest.approx(1e-2 if name.startswith("head.") else 1e-3)
        assert decay == (0.1 if dict(model.named_parameters())[name].ndim > 1 else 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"encoder": "timm:test_vit", "linear_fit": True}, "with --recipe paper"), ({"encoder": "resnet19"}, "resnet19")],
)
def test_an_unsuitable_encoder_is_refused_before_images_are_decoded(
    options: dict[str, Any], message: str, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("cbmir.training.harness.cached_images", decoded)
    with pytest.raises(EncoderError, match=message):
        train(config(squares, **options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_incompatible_options_are_refused(squares: Path) -> None:
    for options, message in (
        ({"linear_fit": True, "loss": "dsh"}, "expected no linear fit"),
        ({"linear_fit": True, "distill": "teacher"}, "expected no linear fit"),
        ({"linear_fit": True, "projection": 5}, "expected a projection to 6 dimensions or more"),
        ({"schedule": "cosin"}, "expected schedule constant or cosine, found 'cosin'"),
        ({"augment": "all"}, "expected augment crop or full, found 'all'"),
    ):
        with pytest.raises(RunError, match=message):
            config(squares, **options)


def test_the_weight_average_does_not_change_positions(squares: Path, tmp_path: Path) -> None:
    """A proxy head stores the positions of each class's proxies in a buffer: averages would be other positions."""
    options = config(squares, average=0.9, proxies_per_class="7")
    model, loss = build_model(options, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), weights="none")
    table = read_manifest(squares)
    validation = Validation(options, table, np.zeros((len(table), 39, 39), np.uint8))
    task = RetrievalTask(model, loss, validation, RunFolder(tmp_path))
    assert task.average is not None
    weight = model.head.weight
    with torch.no_grad():
        expected = weight.clone()
        for update in range(40):
            weight += 1
            task.on_train_batch_end()
            decay = min(0.9, (1 + update) / (10 + update))
            expected = weight.clone() if update == 0 else expected * decay + weight * (1 - decay)
    averaged = task.average.module.head
    assert torch.equal(averaged.index, model.head.index)
    torch.testing.assert_close(averaged.weight, expected)
