// Readers for the soak tests. They count what they see; the host judges.
//
// Every warp looks at the stop word in host memory now and then, and ends by itself after `limit_ns`.

#include "../../src/ptx/device.cuh"

enum : u32 { LOOK_EVERY = 256 };

__device__ __forceinline__ u32 lane_of()
{
    return threadIdx.x % 32;
}

__device__ __forceinline__ u64 warp_of()
{
    return ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

__device__ __forceinline__ u64 sum_of_warp(u64 value)
{
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_down_sync(WHOLE_WARP, value, step);
    return value;
}

// Uniform for the warp.
__device__ __forceinline__ bool is_over(u64 stop, u64 started, u64 limit_ns)
{
    bool over = load_u32(stop) != 0 || global_ns() - started > limit_ns;
    return __any_sync(WHOLE_WARP, over);
}

struct Torn {
    u64 lines;         // 64 bytes each, written by the host: a 32-bit number, 16 times
    u64 count;         // of lines: a multiple of 8
    u64 stop;
    u64 counts;        // TornCounts in host memory for each warp
    u64 limit_ns;
};

struct TornCounts {
    u64 state;         // 1 while it runs, 2 at the end
    u64 parts;         // 16-byte parts read
    u64 fresh_parts;   // of these, with another number than at the last look
    u64 mixed_parts;   // whose four words differ
    u64 backward_parts; // whose number is older than at the last look
    u64 lines;         // lines with a fresh part
    u64 uneven_lines;  // whose four parts differ
    u64 unused;
};

// A warp reads 8 lines with one instruction, 16 bytes for each lane; warps share lines if there are more of them.
extern "C" __global__ void torn(const Torn a)
{
    u32 lane = lane_of();
    u64 warp = warp_of();
    u64 part_at = a.lines + (warp % (a.count / 8)) * 512 + 16 * lane;
    u64 counts = a.counts + warp * sizeof(TornCounts);
    u64 started = global_ns();
    u64 parts = 0, fresh_parts = 0, mixed_parts = 0, backward_parts = 0, lines = 0, uneven_lines = 0;
    u32 last = load_part(part_at).a;

    if (lane == 0)
        store_u64(counts, 1);
    for (u32 look = 1;; look++) {
        Part part = load_part(part_at);
        parts++;
        bool is_fresh = part.a != last;
        fresh_parts += is_fresh;
        mixed_parts += part.a != part.b || part.a != part.c || part.a != part.d;
        backward_parts += (int)(part.a - last) < 0;
        last = part.a;
        // The four lanes of a line vote.
        u32 first = __shfl_sync(WHOLE_WARP, part.a, lane & ~3u);
        u32 fresh = __ballot_sync(WHOLE_WARP, is_fresh) >> (lane & ~3u) & 15;
        u32 uneven = __ballot_sync(WHOLE_WARP, part.a != first) >> (lane & ~3u) & 15;
        if (lane % 4 == 0) {
            lines += fresh != 0;
            uneven_lines += uneven != 0;
        }
        if (look % LOOK_EVERY == 0 && is_over(a.stop, started, a.limit_ns))
            break;
    }

    parts = sum_of_warp(parts);
    fresh_parts = sum_of_warp(fresh_parts);
    mixed_parts = sum_of_warp(mixed_parts);
    backward_parts = sum_of_warp(backward_parts);
    lines = sum_of_warp(lines);
    uneven_lines = sum_of_warp(uneven_lines);
    if (lane == 0) {
        store_u64(counts + 8, parts);
        store_u64(counts + 16, fresh_parts);
        store_u64(counts + 24, mixed_parts);
        store_u64(counts + 32, backward_parts);
        store_u64(counts + 40, lines);
        store_u64(counts + 48, uneven_lines);
        fence_sys();
        store_u64(counts, 2);
    }
}

struct Order {
    u64 slots;         // slot_stride apart: a flag in the first line, data from DATA_AT on
    u64 slot_stride;
    u64 credits;       // u32 in host memory for each slot, CREDIT_STRIDE apart: the last round checked
    u64 acquire;       // 1: the flag is loaded with acquire; 0: relaxed, then comes a fence
    u64 stop;
    u64 counts;        // OrderCounts in host memory for each warp
    u64 limit_ns;
};

struct OrderCounts {
    u64 state;
    u64 rounds;
    u64 bytes;
    u64 wrong_rounds;
    u64 wrong_bytes;
    u64 first_wrong;   // flag, found and wanted byte of the first one
    u64 unused[2];
};

enum : u64 { DATA_AT = 128, CREDIT_STRIDE = 64 };

// Byte at `at` of the data area in round `round`.
__device__ __forceinline__ u8 byte_of(u32 round, u32 at)
{
    return (u8)(round * 0x9d + (round >> 7) + at);
}

// A slot for each warp. The flag is round, size and offset: round | size << 32 | offset << 48.
extern "C" __global__ void order(const Order a)
{
    u32 lane = lane_of();
    u64 warp = warp_of();
    u64 flag_at = a.slots + warp * a.slot_stride;
    u64 data = flag_at + DATA_AT;
    u64 credit_at = a.credits + warp * CREDIT_STRIDE;
    u64 counts = a.counts + warp * sizeof(OrderCounts);
    u64 started = global_ns();
    u64 last = 0, rounds = 0, bytes = 0, wrong_rounds = 0, wrong_bytes = 0, first_wrong = 0;

    if (lane == 0)
        store_u64(counts, 1);
    for (u32 look = 1;; look++) {
        if (look % LOOK_EVERY == 0 && is_over(a.stop, started, a.limit_ns))
            break;
        u64 flag = a.acquire ? acquire_u64(flag_at) : load_u64(flag_at);
        // Lanes may differ for a moment: all must have seen it.
        if (!__all_sync(WHOLE_WARP, flag != last))
            continue;
        if (!a.acquire)
            fence_sys();
        u32 round = (u32)flag, size = (u32)(flag >> 32) & 0xffff, offset = (u32)(flag >> 48);
        u64 wrong = 0;
        // Words that hold the bytes offset .. offset + size.
        for (u32 word = offset / 4 + lane; word < (offset + size + 3) / 4; word += 32) {
            u32 found = load_u32(data + 4 * word);
            for (u32 n = 0; n < 4; n++) {
                u32 at = 4 * word + n;
                u8 byte = (u8)(found >> (8 * n));
                if (at >= offset && at < offset + size && byte != byte_of(round, at)) {
                    if (wrong_bytes + wrong == 0)
                        first_wrong = (u64)round << 32 | at << 16 | (u32)byte << 8 | byte_of(round, at);
                    wrong++;
                }
            }
        }
        wrong_bytes += wrong;
        wrong_rounds += __any_sync(WHOLE_WARP, wrong != 0);
        rounds++;
        bytes += size;
        last = flag;
        if (lane == 0)
            store_u32(credit_at, round);
    }

    // Of the lanes' first finds, any one.
    u32 finders = __ballot_sync(WHOLE_WARP, first_wrong != 0);
    first_wrong = __shfl_sync(WHOLE_WARP, first_wrong, finders ? __ffs(finders) - 1 : 0);
    wrong_bytes = sum_of_warp(wrong_bytes);
    if (lane == 0) {
        store_u64(counts + 8, rounds);
        store_u64(counts + 16, bytes);
        store_u64(counts + 24, wrong_rounds);
        store_u64(counts + 32, wrong_bytes);
        store_u64(counts + 40, first_wrong);
        fence_sys();
        store_u64(counts, 2);
    }
}
