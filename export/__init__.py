"""cbmir.export: a finished run in, one ONNX file out, which answers as PyTorch does or is not written.

::

    RUN -> graph.to_onnx -> temporary file -> OnnxEngine -> parity.compare with PyTorch -> model.onnx + parity.json
"""

from cbmir.export.exporting import export_run
from cbmir.export.graph import to_onnx
from cbmir.export.parity import Limits, Parity, compare

__all__ = ["Limits", "Parity", "compare", "export_run", "to_onnx"]
