// The push agent for GPUs of compute capability 9.0 and later: as push.cu, and what it fetches from host memory comes in bulk
// copies where it is long. They need dynamic shared memory; launched without any, the block is that of push.cu.

#include "device.cuh"
#include "bulk.cuh"
#include "push.cu"
