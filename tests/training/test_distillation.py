"""A student answers in its teacher's embedding space: the loss, the run, refusals, and exported files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cbmir.card import ModelCard
from cbmir.errors import GalleryError, ModelError, RunError
from cbmir.export import export_run
from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, read_manifest, write_manifest
from cbmir.runtime import Gallery, build_gallery, evidence_map, open_engine
from cbmir.training import evaluate
from cbmir.training.config import TrainConfig
from cbmir.training.distillation import (
    TEMPERATURE,
    DistillationLoss,
    Teacher,
    bernoulli_divergence,
    build_student,
    load_teacher,
    neighbour_divergence,
    teacher_options,
)
from cbmir.training.encoders.encoder import build_encoder, encoder_of, for_inference
from cbmir.training.encoders.stages import with_projection
from cbmir.training.evaluate import evaluate_model
from cbmir.training.harness import train
from cbmir.training.model import LinearHead, ProxyHead, RetrievalModel
from cbmir.training.run import RunFolder, load_model
from stopped_training import train_until

SMALL = {"image_size": 32, "batch_size": 8, "epochs": 3, "lr": 1e-2, "devices": "1"}

#: For a card of the two labels of `squares`.
NO_THRESHOLDS: dict[str, Any] = {"thresholds": (None, None), "calibration": (None, None)}


def config(manifest: Path, **options: Any) -> TrainConfig:
    table = read_manifest(manifest)
    return TrainConfig(**{
        "manifest": str(manifest), "manifest_fingerprint": table.fingerprint, "labels": table.labels.names, **SMALL,
        **options,
    })  # fmt: skip


def student_of(run: Path, manifest: Path, **options: Any) -> TrainConfig:
    taken = teacher_options(run, read_manifest(manifest).fingerprint)
    return config(manifest, **(taken | {"encoder": "timm:test_efficientnet"} | options))


@pytest.fixture(scope="module")
def teacher(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(squares, encoder="timm:test_resnet"), tmp_path_factory.mktemp("teachers") / "run").path


@pytest.fixture(scope="module")
def student(teacher: Path, squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(student_of(teacher, squares, epochs=6), tmp_path_factory.mktemp("students") / "run").path


@pytest.fixture(scope="module")
def novice(student: Path, squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of a student, after one epoch."""
    return train(student_of(student, squares, epochs=1), tmp_path_factory.mktemp("novices") / "run").path


# The loss


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("head", [ProxyHead(5, (2, 3, 1), 2), LinearHead(5, 2)], ids=["proxy", "linear"])
def test_against_a_brute_force(head: ProxyHead | LinearHead) -> None:
    generator = torch.Generator().manual_seed(0)
    pooled, taught = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    head = head.double()
    found = DistillationLoss()(head, pooled, unit(pooled), taught)

    s, t = (unit(side).numpy() for side in (pooled, taught))
    expected = 0.0
    for i in range(7):
        expected += ((s[i] - t[i]) ** 2).sum() / 2
        others = [j for j in range(7) if j != i]
        weights = [np.exp([side[i] @ t[j] / TEMPERATURE for j in others]) for side in (t, s)]
        p, q = (w / w.sum() for w in weights)
        expected += TEMPERATURE * (p * np.log(p / q)).sum()
    with torch.no_grad():
        wanted, given = (head(side, unit(side)).numpy() for side in (taught, pooled))
    for p, q in zip(wanted.ravel(), given.ravel(), strict=True):
        expected += (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))) / 2  # two labels
    assert found.item() == pytest.approx(expected / 7, rel=1e-4)  # scores are kept 1e-6 away from 0 and 1


