"""The benchmark's report from handwritten results: its tables, its sentences, and its three formats."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import logging
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

import cbmir.training.comparison.report.render as module
from benchmark_results import (
    COMMANDS,
    DASH,
    EVERY,
    HOSTILE,
    POSITIVE,
    REFERENCES,
    gain,
    lines_of,
    make,
    make_sweep,
    row,
    unfinished,
)  # fmt: skip
from cbmir.errors import NotAnImageError
from cbmir.training.comparison.figures.sheet import ReportFigure
from cbmir.training.comparison.plan import Plan
from cbmir.training.comparison.report.provenance import duration, options_table
from cbmir.training.comparison.report.render import (
    PATIENTS_NOTICE,
    compared,
    contents,
    page,
    write_report,
)
from cbmir.training.comparison.report.tables import (
    breakdown_tables,
    finding_table,
    paper_table,
    sweep_table,
    yardstick_table,
)

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Balanced(HTMLParser):
    """A parser that records every element and URL, and fails if tags are not properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_paper_table_of_positive_queries() -> None:
    lines = lines_of(make())
    start = lines.index("### Positive queries")
    dashes = {ord("\N{EN DASH}"): "-", ord("\N{MINUS SIGN}"): "-"}
    assert [line.translate(dashes) for line in lines[start + 2 : start + 14]] == [
        "| method | AUC | nDCG@100 | ACG@100 | precision@100 | Jaccard nDCG@100 | nDCG@100 - BCE | p (Holm) "
        "| paper's own nDCG@100 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| SSH (0 of 2 parts) | failed | failed | failed | failed | failed | - | - | 0.15 |",
        f"| TEXTURE | n/a {'| 0.125 [0.115, 0.135] ' * 4}| -0.125 [-0.200, -0.050] | \\< 0.001 | - |",
        f"| COMMUNITY (0 of 2 parts) {'| not finished ' * 5}| - | - | - |",
        f"| BCE | **0.750** [0.650, 0.850] ± 0.004 {'| 0.250 [0.240, 0.260] ± 0.004 ' * 4}| reference | - | 0.31 |",
        f"| ML-PROXY-NCA (1 of 2 parts) | 0.700 [0.600, 0.800] ± 0.004 {'| 0.900 [0.890, 0.910] ± 0.004 ' * 4}"
        "| +0.650 [0.600, 0.700] | 0.010 | - |",
        f"| PROXY | 0.700 [0.600, 0.800] ± 0.004 {'| **0.300** [0.290, 0.310] ± 0.004 ' * 4}"
        "| +0.050 [0.010, 0.090] | 0.040 | 0.38 |",
        f"| PROXY-AUTO | 0.700 [0.600, 0.800] ± 0.004 {'| 0.290 [0.280, 0.300] ± 0.004 ' * 4}"
        "| +0.040 [0.010, 0.070] | 0.060 | - |",
        *(f"| {name} | n/a | 0.100 | 0.200 | 0.300 | 0.400 | - | - | - |" for name in REFERENCES),
    ]
    notes = "\n".join(lines[start + 14 : lines.index("### All queries")])
    assert "- 12 queries of 2 seeds have an nDCG; 3 are left out" in notes
    assert "paper's figures, for its data and code; they were not measured here" in notes
    assert "- 15 queries of 2 seeds have an nDCG; 0 are left out" in "\n".join(lines)


def test_queries_of_several_seeds_are_counted_only_if_all_are_finished() -> None:
    results = make()
    one_seed = results | {"plan": results["plan"] | {"seeds": 1}}
    half = make(rows=[row("bce", 0.25, finished=1)])
    for other in (one_seed, half):
        assert paper_table(other, POSITIVE).notes[0].startswith("12 queries have an nDCG; 3 are left out (")


def test_a_protocol_without_published_values_has_no_column_for_them() -> None:
    results = make()
    results["methods"] = {name: method | {"paper": {}} for name, method in results["methods"].items()}
    table = paper_table(results, POSITIVE)
    assert [column.title for column in table.columns][-2:] == ["nDCG@100 \N{MINUS SIGN} BCE", "p (Holm)"]
    assert not any("paper" in note for note in table.notes)


def test_a_comparison_states_fewer_parts_and_needs_bce() -> None:
    results = make(rows=[row("proxy", 0.3, minus_bce=gain(0.05, 0.01, 0.09, 0.04) | {"parts": 1}), row("texture", 0.1)])
    texture, proxy, *_ = paper_table(results, POSITIVE).rows
    assert [(cell.text, cell.detail) for cell in proxy[6:8]] == [
        ("+0.050", "[0.010, 0.090] on 1 of 2 parts"), ("0.040", ""),
    ]  # fmt: skip
    assert [cell.text for cell in texture[6:8]] == [DASH] * 2


