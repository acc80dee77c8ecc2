#!/bin/sh
# Run the tests and the benchmark of a GPU in at most 8 minutes, and write their results to a folder:
#     tests/gpu/check.sh FOLDER
# A test that fails or hangs does not stop the rest. The packages of Rankscope need not be installed.
set -u
out=${1:?name the folder for the results}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=exporter:ingest:storage:dashboards:cli:. PYTHONUNBUFFERED=1
export RANKSCOPE_GPU=1 RANKSCOPE_SPOOL_DIR=off CUBLAS_WORKSPACE_CONFIG=:4096:8 TORCHINDUCTOR_COMPILE_THREADS=1
began=$(date +%s)
failed=0

# The configuration of pyproject.toml is not read, because its plugins may be missing. A test that hangs in the driver
# cannot be interrupted: the timeout ends its process, and xdist runs the other tests in a new one.
options="-c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -v -ra --tb=short --durations=15
	--timeout=60 --timeout-method=thread --max-worker-restart=20"

suite() { # name, limit in seconds, arguments of pytest
	name=$1
	limit=$2
	shift 2
	# shellcheck disable=SC2086 # options are several words
	timeout -s INT -k 10 "$limit" "$python" -m pytest $options "$@" --junitxml="$out/$name.xml" >"$out/$name.log" 2>&1 || failed=1
	sed -n '/short test summary/,$p' "$out/$name.log" | cut -c 1-250 | tail -n 40
	echo "$name: $(($(date +%s) - began)) s since the start"
}

"$python" -c 'import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_properties(0), torch.cuda.nccl.version())'

# The test of most value first: no test here may change a training or let it wait.
suite tests "${TESTS_SECONDS:-150}" -n 1 tests/gpu/test_bits.py tests/gpu/test_measurements.py \
	tests/gpu/test_definitions.py

timeout -k 5 "${BENCHMARK_SECONDS:-220}" "$python" benchmarks/gpu.py "$out" >"$out/benchmark.log" 2>&1 || failed=1
cat "$out/benchmark.log" | cut -c 1-200
echo "benchmark: $(($(date +%s) - began)) s since the start"

# Tests of the CPU again, with tensors on the GPU. One test needs a process group of the CPU. Another one forks, and a
# forked process cannot use a GPU.
RANKSCOPE_TEST_DEVICE=cuda suite loops "${LOOPS_SECONDS:-50}" -n 4 -k "not fsdp2 and not forked_child" tests/exporter/training/test_whole_loops.py \
	tests/exporter/training/test_updates.py \
	tests/exporter/training/test_misfortunes.py tests/exporter/measure/quantities/test_micro_batches.py \
	tests/exporter/measure/quantities/test_activations.py tests/exporter/measure/quantities/test_parameter_quantities.py
exit $failed
