"""Engines behind one protocol (`base`): ONNX Runtime, OpenVINO and TensorRT. `registry` opens a model file with one."""
