"""The small network of the picture check: its training, and its export to the runtime's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from cbmir.files import replacing
from cbmir.runtime.imaging.picture_check import OUTPUTS, SIDE, PictureCheck, standardised
from cbmir.training.picture_check.views import OTHER, Views, changed

WIDTHS = (12, 24, 48, 96)
CHESTS, PARTS, OTHERS = 64, 12, 20  # images per batch
_RATE = 3e-3
_KEPT = np.float16  # type of the numbers in the file


def untrained() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, width in pairwise((1, *WIDTHS)):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    side = SIDE // 2 ** len(WIDTHS)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(WIDTHS[-1] * side * side, len(OUTPUTS)))


def fit(images: NDArray[np.uint8], chests: Tensor, others: Tensor, *, steps: int, seed: int) -> nn.Sequential:
    """Train on images uint8 [N, STORED, STORED]; `chests` and `others` are row numbers."""
    torch.manual_seed(seed)
    views, model = Views(images, seed), untrained()
    optimiser = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="picture check", disable=None):
        loss = _loss(model, views, chests, others)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model.eval()


def _loss(model: nn.Sequential, views: Views, chests: Tensor, others: Tensor) -> Tensor:
    """Return the sum of cross-entropies: kind of picture, and for chests whether it is inverted, turned or mirrored."""
    n = CHESTS + PARTS + OTHERS
    inverted, turned, mirrored = views.chance(n, 0.4), views.quarter_turns(n, 0.5), views.chance(n, 0.5)
    view = torch.cat([
        views.whole(views.pick(chests, CHESTS)), views.part(views.pick(chests, PARTS)),
        views.whole(views.pick(others, OTHERS), OTHER),
    ])  # fmt: skip
    shown = torch.repeat_interleave(torch.arange(3), torch.tensor([CHESTS, PARTS, OTHERS]))
    logits = model(standard(changed(view, inverted, turned, mirrored)))
    of_chest = logits[:CHESTS]
    binary, classes = functional.binary_cross_entropy_with_logits, functional.cross_entropy
    return (
        classes(logits[:, :3], shown, label_smoothing=0.02)
        + binary(of_chest[:, 3], 0.02 + 0.96 * inverted[:CHESTS].float())
        + classes(of_chest[:, 4:8], turned[:CHESTS], label_smoothing=0.02)
        + 2 * binary(of_chest[:, 8], 0.05 + 0.9 * mirrored[:CHESTS].float())  # the hardest
    )


def standard(view: Tensor) -> Tensor:
    """Convert views [n, 1, SIDE, SIDE] to the network's input."""
    return torch.from_numpy(standardised(grey(view)))[:, None]


def grey(view: Tensor) -> NDArray[np.uint8]:
    """Round views [n, 1, SIDE, SIDE] to grey levels, as in thumbnails [n, SIDE, SIDE]."""
    levels: NDArray[np.uint8] = (255 * view).round().to(torch.uint8)[:, 0].numpy()
    return levels


def exported(model: nn.Sequential, about: Mapping[str, Any]) -> PictureCheck:
    """Return the check in the runtime's form: BatchNorms folded into convolutions, numbers in the file's precision.

    Args:
        about: Metadata of the file, including `thresholds`.
    """
    weights, biases = [], []
    for convolution, norm in zip(model[0:-3:3], model[1:-3:3], strict=True):
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        kernel = convolution.weight * scale[:, None, None, None]  # [out, in, row, column]
        weights.append(kernel.permute(2, 3, 1, 0).reshape(-1, len(scale)))
        biases.append(norm.bias - norm.running_mean * scale)
    last, side = model[-1], SIDE // 2 ** len(WIDTHS)
    assert isinstance(last, nn.Linear)
    weights.append(last.weight.reshape(len(OUTPUTS), -1, side, side).permute(2, 3, 1, 0).reshape(-1, len(OUTPUTS)))
    biases.append(last.bias)
    return PictureCheck(tuple(map(_rounded, weights)), tuple(map(_rounded, biases)), about)


def _rounded(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().numpy().astype(_KEPT).astype(np.float32)
    return array


def save(check: PictureCheck, path: Path) -> None:
    """Write the file that `PictureCheck.read` reads. Equal checks give equal bytes."""
    arrays: dict[str, Any] = {"about": np.array(json.dumps(check.about))}
    for name, some in (("weight", check.weights), ("bias", check.biases)):
        arrays |= {f"{name}{n}": array.astype(_KEPT) for n, array in enumerate(some)}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
