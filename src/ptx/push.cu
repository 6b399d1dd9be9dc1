// The GPU's half of the push agent: one block that stays on the GPU, waits for doorbells and copies what they ask for,
// between device memory and page-locked host memory.
//
// Requests are numbered, and request `number` rings in line `number & mask` of a ring in GPU memory. Every warp looks at
// the doorbell itself, for handing the news over would cost time. A request ends at a barrier of the whole block, so all
// warps work on the same one, and a line may be written again once a later request has been answered.
//
// There may be two rings, one in each half of the L2 cache. A block on an SM of the far half learns of a doorbell 0.1 to 0.2 us
// later, and which SM it will be on nobody knows: so it measures, after the first request of a launch.
//
// Only the first warp decides that the block leaves, and only while it waits: it says at which request in shared memory.
// The others look there while they wait. One that found the doorbell first copies all the same; then nobody answers, and
// the next launch copies again.

#include "device.cuh"
#include "near.cuh"

struct Push {
    u64 ring;          // Doorbell each, LINE apart
    u64 other;         // a second ring that always holds the same, in the other half of the L2 cache; or 0
    u64 zero;          // 0, which the compiler must not know
    u64 control;       // Control, in host memory
    u64 idle_ns;       // leave after waiting so long; 0: never
    u64 residency_ns;  // leave between two requests after so long; 0: never
    u64 mask;          // lines in the ring, a power of two, less 1
    u64 next;          // number of the first request, 32 bits
    u64 generation;    // of this launch, 32 bits
};

// Two parts of 16 bytes, each with the number:
//   source (8 bytes), bytes (4), number (4)
//   target (8 bytes), order (4), number (4)

// In host memory, a line each, for the CPU polls them:
//   u32: the last request that was answered with a flag
//   u64: the generation that has left (upper half) and the number of the first request that it did not serve
//   u32: the generation that has started

enum : u64 { LINE = 64, NUMBER = 12, UNUSED = 32, ANSWERED = 0, LEFT = 64, STARTED = 128 };
enum : u32 { COPY = 1, COPY_AND_ANSWER = 2, SEND = 3, STOP = 4 };
// Beside COPY or COPY_AND_ANSWER: in bulk copies, if there are any and they suit.
enum : u32 { BULK = 8 };
enum : u32 { POLLS_PER_LOOK = 32 }; // at the clock

#ifndef GDRCOPY_BULK_CUH
// No bulk copies: push_bulk.cu has them.
struct Bulk {
    static __device__ __forceinline__ void begin() {}
    static __device__ __forceinline__ bool is_there() { return false; }
    static __device__ __forceinline__ void copy(u64, u64, u32) {}
};
#endif

__device__ __forceinline__ void store_part(u64 at, Part part)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(part.a), "r"(part.b), "r"(part.c), "r"(part.d)
                 : "memory");
}

