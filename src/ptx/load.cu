// Work for every SM, of two kinds: a stream of reads with arithmetic on it, and matrix products.

#include "device.cuh"

// The stream: arithmetic, fed without end from memory that no cache holds. Ends when the host says so, and by itself after
// `limit_ns`.
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

// A matrix product C = A x B of 32-bit floats, all three square and row by row. A block of 256 threads computes a tile of C,
// each thread 8 x 8 numbers of it, from strips of A and B that come through shared memory: while one strip is worked on,
// the next is on its way in registers.
struct Product {
    u64 a, b, c;
    u64 n;             // rows and columns, a multiple of TILE
    u64 through;       // u32 in device memory: blocks that are through; 0 before and after
    u64 number;        // of this product, from 0
    u64 report;        // Report, in host memory
};

// u64: products that were started, and that are finished; then when, for the last LOG of them, by the GPU's clock.
enum : u64 { STARTED = 0, FINISHED = 8, TIMES = 64, LOG = 1024 };
// PAD spreads a column of A over the banks of shared memory.
enum : u32 { TILE = 128, HALF = TILE / 2, STRIP = 8, SIDE = 8, PAD = 4 };

__device__ __forceinline__ float4 four(const float *at)
{
    return *(const float4 *)at;
}

// Two times four numbers of a row in shared memory, HALF apart.
__device__ __forceinline__ void eight(float (&to)[SIDE], const float *at)
{
    float4 first = four(at), second = four(at + HALF);
    to[0] = first.x, to[1] = first.y, to[2] = first.z, to[3] = first.w;
    to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
}

extern "C" __global__ void __launch_bounds__(256, 2) product(const Product p)
{
    // The strip of A is turned, so that a thread's eight rows of it lie side by side.
    __shared__ __align__(16) float left[2][STRIP][TILE + PAD];
    __shared__ __align__(16) float right[2][STRIP][TILE];
    u32 n = (u32)p.n, tiles = n / TILE;
    u32 row = blockIdx.x / tiles * TILE, column = blockIdx.x % tiles * TILE;
    // What this thread loads: four numbers of A, two threads to a row, and four of B, a warp to a row.
    u32 a_row = threadIdx.x / 2, a_column = threadIdx.x % 2 * 4;
    u32 b_row = threadIdx.x / 32, b_column = threadIdx.x % 32 * 4;
    const float *a = (const float *)p.a + (u64)(row + a_row) * n + a_column;
    const float *b = (const float *)p.b + (u64)b_row * n + column + b_column;
    // What it computes: rows y .. y + 3 and HALF on, columns x .. x + 3 and HALF on.
    u32 y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
    float sums[SIDE][SIDE] = {};

    if (blockIdx.x == 0 && threadIdx.x == 0)
        store_u64(p.report + STARTED, p.number + 1);
    float4 from_a = four(a), from_b = four(b);
    for (u32 end = STRIP, stage = 0;; end += STRIP, stage ^= 1) {
        left[stage][a_column][a_row] = from_a.x;
        left[stage][a_column + 1][a_row] = from_a.y;
        left[stage][a_column + 2][a_row] = from_a.z;
        left[stage][a_column + 3][a_row] = from_a.w;
        *(float4 *)&right[stage][b_row][b_column] = from_b;
        // Whoever still works on the strip before this one, in the other stage, has not come here.
        __syncthreads();
        if (end != n) {
            a += STRIP;
            b += (u64)STRIP * n;
            from_a = four(a);
            from_b = four(b);
        }
#pragma unroll
        for (u32 k = 0; k < STRIP; k++) {
            float of_a[SIDE], of_b[SIDE];
            eight(of_a, &left[stage][k][y]);
            eight(of_b, &right[stage][k][x]);
#pragma unroll
            for (u32 i = 0; i < SIDE; i++)
#pragma unroll
                for (u32 j = 0; j < SIDE; j++)
                    sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
        }
        if (end == n)
            break;
    }
#pragma unroll
    for (u32 i = 0; i < SIDE; i++) {
        float *c = (float *)p.c + (u64)(row + y + i % 4 + i / 4 * HALF) * n + column + x;
        const float *s = sums[i];
        *(float4 *)c = make_float4(s[0], s[1], s[2], s[3]);
        *(float4 *)(c + HALF) = make_float4(s[4], s[5], s[6], s[7]);
    }

    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        // The last block's increment brings it back to 0.
        if (atomicInc((u32 *)p.through, gridDim.x - 1) == gridDim.x - 1) {
            store_u64(p.report + TIMES + 8 * (p.number % LOG), global_ns());
            fence_sys();
            store_u64(p.report + FINISHED, p.number + 1);
        }
    }
}

struct Fill {
    u64 at;            // floats
    u64 count;
    u64 seed;
};

// Numbers from -1 to 1 without a pattern: what a GPU draws, and so how fast it may run, depends on what it multiplies.
extern "C" __global__ void fill(const Fill f)
{
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x; n < f.count; n += threads) {
        u32 mixed = (u32)(n + f.seed) * 0x9e3779b9u;
        mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
        mixed = (mixed ^ mixed >> 15) * 0x846ca68bu;
        mixed ^= mixed >> 16;
        ((float *)f.at)[n] = (float)(int)mixed / 2147483648.0f;
    }
}
