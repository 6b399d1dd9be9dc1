// The CPU and a running kernel answer each other through one GPU page: what a round trip costs.
//
//     nvcc pingpong.cu -lgdrapi -o pingpong && ./pingpong
//
// The CPU stores a number into GPU memory; the kernel, which waits for it, answers in pinned host memory, where the CPU
// waits. No CUDA call is made between the first round and the last.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

static const uint32_t ROUNDS = 10000;

__global__ void answer(volatile uint32_t *ball, volatile uint32_t *reply, uint32_t rounds)
{
    for (uint32_t round = 1; round <= rounds; round++) {
        while (*ball != round) {
        }
        *reply = round;
        __threadfence_system();
    }
}

static void must(bool fine, const char *what, const char *why)
{
    if (!fine) {
        std::fprintf(stderr, "%s: %s\n", what, why);
        std::exit(1);
    }
}

static void cuda(cudaError_t result, const char *what)
{
    must(result == cudaSuccess, what, cudaGetErrorString(result));
}

static void gdr(int result, const char *what)
{
    must(result == 0, what, gdrx_last_error());
}

int main()
{
    gdr_t g = gdr_open();
    must(g != nullptr, "gdr_open", gdrx_last_error());
    uint64_t addr = 0;
    gdr(gdrx_alloc(g, -1, GPU_PAGE_SIZE, &addr), "gdrx_alloc");
    gdr_mh_t mh;
    void *map = nullptr;
    gdr(gdr_pin_buffer(g, addr, GPU_PAGE_SIZE, 0, 0, &mh), "gdr_pin_buffer");
    gdr(gdr_map(g, mh, &map, GPU_PAGE_SIZE), "gdr_map");
    uint32_t zero = 0;
    gdr(gdr_copy_to_mapping(mh, map, &zero, sizeof zero), "gdr_copy_to_mapping");

    uint32_t *reply = nullptr, *device_reply = nullptr;
    cuda(cudaHostAlloc(reinterpret_cast<void **>(&reply), sizeof *reply, cudaHostAllocMapped), "cudaHostAlloc");
    cuda(cudaHostGetDevicePointer(reinterpret_cast<void **>(&device_reply), reply, 0), "cudaHostGetDevicePointer");
    *reply = 0;
    answer<<<1, 1>>>(reinterpret_cast<volatile uint32_t *>(addr), device_reply, ROUNDS);
    cuda(cudaGetLastError(), "launch");

    std::vector<double> times;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        auto started = std::chrono::steady_clock::now();
        gdr(gdr_copy_to_mapping(mh, map, &round, sizeof round), "gdr_copy_to_mapping");
        while (*static_cast<volatile uint32_t *>(reply) != round) {
        }
        times.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - started).count());
    }
    cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::sort(times.begin(), times.end());
    std::printf("round trip, ns: min %.0f, median %.0f, 99%% %.0f\n", times.front(), times[ROUNDS / 2],
                times[ROUNDS * 99 / 100]);
    gdr(gdr_close(g), "gdr_close");
    cuda(cudaFreeHost(reply), "cudaFreeHost");
    return 0;
}