def test_terms_by_hand() -> None:
    """Scores are 1/4 and 3/4: KL = 1/4 log(1/3) + 3/4 log 3 = 1/2 log 3."""
    assert bernoulli_divergence(torch.tensor([[0.25]]), torch.tensor([[0.75]])).item() == pytest.approx(np.log(3) / 2)
    # The teacher's first image has one other in the same direction and one at a right angle, so weights e^(1/T) : 1;
    # the student's is at a right angle to both, so 1/2 each. The student's other two images equal the teacher's.
    along, across = [1.0, 0, 0], [0, 1.0, 0]
    taught = torch.tensor([along, along, across])
    found = neighbour_divergence(taught, torch.tensor([[0, 0, 1.0], along, across]))
    near = 1 / (1 + np.exp(-1 / TEMPERATURE))
    divergence = near * np.log(2 * near) + (1 - near) * np.log(2 * (1 - near))
    assert found.item() == pytest.approx(TEMPERATURE * divergence / 3, rel=1e-5)
    assert neighbour_divergence(taught[:2], -taught[:2]).item() == 0


def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    torch.manual_seed(0)
    encoder, dim = build_encoder("timm:test_resnet")
    teacher = RetrievalModel(encoder.eval(), ProxyHead(dim, (2, 2, 2), 2))
    projected = with_projection(encoder, dim, dim)
    with torch.no_grad():
        projected.projection.weight.copy_(torch.eye(dim)[:, :, None, None])  # type: ignore[union-attr, operator]
        projected.projection.bias.zero_()  # type: ignore[union-attr, operator]
    image = torch.randint(0, 256, (6, 1, 32, 32), dtype=torch.uint8)
    embedding, pooled, _ = RetrievalModel(projected, teacher.head).features(image)
    with torch.no_grad():
        _, taught, _ = teacher.features(image)
    loss = DistillationLoss()(teacher.head, pooled, embedding, taught)
    assert loss.item() == pytest.approx(0, abs=1e-5)
    loss.backward()
    gradient = projected.projection.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor) and gradient.abs().max() < 1e-3


def test_a_student_with_a_linear_head_learns_lengths() -> None:
    """A feature of half the length has the same embedding, but another score."""
    head, pooled = LinearHead(4, 2), torch.randn(5, 4)
    assert DistillationLoss()(head, pooled / 2, unit(pooled), pooled).item() > 1e-4


# The run


def test_the_card_has_the_fingerprint_of_the_teacher(student: Path, teacher: Path) -> None:
    card, source = RunFolder(student).read_card(), RunFolder(teacher).read_card()
    assert card.fingerprint == source.fingerprint and card.embedding_dim == source.embedding_dim
    assert (card.head, card.sigma, card.proxies_per_class, card.negative_proxies) == (
        source.head, source.sigma, source.proxies_per_class, source.negative_proxies
    )  # fmt: skip
    assert card.training["loss"] == "distill" and card.encoder == "timm:test_efficientnet"
    assert card.training["distilled_from"] == {
        "fingerprint": source.fingerprint, "encoder": "timm:test_resnet", "metrics": source.metrics,
    }  # fmt: skip
    assert all(threshold is not None for threshold in card.thresholds)


def test_an_encoder_is_rebuilt_from_its_card(student: Path, teacher: Path) -> None:
    for run in (student, teacher):
        encoder = encoder_of(RunFolder(run).read_card())
        assert encoder.state_dict().keys() == load_model(run)[0].encoder.state_dict().keys()


def test_head_is_the_teachers_bit_for_bit_and_the_teacher_is_not_in_the_checkpoint(
    student: Path, teacher: Path
) -> None:
    (taught, card, _), (own, _, _) = load_model(teacher), load_model(student)
    assert torch.equal(taught.head.rows(), own.head.rows())
    assert torch.equal(taught.head.weight, own.head.weight)  # type: ignore[arg-type]
    keys = set(torch.load(RunFolder(student).last, weights_only=True)["state_dict"])
    assert keys == {f"model.{key}" for key in own.state_dict()}
    model, _ = build_student(RunFolder(student).read_config(), Teacher(taught, card), weights="none")
    loss = model(torch.zeros(2, 1, 32, 32, dtype=torch.uint8))[1].sum()
    loss.backward()
    assert model.head.weight.grad is None and model.encoder.projection.weight.grad is not None  # type: ignore[union-attr]


