#!/usr/bin/env bash
# The C library on a machine with an NVIDIA GPU, gcc and PyTorch, but no Rust: a C program pins, maps, copies and verifies
# cudaMalloc memory, the C tests run on the GPU's own memory (with the real agent), the examples with kernels are built by
# nvcc where it is there, and PyTorch's own NCCL makes and destroys communicators, all on the library at hand.
#
#   ffi/tests/gpu.sh PREFIX
#
# PREFIX is what `cargo xtask install --prefix PREFIX` filled elsewhere (headers in include/, libraries in lib/); a folder in
# the ignored bundle/ is a good place. Logs go to ${OUT:-./out}; LIMIT is the seconds after which one run is killed (240).
# The last line is the count of runs; the exit status is 0 only if none failed.
set -u

here=$(cd "$(dirname "$0")" && pwd) || exit 1
prefix=$(cd "${1:?usage: gpu.sh PREFIX}" && pwd) || exit 1
OUT=${OUT:-./out}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd) || exit 1
LIMIT=${LIMIT:-240}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)) && echo "ok      $1"; }
skip() { skipped=$((skipped + 1)) && echo "SKIPPED $1: $2"; }
fail() { failed=$((failed + 1)) && echo "FAILED  $1: $2" && tail -n 40 "$3" | sed 's/^/  | /'; }

# attempt NAME LOG COMMAND...: the command's output is in the log, its failure in the count.
attempt() {
    local name=$1 log=$OUT/$2 status
    shift 2
    timeout --kill-after=10 "$LIMIT" "$@" >"$log" 2>&1 </dev/null
    status=$?
    if [ "$status" -ne 0 ]; then fail "$name" "exit status $status, see $log" "$log"; return 1; fi
}

# require NAME LOG TEXT...: the log contains every text.
require() {
    local name=$1 log=$OUT/$2 text
    shift 2
    for text in "$@"; do
        grep -qF -- "$text" "$log" || { fail "$name" "no '$text' in $log" "$log"; return 1; }
    done
    pass "$name"
}

{
    nvidia-smi --format=csv --query-gpu=name,driver_version
    gcc --version
    sha256sum "$prefix"/lib/libgdrapi.so.2.6
    ls -l /dev/gdrdrv /dev/nvidiactl
} >"$OUT/c-facts.txt" 2>&1

export LD_LIBRARY_PATH=$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
unset GDRCOPY_ENABLE_LOGGING GDRCOPY_BACKEND GDRCOPY_RM

build() { gcc -std=gnu11 -O2 -Wall -Wextra -Werror "$1" -I"$prefix/include" -L"$prefix/lib" -lgdrapi -ldl -pthread -o "$2"; }

# --- cudaMalloc memory -------------------------------------------------------------------------------------------------

if build "$here/gpu/cuda_malloc.c" "$work/cuda_malloc" >"$OUT/c-compile.log" 2>&1; then
    pass "compile cuda_malloc.c with gcc"
    attempt "cudaMalloc memory from C" c-cuda-malloc.log env GDRCOPY_RM=ipc "$work/cuda_malloc" &&
        require "cudaMalloc memory from C" c-cuda-malloc.log "passed"
    # Without the level it is refused, and the refusal names the switch.
    timeout "$LIMIT" "$work/cuda_malloc" >"$OUT/c-no-level.log" 2>&1 </dev/null
    require "the refusal names the way out" c-no-level.log "GDRCOPY_RM=ipc"
else
    fail "compile cuda_malloc.c with gcc" "see $OUT/c-compile.log" "$OUT/c-compile.log"
fi

# --- C tests and replays over the GPU's own memory -----------------------------------------------------------------------

for source in "$here"/c/*.c "$here"/replay/*.c; do
    name=$(basename "$source" .c)
    # layout is compiled only; reload makes a thousand CUDA contexts and counts what CUDA keeps.
    case $name in layout | reload) continue ;; esac
    if ! build "$source" "$work/$name" >"$OUT/c-$name.log" 2>&1; then
        fail "$name" "does not compile" "$OUT/c-$name.log"
    elif attempt "$name on backend rm" "c-$name.log" env GDRCOPY_BACKEND=rm "$work/$name"; then
        pass "$name on backend rm"
    fi
done

# --- examples with kernels -----------------------------------------------------------------------------------------------

examples=$here/../../examples/order_book
for program in pingpong order_book; do
    name="$program built by nvcc"
    if ! command -v "${NVCC:-nvcc}" >/dev/null; then
        skip "$name" "nvcc is not on the PATH; NVCC names it elsewhere"
    elif attempt "$name" "c-$program.log" sh "$examples/nvcc.sh" "$prefix/lib" "$prefix/include" "$program"; then
        case $program in
        order_book) require "$name" c-order_book.log "every answer checked" "order to answer: median" ;;
        *) require "$name" "c-$program.log" "round trip, ns" ;;
        esac
    fi
done

# --- NCCL ----------------------------------------------------------------------------------------------------------------

if python3 -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then
    name="PyTorch's NCCL on the library"
    attempt "$name" c-nccl.log env NCCL_GDRCOPY_ENABLE=1 GDRCOPY_RM=ipc NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ALL \
        GDRCOPY_ENABLE_LOGGING=1 GDRCOPY_LOG_LEVEL=debug NCCL_SOCKET_IFNAME=lo python3 "$here/gpu/nccl_one_rank.py" &&
        require "$name" c-nccl.log "GDRCOPY enabled library 2.6 driver 2.6" "communicator created and destroyed twice" \
            "gdr_pin_buffer" "gdr_unpin_buffer"
else
    skip "PyTorch's NCCL on the library" "no PyTorch with CUDA"
fi

echo "results: $OUT"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
