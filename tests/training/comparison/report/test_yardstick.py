"""The part of the benchmark's report about the yardstick: its tables, and the best method."""

from __future__ import annotations

from typing import Any

from benchmark_results import DASH, EVERY, HOSTILE, POSITIVE, fig, gain, lines_of, make, row
from cbmir.training.comparison.report.render import best_statement
from cbmir.training.comparison.report.tables import TableCell, difference_tables, lists_table, retrieval_table
from cbmir.training.rankings import CORRECTED


def test_the_yardstick_comes_first_and_says_why_a_method_failed() -> None:
    lines = lines_of(make())
    start = lines.index("### Yardstick")
    assert start < lines.index("### Positive queries")
    rows = {line.split(" | ")[0]: line for line in lines[start + 4 : start + 13]}
    assert lines[start + 2].startswith(
        "| method | AUC | corrected nDCG@100, all queries | corrected Jaccard nDCG@100, all "
    )
    assert rows["| PROXY"] == (
        "| PROXY | 0.700 [0.600, 0.800] ± 0.004 "
        f"{'| **0.150** [0.290, 0.310] ± 0.004 | **0.075** [0.290, 0.310] ± 0.004 ' * 2}| 0.050 |"
    )
    assert rows["| SSH (0 of 2 parts)"] == f"| SSH (0 of 2 parts) {'| failed ' * 5}| {DASH} |"
    assert rows["| any list that ignores the query"].endswith(f"| n/a {'| 0.000 ' * 4}| {DASH} |")
    assert "- SSH failed: 64 bits \\> 32 (cells/seed0/ssh/log.txt and 1 more)" in lines
    lists = {cells[0].text: [cell.text for cell in cells[1:]] for cells in lists_table(make()).rows}
    assert lists["PROXY"] == ["0.300", "0.300", "0.500", "2.500"]
    assert lists["random lists"] == ["1.250", "0.250", "0.875", DASH]


def test_retrieval_by_finding() -> None:
    table = retrieval_table(make())
    assert [column.title for column in table.columns][:3] == ["finding", "its share of the gallery", "TEXTURE"]
    assert [(cells[0].text, cells[1].text, cells[2].text) for cells in table.rows] == [
        ("Mass, n = 12", "0.250", "0.125"), (f"{HOSTILE}, n = 12", "0.250", "0.125"),
        ("no finding at all, n = 12", "0.250", "0.125"),
    ]  # fmt: skip


CLEAR, CLOSE = fig(0.1, 0.05, 0.2, p_holm=0.002), fig(0.1, -0.05, 0.2, p_holm=0.5)


def lead(all_queries: dict[str, Any] = CLEAR, **auc: Any) -> dict[str, Any]:
    """`differences` of the leader; over positive queries, which do not decide, the interval contains 0."""
    columns = {EVERY: dict.fromkeys(CORRECTED, all_queries), POSITIVE: dict.fromkeys(CORRECTED, CLOSE)}
    return {**columns, "parts": 2, **auc}


def test_differences_of_the_leader_and_from_bce() -> None:
    of_one_part = lead() | {"parts": 1}
    best = {"method": None, "leaders": {"auc": "proxy"}, "differences": {"bce": lead(auc=CLEAR), "ssh": of_one_part}}
    leads, minus_bce = difference_tables(make(best=best))
    assert (leads.name, leads.title) == ("lead", "PROXY: lead over each other finished method")
    assert [column.title for column in leads.columns][:5] == [
        "method", "AUC lead", "p (Holm)", "corrected nDCG@100 lead, all queries", "p (Holm)",
    ]  # fmt: skip
    titles = next(leads.records())
    assert titles[4] == "p (Holm) of AUC lead" and len(set(titles)) == len(titles)
    rows = {cells[0].text: [cell.text for cell in cells[1:]] for cells in leads.rows}
    assert list(rows) == ["SSH", "BCE"], "in the order of the methods"
    assert rows["BCE"] == ["+0.100", "0.002"] * 3 + ["+0.100", "0.500"] * 2
    assert rows["SSH"][:4] == ["n/a", DASH, "+0.100", "0.002"], "it has no AUC"
    assert [cells[0].detail for cells in leads.rows] == ["on 1 of 2 parts", ""]
    assert (minus_bce.name, minus_bce.title) == ("minus-bce", "Differences from BCE")
    rows = {cells[0].text: [cell.text for cell in cells[1:]] for cells in minus_bce.rows}
    assert list(rows) == ["TEXTURE", "ML-PROXY-NCA (1 of 2 parts)", "PROXY", "PROXY-AUTO"]
    assert rows["PROXY"] == [
        "+0.025", "0.020", "+0.051", "0.041", "+0.052", "0.041", "+0.051", "0.040", "+0.052", "0.040",
    ]  # fmt: skip
    assert list(difference_tables(make(rows=[row("bce", 0.2)]))) == []
    half = gain(0.05, 0.01, 0.09, 0.04) | {"parts": 1}
    (minus_bce,) = difference_tables(make(rows=[row("proxy", 0.3, minus_bce=half)]))
    assert minus_bce.rows[0][0] == TableCell("PROXY", "on 1 of 2 parts")


def test_statement_about_the_best_method() -> None:
    led = dict.fromkeys(("auc", *CORRECTED), "proxy")

    def said(method: str | None, leaders: dict[str, str], differences: dict[str, Any]) -> str:
        best = {"method": method, "leaders": leaders, "differences": differences}
        return best_statement(make(best=best))

    assert said("proxy", led, {"bce": lead(auc=CLEAR)}).startswith("Best: PROXY. It leads every other")
    others = {"bce": lead(auc=CLOSE), "ssh": lead(), "texture": lead(CLOSE, auc=CLEAR)}
    assert said(None, led, others) == (
        "No method is called best: PROXY has the highest AUC and corrected nDCGs, but intervals of its differences do "
        "not lie above 0: BCE (AUC); TEXTURE (corrected nDCG@100, corrected Jaccard nDCG@100)."
    )
    assert said(None, led | {"auc": "bce"}, {}) == (
        "No method is called best: different methods lead, in AUC BCE, in corrected nDCG@100 PROXY, in corrected "
        "Jaccard nDCG@100 PROXY."
    )
    assert said(None, led, {}).endswith("only one method has finished all of its parts.")
    assert said(None, {}, {}).endswith("no method that has finished all of its parts has figures.")
    assert said(None, {"corrected_ndcg": "ssh"}, {}).endswith("finished all of its parts has an AUC.")
