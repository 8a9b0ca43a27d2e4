#!/usr/bin/env bash
# What an NVIDIA card does with a model of cbmir, in one call of less than eight minutes.
#
#   benchmarks/gpu.sh [--wheels DIR] [--out DIR] [--model FILE.onnx] [--minutes 7] [--dry-run]
#
# Installs from the folder of wheels what is missing; checks that the CUDA and TensorRT providers and a TensorRT plan
# answer as the CPU does; times batches of 1, 8, 32 and 128 against PyTorch; measures training; prints a table, and
# writes gpu.md and gpu.json with the card's name and versions. Without a card it checks what a CPU can, and times
# nothing. Exit code: 1 where an engine answers otherwise than the CPU or a step failed, 2 for wrong arguments.
#
#   PYTHON=python3    the interpreter; cbmir itself need not be installed
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
