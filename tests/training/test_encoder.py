"""Encoders: what they output, what the one-channel convolution is, and which weights are taken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torchvision

from cbmir.errors import EncoderError
from cbmir.training.encoder import build_encoder, load_weights


@pytest.mark.parametrize(
    ("name", "dim"),
    [("densenet121", 1024), ("resnet18", 512), ("mobilenet_v3_small", 576), ("timm:test_resnet", 96)],
)
def test_feature_map_and_dimension(name: str, dim: int) -> None:
    encoder, found = build_encoder(name)
    feature_map = encoder.eval()(torch.randn(2, 1, 64, 64))
    assert found == dim and feature_map.shape[:2] == (2, dim) and feature_map.ndim == 4


def test_densenet_ends_in_relu_as_torchvisions_own_forward() -> None:
    model = torchvision.models.densenet121()
    encoder, _ = build_encoder("densenet121")
    encoder.load_state_dict(
        {f"0.{k.removeprefix('features.')}": v for k, v in model.state_dict().items() if k.startswith("features")}
        | {"0.conv0.weight": model.features.conv0.weight.sum(dim=1, keepdim=True)}
    )
    grey = torch.randn(2, 1, 64, 64)
    model.eval(), encoder.eval()
    with torch.inference_mode():
        expected = model.classifier(encoder(grey).mean(dim=(2, 3)))
        assert torch.allclose(model(grey.expand(-1, 3, -1, -1)), expected, atol=1e-4)


def test_one_channel_is_the_sum_of_three(tmp_path: Path) -> None:
    """A state dict of three-channel weights fits, and means the grey image fed three times."""
    model = torchvision.models.resnet18()
    full = torch.nn.Sequential(*list(model.children())[:-2])
    torch.save({"state_dict": {f"module.{k}": v for k, v in full.state_dict().items()}}, tmp_path / "w.pt")
    encoder, _ = build_encoder("resnet18", str(tmp_path / "w.pt"))
    grey = torch.randn(1, 1, 64, 64)
    with torch.inference_mode():
        assert torch.allclose(full.eval()(grey.expand(-1, 3, -1, -1)), encoder.eval()(grey), atol=1e-4)


def test_what_does_not_match_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder, _ = build_encoder("timm:test_resnet")
    state = dict(encoder.state_dict())
    name = next(iter(state))
    state["stranger.weight"] = state.pop(name)
    torch.save(state, tmp_path / "w.pt")
    with caplog.at_level(logging.INFO, "cbmir"):
        load_weights(encoder, tmp_path / "w.pt")
    assert f"Left as initialised: {name}" in caplog.text and "not used: stranger.weight" in caplog.text


def test_weights_of_another_encoder_are_refused(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "w.pt")
    with pytest.raises(EncoderError, match="have a match"):
        build_encoder("timm:test_resnet", str(tmp_path / "w.pt"))


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("hello")
    with pytest.raises(EncoderError, match="state dict"):
        build_encoder("timm:test_resnet", str(tmp_path / "w.pt"))
    with pytest.raises(EncoderError, match="state dict"):
        build_encoder("timm:test_resnet", str(tmp_path / "missing.pt"))


@pytest.mark.parametrize("name", ["densenet", "timm:nothing", "vit_b_16", "fcn_resnet50"])
def test_unknown_or_unsuitable_encoders_are_refused(name: str) -> None:
    with pytest.raises(EncoderError):
        build_encoder(name)