def test_equal_figures_are_both_best_but_never_the_random_ranking() -> None:
    results = make(rows=[row("bce", 0.09), row("proxy", 0.0901)])
    table = paper_table(results, EVERY)
    assert [cells[2].best for cells in table.rows] == [True, True, False, False, False]


def test_a_sweep_has_a_separate_table() -> None:
    results = make_sweep()
    rows = [tuple(cell.text for cell in cells[:3]) for cells in sweep_table(results, POSITIVE).rows]
    assert rows == [
        ("BCE", "1,200", DASH), ("PROXY", "600", "2"), ("PROXY", "600", "8"), ("PROXY", "1,200", "2"),
        ("PROXY", "1,200", "8"),
    ]  # fmt: skip
    results["rows"][2] |= {"minus_bce": gain(0.05, 0.01, 0.09, 0.04)}
    table = sweep_table(results, EVERY)
    titles = ["AUC", "corrected nDCG@100", "corrected Jaccard nDCG@100", "nDCG@100"]
    assert [column.title for column in table.columns[3:7]] == titles
    assert [cell.text for cell in table.rows[1][3:7]] == ["0.700", "0.150", "0.075", "0.300"]
    assert [column.title for column in table.columns[10:]] == [
        "corrected nDCG@100 \N{MINUS SIGN} BCE", "p (Holm)", "nDCG@100 \N{MINUS SIGN} BCE", "p (Holm)",
    ]  # fmt: skip
    assert [[cell.text for cell in cells[10:]] for cells in table.rows[:3]] == [
        ["reference", DASH] * 2, [DASH] * 4, ["+0.051", "0.041", "+0.050", "0.040"],
    ]  # fmt: skip
    assert [cells[0].text for cells in paper_table(results, POSITIVE).rows] == ["BCE", "PROXY", *REFERENCES]
    text = "\n".join(lines_of(results))
    assert "## Sweeps" in text and "with all training images and 2 proxies per class" in text
    assert "## Sweeps" not in "\n".join(lines_of(make()))


def test_a_sweep_with_automatic_numbers_of_proxies() -> None:
    results = make(rows=[row("proxy", 0.3, proxies="2"), row("proxy", 0.3, proxies="auto")])
    table = sweep_table(results, POSITIVE)
    assert [cells[2].text for cells in table.rows] == ["2", "auto"]
    assert [record[2] for record in table.records()] == ["proxies per class", "2", "auto"]


def test_a_failure_is_reported_in_its_own_rows() -> None:
    results = make_sweep()
    failed = {"cell": "seed1-fold2-600/proxy-m8", "method": "proxy", "error": "no memory", "log": "x/log.txt"}
    rows = [r if (r["size"], r["proxies"]) != (600, "8") else unfinished("proxy") | {"size": 600, "proxies": "8"}
            for r in results["rows"]]  # fmt: skip
    results |= {"failed": [failed], "rows": rows}
    table = sweep_table(results, POSITIVE)
    assert [cells[3].text for cells in table.rows] == ["0.700", "0.700", "failed", "0.700", "0.700"]
    assert table.notes == ("PROXY failed: no memory (cells/x/log.txt)",)
    assert not any("no memory" in note for note in yardstick_table(results).notes)


def test_auc_by_finding_has_the_methods_with_a_classifier() -> None:
    table = finding_table(make())
    assert [c.title for c in table.columns] == ["finding", "BCE", "ML-PROXY-NCA (1 of 2 parts)", "PROXY", "PROXY-AUTO"]
    assert [(cells[0].text, cells[1].text) for cells in table.rows] == [
        ("Mass", "0.750"), (HOSTILE, "n/a"), ("mean", "0.750"),
    ]  # fmt: skip
    assert table.notes == (f"Left out of the mean of a method if the queries do not have both values: {HOSTILE}.",)


def test_breakdown_if_the_manifest_has_views() -> None:
    (table,) = breakdown_tables(make())
    assert (table.name, table.columns[1].title) == ("views-positive-queries", "AP, n = 1,020")
    assert {cells[0].text: cells[1].text for cells in table.rows}["PROXY"] == "0.300"


def test_summary_of_the_comparison() -> None:
    text = compared(make())
    assert text.startswith("7 methods by the protocol “NIH” (2 findings)") and "the 100 nearest" in text
    assert "Each part (2 seeds) has 1,200 training images and 15 to 16 queries of 7 patients." in text


