// Kernels at the other end of a channel, for its limits: the shortest way from a message to its answer, rates, the time
// from one end to the other, and soaks in which each message is checked. They compile as plain C++ too: then a thread of
// the CPU plays each warp.

#include "../../ffi/include/gdrcopy_channel.cuh"

typedef gdrc_u32 u32;
typedef gdrc_u64 u64;

#ifdef __CUDACC__
#define KERNEL extern "C" __global__
#define WARP_OF_GRID (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32)
#else
#define KERNEL extern "C"
// A warp is a thread here, which says which one it is.
static thread_local gdrc_u32 WARP_OF_GRID;
extern "C" void be_warp(gdrc_u32 warp)
{
    WARP_OF_GRID = warp;
}
#endif

// Word `n` of the message with number `number`: any two messages differ in every word.
GDRC_FN u32 word_of(u64 number, u32 n)
{
    u32 word = (u32)number + n * 0x9e3779b9u;
    return n == 0 ? word ^ (u32)(number >> 32) : word;
}

GDRC_FN void store_u64(u64 at, u64 value)
{
    gdrc_store_u32(at, (u32)value);
    gdrc_store_u32(at + 4, (u32)(value >> 32));
}

// The sum over a warp's lanes, in lane 0.
GDRC_FN u64 sum_of_warp(u64 value)
{
#ifdef __CUDACC__
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_down_sync(0xffffffffu, value, step);
#endif
    return value;
}

// The smallest over a warp's lanes, in lane 0.
GDRC_FN u64 least_of_warp(u64 value)
{
#ifdef __CUDACC__
    for (int step = 16; step > 0; step /= 2) {
        u64 other = __shfl_down_sync(0xffffffffu, value, step);
        value = other < value ? other : value;
    }
#endif
    return value;
}

// What a warp reports: 8 words in host memory.
struct Report {
    u64 state;            // 1 while it runs, 2 at the end
    u64 messages;
    u64 torn;             // messages whose words are not all of one message
    u64 ahead;            // messages later than the one that was due: some were lost
    u64 behind;           // messages earlier than the one that was due: doubled, or out of order
    u64 first_wrong;      // number that was due when the first of these came; all ones: none was wrong
    u64 unused[2];
};

// What a lane found in its messages.
struct Found {
    u64 messages;
    u64 torn;
    u64 ahead;
    u64 behind;
    u64 first_wrong;
};

GDRC_FN void found_nothing(Found *found)
{
    found->messages = found->torn = found->ahead = found->behind = 0;
    found->first_wrong = ~0ull;
}

// Compares a message with the one that is due.
GDRC_FN void check(Found *found, u64 due, const u32 words[GDRC_LINE_WORDS])
{
    bool is_due = true;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (u32 n = 0; n < GDRC_LINE_WORDS; n++)
        is_due &= words[n] == word_of(due, n);
    found->messages++;
    if (is_due)
        return;
    // The number that it says it has.
    u32 low = words[1] - 0x9e3779b9u;
    u64 number = (u64)(words[0] ^ low) << 32 | low;
    bool is_one = true;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (u32 n = 2; n < GDRC_LINE_WORDS; n++)
        is_one &= words[n] == word_of(number, n);
    found->torn += !is_one;
    found->ahead += is_one && number > due;
    found->behind += is_one && number < due;
    found->first_wrong = due < found->first_wrong ? due : found->first_wrong;
}

GDRC_FN void begin_report(u64 at)
{
    if (gdrc_lane() == 0)
        store_u64(at, 1);
}

GDRC_FN void end_report(u64 at, const Found *found)
{
    u64 messages = sum_of_warp(found->messages), torn = sum_of_warp(found->torn);
    u64 ahead = sum_of_warp(found->ahead), behind = sum_of_warp(found->behind);
    u64 first_wrong = least_of_warp(found->first_wrong);
    if (gdrc_lane() != 0)
        return;
    store_u64(at + 8, messages);
    store_u64(at + 16, torn);
    store_u64(at + 24, ahead);
    store_u64(at + 32, behind);
    store_u64(at + 40, first_wrong);
    gdrc_fence();
    store_u64(at, 2);
}

struct Echo {
    gdrc_channel channel;
};

// Messages of one line, sent back with every bit turned over; a word never leaves the lane that received it.
KERNEL void echo(const Echo a)
{
    u32 words[GDRC_OWN_WORDS(1)];
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    while (gdrc_recv_parts(&port, 1, words)) {
        for (u32 n = 0; n < GDRC_OWN_WORDS(1); n++)
            words[n] = ~words[n];
        if (!gdrc_send_parts(&port, 1, words))
            break;
    }
    gdrc_close(&port);
}

// The same for a kernel each of whose lanes wants the whole message.
KERNEL void echo_line(const Echo a)
{
    u32 words[GDRC_LINE_WORDS];
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    while (gdrc_recv_line(&port, words)) {
        for (u32 n = 0; n < GDRC_LINE_WORDS; n++)
            words[n] = ~words[n];
        if (!gdrc_send_line(&port, words))
            break;
    }
    gdrc_close(&port);
}

struct Ask {
    gdrc_channel channel;
    u64 report;
};

enum : u32 { ASK_WORDS = 128, ASK_LINES = (ASK_WORDS + GDRC_LINE_WORDS - 1) / GDRC_LINE_WORDS };

