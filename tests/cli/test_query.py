"""`cbmir query`: arguments, output and exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cbmir.card import NOT_A_DEVICE, OperatingPoint
from cbmir.manifest import read_manifest, write_manifest
from cbmir.runtime import Finder, Gallery, read_image
from cbmir.runtime.imaging.picture_check import SENTENCES
from cbmir.runtime.results import most_probable_first
from command_line import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def image(tiny_manifest: Path) -> Path:
    return tiny_manifest.parent / "image_20.png"


def test_json(tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured) -> None:
    assert run("query", tiny_model, tiny_gallery, image, image, "-k", 3, "--json") == 0
    answers = json.loads(capsys.readouterr().out)
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        assert answers == [finder.analyze(image, 3).to_json()] * 2
    assert list(answers[0]) == [
        "image", "known", "operating_point", "findings", "rank", "region", "refinement", "neighbours", "agreement",
        "novelty", "warnings",
    ]  # fmt: skip
    assert (answers[0]["operating_point"], answers[0]["rank"]) == ("balanced", "nearness")
    assert list(answers[0]["findings"][0]) == ["label", "score", "probability", "predicted", "threshold"]
    assert list(answers[0]["neighbours"][0]) == [
        "id", "image", "patient_id", "distance", "cosine", "labels", "shared", "report", "uncertain", "boxes",
        "place", "view", "source", "date",
    ]  # fmt: skip
    assert len(answers[0]["neighbours"]) == 3
    assert answers[0]["image"] == str(image)


def test_a_region_and_a_refined_search(tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured) -> None:
    asked = ("--region", "0.1,0.5,0.5,0.9", "--alike", "image_01", "--unlike", "image_02", "--towards", "Mass=-0.5")
    assert run("query", tiny_model, tiny_gallery, image, "-k", 3, "--json", *asked) == 0
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        region = finder.analyze(image, 3, region=(0.1, 0.5, 0.5, 0.9))
        refined = finder.refine(region, alike=["image_01"], unlike=["image_02"], findings={"Mass": -0.5}, k=3)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps([refined.to_json()]))
    assert run("query", tiny_model, tiny_gallery, image, *asked) == 0
    assert "Neighbours, nearest to the region 0.10,0.50,0.50,0.90 first, refined" in capsys.readouterr().out
    for wrong in (("--region", "0.1,0.5"), ("--region", "0.5,0.5,0.5,0.5"), ("--towards", "Mass"), ("--alike", "x")):
        assert run("query", tiny_model, tiny_gallery, image, *wrong) == 2
        assert "xpected" in capsys.readouterr().err


def test_warnings_about_the_picture_come_first(
    tiny_model: Path, tiny_gallery: Path, inverted_chest: NDArray[np.uint8], tmp_path: Path, capsys: Captured
) -> None:
    Image.fromarray(inverted_chest).save(tmp_path / "chest.png")
    assert run("query", tiny_model, tiny_gallery, tmp_path / "chest.png") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"  Warning: {SENTENCES['inverted']}"


def test_text(tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured) -> None:
    assert run("query", tiny_model, tiny_gallery, image, "-k", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        analysis = finder.analyze(image, 2)
    assert lines[0] == str(image)
    assert any("patient of this image is not known" in line for line in lines)
    for f in analysis.findings:
        line = next(line for line in lines if line.startswith(f"  {f.label} "))
        assert f"{f.score:.3f}" in line
        assert line.endswith({True: "  predicted", False: "0.900", None: "  no threshold"}[f.predicted])
    for n in analysis.neighbours:
        at = next(number for number, line in enumerate(lines) if line.startswith(f"  {n.id} "))
        assert f"{n.distance:.3f}" in lines[at]
        assert all((f"{name}*" in lines[at]) == (name in n.shared) for name in n.labels)
        assert lines[at + 1].strip() == n.report.splitlines()[0]
    assert lines[-1] == NOT_A_DEVICE


def test_rank_and_operating_point(
    tmp_path: Path, make_tiny_model: Callable[..., Path], tiny_gallery: Path, image: Path, capsys: Captured
) -> None:
    points = (OperatingPoint(0.125, 0.9, 0.5, 0.5, 0.9), None, None)
    model = make_tiny_model(tmp_path / "model.onnx", operating_points={"sensitive": points})
    options = ("-k", 4, "--rank", "findings", "--operating-point", "sensitive")
    assert run("query", model, tiny_gallery, image, *options, "--json") == 0
    (answer,) = json.loads(capsys.readouterr().out)
    with Finder.open(model, tiny_gallery, threads=1, operating_point="sensitive") as finder:
        analysis = finder.analyze(image, 4, rank="findings")
    assert answer == analysis.to_json()
    assert (answer["rank"], answer["operating_point"]) == ("findings", "sensitive")
    assert [f["threshold"] for f in answer["findings"]] == [0.125, None, None]

    assert run("query", model, tiny_gallery, image, *options) == 0
    text = capsys.readouterr().out
    assert (
        "threshold  (sensitive)\n" in text
        and "  Neighbours, greatest expected agreement with these findings first\n" in text
    )
    assert text.count("  0.125") == 1
    at = [text.index(f"\n  {n.id} ") for n in analysis.neighbours]
    assert at == sorted(at)
    assert run("query", model, tiny_gallery, image) == 0
    text = capsys.readouterr().out
    assert "threshold  (balanced)\n" in text and "  Neighbours, nearest first\n" in text

    for wrong in (("--rank", "beauty"), ("--operating-point", "keen")):
        assert run("query", model, tiny_gallery, image, *wrong) == 2
        assert "is not one of" in capsys.readouterr().err
    assert run("query", model, tiny_gallery, image, "--operating-point", "specific") == 2
    assert "expected an operating point of this model (balanced, sensitive)" in capsys.readouterr().err


def test_a_gallery_without_dates(tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured) -> None:
    assert run("query", tiny_model, tiny_gallery, image, "--since", "2020-01-01") == 0
    assert "No image of the gallery has a date" in capsys.readouterr().err
    assert run("query", tiny_model, tiny_gallery, image, "--view", "LATERAL") == 0
    assert "has a date" not in capsys.readouterr().err


def test_the_same_patient(tiny_model: Path, tiny_gallery: Path, tiny_manifest: Path, capsys: Captured) -> None:
    def patients(*options: str) -> list[str]:
        own = tiny_manifest.parent / "image_00.png"
        assert run("query", tiny_model, tiny_gallery, own, "-k", 50, "--json", *options) == 0
        return sorted({n["patient_id"] for n in json.loads(capsys.readouterr().out)[0]["neighbours"]})

    everyone = [f"patient_{n:02}" for n in range(10)]
    assert patients() == everyone[1:]
    assert patients("--include-same-patient") == everyone
    assert patients("--patient-id", "patient_09") == everyone[1:9]


@pytest.fixture
def dated(tmp_path: Path, tiny_model: Path, tiny_manifest: Path, capsys: Captured) -> Path:
    """A gallery of all 24 images: image n is from January n + 1, the last 12 are AP, the first 6 from one hospital."""
    table = read_manifest(tiny_manifest)
    rows = [
        replace(
            row, date=f"2020-01-{n + 1:02}", view="PA" if n < 12 else "AP", split="train", source="St. Süd" * (n < 6)
        )
        for n, row in enumerate(table)
    ]
    write_manifest(replace(table, rows=tuple(rows)), tmp_path / "dated.csv")
    assert run("index", "build", tiny_model, tmp_path / "dated.csv", "-o", tmp_path / "dated") == 0
    capsys.readouterr()
    return tmp_path / "dated"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--where", "Effusion and not Mass"], {n for n in range(24) if n % 2 and n % 3 == 0}),
        (["--where", "mass"], {n for n in range(24) if n % 3}),
        (["--where", "not Nodule"], set()),  # not known to be absent for any image
        (["--view", "pa"], set(range(12))),
        (["--source", "ST. SÜD"], set(range(6))),
        (["--source", "Süd"], set()),
        (["--since", "2020-01-20"], set(range(19, 24))),
        (["--until", "2020-01-03"], {0, 1, 2}),
        (["--since", "2020", "--until", "2020-01"], set(range(24))),
        (["--since", "2031"], set()),
        (["--until", "2019-02"], set()),
        (["--since", "2020-01-03", "--until", "2020-01-20", "--view", "AP", "--where", "Nodule"], {15}),
        (["--view", "LATERAL"], set()),
        (["--exact"], set(range(24))),
    ],
)
def test_filters(
    tiny_model: Path, dated: Path, image: Path, options: list[str], expected: set[int], capsys: Captured
) -> None:
    command = ["query", tiny_model, dated, image, "-k", 24, "--include-same-patient", "--json"]
    assert run(*command, *options) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert {int(n["id"].removeprefix("image_")) for n in answer["neighbours"]} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--where", "Fracture"], "Fracture"),
        (["--where", "Effusion and"], "expected"),
        (["--view", "PAX"], "'PAX' is not one of"),
        (["--since", "2020-13"], "expected YYYY, YYYY-MM or YYYY-MM-DD, found '2020-13'"),
        (["--since", "20200101"], "expected YYYY, YYYY-MM or YYYY-MM-DD, found '20200101'"),
        (["--since", "2020-01-02", "--until", "2020-01-01"], "expected days in order"),
        (["--pseudonyms", "env:CBMIR_NOT_SET"], "environment variable CBMIR_NOT_SET"),
    ],
)
def test_invalid_filters(
    tiny_model: Path, tiny_gallery: Path, image: Path, options: list[str], message: str, capsys: Captured
) -> None:
    assert run("query", tiny_model, tiny_gallery, image, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_why_nothing_was_found(tiny_model: Path, dated: Path, image: Path, capsys: Captured) -> None:
    command = ("query", tiny_model, dated, image)
    assert run(*command, "--since", "2031", "--view", "ap", "--source", "st. süd", "--where", "Mass") == 0
    captured = capsys.readouterr()
    assert "\n  none\n" in captured.out
    assert captured.err.splitlines() == [
        "No neighbours: the gallery has 24 images; each filter by itself leaves",
        "  --where Mass: 16 images",
        "  --view AP: 12 images",
        "  --source st. süd: 6 images",
        "  --since 2031-01-01: 0 images",
        "The gallery's dates go from 2020-01-01 to 2020-01-24.",
        "The same patient's images were left out too; --include-same-patient keeps them.",
    ]
    assert run(*command, "-k", 0) == 0
    assert "No neighbours" not in capsys.readouterr().err


def test_views_sources_and_dates_if_the_gallery_has_them(
    tiny_model: Path, tiny_gallery: Path, dated: Path, image: Path, capsys: Captured
) -> None:
    assert run("query", tiny_model, dated, image, "--include-same-patient", "-k", 24, "--since", "2020-01-24") == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  neighbour +distance  view  date         labels", out)
    assert re.search(r"\n  image_23 +\d\.\d{3}  AP    2020-01-24   ", out)
    assert run("query", tiny_model, dated, image, "--include-same-patient", "--until", "2020-01-01") == 0
    assert re.search(r"\n  image_00 +\d\.\d{3}  PA    St. Süd  2020-01-01   ", capsys.readouterr().out)
    assert run("query", tiny_model, tiny_gallery, image) == 0
    assert "  date" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("query", "GALLERY", "MODEL", "IMAGE"), "'MODEL': 'GALLERY' is a gallery, not a model. Are MODEL and GALLERY"),
        (("query", "MODEL", "MODEL", "IMAGE"), "'GALLERY': 'MODEL' is a model, not a gallery. Are MODEL and GALLERY"),
        (("query", "MODEL", "starter", "IMAGE"), "'GALLERY': 'starter' is a model, not a gallery."),
        (("index", "add", "MODEL", "GALLERY", "x.csv"), "'GALLERY': 'MODEL' is a model, not a gallery. Are MODEL and"),
        (("demo", "GALLERY", "MODEL"), "'MODEL': 'GALLERY' is a gallery, not a model."),
        (("embed", "GALLERY", "x.csv", "-o", "x.npy"), "'MODEL': 'GALLERY' is a gallery, not a model.\n"),
        (("serve", "--model", "GALLERY"), "'--model': 'GALLERY' is a gallery, not a model."),
    ],
)
def test_swapped_arguments(
    args: tuple[str, ...], message: str, tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured
) -> None:
    places = {"MODEL": str(tiny_model), "GALLERY": str(tiny_gallery), "IMAGE": str(image)}
    assert run(*(places.get(word, word) for word in args)) == 2
    err = capsys.readouterr().err.replace(f"'{tiny_gallery}'", "'GALLERY'").replace(f"'{tiny_model}'", "'MODEL'")
    assert f"Invalid value for {message}" in err
    assert err.startswith(f"Usage: cbmir {args[0]} ")


def test_a_report_and_pictures_without_gradio(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path
) -> None:
    started = (
        "import sys; sys.modules |= dict.fromkeys(('gradio', 'gradio_client', 'fastapi', 'torch'));"
        "from cbmir.cli import main; main(sys.argv[1:])"
    )
    options = ["-k", "2", "--report", str(tmp_path / "out.html"), "--evidence", str(tmp_path / "pictures")]
    done = subprocess.run(
        [sys.executable, "-c", started, "query", str(tiny_model), str(tiny_gallery), str(image), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()) == (
        0, [f"{tmp_path}/out.html: the report", f"{tmp_path}/pictures/image_20.*.png: 3 pictures"],
    )  # fmt: skip
    report = (tmp_path / "out.html").read_text("utf-8")
    assert "cbmir: report on an image" in report and image.name not in report and "http" not in report
    drawn = {file.name: read_image(file).pixels.shape for file in (tmp_path / "pictures").iterdir()}
    height, width = read_image(image).pixels.shape
    assert [drawn.pop(f"image_20.neighbour-{rank}.png") for rank in (1, 2)] == [(height, 2 * width)] * 2
    assert [*drawn.values()] == [(height, width)]
    with Finder.open(tiny_model, tiny_gallery, threads=1) as finder:
        first = most_probable_first(finder.analyze(image).findings)[0].label
    assert [*drawn] == [f"image_20.{first}.png"]


def test_pictures_of_images_with_the_same_name_and_of_missing_neighbours(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(image, tmp_path / folder / "chest.png")
    shutil.copytree(tiny_gallery, tmp_path / "gallery")
    with Gallery.open(tmp_path / "gallery") as gallery:
        gallery.update([replace(entry, image=str(tmp_path / "gone.png")) for entry in list(gallery.every_entry())])
    images = [tmp_path / folder / "chest.png" for folder in ("a", "b")]
    assert run("query", tiny_model, tmp_path / "gallery", *images, "-k", 1, "--evidence", tmp_path / "drawn") == 0
    assert "Neighbour 1 is not drawn: " in capsys.readouterr().err
    assert {file.parent.name for file in (tmp_path / "drawn").rglob("*.png")} == {"a", "b"}
    assert run("query", tiny_model, tiny_gallery, *images, "--report", tmp_path / "out.html") == 2
    assert "--report takes one IMAGE, found 2" in capsys.readouterr().err


def test_pictures_of_images_by_relative_paths_stay_in_their_folder(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        shutil.copy(image, folder / "chest.png")
    monkeypatch.chdir(tmp_path / "in")
    images = ["chest.png", "../chest.png", "chest.png", tmp_path / "chest.png"]
    assert run("query", tiny_model, tiny_gallery, *images[:3], "-k", 1, "--evidence", "drawn") == 0
    assert run("query", tiny_model, tiny_gallery, images[0], images[3], "-k", 1, "--evidence", "drawn") == 0
    drawn = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*neighbour-1.png")}
    assert len(drawn) == 2 and all(name.startswith("in/drawn/") for name in drawn)


def test_a_refined_search_is_not_ranked_by_findings(tiny_model: Path, tiny_gallery: Path, image: Path) -> None:
    assert run("query", tiny_model, tiny_gallery, image, "--rank", "findings", "--towards", "Mass=1") == 2


def test_the_place_that_matches_a_region(
    tmp_path: Path, tiny_model: Path, tiny_manifest: Path, image: Path, capsys: Captured
) -> None:
    assert run("index", "build", tiny_model, tiny_manifest, "-o", tmp_path / "g", "--cells") == 0
    capsys.readouterr()
    assert run("query", tiny_model, tmp_path / "g", image, "-k", 2, "--region", "0.1,0.1,0.6,0.6") == 0
    (header,) = [line for line in capsys.readouterr().out.splitlines() if "labels (* shared)" in line]
    assert "  place  " in header


def test_an_image_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured
) -> None:
    cut = image.read_bytes()[:100]
    files = {"text.txt": b"plain text", "empty.png": b"", "cut.png": cut, "folder": None, "missing": None}
    for name, data in files.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    Image.fromarray(np.zeros((1, 1), np.uint8)).save(tmp_path / "one.png")
    bad = [tmp_path / name for name in (*files, "one.png")]
    assert run("query", tiny_model, tiny_gallery, *bad, image, "--json") == 2
    captured = capsys.readouterr()
    answers = json.loads(captured.out)
    assert len(answers) == len(bad) + 1
    for path, answer in zip(bad, answers, strict=False):
        assert set(answer) == {"image", "error"}
        assert answer["image"] == str(path)
        assert answer["error"]["type"].endswith("Error")
        assert path.name in answer["error"]["message"]
    assert len(answers[-1]["neighbours"]) == 10
    assert captured.err.count("Error: ") == len(bad)
    assert "Traceback" not in captured.err

    assert run("query", tiny_model, tiny_gallery, *bad, image) == 2
    captured = capsys.readouterr()
    assert captured.err.count("Error: ") == len(bad)
    assert captured.out.count("finding ") == 1


def test_a_16_bit_image_is_answered(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, make_xray: Callable[..., np.ndarray], capsys: Captured
) -> None:
    grey = make_xray(500)
    Image.fromarray(grey).save(tmp_path / "8.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "16.png")
    assert run("query", tiny_model, tiny_gallery, tmp_path / "8.png", tmp_path / "16.png", "--json") == 0
    eight, sixteen = json.loads(capsys.readouterr().out)
    assert [n["id"] for n in eight["neighbours"]] == [n["id"] for n in sixteen["neighbours"]]
    assert [f["score"] for f in eight["findings"]] == pytest.approx([f["score"] for f in sixteen["findings"]], abs=1e-3)


def test_every_dicom_file_gives_an_answer_or_a_typed_error(
    shared: Path, tiny_model: Path, tiny_gallery: Path, capsys: Captured
) -> None:
    files = sorted(file for file in (shared / "dicom").rglob("*") if file.is_file())
    code = run("query", tiny_model, tiny_gallery, *files, "-k", 1, "--json")
    captured = capsys.readouterr()
    answers = json.loads(captured.out)
    assert len(answers) == len(files) > 0
    assert all(("error" in answer) != ("findings" in answer) for answer in answers)
    assert code == (2 if any("error" in answer for answer in answers) else 0)
    assert any("findings" in answer for answer in answers)
    assert captured.err.count("Error: ") == sum("error" in answer for answer in answers)
    assert "Traceback" not in captured.err


def test_mistakes(tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured) -> None:
    for args in (
        (tmp_path / "no.onnx", tiny_gallery, image),
        (tiny_model, tmp_path / "no", image),
        (tiny_model, tiny_gallery),
        (tiny_model, tiny_gallery, image, "-k", -1),
        (tiny_model, tiny_gallery, image, "--engine", "abacus"),
    ):
        assert run("query", *args) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Error: " in captured.err


def test_help_shows_an_example(capsys: Captured) -> None:
    assert run("query", "--help") == 0
    assert "cbmir query model.onnx gallery chest.png -k 5" in capsys.readouterr().out


def test_no_escape_sequence_reaches_the_terminal(
    tmp_path: Path, tiny_model: Path, tiny_gallery: Path, image: Path, capsys: Captured
) -> None:
    """Reports and file names are untrusted: terminal commands in them are not printed."""
    shutil.copytree(tiny_gallery, tmp_path / "gallery")
    report = "\x1b]0;title\x07No\teffusion\x9b2J \u202e\u00e4"
    with Gallery.open(tmp_path / "gallery") as gallery:
        gallery.update([replace(entry, report=report) for entry in list(gallery.every_entry())])
    odd = tmp_path / "a\x1b[31m\nb.png"
    shutil.copy(image, odd)
    assert run("query", tiny_model, tmp_path / "gallery", odd, tmp_path / "no\x1b[2J.png", "-k", 1) == 2
    captured = capsys.readouterr()
    assert all(c == "\n" or c.isprintable() for c in captured.out + captured.err)
    assert captured.out.startswith(f"{tmp_path}/a?[31m b.png\n")
    assert "?]0;title?No effusion?2J ?\u00e4" in captured.out
