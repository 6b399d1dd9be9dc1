// An order book that lives in a running kernel: one warp keeps it in shared memory and answers each order.
//
// `cargo xtask ptx` compiles this to the PTX beside it. With nvcc: nvcc -I<prefix>/include -ptx order_book.cu

#include "../../ffi/include/gdrcopy_channel.cuh"

// An order: side (0 buys, 1 sells), price (0 to 63), quantity, unused. The answer: quantity filled, quantity that now rests
// in the book, then the best bid and the best ask, each plus 1, or 0 if there is none. As in main.rs.
enum { LEVELS = 64 };

// Levels of one side that hold something, as bits. Uniform for the warp.
__device__ unsigned long long occupied(const gdrc_u32 *levels)
{
    gdrc_u32 low = __ballot_sync(0xffffffffu, levels[gdrc_lane()] != 0);
    gdrc_u32 high = __ballot_sync(0xffffffffu, levels[gdrc_lane() + 32] != 0);
    return (unsigned long long)high << 32 | low;
}

// The best price of a side plus 1, or 0: the highest bid, the lowest ask.
__device__ gdrc_u32 best(const gdrc_u32 *levels, gdrc_u32 side)
{
    unsigned long long bits = occupied(levels);
    if (bits == 0)
        return 0;
    return side == 0 ? 64 - __clzll((long long)bits) : __ffsll((long long)bits);
}

extern "C" __global__ void order_book(const gdrc_channel channel)
{
    __shared__ gdrc_u32 book[2][LEVELS];
    __shared__ gdrc_u32 order[GDRC_LINE_WORDS], answer[GDRC_LINE_WORDS];
    gdrc_port port;
    gdrc_u32 lane = gdrc_lane();

    for (gdrc_u32 level = lane; level < LEVELS; level += 32)
        book[0][level] = book[1][level] = 0;
    if (lane < GDRC_LINE_WORDS)
        answer[lane] = 0;
    gdrc_sync_warp();

    gdrc_open(&port, &channel, 0);
    while (gdrc_recv_lines(&port, 1, order)) {
        // The same in every lane.
        gdrc_u32 side = order[0] & 1, price = order[1] % LEVELS, left = order[2], filled = 0;
        gdrc_u32 *other = book[1 - side];
        while (left != 0) {
            gdrc_u32 offer = best(other, 1 - side);
            if (offer == 0 || (side == 0 ? offer - 1 > price : offer - 1 < price))
                break;
            gdrc_u32 there = other[offer - 1];
            gdrc_u32 traded = there < left ? there : left;
            gdrc_sync_warp();
            if (lane == 0)
                other[offer - 1] = there - traded;
            gdrc_sync_warp();
            left -= traded;
            filled += traded;
        }
        if (lane == 0)
            book[side][price] += left;
        gdrc_sync_warp();
        gdrc_u32 bid = best(book[0], 0), ask = best(book[1], 1);
        if (lane == 0) {
            answer[0] = filled;
            answer[1] = left;
            answer[2] = bid;
            answer[3] = ask;
        }
        gdrc_sync_warp();
        if (!gdrc_send_lines(&port, 1, answer))
            break;
        gdrc_sync_warp();
    }
    gdrc_close(&port);
}
