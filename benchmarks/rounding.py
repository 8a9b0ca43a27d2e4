"""Measure how much each convolution of a model changes its embeddings when only this layer rounds to bfloat16.

    cbmir export run -o model.onnx
    python benchmarks/rounding.py model.onnx nih.csv

The change is the mean squared distance of an image's embedding to the exact one, divided by the variance of the
embeddings, over the first 200 held-out images by default. It is given for a rounded input and for rounded weights. The
last column is the share of all changes up to this layer.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from tqdm import tqdm

from cbmir.export.calibration import open_session
from cbmir.export.compare import sample_from
from cbmir.export.graph_rewrite import array, encoder_nodes, insert_before, quantisable, set_input
from cbmir.training.evaluate import opened_model


@click.command()
@click.argument("model", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("--images", default=200, show_default=True, help="Largest number of images.")
def main(model: Path, manifest: Path, images: int) -> None:
    """Print the changes of MODEL's layers, in the order of the graph, on the images of MANIFEST."""
    with opened_model(model) as (card, _):
        sample = sample_from(manifest, card)
    pixels = sample.pixels[: min(images, sample.cases.queries)]
    found = changes(model.read_bytes(), pixels)
    shares = np.cumsum([of_input + of_weights for _, of_input, of_weights in found])
    for (name, of_input, of_weights), share in zip(found, shares / shares[-1], strict=True):
        click.echo(f"{name:32} input {of_input:.1e} weights {of_weights:.1e} up to here {share:.1%}")


def changes(model: bytes, pixels: NDArray[np.uint8]) -> list[tuple[str, float, float]]:
    """Return each convolution's name, and the change by its rounded input and by its rounded weights."""
    base = quantisable(model)
    names = [str(node.name) for node in encoder_nodes(base) if node.op_type == "Conv"]
    exact = embeddings(base, pixels)
    spread = exact.var(axis=0).sum()
    found = []
    for name in tqdm(names, unit="layer", disable=None):
        graphs = base.clone(), base.clone()
        round_input(named(graphs[0], name))
        node = named(graphs[1], name)
        set_input(node, 1, rounded(array(node.inputs[1])))
        one, other = (float(((embeddings(graph, pixels) - exact) ** 2).sum(axis=1).mean() / spread) for graph in graphs)
        found.append((name, one, other))
    return found


def embeddings(graph: ir.Model, pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.asarray(open_session(graph, []).run(["embedding"], {"image": pixels})[0], np.float64)


def named(graph: ir.Model, name: str) -> ir.Node:
    return next(node for node in graph.graph if node.name == name)


def round_input(node: ir.Node) -> None:
    """Round a node's input to bfloat16 and back."""
    coarse = insert_before(node, "Cast", [node.inputs[0]], to=ir.DataType.BFLOAT16.value)
    node.replace_input_with(0, insert_before(node, "Cast", [coarse], to=ir.DataType.FLOAT.value))


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to the nearest bfloat16."""
    return values.astype(ir.DataType.BFLOAT16.numpy()).astype(np.float64)


if __name__ == "__main__":
    main()
