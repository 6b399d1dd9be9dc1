// Accesses whose strength and width matter, written as the PTX instructions they are to be.
//
// "sys" is the scope that takes in the CPU. "relaxed" loads of that scope come from L2 or the bus, never from a stale L1
// line. Everything here exists in PTX 7.0 on sm_70.

#ifndef GDRCOPY_DEVICE_CUH
#define GDRCOPY_DEVICE_CUH

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

enum : u32 { WHOLE_WARP = 0xffffffffu };

// 16 bytes that one thread loads with one access.
struct Part {
    u32 a, b, c, d;
};

__device__ __forceinline__ Part load_part(u64 at)
{
    Part part;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(part.a), "=r"(part.b), "=r"(part.c), "=r"(part.d)
                 : "l"(at)
                 : "memory");
    return part;
}

__device__ __forceinline__ u32 load_u32(u64 at)
{
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_u64(u64 at)
{
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

// What this thread loads later is not older than the value returned.
__device__ __forceinline__ u32 acquire_u32(u64 at)
{
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ u64 acquire_u64(u64 at)
{
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_u32(u64 at, u32 value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ void store_u64(u64 at, u64 value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_sys()
{
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

// Nanoseconds of a clock that runs for the whole GPU; it may advance in steps of a microsecond.
__device__ __forceinline__ u64 global_ns()
{
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

// At most a millisecond.
__device__ __forceinline__ void sleep_ns(u32 ns)
{
    asm volatile("nanosleep.u32 %0;" : : "r"(ns) : "memory");
}

// A barrier of the first `threads` threads of the block, whole warps; whether any of them brings something other than 0.
__device__ __forceinline__ u32 any_of(u32 threads, u32 mine)
{
    u32 any;
    asm volatile("{\n\t"
                 ".reg .pred mine, any;\n\t"
                 "setp.ne.u32 mine, %2, 0;\n\t"
                 "bar.red.or.pred any, 1, %1, mine;\n\t"
                 "selp.u32 %0, 1, 0, any;\n\t"
                 "}"
                 : "=r"(any)
                 : "r"(threads), "r"(mine)
                 : "memory");
    return any;
}

#endif
