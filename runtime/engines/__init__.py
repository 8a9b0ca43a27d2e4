"""What runs a model file: ONNX Runtime, OpenVINO or TensorRT, behind one protocol (`base`), opened by `registry`."""
