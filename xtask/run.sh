#!/usr/bin/env bash
# Runs the programs beside this script on a machine with an NVIDIA GPU, as root and as an unprivileged user, and writes
# what they print below ${OUT:-./out}. It reads facts about the card and sets nothing on it. The last line printed is
# the count of runs; the exit status is 0 only if none failed.
#
#   OUT      folder for the results (./out)
#   BACKEND  backend that gdrcopy_copylat uses (rm): named, so that no other can stand in for it unseen
#   REQUIRE  backends whose tests must not be skipped (rm); rm,vulkan where a Vulkan loader and driver are there
#   ROUNDS   rounds of the stale-window test as root (100000); a tenth of them as another user
#   LIMIT    seconds after which one run is killed (300)
#   PARTS    what to run: any of sanity, tests, copylat, limits, torch (all of them)
#   ONLY     names of test programs, if not all of them are to run; tests.txt lists them
#   SOAK     1: also the tests that are ignored by default because they take long, and soaks of full length
set -u

here=$(cd "$(dirname "$0")" && pwd) || exit 1
OUT=${OUT:-./out}
BACKEND=${BACKEND:-rm}
LIMIT=${LIMIT:-300}
ROUNDS=${ROUNDS:-100000}
PARTS=${PARTS:-sanity tests copylat limits torch}
SOAK=${SOAK:-0}
NOBODY=65534

if [ ! -e /dev/nvidiactl ]; then
    echo "run.sh: no NVIDIA GPU: /dev/nvidiactl does not exist; load the NVIDIA driver or run this on a machine with a GPU" >&2
    exit 1
fi
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd) || exit 1

