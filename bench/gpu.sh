#!/bin/sh
# All that needs a GPU, in one call of under ten minutes: the kernels' and the engine's tests compiled for it, the
# kernels against its bandwidth and matrix rate; and on a model of Qwen3-0.6B's shape with random weights decoding,
# prefill and overlap sweeps, 256 requests of 100 to 1,024 tokens in and out, and what CUDA graphs, overlap, fused
# layers, the deterministic mode and an adapter do to a step. Results are CSV files under bench/results/.
#
#     bench/gpu.sh [PYTHON]          PYTHON has headrace[worker,dev] installed, with torch for CUDA
#
# Each part has a limit of its own, so that one that hangs does not take the others with it, and writes each line as it
# is measured; the exit status says whether all passed.
set -u
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
OUT=bench/results
MODEL=${TMPDIR:-/tmp}/headrace-qwen3-0.6b
failed=""

part() { # NAME SECONDS COMMAND…
    name=$1 limit=$2
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" || { echo "== $name FAILED with $?"; failed="$failed $name"; }
}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device: torch sees no GPU here (nvidia-smi and torch.version.cuda tell why); nothing was run" >&2
    exit 1
fi
DEVICE=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())')
STEM="$OUT/$(date +%Y-%m-%d)-$DEVICE"
mkdir -p "$OUT"
unset TRITON_INTERPRET

# Most of it is Triton's compiler on the CPU: four processes share it. Each test says at once what came of it.
part tests 140 "$PYTHON" -m pytest -v --tb=short -n 4 -m 'long or not long' -p no:cacheprovider \
    tests/test_kernels_attention.py tests/test_kernels_rows.py tests/test_kernels_sampling.py tests/test_kernels_lora.py \
    tests/test_kernels_matmul.py tests/test_engine_triton.py tests/test_engine_fuse_cuda.py \
    tests/test_engine_deterministic_gpu.py \
    tests/test_engine_lora.py::test_kernels_that_take_all_adapters_at_once_add_the_same
part kernels 100 "$PYTHON" bench/kernels.py --output "$STEM-kernels.csv"
part model 40 "$PYTHON" bench/random_model.py "$MODEL"
part mixed 60 "$PYTHON" bench/engine_sweeps.py --model "$MODEL" --context-length 2048 --only mixed \
    --output "$STEM-mixed.csv"
part sweeps 80 "$PYTHON" bench/engine_sweeps.py --model "$MODEL" --context-length 16384 --only decode prefill \
    --output "$STEM-sweeps.csv"
part overlap 50 "$PYTHON" bench/engine_sweeps.py --model "$MODEL" --context-length 2048 --only overlap \
    --batch 1 8 32 128 256 --output "$STEM-overlap.csv"
part effects 110 "$PYTHON" bench/effects.py --model "$MODEL" --context-length 2048 --kv-memory 5gb --max-running 128 \
    --concurrency 1 32 128 --output "$STEM-effects.csv"

echo "== results"
ls -l "$OUT"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
