// The GPU's half of a ping-pong: waits for a message, checks it, answers with 4 bytes.
//
// Messages and answers are numbered from 1. A block has a flag, a data area and an answer of its own; if there are more
// of them than blocks that can run at once, a running block serves several in turn.
//
// A kernel here ends when the host says so, and by itself when no message came for `idle_ns`. Looking after that is the
// work of one more warp, so that the threads that wait for messages do nothing else: they see its verdict in shared
// memory.

#include "device.cuh"
#include "near.cuh"

struct Answer {
    u64 blocks;        // flags, data areas and answers
    u64 threads;       // that share the work on one message: 1 .. blockDim.x - 32
    u64 bytes;         // of one message
    u64 flags;         // u32 each, FLAG_STRIDE apart
    u64 data;          // data_stride apart
    u64 data_stride;   // a multiple of 16
    u64 answers;       // u32 each, ANSWER_STRIDE apart
    u64 stop;          // u32 in host memory: anything but 0 ends the kernel
    u64 report;        // Report in host memory for each running block
    u64 idle_ns;
};

struct Report {
    u64 state;         // ALIVE, then STOPPED or IDLE
    u64 messages;
    u64 wrong_words;
    u64 unused[5];
};

enum Stride : u64 { FLAG_STRIDE = 128, ANSWER_STRIDE = 64 };
enum State : u32 { ALIVE = 1, STOPPED = 2, IDLE = 3 };
enum Mode { FLAG, DATA, PACKETS };
enum : u32 {
    WATCH_EVERY_NS = 50000,
    WRONG_DATA = 0x80000000u, // in an answer
    BURST = 8,                // loads that a thread has in flight at once
};

// Word `index` of message `number`: no two messages in a row share one.
__device__ __forceinline__ u32 word_of(u32 number, u32 index)
{
    return number * 0x9e3779b1u + index * 0x85ebca6bu;
}

// Whether word `index` is wrong in its bytes below `bytes`.
__device__ __forceinline__ u32 is_wrong(u32 word, u32 number, u32 index, u32 bytes)
{
    u32 at = 4 * index;
    if (at >= bytes)
        return 0;
    u32 kept = bytes - at >= 4 ? 0xffffffffu : (1u << (8 * (bytes - at))) - 1;
    return ((word ^ word_of(number, index)) & kept) != 0;
}

__device__ __forceinline__ u32 wrong_in_data(Part part, u32 number, u32 index, u32 bytes)
{
    return is_wrong(part.a, number, 4 * index, bytes) + is_wrong(part.b, number, 4 * index + 1, bytes) +
           is_wrong(part.c, number, 4 * index + 2, bytes) + is_wrong(part.d, number, 4 * index + 3, bytes);
}

// A packet is 12 bytes of data and its number.
__device__ __forceinline__ u32 wrong_in_packet(Part part, u32 number, u32 index)
{
    return (part.a != word_of(number, 3 * index)) + (part.b != word_of(number, 3 * index + 1)) +
           (part.c != word_of(number, 3 * index + 2));
}

// One thread decides whether the block goes on.
__device__ void watch(const Answer &a, volatile u32 *over, volatile u32 *served)
{
    u64 since = global_ns();
    u32 seen = 0;
    for (;;) {
        if (load_u32(a.stop) != 0) {
            *over = STOPPED;
            return;
        }
        u32 now_served = *served;
        u64 now = global_ns();
        if (now_served != seen) {
            seen = now_served;
            since = now;
        } else if (now - since > a.idle_ns) {
            *over = IDLE;
            return;
        }
        sleep_ns(WATCH_EVERY_NS);
    }
}

