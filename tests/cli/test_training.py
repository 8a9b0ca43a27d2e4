"""`cbmir train` and `cbmir evaluate` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run


def test_train_then_evaluate(tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    options = ("--encoder", "timm:test_resnet", "--image-size", 32, "--epochs", 1, "--batch-size", 8, "--devices", 1)
    own = ("--recipe", "paper", "--fold", "1/3", "--proxies-per-class", "auto")
    assert run("train", tiny_manifest, "-o", folder, *options, *own) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert json.loads((folder / "config.json").read_text())["fold"] == "1/3"
    assert json.loads((folder / "card.json").read_text())["proxies_per_class"] == [1, 1, 1, 1]

    assert run("train", tiny_manifest, "-o", folder, *options) == 2
    assert "--resume" in capsys.readouterr().err

    assert run("evaluate", folder, tiny_manifest, "-k", 3, "--json", "-o", tmp_path / "report") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report/metrics.json").read_text())
    assert printed["queries"] == 8, "the fold that it was trained on, not the table's own splits"

    assert run("evaluate", folder, tiny_manifest) == 0
    assert capsys.readouterr().out.startswith("# run on manifest.csv\n")


@pytest.mark.slow
def test_distil_then_query_the_teachers_gallery(
    tiny_manifest: Path, tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    light = tmp_path / "light"
    options = ("--encoder", "timm:test_efficientnet", "--epochs", 1, "--batch-size", 8, "--devices", 1)
    assert run("train", tiny_manifest, "-o", light, "--distill", tiny_run, *options) == 0
    written = json.loads((light / "config.json").read_text())
    assert (written["image_size"], written["fold"], written["loss"]) == (32, "1/2", "distill"), "as the teacher"
    assert Path(written["distill"]) == tiny_run
    capsys.readouterr()
    assert run("train", tiny_manifest, "-o", light, "--distill", tiny_run, *options, "--resume", "--json") == 0
    card = json.loads((light / "card.json").read_text())
    assert json.loads(capsys.readouterr().out) == {
        "run": str(light), "fingerprint": card["fingerprint"], "metrics": card["metrics"]
    }  # fmt: skip

    assert run("evaluate", light, tiny_manifest, "--gallery-model", tiny_run, "-k", 3) == 0
    assert capsys.readouterr().out.startswith("# light on manifest.csv, gallery by run\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--encoder", "resnet19"), "resnet19"),
        (("--weights", "nowhere.pt"), "nowhere.pt"),
        (("--fold", "7/3"), "fold"),
        (("--loss", "proxy", "--proxies-per-class", "none"), "expected proxies-per-class"),
        (("--image-size", 8), "--image-size"),
        (("--devices", "many"), "devices"),
        (("--seed", -1), "seed"),
        (("--weight-decay", -1), "weight_decay"),
        (("--loss", "bce", "--sigma", 1), "--sigma has no effect with --loss bce"),
        (("--loss", "ml-proxy-nca", "--proxies-per-class", 2), "--proxies-per-class has no effect"),
        (("--loss", "bce", "--no-negative-proxies"), "--negative-proxies has no effect"),
        (("--distill", "run", "--loss", "bce"), "--loss has no effect with --distill"),
        (("--distill", "run", "--class-weights"), "--class-weights has no effect with --distill"),
        (("--distill", "nowhere"), "nowhere: expected a folder made by 'cbmir train'"),
    ],
)
def test_mistakes_exit_2_with_a_reason(
    options: tuple[object, ...], message: str, tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("train", tiny_manifest, "-o", tmp_path / "run", "--fold", "1/3", *options)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists(), "a refused run must not be in the way of the next try"


def test_evaluate_refuses_files_that_are_not_models(
    tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in (tmp_path, tmp_path / "missing.onnx", tiny_manifest):
        assert run("evaluate", model, tiny_manifest) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_recipe_gives_defaults_and_an_option_changes_one(
    tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--encoder", "timm:test_resnet", "--image-size", 32, "--batch-size", 8, "--devices", 1, "--fold", "1/3")
    for number, (options, expected) in enumerate((
        ((), ("bce", True, 6e-4, "cosine", "linear")),
        (("--recipe", "paper"), ("proxy", False, 1e-4, "constant", "proxy")),
        (("--recipe", "paper", "--lr", "0.01", "--linear-fit"), ("proxy", True, 0.01, "constant", "linear")),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        assert run("train", *options, tiny_manifest, "-o", folder, *small, "--epochs", 1) == 0
        written, card = (json.loads((folder / name).read_text()) for name in ("config.json", "card.json"))
        found = *(written[name] for name in ("loss", "linear_fit", "lr", "schedule")), card["head"]
        assert found == expected
    capsys.readouterr()
    assert run("train", "--help") == 0
    assert "[default: bce]" in " ".join(capsys.readouterr().out.split())
    assert run("train", "--recipe", "paper", "--help") == 0
    assert "[default: proxy]" in " ".join(capsys.readouterr().out.split())
    for options, message in (
        (("--recipe", "paper", "--projection", 64), "--projection has no effect with --no-linear-fit."),
        (("--sigma", 1), "--sigma has no effect with --loss bce of this recipe."),
    ):
        assert run("train", tiny_manifest, "-o", tmp_path / "refused", *options) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_distil_a_fitted_teacher(tiny_manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The student has the teacher's embedding space and head, without its own fit."""
    small = ("--batch-size", 8, "--devices", 1, "--epochs", 1)
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    own = ("--encoder", "timm:test_resnet", "--image-size", 32, "--fold", "1/3", "--projection", 16)
    assert run("train", tiny_manifest, "-o", teacher, *small, *own) == 0
    own = ("--encoder", "timm:test_efficientnet", "--distill", teacher)
    assert run("train", tiny_manifest, "-o", student, *small, *own) == 0
    cards = [json.loads((folder / "card.json").read_text()) for folder in (teacher, student)]
    for name in ("head", "embedding_dim", "fingerprint"):
        assert cards[0][name] == cards[1][name]
    assert [card["training"]["linear_fit"] for card in cards] == [True, False]
    capsys.readouterr()
    assert run("evaluate", student, tiny_manifest, "--gallery-model", teacher, "-k", 3) == 0
    assert run("train", tiny_manifest, "-o", tmp_path / "no", *small, *own, "--linear-fit") == 2
    assert "--linear-fit has no effect with --distill." in capsys.readouterr().err
