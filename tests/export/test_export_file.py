"""Files converted from a float32 file, in steps of layers in float."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbmir.card import ModelCard
from cbmir.errors import UserError
from cbmir.export import ExportOptions, Parity, ParityLimits, export, measure_parity, openvino
from cbmir.runtime import open_engine


def test_a_file_is_converted_and_compared_with_itself_as_source(
    tiny_export: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    options = ExportOptions(openvino=("int8",), images=tiny_manifest, tolerances=("overlap=0", "ndcg=1", "auc=1"))
    (written,) = export.export_file(tiny_export / "model.onnx", tmp_path / "converted.onnx", options)
    assert written == tmp_path / "converted.openvino-int8.xml"
    facts = json.loads((tmp_path / "parity.json").read_text())[written.name]
    assert facts["compared_with"] == "model.onnx" and facts["float_layers"] == 0
    with open_engine(written, threads=1) as int8, open_engine(tiny_export / "model.onnx", threads=1) as exact:
        assert facts["weights"] == exact.card.fingerprint
        batch = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32), np.uint8)
        assert ((exact.run(batch).embedding * int8.run(batch).embedding).sum(axis=1) > 0.98).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.onnx", {"images": None}, "expected images to compare files on, found none"),
        ("model.onnx", {"fp16": True}, "expected a RUN for --fp16"),
        ("model.onnx", {"int8": False}, "expected files to convert to, found none; give --openvino, --int8"),
        ("model.fp16.onnx", {}, "expected a float32 .onnx file of cbmir, .* which is float16"),
        ("model.openvino-int8.xml", {}, "expected a float32 .onnx file of cbmir, .*, found .*xml"),
    ],
)
def test_files_that_cannot_be_converted(
    name: str, options: dict[str, Any], message: str, tiny_export: Path, tiny_manifest: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        chosen = ExportOptions(**{"images": tiny_manifest, "int8": True} | options)
        export.export_file(tiny_export / name, tmp_path, chosen)
    assert not list(tmp_path.iterdir())


def test_bfloat16_is_tried_with_more_and_more_layers_in_float(
    tiny_export: Path, tiny_manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The processor may have no bfloat16, so a writer notes the steps. The third file answers well enough."""
    steps: list[int] = []

    def write(model: bytes, path: Path, precision: str, *, float_layers: int) -> None:
        steps.append(float_layers)
        path.write_bytes(model)

    limits = iter([ParityLimits(overlap=2), ParityLimits(overlap=2), ParityLimits()])

    def compare(job: export._Export, staged: Path) -> tuple[ModelCard, Parity]:
        return job.card, measure_parity(job.reference, job.reference, job.sample.cases, next(limits))

    monkeypatch.setattr(openvino, "write_openvino", write)
    monkeypatch.setattr(export._Export, "_compare", compare)
    monkeypatch.setattr("cbmir.export.options.why_no_bfloat16", lambda: "")
    with caplog.at_level("INFO", "cbmir"):
        export.export_file(
            tiny_export / "model.onnx", tmp_path, ExportOptions(openvino=("bf16",), images=tiny_manifest)
        )
    assert steps == [0, 2, 4]
    assert json.loads((tmp_path / "parity.json").read_text())["model.openvino-bf16.xml"]["float_layers"] == 4
    assert "4 layers in float, " in caplog.messages[-1]
