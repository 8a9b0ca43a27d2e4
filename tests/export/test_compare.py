"""Comparison of two models of any kind on one manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cbmir.card import ModelCard
from cbmir.errors import UserError
from cbmir.export import LIMITS, ParityLimits, compare_models
from cbmir.export.compare import choose, limits_of, run_sample, sample_from
from cbmir.labels import LabelSet
from cbmir.manifest import read_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.training.config import TrainConfig
from cbmir.training.splits import with_fold


def test_a_run_and_its_file(tiny_run: Path, tiny_export: Path, tiny_manifest: Path) -> None:
    parity = compare_models(tiny_run, tiny_export / "model.onnx", tiny_manifest)
    assert parity.failures == () and parity.limits == LIMITS["float32"]
    assert (parity.images, parity.queries) == (24, 4)
    assert parity.cosine_min > 0.999999 and parity.overlap.value == 1


def test_different_models_have_only_the_given_limits(
    tmp_path: Path, tiny_model: Path, make_tiny_model: Callable[..., Path], tiny_manifest: Path
) -> None:
    other = make_tiny_model(tmp_path / "other.onnx", seed=1, fingerprint="tiny-1")
    parity = compare_models(tiny_model, other, tiny_manifest)
    assert parity.limits == ParityLimits() and parity.failures == () and parity.overlap.value < 1
    assert compare_models(tiny_model, other, tiny_manifest, ["overlap=1"]).failures


def test_the_coarser_precision_sets_the_limits(tiny_card: ModelCard) -> None:
    half = tiny_card.with_(precision="float16")
    quantised = tiny_card.with_(precision="int8", fingerprint=f"{tiny_card.fingerprint}-int8-openvino-0123abcd")
    assert limits_of(tiny_card, tiny_card) == LIMITS["float32"]
    assert limits_of(tiny_card, half) == limits_of(half, tiny_card) == LIMITS["float16"]
    assert limits_of(quantised, half) == LIMITS["int8"]


def test_a_student_and_its_teacher_are_different_models(tiny_card: ModelCard) -> None:
    student = tiny_card.with_(training={"weights_fingerprint": "student-0"})
    quantised = student.with_(precision="int8", fingerprint=f"{student.fingerprint}-int8-openvino-0123abcd")
    assert limits_of(tiny_card, student) == limits_of(quantised, tiny_card) == ParityLimits()
    assert limits_of(student, student) == LIMITS["float32"] and limits_of(quantised, student) == LIMITS["int8"]


def test_the_fold_of_the_model_decides_the_queries(
    tmp_path: Path, make_tiny_model: Callable[..., Path], tiny_manifest: Path
) -> None:
    table = read_manifest(tiny_manifest)
    training = {"fold": "1/2", "manifest_fingerprint": table.fingerprint}
    model = make_tiny_model(tmp_path / "model.onnx", training=training)
    assert compare_models(model, model, tiny_manifest).queries == choose(with_fold(table, "1/2"))[1] > 4


def test_a_model_trained_on_every_image_is_judged_with_a_warning(
    tiny_card: ModelCard, tiny_manifest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = read_manifest(tiny_manifest)
    for fold, fingerprint, is_warned in (
        ("all", table.fingerprint, True), ("", table.fingerprint, False), ("all", "another table", False),
    ):  # fmt: skip
        caplog.clear()
        card = tiny_card.with_(training={"fold": fold, "manifest_fingerprint": fingerprint})
        sample_from(tiny_manifest, card)
        assert ("images that it was trained on" in caplog.text) is is_warned
    config = TrainConfig(str(tiny_manifest), table.fingerprint, table.labels.names, fold="all")
    assert run_sample(config, tiny_card.with_(training={"fold": "all"}), None).cases.queries == len(table)
    assert "images that it was trained on" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LabelSet(("Effusion", "Mass", "Hernia"))}, "the same labels, found Effusion, Mass, Nodule and"),
        ({"preprocess": PreprocessSpec(resize=40, crop=32)}, "preprocess images in the same way"),
    ],
)
def test_models_that_cannot_be_compared(
    change: dict[str, object], message: str, tmp_path: Path, tiny_model: Path,
    make_tiny_model: Callable[..., Path], tiny_manifest: Path,
) -> None:  # fmt: skip
    other = make_tiny_model(tmp_path / "other.onnx", **change)
    with pytest.raises(UserError, match=message):
        compare_models(tiny_model, other, tiny_manifest)
