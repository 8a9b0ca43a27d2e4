"""Common checkpoints, written by the original libraries with random weights, give the same answers as the libraries."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from cbmir.errors import EncoderError
from cbmir.training.encoders import build_encoder
from cbmir.training.encoders import encoder as encoders
from cbmir.training.encoders.weights import read_state


def as_state_dict(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


def as_whole_model(model: nn.Module, path: Path) -> None:
    torch.save(model, path)


def as_old_whole_model(model: nn.Module, path: Path) -> None:
    """Save a model in the format before PyTorch 1.6, as torchxrayvision's files: classes with their source."""
    torch.save(model, path, _use_new_zipfile_serialization=False)


@pytest.fixture(scope="module")
def xrv() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its imports
        return pytest.importorskip("torchxrayvision")


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


@pytest.mark.parametrize("write", [as_state_dict, as_whole_model, as_old_whole_model])
def test_torchxrayvisions_densenet(xrv: Any, write: Callable[[nn.Module, Path], None], tmp_path: Path) -> None:
    model = _with_statistics(xrv.models.DenseNet()).eval()
    write(model, tmp_path / "densenet121-res224-test.pt")
    encoder, dim = build_encoder("xrv:densenet121", str(tmp_path / "densenet121-res224-test.pt"), complete=True)
    grey = torch.randint(256, (2, 64, 64), dtype=torch.uint8)
    theirs = torch.stack([torch.from_numpy(xrv.utils.normalize(one.numpy(), 255))[None] for one in grey])
    assert theirs.abs().max() > 1000
    with torch.inference_mode():
        found = encoder.eval()(grey[:, None] / 127.5 - 1).mean(dim=(2, 3))
        torch.testing.assert_close(found, model.features2(theirs), atol=1e-3, rtol=1e-3)
    assert dim == 1024


def test_torchxrayvisions_resnet(tmp_path: Path) -> None:
    """It is torchvision's with one channel, and its file is a state dict (`torchxrayvision.models.ResNet`)."""
    model = torchvision.models.resnet18()
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    model = _with_statistics(model).eval()
    torch.save(model.state_dict(), tmp_path / "resnet.pt")
    encoder, _ = build_encoder("xrv:resnet18", str(tmp_path / "resnet.pt"), complete=True)
    image = torch.rand(2, 1, 64, 64) * 2 - 1
    with torch.inference_mode():
        found = model.fc(encoder.eval()(image).mean(dim=(2, 3)))
        torch.testing.assert_close(found, model(1024 * image), atol=1e-3, rtol=1e-3)


def test_torchvisions_published_densenet(tmp_path: Path) -> None:
    """Its `densenet121-*.pth` has names from 2017, such as norm.1 for norm1, which torchvision renames on loading."""
    model = _with_statistics(torchvision.models.densenet121()).eval()
    state = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", key): value
             for key, value in model.state_dict().items()}  # fmt: skip
    assert "features.denseblock1.denselayer1.norm.1.weight" in state
    torch.save(state, tmp_path / "densenet121.pth")
    encoder, _ = build_encoder("densenet121", str(tmp_path / "densenet121.pth"), complete=True)
    own = {key: value for key, value in encoder.state_dict().items() if key.endswith("denselayer1.conv2.weight")}
    assert len(own) == 4
    for key, value in own.items():
        assert torch.equal(value, model.features.state_dict()[key[key.index("denseblock") :]])


def test_hugging_faces_dinov2(transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAD-DINO's format at a smaller size: patch tokens after the last norm, in the input range of the model."""
    monkeypatch.setattr(encoders, "_RAD_DINO_ARCHITECTURE", "vit_small_patch14_dinov2")
    options = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 70}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**options, patch_size=14)).eval()
    for name, value in model.named_parameters():
        if "lambda" in name or "token" in name or "position" in name:
            nn.init.normal_(value)
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "memory.pt")
    grey = torch.rand(2, 1, 70, 70)
    with torch.inference_mode():
        theirs = model(pixel_values=((grey - 0.5307) / 0.2583).expand(-1, 3, -1, -1)).last_hidden_state
        for file in ("model.safetensors", "memory.pt"):
            encoder, dim = build_encoder("rad-dino", str(tmp_path / file), image_size=70, complete=True)
            _assert_patch_tokens(encoder.eval()(2 * grey - 1), theirs)
    assert dim == 384


