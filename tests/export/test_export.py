"""Exports: written and refused files, and the images of the comparison."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import EngineError, ManifestError, ModelError, ParityError, RunError, UserError
from cbmir.export import ExportOptions, Parity, ParityLimits, compare, export, export_run, tensorrt
from cbmir.export.compare import choose
from cbmir.export.export import output_file
from cbmir.manifest import Manifest, Row, read_manifest, write_manifest
from cbmir.preprocessing import PreprocessSpec
from cbmir.runtime import open_engine
from cbmir.training.run import RunFolder
from cbmir.training.splits import with_fold


def test_files_and_report(tiny_export: Path, tiny_run: Path) -> None:
    assert sorted(path.name for path in tiny_export.iterdir()) == ["model.fp16.onnx", "model.onnx", "parity.json"]
    report = json.loads((tiny_export / "parity.json").read_text())
    assert list(report) == ["model.onnx", "model.fp16.onnx"]
    for name, facts in report.items():
        assert facts["sha256"] == hashlib.sha256((tiny_export / name).read_bytes()).hexdigest()
        assert facts["images"] == 24 and 0 < facts["queries"] < 24
        assert facts["fingerprint"] == facts["weights"] == RunFolder(tiny_run).read_card().fingerprint
        assert facts["processor"] and "onnxruntime" in facts["versions"]
    exact, half = report["model.onnx"], report["model.fp16.onnx"]
    assert exact["limits"]["cosine"] == 0.999999 <= exact["cosine_min"]
    assert exact["score_difference"] <= exact["limits"]["score"] == 1e-5
    assert half["limits"]["overlap"] == 0.97 <= half["overlap"]["value"] <= 1
    assert abs(half["ndcg"]["value"]) <= half["limits"]["ndcg"] == 0.002
    assert 0.999 < half["cosine_min"] < 1


def test_the_card_is_in_every_file(tiny_export: Path, tiny_run: Path) -> None:
    source = RunFolder(tiny_run).read_card()
    for name, precision in (("model.onnx", "float32"), ("model.fp16.onnx", "float16")):
        with open_engine(tiny_export / name, threads=1) as engine:
            assert engine.card.versions.keys() == source.versions.keys() | {"onnx"}
            assert engine.card == source.with_(precision=precision, versions=engine.card.versions)


@pytest.mark.usefixtures("quick_graph")
def test_another_file_joins_the_report(tiny_run: Path, tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text('{"older.onnx": {"cosine_min": 1}}')
    assert export_run(tiny_run, tmp_path / "newer.onnx") == [tmp_path / "newer.onnx"]
    assert list(json.loads((tmp_path / "parity.json").read_text())) == ["older.onnx", "newer.onnx"]


@pytest.mark.slow
def test_the_intensity_policy_is_kept(make_tiny_run: Callable[..., Path], tiny_manifest: Path, tmp_path: Path) -> None:
    """It is in the file's card, and applies to the images of the comparison."""
    run = make_tiny_run(tmp_path / "run", tiny_manifest, fold="1/2", intensity="percentile")
    export_run(run, tmp_path / "model.onnx")
    with open_engine(tmp_path / "model.onnx", threads=1) as engine:
        assert engine.card.preprocess == PreprocessSpec.for_image_size(32, "percentile")
        assert engine.card.fingerprint == RunFolder(run).read_card().fingerprint