# The unprivileged user may not be able to reach the folder of this script.
stage=$(mktemp -d) || exit 1
trap 'rm -rf "$stage"' EXIT
cp "$here"/* "$stage"/ 2>/dev/null   # sub-folders, such as earlier results, stay behind
chmod -R a+rX "$stage"
# Where any user can leave a file.
mkdir -m 1777 "$stage/shared" || exit 1
cd "$stage" || exit 1

# --- facts -------------------------------------------------------------------------------------------------------------

fact() {
    local file=$OUT/facts/$1
    shift
    "$@" >"$file" 2>&1 || echo "($* failed or is not there)" >>"$file"
}

mkdir -p "$OUT/facts" || exit 1
cp build.txt "$OUT/facts/" || exit 1
fact date.txt date -u
fact nvidia-smi.txt nvidia-smi
# Not all of `-q`: it prints serial numbers, which do not belong in a record.
fact nvidia-smi-gpu.txt nvidia-smi --format=csv --query-gpu=name,driver_version,pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total,compute_mode,mig.mode.current,persistence_mode,clocks.sm,clocks.mem
fact nvidia-smi-memory.txt nvidia-smi -q -d MEMORY
fact nvidia-smi-topo.txt nvidia-smi topo -m
fact driver.txt cat /proc/driver/nvidia/version
fact devices.txt ls -ln /dev/nvidia* /dev/dri
fact uname.txt uname -a
fact lscpu.txt lscpu
fact limits.txt bash -c 'ulimit -a'

# --- runs --------------------------------------------------------------------------------------------------------------

passed=0 failed=0 skipped=0

pass() { passed=$((passed + 1)) && echo "ok      $1"; }
skip() { skipped=$((skipped + 1)) && echo "SKIPPED $1: $2"; }
fail() {
    failed=$((failed + 1))
    echo "FAILED  $1: $2"
    [ ! -e "$3" ] || tail -n 40 "$3" | sed 's/^/  | /'
}

# ended STATUS: what an exit status means.
ended() {
    case $1 in
        124 | 137) echo "killed after $LIMIT s or by a signal (status $1)" ;;
        *) echo "exit status $1" ;;
    esac
}

# as USER COMMAND...: USER is root, nobody or self (whoever started this script, if that is not root).
as() {
    local user=$1
    shift
    # The stage as home: nobody has none, and no settings of a user take part.
    local run=(env "HOME=$stage" timeout --kill-after=10 "$LIMIT" "$@")
    if [ "$user" != nobody ]; then
        "${run[@]}"
    elif command -v setpriv >/dev/null; then
        setpriv --reuid "$NOBODY" --regid "$NOBODY" --clear-groups "${run[@]}"
    else
        su -s /bin/sh "$(getent passwd "$NOBODY" | cut -d: -f1)" -c "$(printf '%q ' "${run[@]}")"
    fi
}

# Rust's test harness reads these; one thread, because tests share one card. A test that does not reach the card fails.
export RUST_TEST_THREADS=1 RUST_TEST_NOCAPTURE=1 RUST_BACKTRACE=1 GDRCOPY_TEST_REQUIRE=${REQUIRE:-rm}

# Two minutes or so; the defaults, a second or so.
if [ "$SOAK" = 1 ]; then
    export GDRCOPY_SOAK_MESSAGES=${GDRCOPY_SOAK_MESSAGES:-10000000000} GDRCOPY_SOAK_ROUNDS=${GDRCOPY_SOAK_ROUNDS:-100000000}
fi

# wants PART: whether it is to run.
wants() { [[ " $PARTS " == *" $1 "* ]]; }

tests_as() {
    local user=$1 test log status more=()
    [ "$SOAK" = 1 ] && more=(--include-ignored)
    for test in ${ONLY:-$(cat tests.txt)}; do
        if [ ! -e "$test" ]; then
            skip "$test as $user" "not in this bundle"
            continue
        fi
        log=$OUT/$user/$test.log
        as "$user" "./$test" "${more[@]}" >"$log" 2>&1 </dev/null
        status=$?
        if [ "$status" -ne 0 ]; then
            fail "$test as $user" "$(ended "$status"), see $log" "$log"
        elif grep -q '^test result: ok\. 0 passed; 0 failed; [1-9][0-9]* ignored' "$log"; then
            skip "$test as $user" "takes long; SOAK=1 runs it"
        elif grep -q '^test result: ok\. 0 passed' "$log"; then
            fail "$test as $user" "no test ran, see $log" "$log"
        else
            pass "$test as $user"
        fi
    done
}

# Every target of the copy engine with what was measured; whether it is met is for the reader of the record.
limits_as() {
    local user=$1 log=$OUT/$1/limits.log json=$OUT/$1/limits.json status flags=()
    # One full run is a minute; a second one only shows that another user can make it.
    [ "$user" = nobody ] && flags=(--quick)
    as "$user" ./limits --backend "$BACKEND" "${flags[@]}" --json "$stage/shared/limits.json" \
        --plot "$stage/shared/limits.svg" >"$log" 2>&1 </dev/null
    status=$?
    mv "$stage/shared/limits.json" "$json" 2>/dev/null
    mv "$stage/shared/limits.svg" "$OUT/$user/limits.svg" 2>/dev/null
    if [ "$status" -ne 0 ]; then
        fail "limits as $user" "$(ended "$status"), see $log" "$log"
    elif ! grep -Eq '"verdicts": *\[' "$json" || grep -Eq '"verified": *false' "$json"; then
        fail "limits as $user" "no verdict, or wrong bytes, see $json" "$log"
    else
        pass "limits as $user"
    fi
    sed -n '/^part /,$p' "$log" | sed 's/^/  | /'
}

# PyTorch's memory through the C library, a backend at a time.
torch_as() {
    local user=$1 backend log status
    if ! as "$user" python3 -c 'import torch; assert torch.cuda.is_available()' >/dev/null 2>&1; then
        skip "PyTorch's tensors as $user" "no PyTorch with CUDA"
        return
    fi
    for backend in rm vulkan; do
        log=$OUT/$user/torch-$backend.log
        as "$user" env GDRCOPY_BACKEND="$backend" python3 torch_tensors.py "./libgdrapi.so.2" >"$log" 2>&1 </dev/null
        status=$?
        if [ "$status" -eq 0 ]; then
            pass "PyTorch's tensors on $backend as $user"
        else
            fail "PyTorch's tensors on $backend as $user" "$(ended "$status"), see $log" "$log"
        fi
        grep '^case' "$log" | sed 's/^/  | /'
    done
}

copylat_as() {
    local user=$1 allocator name log json status
    for allocator in cuMemAlloc cuMemCreate buffer; do
        # Which this backend refuses, as its tests show.
        [ "$BACKEND/$allocator" = vulkan/cuMemAlloc ] && continue
        name="gdrcopy_copylat -a $allocator as $user"
        log=$OUT/$user/copylat-$allocator.log
        json=$OUT/$user/copylat-$allocator.json
        as "$user" ./gdrcopy_copylat --backend "$BACKEND" -a "$allocator" --json - >"$json" 2>"$log" </dev/null
        status=$?
        if [ "$status" -ne 0 ]; then
            fail "$name" "$(ended "$status"), see $log" "$log"
        elif ! grep -Eq '"verified": *true' "$json"; then
            fail "$name" "no verified result, see $json" "$log"
        elif grep -Eq '"verified": *false' "$json"; then
            fail "$name" "a result is not verified, see $json" "$log"
        else
            pass "$name"
        fi
    done
}

# What a user runs first. Tests that do not apply to the backend are waived, which is their own word and no failure.
sanity_as() {
    local user=$1 program log status
    for program in gdrcopy_doctor gdrcopy_sanity; do
        [ -e "$program" ] || { skip "$program as $user" "not in this bundle"; continue; }
        log=$OUT/$user/$program.log
        # The doctor chooses for itself.
        local flags=(-v --json -)
        [ "$program" = gdrcopy_sanity ] && flags+=(--backend "$BACKEND")
        as "$user" "./$program" "${flags[@]}" >"$OUT/$user/$program.json" 2>"$log" </dev/null
        status=$?
        if [ "$status" -eq 0 ]; then pass "$program as $user"; else fail "$program as $user" "$(ended "$status"), see $log" "$log"; fi
    done
}

if [ "$(id -u)" -eq 0 ]; then
    users="root nobody"
else
    users="self"
    skip "runs as root" "started by user $(id -u)"
fi
for user in $users; do
    [ "$user" = root ] && export GDRCOPY_STALE_ROUNDS=$ROUNDS || export GDRCOPY_STALE_ROUNDS=$((ROUNDS / 10))
    mkdir -p "$OUT/$user" || exit 1
    wants sanity && sanity_as "$user"
    wants tests && tests_as "$user"
    wants copylat && copylat_as "$user"
    wants limits && limits_as "$user"
    wants torch && torch_as "$user"
done

echo "results: $OUT"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
