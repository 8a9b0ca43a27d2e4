"""results.json from finished, failed and missing cells."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cbmir.manifest import read_manifest, write_manifest
from cbmir.training.comparison.cells import FACTS, FAILED
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan, selection_path
from cbmir.training.comparison.results import OF_DRAWINGS, make_results

pytestmark = pytest.mark.slow


def test_every_method_has_a_row(tiny_report: Path, tiny_plan: Plan) -> None:
    results = make_results(tiny_report, tiny_plan)
    json.dumps(results, allow_nan=False)
    rows = {row["method"]: row for row in results["rows"]}
    assert list(results["methods"]) == list(METHODS)
    assert rows.keys() == METHODS.keys()
    assert rows["bce"]["minus_bce"] is None
    # Haq's search answers with the BCE network's scores.
    assert rows["community"]["auc"] == rows["bce"]["auc"]
    assert "auc" not in rows["community"]["minus_bce"], "it would count as one more comparison"
    ndcg = rows["proxy"]["minus_bce"]["positive queries"]["ndcg"]
    assert ndcg["value"] == pytest.approx(
        rows["proxy"]["positive queries"]["ndcg"]["value"] - rows["bce"]["positive queries"]["ndcg"]["value"]
    )
    assert ndcg["p_holm"] >= ndcg["p"]
    assert rows["dsh"]["auc"]["value"] is None
    assert results["selections"][0]["images"] == {"train": 48, "val": 12, "test": 12}
    assert 0 < results["references"]["0"]["random, positive queries"]["ndcg"] < 1
    assert rows["dsh"]["calibration_error"]["value"] is None and rows["bce"]["calibration_error"]["value"] >= 0
    assert results["best"]["leaders"].keys() == {"auc", "corrected_ndcg", "corrected_jaccard_ndcg"}
    corrected = rows["proxy"]["minus_bce"]["all queries"]["corrected_ndcg"]
    assert corrected["p_holm"] >= corrected["p"]
    assert (results["failed"], results["unfinished"]) == ([], [])


def test_no_path_of_this_machine_is_in_the_results(tiny_report: Path, tiny_plan: Plan, tmp_path: Path) -> None:
    plan = replace(tiny_plan, training=tiny_plan.training | {"weights": str(tmp_path / "lite0.pt")})
    text = json.dumps(make_results(tiny_report, plan))
    assert "lite0.pt" in text
    assert str(tmp_path) not in text and str(tiny_report) not in text and tiny_plan.manifest not in text


def test_a_benchmark_of_phantoms_is_declared(tiny_report: Path, tiny_plan: Plan, tmp_path: Path) -> None:
    assert make_results(tiny_report, tiny_plan)["notes"] == []
    shutil.copytree(tiny_report, tmp_path / "report")
    selection = selection_path(tmp_path / "report", tiny_plan.parts()[0])
    table = read_manifest(selection)
    write_manifest(replace(table, about=table.about | {"reader": "phantom"}), selection)
    assert make_results(tmp_path / "report", tiny_plan)["notes"] == [OF_DRAWINGS]


def test_failed_and_missing_cells_are_named(tiny_report: Path, tiny_plan: Plan, tmp_path: Path) -> None:
    report = tmp_path / "report"
    shutil.copytree(tiny_report, report)
    (report / "cells/seed0/proxy-m2" / FACTS).unlink()
    (report / "cells/seed0/proxy-m2" / FAILED).write_text('{"error": "the loss became nan", "exit": 1, "log": "x"}')
    (report / "cells/seed0/bce" / FACTS).unlink()
    (report / "cells/seed0/dsh" / FAILED).write_text('{"error": "before it was finished", "exit": 1, "log": "x"}')
    results = make_results(report, tiny_plan)
    rows = {row["method"]: row for row in results["rows"]}
    assert results["failed"] == [
        {"cell": "seed0/proxy-m2", "method": "proxy", "error": "the loss became nan", "exit": 1, "log": "x"}
    ]
    assert results["unfinished"] == ["seed0/bce"]
    assert (rows["proxy"]["cells"], rows["proxy"]["finished"]) == (1, 0)
    assert rows["dsh"]["minus_bce"] is None, "without BCE there is nothing to compare with"
