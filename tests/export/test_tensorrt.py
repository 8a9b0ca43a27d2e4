"""TensorRT plans: real builds for GPUs that need not be present, from files in both precisions."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from cbmir.errors import CardError, EngineError, ModelError, UserError
from cbmir.export import tensorrt
from cbmir.export.onnx_graph import to_onnx
from cbmir.export.tensorrt import resolve_target, write_plan
from cbmir.runtime.engines.nvidia import Gpu, cache_key
from cbmir.runtime.engines.registry import open_engine
from cbmir.runtime.engines.tensorrt import read_plan, read_plan_info, sidecar_of
from cbmir.training.model import RetrievalModel

if os.environ.get("CBMIR_REQUIRE_SHARED") == "1":  # required in CI
    trt = importlib.import_module("tensorrt_rtx_bindings")
else:
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX has wheels for Linux on x86_64 only")

Change = Callable[[Any], None]
FILES = ("model.onnx", "model.fp16.onnx")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """The networks that are built during the test, as they are just before building."""
    seen: list[SimpleNamespace] = []
    real = tensorrt._configure

    def configure(trt: Any, flavour: str, target: str, builder: Any, image: Any, max_batch: int) -> Any:
        config = real(trt, flavour, target, builder, image, max_batch)
        seen.append(SimpleNamespace(image=(image.name, image.dtype, tuple(image.shape)), config=config))
        return config

    monkeypatch.setattr(tensorrt, "_configure", configure)
    yield seen


def build_plan(model: bytes, target: str, max_batch: int = 32) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.plan")
        write_plan(model, path, target, max_batch)
        return path.read_bytes()


def changed(model: Path, change: Change) -> bytes:
    import onnx

    proto = onnx.load(model)
    change(proto)
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize("file", FILES)
def test_plans_for_two_gpus_are_built_from_an_export(file: str, tiny_export: Path, watched: list[Any]) -> None:
    model = (tiny_export / file).read_bytes()
    for target in ("sm86", "sm89"):
        assert f"accelerators={{{target} }}".encode() in build_plan(model, target, max_batch=16)
    for seen, target in zip(watched, ("SM86", "SM89"), strict=True):
        assert seen.image == ("image", trt.uint8, (-1, 1, 32, 32))
        assert seen.config.num_compute_capabilities == 1
        assert seen.config.get_compute_capability(0) == trt.ComputeCapability.__members__[target]
        assert seen.config.num_optimization_profiles == 1
        assert not seen.config.get_flag(trt.BuilderFlag.TF32)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_projection_of_two_stages_is_built(precision: Any, two_stage_model: RetrievalModel, tiny_model: Path) -> None:
    with open_engine(tiny_model, threads=1) as engine:
        card = engine.card.with_(embedding_dim=16, head="linear", proxies_per_class=(), negative_proxies=False)
    assert build_plan(to_onnx(two_stage_model, card, precision), "sm86")


@pytest.mark.parametrize("file", FILES)
def test_the_precision_is_that_of_the_file(file: str, tiny_export: Path) -> None:
    """The network is strongly typed: convolutions have the precision of the file, outputs are float32."""
    _, _, network = parsed(tiny_export / file)
    assert network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    kinds = [network.get_layer(i).get_output(0).dtype for i in range(network.num_layers)
             if network.get_layer(i).type == trt.LayerType.CONVOLUTION]  # fmt: skip
    assert set(kinds) == {trt.float16 if "fp16" in file else trt.float32}
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    assert [(o.name, o.dtype, tuple(o.shape)) for o in outputs] == [
        ("embedding", trt.float32, (-1, 512)),
        ("scores", trt.float32, (-1, 3)),
        ("feature_map", trt.float32, (-1, 512, 1, 1)),
    ]


def parsed(model: Path) -> tuple[Any, Any, Any]:
    logger = tensorrt.tensorrt_logger(trt)
    builder = trt.Builder(logger)
    return logger, builder, tensorrt._parse(trt, builder, logger, model.read_bytes())


@pytest.mark.parametrize(("max_batch", "batches"), [(1, (1, 1, 1)), (4, (1, 4, 4)), (64, (1, 8, 64))])
def test_the_profile_goes_from_one_image_to_the_largest_batch(
    max_batch: int, batches: tuple[int, ...], tiny_model: Path
) -> None:
    _, builder, network = parsed(tiny_model)
    profiles: list[Any] = []

    class Watched:
        create_builder_config = builder.create_builder_config

        @staticmethod
        def create_optimization_profile() -> Any:
            profiles.append(builder.create_optimization_profile())
            return profiles[-1]

    tensorrt._configure(trt, "tensorrt-rtx", "sm86", Watched, network.get_input(0), max_batch)
    (profile,) = profiles
    assert [tuple(shape) for shape in profile.get_shape("image")] == [(n, 1, 32, 32) for n in batches]


def test_a_plan_and_its_sidecar_belong_together(tiny_model: Path, tmp_path: Path) -> None:
    model, path = tiny_model.read_bytes(), tmp_path / "model.sm86.plan"
    write_plan(model, path, "sm86", 4)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.sm86.plan", "model.sm86.plan.json"]
    facts = json.loads(sidecar_of(path).read_text("utf-8"))
    assert {key: facts[key] for key in ("target", "max_batch", "flavour", "version", "sha256", "source_sha256")} == {
        "target": "sm86",
        "max_batch": 4,
        "flavour": "tensorrt-rtx",
        "version": trt.__version__,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source_sha256": hashlib.sha256(model).hexdigest(),
    }
    info = read_plan_info(path)
    assert (info.card.fingerprint, info.card.precision) == ("tiny-0", "float32")
    assert info.card.versions["tensorrt-rtx"] == trt.__version__
    assert info.head.shape == (8, 8)
    assert read_plan(path, info) == path.read_bytes()


def test_a_failure_leaves_the_previous_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.sm86.plan"
    path.write_bytes(b"older")
    broken = changed(tiny_model, lambda proto: setattr(proto.graph.node[4], "op_type", "Relux"))
    with pytest.raises(ModelError):
        write_plan(broken, path, "sm86")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"older"


def unknown_operator(proto: Any) -> None:
    proto.graph.node[4].op_type, proto.graph.node[4].name = "Relux", "the_relu"


def missing_kernel(proto: Any) -> None:
    proto.graph.node[3].input[1], proto.graph.node[3].name = "nowhere", "the_conv"


def uint8_arithmetic(proto: Any) -> None:
    """Remove the cast, so that a uint8 image is combined with a float constant."""
    proto.graph.node[1].input[0], proto.graph.node[1].name = "image", "the_scale"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unknown_operator, r"node 4 'the_relu' \(Relux\): .*Plugin not found"),
        (missing_kernel, r"node 3 'the_conv' \(Conv\): .*input was not registered"),
        (uint8_arithmetic, r"node 1 'the_scale' \(Mul\): "),
    ],
)
def test_a_broken_graph_gives_the_parsers_message(change: Change, words: str, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=words):
        build_plan(changed(tiny_model, change), "sm86")


def test_a_failing_builder_gives_its_message(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an optimisation profile, a dynamic batch cannot be built."""
    monkeypatch.setattr(tensorrt, "_configure", lambda *arguments: arguments[3].create_builder_config())
    with pytest.raises(ModelError, match=r"cannot build a plan for sm86: .*profile"):
        build_plan(tiny_model.read_bytes(), "sm86")


