// In which half of the L2 cache memory is at home, as seen from the SM that this block is on.
//
// The L2 cache of large GPUs has two halves, and every line is at home in one of them. On an H200 that changes among pages of
// 4 KiB in an order that no rule foretells. What the CPU writes comes to a line's home, and a kernel that polls a line which
// is at home in the half far from its SM learns of it 0.1 to 0.25 us later. A load does not tell the halves apart, for each
// keeps copies of the other's lines; an atomic operation does, for it is done at home: 330 or 540 cycles there and back.

#ifndef GDRCOPY_NEAR_CUH
#define GDRCOPY_NEAR_CUH

// Needs device.cuh.

struct Near {
    u64 memory;        // what is looked at: `count` places; it stays as it is
    u64 stride;        // a multiple of 4
    u64 count;
    u64 zero;          // 0, which the compiler must not know
    u64 report;        // u32 for each place, in host memory: cycles for TRIPS operations one after the other, never 0
};

enum : u32 { TRIPS = 4 };

__device__ __forceinline__ u32 add_u32(u64 at, u32 value)
{
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
}

// Cycles for TRIPS operations. The best of several rounds: others may be about.
__device__ __forceinline__ u32 trips_to(u64 at, u64 zero)
{
    u32 least = ~0u, value = 0;
    for (u32 round = 0; round < 3; round++) {
        u32 start, end;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(start) : : "memory");
        // Each address depends on the value before it, and the end on the last one.
        for (u32 n = 0; n < TRIPS; n++)
            value = add_u32(at + (value & zero), (u32)zero);
        asm volatile("mov.u32 %0, %%clock;" : "=r"(end) : "r"(value) : "memory");
        if (end - start < least)
            least = end - start;
    }
    return least;
}

extern "C" __global__ void near(const Near a)
{
    if (threadIdx.x != 0 || blockIdx.x != 0)
        return;
    for (u64 place = 0; place < a.count; place++) {
        u32 cycles = trips_to(a.memory + place * a.stride, a.zero);
        store_u32(a.report + 4 * place, cycles == 0 ? 1 : cycles);
    }
    fence_sys();
}

#endif
