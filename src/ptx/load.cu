// Work for every SM, as a matrix product is: bound by arithmetic, and fed from memory that no cache holds at a part of the
// memory's rate.
//
// Ends when the host says so, and by itself after `limit_ns`.

#include "device.cuh"

struct Load {
    u64 buffer;        // read from end to end, again and again
    u64 bytes;         // a multiple of 16, more than the L2 cache
    u64 stop;          // u32 in host memory: anything but 0 ends the kernel
    u64 report;        // u64 in host memory: 1 as soon as it runs
    u64 limit_ns;
};

enum : u32 { LOADS = 32, FMAS_PER_LOAD = 64 };
// Blocks look into host memory so seldom, and at different times, because all of them at once would fill the bus with
// their reads and measure nothing but that.
enum : u64 { LOOK_EVERY_NS = 500000, STAGGER_NS = 1000, STAGGERED = 256 };

extern "C" __global__ void load(const Load a)
{
    const float4 *data = (const float4 *)a.buffer;
    u64 count = a.bytes / 16;
    u64 threads = (u64)gridDim.x * blockDim.x;
    u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) % count;
    u64 started = global_ns();
    u64 look = started + blockIdx.x % STAGGERED * STAGGER_NS;
    float x[4] = {0.1f, 0.2f, 0.3f, 0.4f};

    if (blockIdx.x == 0 && threadIdx.x == 0)
        store_u64(a.report, 1);
    for (;;) {
        for (u32 n = 0; n < LOADS; n++) {
            float4 y = data[at];
            at += threads;
            if (at >= count)
                at %= count;
#pragma unroll
            for (u32 k = 0; k < FMAS_PER_LOAD; k++) {
                x[0] = fmaf(x[0], y.x, y.y);
                x[1] = fmaf(x[1], y.y, y.z);
                x[2] = fmaf(x[2], y.z, y.w);
                x[3] = fmaf(x[3], y.w, y.x);
            }
        }
        u32 is_over = 0;
        if (threadIdx.x == 0) {
            u64 now = global_ns();
            is_over = now - started > a.limit_ns;
            if (now >= look) {
                look = now + LOOK_EVERY_NS;
                is_over |= load_u32(a.stop) != 0;
            }
        }
        if (__syncthreads_or(is_over))
            break;
    }
    // The sums must seem to matter, or the compiler would leave them out.
    if (x[0] + x[1] + x[2] + x[3] == 123456.789f)
        store_u64(a.report, 2);
}
