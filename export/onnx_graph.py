"""Translate a `RetrievalModel` to one ONNX graph, from uint8 image to embedding, scores and feature map."""

from __future__ import annotations

import copy
import logging
from typing import Literal, cast

import onnx
import onnx_ir as ir
import torch
from onnx import ModelProto, TensorProto
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from cbmir.card import CARD_KEY, HEAD_KEY, ModelCard
from cbmir.errors import EncoderError, ModelError
from cbmir.runtime.engines.base import OUTPUTS, encode_head
from cbmir.training.encoders.encoder import for_inference
from cbmir.training.encoders.stages import TwoStageEncoder
from cbmir.training.model import HashHead, RetrievalModel

log = logging.getLogger("cbmir")

Precision = Literal["float32", "float16"]

#: The lowest opset of the dynamo exporter; ONNX Runtime and TensorRT read it.
OPSET = 18


def to_onnx(model: RetrievalModel, card: ModelCard, precision: Precision = "float32") -> bytes:
    """Return the bytes of an ONNX file with the inputs and outputs that `cbmir.runtime.engines.ort` expects, with card
    and head in its metadata.

    Args:
        precision: `float16` converts the encoder's weights and arithmetic to half precision; scaling, pooling, norm,
            scores and outputs stay float32.

    Raises:
        EncoderError: The exporter cannot translate the encoder.
        ModelError: It is a hashing model.
    """
    if isinstance(model.head, HashHead):
        raise ModelError("a hashing model has no embedding or scores to export; train with a loss of 'cbmir train'")
    graph = _translate(model, card, precision)
    if not card.has_findings:
        _leave_out_scores(graph)
    _cast_input_first(graph.graph)
    _strip_sources(graph.graph)
    info = card.with_(precision=precision, versions=card.versions | {"onnx": onnx.__version__})
    graph.metadata_props.clear()
    graph.metadata_props.update({CARD_KEY: info.dumps(), HEAD_KEY: encode_head(model.head.rows().cpu().numpy())})
    proto = ir.to_proto(graph)
    _check(proto, card)
    return bytes(proto.SerializeToString())


def _translate(model: RetrievalModel, card: ModelCard, precision: Precision) -> ir.Model:
    model, size = copy.deepcopy(model).eval(), card.preprocess.crop
    model.encoder = for_inference(card.encoder, model.encoder)
    if precision == "float16":
        if isinstance(model.encoder, TwoStageEncoder):  # its linear maps stay float32, like a head
            model.encoder.encoder = fold_batch_norm(model.encoder.encoder, size).half()
        else:
            model.encoder = fold_batch_norm(model.encoder, size).half()
    try:
        images = torch.zeros(2, 1, size, size, dtype=torch.uint8)  # with 1 image the exporter would fix the batch size
        program = torch.onnx.export(
            model, (images,), input_names=["image"], output_names=OUTPUTS, opset_version=OPSET,
            dynamic_shapes={"image": {0: torch.export.Dim("N")}}, dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise EncoderError(
            f"encoder {card.encoder}: PyTorch cannot translate it to ONNX; choose another: {error}"
        ) from error
    return cast(torch.onnx.ONNXProgram, program).model


@torch.no_grad()
def fold_batch_norm(encoder: nn.Module, size: int) -> nn.Module:
    """Return the encoder with each BatchNorm that follows a convolution folded into it, in float32.

    Fold before rounding to float16: the exporter would fold rounded values, and a small variance multiplies the
    rounding error. On a trained ResNet18 the loss of cosine would be 60 times as large (1.5e-4 instead of 2.3e-6). Many
    encoders cannot be traced, so one run at `size` pixels shows which BatchNorm reads which convolution. An encoder
    whose output would change, because something else also reads the convolution, is returned unchanged.
    """
    image = torch.rand(2, 1, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    made: list[tuple[Tensor, nn.Conv2d]] = []
    pairs: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            made.append((output, module))
        elif isinstance(module, nn.BatchNorm2d):
            pairs.extend((conv, module) for tensor, conv in made if tensor is given[0])

    folded = copy.deepcopy(encoder).eval()
    hooks = [module.register_forward_hook(note) for module in folded.modules()]
    expected = folded(image)
    for hook in hooks:
        hook.remove()
    for conv, norm in pairs:
        assert norm.running_mean is not None and norm.running_var is not None  # the eval-mode statistics
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        norm.reset_parameters()
        norm.eps = 0.0  # now an identity; not removed, since timm's contains the activation
    if torch.allclose(folded(image), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        return folded
    log.info("BatchNorm is not folded before rounding: something else also reads its convolutions.")
    return encoder


def _cast_input_first(graph: ir.Graph) -> None:
    """Make all readers of the uint8 input read its cast to float: TensorRT's parser allows only Cast on uint8, not even
    Shape."""
    image = graph.inputs[0]
    cast_node = next(node for node in image.consumers() if node.op_type == "Cast")
    image.replace_all_uses_with(cast_node.outputs[0])
    cast_node.replace_input_with(0, image)
    graph.insert_before(graph[0], cast_node)


def _leave_out_scores(model: ir.Model) -> None:
    """Remove the empty output `scores`, [N, 0], and the nodes that compute it."""
    outputs = model.graph.outputs
    outputs.remove(next(value for value in outputs if value.name == "scores"))
    RemoveUnusedNodesPass()(model)


def _strip_sources(graph: ir.Graph) -> None:
    """Remove the metadata that the exporter adds to nodes: stack traces with local paths."""
    made = (value for node in graph for value in node.outputs)
    for part in (graph, *graph, *graph.inputs, *graph.initializers.values(), *made):
        part.metadata_props.clear()
        part.doc_string = None


def _check(model: ModelProto, card: ModelCard) -> None:
    """Check inputs and outputs of the file. Raises EncoderError if they are not as expected."""
    onnx.checker.check_model(model, full_check=True)
    size, dim = card.preprocess.crop, card.embedding_dim
    expected = {
        "image": (TensorProto.UINT8, ["N", 1, size, size]),
        "embedding": (TensorProto.FLOAT, ["N", dim]),
        "scores": (TensorProto.FLOAT, ["N", len(card.labels)]),
        "feature_map": (TensorProto.FLOAT, ["N", dim, None, None]),
    }
    if not card.has_findings:
        del expected["scores"]
    found = {}
    for value in (*model.graph.input, *model.graph.output):
        tensor = value.type.tensor_type
        sides = [side.dim_param or side.dim_value for side in tensor.shape.dim]
        found[value.name] = (tensor.elem_type, sides if value.name != "feature_map" else [*sides[:2], None, None])
    readers = [node.op_type for node in model.graph.node if "image" in node.input]
    external = [tensor.name for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    if found != expected or readers != ["Cast"] or model.graph.node[0].op_type != "Cast" or external:
        raise EncoderError(
            f"encoder {card.encoder}: expected a graph with {expected} whose input feeds one Cast, found {found}, "
            f"read by {', '.join(readers)}, external data {external}; choose another encoder"
        )