@pytest.mark.usefixtures("quick_graph")
def test_a_concurrent_export_into_the_same_folder(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = export.to_onnx

    def meanwhile(*arguments: Any) -> bytes:
        (tmp_path / "parity.json").write_text('{"other.onnx": {}}')
        return take(*arguments)

    monkeypatch.setattr(export, "to_onnx", meanwhile)
    export_run(tiny_run, tmp_path / "newer.onnx")
    assert list(json.loads((tmp_path / "parity.json").read_text())) == ["other.onnx", "newer.onnx"]


@pytest.mark.usefixtures("quick_graph")
def test_remaining_files_of_another_model_are_named(
    tiny_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A student shares its teacher's fingerprint, but not its weights. Files with another stem do not matter."""
    fingerprint = RunFolder(tiny_run).read_card().fingerprint
    whose = {"model.a.onnx": "student", "model.b.onnx": fingerprint, "other.onnx": "student"}
    for name in whose:
        (tmp_path / name).touch()
    report = {name: {"fingerprint": fingerprint, "weights": weights} for name, weights in whose.items()}
    (tmp_path / "parity.json").write_text(json.dumps(report))
    export_run(tiny_run, tmp_path)
    (text,) = [text for text in caplog.messages if "Files of another model stay" in text]
    assert text.endswith(": model.a.onnx.")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
@pytest.mark.parametrize("older", [None, b"an older file"])
def test_beyond_tolerance_nothing_is_written(
    older: bytes | None, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(export.LIMITS, "float32", ParityLimits(cosine=1.1))
    if older:
        (tmp_path / "model.onnx").write_bytes(older)
    with pytest.raises(
        ParityError, match=r"model\.onnx was not written.*cosine of the embeddings at least 1\.1"
    ) as caught:
        export_run(tiny_run, tmp_path, ExportOptions(fp16=True))
    stayed = " An older model.onnx, of an unknown model, was left as it was."
    assert str(caught.value).endswith(stayed if older else "writes it all the same.")
    assert [path.name for path in tmp_path.iterdir()] == (["model.onnx"] if older else [])
    assert not older or (tmp_path / "model.onnx").read_bytes() == older


def test_a_wrong_graph_is_caught(tiny_run: Path, make_tiny_model: Callable[..., Path], tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The limits are as usual, but the graph has another model's weights."""
    other = make_tiny_model(tmp_path / "other.onnx", embedding_dim=512).read_bytes()
    monkeypatch.setattr(export, "to_onnx", lambda *_: other)
    with pytest.raises(ParityError, match="answers differently from PyTorch"):
        export_run(tiny_run, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_a_failed_fp16_leaves_the_good_file(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export.LIMITS, "float16", ParityLimits(score=1e-12))
    with pytest.raises(ParityError, match=r"model\.fp16\.onnx was not written.*export it without --fp16"):
        export_run(tiny_run, tmp_path, ExportOptions(fp16=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "parity.json"]
    assert list(json.loads((tmp_path / "parity.json").read_text())) == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_a_refused_file_does_not_stop_others(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(export.LIMITS, "float16", ParityLimits(score=1e-12))
    monkeypatch.setitem(export.LIMITS, "int8", ParityLimits())
    with pytest.raises(ParityError, match=r"model\.fp16\.onnx was not written"):
        export_run(tiny_run, tmp_path, ExportOptions(fp16=True, int8=True))
    assert list(json.loads((tmp_path / "parity.json").read_text())) == ["model.onnx", "model.int8.onnx"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
@pytest.mark.parametrize("another", [True, False])
def test_a_failed_fp16_says_which_model_the_older_file_is_from(
    another: bool, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(export.LIMITS, "float16", ParityLimits(score=1e-12))
    fingerprint = "older-1" if another else RunFolder(tiny_run).read_card().fingerprint
    (tmp_path / "model.fp16.onnx").write_bytes(b"older")
    facts = {"fingerprint": "of both", "weights": fingerprint}
    (tmp_path / "parity.json").write_text(json.dumps({"model.fp16.onnx": facts}))
    whose = r"another model \(fingerprint older-1\)" if another else "this model"
    with pytest.raises(ParityError, match=rf"An older model\.fp16\.onnx, of {whose}, was left as it was\.$"):
        export_run(tiny_run, tmp_path, ExportOptions(fp16=True))
    assert (tmp_path / "model.fp16.onnx").read_bytes() == b"older"
    assert (tmp_path / "model.onnx").exists()


def test_unfinished_and_missing_runs(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(tiny_run / "config.json", run)
    with pytest.raises(RunError, match="not finished"):
        export_run(run, tmp_path / "out")
    with pytest.raises(RunError, match="expected a folder made by 'cbmir train'"):
        export_run(tmp_path / "nothing", tmp_path / "out")


@pytest.fixture
def moved(tiny_manifest: Path, tmp_path: Path) -> Path:
    """A copy of the tiny manifest and its images in another folder."""
    shutil.copytree(tiny_manifest.parent, tmp_path / "moved", ignore=shutil.ignore_patterns(".*"))
    return tmp_path / "moved" / "manifest.csv"


@pytest.mark.usefixtures("quick_graph")
def test_missing_images(moved: Path, tiny_run: Path, tiny_manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    folder = RunFolder(run)
    folder.write_config(replace(folder.read_config(), manifest=str(moved)))
    (moved.parent / "image_07.png").unlink()
    with pytest.raises(RunError, match=r"image_07\.png.*--images manifest\.csv"):
        export_run(run, tmp_path / "out")
    moved.unlink()
    with pytest.raises(RunError, match=r"no such manifest.*--images manifest\.csv"):
        export_run(run, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert export_run(run, tmp_path / "out", ExportOptions(images=tiny_manifest)) == [tmp_path / "out" / "model.onnx"]
    (moved.parent / "image_07.png").write_text("no image")
    write_manifest(Manifest(read_manifest(tiny_manifest).labels, _rows_in(tiny_manifest, moved.parent)), moved)
    with pytest.raises(ManifestError, match=r"1 of 24 images cannot be read"):
        export_run(run, tmp_path / "out", ExportOptions(images=moved))


@pytest.mark.usefixtures("quick_graph")
def test_missing_calibration_images_are_reported_before_the_work(
    moved: Path, tiny_run: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    RunFolder(run).write_config(replace(RunFolder(run).read_config(), manifest=str(moved)))
    moved.unlink()
    with pytest.raises(RunError, match=r"no such manifest.*give others with --calibrate manifest\.csv$"):
        export_run(run, tmp_path / "out", ExportOptions(int8=True, images=tiny_manifest))
    assert not list((tmp_path / "out").iterdir())


def test_int8_is_calibrated_and_checked_on_different_patients(
    tiny_run: Path, tiny_manifest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    table = read_manifest(tiny_manifest)
    write_manifest(table.with_splits([""] * len(table)), tmp_path / "table.csv")
    read: list[Manifest] = []
    monkeypatch.setattr(compare, "read_pixels", lambda rows, spec: read.append(rows))
    folder = RunFolder(tiny_run)
    arguments = folder.read_config(), folder.read_card(), tmp_path / "table.csv", 24
    patients = [row.patient_id for row in table]
    compare.calibration_pixels(*arguments, patients[:20])
    assert [row.patient_id for row in read[-1]] == patients[20:] and not caplog.messages
    compare.calibration_pixels(*arguments, patients)
    assert len(read[-1]) == 24 and "calibrated and checked on the same patients" in caplog.text


def _rows_in(manifest: Path, folder: Path) -> tuple[Row, ...]:
    return tuple(replace(row, image=folder / row.image.name) for row in read_manifest(manifest))


def test_the_chosen_images(tiny_run: Path, tiny_manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, queries = choose(with_fold(read_manifest(tiny_manifest), "1/2"))
    assert len(chosen) == 24 and {row.split for row in chosen.rows[:queries]} == {"val", "test"}
    assert {row.split for row in chosen.rows[queries:]} == {"train"}
    # By the manifest's splits there are four test images, of which every second is used.
    table = read_manifest(tiny_manifest)
    monkeypatch.setattr(compare, "QUERIES", 2)
    monkeypatch.setattr(compare, "GALLERY", 10)
    chosen, queries = choose(table)
    assert queries == 2 and [row.image.name for row in chosen][:4] == [f"image_{n:02}.png" for n in (20, 22, 0, 2)]
    assert len(chosen) == 12
    monkeypatch.setattr(compare, "QUERIES", 256)
    assert choose(replace(table, rows=table.rows[:20]))[1] == 20
    with pytest.raises(ManifestError, match=r"more than 10 images.*found 10"):
        choose(replace(table, rows=table.rows[:10]))


def test_output_names(tmp_path: Path) -> None:
    assert output_file(tmp_path / "a.onnx") == tmp_path / "a.onnx"
    assert output_file(f"{tmp_path}/b.onnx/") == tmp_path / "b.onnx" / "model.onnx"
    assert output_file(tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / "model.onnx"
    assert output_file(tmp_path) == tmp_path / "model.onnx"
    assert output_file(f"{tmp_path}/model.pt/") == tmp_path / "model.pt" / "model.onnx"
    assert output_file(tmp_path / "model.pt") == tmp_path / "model.pt" / "model.onnx"  # the folder exists now
    for name in ("other.pt", "model.onx", "run.v2"):
        with pytest.raises(UserError, match=rf"expected a file that ends in \.onnx, .*write .*/{name}/"):
            output_file(tmp_path / name)
        assert not (tmp_path / name).exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected a folder to write to"):
        output_file(tmp_path / "file" / "model.onnx")


def test_a_damaged_report_is_reported_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "parity.json").write_text("{")
    with pytest.raises(ModelError, match=r"parity\.json.*delete it to continue"):
        export_run(tmp_path / "no run", tmp_path)


@pytest.mark.usefixtures("quick_graph")
def test_an_accepted_loss_is_written_and_reported(
    tiny_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ExportOptions(fp16=True, tolerances=("score=1e-12",), accept_parity_loss=True)
    assert [path.name for path in export_run(tiny_run, tmp_path, options)] == ["model.onnx", "model.fp16.onnx"]
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["model.fp16.onnx"]["accepted"][0].startswith("difference of scores at most 1e-12")
    assert "as was accepted" in caplog.text


def test_a_wrong_tolerance_is_reported_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a tolerance NAME=NUMBER, NAME one of cosine, score, overlap"):
        export_run(tmp_path / "no run", tmp_path, ExportOptions(tolerances=("recall=1",)))


def test_missing_bfloat16_support_is_reported_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbmir.export.options.why_no_bfloat16", lambda: "no AMX")
    with pytest.raises(EngineError, match="no AMX"):
        export_run(tmp_path / "no run", tmp_path, ExportOptions(openvino=("bf16",)))


def test_wrong_options() -> None:
    with pytest.raises(UserError, match="bf16 or int8 for OpenVINO, found fp16"):
        ExportOptions(openvino=("bf16", "fp16"))
    with pytest.raises(UserError, match="percentile above 50"):
        ExportOptions(percentile=50)


@pytest.mark.usefixtures("quick_graph")
@pytest.mark.parametrize("why", [("no TensorRT", ""), ("", "another GPU"), ("", "")])
def test_a_plan_is_accepted_unchecked_only_if_it_cannot_run(
    why: tuple[str, str], tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, card = export.opened_model, RunFolder(tiny_run).read_card()

    @contextmanager
    def opened(model: Path) -> Iterator[Any]:
        if model.suffix == ".plan":
            raise EngineError("it ran and failed")
        with real(model) as both:
            yield both

    info = SimpleNamespace(card=card, why_not=lambda: why[1])
    monkeypatch.setattr(export, "opened_model", opened)
    monkeypatch.setattr(export, "why_not", lambda engine: why[0])
    monkeypatch.setattr(export, "read_plan_info", lambda path: info)
    monkeypatch.setattr(tensorrt, "resolve_target", lambda target: target)
    monkeypatch.setattr(tensorrt, "write_plan", lambda model, path, **_: path.write_bytes(b"plan"))
    if any(why):
        export_run(tiny_run, tmp_path, ExportOptions(targets=("sm86",)))
        facts = json.loads((tmp_path / "parity.json").read_text())["model.sm86.plan"]
        assert facts["not_compared"] == "".join(why) and facts["fingerprint"] == card.fingerprint
        assert (tmp_path / "model.sm86.plan").read_bytes() == b"plan"
    else:
        with pytest.raises(ParityError, match=r"model\.sm86\.plan was not written: it ran and failed"):
            export_run(tiny_run, tmp_path, ExportOptions(targets=("sm86",)))
        assert not (tmp_path / "model.sm86.plan").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_every_kind_of_file(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "why_not", lambda engine: "no GPU")
    options = ExportOptions(
        fp16=True, int8=True, openvino=("int8",), targets=("sm86", "sm89"), max_batch=4, percentile=99.9,
        accept_parity_loss=True,
    )  # fmt: skip
    written = [path.name for path in export_run(tiny_run, tmp_path, options)]
    assert written == [
        "model.onnx", "model.fp16.onnx", "model.sm86.plan", "model.sm89.plan", "model.int8.onnx",
        "model.openvino-int8.xml",
    ]  # fmt: skip
    beside = {"model.openvino-int8.bin", "model.sm86.plan.json", "model.sm89.plan.json", "parity.json"}
    assert {path.name for path in tmp_path.iterdir()} == {*written, *beside}
    report = json.loads((tmp_path / "parity.json").read_text())
    assert list(report) == written
    assert [report[name]["precision"] for name in written] == ["float32"] + ["float16"] * 3 + ["int8"] * 2
    assert report["model.sm86.plan"]["not_compared"] == "no GPU"
    source = RunFolder(tiny_run).read_card().fingerprint
    for name, engine in (("model.int8.onnx", "onnxruntime"), ("model.openvino-int8.xml", "openvino")):
        assert report[name]["calibration_images"] == 10 and "float_layers" in report[name]
        assert report[name]["percentile"] == 99.9 and report[name]["weights"] == source
        with open_engine(tmp_path / name, threads=1) as opened:
            assert opened.health().engine == engine
            assert opened.card.fingerprint.startswith(f"{source}-int8-{engine}-")
            assert opened.card.fingerprint == report[name]["fingerprint"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_int8_is_tried_with_more_and_more_layers_in_float(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No file can meet this limit: every step is tried, and no int8 file is left."""
    monkeypatch.setattr(export, "FLOAT_LAYERS", (0, 3, 99))
    monkeypatch.setitem(export.LIMITS, "int8", ParityLimits(overlap=2))
    with caplog.at_level("INFO", "cbmir"), pytest.raises(ParityError, match=r"neighbours at least 2, .*without int8"):
        export_run(tiny_run, tmp_path, ExportOptions(int8=True))
    assert [text.split(":")[0] for text in caplog.messages if "layers in float" in text] == [
        "model.int8.onnx with 0 layers in float", "model.int8.onnx with 3 layers in float",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "parity.json"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_an_accepted_int8_loss_is_that_of_the_fastest_file(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FLOAT_LAYERS", (0, 3, 99))
    monkeypatch.setitem(export.LIMITS, "int8", ParityLimits(overlap=2))
    export_run(tiny_run, tmp_path, ExportOptions(int8=True, accept_parity_loss=True))
    facts = json.loads((tmp_path / "parity.json").read_text())["model.int8.onnx"]
    assert facts["float_layers"] == 0 and facts["accepted"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_graph")
def test_int8_that_meets_its_limits_with_two_layers_in_float(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = export._Export._compare
    limits = iter([ParityLimits(overlap=2), ParityLimits()])

    def compare(job: export._Export, staged: Path) -> tuple[ModelCard, Parity]:
        card, parity = compared(job, staged)
        return card, replace(parity, limits=next(limits)) if card.precision == "int8" else parity

    monkeypatch.setattr(export._Export, "_compare", compare)
    export_run(tiny_run, tmp_path, ExportOptions(int8=True))
    facts = json.loads((tmp_path / "parity.json").read_text())["model.int8.onnx"]
    assert facts["float_layers"] == 2 and "accepted" not in facts


def test_images_of_the_table_of_the_run_have_the_splits_of_its_fold(tiny_manifest: Path, tiny_run: Path) -> None:
    table = read_manifest(tiny_manifest)
    card = RunFolder(tiny_run).read_card()
    card = card.with_(training={"fold": "1/2", "manifest_fingerprint": table.fingerprint})
    sample = compare.run_sample(RunFolder(tiny_run).read_config(), card, tiny_manifest)
    assert sample.cases.queries == choose(with_fold(table, "1/2"))[1] > choose(table)[1]
    assert sample.pixels.dtype == np.uint8
