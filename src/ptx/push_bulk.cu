// The push agent for GPUs of compute capability 9.0 and later: as push.cu, with bulk copies for
// what the CPU says may go in them. They need dynamic shared memory; launched without any, the block is that of push.cu.

#include "device.cuh"
#include "bulk.cuh"
#include "push.cu"
