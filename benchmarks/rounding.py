"""Train a run of the recipe `fitted` a little longer, so that rounding to bfloat16 or int8 changes its embeddings less.

    cbmir train nih.csv -o run --fold 1/5 --encoder timm:tf_efficientnet_lite0 --weights lite0.pt --image-size 128
    python benchmarks/rounding.py run -o rounded
    cbmir export rounded -o files/ --int8 --openvino bf16

Each step computes the features twice, exactly and with the convolutions' weights and inputs rounded to bfloat16, and
adds their angle to the cross-entropy; gradients pass the rounding unchanged (Y. Bengio, N. Léonard, A. Courville,
Estimating or Propagating Gradients Through Stochastic Neurons, 2013). BatchNorm keeps its statistics. The linear maps
are then fitted again. The output is a copy of the run with the new model and card; its checkpoint and metrics.csv stay
those of the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from cbmir.training.dataset import TrainingImages, cache_folder, cached_images, label_array, split_rows, split_targets
from cbmir.training.model import RetrievalModel
from cbmir.training.run import RunFolder, build_model, training_manifest
from cbmir.training.validation import Validation, write_card


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="New RUN folder.")
@click.option("--epochs", default=4, show_default=True)
@click.option("--lr", default=1e-4, show_default=True)
@click.option("--weight", default=100.0, show_default=True, help="Weight of the angle, 1 - cosine.")
def main(run: Path, output: Path, epochs: int, lr: float, weight: float) -> None:
    """Copy RUN to OUTPUT, and make its network less sensitive to rounding."""
    if output.exists():
        raise click.UsageError(f"{output}: expected a new folder; choose another -o")
    folder = RunFolder(run)
    config = folder.read_config()
    torch.manual_seed(config.seed)
    manifest = training_manifest(config)
    images = cached_images(manifest, config.preprocess, cache_folder(Path(config.manifest)))
    model, _ = build_model(config, split_targets(manifest, "train"), weights="none")
    model.load_state_dict(folder.best_state())
    rows = np.array(split_rows(manifest, "train"))
    data = TrainingImages(images, rows, label_array(manifest), config.preprocess, config.seed, full=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.weight_decay)
    for epoch in range(epochs):
        data.epoch = config.epochs + epoch  # other views than in the run
        angles = [
            step(model, batch, optimizer, weight)
            for batch in DataLoader(data, config.batch_size, shuffle=True, drop_last=True)
        ]
        click.echo(f"epoch {epoch}: 1 - cosine {np.mean(angles):.5f}")
    shutil.copytree(run, output)
    validation = Validation(config, manifest, images)
    fitted = validation.fitted(model.eval())
    RunFolder(output).write_fitted(fitted)
    write_card(RunFolder(output), validation, fitted)


def step(model: RetrievalModel, batch: list[Tensor], optimizer: torch.optim.Optimizer, weight: float) -> float:
    """Train on one batch; return 1 - cosine between exact and rounded features, centred and averaged over images."""
    views, targets = batch
    model.eval()  # BatchNorm keeps its statistics
    image = model.scaled(views)
    exact = model.encoder(image).mean(dim=(2, 3))
    with rounded_convolutions(model.encoder):
        coarse = model.encoder(image).mean(dim=(2, 3))
    centre = exact.detach().mean(dim=0)
    angle = (1 - functional.cosine_similarity(exact - centre, coarse - centre)).mean()
    known = ~torch.isnan(targets)
    loss = functional.binary_cross_entropy_with_logits(model.head.logits(exact)[known], targets[known])
    optimizer.zero_grad()
    (loss + weight * angle).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5)
    optimizer.step()
    return float(angle.detach())


@contextmanager
def rounded_convolutions(network: nn.Module) -> Iterator[None]:
    """Round the weights and inputs of all convolutions to bfloat16."""
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    weights = [layer.weight for layer in layers]
    hooks = [layer.register_forward_pre_hook(lambda _, given: (rounded(given[0]),)) for layer in layers]
    try:
        for layer, weight in zip(layers, weights, strict=True):
            del layer.weight
            layer.weight = rounded(weight)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, weight in zip(layers, weights, strict=True):
            del layer.weight
            layer.weight = weight


def rounded(values: Tensor) -> Tensor:
    """Round to bfloat16; the gradient is that of `values`."""
    return values + (values.bfloat16().float() - values).detach()


if __name__ == "__main__":
    main()
