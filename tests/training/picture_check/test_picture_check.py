"""Training of the picture check: its views, the exported network, and a run of a few steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from scipy.stats import binomtest

from cbmir.labels import LabelSet
from cbmir.manifest import Manifest, Row, write_manifest
from cbmir.runtime.imaging.picture_check import SIDE, PictureCheck, standardised
from cbmir.training.picture_check import __main__ as command
from cbmir.training.picture_check.impostors import KINDS, impostor
from cbmir.training.picture_check.network import exported, grey, save, untrained
from cbmir.training.picture_check.views import STORED, Views, changed


def test_changes_agree_with_numpy() -> None:
    view = torch.rand(16, 1, SIDE, SIDE)
    n = torch.arange(16)
    seen = changed(view, n % 2 == 1, n // 4, n // 2 % 2 == 1)
    for i, (before, after) in enumerate(zip(view[:, 0].numpy(), seen[:, 0].numpy(), strict=True)):
        flipped = before[:, ::-1] if i // 2 % 2 else before
        turned = np.rot90(flipped, i // 4)
        np.testing.assert_allclose(after, 1 - turned if i % 2 else turned, atol=1e-6)


def test_views_are_in_range_and_depend_on_the_seed() -> None:
    images = np.stack([impostor(n) for n in range(len(KINDS))])
    rows = torch.arange(len(KINDS))
    one, same, other = (Views(images, seed) for seed in (1, 1, 2))
    for take in ("whole", "part"):
        view = getattr(one, take)(rows)
        assert view.shape == (len(rows), 1, SIDE, SIDE)
        assert view.min() >= 0 and view.max() <= 1
        assert torch.equal(view, getattr(same, take)(rows))
        assert not torch.equal(view, getattr(other, take)(rows))


def test_a_partial_view_shows_at_most_half_of_each_side() -> None:
    """The slope of a ramp over the image shows how much of it is visible."""
    images = np.tile(np.linspace(0, 255, STORED).astype(np.uint8), (1, STORED, 1))
    views = Views(images, 0)
    views._exposed = lambda view: view  # type: ignore[method-assign]
    rows = torch.zeros(50, dtype=torch.long)
    for take, low, high in ((views.part, 0.2, 0.62), (views.whole, 0.67, 1.6)):
        shown = SIDE * np.median(np.diff(take(rows)[:, 0, SIDE // 2].numpy()), axis=1)  # squeezed by up to 12%
        assert low < shown.min() and shown.max() < high


def test_impostors_are_reproducible() -> None:
    for number in range(2 * len(KINDS)):
        picture = impostor(number)
        assert (picture.shape, picture.dtype) == ((STORED, STORED), np.uint8)
        assert np.array_equal(picture, impostor(number))
        assert not np.array_equal(picture, impostor(number + len(KINDS)))


def test_the_exported_check_agrees_with_the_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = untrained()
    with torch.no_grad():
        model(torch.randn(64, 1, SIDE, SIDE) * 2 + 1)  # gives BatchNorm statistics
    model.eval()
    check = exported(model, {"thresholds": {}})
    greys = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8)
    with torch.no_grad():
        expected = model(torch.from_numpy(standardised(greys))[:, None]).numpy()
    np.testing.assert_allclose(check.logits(greys), expected, atol=0.01)
    save(check, tmp_path / "a.npz")
    save(check, tmp_path / "b.npz")
    with (tmp_path / "a.npz").open("rb") as file:
        assert np.array_equal(PictureCheck.read(file).logits(greys), check.logits(greys))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert (tmp_path / "a.npz").stat().st_size < 300_000


def test_thresholds_flag_at_most_their_share_of_chests() -> None:
    torch.manual_seed(0)
    check = exported(untrained().eval(), {"thresholds": {}})
    views = Views(np.stack([impostor(n) for n in range(9)]), 0)
    found = command.thresholds_of(check, views, torch.arange(9))
    assert found.keys() == command._SHARES.keys()
    assert min(found.values()) >= 0
    seen = Views(views.images.numpy(), 0)
    scores = check.scores(grey(torch.cat([seen.whole(torch.arange(9)) for _ in range(command._VIEWS)])))
    for kind, share in command._SHARES.items():
        assert (scores[kind] > found[kind] + 0.001).mean() <= share


@pytest.mark.parametrize(("count", "of"), [(0, 333), (3, 333), (200, 206), (20, 20)])
def test_intervals_are_wilsons(count: int, of: int) -> None:
    expected = binomtest(count, of).proportion_ci(method="wilson")
    assert command.wilson(count, of) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.slow
def test_a_run_of_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch, "set_num_threads", lambda threads: None)  # would affect other tests
    monkeypatch.setattr(command, "_PHANTOMS", (4, 2))
    monkeypatch.setattr(command, "_IMPOSTORS", (18, 9))
    rows = []
    for n, split in enumerate(("train", "train", "val", "test")):
        Image.fromarray(impostor(90 + n)).save(tmp_path / f"{n}.png")
        rows.append(Row(tmp_path / f"{n}.png", f"p{n}", (1,), view="PA", split=split))
    write_manifest(Manifest(LabelSet(("Effusion",)), tuple(rows)), tmp_path / "manifest.csv")
    arguments = [str(tmp_path / "manifest.csv"), "-o", str(tmp_path / "check.npz"), "--steps", "12"]
    done = CliRunner().invoke(command.main, arguments, catch_exceptions=False)
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert {line[0] for line in lines[1:]} >= {"chests as they are", "phantoms mirrored", "drawn: limb", "drawn: text"}
    with (tmp_path / "check.npz").open("rb") as file:
        about = PictureCheck.read(file).about
    assert about["thresholds"].keys() == command._SHARES.keys()
    assert {name: of["of"] for name, of in about["measured"].items() if name.startswith("chests")} == dict.fromkeys(
        (f"chests {change}" for change in command.CHANGES), 1
    )