def test_the_student_learns_the_embeddings_of_the_teacher(student: Path, teacher: Path, squares: Path) -> None:
    losses = [float(row["train_loss"]) for row in RunFolder(student).read_epochs()]
    assert losses[-1] < losses[0] / 4
    cross = evaluate_model(student, squares, queries="val", gallery_model=teacher).summary()
    assert cross["positive queries"]["ndcg"]["value"] > 0.85  # at least 0.89, depending on the processor
    card = RunFolder(student).read_card()
    for column in ("positive queries", "all queries"):  # the card's figures use the teacher's gallery
        assert card.metrics[f"val {column}"]["ndcg"] == pytest.approx(cross[column]["ndcg"], abs=1e-6)
    best = max(float(row["val_corrected_ndcg"]) for row in RunFolder(student).read_epochs())
    both = [cross["all queries"][name]["value"] for name in ("corrected_ndcg", "corrected_jaccard_ndcg")]
    assert sum(both) / 2 <= best + 1e-3


def test_the_gallery_is_embedded_by_the_gallery_model(
    student: Path, teacher: Path, squares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: Counter[Path] = Counter()

    @contextmanager
    def counting(model: Path) -> Iterator[tuple[ModelCard, evaluate.Embedder]]:
        with opened_model(model) as (card, embedder):

            def counted(batches: Iterable[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
                embedding, scores = embedder(batches)
                embedded[model] += len(embedding)
                return embedding, scores

            yield card, counted

    opened_model = evaluate.opened_model
    monkeypatch.setattr(evaluate, "opened_model", counting)
    evaluate_model(student, squares, gallery_model=teacher)
    assert embedded == {student: 12, teacher: 48}, "the test split asks, the train split is the gallery"
    embedded.clear()
    evaluate_model(student, squares)
    assert embedded == {student: 60}


@pytest.mark.slow
def test_a_stopped_student_resumes_to_the_same_weights(teacher: Path, squares: Path, tmp_path: Path) -> None:
    options = student_of(teacher, squares)
    whole = train(options, tmp_path / "whole")
    train_until(1, options, tmp_path / "stopped")
    moved = tmp_path / "moved"
    moved.symlink_to(teacher)  # the teacher's path does not matter, its identity does
    resumed = train(replace(options, distill=str(moved)), tmp_path / "stopped", resume=True)
    facts = [run.read_card().training["weights_fingerprint"] for run in (whole, resumed)]
    assert facts[0] == facts[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"loss": "bce"}, {"negative_proxies": False, "proxies_per_class": "auto"}])
def test_other_heads(options: dict[str, Any], squares: Path, tmp_path: Path) -> None:
    run = train(config(squares, encoder="timm:test_resnet", epochs=1, **options), tmp_path / "teacher").path
    student = train(student_of(run, squares, epochs=1), tmp_path / "student")
    own, card, _ = load_model(student.path)
    assert card.head == ("linear" if options.get("loss") == "bce" else "proxy")
    assert torch.equal(own.head.rows(), load_model(run)[0].head.rows())


def test_a_student_may_teach(novice: Path, student: Path) -> None:
    load_model(novice)
    assert RunFolder(novice).read_card().fingerprint == RunFolder(student).read_card().fingerprint


def test_the_fold_of_the_teacher_is_kept_only_on_the_same_table(
    make_tiny_run: Callable[..., Path], squares: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", squares, fold="2/3", card=NO_THRESHOLDS)
    assert teacher_options(run, read_manifest(squares).fingerprint)["fold"] == "2/3"
    assert teacher_options(run, read_manifest(tiny_manifest).fingerprint)["fold"] == ""


def test_a_teacher_that_trained_on_every_image_needs_another_table(
    make_tiny_run: Callable[..., Path], squares: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", squares, fold="all", card=NO_THRESHOLDS)
    assert teacher_options(run, read_manifest(tiny_manifest).fingerprint)["fold"] == ""
    with pytest.raises(RunError, match="trained on every image of this table"):
        teacher_options(run, read_manifest(squares).fingerprint)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 64}, "image size"),
        ({"fold": "1/3"}, "fold"),
        ({"teacher_fingerprint": "other"}, "began with"),
    ],
)
def test_options_that_contradict_the_teacher_are_refused(
    options: dict[str, Any], message: str, teacher: Path, squares: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=message):
        train(student_of(teacher, squares, **options), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "a refused run must not be in the way of the next try"


def test_a_teacher_is_refused_before_images_are_read(
    teacher: Path, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbmir.training.harness.cached_images", lambda *_: pytest.fail("images were read"))
    with pytest.raises(RunError, match="began with"):
        train(student_of(teacher, squares, teacher_fingerprint="other"), tmp_path / "run")


def test_a_student_is_not_mistaken_for_its_teacher(teacher: Path, student: Path, squares: Path) -> None:
    """Its card has the teacher's fingerprint, but its own weights."""
    begun = student_of(teacher, squares)
    with pytest.raises(RunError, match="began with"):
        load_teacher(replace(begun, distill=str(student)), read_manifest(squares))
    assert any("teacher_fingerprint" in text for text in begun.differences(student_of(student, squares)))


def test_a_teacher_trained_on_another_table_gives_a_warning(
    teacher: Path, squares: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_teacher(student_of(teacher, squares), read_manifest(squares))
    assert not caplog.messages
    table = read_manifest(squares)
    write_manifest(replace(table, rows=table.rows[:60]), tmp_path / "other.csv")
    load_teacher(student_of(teacher, tmp_path / "other.csv"), read_manifest(tmp_path / "other.csv"))
    assert "may be among this run's val and test queries" in caplog.text


def test_a_teacher_always_runs_in_float32(teacher: Path) -> None:
    model, card, _ = load_model(teacher)
    image = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    expected = Teacher(model, card).pooled(image)
    with torch.autocast("cpu", torch.bfloat16):
        found = Teacher(model, card).pooled(image)
    assert torch.equal(found, expected)


def test_labels_must_match_the_teacher(teacher: Path, squares: Path, tmp_path: Path) -> None:
    table = read_manifest(squares)
    other = tmp_path / "other.csv"
    write_manifest(Manifest(LabelSet(("Mass", "Effusion")), table.rows), other)
    with pytest.raises(RunError, match="labels"):
        train(student_of(teacher, other), tmp_path / "run")


def test_unfinished_and_hashing_teachers(make_tiny_run: Callable[..., Path], squares: Path, tmp_path: Path) -> None:
    unfinished = RunFolder(make_tiny_run(tmp_path / "unfinished", squares, card=NO_THRESHOLDS))
    unfinished.card.unlink()
    with pytest.raises(RunError, match="not finished"):
        student_of(unfinished.path, squares)
    hashing = make_tiny_run(tmp_path / "hashing", squares, card=NO_THRESHOLDS | {"head": "hash"})
    with pytest.raises(RunError, match="hashing"):
        train(student_of(hashing, squares), tmp_path / "run")
    with pytest.raises(RunError, match="cbmir train"):
        student_of(tmp_path / "nowhere", squares)


def test_a_changed_teacher_is_refused_on_resume(
    make_tiny_run: Callable[..., Path], squares: Path, student: Path, tmp_path: Path
) -> None:
    another = make_tiny_run(tmp_path / "another", squares, card=NO_THRESHOLDS)
    with pytest.raises(RunError, match="teacher_fingerprint"):
        train(student_of(another, squares, epochs=6), student, resume=True)
    with pytest.raises(RunError, match="began with"):  # the folder's content was replaced
        load_teacher(replace(RunFolder(student).read_config(), distill=str(another)), read_manifest(squares))


def test_a_gallery_of_another_space_is_refused(
    student: Path, make_tiny_run: Callable[..., Path], squares: Path, tmp_path: Path
) -> None:
    another = make_tiny_run(tmp_path / "another", squares, card=NO_THRESHOLDS)
    with pytest.raises(ModelError, match="embedding space"):
        evaluate_model(student, squares, gallery_model=another)


# Exported files


@pytest.mark.slow
def test_exported_student_queries_the_teachers_gallery(
    student: Path, teacher: Path, tiny_model: Path, squares: Path, tmp_path: Path
) -> None:
    for run in (teacher, student):
        export_run(run, tmp_path / run.parent.name / "model.onnx")
    manifest = read_manifest(squares)
    light, heavy = (tmp_path / run.parent.name / "model.onnx" for run in (student, teacher))
    with open_engine(heavy, threads=1) as engine:
        build_gallery(engine, manifest, tmp_path / "gallery")
        assert (engine.head == load_model(student)[0].head.rows().numpy()).all()
    image = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32), dtype=np.uint8)
    with open_engine(light, threads=1) as engine, Gallery.open(tmp_path / "gallery") as gallery:
        gallery.check_model(engine.card)
        answer = engine.run(image, feature_map=True)
        dim = RunFolder(teacher).read_card().embedding_dim
        assert answer.embedding.shape == (2, dim) and answer.feature_map is not None
        for embedding, cells in zip(answer.embedding, answer.feature_map, strict=True):
            for row in engine.head:
                assert evidence_map(cells, row).sum() == pytest.approx(embedding @ row, abs=1e-5)
            hit = gallery.search(embedding, 1).hits[0]
            assert hit.cosine > 0.5
        with open_engine(tiny_model, threads=1) as stranger, pytest.raises(GalleryError):
            gallery.check_model(stranger.card)
    cross = evaluate_model(light, squares, gallery_model=heavy).summary()
    runs = evaluate_model(student, squares, gallery_model=teacher).summary()
    assert cross["positive queries"]["ndcg"] == pytest.approx(runs["positive queries"]["ndcg"], abs=1e-6)
    assert json.loads(json.dumps(cross)) == cross


def with_statistics(encoder: nn.Module) -> nn.Module:
    """Give BatchNorms non-trivial statistics, as after training, so that wrong folding is detected."""
    torch.manual_seed(0)
    for norm in encoder.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.normal_(norm.running_mean, 0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return encoder.eval()


def convolutions(encoder: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv2d) for module in encoder.modules())


@pytest.mark.parametrize(("name", "trained", "fused"), [("timm:repvgg_a0", 44, 22), ("timm:test_resnet", 15, 15)])
def test_parallel_branches_become_one_convolution(name: str, trained: int, fused: int) -> None:
    encoder = with_statistics(build_encoder(name)[0])
    light = for_inference(name, encoder)
    assert (convolutions(encoder), convolutions(light)) == (trained, fused)
    image = torch.randn(2, 1, 64, 64)
    with torch.inference_mode():
        expected = encoder(image)
        torch.testing.assert_close(
            light(image) / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-5
        )


@pytest.mark.release
@pytest.mark.parametrize(
    "name", ["mobilenet_v3_large", "mobilenet_v3_small", "timm:tf_efficientnet_lite0", "timm:repvgg_a0"]
)
def test_light_encoders_train_and_export(name: str, teacher: Path, squares: Path, tmp_path: Path) -> None:
    run = train(student_of(teacher, squares, encoder=name, epochs=1, lr=1e-3), tmp_path / "run").path
    (path,) = export_run(run, tmp_path / "model.onnx")
    with open_engine(path, threads=1) as engine:
        assert engine.card.fingerprint == RunFolder(teacher).read_card().fingerprint
    if name == "timm:repvgg_a0":
        import onnx

        operators = [node.op_type for node in onnx.load(path).graph.node]
        assert operators.count("Conv") == 23, "22 of the encoder and the projection"
