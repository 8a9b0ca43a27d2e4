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


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"), ("densenet121", "classifier"), ("mobilenet_v2", "classifier"), ("mnasnet0_5", "classifier"),
        ("regnet_y_400mf", "fc"), ("shufflenet_v2_x0_5", "fc"),
    ],
)  # fmt: skip
def test_torchvisions_own_weights_give_torchvisions_own_answer(name: str, head: str, tmp_path: Path) -> None:
    """Its state dict fits as it is, and the grey image means the same as fed three times."""
    model = torchvision.models.get_model(name).eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "w.pt")
    encoder, _ = build_encoder(name, str(tmp_path / "w.pt"))
    grey = torch.randn(2, 1, 128, 128)
    with torch.inference_mode():
        answer = getattr(model, head)(encoder.eval()(grey).mean(dim=(2, 3)))
        torch.testing.assert_close(answer, model(grey.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-3)


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


@pytest.mark.parametrize(
    "name", ["densenet", "timm:nothing", "vit_b_16", "swin_t", "fcn_resnet50", "timm:vit_tiny_patch16_224"]
)
def test_unknown_or_unsuitable_encoders_are_refused(name: str) -> None:
    with pytest.raises(EncoderError):
        build_encoder(name)
