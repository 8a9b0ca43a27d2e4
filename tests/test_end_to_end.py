"""All stages on phantoms, as typed by a user: from no data to findings and similar images in Chromium."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cbmir
import command_line
from cbmir.manifest import read_manifest

#: The model must find similar images this many times better than a random ranking.
BETTER_THAN_RANDOM = 2.5


@pytest.mark.slow
@pytest.mark.browser
def test_from_phantoms_to_the_browser(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    browser: Any,
    running_demo: Callable[..., AbstractContextManager[str]],
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = command_line.run(*arguments)
        output = capsys.readouterr()
        assert code == 0, output.err
        return output.out

    run("data", "phantom", "-n", "360", "--size", "128", "--seed", "0", "-o", "phantoms")
    table = "phantoms/manifest.csv"
    run("data", "check", table)
    network = ("--encoder", "timm:test_resnet", "--image-size", "64")
    run("train", table, "-o", "run", *network, "--epochs", "8", "--lr", "5e-3")

    measured = json.loads(run("evaluate", "run", table, "--json"))
    ndcg, chance = (measured[c]["ndcg"]["value"] for c in ("positive queries", "random, positive queries"))
    assert ndcg > BETTER_THAN_RANDOM * chance, (ndcg, chance)

    run("export", "run", "-o", "out/", "--fp16")
    parity = json.loads(Path("out/parity.json").read_text())
    assert parity["model.onnx"]["cosine_min"] >= 0.999999 and parity["model.onnx"]["score_difference"] <= 1e-5
    assert parity["model.fp16.onnx"]["overlap"]["value"] >= 0.98

    exported = json.loads(run("evaluate", "out/model.onnx", table, "--json"))
    assert exported["positive queries"]["ndcg"]["value"] == pytest.approx(ndcg, abs=0.01)

    run("index", "build", "out/model.onnx", table, "-o", "gallery")
    test = read_manifest(table).split("test")
    image = next(row.image for row in test if 1 in row.labels)
    answer = json.loads(run("query", "out/model.onnx", "gallery", str(image), "-k", "5", "--json"))[0]
    assert [f["label"] for f in answer["findings"]] == list(test.labels.names)
    assert len(answer["neighbours"]) == 5
    assert all(n["report"] for n in answer["neighbours"])
    distances = [n["distance"] for n in answer["neighbours"]]
    assert distances == sorted(distances)

    with cbmir.load("out/model.onnx", gallery="gallery") as finder:
        result = finder.analyze(image, k=5)
        evidence = result.evidence_for_neighbour(result.neighbours[0].id)
        assert evidence.sum() == pytest.approx(result.neighbours[0].cosine, abs=1e-4)
    assert [n.id for n in result.neighbours] == [n["id"] for n in answer["neighbours"]]

    with running_demo("out/model.onnx", "gallery") as url:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.locator("#way input[type=file]").set_input_files(image)
        page.locator("#similar .card").nth(4).wait_for()
        page.locator("#findings [data-finding]").first.wait_for(state="attached")
        assert page.locator("#findings [data-finding]").count() == len(test.labels)
        page.locator("#similar .report summary").first.click()
        assert answer["neighbours"][0]["report"].splitlines()[0] in page.locator("#similar").inner_text()
        page.screenshot(path="demo.png", full_page=True)
        page.close()
    assert np.asarray(Image.open("demo.png")).std() > 10, "the page is not blank"