def test_files_that_are_not_exports_are_refused(tiny_model: Path, make_tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="bytes of an ONNX file"):
        build_plan(tiny_model.read_bytes()[:1000], "sm86")
    with pytest.raises(CardError, match="model card inside"):
        build_plan(b"", "sm86")
    int8 = make_tiny_model(tmp_path / "int8.onnx", precision="int8")
    with pytest.raises(ModelError, match="float32 or float16 for a TensorRT plan, found int8"):
        build_plan(int8.read_bytes(), "sm86")
    with pytest.raises(ModelError, match="expected the tensors"):
        build_plan(changed(tiny_model, lambda proto: proto.graph.output.pop()), "sm86")
    with pytest.raises(UserError, match="at least 1, found 0"):
        build_plan(tiny_model.read_bytes(), "sm86", max_batch=0)


def test_unavailable_targets_are_refused(tiny_model: Path) -> None:
    with pytest.raises(EngineError, match=r"sm75, sm80, sm86, sm89.*found 'sm61'"):
        build_plan(tiny_model.read_bytes(), "sm61")
    with pytest.raises(EngineError, match="found 'sm61'"):
        resolve_target("sm61")
    assert resolve_target("sm86") == "sm86"
    with pytest.raises(EngineError, match="no NVIDIA GPU"):
        build_plan(tiny_model.read_bytes(), "current")


def test_tensorrt_itself_builds_only_for_the_present_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(__version__="10.13")
    monkeypatch.setattr(tensorrt, "find_tensorrt", lambda *flavours: (fake, "tensorrt"))
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: Gpu("Card", "sm90", 80 << 30))
    for target in ("sm90", "current"):
        assert tensorrt._builder_for(target) == (fake, "tensorrt", "sm90")
        assert resolve_target(target) == "sm90"
    with pytest.raises(EngineError, match=r"\(sm90\), but sm86 was requested.*\.\[tensorrt-rtx\]"):
        tensorrt._builder_for("sm86")


def test_compiled_files_are_named_by_model_gpu_version_and_precision() -> None:
    names = {cache_key(*parts) for parts in (
        ("a" * 64, "NVIDIA A2/x", "10.1", "float32"), ("b" * 64, "NVIDIA A2/x", "10.1", "float32"),
        ("a" * 64, "NVIDIA A3/x", "10.1", "float32"), ("a" * 64, "NVIDIA A2/x", "10.2", "float32"),
        ("a" * 64, "NVIDIA A2/x", "10.1", "float16"),
    )}  # fmt: skip
    assert len(names) == 5
    assert "aaaaaaaaaaaaaaaa-NVIDIA_A2_x-10.1-float32" in names
