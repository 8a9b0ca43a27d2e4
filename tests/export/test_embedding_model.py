"""`cbmir export --encoder`: from published weights to neighbours, without training."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from click.testing import CliRunner

from cbmir.cli.commands import cli
from cbmir.errors import EncoderError, UserError
from cbmir.export import ExportOptions, export_encoder
from cbmir.manifest import read_manifest
from cbmir.runtime import Finder, build_gallery, open_engine
from cbmir.runtime.imaging.preprocess import preprocess
from cbmir.training.encoders import GreyRange

#: Limits that random weights can meet on 24 images; the test is that they are checked.
LOOSE = ("ndcg=0.2", "overlap=0.5", "cross=0.5")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timm's smallest ViT for 32 pixels: a class token and four patches with 64 dimensions."""
    file = tmp_path_factory.mktemp("weights") / "vit.pt"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(timm.create_model("test_vit", img_size=32).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, vit: Path, tiny_manifest: Path) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    arguments = [
        "export",
        "--encoder",
        "timm:test_vit",
        "--weights",
        vit,
        "--image-size",
        32,
        "--images",
        tiny_manifest,
    ]
    arguments += ["-o", folder, "--fp16", "--grey-range", "0.4,0.25", *(w for t in LOOSE for w in ("--tolerance", t))]
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


def test_the_file_and_its_card(exported: Path, vit: Path) -> None:
    graph = onnx.load(exported / "model.onnx").graph
    assert [output.name for output in graph.output] == ["embedding", "feature_map"]
    with open_engine(exported / "model.onnx", threads=1) as engine:
        card = engine.card
    assert (card.head, card.encoder, card.embedding_dim, card.labels.names) == ("none", "timm:test_vit", 64, ())
    assert (card.preprocess.resize, card.preprocess.crop) == (32, 32)  # the whole image
    assert card.training["grey_range"] == {"mean": [0.4], "std": [0.25]}
    assert card.training["weights"] == "vit.pt"
    assert card.training["weights_sha256"] == hashlib.sha256(vit.read_bytes()).hexdigest()
    report = json.loads((exported / "parity.json").read_text())
    assert set(report) == {"model.onnx", "model.fp16.onnx"}
    for figures in report.values():
        assert figures["auc"]["value"] is None and figures["score_difference"] is None
        assert figures["overlap"]["value"] > 0.5 and figures["ndcg"]["value"] is not None


def test_a_gallery_is_searched_by_patch_tokens(exported: Path, vit: Path, tiny_manifest: Path, tmp_path: Path) -> None:
    """The embedding is the mean of timm's patch tokens, and the cells for a neighbour sum to its cosine."""
    model = timm.create_model("test_vit", img_size=32, num_classes=0, global_pool="")
    model.load_state_dict(torch.load(vit, weights_only=True), strict=False)
    with open_engine(exported / "model.onnx", threads=1) as engine:
        build_gallery(engine, read_manifest(tiny_manifest), tmp_path / "gallery")
    image = tiny_manifest.parent / "image_20.png"
    with Finder.open(exported / "model.onnx", tmp_path / "gallery", threads=1) as finder:
        analysis = finder.analyze(image, 5)
        grey = preprocess(finder.read(image), finder.card.preprocess)
    own = (torch.from_numpy(grey).float() / 255 - 0.4) / 0.25
    with torch.inference_mode():
        tokens = model.eval()(own.expand(1, 3, -1, -1))
    mean = tokens[0, 1:].mean(dim=0).numpy()
    np.testing.assert_allclose(analysis.embedding, mean / np.linalg.norm(mean), atol=1e-4)
    np.testing.assert_allclose(analysis.feature_map[:, 1, 0], tokens[0, 1 + 2].numpy(), atol=1e-3)
    assert analysis.feature_map.shape == (64, 2, 2) and len(analysis.neighbours) == 5
    for one in analysis.neighbours:
        assert analysis.evidence_for_neighbour(one.id).sum() == pytest.approx(one.cosine, abs=1e-5)


@pytest.mark.slow
def test_torchxrayvisions_network_in_every_precision(tiny_manifest: Path, tmp_path: Path) -> None:
    """A small model stands in for its DenseNet: one channel in [-1024, 1024], convolutions and batch norms."""
    torch.save(timm.create_model("test_resnet", in_chans=1).state_dict(), tmp_path / "w.pt")
    options = ExportOptions(
        int8=True, images=tiny_manifest, tolerances=("ndcg=0.5", "overlap=0.1", "cross=0.1"), calibration_images=8
    )
    files = export_encoder(
        "timm:test_resnet", str(tmp_path / "w.pt"), tmp_path, options, image_size=32, grey_range="0.5,0.00048828125"
    )
    assert [file.name for file in files] == ["model.onnx", "model.int8.onnx"]
    batch = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32), np.uint8)
    with open_engine(files[0], threads=1) as exact, open_engine(files[1], threads=1) as int8:
        assert exact.card.training["grey_range"] == GreyRange((0.5,), (1 / 2048,)).to_json()
        cosines = (exact.run(batch).embedding * int8.run(batch).embedding).sum(axis=1)
    assert (cosines > 0.9).all()


@pytest.mark.release
def test_openvino_quantises_a_transformer(vit: Path, tiny_manifest: Path, tmp_path: Path, openvino: Any) -> None:
    options = ExportOptions(openvino=("int8",), images=tiny_manifest, tolerances=("ndcg=0.5", "overlap=0.1"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from NNCF
        files = export_encoder("timm:test_vit", str(vit), tmp_path, options, image_size=32)
    with open_engine(files[0], threads=1) as exact, open_engine(files[1], threads=1) as int8:
        batch = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32), np.uint8)
        found = int8.run(batch, feature_map=True)
        assert found.scores.shape == (2, 0) and int8.card.precision == "int8"
        assert ((exact.run(batch).embedding * found.embedding).sum(axis=1) > 0.99).all()


def test_encoders_that_cannot_be_exported_are_refused(vit: Path, tiny_manifest: Path, tmp_path: Path) -> None:
    own = {"images": tiny_manifest}
    cases: list[tuple[str, str, dict[str, Any], type[Exception], str]] = [
        ("timm:test_vit", str(vit), {}, UserError, "give a manifest with --images"),
        ("timm:test_vit", "none", own, UserError, "random ones find nothing"),
        ("timm:test_vit", str(vit), own | {"int8": True}, UserError, "expected a convolutional encoder for --int8"),
        ("timm:test_resnet", str(vit), own, EncoderError, "have a match"),
    ]
    for encoder, weights, options, error, words in cases:
        with pytest.raises(error, match=words):
            export_encoder(encoder, weights, tmp_path / "out", ExportOptions(**options), image_size=32)
    assert not [file for file in (tmp_path / "out").iterdir() if file.suffix == ".onnx"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Give a RUN or FILE, or an --encoder"),
        (("run", "--encoder", "resnet18"), "Give a RUN or FILE, or an --encoder"),
        (("run", "--weights", "w.pt"), "--weights is for --encoder"),
    ],
)
def test_a_run_or_an_encoder(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["export", *arguments, "-o", str(tmp_path)])
    assert result.exit_code == 2 and words in result.output
