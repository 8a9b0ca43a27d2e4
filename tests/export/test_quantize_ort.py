"""int8 for ONNX Runtime: quantised and float parts, changes of the answers, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from cbmir.card import CARD_KEY, ModelCard
from cbmir.errors import CardError, UserError
from cbmir.export.calibration import channel_ranges, open_session, tensor_ranges
from cbmir.export.equalization import equalise
from cbmir.export.graph_rewrite import array, encoder_nodes, graph_bytes, quantisable, read_graph
from cbmir.export.quantize_ort import to_int8
from cbmir.runtime import open_engine

Images = NDArray[np.uint8]
Layer = tuple[Any, ...]


@pytest.fixture(scope="module")
def images(make_xray: Any) -> Images:
    return np.stack([make_xray(seed, 32)[None] for seed in range(24)])


class Builder:
    """A builder of layers that replace the tiny model's encoder; card and head stay. Weights are random but seeded."""

    def __init__(self, tiny_model: Path) -> None:
        self.rng = np.random.default_rng(1)
        self.model = onnx.load(tiny_model)
        self.nodes: list[NodeProto] = []

    def constant(self, name: str, value: Any) -> str:
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def conv(self, source: str, output: str, shape: tuple[int, ...], **attributes: Any) -> str:
        weight = self.rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        return self.add("Conv", [source, self.constant(f"{output}.w", weight)], output, **attributes)

    def norm(self, source: str, output: str, channels: int) -> str:
        values = {
            "gamma": self.rng.uniform(0.5, 2, channels),
            "beta": self.rng.uniform(0.5, 1.5, channels),  # so that no channel is always 0
            "mean": self.rng.normal(size=channels) / 4,
            "variance": self.rng.uniform(0.1, 1, channels),
        }
        names = [self.constant(f"{output}.{name}", value) for name, value in values.items()]
        return self.add("BatchNormalization", [source, *names], output, epsilon=1e-3)

    def bytes(self) -> bytes:
        graph = self.model.graph
        head = [node for node in graph.node if node.op_type not in ("Conv", "Relu")]
        nodes = [*head[:3], *self.nodes, *head[3:]]
        del graph.node[:]
        graph.node.extend(nodes)
        onnx.checker.check_model(self.model, full_check=True)
        return bytes(self.model.SerializeToString())


@pytest.fixture(scope="module")
def dense(tiny_model: Path) -> bytes:
    """A DenseNet of two layers: a stem of 4 channels, plus 2 per layer. Channel ranges differ by up to 100 times."""
    b = Builder(tiny_model)
    stem = b.add("Relu", [b.norm(b.conv("centred", "stem", (4, 1, 3, 3), strides=[2, 2], pads=[1] * 4), "n0", 4)], "r0")
    features = [b.add("MaxPool", [stem], "pool", kernel_shape=[2, 2], strides=[2, 2])]
    for layer, channels in ((1, 4), (2, 6)):
        joined = features[0] if layer == 1 else b.add("Concat", features, "joined", axis=1)
        x = b.add("Relu", [b.norm(joined, f"n{layer}", channels)], f"r{layer}")
        x = b.add("Relu", [b.norm(b.conv(x, f"narrow{layer}", (8, channels, 1, 1)), f"m{layer}", 8)], f"s{layer}")
        features.append(b.conv(x, f"wide{layer}", (2, 8, 3, 3), pads=[1] * 4))
        weight = next(t for t in b.model.graph.initializer if t.name == f"wide{layer}.w")
        scaled = numpy_helper.to_array(weight) * np.array([1, 100], np.float32).reshape(2, 1, 1, 1)
        weight.CopyFrom(numpy_helper.from_array(scaled.astype(np.float32), weight.name))
    b.add("Relu", [b.norm(b.add("Concat", features, "all", axis=1), "n3", 8)], "feature_map")
    return b.bytes()


