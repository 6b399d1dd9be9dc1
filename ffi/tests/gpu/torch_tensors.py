"""PyTorch's tensors mapped by their pointers through the C library, in every way in which PyTorch allocates.

    GDRCOPY_BACKEND=rm|vulkan python3 torch_tensors.py PATH/libgdrapi.so.2

One line per case: mapped and its bytes right in both directions, or why not, with what CUDA says about the memory. Each
group of cases has a process of its own, because PyTorch reads its settings once and because a crash must not go unseen.
The exit status is 0 if every case was mapped with the right bytes or refused with a reason; all ends within 30 seconds.
"""

import ctypes
import os
import subprocess
import sys
import time

SECONDS = 26
PAGE = 64 << 10
MIB = 1 << 20

# name, bytes; more than 20 MiB make an expandable segment of several cuMemCreate handles.
EXPANDABLE = {
    "expandable segment, small pool": MIB // 2,
    "expandable segment": 8 * MIB,
    "expandable segment, several handles": 48 * MIB,
}
PLAIN = {"cudaMalloc, small pool": MIB // 2, "cudaMalloc": 8 * MIB}
POOL = {"torch.cuda.MemPool": 8 * MIB}
GROUPS = {"expandable": EXPANDABLE, "plain": {**PLAIN, **POOL}}


class Handle(ctypes.Structure):
    _fields_ = [("h", ctypes.c_ulong)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32_meta", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Library:
    """libgdrapi by ctypes, with the argument types that the calls need."""

    def __init__(self, path):
        lib = ctypes.CDLL(path)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in [
            ("gdr_open", pointer, []),
            ("gdr_close", ctypes.c_int, [pointer]),
            ("gdr_pin_buffer_v2", ctypes.c_int, [pointer, ctypes.c_ulong, size, ctypes.c_uint32, ctypes.POINTER(Handle)]),
            ("gdr_unpin_buffer", ctypes.c_int, [pointer, Handle]),
            ("gdr_map", ctypes.c_int, [pointer, Handle, ctypes.POINTER(pointer), size]),
            ("gdr_unmap", ctypes.c_int, [pointer, Handle, pointer, size]),
            ("gdr_copy_to_mapping", ctypes.c_int, [Handle, pointer, pointer, size]),
            ("gdr_copy_from_mapping", ctypes.c_int, [Handle, pointer, pointer, size]),
            ("gdrx_flush", ctypes.c_int, [Handle]),
            ("gdrx_last_error", ctypes.c_char_p, []),
            ("gdrx_backend", ctypes.c_char_p, [pointer]),
        ]:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def check(self, call, code):
        if code != 0:
            raise Refused(f"{call} returned {code} ({os.strerror(code)}): {self.gdrx_last_error().decode()}")


class Refused(Exception):
    """The library or CUDA said no, in words."""


def handle_types(bits):
    names = {1: "POSIX_FD", 2: "WIN32", 4: "WIN32_KMT", 8: "FABRIC"}
    return "|".join(name for bit, name in names.items() if bits & bit) or "none"


def facts(address):
    """What CUDA says about the memory behind an address."""
    cuda = ctypes.CDLL("libcuda.so.1")
    types, said = ctypes.c_uint64(0), []
    # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    code = cuda.cuPointerGetAttribute(ctypes.byref(types), 14, ctypes.c_uint64(address))
    said.append(f"allowed handle types {handle_types(types.value)}" if code == 0 else f"allowed handle types: CUDA error {code}")
    # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: cudaMalloc memory.
    legacy = ctypes.c_int(0)
    if cuda.cuPointerGetAttribute(ctypes.byref(legacy), 10, ctypes.c_uint64(address)) == 0:
        said.append("cudaMalloc memory" if legacy.value else "not cudaMalloc memory")
    handle = ctypes.c_uint64(0)
    code = cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address))
    if code != 0:
        said.append(f"no cuMemCreate handle (CUDA error {code})")
        return ", ".join(said)
    properties = Properties()
    code = cuda.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(properties), handle)
    cuda.cuMemRelease(handle)
    if code == 0:
        requested, rdma = handle_types(properties.requested_handle_types), properties.rdma_capable
        said.append(f"cuMemCreate handle made with types {requested}, RDMA flag {rdma}")
    else:
        said.append(f"cuMemGetAllocationPropertiesFromHandle: CUDA error {code}")
    return ", ".join(said)


def tensor_bytes(tensor):
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())


