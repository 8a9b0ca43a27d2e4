"""What ONNX Runtime's providers are told. A plain function of the facts, so that a test holds every option."""

from __future__ import annotations

from pathlib import Path

from cbmir.runtime.available import PROVIDERS

Options = dict[str, str]

#: Batches that TensorRT is to take: smallest, the one it is tuned for, largest (which is the engine's `max_batch`).
BATCHES = (1, 8, 32)
#: The share of the GPU's memory that one engine may take.
MEMORY_SHARE = 0.5
_WORKSPACE = 1 << 30


def provider_options(
    engine: str,
    *,
    precision: str = "float32",
    size: int = 0,
    memory: int = 0,
    cache: Path | None = None,
) -> list[tuple[str, Options]]:
    """The providers of an engine (a name of PROVIDERS) and their options, for `InferenceSession(providers=…)`.

    For a GPU: `precision` is the file's, `size` the side of its image, `memory` the GPU's in bytes. `cache` is a folder
    for what TensorRT compiles of this file on this GPU: nothing else may be in it.
    """
    cuda = {
        "device_id": "0",
        "arena_extend_strategy": "kSameAsRequested",  # the other doubles, and keeps
        "gpu_mem_limit": str(int(MEMORY_SHARE * memory)),
        "cudnn_conv_algo_search": "HEURISTIC",  # EXHAUSTIVE measures again for each new batch size
        "use_tf32": "0",  # which would round float32 to 10 bits of mantissa
    }
    image = f"image:{{}}x1x{size}x{size}"
    tensorrt = {
        "device_id": "0",
        "trt_fp16_enable": str(int(precision == "float16")),
        "trt_max_workspace_size": str(_WORKSPACE),
        **{f"trt_profile_{name}_shapes": image.format(batch)
           for name, batch in zip(("min", "opt", "max"), BATCHES, strict=True)},
    }  # fmt: skip
    if cache is not None:
        tensorrt |= {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(cache),
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(cache),
        }
    options = {"CUDAExecutionProvider": cuda, "TensorrtExecutionProvider": tensorrt}
    return [(provider, options.get(provider, {})) for provider in PROVIDERS[engine]]