// Requests of 512 bytes. The answer's first word is the request's first, xor its last; the rest is 0. The request's words
// are checked behind the answer: word n is its first, plus n times an odd number.
KERNEL void ask(const Ask a)
{
    u32 request[GDRC_OWN_WORDS(ASK_LINES)];
    u32 answer[GDRC_OWN_WORDS(1)];
    gdrc_port port;
    Found found;

    for (u32 n = 0; n < GDRC_OWN_WORDS(1); n++)
        answer[n] = 0;
    found_nothing(&found);
    gdrc_open(&port, &a.channel, 0);
    begin_report(a.report);
    while (gdrc_recv_parts(&port, ASK_LINES, request)) {
        u32 first = gdrc_word_of_parts(request, 0), last = gdrc_word_of_parts(request, ASK_WORDS - 1);
        answer[0] = gdrc_lane() == 0 ? first ^ last : 0;
        if (!gdrc_send_parts(&port, 1, answer))
            break;
        u32 wrong = 0;
        for (u32 n = 0; n < GDRC_OWN_WORDS(ASK_LINES); n++) {
            u32 at = (n / 3 * GDRC_WARP + gdrc_lane()) * 3 + n % 3;
            wrong |= request[n] != (at < ASK_WORDS ? first + at * 0x9e3779b9u : 0);
        }
        found.messages += gdrc_lane() == 0;
        found.torn += wrong != 0;
    }
    end_report(a.report, &found);
    gdrc_close(&port);
}

struct Soak {
    gdrc_channel channel;
    u64 first;            // number of the first message
    u64 count;            // a multiple of 32 times the readers
    u64 mask;             // message `number` is made as `number & mask`; all ones: no two are alike
    u64 report;           // a Report for each reader
};

// Each warp is a reader; each lane checks the lines of its own.
KERNEL void soak(const Soak a)
{
    gdrc_port port;
    Found found;
    u32 words[GDRC_LINE_WORDS];
    u32 reader = WARP_OF_GRID;
    u64 report = a.report + reader * sizeof(Report);
    u64 blocks = a.count / GDRC_BLOCK_LINES / a.channel.readers;

    found_nothing(&found);
    gdrc_open(&port, &a.channel, reader);
    begin_report(report);
    for (u64 block = 0; block < blocks; block++) {
        u64 due = a.first + (block * a.channel.readers + reader) * GDRC_BLOCK_LINES + gdrc_lane();
        // One round of 32 lanes, or 32 rounds of one.
        for (u32 sub = 0; sub < GDRC_BLOCK_LINES; sub += GDRC_WARP, due++) {
            if (!gdrc_recv_own_line(&port, words))
                goto end;
            check(&found, due & a.mask, words);
        }
    }
end:
    end_report(report, &found);
    gdrc_close(&port);
}

struct Arrive {
    gdrc_channel channel;
    u64 count;            // of messages: a multiple of 32 times the readers
    u64 mask;             // as in Soak
    u64 every_log2;       // of 2^every_log2 blocks of 32 messages, one message is answered
    u64 answers;          // host memory: 64 bytes for each of `slots` answers, in turn
    u64 slots;            // a power of two
    u64 report;           // a Report for each reader
};

// Messages as they come, each by the lane whose line it is. Sample j is in block j * every + j % every, so that all readers
// have some, at line j % 32; it is answered, by j + 1, before it is checked.
KERNEL void arrive(const Arrive a)
{
    gdrc_port port;
    Found found;
    u32 words[GDRC_LINE_WORDS];
    u32 reader = WARP_OF_GRID;
    u64 report = a.report + reader * sizeof(Report);
    u64 blocks = a.count / GDRC_BLOCK_LINES / a.channel.readers;
    u64 every_mask = (1ull << a.every_log2) - 1;
    u64 done = 0;

    found_nothing(&found);
    gdrc_open(&port, &a.channel, reader);
    begin_report(report);
    while (done < blocks) {
        u64 block = done * a.channel.readers + reader;
        u64 sample = block >> a.every_log2;
        u32 line = GDRC_WARP == GDRC_BLOCK_LINES ? gdrc_lane() : port.in_sub;
        bool is_sample = (block & every_mask) == (sample & every_mask) && line == sample % GDRC_BLOCK_LINES;
        u64 answer_at = a.answers + (sample & (a.slots - 1)) * GDRC_LINE_BYTES;
        u32 next = port.in_next;
        int is_new;
        if (!gdrc_poll_own_line(&port, &is_new, words))
            break;
        if (is_new) {
            if (is_sample)
                gdrc_store_u32(answer_at, (u32)sample + 1);
            check(&found, (block * GDRC_BLOCK_LINES + line) & a.mask, words);
        }
        done += port.in_next != next;
    }
    end_report(report, &found);
    gdrc_close(&port);
}

struct Pour {
    gdrc_channel channel;
    u64 first;            // number of the first message
    u64 count;            // a multiple of 8
};

// Numbered messages of one line to the CPU, 8 with each call, straight from registers.
KERNEL void pour(const Pour a)
{
    enum : u32 { LINES = 8 };
    u32 words[GDRC_OWN_WORDS(LINES)];
    gdrc_port port;

    gdrc_open(&port, &a.channel, 0);
    for (u64 number = 0; number < a.count; number += LINES) {
        for (u32 own = 0; own < GDRC_OWN_PARTS(LINES); own++) {
            u32 part = own * GDRC_WARP + gdrc_lane();
            for (u32 n = 0; n < 3; n++)
                words[3 * own + n] = word_of(a.first + number + part / 4, part % 4 * 3 + n);
        }
        if (!gdrc_send_parts(&port, LINES, words))
            break;
    }
    gdrc_close(&port);
}
