"""Lets a transport of NVSHMEM open the library: arguments are libucp.so.0, the transport, and its interface version.

The transport resolves the symbols, compares versions and opens a handle before it looks for a GPU. What happened is in
NVSHMEM's own log.
"""

import ctypes
import sys

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
transport = ctypes.CDLL(sys.argv[2])
handle = ctypes.c_void_p()
table = ctypes.create_string_buffer(1 << 16)
result = transport.nvshmemt_init(ctypes.byref(handle), table, ctypes.c_int(int(sys.argv[3])))
print(f"nvshmemt_init returned {result}", flush=True)