def map_and_compare(torch, library, session, tensor):
    """Maps the pages around a tensor and copies both ways; raises where something is refused or wrong."""
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    start = address // PAGE * PAGE
    pages = -(-(address + size - start) // PAGE) * PAGE
    handle, window = Handle(), ctypes.c_void_p()
    begin = time.perf_counter()
    library.check("gdr_pin_buffer_v2", library.gdr_pin_buffer_v2(session, start, pages, 0, ctypes.byref(handle)))
    try:
        library.check("gdr_map", library.gdr_map(session, handle, ctypes.byref(window), pages))
        took = time.perf_counter() - begin
        try:
            at = ctypes.c_void_p(window.value + address - start)
            seen = ctypes.create_string_buffer(size)
            library.check("gdr_copy_from_mapping", library.gdr_copy_from_mapping(handle, seen, at, size))
            if seen.raw[:size] != tensor_bytes(tensor):
                raise AssertionError("WRONG BYTES read through the mapping")
            # Not what is there now.
            data = bytes(byte ^ 0xA5 for byte in seen.raw[:4096]) * (size // 4096)
            library.check("gdr_copy_to_mapping", library.gdr_copy_to_mapping(handle, at, data, size))
            library.check("gdrx_flush", library.gdrx_flush(handle))
            torch.cuda.synchronize()
            if tensor_bytes(tensor) != data:
                raise AssertionError("WRONG BYTES written through the mapping")
        finally:
            library.check("gdr_unmap", library.gdr_unmap(session, handle, window, pages))
    finally:
        library.check("gdr_unpin_buffer", library.gdr_unpin_buffer(session, handle))
    return f"mapped in {took * 1e3:.1f} ms, {size} bytes right in both directions"


def one_case(torch, library, session, name, size):
    # Not a constant, so that shifted bytes show; a multiple of 4096 bytes.
    fill = lambda: torch.arange(size // 4, dtype=torch.int32, device="cuda") * 2654435 + 12345
    if name in POOL:
        if not hasattr(torch.cuda, "MemPool"):
            return f"not tried: PyTorch {torch.__version__} has no torch.cuda.MemPool"
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            tensor = fill()
    else:
        tensor = fill()
    torch.cuda.synchronize()
    known = facts(tensor.data_ptr())
    try:
        outcome = map_and_compare(torch, library, session, tensor)
    except Refused as refused:
        outcome = f"REFUSED: {refused}"
    return f"{outcome} [{known}]"


def child(group, path):
    try:
        import torch
    except ImportError as error:
        say(f"all, {group}", f"not tried: {error}")
        return 0
    if not torch.cuda.is_available():
        say(f"all, {group}", f"not tried: PyTorch {torch.__version__} sees no GPU")
        return 0
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        say(f"all, {group}", f"FAILED: {error}")
        return 1
    torch.zeros(1, device="cuda")
    session = library.gdr_open()
    if not session:
        say(f"all, {group}", f"REFUSED: gdr_open: {library.gdrx_last_error().decode()}")
        return 0
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, backend {library.gdrx_backend(session).decode()}", flush=True)
    status = 0
    for name, size in GROUPS[group].items():
        try:
            say(name, one_case(torch, library, session, name, size))
        except Exception as error:
            say(name, f"FAILED: {type(error).__name__}: {error}")
            status = 1
    library.check("gdr_close", library.gdr_close(session))
    return status


def say(name, text):
    text = " ".join(text.split())
    print(f"case {name}: {text}", flush=True)


def settings(group):
    env = dict(os.environ)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        env.pop(name, None)
    if group == "expandable":
        # The second is what later releases call it.
        env["PYTORCH_CUDA_ALLOC_CONF"] = env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    else:
        env["GDRCOPY_RM"] = "ipc"
    return env


def parent(path):
    deadline = time.monotonic() + SECONDS
    command = [sys.executable, os.path.abspath(__file__), path]
    running = {
        group: subprocess.Popen([*command, group], env=settings(group), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for group in GROUPS
    }
    status = 0
    for group, process in running.items():
        try:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended = f"ended with {process.returncode}" if process.returncode >= 0 else f"was ended by signal {-process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            ended = f"was ended after {SECONDS} s"
        print(output, end="", flush=True)
        answered = [line for line in output.splitlines() if line.startswith("case ")]
        everything = any(line.startswith("case all, ") for line in answered)
        for name in GROUPS[group]:
            if not everything and not any(line.startswith(f"case {name}: ") for line in answered):
                say(name, f"FAILED: no answer, the process {ended}: {errors.strip()[-500:]}")
                status = 1
        if process.returncode != 0:
            status = 1
    return status


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and sys.argv[2] not in GROUPS):
        sys.exit("usage: torch_tensors.py PATH/libgdrapi.so.2")
    sys.exit(parent(sys.argv[1]) if len(sys.argv) == 2 else child(sys.argv[2], sys.argv[1]))
