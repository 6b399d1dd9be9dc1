// Kernels at the other end of a channel, for tests and measurements. They compile as plain C++ too: then a thread of the
// CPU plays each of them.

#include "../../ffi/include/gdrcopy_channel.cuh"

typedef gdrc_u32 u32;
typedef gdrc_u64 u64;

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#define SHARED __shared__
#define WARP_OF_GRID (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32)
#else
#define KERNEL extern "C"
#define SHARED
// A warp is a thread here, which says which one it is.
static thread_local gdrc_u32 WARP_OF_GRID;
extern "C" void be_warp(gdrc_u32 warp)
{
    WARP_OF_GRID = warp;
}
#endif

enum : u32 { SCRATCH_WORDS = 4096 };

GDRC_FN void store_u64(u64 at, u64 value)
{
    gdrc_store_u32(at, (u32)value);
    gdrc_store_u32(at + 4, (u32)(value >> 32));
}

struct Answer {
    gdrc_channel channel;
    u32 request_lines;
    u32 response_lines;   // not more than of a request
    u64 delay_ns;         // before each answer
};

// Requests of a fixed size. Word n of the answer is word n of the request, xor the request's n-th word from its end.
KERNEL void answer(const Answer a)
{
    SHARED u32 request[SCRATCH_WORDS];
    SHARED u32 response[SCRATCH_WORDS];
    u32 words = a.request_lines * GDRC_LINE_WORDS;
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    while (gdrc_recv_lines(&port, a.request_lines, request)) {
        for (u32 n = gdrc_lane(); n < a.response_lines * GDRC_LINE_WORDS; n += GDRC_WARP)
            response[n] = request[n] ^ request[words - 1 - n];
        gdrc_sync_warp();
        if (a.delay_ns != 0) {
            u64 since = gdrc_now_ns();
            while (gdrc_now_ns() - since < a.delay_ns) {
            }
        }
        if (!gdrc_send_lines(&port, a.response_lines, response))
            break;
        // The scratch is written again only when every lane has read it.
        gdrc_sync_warp();
    }
    gdrc_close(&port);
}

struct Mirror {
    gdrc_channel channel;
};

// Messages of any length, sent back with every bit turned over.
KERNEL void mirror(const Mirror a)
{
    SHARED u32 message[SCRATCH_WORDS];
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    for (;;) {
        int bytes = gdrc_recv(&port, message, sizeof message);
        if (bytes < 0)
            break;
        for (u32 n = gdrc_lane(); n < ((u32)bytes + 3) / 4; n += GDRC_WARP)
            message[n] = ~message[n];
        // Padding behind the message is 0 on its way out as on its way in.
        gdrc_sync_warp();
        if (gdrc_lane() == 0 && bytes % 4 != 0)
            message[bytes / 4] &= (1u << 8 * (bytes % 4)) - 1;
        gdrc_sync_warp();
        if (!gdrc_send(&port, message, (u32)bytes))
            break;
        gdrc_sync_warp();
    }
    gdrc_close(&port);
}

// Word n of the message with number `number`: any two messages differ in every word.
GDRC_FN u32 word_of(u64 number, u32 n)
{
    u32 word = (u32)number + n * 0x9e3779b9u;
    return n == 0 ? word ^ (u32)(number >> 32) : word;
}

struct Sink {
    gdrc_channel channel;
    u64 count;            // of messages: a multiple of 32 times the readers
    u64 report;           // SinkReport in host memory for each reader
    u64 mask;             // messages repeat after mask + 1; all ones: never
};

struct SinkReport {
    u64 state;            // 1 while it runs, 2 at the end
    u64 messages;
    u64 wrong;            // messages with another number than the one that was due
    u64 torn;             // messages whose words are not all of one message
    u64 first_wrong;      // number that was due
    u64 unused[3];
};