@pytest.fixture(scope="module")
def mobile(tiny_model: Path) -> bytes:
    """The parts of light encoders: depthwise 3x3, clip, hard swish, squeeze-and-excitation, a residual sum."""
    b = Builder(tiny_model)
    b.constant("zero", 0), b.constant("six", 6)
    b.model.graph.initializer.append(numpy_helper.from_array(np.array([2, 3]), "sides"))
    stem = b.norm(b.conv("centred", "stem", (8, 1, 3, 3), strides=[4, 4], pads=[1] * 4), "n0", 8)
    stem = b.add("Clip", [stem, "zero", "six"], "clip")
    wide = b.add("HardSwish", [b.conv(stem, "depthwise", (8, 1, 3, 3), pads=[1] * 4, group=8)], "swish")
    mean = b.add("ReduceMean", [wide, "sides"], "squeeze", keepdims=1)
    gate = b.add("HardSigmoid", [b.conv(mean, "excite", (8, 8, 1, 1))], "gate")
    x = b.conv(b.add("Mul", [wide, gate], "gated"), "project", (8, 8, 1, 1))
    b.add("Relu", [b.add("Add", [x, stem], "sum")], "feature_map")
    return b.bytes()


@pytest.fixture(scope="module")
def dense8(dense: bytes, images: Images) -> ir.Model:
    return read_graph(to_int8(dense, images))


def answers(model: bytes | ir.Model, images: Images, *names: str) -> list[NDArray[np.float64]]:
    loaded = read_graph(model) if isinstance(model, bytes) else model
    found = open_session(loaded, names).run(list(names), {"image": images})
    return [np.asarray(array, np.float64) for array in found]


