// How far away memory is: the time of a load from the SM that this block is on.
//
// The L2 cache of large GPUs has two halves, and a line belongs to one of them. On an H200 the half changes among pages of
// 4 KiB in an order that no rule foretells, and a line that a kernel polls costs a round trip 0.1 to 0.3 us more where it is in
// the half far from the kernel's SM.

#ifndef GDRCOPY_NEAR_CUH
#define GDRCOPY_NEAR_CUH

// Needs device.cuh.

struct Near {
    u64 memory;        // what is looked at: `count` places
    u64 stride;        // a multiple of 4
    u64 count;
    u64 zero;          // 0, which the compiler must not know
    u64 report;        // u32 for each place, in host memory: cycles for LOADS loads one after the other, never 0
};

enum : u32 { LOADS = 16 };

extern "C" __global__ void near(const Near a)
{
    if (threadIdx.x != 0 || blockIdx.x != 0)
        return;
    for (u64 place = 0; place < a.count; place++) {
        u64 at = a.memory + place * a.stride;
        u32 least = ~0u;
        for (u32 round = 0; round < 3; round++) {
            u32 value = 0, start, end;
            asm volatile("mov.u32 %0, %%clock;" : "=r"(start) : : "memory");
            // Each address depends on the value loaded before it.
            for (u32 n = 0; n < LOADS; n++)
                value = load_u32(at + (value & a.zero));
            asm volatile("mov.u32 %0, %%clock;" : "=r"(end) : : "memory");
            if (end - start < least)
                least = end - start;
        }
        store_u32(a.report + 4 * place, least == 0 ? 1 : least);
    }
    fence_sys();
}

#endif
