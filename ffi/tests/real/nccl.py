"""Lets NCCL open the library: argument 1 is libnccl.so.2. Needs no GPU, for gdrcopy is opened before one is looked for.

ncclGetUniqueId runs NCCL's process-wide set-up; with NCCL_GDRCOPY_ENABLE=1 that resolves the symbols, opens a handle and
compares versions. What happened is in NCCL's own log on standard output.
"""

import ctypes
import sys

nccl = ctypes.CDLL(sys.argv[1])
version = ctypes.c_int()
assert nccl.ncclGetVersion(ctypes.byref(version)) == 0
unique_id = ctypes.create_string_buffer(128)
result = nccl.ncclGetUniqueId(unique_id)
print(f"ncclGetVersion {version.value}, ncclGetUniqueId returned {result}", flush=True)
sys.exit(result)
