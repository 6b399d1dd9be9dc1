/* As much of the CUDA runtime as the examples use, declared: clang checks them against it where there is no nvcc. Nothing is
 * made of it that could run. Names and types are those of the CUDA Runtime API reference. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H

#include <stddef.h>
#include <stdlib.h>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ __attribute__((always_inline)) inline

struct dim3 {
    unsigned x, y, z;
    __host__ __device__ dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t { cudaSuccess = 0 };
typedef struct CUstream_st *cudaStream_t;
enum { cudaStreamNonBlocking = 1, cudaHostAllocMapped = 2 };

extern "C" {
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaHostAlloc(void **host, size_t size, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaFreeHost(void *host);
/* What clang makes a launch of. */
cudaError_t cudaConfigureCall(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr);
}

__device__ void __syncwarp();
__device__ void __threadfence_system();
__device__ int __all_sync(unsigned lanes, int predicate);
__device__ int __any_sync(unsigned lanes, int predicate);
__device__ unsigned __ballot_sync(unsigned lanes, int predicate);
__device__ unsigned __shfl_sync(unsigned lanes, unsigned value, int lane);
__device__ int __clzll(long long value);
__device__ int __ffsll(long long value);

#endif