// Loads what this thread has to load of a message and counts its wrong words; packets are polled until all are there.
// False if there is none to come. `COUNT` loads are in flight at once. Uniform for each warp.
template <int MODE, u32 COUNT>
__device__ __forceinline__ bool take_parts(const Answer &a, u64 data, u32 number, volatile u32 *over, u32 *wrong)
{
    u32 threads = (u32)a.threads, bytes = (u32)a.bytes;
    u32 parts = (bytes + 15) / 16;
    u32 first = threadIdx.x < threads ? threadIdx.x : parts;

    for (u32 done = 0; done < parts; done += COUNT * threads, first += COUNT * threads) {
        Part part[COUNT];
        for (;;) {
            u32 is_over = *over;
            bool ready = true;
#pragma unroll
            for (u32 n = 0; n < COUNT; n++)
                if (first + n * threads < parts)
                    part[n] = load_part(data + 16ull * (first + n * threads));
            if (MODE != PACKETS)
                break;
#pragma unroll
            for (u32 n = 0; n < COUNT; n++)
                if (first + n * threads < parts)
                    ready = ready && part[n].d == number;
            if (__all_sync(WHOLE_WARP, ready))
                break;
            if (__any_sync(WHOLE_WARP, is_over))
                return false;
        }
#pragma unroll
        for (u32 n = 0; n < COUNT; n++) {
            u32 index = first + n * threads;
            if (index < parts)
                *wrong += MODE == PACKETS ? wrong_in_packet(part[n], number, index)
                                          : wrong_in_data(part[n], number, index, bytes);
        }
    }
    return true;
}

// Waits for message `number` and counts its wrong words; false if there is none to come. Uniform for each warp.
template <int MODE>
__device__ __forceinline__ bool take(const Answer &a, u64 flag, u64 data, u32 number, volatile u32 *over, u32 *wrong)
{
    while (MODE != PACKETS) {
        u32 is_over = *over;
        // Acquired by every thread that will load data.
        u32 value = MODE == DATA ? acquire_u32(flag) : load_u32(flag);
        if (__all_sync(WHOLE_WARP, value == number))
            break;
        if (__any_sync(WHOLE_WARP, is_over))
            return false;
    }
    if (MODE == FLAG)
        return true;
    // The usual case first: no loop around it, nothing to skip.
    if ((a.bytes + 15) / 16 <= a.threads)
        return take_parts<MODE, 1>(a, data, number, over, wrong);
    return take_parts<MODE, BURST>(a, data, number, over, wrong);
}

struct Served {
    u64 messages;
    u32 wrong_words;  // as this thread saw them
};

// The usual case: one warp has one area, and a lane no more than one part of it. What is to come is worked out while
// nothing is there yet, and what need not be known before the answer comes after it.
template <int MODE>
__device__ __forceinline__ Served serve_one(const Answer &a, volatile u32 *over, volatile u32 *served)
{
    u32 lane = threadIdx.x, bytes = (u32)a.bytes;
    u64 flag = a.flags + blockIdx.x * FLAG_STRIDE;
    // A lane without a part looks at another's: all lanes in step took 0.2 us less than lanes that have nothing to do.
    u32 parts = (bytes + 15) / 16;
    u64 at = a.data + blockIdx.x * a.data_stride + 16ull * (MODE == FLAG ? 0 : lane % parts);
    u64 answer_at = a.answers + blockIdx.x * ANSWER_STRIDE;
    bool mine = MODE != FLAG && lane < parts;

    // The words of a part, and which of their bytes belong to the message.
    u32 words = MODE == PACKETS ? 3 : 4;
    u32 kept[4];
#pragma unroll
    for (u32 n = 0; n < 4; n++) {
        u32 first = 16 * lane + 4 * n;
        u32 count = MODE == PACKETS ? 4 : (bytes > first ? bytes - first : 0);
        kept[n] = !mine || n >= words ? 0 : count >= 4 ? 0xffffffffu : (1u << (8 * count)) - 1;
    }

    Served all = {0, 0};
    for (u32 number = 1;; number++) {
        u32 a0 = word_of(number, words * lane), a1 = word_of(number, words * lane + 1);
        u32 a2 = word_of(number, words * lane + 2), a3 = word_of(number, words * lane + 3);
        // Not to be put off until they are needed.
        asm volatile("" : "+r"(a0), "+r"(a1), "+r"(a2), "+r"(a3));
        Part part = {a0, a1, a2, a3};
        for (;;) {
            u32 is_over = *over;
            bool ready = true;
            if (MODE == PACKETS) {
                part = load_part(at);
                ready = part.d == number;
            } else {
                // Acquired by every thread that will load data.
                ready = (MODE == DATA ? acquire_u32(flag) : load_u32(flag)) == number;
            }
            if (__all_sync(WHOLE_WARP, ready))
                break;
            if (__any_sync(WHOLE_WARP, is_over))
                return all;
        }
        if (MODE == DATA)
            part = load_part(at);
        u32 w0 = (part.a ^ a0) & kept[0], w1 = (part.b ^ a1) & kept[1];
        u32 w2 = (part.c ^ a2) & kept[2], w3 = (part.d ^ a3) & kept[3];
        u32 any_wrong = MODE == FLAG ? 0 : __any_sync(WHOLE_WARP, (w0 | w1 | w2 | w3) != 0);
        if (lane == 0)
            store_u32(answer_at, any_wrong ? number | WRONG_DATA : number);
        all.wrong_words += (w0 != 0) + (w1 != 0) + (w2 != 0) + (w3 != 0);
        all.messages++;
        if (lane == 0)
            *served = (u32)all.messages;
    }
}

