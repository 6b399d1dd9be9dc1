"""One NCCL communicator of one rank, made and destroyed by PyTorch, with a collective in between.

With NCCL_GDRCOPY_ENABLE=1 its creation pins and maps the 1 MiB work FIFO through libgdrapi, and its destruction unmaps
and unpins it; NCCL_DEBUG=INFO says so.
"""

import torch
import torch.distributed as dist

torch.cuda.set_device(0)
print("torch", torch.__version__, "NCCL", torch.cuda.nccl.version(), flush=True)
for port in (29577, 29578):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=where, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    numbers = torch.arange(1000, device="cuda", dtype=torch.float32)
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    assert numbers.sum().item() == 499500
    dist.destroy_process_group()
print("communicator created and destroyed twice", flush=True)
