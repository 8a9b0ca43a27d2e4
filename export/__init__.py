"""cbmir.export: a finished run in; files out, each of which answers as PyTorch does or is not written.

::

    RUN -> graph.to_onnx -> float32, float16 ──────────────────┐
                 ├─> int8.to_int8 (ONNX Runtime)               ├─> engine -> parity.compare with PyTorch -> parity.json
                 ├─> openvino.write_openvino (bf16, int8)      │
                 └─> tensorrt.write_plan (a plan for a GPU) ───┘
"""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.export.compare import compare_models
    from cbmir.export.export import ExportOptions, export_run
    from cbmir.export.onnx_graph import to_onnx
    from cbmir.export.parity import LIMITS, Limits, Parity, measure_parity

# `cbmir.export.perf` measures exported files where neither PyTorch nor ONNX is installed.
__getattr__ = lazy_imports(
    __name__,
    {
        "LIMITS": "cbmir.export.parity",
        "ExportOptions": "cbmir.export.export",
        "Limits": "cbmir.export.parity",
        "Parity": "cbmir.export.parity",
        "measure_parity": "cbmir.export.parity",
        "compare_models": "cbmir.export.compare",
        "export_run": "cbmir.export.export",
        "to_onnx": "cbmir.export.onnx_graph",
    },
)

__all__ = ["LIMITS", "ExportOptions", "Limits", "Parity", "compare_models", "export_run", "measure_parity", "to_onnx"]