// Each warp is a reader; each lane checks the lines of its own.
KERNEL void sink(const Sink a)
{
    gdrc_port port;
    u32 reader = WARP_OF_GRID;
    u64 report = a.report + reader * sizeof(SinkReport);
    u32 words[GDRC_LINE_WORDS];
    u64 blocks = a.count / GDRC_BLOCK_LINES / a.channel.readers;
    u64 messages = 0, wrong = 0, torn = 0, first_wrong = 0;

    gdrc_open(&port, &a.channel, reader);
    if (gdrc_lane() == 0)
        store_u64(report, 1);
    for (u64 block = 0; block < blocks; block++) {
        u64 due = (block * a.channel.readers + reader) * GDRC_BLOCK_LINES + gdrc_lane();
        // One round of 32 lanes, or 32 rounds of one.
        for (u32 sub = 0; sub < GDRC_BLOCK_LINES; sub += GDRC_WARP, due++) {
            if (!gdrc_recv_own_line(&port, words))
                goto end;
            bool is_due = true, is_one = true;
#ifdef __CUDACC__
#pragma unroll
#endif
            for (u32 n = 0; n < GDRC_LINE_WORDS; n++) {
                is_due &= words[n] == word_of(due & a.mask, n);
                is_one &= n == 0 || words[n] == words[1] + (n - 1) * 0x9e3779b9u;
            }
            messages++;
            if (!is_due && wrong + torn == 0)
                first_wrong = due + 1;
            torn += !is_one;
            wrong += is_one && !is_due;
        }
    }
end:
#ifdef __CUDACC__
    for (int step = 16; step > 0; step /= 2) {
        messages += __shfl_down_sync(0xffffffffu, messages, step);
        wrong += __shfl_down_sync(0xffffffffu, wrong, step);
        torn += __shfl_down_sync(0xffffffffu, torn, step);
        u64 other = __shfl_down_sync(0xffffffffu, first_wrong, step);
        first_wrong = first_wrong != 0 && (other == 0 || first_wrong < other) ? first_wrong : other;
    }
#endif
    if (gdrc_lane() == 0) {
        store_u64(report + 8, messages);
        store_u64(report + 16, wrong);
        store_u64(report + 24, torn);
        store_u64(report + 32, first_wrong);
        gdrc_fence();
        store_u64(report, 2);
    }
    gdrc_close(&port);
}

struct Source {
    gdrc_channel channel;
    u64 count;            // of lines: a multiple of 8
};

// Numbered messages of one line to the CPU, 8 with each call.
KERNEL void source(const Source a)
{
    enum : u32 { LINES = 8, WORDS = LINES * GDRC_LINE_WORDS };
    SHARED u32 lines[WORDS];
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    for (u64 number = 0; number < a.count; number += LINES) {
        for (u32 n = gdrc_lane(); n < WORDS; n += GDRC_WARP)
            lines[n] = word_of(number + n / GDRC_LINE_WORDS, n % GDRC_LINE_WORDS);
        gdrc_sync_warp();
        if (!gdrc_send_lines(&port, LINES, lines))
            break;
        gdrc_sync_warp();
    }
    gdrc_close(&port);
}

struct Watch {
    gdrc_channel channel; // for its end only
    gdrc_latest latest;
    u64 last;             // number of the value that ends the kernel
    u64 report;           // WatchReport in host memory
};

struct WatchReport {
    u64 state;
    u64 seen;             // values
    u64 mixed;            // values of more than one number
    u64 backward;         // values older than the one before
    u64 last;             // number of the newest value
    u64 unused[3];
};

// A value is word_of(number, n) from end to end. Sees as many as it can.
KERNEL void watch(const Watch a)
{
    SHARED u32 value[SCRATCH_WORDS];
    gdrc_port port;
    u32 version = gdrc_latest_none(&a.latest);
    u32 words = a.latest.lines * GDRC_LINE_WORDS;
    u64 seen = 0, mixed = 0, backward = 0, last = 0;

    gdrc_open(&port, &a.channel, 0);
    if (gdrc_lane() == 0)
        store_u64(a.report, 1);
    for (;;) {
        if (gdrc_latest_read(&a.latest, &version, value)) {
            // Word 1 has the number itself, as far as 32 bits go.
            u64 number = (u32)(value[1] - 0x9e3779b9u);
            bool is_mixed = false;
            for (u32 n = gdrc_lane(); n < words; n += GDRC_WARP)
                is_mixed |= value[n] != word_of(number, n);
            seen++;
            mixed += gdrc_any(is_mixed) != 0;
            backward += number < last;
            last = number;
            gdrc_sync_warp();
        }
        if (last >= a.last || gdrc_is_over(&port))
            break;
    }
    if (gdrc_lane() == 0) {
        store_u64(a.report + 8, seen);
        store_u64(a.report + 16, mixed);
        store_u64(a.report + 24, backward);
        store_u64(a.report + 32, last);
        gdrc_fence();
        store_u64(a.report, 2);
    }
    gdrc_close(&port);
}
