#!/usr/bin/env bash
# Compare the paper's methods on a machine with a GPU, in one call of less than eight minutes.
#
#   NIH=DIR benchmarks/gpu_paper.sh
#
#   NIH               images/, Data_Entry_2017_v2020.csv and splits.csv: NIH ChestX-ray14 or a part of it
#
#   OUT=gpu-paper     the report; a second call continues the first
#   WEIGHTS=none      or a state dict for the encoder (benchmarks/imagenet_weights.py writes one), or imagenet
#   TUNED=docs/benchmark/nih/tuned.json    learning rates of the methods (benchmarks/tune.py); empty: 3e-4 for all
#   FOLDS=5           folds by patient
#   JOBS=6            cells that share the GPU
#   MINUTES=6.5       time limit, after which the finished cells are reported
#   PYTHON=python3    with torch, torchvision, lightning, timm, scikit-learn, matplotlib, networkx; cbmir need not be
#                     installed
#   EXTRA=            more options of `cbmir benchmark`
set -euo pipefail
cd "$(dirname "$0")/.."

: "${NIH:?NIH=DIR, a folder with images/, Data_Entry_2017_v2020.csv and splits.csv}"
OUT=${OUT:-gpu-paper} WEIGHTS=${WEIGHTS:-none} FOLDS=${FOLDS:-5} JOBS=${JOBS:-6} MINUTES=${MINUTES:-6.5}
TUNED=${TUNED-docs/benchmark/nih/tuned.json}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
cbmir() { "${PYTHON:-python3}" -m cbmir "$@"; }

mkdir -p "$OUT"
TABLE="$OUT.csv"
test -e "$TABLE" || cbmir data nih --images "$NIH" --entries "$NIH/Data_Entry_2017_v2020.csv" \
    --splits "$NIH/splits.csv" --missing skip -o "$TABLE"

command=(benchmark table "$TABLE" -o "$OUT" --folds "$FOLDS" --seeds 1 --encoder timm:tf_efficientnet_lite0
    --weights "$WEIGHTS" --recipe fitted --lr 3e-4 --image-size 128 ${TUNED:+--tuned "$TUNED"} --jobs "$JOBS" --resume ${EXTRA:-})

seconds=$("${PYTHON:-python3}" -c "print(int(60 * $MINUTES))")
status=0
timeout --signal=INT --kill-after=20 "$seconds" "${PYTHON:-python3}" -m cbmir "${command[@]}" || status=$?
case $status in
    0 | 1) ;; # finished; 1: a cell failed, as the report says
    124 | 130) cbmir "${command[@]}" --report-only ;;
    *) exit "$status" ;;
esac
exit "$((status == 1))"