def test_markdown_escapes_user_text() -> None:
    text = "\n".join(lines_of(make(), [ReportFigure("a", "T*", "C <b>")]))
    assert "| \\<script\\>alert(1)\\</script\\>\\|\\*x\\*]\\(http://evil.example) |" in text
    assert "<script" not in text.replace("\\<", "")
    assert "![T\\*](figures/a.png)\n\nC \\<b\\> Files: [SVG](figures/a.svg), [CSV](figures/a.csv)." in text
    assert f"\n\n    {COMMANDS[0]}\n    {COMMANDS[1]}\n\n" in text
    assert f"> Research use only. Not a medical device, not for diagnosis. {PATIENTS_NOTICE}\n" in text
    assert "images of patients" in PATIENTS_NOTICE
    assert "> Of drawings. Research use only." in "\n".join(lines_of(make() | {"notes": ["Of drawings."]}))


def test_provenance_has_rules_and_sources() -> None:
    lines = lines_of(make())
    (rule,) = [line for line in lines if "the highest mean of AUC and corrected nDCG@10 on validation images" in line]
    assert "stops early" in rule and "patience" in rule
    start = lines.index("## Sources of the methods")
    assert lines[start + 2 : start + 5] == [
        "- SSH: Who \\& Co, ssh.",
        "- TEXTURE: Who \\& Co, texture. Numbers chosen \\<here\\>.",
        "- COMMUNITY: Who \\& Co, community.",
    ]


