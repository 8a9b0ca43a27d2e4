"""cbmir.export: export a run, an encoder or a float32 file to files that answer as it does.

::

    RUN -> onnx_graph.to_onnx -> float32, float16 ─────────┐
             ├─> quantize_ort.to_int8 (ONNX Runtime)       ├─> engine -> parity.measure_parity -> parity.json
             ├─> openvino.write_openvino (bf16, int8)      │
             └─> tensorrt.write_plan (a plan for a GPU) ───┘
"""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.export.compare import compare_models
    from cbmir.export.export import export_encoder, export_file, export_run
    from cbmir.export.onnx_graph import to_onnx
    from cbmir.export.options import ExportOptions
    from cbmir.export.parity import LIMITS, Parity, ParityLimits, measure_parity

# Lazy, since `cbmir.export.perf` also runs without PyTorch and ONNX.
__getattr__ = lazy_imports(
    __name__,
    {
        **dict.fromkeys(("LIMITS", "Parity", "ParityLimits", "measure_parity"), "cbmir.export.parity"),
        **dict.fromkeys(("export_encoder", "export_file", "export_run"), "cbmir.export.export"),
        "ExportOptions": "cbmir.export.options",
        "compare_models": "cbmir.export.compare",
        "to_onnx": "cbmir.export.onnx_graph",
    },
)

__all__ = [
    "LIMITS", "ExportOptions", "Parity", "ParityLimits", "compare_models", "export_encoder", "export_file",
    "export_run", "measure_parity", "to_onnx",
]  # fmt: skip