__device__ __forceinline__ void store_u16(u64 at, u32 value)
{
    asm volatile("{\n\t"
                 ".reg .u16 half;\n\t"
                 "cvt.u16.u32 half, %1;\n\t"
                 "st.relaxed.sys.global.u16 [%0], half;\n\t"
                 "}"
                 :
                 : "l"(at), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void store_u8(u64 at, u32 value)
{
    asm volatile("{\n\t"
                 ".reg .u16 half;\n\t"
                 "cvt.u16.u32 half, %1;\n\t"
                 "st.relaxed.sys.global.u8 [%0], half;\n\t"
                 "}"
                 :
                 : "l"(at), "r"(value)
                 : "memory");
}

__device__ __forceinline__ u64 joined(u32 low, u32 high)
{
    return (u64)high << 32 | low;
}

// Bytes `from` to `to` of a part, whose own address is a multiple of 16: the widest stores that fit.
__device__ __forceinline__ void store_some(u64 at, Part part, u32 from, u32 to)
{
    u64 low = joined(part.a, part.b), high = joined(part.c, part.d);
    while (from < to) {
        u64 value = (from < 8 ? low : high) >> (8 * (from & 7));
        u32 left = to - from;
        if ((from & 7) == 0 && left >= 8) {
            store_u64(at + from, value);
            from += 8;
        } else if ((from & 3) == 0 && left >= 4) {
            store_u32(at + from, (u32)value);
            from += 4;
        } else if ((from & 1) == 0 && left >= 2) {
            store_u16(at + from, (u32)value);
            from += 2;
        } else {
            store_u8(at + from, (u32)value);
            from += 1;
        }
    }
}

// 16 bytes from byte `shift` (0 .. 15) of two parts on.
__device__ __forceinline__ Part shifted(Part low, Part high, u32 shift)
{
    u32 v, w, x, y, z;
    switch (shift >> 2) {
    case 0:
        v = low.a, w = low.b, x = low.c, y = low.d, z = high.a;
        break;
    case 1:
        v = low.b, w = low.c, x = low.d, y = high.a, z = high.b;
        break;
    case 2:
        v = low.c, w = low.d, x = high.a, y = high.b, z = high.c;
        break;
    default:
        v = low.d, w = high.a, x = high.b, y = high.c, z = high.d;
        break;
    }
    u32 bits = 8 * (shift & 3);
    Part part;
    part.a = __funnelshift_r(v, w, bits);
    part.b = __funnelshift_r(w, x, bits);
    part.c = __funnelshift_r(x, y, bits);
    part.d = __funnelshift_r(y, z, bits);
    return part;
}

// `BURST` parts of a thread, `blockDim.x` apart. First all loads, so that they are in flight together: 16 bytes for each
// part, or the 32 around them.
template <u32 BURST>
__device__ __forceinline__ void burst(u64 source, u64 target, u32 shift, u32 at)
{
    Part low[BURST], high[BURST];
#pragma unroll
    for (u32 n = 0; n < BURST; n++) {
        low[n] = load_part(source + 16ull * (at + n * blockDim.x));
        if (shift != 0)
            high[n] = load_part(source + 16ull * (at + n * blockDim.x) + 16);
    }
#pragma unroll
    for (u32 n = 0; n < BURST; n++)
        store_part(target + 16ull * (at + n * blockDim.x), shift != 0 ? shifted(low[n], high[n], shift) : low[n]);
}

// A thread's parts up to `end`. As many loads in flight as there are parts, and no instruction for parts that are not there:
// with all warps at it, eight loads that do nothing took 0.3 us, as long as a copy of 8 KiB.
template <u32 BURST>
__device__ __forceinline__ void move(u64 source, u64 target, u32 shift, u32 at, u32 end)
{
    for (; at + (BURST - 1) * blockDim.x < end; at += BURST * blockDim.x)
        burst<BURST>(source, target, shift, at);
    if (BURST > 4 && at + 3 * blockDim.x < end) {
        burst<4>(source, target, shift, at);
        at += 4 * blockDim.x;
    }
    if (BURST > 2 && at + blockDim.x < end) {
        burst<2>(source, target, shift, at);
        at += 2 * blockDim.x;
    }
    for (; at < end; at += blockDim.x)
        burst<1>(source, target, shift, at);
}

// What to copy, seen from the target: parts of 16 bytes at multiples of 16, the first and the last perhaps not whole.
struct Copy {
    u64 source;        // where the target's first part would begin
    u64 target;        // the first part
    u32 parts;
    u32 head, tail;    // the first byte asked for in the first part, and the end in the last: 0 .. 15, 1 .. 16
    u32 shift;         // of the source, modulo 16

    __device__ __forceinline__ Copy(u64 source_, u64 target_, u32 bytes)
        : source(source_ - (target_ & 15)), target(target_ & ~15ull), head((u32)target_ & 15)
    {
        parts = (u32)((head + (u64)bytes + 15) / 16);
        tail = ((head + bytes - 1) & 15) + 1;
        shift = (u32)source & 15;
    }

    // Bytes of part `index` that are asked for.
    __device__ __forceinline__ u32 from(u32 index) const
    {
        return index == 0 ? head : 0;
    }

    __device__ __forceinline__ u32 to(u32 index) const
    {
        return index == parts - 1 ? tail : 16;
    }

    __device__ __forceinline__ bool is_whole(u32 index) const
    {
        return from(index) == 0 && to(index) == 16;
    }

    // Loads parts of 16 bytes that hold a byte asked for, and no others: what lies beyond may not be there.
    __device__ __forceinline__ void some(u32 index) const
    {
        u64 start = source + 16ull * index;
        u64 first = start & ~15ull, second = first + 16;
        Part none = {0, 0, 0, 0};
        Part low = start + from(index) < second ? load_part(first) : none;
        Part high = start + to(index) > second ? load_part(second) : none;
        store_some(target + 16ull * index, shifted(low, high, shift), from(index), to(index));
    }

    // Parts that are whole.
    __device__ __forceinline__ u32 first() const
    {
        return is_whole(0) ? 0 : 1;
    }

    __device__ __forceinline__ u32 end() const
    {
        return is_whole(parts - 1) ? parts : parts - 1;
    }

    template <u32 BURST>
    __device__ __forceinline__ void whole_parts() const
    {
        u32 at = first() + threadIdx.x;
        if (shift == 0)
            move<BURST>(source, target, 0, at, end());
        else
            move<BURST / 2>(source & ~15ull, target, shift, at, end());
    }

    // Parts that are not: for the threads that have least to do otherwise.
    __device__ __forceinline__ void ends() const
    {
        u32 last_thread = blockDim.x - 1;
        if (threadIdx.x == last_thread && !is_whole(0))
            some(0);
        if (threadIdx.x == last_thread - 1 && parts > 1 && !is_whole(parts - 1))
            some(parts - 1);
    }

    template <u32 BURST>
    __device__ __forceinline__ void run() const
    {
        ends();
        whole_parts<BURST>();
    }

    // Source and target have the same place in 16 bytes, and there is a whole part.
    __device__ __forceinline__ void run_in_bulk() const
    {
        ends();
        if (threadIdx.x == 0)
            Bulk::copy(source + 16ull * first(), target + 16ull * first(), 16 * (end() - first()));
    }
};

// 8 bytes of data for each 16 bytes of the target. Both halves are 4 bytes of data and the number, so each of them says
// by itself whether it has arrived, and no fence and no flag are needed.
__device__ __forceinline__ void send(u64 source, u64 target, u32 bytes, u32 number)
{
    u32 packets = (bytes + 7) / 8;
    for (u32 index = threadIdx.x; index < packets; index += blockDim.x) {
        u64 start = source + 8ull * index;
        u32 wanted = bytes - 8 * index < 8 ? bytes - 8 * index : 8;
        u32 skip = (u32)start & 7;
        u64 first = start & ~7ull;
        u64 low = load_u64(first);
        u64 high = skip + wanted > 8 ? load_u64(first + 8) : 0;
        u64 data = skip == 0 ? low : low >> (8 * skip) | high << (64 - 8 * skip);
        Part packet = {(u32)data, number, (u32)(data >> 32), number};
        store_part(target + 16ull * index, packet);
    }
}

// Bulk copies suit what the threads cannot load all at once. One burst of theirs takes a single trip to host memory and is
// 0.5 us quicker; more takes a trip for each burst, while bulk copies keep the bus busy. Fetched from host memory on an H200,
// 64 KiB took 1024 threads 4.64 us, as one burst, and bulk copies 5.17; 128 KiB 6.74 and 6.53; 1 MiB 28.96 and 24.57.
template <u32 BURST>
__device__ __forceinline__ bool suits_bulk(u64 source, u64 target, u32 bytes)
{
    return Bulk::is_there() && ((source ^ target) & 15) == 0 && bytes / 16 > BURST * blockDim.x;
}

struct Doorbell {
    Part first, second;

    __device__ __forceinline__ bool rings(u64 at, u32 number)
    {
        first = load_part(at);
        second = load_part(at + 16);
        return __all_sync(WHOLE_WARP, first.d == number && second.d == number);
    }
};

// The first warp waits: false if the block leaves before this request, which is the `count`th of this launch. The first one
// is served if it rang before the launch, whatever the clock says: each launch gets something done.
__device__ __forceinline__ bool lead(const Push &a, u64 started, u64 count, u64 at, u32 number, Doorbell *bell)
{
    u64 since = global_ns();
    for (u32 polls = 0;; polls++) {
        // Also before the first look at the doorbell, or a block that is kept busy would stay for ever.
        if (polls % POLLS_PER_LOOK == 0 && (polls != 0 || count != 0)) {
            u64 now = global_ns();
            u32 is_over = (a.idle_ns != 0 && polls != 0 && now - since > a.idle_ns) ||
                          (a.residency_ns != 0 && now - started > a.residency_ns);
            // The clocks of two lanes differ.
            if (__shfl_sync(WHOLE_WARP, is_over, 0))
                return false;
        }
        if (bell->rings(at, number))
            return true;
    }
}

// The others wait: false if the first warp leaves before this request.
__device__ __forceinline__ bool follow(volatile u64 *leaves_at, u64 count, u64 at, u32 number, Doorbell *bell)
{
    for (;;) {
        u32 leaves = *leaves_at == count;
        if (bell->rings(at, number))
            return true;
        if (__any_sync(WHOLE_WARP, leaves))
            return false;
    }
}

template <u32 BURST>
__device__ __forceinline__ void serve(const Push &a)
{
    __shared__ volatile u64 leaves_at, nearer;
    u64 ring = a.ring;
    u64 started = global_ns();
    u32 number = (u32)a.next, generation = (u32)a.generation;

    if (threadIdx.x == 0) {
        leaves_at = ~0ull;
        Bulk::begin();
        store_u32(a.control + STARTED, generation);
    }
    __syncthreads();
    for (u64 count = 0;; count++, number++) {
        u64 at = ring + LINE * (number & (u32)a.mask);
        Doorbell bell;
        u32 order = 0;
        bool rang = threadIdx.x < 32 ? lead(a, started, count, at, number, &bell)
                                     : follow(&leaves_at, count, at, number, &bell);
        if (rang) {
            order = bell.second.c & ~BULK;
            u64 source = joined(bell.first.a, bell.first.b), target = joined(bell.second.a, bell.second.b);
            // What the CPU wrote before it rang is seen from here on. An acquire by each thread does for that; a fence
            // would wait for this GPU's own stores too, which took 0.9 us.
            (void)acquire_u32(at + NUMBER);
            if (order == SEND) {
                send(source, target, bell.first.c, number);
            } else if (order == COPY || order == COPY_AND_ANSWER) {
                u32 bytes = bell.first.c;
                if ((bell.second.c & BULK) != 0 && suits_bulk<BURST>(source, target, bytes))
                    Copy(source, target, bytes).run_in_bulk();
                // The usual case has nothing to work out.
                else if (((source | target | bytes) & 15) == 0)
                    move<BURST>(source, target, 0, threadIdx.x, bytes / 16);
                else if (bytes != 0)
                    Copy(source, target, bytes).run<BURST>();
            }
        }
        if (threadIdx.x == 0 && (!rang || order == STOP))
            leaves_at = count;
        __syncthreads();
        // Before anything else: somebody waits for it. Without a doorbell there is no order.
        if (threadIdx.x == 0 && order == COPY_AND_ANSWER) {
            fence_sys();
            store_u32(a.control + ANSWERED, number);
        }
        if (leaves_at == count) {
            if (threadIdx.x == 0) {
                fence_sys();
                // A request to stop is served by stopping.
                store_u64(a.control + LEFT, joined(rang ? number + 1 : number, generation));
            }
            return;
        }
        if (count == 0 && a.other != 0) {
            // Beside the doorbell's parts, in a part of its line that nobody reads.
            if (threadIdx.x == 0)
                nearer = trips_to(a.other + UNUSED, a.zero) < trips_to(a.ring + UNUSED, a.zero) ? a.other : a.ring;
            __syncthreads();
            ring = nearer;
        }
    }
}

// A block of up to 512 threads. Its threads have more loads under way at once, for there are fewer of them.
extern "C" __global__ void __launch_bounds__(512) push(const Push a)
{
    serve<8>(a);
}

// A block of up to 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) push_wide(const Push a)
{
    serve<4>(a);
}