def test_options_name_the_methods_that_have_their_own() -> None:
    """BCE is there because ITQ needs it. ITQ trains no network."""
    tuned = {"fitted": {"lr": 0.5, "seeds": 1}, "proxy": {"lr": 0.6}, "itq": {"lr": 0.7}, "bce": {"lr": 0.8}}
    plan = {"training": {"lr": 0.1, "linear_fit": True}, "methods": ["itq", "fitted"], "tuned": tuned}
    results = {"plan": plan, "methods": {"bce": {}, "itq": {}, "fitted": {}}}
    shown = {name.text: value.text for name, value in options_table(results).rows}
    assert (shown["lr"], shown["lr, BCE"], shown["lr, BCE, and a linear fit"]) == ("0.1", "0.8", "0.5")
    assert not [name for name in shown if any(word in name for word in ("linear-fit", "seeds", "Xing", "ITQ"))]


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (tmp_path / "a.png").write_bytes(b"png")
    text = page(contents(make(), [ReportFigure("a", 'T"', "C <b>")]), tmp_path)
    parsed = Balanced(text)
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("script") == 1 and not {"link", "iframe", "object", "b"} & set(tags)
    for _, attributes in parsed.elements:
        assert not (attributes.get("src") or "data:").startswith(("http", "//")) and "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    ids = {attributes["id"] for _, attributes in parsed.elements if "id" in attributes}
    addresses = [attributes["href"] or "" for tag, attributes in parsed.elements if tag == "a"]
    assert all(a[1:] in ids if a.startswith("#") else a.startswith(("tables/", "figures/")) for a in addresses)
    assert "@import" not in text and "url(" not in text
    assert f"<code>{escape(COMMANDS[0])}\n{escape(COMMANDS[1])}</code>" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "<strong>0.300</strong>" in text
    (image,) = [attributes for tag, attributes in parsed.elements if tag == "img"]
    assert image["alt"] == 'T"' and (image["src"] or "").startswith("data:image/svg+xml;base64,")
    policies = [a["content"] or "" for t, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies[0].startswith("default-src 'none'; img-src data:;") and "unsafe" not in policies[0]
    for tag in ("style", "script"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert inline.strip() and f"{tag}-src 'sha256-{digest}'" in policies[0]


def test_a_large_drawing_is_shown_in_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_bytes(b" " * 300_000)
    (tmp_path / "a.png").write_bytes(b"png")
    assert 'src="data:image/png;base64,cG5n"' in page(contents(make(), [ReportFigure("a", "T", "C")]), tmp_path)


def test_before_any_cell_is_finished() -> None:
    text = "\n".join(lines_of(make(rows=[unfinished("bce"), unfinished("proxy")], references={}, failed=[])))
    nothing = f"{' | '.join([DASH] * 2)} |"
    assert "- No method is finished." in text and "## By finding" not in text
    assert f"| PROXY (0 of 2 parts) | {'not finished | ' * 5}{nothing}" in text
    assert f"| random ranking | {'n/a | ' * 5}{nothing}" in text
    assert "3 cells are not finished and 0 failed." in text


def test_duration() -> None:
    assert [duration(s) for s in (11.6, 200, 3599.6, 7320)] == ["12 s", "3 min 20 s", "1 h 00 min", "2 h 02 min"]


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Use handwritten results and one picture, without drawing anything."""
    results = make()

    def draw(_: Any, folder: Path) -> list[ReportFigure]:
        for kind in ("svg", "png", "csv"):
            (folder / f"a.{kind}").write_text("x")
        return [ReportFigure("a", "T", "C")]

    monkeypatch.setattr(module, "make_results", lambda report, plan: results)
    monkeypatch.setattr(module, "draw_charts", draw)
    for name in ("draw_maps", "draw_examples"):
        monkeypatch.setattr(module, name, lambda report, plan, folder: [])
    return results


PLAN = Plan("nih", "nih.csv", "ab12", ("bce",))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_report_folder_and_its_rewrite(stubbed: dict[str, Any], tmp_path: Path) -> None:
    assert write_report(tmp_path, PLAN) == tmp_path / "index.html"
    first = files(tmp_path)
    assert set(first) == {
        "results.json", "report.md", "index.html", "figures/a.svg", "figures/a.png", "figures/a.csv",
        *(f"tables/{name}.csv" for name in ("yardstick", "minus-bce", "lists", "positive-queries", "all-queries",
          "auc-by-finding", "retrieval-by-finding", "selections", "views-positive-queries", "options", "machine",
          "run-times")),
    }  # fmt: skip
    assert json.loads(first["results.json"]) == stubbed
    write_report(tmp_path, PLAN)
    assert files(tmp_path) == first


def test_csv_tables_have_the_numbers(stubbed: dict[str, Any], tmp_path: Path) -> None:
    write_report(tmp_path, PLAN)
    with (tmp_path / "tables/positive-queries.csv").open(newline="", encoding="utf-8") as stream:
        rows = {record["method"]: record for record in csv.DictReader(stream)}
    measure = [rows["PROXY"][f"nDCG@100{end}"] for end in ("", " low", " high", " sd")]
    assert measure == ["0.3", "0.29", "0.31", "0.004"]
    ndcg = "nDCG@100 \N{MINUS SIGN} BCE"
    assert [rows["PROXY"][f"{ndcg}{end}"] for end in ("", " low", " high")] == ["0.05", "0.01", "0.09"]
    assert [rows[name][f"p (Holm) of {ndcg}"] for name in ("PROXY", "TEXTURE", "BCE")] == ["0.04", "0.0002", ""]
    assert rows["BCE"][ndcg] == "reference"
    assert rows["PROXY"]["paper's own nDCG@100"] == "0.38"
    assert rows["TEXTURE"]["AUC"] == rows["TEXTURE"]["nDCG@100 sd"] == ""
    assert rows["SSH (0 of 2 parts)"]["nDCG@100"] == "failed"
    with (tmp_path / "tables/minus-bce.csv").open(newline="", encoding="utf-8") as stream:
        rows = {record["method"]: record for record in csv.DictReader(stream)}
    auc = "AUC \N{MINUS SIGN} BCE"
    assert [rows["PROXY"][f"{auc}{end}"] for end in ("", " low", " high")] == ["0.025", "0.005", "0.045"]
    assert [rows[name][f"p (Holm) of {auc}"] for name in ("PROXY", "TEXTURE")] == ["0.02", ""]
    with (tmp_path / "tables/run-times.csv").open(newline="", encoding="utf-8") as stream:
        seconds = [record["run time (s)"] for record in csv.DictReader(stream)]
    assert seconds == ["", "3723", "", "3723", "3723", "3723", "3723"]


def test_missing_images_only_remove_the_examples(
    stubbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: Any) -> list[ReportFigure]:
        raise NotAnImageError("a.png: no such file")

    write_report(tmp_path, PLAN)
    before = files(tmp_path)
    monkeypatch.setattr(module, "draw_examples", gone)
    with caplog.at_level(logging.WARNING, "cbmir"):
        assert write_report(tmp_path, PLAN) == tmp_path / "index.html"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "No page of examples: a.png: no such file")
    ]
    assert files(tmp_path) == before and "figures/a.png" in (tmp_path / "report.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["draw_charts", "draw_maps", "draw_examples"])
def test_results_are_kept_if_a_figure_fails(
    name: str, stubbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[ReportFigure]:
        raise OSError("disk full")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, PLAN)
    assert json.loads(files(tmp_path)["results.json"]) == stubbed
    assert not (tmp_path / "index.html").exists()


def test_an_error_keeps_the_previous_report(
    stubbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(tmp_path, PLAN)
    before = files(tmp_path)

    def broken(*_: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(module, "page", broken)
    monkeypatch.setitem(stubbed, "made", "later")
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, replace(PLAN, seeds=2))
    after = files(tmp_path)
    assert json.loads(after.pop("results.json")) == stubbed  # it is written first
    del before["results.json"]
    assert after == before
