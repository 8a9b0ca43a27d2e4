#!/usr/bin/env bash
# Test and time models of cbmir on an NVIDIA GPU, in one call of less than eight minutes.
#
#   benchmarks/gpu.sh [--wheels DIR] [--out DIR] [--model FILE.onnx] [--minutes 7] [--dry-run]
#
# Installs missing packages from the folder of wheels; checks that the CUDA and TensorRT providers and a TensorRT plan
# answer as the CPU does; times batches of 1, 8, 32 and 128 against PyTorch; measures training; prints a table, and
# writes gpu.md and gpu.json with the GPU's name and versions. Without a GPU it runs only the checks that need none.
# Exit code: 1 if an engine answers differently from the CPU or a step failed, 2 for wrong arguments.
#
#   PYTHON=python3    the interpreter; cbmir itself need not be installed
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