def cosines(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def of_kind(model: ir.Model, kind: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == kind]


def in_float(model: ir.Model) -> set[str | None]:
    """Return the names of the convolutions whose weights are not quantised."""
    return {node.name for node in of_kind(model, "Conv") if node.inputs[1] and node.inputs[1].const_value}


def scale_of(value: ir.Value | None) -> tuple[float, ...]:
    """Scale and zero point with which a QDQ file dequantises a tensor."""
    assert value is not None
    node = value.producer()
    assert node is not None and node.op_type == "DequantizeLinear"
    return tuple(array(other).item() for other in node.inputs[1:])


@pytest.mark.usefixtures("exact_int8")
def test_the_error_of_one_convolution_is_within_its_bound(tiny_model: Path, images: Images) -> None:
    """The bound is half an input step per weight, half a weight step per input, and half an output step."""
    model = tiny_model.read_bytes()
    quantised = to_int8(model, images)
    (exact,), (found,) = (answers(which, images, "feature_map") for which in (model, quantised))
    weight = numpy_helper.to_array(next(t for t in onnx.load(tiny_model).graph.initializer if t.name == "kernel"))
    weight = np.abs(weight.astype(np.float64)).reshape(len(weight), -1)
    step_in = (images.max() - float(images.min())) * 2 / 255 / 255
    step_weight = weight.max(axis=1) / 127
    step_out = exact.max() / 255
    bound = (weight + step_weight[:, None] / 2).sum(axis=1) * step_in / 2 + 25 * step_weight / 2 + step_out / 2
    # The bias is a multiple of the product's step, and the zero point of the input's step.
    bound += step_in * step_weight + weight.sum(axis=1) * step_in / 2
    errors = np.abs(found - exact).max(axis=(0, 2, 3))
    assert (errors <= bound).all()
    assert errors.max() > step_out / 4  # it really is quantised


def test_batch_norm_becomes_depthwise_with_the_same_answers(dense: bytes, images: Images) -> None:
    model = quantisable(dense)
    assert "BatchNormalization" not in kinds(model) and kinds(model).count("Conv") == 5 + 3
    after_concat = [node.outputs[0].consumers() for node in of_kind(model, "Concat")]
    assert [[node.op_type for node in readers] for readers in after_concat] == [["Conv"], ["Conv"]]
    assert len({node.name for node in model.graph}) == len(model.graph)
    (expected,), (found,) = (answers(which, images, "feature_map") for which in (dense, model))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_equalised_channels_fill_one_range_with_the_same_answers(dense: bytes, images: Images) -> None:
    graph = quantisable(dense)
    joined = next(str(node.outputs[0].name) for node in of_kind(graph, "Concat") if len(node.inputs) == 3)
    before = channel_ranges(graph, [joined], images)[joined]
    (expected,) = answers(graph, images, "feature_map")
    equalise(graph, images)
    low, high = channel_ranges(graph, [joined], images)[joined]
    spread = before[1] - before[0]
    assert spread.max() / spread.min() > 50
    np.testing.assert_allclose(low[4:], 0, atol=1e-5)  # no shift for the stem's four channels, which pass a ReLU
    np.testing.assert_allclose(high, 1, atol=1e-5)
    (found,) = answers(graph, images, "feature_map")
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_equalising_leaves_shared_tensors_alone(tiny_model: Path, mobile: bytes, images: Images) -> None:
    for model in (tiny_model.read_bytes(), mobile):
        graph = quantisable(model)
        before = graph_bytes(graph)
        equalise(graph, images)
        assert graph_bytes(graph) == before


def test_equalising_leaves_dead_channels_alone(tiny_model: Path, images: Images) -> None:
    """No channel passes its ReLU, so all ranges are empty."""
    b = Builder(tiny_model)
    x = b.norm(b.conv("centred", "stem", (8, 1, 3, 3), strides=[4, 4], pads=[1] * 4), "n0", 8)
    b.add("Relu", [b.norm(b.add("Relu", [x], "r0"), "n1", 8)], "feature_map")
    for tensor in b.model.graph.initializer:
        if tensor.name == "n0.beta":
            tensor.CopyFrom(numpy_helper.from_array(np.full(8, -100, np.float32), tensor.name))
    graph = quantisable(b.bytes())
    (expected,) = answers(graph, images, "feature_map")
    equalise(graph, images)
    (found,) = answers(graph, images, "feature_map")
    np.testing.assert_array_equal(found, expected)
    assert expected.max() > 0


@pytest.mark.usefixtures("exact_int8")
def test_equalising_preserves_small_channels(dense: bytes, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    (exact,) = answers(dense, images, "embedding")
    losses = [1 - cosines(exact, answers(to_int8(dense, images), images, "embedding")[0]).mean()]
    monkeypatch.setattr("cbmir.export.quantize_ort.equalise", lambda graph, images: None)
    losses.append(1 - cosines(exact, answers(to_int8(dense, images), images, "embedding")[0]).mean())
    assert losses[0] < losses[1] / 5, losses


def test_tensors_that_meet_in_a_concat_share_one_scale(dense8: ir.Model) -> None:
    concats = of_kind(dense8, "Concat")
    assert len(concats) == 2
    scales = {scale_of(value) for node in concats for value in node.inputs}
    for node in concats:
        (reader,) = node.outputs[0].consumers()
        assert reader.op_type == "QuantizeLinear"
        scales.add(tuple(array(value).item() for value in reader.inputs[1:]))
    assert len(scales) == 1


@pytest.mark.usefixtures("exact_int8")
def test_a_relu_is_kept_before_a_shared_range(tiny_model: Path, images: Images) -> None:
    """Half of the channels pass a ReLU and the others do not: their shared range extends below zero."""
    b = Builder(tiny_model)
    first = b.conv("centred", "first", (4, 1, 3, 3), strides=[4, 4], pads=[1] * 4)
    second = b.conv("centred", "second", (4, 1, 3, 3), strides=[4, 4], pads=[1] * 4)
    joined = b.add("Concat", [b.add("Relu", [first], "cut"), second], "joined", axis=1)
    b.add("Relu", [b.conv(joined, "third", (8, 8, 3, 3), pads=[1] * 4)], "feature_map")
    model = b.bytes()
    (exact,), (found,) = (answers(which, images, "feature_map") for which in (model, to_int8(model, images)))
    assert np.abs(found - exact).max() < 0.03 * exact.max()


@pytest.mark.parametrize("which", ["dense", "mobile"])
def test_the_head_and_the_input_are_unchanged(which: str, images: Images, request: pytest.FixtureRequest) -> None:
    exact = read_graph(request.getfixturevalue(which))
    found = read_graph(to_int8(request.getfixturevalue(which), images))

    def head(model: ir.Model) -> list[tuple[str, list[str | None]]]:
        encoder = encoder_nodes(model)
        rest = [node for node in model.graph if node not in encoder]
        return [(node.op_type, [one.name for one in node.inputs if one and not one.const_value]) for node in rest]

    assert head(found) == head(exact)
    assert kinds(found)[:1] == ["Cast"]
    assert [reader.op_type for reader in found.graph.inputs[0].consumers()] == ["Cast"]
    assert all(value.uses() for value in found.graph.initializers.values())  # none is unused
    for node in of_kind(found, "Conv"):
        activation, weight = (value.producer() for value in node.inputs[:2] if value)
        assert activation and weight
        assert (activation.op_type, weight.op_type) == ("DequantizeLinear", "DequantizeLinear")
        zero, (values, scales, _) = activation.inputs[2], weight.inputs
        assert zero and zero.dtype == ir.DataType.UINT8
        assert values and values.dtype == ir.DataType.INT8
        assert array(scales).shape == array(values).shape[:1]  # one scale per channel


@pytest.mark.usefixtures("exact_int8")
@pytest.mark.parametrize("which", ["dense", "mobile"])
def test_an_engine_runs_the_file_and_its_card_states_int8(
    which: str, images: Images, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(which)
    (tmp_path / "model.onnx").write_bytes(model)
    (tmp_path / "model.int8.onnx").write_bytes(to_int8(model, images))
    with (
        open_engine(tmp_path / "model.onnx", threads=1) as exact,
        open_engine(tmp_path / "model.int8.onnx", threads=1) as engine,
    ):
        fingerprint = engine.card.fingerprint
        assert fingerprint.startswith(f"{exact.card.fingerprint}-int8-onnxruntime-")
        assert engine.card == exact.card.with_(precision="int8", fingerprint=fingerprint)
        assert engine.card.weights == exact.card.weights
        np.testing.assert_array_equal(engine.head, exact.head)
        expected, found = exact.run(images), engine.run(images, feature_map=True)
    assert found.feature_map is not None
    assert cosines(expected.embedding.astype(np.float64), found.embedding.astype(np.float64)).min() > 0.98
    np.testing.assert_allclose(found.scores, expected.scores, atol=0.1)


def test_different_quantisations_have_different_fingerprints(tiny_model: Path, images: Images) -> None:
    model = tiny_model.read_bytes()
    files = [
        to_int8(model, images), to_int8(model, images), to_int8(model, images[:4] // 2),
        to_int8(model, images, float_layers=1),
    ]  # fmt: skip
    names = []
    for file in files:
        names.append(ModelCard.loads(read_graph(file).metadata_props[CARD_KEY]).fingerprint)
    assert names[0] == names[1] and len(set(names)) == 3


def test_the_first_layers_and_residual_sums_stay_in_float(mobile: bytes, images: Images) -> None:
    model = read_graph(to_int8(mobile, images, float_layers=2))
    assert in_float(model) == {"Conv:n0", "Conv:depthwise"}  # the stem with its norm
    (clip,), (total,) = of_kind(model, "Clip"), of_kind(model, "Add")
    before = clip.inputs[0].producer() if clip.inputs[0] else None
    assert before and before.name == "Conv:n0"  # its input is not rounded
    assert [reader.op_type for reader in clip.outputs[0].consumers()].count("Conv") == 1
    assert [reader.op_type for reader in total.outputs[0].consumers()] == ["Relu"]


def test_a_batch_norm_does_not_count_as_a_layer(dense: bytes, images: Images) -> None:
    """The norm between the first convolution and the second is a depthwise convolution in the int8 graph."""
    model = read_graph(to_int8(dense, images, float_layers=1))
    assert in_float(model) == {"Conv:n0", "BatchNormalization:n1"}


def test_a_file_with_all_layers_in_float_answers_like_its_source(mobile: bytes, images: Images) -> None:
    all_in_float = to_int8(mobile, images, float_layers=4)
    (exact,), (found,) = (answers(which, images, "embedding") for which in (mobile, all_in_float))
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_ranges_by_hand(tiny_model: Path) -> None:
    """The images are a ramp with grey 25 and 230 as 10th and 90th percentile, and a constant 100."""
    ramp = (np.arange(1024) // 4).astype(np.uint8).reshape(1, 32, 32)
    pair = np.stack([ramp, np.full_like(ramp, 100)])
    graph = read_graph(tiny_model.read_bytes())
    assert tensor_ranges(graph, ["grey"], pair) == {"grey": (0.0, 255.0)}
    assert tensor_ranges(graph, ["grey"], pair, 90)["grey"] == pytest.approx((62.5, 165.0))
    scales = [
        scale_of(of_kind(read_graph(to_int8(tiny_model.read_bytes(), pair, percentile=p)), "Conv")[0].inputs[0])
        for p in (None, 90)
    ]
    # The full range is -1 .. 1; the other one is -130 .. 75 of 255, where zero is step 162 of 255.
    assert scales == [pytest.approx((2 / 255, 128)), pytest.approx((205 / 255 / 255, 162))]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda i: i[:0], {}, r"uint8 \[M, 1, 32, 32\], found uint8 \[0, 1, 32, 32\]"),
        (lambda i: i[:, :, :31], {}, r"found uint8 \[24, 1, 31, 32\]"),
        (lambda i: i[:, 0], {}, r"found uint8 \[24, 32, 32\]"),
        (lambda i: i.astype(np.float32), {}, "found float32"),
        (lambda i: i, {"percentile": 50.0}, "percentile above 50, at most 100, found 50"),
        (lambda i: i, {"percentile": float("nan")}, "found nan"),
    ],
)
def test_refused_inputs(change: Any, options: dict[str, Any], message: str, tiny_model: Path, images: Images) -> None:
    with pytest.raises(UserError, match=message):
        to_int8(tiny_model.read_bytes(), change(images), **options)


def test_a_file_without_a_card_is_refused(tiny_model: Path, images: Images) -> None:
    model = onnx.load(tiny_model)
    del model.metadata_props[:]
    with pytest.raises(CardError, match=r"cbmir\.card"):
        to_int8(model.SerializeToString(), images)


@pytest.mark.release
@pytest.mark.usefixtures("exact_int8")
@pytest.mark.parametrize("name", ["densenet121", "resnet18", "mobilenet_v3_large", "timm:efficientnet_lite0"])
def test_encoders(name: str, make_xray: Any) -> None:
    import torch
    from tests.export.test_onnx_graph import card_for

    from cbmir.export.onnx_graph import to_onnx
    from cbmir.training.encoders.encoder import build_encoder
    from cbmir.training.model import ProxyHead, RetrievalModel

    torch.manual_seed(0)
    encoder, dim = build_encoder(name)
    head = ProxyHead(dim, (2, 2, 2, 2), 3)
    card = card_for(head, embedding_dim=dim)
    model = to_onnx(RetrievalModel(encoder, head), card)
    images = np.stack([make_xray(seed, 32)[None] for seed in range(16)])
    (exact,), (found,) = (answers(which, images, "embedding") for which in (model, to_int8(model, images)))
    assert cosines(exact, found).mean() > 0.95
