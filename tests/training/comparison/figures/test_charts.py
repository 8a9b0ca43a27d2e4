"""The charts: their numbers match the results, and only charts with data are drawn."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from cbmir.training.comparison.figures.charts import by_method, draw_charts, draw_lines, method_style, numbered_style
from cbmir.training.comparison.figures.sheet import ReportFigure, sheet
from cbmir.training.comparison.methods.registry import METHODS
from cbmir.training.comparison.plan import Plan
from cbmir.training.comparison.results import make_results
from cbmir.training.rankings import CORRECTED

COLUMNS = ("positive queries", "all queries")


def figure(value: float | None) -> dict[str, float | None]:
    if value is None:
        return dict.fromkeys(("value", "low", "high", "sd"))
    return {"value": value, "low": value - 0.02, "high": value + 0.03, "sd": None}


def row(method: str, size: int, proxies: str, value: float, auc: float | None = 0.7) -> dict[str, Any]:
    columns = {
        column: {
            "queries": 9 + place,
            "ndcg": figure(value + place / 10),
            "acg": figure(0.4 + place / 10),
            "precision": figure(0.8 + place / 10),
            **dict.fromkeys(CORRECTED, figure(value / 2)),
        }
        for place, column in enumerate(COLUMNS)
    }
    own = {
        "method": method,
        "size": size,
        "proxies": proxies,
        "cells": 1,
        "finished": 1,
        "training_images": size or 800,
    }
    return own | {"auc": figure(auc)} | columns


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    sizes, proxies = [one["size"] for one in rows], [one["proxies"] for one in rows]
    return {
        "shown": {"size": 0 if 0 in sizes else max(sizes, default=0), "proxies": "2" if "2" in proxies else ""},
        "protocol": {"name": "nih", "k": 100},
        "methods": {name: {"paper": dict(m.paper.get("nih", {}))} for name, m in METHODS.items()},
        "references": {str(one["size"]): {f"random, {c}": {"ndcg": 0.12} for c in COLUMNS} for one in rows},
        "rows": [*rows, {"method": "dsh", "size": 0, "proxies": "", "cells": 1, "finished": 0}],
    }


def read(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def check_files(folder: Path, picture: ReportFigure) -> None:
    """Check that PNG and SVG are readable and have the title, and that no temporary files are left."""
    with Image.open(folder / f"{picture.name}.png") as image:
        assert image.info["Title"] == picture.title and min(image.size) > 200
    root = ElementTree.parse(folder / f"{picture.name}.svg").getroot()
    assert root.findtext("{http://www.w3.org/2000/svg}title") == picture.title
    assert root.findall(".//{http://www.w3.org/2000/svg}text")  # text is text, not outlines
    assert not list(folder.glob(".*"))


def test_without_finished_rows_no_figure_is_drawn(tmp_path: Path) -> None:
    assert draw_charts(results(), tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()


def test_comparison_has_measured_random_and_published_values(tmp_path: Path) -> None:
    data = results(row("bce", 0, "", 0.3), row("itq", 0, "", 0.2, auc=None))
    (picture,) = draw_charts(data, tmp_path)
    check_files(tmp_path, picture)
    numbers = read(tmp_path, "comparison")
    measured = {(n["method"], n["queries"], n["metric"]): n["value"] for n in numbers if n["kind"] == "measured"}
    assert measured == {
        ("bce", "positive queries", "ndcg"): "0.3", ("bce", "all queries", "ndcg"): "0.4", ("bce", "", "auc"): "0.7",
        ("itq", "positive queries", "ndcg"): "0.2", ("itq", "all queries", "ndcg"): "0.30000000000000004",
        ("itq", "", "auc"): "",
        ("bce", "all queries", "corrected_ndcg"): "0.15", ("itq", "all queries", "corrected_ndcg"): "0.1",
    }  # fmt: skip
    paper = [(n["method"], n["queries"], n["value"]) for n in numbers if n["kind"] == "paper"]
    assert paper == [("itq", "positive queries", "0.16"), ("bce", "positive queries", "0.31")]  # the table's order
    assert [n["value"] for n in numbers if n["kind"] == "random"] == ["0.5", "0.0", "0.12", "0.12"]
    assert "9 queries with at least one finding" in picture.caption and "over 10 queries" in picture.caption


@pytest.mark.slow
def test_factorial_has_every_chart_for_both_columns(tmp_path: Path) -> None:
    rows = [row("bce", size, "", 0.2) for size in (100, 200)]
    for place, method in enumerate(("proxy", "proxy-negative")):
        rows += [row(method, s, p, s / 1000 + int(p) / 100 + place) for s in (100, 200) for p in ("1", "2")]
    pictures = draw_charts(results(*rows), tmp_path)
    charts = ["train-size", "proxies", "size-and-proxies"]
    assert [p.name for p in pictures] == ["comparison", *charts, *(f"{name}-all" for name in charts)]
    for picture in pictures:
        check_files(tmp_path, picture)

    sizes = [n for n in read(tmp_path, "train-size") if n["metric"] == "ndcg"]
    assert [(n["method"], n["training_images"], n["proxies_per_class"]) for n in sizes] == [
        ("bce", "100", ""), ("bce", "200", ""), ("proxy", "100", "2"), ("proxy", "200", "2"),
        ("proxy-negative", "100", "2"), ("proxy-negative", "200", "2"),
    ]  # fmt: skip
    assert [float(n["value"]) for n in sizes] == pytest.approx([0.2, 0.2, 0.12, 0.22, 1.12, 1.22])
    proxies = [n for n in read(tmp_path, "proxies-all") if n["metric"] == "ndcg"]
    assert [(n["method"], n["proxies_per_class"]) for n in proxies] == [
        ("proxy", "1"), ("proxy", "2"), ("proxy-negative", "1"), ("proxy-negative", "2")
    ]  # fmt: skip
    assert [float(n["value"]) for n in proxies] == pytest.approx([0.31, 0.32, 1.31, 1.32])
    assert {n["training_images"] for n in proxies} == {"200"}
    both = read(tmp_path, "size-and-proxies")
    assert len(both) == 8 and {n["queries"] for n in both} == {"positive queries"}
    assert {n["metric"] for n in read(tmp_path, "train-size")} == {"auc", *CORRECTED, "ndcg", "acg", "precision"}
    compared = [n for n in read(tmp_path, "comparison") if n["kind"] == "measured"]  # largest size, paper's proxies
    assert {(n["training_images"], n["proxies_per_class"]) for n in compared} == {("200", ""), ("200", "2")}


def test_lines_pass_through_the_values_and_leave_out_what_is_missing() -> None:
    rows = [row("bce", 400, "", 0.5), row("bce", 100, "", 0.3, auc=None)]
    with sheet(2, 2) as page:
        axis = page.subplots()
        draw_lines(axis, by_method(rows), "positive queries", "ndcg", "training_images")
        draw_lines(axis, by_method(rows), "positive queries", "auc", "training_images")
        ndcg, auc = (container[0].get_xydata().tolist() for container in axis.containers)
    assert ndcg == [[100, 0.3], [400, 0.5]]
    assert auc == [[400, 0.7]]


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        draw_charts(results(row("bce", 0, "", 0.3)), tmp_path / folder)
    for kind in ("png", "svg", "csv"):
        first, second = ((tmp_path / folder / f"comparison.{kind}").read_bytes() for folder in ("a", "b"))
        assert first == second


def test_methods_differ_without_colour() -> None:
    styles = [method_style(name) for name in METHODS]
    assert len({style["marker"] for style in styles}) == len(METHODS)
    assert len({numbered_style(n)["marker"] for n in range(14)}) == 14


def test_numbers_in_a_report_match_its_results(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    data = make_results(*small_report)
    draw_charts(data, tmp_path)
    expected = {r["method"]: r["all queries"]["ndcg"] for r in data["rows"]}
    found = [
        n
        for n in read(tmp_path, "comparison")
        if (n["queries"], n["metric"], n["kind"]) == ("all queries", "ndcg", "measured")
    ]
    assert len(found) == 3
    for numbers in found:
        assert [float(numbers[name]) for name in ("value", "low", "high")] == [
            expected[numbers["method"]][name] for name in ("value", "low", "high")
        ]
