"""cbmir.export: a finished run in; files out, each of which answers as PyTorch does or is not written.

::

    RUN -> graph.to_onnx -> float32, float16 ──────────────────┐
                 ├─> int8.to_int8 (ONNX Runtime)               ├─> engine -> parity.compare with PyTorch -> parity.json
                 ├─> openvino.write_openvino (bf16, int8)      │
                 └─> tensorrt.write_plan (a plan for a GPU) ───┘
"""

from cbmir.export.comparing import compare_models
from cbmir.export.exporting import ExportOptions, export_run
from cbmir.export.graph import to_onnx
from cbmir.export.parity import LIMITS, Limits, Parity, compare

__all__ = ["LIMITS", "ExportOptions", "Limits", "Parity", "compare", "compare_models", "export_run", "to_onnx"]
