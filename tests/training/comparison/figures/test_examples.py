"""The page of examples: choice of queries, findings by agreement, and no patient data."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cbmir.errors import NotAnImageError
from cbmir.manifest import Row, read_manifest, write_manifest
from cbmir.training.comparison.cells import cell_folder, read_answers
from cbmir.training.comparison.figures import examples as module
from cbmir.training.comparison.figures.examples import agreement, choose_queries, draw_examples, examples
from cbmir.training.comparison.figures.sheet import ReportFigure
from cbmir.training.comparison.plan import Cell, Plan, selection_path

NAN = float("nan")


@pytest.fixture(scope="module")
def drawn(small_report: tuple[Path, Plan], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ReportFigure]]:
    """The pages of the small report, and their folder."""
    folder = tmp_path_factory.mktemp("examples")
    return folder, draw_examples(*small_report, folder)


def test_queries_by_hand() -> None:
    """With eleven values, quantile q % is at index q / 10: 9.5 (rounded to 10), 8, 6, 4, 2, 0.5 (0)."""
    ndcg = np.array([0.5, NAN, 0.1, 0.9, 0.3, 0.7, 0.2, NAN, 0.8, 0.4, 0.6, 1.0, 0.0])
    chosen = choose_queries(ndcg)
    assert [(ndcg[query], quantile) for query, quantile in chosen.items()] == [
        (1.0, 95), (0.8, 80), (0.6, 60), (0.4, 40), (0.2, 20), (0.0, 5)
    ]  # fmt: skip


def test_few_queries_are_named_once() -> None:
    assert choose_queries(np.array([0.5, NAN, 0.2])) == {0: 95, 2: 40}
    assert choose_queries(np.array([NAN])) == {}


def test_agreement_by_hand() -> None:
    """Uncertain labels count as positive, unknown ones do not."""
    query = Row(Path("q"), "p", (1, -1, 0, None, 1))
    some = agreement(query, Row(Path("n"), "r", (-1, 0, 1, 1, None)), "abcde")
    assert (some.shared, some.missing, some.more, some.kind) == (("a",), ("b", "e"), ("c", "d"), "some")
    assert some.findings == [("shared", "a"), ("more", "c"), ("more", "d"), ("missing", "b"), ("missing", "e")]
    assert agreement(query, Row(Path("n"), "r", (1, 1, 1, 1, 1)), "abcde").kind == "all"
    assert agreement(query, Row(Path("n"), "r", (0, 0, 1, 1, 0)), "abcde").kind == "none"


def test_pages_show_the_results_of_the_methods(
    small_report: tuple[Path, Plan], drawn: tuple[Path, list[ReportFigure]]
) -> None:
    (report, plan), (folder, pictures) = small_report, drawn
    assert [picture.name for picture in pictures] == ["examples-proxy-negative", "examples-bce"]
    (part,) = plan.parts()
    selection = read_manifest(selection_path(report, part))
    asking, gallery = selection.split("test").rows, selection.split("train").rows
    chosen = choose_queries(
        read_answers(report, plan, Cell(part, "proxy-negative", "2")).retrieval["positive queries"].ndcg
    )
    for picture, method in zip(pictures, ("proxy-negative", "bce"), strict=True):
        answers = read_answers(report, plan, next(c for c in plan.cells() if c.method == method))
        expected = []
        for query, quantile in chosen.items():
            for rank in range(5):
                pairs = zip(selection.labels.names, asking[query].labels, strict=True)
                near = gallery[answers.neighbours[query, rank]].labels
                shared = [name for (name, own), other in zip(pairs, near, strict=True) if own and other]
                expected.append([str(query), str(quantile), str(rank + 1), "; ".join(shared)])
        with (folder / f"{picture.name}.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        assert [[row[name] for name in ("query", "quantile", "rank", "shared")] for row in rows] == expected
        kinds = ["none" if not row["shared"] else "some" if row["missing"] else "all" for row in rows]
        told = ", ".join(f"{kinds.count(kind)} share {kind}" for kind in ("all", "some", "none"))
        assert f"Of the {len(kinds)} neighbours {told}" in picture.caption


def test_files_can_be_read_and_name_no_patient(drawn: tuple[Path, list[ReportFigure]]) -> None:
    folder, pictures = drawn
    for picture in pictures:
        svg, png = folder / f"{picture.name}.svg", folder / f"{picture.name}.png"
        root = ElementTree.parse(svg).getroot()
        assert root.findtext("{http://www.w3.org/2000/svg}title") == picture.title
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any(text and text.startswith("✓ ") for text in texts) and "nearest 5" in texts
        with Image.open(png) as image:
            image.load()
        for path in (svg, png, folder / f"{picture.name}.csv"):
            content = path.read_bytes()
            assert b"patient-" not in content and b"secret-" not in content


def test_missing_neighbours_are_not_shown(small_report: tuple[Path, Plan]) -> None:
    report, plan = small_report
    (part,) = plan.parts()
    answers = read_answers(report, plan, Cell(part, "bce"))
    neighbours = np.full_like(answers.neighbours, -1)
    neighbours[0, 0] = 3
    selection = read_manifest(selection_path(report, part))
    first, second = examples(replace(answers, neighbours=neighbours), {0: 95, 1: 5}, selection)
    assert [row for row, _ in first.neighbours] == [selection.split("train").rows[3]]
    assert second.neighbours == []


def test_without_finished_cells_nothing_is_drawn(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    assert draw_examples(tmp_path, small_report[1], tmp_path / "figures") == []
    assert not (tmp_path / "figures").exists()


def test_images_are_read_as_in_training(
    small_report: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, plan = small_report
    read, options = module.read_image, list[object]()
    monkeypatch.setattr(module, "read_image", lambda path, **own: options.append(own) or read(path, **own))
    draw_examples(report, replace(plan, training=plan.training | {"intensity": "minmax"}), tmp_path)
    assert options[0] == {"intensity": "minmax", "allow_lateral": False}


def test_a_missing_image_is_named(small_report: tuple[Path, Plan], tmp_path: Path) -> None:
    report, plan = small_report
    (part,) = plan.parts()
    selection = read_manifest(selection_path(report, part))
    rows = tuple(replace(row, image=tmp_path / "gone.png") for row in selection.rows)
    write_manifest(replace(selection, rows=rows), selection_path(tmp_path / "moved", part))
    for source in cell_folder(report, Cell(part, "bce")).iterdir():
        copy = cell_folder(tmp_path / "moved", Cell(part, "bce")) / source.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    with pytest.raises(NotAnImageError, match=r"gone\.png: no such file"):
        draw_examples(tmp_path / "moved", plan, tmp_path / "figures")
    assert not list(tmp_path.glob("figures/*"))
