"""Encoders: output, input of the first convolution, and accepted weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision

from cbmir.errors import EncoderError
from cbmir.training.encoders.encoder import OwnInput, build_encoder, grey_range_of, own_input
from cbmir.training.encoders.grey_range import SIGNED, GreyRange
from cbmir.training.encoders.weights import load_weights
from cbmir.training.run import load_model


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
def test_torchvision_weights_give_the_same_answer_as_torchvision(name: str, head: str, tmp_path: Path) -> None:
    """Its state dict fits unchanged, and a grey image gives the same as the image in three channels."""
    model = torchvision.models.get_model(name).eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "w.pt")
    encoder, _ = build_encoder(name, str(tmp_path / "w.pt"))
    grey = torch.randn(2, 1, 128, 128)
    with torch.inference_mode():
        answer = getattr(model, head)(encoder.eval()(grey).mean(dim=(2, 3)))
        torch.testing.assert_close(answer, model(grey.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-3)


def test_mismatched_tensors_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("hello")
    with pytest.raises(EncoderError, match="state dict"):
        build_encoder("timm:test_resnet", str(tmp_path / "w.pt"))
    with pytest.raises(EncoderError, match="state dict"):
        build_encoder("timm:test_resnet", str(tmp_path / "missing.pt"))


@pytest.mark.parametrize(
    "name", ["densenet", "timm:nothing", "vit_b_16", "swin_t", "fcn_resnet50", "timm:mixer_s32_224", "xrv:vit_b_16"]
)
def test_unknown_or_unsuitable_encoders_are_refused(name: str) -> None:
    with pytest.raises(EncoderError):
        build_encoder(name)


def test_an_image_size_that_patches_do_not_divide_is_refused() -> None:
    with pytest.raises(EncoderError, match=r"patches of 16 pixels divide, found 100; choose 96 or 112"):
        build_encoder("timm:test_vit", image_size=100)


def test_grey_ranges_of_libraries() -> None:
    imagenet = GreyRange((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert own_input("resnet18") == OwnInput(224, imagenet) == own_input("timm:resnet18")
    assert own_input("timm:tf_efficientnet_lite0") == OwnInput(224, SIGNED)
    assert own_input("timm:vit_base_patch14_dinov2") == OwnInput(518, imagenet)
    assert own_input("rad-dino") == OwnInput(518, GreyRange((0.5307,), (0.2583,)))
    assert own_input("xrv:densenet121") == OwnInput(224, GreyRange((0.5,), (1 / 2048,)))
    assert own_input("xrv:resnet50").image_size == 512


def test_grey_range_option() -> None:
    assert grey_range_of("resnet18") == grey_range_of("timm:test_vit") == SIGNED
    assert grey_range_of("xrv:densenet121").std == (1 / 2048,)
    assert grey_range_of("xrv:densenet121", "signed") == SIGNED
    assert grey_range_of("resnet18", "own").channels == 3
    assert grey_range_of("resnet18", "0.4,0.3") == GreyRange((0.4,), (0.3,))
    for text in ("0.4", "0.4,0", "imagenet", "0.4,0.3,0.2"):
        with pytest.raises(EncoderError, match="expected a"):
            grey_range_of("resnet18", text)


@pytest.mark.parametrize("name", ["resnet18", "timm:test_resnet", "timm:test_vit"])
def test_three_channels_with_their_own_range_match_the_library(name: str, tmp_path: Path) -> None:
    """This includes the border, where a convolution's padding is 0 in the library's range."""
    range_ = GreyRange((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    if name == "resnet18":
        model = torchvision.models.resnet18()
    else:
        model = timm.create_model(name[5:], num_classes=0, global_pool="", **{"img_size": 64} if "vit" in name else {})
    torch.save(model.state_dict(), tmp_path / "w.pt")
    encoder, _ = build_encoder(name, str(tmp_path / "w.pt"), image_size=64, grey_range=range_, complete=True)
    grey = torch.rand(2, 1, 64, 64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (range_.mean, range_.std))
    with torch.inference_mode():
        found = encoder.eval()(2 * grey - 1)
        wanted = model.eval()((grey - mean) / std)
        if name == "resnet18":
            found, wanted = model.fc(found.mean(dim=(2, 3))), wanted
        elif name == "timm:test_vit":
            wanted = wanted[:, 1:].transpose(1, 2).reshape(2, 64, 4, 4)  # without the class token, in rows
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def test_two_convolutions_that_read_the_image_are_refused() -> None:
    with pytest.raises(EncoderError, match="one convolution of 3 channels, which reads the image, found 2"):
        build_encoder("timm:repvgg_a0", grey_range=own_input("resnet18").grey_range)


def test_incomplete_weights_are_refused_if_complete_ones_are_required(tmp_path: Path) -> None:
    encoder, _ = build_encoder("timm:test_resnet")
    state = dict(encoder.state_dict())
    state.pop("layer1.0.conv1.weight")
    torch.save(state, tmp_path / "w.pt")
    build_encoder("timm:test_resnet", str(tmp_path / "w.pt"))
    with pytest.raises(EncoderError, match=r"first without: layer1\.0\.conv1\.weight"):
        build_encoder("timm:test_resnet", str(tmp_path / "w.pt"), complete=True)


def test_chest_xray_encoders_have_no_imagenet_weights() -> None:
    for name in ("xrv:densenet121", "rad-dino"):
        with pytest.raises(EncoderError, match="as a file"):
            build_encoder(name, "imagenet")


def test_a_run_restores_its_transformer_and_range(
    make_tiny_run: Callable[..., Path], tiny_manifest: Path, tmp_path: Path
) -> None:
    """The card is enough: it has the encoder's name, the image size and the range."""
    own = GreyRange((0.4,), (0.25,))
    facts = {"embedding_dim": 64, "training": {"grey_range": own.to_json()}}
    run = make_tiny_run(tmp_path / "run", tiny_manifest, encoder="timm:test_vit", grey_range="0.4,0.25", card=facts)
    model, card, config = load_model(run)
    assert grey_range_of(card.encoder, config.grey_range) == own
    image = torch.randint(256, (2, 1, 32, 32), dtype=torch.uint8)
    vit = timm.create_model("test_vit", img_size=32, in_chans=1, num_classes=0, global_pool="")
    state = {name.removeprefix("model."): value for name, value in model.encoder.state_dict().items()}
    inside = "patch_embed.proj"
    vit.load_state_dict({name.replace(f"{inside}.conv.", f"{inside}."): value for name, value in state.items()
                         if name not in (f"{inside}.scale", f"{inside}.shift")})  # fmt: skip
    with torch.inference_mode():
        _, _, feature_map = model(image)
        tokens = vit.eval()((image / 255 - 0.4) / 0.25)
    torch.testing.assert_close(feature_map.flatten(2), tokens[:, 1:].transpose(1, 2), atol=1e-4, rtol=1e-3)
