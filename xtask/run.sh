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
set -u

here=$(cd "$(dirname "$0")" && pwd) || exit 1
OUT=${OUT:-./out}
BACKEND=${BACKEND:-rm}
LIMIT=${LIMIT:-300}
ROUNDS=${ROUNDS:-100000}
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

tests_as() {
    local user=$1 test log status
    for test in gdrcopy-unit contract hot_path gpu gpu_channel gpu_stale vulkan; do
        if [ ! -e "$test" ]; then
            skip "$test as $user" "not in this bundle"
            continue
        fi
        log=$OUT/$user/$test.log
        as "$user" "./$test" >"$log" 2>&1 </dev/null
        status=$?
        if [ "$status" -ne 0 ]; then
            fail "$test as $user" "$(ended "$status"), see $log" "$log"
        elif grep -q '^test result: ok\. 0 passed' "$log"; then
            fail "$test as $user" "no test ran, see $log" "$log"
        else
            pass "$test as $user"
        fi
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

if [ "$(id -u)" -eq 0 ]; then
    users="root nobody"
else
    users="self"
    skip "runs as root" "started by user $(id -u)"
fi
for user in $users; do
    [ "$user" = root ] && export GDRCOPY_STALE_ROUNDS=$ROUNDS || export GDRCOPY_STALE_ROUNDS=$((ROUNDS / 10))
    mkdir -p "$OUT/$user" || exit 1
    tests_as "$user"
    copylat_as "$user"
done

echo "results: $OUT"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
