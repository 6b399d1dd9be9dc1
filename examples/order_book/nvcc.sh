#!/bin/sh
# Builds order_book.cc, and ../c/pingpong.cu, with nvcc and runs both on this machine's GPU.
#
#   sh nvcc.sh LIB INCLUDE [PROGRAM]
#
# LIB holds libgdrapi.so.2, INCLUDE gdrapi.h, gdrapi_ext.h and gdrcopy_channel.cuh (ffi/include). NVCC names the compiler
# (nvcc), ARCH its target (native; sm_70 or later). With PROGRAM, order_book or pingpong, only that one.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
lib=$(cd "${1:?usage: nvcc.sh LIB INCLUDE [PROGRAM]}" && pwd)
include=$(cd "${2:?usage: nvcc.sh LIB INCLUDE [PROGRAM]}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The name that -lgdrapi looks for, also where only the runtime's name was copied.
ln -s "$lib/libgdrapi.so.2" "$work/libgdrapi.so"

for program in ${3:-pingpong order_book}; do
    case $program in
    order_book) source="-x cu $here/order_book.cc" ;;
    pingpong) source=$here/../c/pingpong.cu ;;
    *) echo "nvcc.sh: $program is neither order_book nor pingpong" >&2 && exit 2 ;;
    esac
    # Two words for the one of them.
    # shellcheck disable=SC2086
    "${NVCC:-nvcc}" -std=c++17 -O2 "-arch=${ARCH:-native}" -I"$include" -L"$work" -o "$work/$program" $source -lgdrapi
    echo "$program:"
    LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$work/$program"
done