// Says that the block has ended, and with what. By all its workers.
__device__ __forceinline__ void report_end(u64 report, u32 workers, Served all, u32 *wrong_words, volatile u32 *over)
{
    atomicAdd(wrong_words, all.wrong_words);
    any_of(workers, 0);
    if (threadIdx.x == 0) {
        store_u64(report + 8, all.messages);
        store_u64(report + 16, *(volatile u32 *)wrong_words);
        fence_sys();
        store_u64(report, *over);
    }
}

template <int MODE>
__device__ __forceinline__ void answer(const Answer &a)
{
    __shared__ u32 over, served, wrong_words;
    u32 workers = blockDim.x - 32;
    // Nothing to do, for ever.
    if (blockIdx.x >= a.blocks || a.threads == 0)
        return;
    if (threadIdx.x == 0) {
        over = 0;
        served = 0;
        wrong_words = 0;
    }
    __syncthreads();
    u64 report = a.report + blockIdx.x * sizeof(Report);

    if (threadIdx.x >= workers) {
        if (threadIdx.x == workers) {
            store_u64(report, ALIVE);
            watch(a, &over, &served);
        }
        return;
    }
    // A flag takes no more than one warp.
    if (MODE == FLAG) {
        workers = 32;
        if (threadIdx.x >= 32)
            return;
    }

    if (workers == 32 && a.blocks <= gridDim.x && (MODE == FLAG || (a.bytes + 15) / 16 <= a.threads)) {
        Served all = serve_one<MODE>(a, &over, &served);
        report_end(report, workers, all, &wrong_words, &over);
        return;
    }

    Served all = {0, 0};
    for (u32 number = 1;; number++) {
        for (u64 block = blockIdx.x; block < a.blocks; block += gridDim.x) {
            u32 wrong = 0;
            bool taken = take<MODE>(a, a.flags + block * FLAG_STRIDE, a.data + block * a.data_stride, number, &over, &wrong);
            u32 any_gone, any_wrong;
            if (workers == 32) {
                any_gone = !taken;
                any_wrong = __any_sync(WHOLE_WARP, wrong != 0);
            } else {
                any_gone = any_of(workers, !taken);
                any_wrong = any_of(workers, wrong != 0);
            }
            if (any_gone) {
                report_end(report, workers, all, &wrong_words, &over);
                return;
            }
            all.wrong_words += wrong;
            all.messages++;
            if (threadIdx.x == 0) {
                store_u32(a.answers + block * ANSWER_STRIDE, any_wrong ? number | WRONG_DATA : number);
                *(volatile u32 *)&served = (u32)all.messages;
            }
        }
    }
}

// The flag is the message.
extern "C" __global__ void answer_flag(const Answer a)
{
    answer<FLAG>(a);
}

// Data, then a flag.
extern "C" __global__ void answer_data(const Answer a)
{
    answer<DATA>(a);
}

// Packets of 16 bytes, each with the number of the message, and no flag.
extern "C" __global__ void answer_packets(const Answer a)
{
    answer<PACKETS>(a);
}
