// The GPU's half of a ping-pong over a channel: one warp receives a message, checks it, answers with one line.
//
// Messages and answers are numbered from 1. The kernel ends as every kernel at a channel does: when the host says so, or
// when the channel's time limit has passed.

#include "../../ffi/include/gdrcopy_channel.cuh"

typedef gdrc_u32 u32;
typedef gdrc_u64 u64;

struct Pong {
    gdrc_channel channel;
    u64 bytes;         // of a message, 1 .. 4 * MOST_WORDS; the rest of its last line is 0
    u64 answer_bytes;  // 4 .. 48, a multiple of 4
    u64 report;        // Report in host memory
};

struct Report {
    u64 messages;
    u64 wrong_words;
};

enum : u32 {
    MOST_WORDS = 4096,
    WRONG_DATA = 0x80000000u, // in an answer
};

// Word `index` of message `number`, and but for the first of its answer: no two messages in a row share one.
GDRC_FN u32 word_of(u32 number, u32 index)
{
    return number * 0x9e3779b1u + index * 0x85ebca6bu;
}

// Of that word, what a message of so many bytes has.
GDRC_FN u32 word_within(u32 number, u32 index, u32 bytes)
{
    u32 at = 4 * index;
    if (at >= bytes)
        return 0;
    return word_of(number, index) & (bytes - at >= 4 ? 0xffffffffu : (1u << (8 * (bytes - at))) - 1);
}

GDRC_FN void store_u64(u64 at, u64 value)
{
    gdrc_store_u32(at, (u32)value);
    gdrc_store_u32(at + 4, (u32)(value >> 32));
}

// A warp's count of messages, and a lane's of wrong words.
struct Totals {
    u64 messages;
    u64 wrong_words;
};

// Messages of LINES lines, in the registers of the lanes that loaded them.
template <u32 LINES> GDRC_FN void pong_parts(gdrc_port *port, u32 bytes, u32 answer_bytes, Totals *totals)
{
    u32 message[GDRC_OWN_WORDS(LINES)], wanted[GDRC_OWN_WORDS(LINES)], answer[GDRC_OWN_WORDS(1)];

    for (u32 number = 1;; number++) {
        // Worked out before the message comes.
        for (u32 n = 0; n < GDRC_OWN_WORDS(LINES); n++)
            wanted[n] = word_within(number, 3 * (n / 3 * GDRC_WARP + gdrc_lane()) + n % 3, bytes);
        for (u32 n = 0; n < GDRC_OWN_WORDS(1); n++)
            answer[n] = word_within(number, 3 * (n / 3 * GDRC_WARP + gdrc_lane()) + n % 3, answer_bytes);
        if (gdrc_lane() == 0)
            answer[0] = number;
        if (!gdrc_recv_parts(port, LINES, message))
            break;
        u32 wrong = 0;
        for (u32 n = 0; n < GDRC_OWN_WORDS(LINES); n++)
            wrong += message[n] != wanted[n];
        if (gdrc_any(wrong != 0) && gdrc_lane() == 0)
            answer[0] |= WRONG_DATA;
        if (!gdrc_send_parts(port, 1, answer))
            break;
        totals->messages++;
        totals->wrong_words += wrong;
    }
}

// Messages of any length.
GDRC_FN void pong_lines(gdrc_port *port, u32 lines, u32 bytes, u32 answer_bytes, Totals *totals)
{
    // Whole lines.
    __shared__ u32 message[MOST_WORDS + GDRC_LINE_WORDS];
    __shared__ u32 wanted[MOST_WORDS + GDRC_LINE_WORDS];
    __shared__ u32 answer[GDRC_LINE_WORDS];
    u32 words = lines * GDRC_LINE_WORDS;

    for (u32 number = 1;; number++) {
        for (u32 n = gdrc_lane(); n < words; n += GDRC_WARP)
            wanted[n] = word_within(number, n, bytes);
        for (u32 n = gdrc_lane(); n < GDRC_LINE_WORDS; n += GDRC_WARP)
            answer[n] = n == 0 ? number : word_within(number, n, answer_bytes);
        gdrc_sync_warp();
        if (!gdrc_recv_lines(port, lines, message))
            break;
        u32 wrong = 0;
        for (u32 n = gdrc_lane(); n < words; n += GDRC_WARP)
            wrong += message[n] != wanted[n];
        if (gdrc_any(wrong != 0)) {
            if (gdrc_lane() == 0)
                answer[0] |= WRONG_DATA;
            gdrc_sync_warp();
        }
        if (!gdrc_send_lines(port, 1, answer))
            break;
        totals->messages++;
        totals->wrong_words += wrong;
        // The scratch is written again only when every lane has read it.
        gdrc_sync_warp();
    }
}

extern "C" __global__ void pong(const Pong a)
{
    gdrc_port port;
    u32 bytes = (u32)a.bytes, answer_bytes = (u32)a.answer_bytes;
    u32 lines = (bytes + 4 * GDRC_LINE_WORDS - 1) / (4 * GDRC_LINE_WORDS);
    Totals totals = { 0, 0 };

    gdrc_open(&port, &a.channel, 0);
    // 48 and 512 bytes have the shortest way.
    if (lines == 1)
        pong_parts<1>(&port, bytes, answer_bytes, &totals);
    else if (lines == 11)
        pong_parts<11>(&port, bytes, answer_bytes, &totals);
    else
        pong_lines(&port, lines, bytes, answer_bytes, &totals);
#ifdef __CUDACC__
    for (int step = 16; step > 0; step /= 2)
        totals.wrong_words += __shfl_down_sync(0xffffffffu, totals.wrong_words, step);
#endif
    if (gdrc_lane() == 0) {
        store_u64(a.report, totals.messages);
        store_u64(a.report + 8, totals.wrong_words);
    }
    gdrc_close(&port);
}