def test_hugging_faces_vit(transformers: Any, tmp_path: Path) -> None:
    options = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 192}
    config = transformers.ViTConfig(**options, image_size=64, layer_norm_eps=1e-6)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    encoder, _ = build_encoder("timm:test_vit", str(tmp_path / "model.safetensors"), image_size=64, complete=True)
    grey = torch.rand(2, 1, 64, 64)
    with torch.inference_mode():
        theirs = model.vit(pixel_values=(2 * grey - 1).expand(-1, 3, -1, -1)).last_hidden_state
        _assert_patch_tokens(encoder.eval()(2 * grey - 1), theirs)


#: Names in timm -> names in Hugging Face's DINOv2 files (`modeling_dinov2`).
_OF_HUGGING_FACE = {
    "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.", "blocks.": "encoder.layer.",
    ".attn.proj.": ".attention.output.dense.", ".ls1.gamma": ".layer_scale1.lambda1",
    ".ls2.gamma": ".layer_scale2.lambda1",
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "dinov2."])
def test_hugging_faces_names(prefix: str, tmp_path: Path) -> None:
    """The file is written with the documented names, since the library is too large for the tests."""
    name = "vit_small_patch14_dinov2"
    model = timm.create_model(name, img_size=28, num_classes=0, global_pool="").eval()
    state: dict[str, Tensor] = {f"{prefix}embeddings.mask_token": torch.zeros(1, 384)}
    for key, value in model.state_dict().items():
        for own, theirs in _OF_HUGGING_FACE.items():
            key = key.replace(own, theirs)
        key = prefix + (f"layernorm.{key[5:]}" if key.startswith("norm.") else key)
        if ".attn.qkv." in key:
            for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                state[key.replace(".attn.qkv.", f".attention.attention.{part}.")] = rows.clone()
        else:
            state[key] = value
    save_file(state, tmp_path / "model.safetensors")
    encoder, _ = build_encoder(f"timm:{name}", str(tmp_path / "model.safetensors"), image_size=28, complete=True)
    grey = torch.rand(2, 1, 28, 28)
    with torch.inference_mode():
        _assert_patch_tokens(encoder.eval()(grey), model(grey.expand(-1, 3, -1, -1)))


def test_positions_are_resampled_to_another_size(tmp_path: Path) -> None:
    """The result must equal timm's resampling."""
    model = timm.create_model("test_vit", img_size=96)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    other = timm.create_model("test_vit", img_size=64, num_classes=0, global_pool="")
    timm.models.load_checkpoint(
        other, str(tmp_path / "w.pt"), filter_fn=timm.models.vision_transformer.checkpoint_filter_fn, strict=False
    )
    encoder, _ = build_encoder("timm:test_vit", str(tmp_path / "w.pt"), image_size=64, complete=True)
    grey = torch.rand(2, 1, 64, 64)
    with torch.inference_mode():
        _assert_patch_tokens(encoder.eval()(grey), other.eval()(grey.expand(-1, 3, -1, -1)))


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_never_run(zipped: bool, tmp_path: Path) -> None:
    model = nn.Conv2d(1, 2, 3)
    model.trap = Trap(tmp_path / "sprung")  # type: ignore[assignment]
    torch.save(model, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    assert set(read_state(tmp_path / "w.pt")) == {"weight", "bias"}
    assert not (tmp_path / "sprung").exists()
    with (tmp_path / "w.pkl").open("wb") as stream:
        pickle.dump(Trap(tmp_path / "sprung"), stream)
    with pytest.raises(EncoderError, match="state dict"):
        read_state(tmp_path / "w.pkl")
    assert not (tmp_path / "sprung").exists()


def _assert_patch_tokens(found: Tensor, tokens: Tensor) -> None:
    """Compare with `tokens` [N, 1 + hw, D], whose first one is the class token and not a cell."""
    side = found.shape[-1]
    wanted = tokens[:, 1:].transpose(1, 2).unflatten(2, (side, side))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found.mean(dim=(2, 3)), tokens[:, 0], atol=0.1)


def _with_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms statistics as after training: means other than 0 and variances other than 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model
