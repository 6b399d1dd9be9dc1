/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * gdrcopy_channel.cuh - the kernel's side of a message channel between a CPU thread and a running kernel.
 *
 * The CPU's side is gdrcopy::channel in Rust. It makes the channel, and hands the kernel a struct gdrc_channel by value.
 * Compiles with nvcc and NVRTC for sm_70 and later, PTX 7.0 and later; needs no other header and no library. Compiled as
 * plain C++ for x86-64, the same functions run on a CPU thread that plays the kernel, on the library's emulated GPUs,
 * with a warp of one lane.
 *
 * Lines. Both rings are made of 64-byte lines, a line of four parts of 16 bytes, a part of a 32-bit sequence number and
 * three 32-bit words of payload: 12 words, 48 bytes in a line. Lines are numbered without a gap, modulo 2^32; line n lies
 * in slot n & (lines - 1), and each of its parts carries n. A part belongs to line n if, and only if, it carries n: what
 * lay in the slot before carries n - lines, also at the very first lap, since both rings are filled that way before a
 * kernel can see them. Nothing is assumed of a line's parts among each other, nor of two lines: each part is checked.
 *
 * Messages. Either a number of lines that both sides know (gdrc_recv_lines, gdrc_send_lines), or any length
 * (gdrc_recv, gdrc_send): word 0 of the first line is the length in bytes then, and the data follow; what is left of the
 * last line is 0. A message takes at most half a ring.
 *
 * Ordering. Parts are loaded with ld.relaxed.sys.v4 and stored with st.relaxed.sys.v4: of system scope, so never from a
 * stale L1 line, and 16 bytes in one access. Payload and number come by the same access, so no fence lies between them.
 * Consumed lines are returned as credit by a relaxed store without a fence, which no load that it covers can pass: the
 * store is executed only after all lanes have voted that each of their parts carried its number, and a part that the CPU
 * had overwritten by then would have carried another. Room in the other ring is learnt with ld.acquire.sys. A message
 * orders nothing else: who hands over other memory through it puts fence.acq_rel.sys (__threadfence_system()) before
 * gdrc_send, or after gdrc_recv. Data that the CPU wrote through its mapping before it sent the message also needs a
 * store fence there.
 *
 * Latency. Nothing but GPU memory is looked at while a warp waits: a load of host memory takes a round trip of the bus. A
 * ring of 32 lines from the CPU has several places, and gdrc_open takes the nearest: 0.1 to 0.25 us on an H200.
 * gdrc_recv_parts and gdrc_send_parts are the shortest way from a message to its answer: registers only. A warp that
 * waits beside other work on its SM takes its turns with it, and a turn is lost to each instruction between a message and
 * its answer; a block that takes all of the SM's shared memory (cudaFuncAttributeMaxDynamicSharedMemorySize,
 * cudaDevAttrMaxSharedMemoryPerBlockOptin; compute capability 8.0 and later, where each block needs some) has the SM to
 * itself.
 *
 * Threads. Functions are called by all 32 lanes of a warp together, with the same arguments. A ring has one writer: one
 * warp of the kernel sends. A channel made with R readers lets R warps receive: reader r of R has the blocks of 32 lines
 * r, r + R, r + 2 R, .. for gdrc_recv_own_line and gdrc_poll_own_line, one line for each lane; the functions for messages
 * are for R = 1.
 *
 * End. Waiting ends when the CPU drops the channel or asks the kernel to stop, or limit_ns after gdrc_open, whichever is
 * first; functions then return 0 or a negative number, and the warp must call gdrc_close and return.
 */
#ifndef GDRCOPY_CHANNEL_CUH
#define GDRCOPY_CHANNEL_CUH

typedef unsigned int gdrc_u32;
typedef unsigned long long gdrc_u64;

/* What the CPU hands over. Addresses as the kernel sees them. */
typedef struct gdrc_channel {
    gdrc_u64 in_ring;    /* GPU memory: lines from the CPU */
    gdrc_u64 in_credit;  /* host memory, a u32 for each reader: number of the first line it has not consumed */
    gdrc_u64 out_ring;   /* host memory: lines to the CPU */
    gdrc_u64 out_credit; /* GPU memory, u32: number of the first line that the CPU has not consumed */
    gdrc_u64 stop;       /* GPU memory, u32: not 0 asks the kernel to end */
    gdrc_u64 state;      /* host memory, a u32 for each reader: a gdrc_state */
    gdrc_u64 limit_ns;   /* a kernel ends by itself this long after gdrc_open */
    gdrc_u32 in_lines;   /* a power of two, as is out_lines */
    gdrc_u32 in_start;   /* number of the first line */
    gdrc_u32 out_lines;
    gdrc_u32 out_start;
    gdrc_u32 readers;
    gdrc_u32 places; /* for in_ring, GDRC_PLACE_BYTES apart; less than 2^16 */
} gdrc_channel;

/* From bit GDRC_STATE_BITS on a running kernel's state has the place it took for the ring from the CPU. */
enum gdrc_state { GDRC_NOT_STARTED = 0, GDRC_RUNNING = 1, GDRC_ENDED = 2, GDRC_STATE_BITS = 8 };

enum { GDRC_LINE_BYTES = 64, GDRC_LINE_WORDS = 12, GDRC_BLOCK_LINES = 32, GDRC_LATEST_SLOTS = 4, GDRC_PLACE_BYTES = 4096 };

/* Ends of gdrc_recv. */
enum { GDRC_STOPPED = -1, GDRC_TOO_LONG = -2 };

/* A value of which the newest is wanted; written by the CPU (Latest in Rust). Version v lies in slot v % 4, in `lines`
 * lines, each part of which carries v. */
typedef struct gdrc_latest {
    gdrc_u64 slots; /* GPU memory: 4 slots of `lines` lines */
    gdrc_u32 lines;
    gdrc_u32 start; /* the first version, which is there when the kernel starts */
} gdrc_latest;

/* Parts of a message of so many lines that one lane has with gdrc_recv_parts and gdrc_send_parts, and their words. */
#define GDRC_OWN_PARTS(lines) ((4u * (lines) + GDRC_WARP - 1) / GDRC_WARP)
#define GDRC_OWN_WORDS(lines) (3u * GDRC_OWN_PARTS(lines))
#define GDRC_MOST_OWN_LINES 16u

typedef struct gdrc_part {
    gdrc_u32 number;
    gdrc_u32 words[3];
} gdrc_part;

/* A warp's place in a channel. */
typedef struct gdrc_port {
    gdrc_channel channel;
    gdrc_u32 reader;
    gdrc_u32 in_next;     /* first line that was not consumed */
    gdrc_u32 in_returned; /* the credit given last */
    gdrc_u32 in_sub;      /* line of the block, where a warp has one lane */
    gdrc_u32 in_has;      /* this lane has its line of the block (gdrc_poll_own_line) */
    gdrc_u64 in_early;    /* not 0: another place, to which the first line may come */
    gdrc_u32 out_next;    /* number of the next line to send */
    gdrc_u64 out_at;      /* where this lane's part of the lines from that one on lies */
    gdrc_u32 out_limit;   /* first number for which there is no room */
    gdrc_u32 looks;
    gdrc_u64 started_ns;
} gdrc_port;

/* --- Accesses -------------------------------------------------------------------------------------------------------- */

#ifdef __CUDACC__

#define GDRC_FN static __device__ __forceinline__
#define GDRC_WARP 32u
/* Looks for a message between two looks at the stop word, and at the clock: powers of two. */
#define GDRC_STOP_LOOKS 1024u
#define GDRC_CLOCK_LOOKS 4096u

GDRC_FN gdrc_part gdrc_load_part(gdrc_u64 at)
{
    gdrc_part part;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(part.number), "=r"(part.words[0]), "=r"(part.words[1]), "=r"(part.words[2])
                 : "l"(at)
                 : "memory");
    return part;
}

GDRC_FN void gdrc_store_part(gdrc_u64 at, gdrc_part part)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(part.number), "r"(part.words[0]), "r"(part.words[1]), "r"(part.words[2])
                 : "memory");
}

GDRC_FN gdrc_u32 gdrc_load_u32(gdrc_u64 at)
{
    gdrc_u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

GDRC_FN gdrc_u32 gdrc_acquire_u32(gdrc_u64 at)
{
    gdrc_u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

GDRC_FN void gdrc_store_u32(gdrc_u64 at, gdrc_u32 value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

GDRC_FN void gdrc_fence(void)
{
    asm volatile("fence.acq_rel.sys;" : : : "memory");
}

GDRC_FN gdrc_u64 gdrc_now_ns(void)
{
    gdrc_u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
    return now;
}

GDRC_FN gdrc_u32 gdrc_lane(void)
{
    gdrc_u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

GDRC_FN int gdrc_all(int mine)
{
    return __all_sync(0xffffffffu, mine);
}

GDRC_FN int gdrc_any(int mine)
{
    return __any_sync(0xffffffffu, mine);
}

/* Lane 0's value. */
GDRC_FN gdrc_u32 gdrc_from_first(gdrc_u32 value)
{
    return __shfl_sync(0xffffffffu, value, 0);
}

/* Word `at`, a constant, of the message whose parts the lanes have from gdrc_recv_parts. */
GDRC_FN gdrc_u32 gdrc_word_of_parts(const gdrc_u32 *words, gdrc_u32 at)
{
    return __shfl_sync(0xffffffffu, words[at / 3 / GDRC_WARP * 3 + at % 3], (int)(at / 3 % GDRC_WARP));
}

/* What a lane did before it happens before what any lane does after it. */
GDRC_FN void gdrc_sync_warp(void)
{
    __syncwarp();
}

/* A chance for others. */
GDRC_FN void gdrc_yield(void)
{
}

/* The place for the ring that is nearest to this warp's SM. Memory is at home in one half of a large GPU's L2 cache, and what
 * the CPU writes comes there. An atomic operation is done at home too, so it tells near from far: on an H200 330 cycles or
 * 540. A load does not, for each half keeps copies of the other's lines. The last line of a place belongs to nobody. */
GDRC_FN gdrc_u32 gdrc_nearest_place(const gdrc_channel *channel)
{
    gdrc_u32 nearest = 0, least = ~0u, none = channel->places >> 16;
    for (gdrc_u32 place = 0; gdrc_lane() == 0 && place < channel->places; place++) {
        gdrc_u64 at = channel->in_ring + (place + 1ull) * GDRC_PLACE_BYTES - GDRC_LINE_BYTES;
        gdrc_u32 cycles = ~0u, value = 0;
        for (gdrc_u32 round = 0; round < 2; round++) {
            gdrc_u32 start, end;
            asm volatile("mov.u32 %0, %%clock;" : "=r"(start) : : "memory");
            /* One after the other: each needs the value before it, of which the compiler does not know that it is 0. */
            for (gdrc_u32 trip = 0; trip < 3; trip++)
                asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                             : "=r"(value)
                             : "l"(at + (value & none)), "r"(none)
                             : "memory");
            asm volatile("mov.u32 %0, %%clock;" : "=r"(end) : "r"(value) : "memory");
            cycles = end - start < cycles ? end - start : cycles;
        }
        if (cycles < least) {
            least = cycles;
            nearest = place;
        }
    }
    return gdrc_from_first(nearest);
}

#else /* A CPU thread in the place of a warp. */

#include <sched.h>
#include <time.h>

#define GDRC_FN static inline
#define GDRC_WARP 1u
#define GDRC_STOP_LOOKS 64u
#define GDRC_CLOCK_LOOKS 64u

typedef gdrc_u32 gdrc_vector __attribute__((vector_size(16)));

/* MOVDQA of an aligned address is one access where the processor has AVX (Intel SDM volume 3A, 9.1.1). */
GDRC_FN gdrc_part gdrc_load_part(gdrc_u64 at)
{
    gdrc_vector value;
    __asm__ __volatile__("movdqa (%1), %0" : "=x"(value) : "r"(at) : "memory");
    gdrc_part part = { value[0], { value[1], value[2], value[3] } };
    return part;
}

GDRC_FN void gdrc_store_part(gdrc_u64 at, gdrc_part part)
{
    gdrc_vector value = { part.number, part.words[0], part.words[1], part.words[2] };
    __asm__ __volatile__("movdqa %1, (%0)" : : "r"(at), "x"(value) : "memory");
}

GDRC_FN gdrc_u32 gdrc_load_u32(gdrc_u64 at)
{
    return __atomic_load_n((const gdrc_u32 *)at, __ATOMIC_RELAXED);
}

GDRC_FN gdrc_u32 gdrc_acquire_u32(gdrc_u64 at)
{
    return __atomic_load_n((const gdrc_u32 *)at, __ATOMIC_ACQUIRE);
}

GDRC_FN void gdrc_store_u32(gdrc_u64 at, gdrc_u32 value)
{
    __atomic_store_n((gdrc_u32 *)at, value, __ATOMIC_RELAXED);
}

GDRC_FN void gdrc_fence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

GDRC_FN gdrc_u64 gdrc_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (gdrc_u64)now.tv_sec * 1000000000u + (gdrc_u64)now.tv_nsec;
}

GDRC_FN gdrc_u32 gdrc_lane(void)
{
    return 0;
}

GDRC_FN int gdrc_all(int mine)
{
    return mine;
}

GDRC_FN int gdrc_any(int mine)
{
    return mine;
}

GDRC_FN gdrc_u32 gdrc_from_first(gdrc_u32 value)
{
    return value;
}

GDRC_FN gdrc_u32 gdrc_word_of_parts(const gdrc_u32 *words, gdrc_u32 at)
{
    return words[at];
}

GDRC_FN void gdrc_sync_warp(void)
{
}

GDRC_FN void gdrc_yield(void)
{
    sched_yield();
}

/* No place is nearer than another here. The last one, which nobody takes by mistake. */
GDRC_FN gdrc_u32 gdrc_nearest_place(const gdrc_channel *channel)
{
    return channel->places - 1;
}

#endif

/* Where part `part` of the lines from the next one to send on lies. */
GDRC_FN gdrc_u64 gdrc_out_part_at(const gdrc_port *port, gdrc_u32 part)
{
    gdrc_u32 slot = (port->out_next + part / 4) & (port->channel.out_lines - 1);
    return port->channel.out_ring + (gdrc_u64)slot * GDRC_LINE_BYTES + part % 4 * 16;
}

/* `lines` lines have been stored. */
GDRC_FN void gdrc_sent(gdrc_port *port, gdrc_u32 lines)
{
    port->out_next += lines;
    port->out_at = gdrc_out_part_at(port, gdrc_lane());
}

/* --- Life ------------------------------------------------------------------------------------------------------------ */

/* Takes reader `reader`'s place, and reports that it runs. With a ring of 32 lines from the CPU it first measures where that
 * ring is nearest, some ten microseconds. */
GDRC_FN void gdrc_open(gdrc_port *port, const gdrc_channel *channel, gdrc_u32 reader)
{
    gdrc_u32 place = channel->places > 1 ? gdrc_nearest_place(channel) : 0;
    port->channel = *channel;
    port->channel.in_ring += (gdrc_u64)place * GDRC_PLACE_BYTES;
    port->in_early = place == 0 ? 0 : channel->in_ring;
    port->reader = reader;
    port->in_next = channel->in_start + reader * GDRC_BLOCK_LINES;
    port->in_returned = port->in_next;
    port->in_sub = 0;
    port->in_has = 0;
    port->out_next = channel->out_start;
    port->out_at = gdrc_out_part_at(port, gdrc_lane());
    port->out_limit = channel->out_start + channel->out_lines;
    port->looks = 0;
    port->started_ns = gdrc_now_ns();
    if (gdrc_lane() == 0)
        gdrc_store_u32(channel->state + 4ull * reader, GDRC_RUNNING | place << GDRC_STATE_BITS);
}

/* Reports that this reader does no more. All it sent is there when the CPU learns of it. */
GDRC_FN void gdrc_close(gdrc_port *port)
{
    gdrc_sync_warp();
    if (gdrc_lane() == 0) {
        gdrc_fence();
        gdrc_store_u32(port->channel.state + 4ull * port->reader, GDRC_ENDED);
    }
}

/* Whether waiting must end, asked after a look that found nothing; the same for all lanes. Costs a load of GPU memory, and
 * so one more look's time, at every GDRC_STOP_LOOKS-th call only: seldom enough for one message in a thousand to notice. */
GDRC_FN int gdrc_is_over(gdrc_port *port)
{
    if (++port->looks % GDRC_STOP_LOOKS != 0)
        return 0;
    gdrc_yield();
    int over = gdrc_load_u32(port->channel.stop) != 0;
    if (port->looks % GDRC_CLOCK_LOOKS == 0)
        over |= gdrc_now_ns() - port->started_ns > port->channel.limit_ns;
    return gdrc_any(over);
}

/* --- Receiving ------------------------------------------------------------------------------------------------------- */

/* Returns lines to the CPU once they are a quarter of the ring. Called when the warp is about to wait anyway, and after a
 * vote on the numbers of every part up to in_next: see "Ordering" for why no fence is needed. */
GDRC_FN void gdrc_return_credit(gdrc_port *port)
{
    if (port->in_next - port->in_returned < port->channel.in_lines / 4)
        return;
    port->in_returned = port->in_next;
    if (gdrc_lane() == 0)
        gdrc_store_u32(port->channel.in_credit + 4ull * port->reader, port->in_next);
}

/* Where part `part` of the lines from the next one on lies. */
GDRC_FN gdrc_u64 gdrc_in_part_at(const gdrc_port *port, gdrc_u32 part)
{
    gdrc_u32 slot = (port->in_next + part / 4) & (port->channel.in_lines - 1);
    return port->channel.in_ring + (gdrc_u64)slot * GDRC_LINE_BYTES + part % 4 * 16;
}

/* Before the first line: looks whether it is in the place that was taken, or in the first one, where the CPU sends if it did
 * not know yet that this kernel runs. It stays with that. Whether the first line has come. */
GDRC_FN int gdrc_find_place(gdrc_port *port)
{
    gdrc_u64 at = gdrc_in_part_at(port, 0);
    gdrc_part near = gdrc_load_part(at);
    gdrc_part early = gdrc_load_part(at - port->channel.in_ring + port->in_early);
    if (!gdrc_all(near.number == port->in_next)) {
        if (!gdrc_all(early.number == port->in_next))
            return 0;
        port->channel.in_ring = port->in_early;
    }
    port->in_early = 0;
    return 1;
}

/* The first thing that whoever waits for a line does: credit, and the ring's place. 1, or 0 at the end. */
GDRC_FN int gdrc_begin_to_wait(gdrc_port *port)
{
    gdrc_return_credit(port);
    while (port->in_early != 0 && !gdrc_find_place(port))
        if (gdrc_is_over(port))
            return 0;
    return 1;
}

/* Puts a part's words where they belong in a message whose first `skip` words are left out. */
GDRC_FN void gdrc_put_words(gdrc_u32 *to, gdrc_u32 words, gdrc_u32 skip, gdrc_u32 part, const gdrc_part *from)
{
    for (gdrc_u32 n = 0; n < 3; n++) {
        gdrc_u32 at = 3 * part + n;
        if (at >= skip && at - skip < words)
            to[at - skip] = from->words[n];
    }
}

/* Waits for the next `lines` lines and copies their words, but the first `skip` ones, at most `words` of them. Each lane
 * has two parts in flight. Leaves the lines where they are. */
GDRC_FN int gdrc_look_at_lines(gdrc_port *port, gdrc_u32 lines, gdrc_u32 *to, gdrc_u32 words, gdrc_u32 skip)
{
    gdrc_u32 parts = 4 * lines;
    for (gdrc_u32 base = 0; base < parts; base += 2 * GDRC_WARP) {
        gdrc_u32 first = base + gdrc_lane(), second = first + GDRC_WARP;
        gdrc_part a = { 0, { 0, 0, 0 } }, b = { 0, { 0, 0, 0 } };
        for (;;) {
            if (first < parts)
                a = gdrc_load_part(gdrc_in_part_at(port, first));
            if (second < parts)
                b = gdrc_load_part(gdrc_in_part_at(port, second));
            int is_there = (first >= parts || a.number == port->in_next + first / 4) &&
                           (second >= parts || b.number == port->in_next + second / 4);
            if (gdrc_all(is_there))
                break;
            if (gdrc_is_over(port))
                return 0;
        }
        if (first < parts)
            gdrc_put_words(to, words, skip, first, &a);
        if (second < parts)
            gdrc_put_words(to, words, skip, second, &b);
    }
    gdrc_sync_warp();
    return 1;
}

/* Waits for a message of `lines` lines and copies its 12 * lines words to `to` (shared or global memory of the warp, not
 * registers), where all lanes may read them. 1, or 0 at the end. */
GDRC_FN int gdrc_recv_lines(gdrc_port *port, gdrc_u32 lines, gdrc_u32 *to)
{
    if (!gdrc_begin_to_wait(port) || !gdrc_look_at_lines(port, lines, to, lines * GDRC_LINE_WORDS, 0))
        return 0;
    port->in_next += lines;
    return 1;
}

/* Lines of a message of `bytes` bytes with its length. */
GDRC_FN gdrc_u32 gdrc_lines_of(gdrc_u32 bytes)
{
    return (bytes / 4 + (bytes % 4 != 0) + 1 + GDRC_LINE_WORDS - 1) / GDRC_LINE_WORDS;
}

/* Waits for a message of any length and copies it to `to`, `room` bytes of memory of the warp, a multiple of 4; bytes
 * behind the end of the message up to the next word are 0. Its length in bytes, GDRC_STOPPED, or GDRC_TOO_LONG if there
 * is no room for it: the message stays. */
GDRC_FN int gdrc_recv(gdrc_port *port, gdrc_u32 *to, gdrc_u32 room)
{
    if (!gdrc_begin_to_wait(port))
        return GDRC_STOPPED;
    gdrc_part first;
    for (;;) {
        first = gdrc_load_part(gdrc_in_part_at(port, 0));
        if (gdrc_all(first.number == port->in_next))
            break;
        if (gdrc_is_over(port))
            return GDRC_STOPPED;
    }
    gdrc_u32 bytes = gdrc_from_first(first.words[0]);
    if (bytes > room || gdrc_lines_of(bytes) > port->channel.in_lines / 2)
        return GDRC_TOO_LONG;
    if (!gdrc_look_at_lines(port, gdrc_lines_of(bytes), to, (bytes + 3) / 4, 1))
        return GDRC_STOPPED;
    port->in_next += gdrc_lines_of(bytes);
    return (int)bytes;
}

/* Waits for a message of `lines` lines, at most GDRC_MOST_OWN_LINES and a constant, and gives each lane the words of its own
 * parts, GDRC_OWN_WORDS(lines) of them: lane n of the warp has part n, which is words 3 n to 3 n + 2 of the message, then
 * part n + 32; what lies behind the message is 0. (A CPU thread has all parts.) 1, or 0 at the end. */
GDRC_FN int gdrc_recv_parts(gdrc_port *port, gdrc_u32 lines, gdrc_u32 *words)
{
    gdrc_part found[GDRC_OWN_PARTS(GDRC_MOST_OWN_LINES)];
    gdrc_u64 at[GDRC_OWN_PARTS(GDRC_MOST_OWN_LINES)];
    if (!gdrc_begin_to_wait(port))
        return 0;
    for (gdrc_u32 own = 0; own < GDRC_OWN_PARTS(lines); own++) {
        gdrc_u32 part = own * GDRC_WARP + gdrc_lane();
        gdrc_part none = { port->in_next + part / 4, { 0, 0, 0 } };
        found[own] = none;
        at[own] = gdrc_in_part_at(port, part);
    }
    for (;;) {
        int is_there = 1;
        for (gdrc_u32 own = 0; own < GDRC_OWN_PARTS(lines); own++)
            if (own * GDRC_WARP + gdrc_lane() < 4 * lines)
                found[own] = gdrc_load_part(at[own]);
        for (gdrc_u32 own = 0; own < GDRC_OWN_PARTS(lines); own++)
            is_there &= found[own].number == port->in_next + (own * GDRC_WARP + gdrc_lane()) / 4;
        if (gdrc_all(is_there))
            break;
        if (gdrc_is_over(port))
            return 0;
    }
    for (gdrc_u32 own = 0; own < GDRC_OWN_PARTS(lines); own++)
        for (gdrc_u32 n = 0; n < 3; n++)
            words[3 * own + n] = found[own].words[n];
    port->in_next += lines;
    return 1;
}

/* Waits for a message of one line and gives all its words to every lane. 1, or 0 at the end. */
GDRC_FN int gdrc_recv_line(gdrc_port *port, gdrc_u32 words[GDRC_LINE_WORDS])
{
    gdrc_u32 own[GDRC_OWN_WORDS(1)];
    if (!gdrc_recv_parts(port, 1, own))
        return 0;
    for (gdrc_u32 n = 0; n < GDRC_LINE_WORDS; n++)
        words[n] = gdrc_word_of_parts(own, n);
    return 1;
}

/* The number of this lane's line of the block that is next, and where the line lies. */
GDRC_FN gdrc_u32 gdrc_own_number(const gdrc_port *port)
{
    return port->in_next + (GDRC_WARP == GDRC_BLOCK_LINES ? gdrc_lane() : port->in_sub);
}

GDRC_FN gdrc_u64 gdrc_own_line_at(const gdrc_port *port)
{
    return port->channel.in_ring + (gdrc_u64)(gdrc_own_number(port) & (port->channel.in_lines - 1)) * GDRC_LINE_BYTES;
}

/* Whether a line was there as a whole when this lane looked; its words, if so. */
GDRC_FN int gdrc_look_at_line(gdrc_u64 at, gdrc_u32 number, gdrc_u32 words[GDRC_LINE_WORDS])
{
    gdrc_part a = gdrc_load_part(at);
    gdrc_part b = gdrc_load_part(at + 16);
    gdrc_part c = gdrc_load_part(at + 32);
    gdrc_part d = gdrc_load_part(at + 48);
    for (gdrc_u32 n = 0; n < 3; n++) {
        words[n] = a.words[n];
        words[3 + n] = b.words[n];
        words[6 + n] = c.words[n];
        words[9 + n] = d.words[n];
    }
    return a.number == number && b.number == number && c.number == number && d.number == number;
}

/* All lanes have their line of the block: on to the next, or to the next line where a warp has one lane. */
GDRC_FN void gdrc_next_own_line(gdrc_port *port)
{
    port->in_sub += GDRC_WARP;
    if (port->in_sub == GDRC_BLOCK_LINES) {
        port->in_sub = 0;
        port->in_next += GDRC_BLOCK_LINES * port->channel.readers;
    }
}

/* Waits for a block of 32 lines of this reader and gives each lane the 12 words of one line, that of its own place in the
 * block. (A CPU thread gets the lines of the block one by one.) For rates: a line waits for the block to be full. 1, or 0
 * at the end. */
GDRC_FN int gdrc_recv_own_line(gdrc_port *port, gdrc_u32 words[GDRC_LINE_WORDS])
{
    if (!gdrc_begin_to_wait(port))
        return 0;
    gdrc_u32 number = gdrc_own_number(port);
    gdrc_u64 at = gdrc_own_line_at(port);
    for (;;) {
        if (gdrc_all(gdrc_look_at_line(at, number, words)))
            break;
        if (gdrc_is_over(port))
            return 0;
    }
    gdrc_next_own_line(port);
    return 1;
}

/* Looks once, and gives each lane the 12 words of its own line of this reader's block of 32 as soon as that line is there,
 * whatever the other lanes wait for: then `*is_new` is 1 for this lane, else 0. When all lanes have had theirs, the next
 * block is on. For latency: no line waits for another. 1, or 0 at the end. Not to be mixed with gdrc_recv_own_line. */
GDRC_FN int gdrc_poll_own_line(gdrc_port *port, int *is_new, gdrc_u32 words[GDRC_LINE_WORDS])
{
    *is_new = 0;
    if (port->in_early != 0 && !gdrc_find_place(port))
        return !gdrc_is_over(port);
    *is_new = !port->in_has && gdrc_look_at_line(gdrc_own_line_at(port), gdrc_own_number(port), words);
    port->in_has |= (gdrc_u32)*is_new;
    if (gdrc_all(port->in_has != 0)) {
        port->in_has = 0;
        gdrc_next_own_line(port);
        gdrc_return_credit(port);
        return 1;
    }
    return gdrc_any(*is_new) || !gdrc_is_over(port);
}

/* --- Sending --------------------------------------------------------------------------------------------------------- */

/* Waits until there is room for `lines` lines. */
GDRC_FN int gdrc_wait_for_room(gdrc_port *port, gdrc_u32 lines)
{
    while (port->out_limit - port->out_next < lines) {
        port->out_limit = gdrc_from_first(gdrc_acquire_u32(port->channel.out_credit)) + port->channel.out_lines;
        gdrc_sync_warp();
        if (port->out_limit - port->out_next < lines && gdrc_is_over(port))
            return 0;
    }
    return 1;
}

/* Word `at` of a message whose first word is `length` if `skip` is 1. */
GDRC_FN gdrc_u32 gdrc_get_word(const gdrc_u32 *from, gdrc_u32 words, gdrc_u32 skip, gdrc_u32 length, gdrc_u32 at)
{
    if (at < skip)
        return length;
    return at - skip < words ? from[at - skip] : 0;
}

GDRC_FN int gdrc_post_lines(gdrc_port *port, gdrc_u32 lines, const gdrc_u32 *from, gdrc_u32 words, gdrc_u32 skip,
                            gdrc_u32 length)
{
    if (!gdrc_wait_for_room(port, lines))
        return 0;
    for (gdrc_u32 part = gdrc_lane(); part < 4 * lines; part += GDRC_WARP) {
        gdrc_part out;
        out.number = port->out_next + part / 4;
        for (gdrc_u32 n = 0; n < 3; n++)
            out.words[n] = gdrc_get_word(from, words, skip, length, 3 * part + n);
        gdrc_store_part(gdrc_out_part_at(port, part), out);
    }
    gdrc_sent(port, lines);
    return 1;
}

/* Sends a message of `lines` lines, at most half the ring: 12 * lines words that all lanes can read (written by other
 * lanes: __syncwarp() first). 1, or 0 at the end. */
GDRC_FN int gdrc_send_lines(gdrc_port *port, gdrc_u32 lines, const gdrc_u32 *from)
{
    return gdrc_post_lines(port, lines, from, lines * GDRC_LINE_WORDS, 0, 0);
}

/* Sends a message of `bytes` bytes, whole words of which can be read at `from`. 1; 0 at the end, or if it takes more than
 * half the ring. */
GDRC_FN int gdrc_send(gdrc_port *port, const gdrc_u32 *from, gdrc_u32 bytes)
{
    gdrc_u32 lines = gdrc_lines_of(bytes);
    if (lines > port->channel.out_lines / 2)
        return 0;
    return gdrc_post_lines(port, lines, from, (bytes + 3) / 4, 1, bytes);
}

/* Sends a message of `lines` lines, at most GDRC_MOST_OWN_LINES and a constant, of which each lane has its own parts, as
 * gdrc_recv_parts gives them. Words behind the message do not matter. 1, or 0 at the end. */
GDRC_FN int gdrc_send_parts(gdrc_port *port, gdrc_u32 lines, const gdrc_u32 *words)
{
    if (!gdrc_wait_for_room(port, lines))
        return 0;
    for (gdrc_u32 own = 0; own < GDRC_OWN_PARTS(lines); own++) {
        gdrc_u32 part = own * GDRC_WARP + gdrc_lane();
        gdrc_part out = { port->out_next + part / 4, { words[3 * own], words[3 * own + 1], words[3 * own + 2] } };
        if (part < 4 * lines)
            gdrc_store_part(own == 0 ? port->out_at : gdrc_out_part_at(port, part), out);
    }
    gdrc_sent(port, lines);
    return 1;
}

/* Sends a message of one line, of which every lane has all words. 1, or 0 at the end. */
GDRC_FN int gdrc_send_line(gdrc_port *port, const gdrc_u32 words[GDRC_LINE_WORDS])
{
    gdrc_u32 own[GDRC_OWN_WORDS(1)];
    for (gdrc_u32 at = 0; at < GDRC_OWN_PARTS(1); at++) {
        gdrc_u32 part = at * GDRC_WARP + gdrc_lane();
        /* Selected, not indexed: the words stay in registers. */
        for (gdrc_u32 n = 0; n < 3; n++)
            own[3 * at + n] = part == 0 ? words[n] : part == 1 ? words[3 + n] : part == 2 ? words[6 + n] : words[9 + n];
    }
    return gdrc_send_parts(port, 1, own);
}

/* --- The newest value ------------------------------------------------------------------------------------------------ */

/* What `*version` is before the first look. */
GDRC_FN gdrc_u32 gdrc_latest_none(const gdrc_latest *latest)
{
    return latest->start - 1;
}

/* Copies the newest value's 12 * lines words to `to` if it is newer than `*version`, which becomes its version: 1. 0 if
 * there is nothing newer, or if it was being written just now, in which case `to` holds nothing of use: look again. Does
 * not wait. A writer that never pauses for as long as it takes to look can keep a reader from ever seeing a whole value
 * of several lines; it never makes it see a mix. */
GDRC_FN int gdrc_latest_read(const gdrc_latest *latest, gdrc_u32 *version, gdrc_u32 *to)
{
    gdrc_u64 slot_bytes = (gdrc_u64)latest->lines * GDRC_LINE_BYTES;
    gdrc_u32 newest = *version;
    for (gdrc_u32 slot = 0; slot < GDRC_LATEST_SLOTS; slot++) {
        gdrc_u32 found = gdrc_load_part(latest->slots + slot * slot_bytes).number;
        if ((int)(found - newest) > 0)
            newest = found;
    }
    newest = gdrc_from_first(newest);
    if (newest == *version)
        return 0;
    gdrc_u64 at = latest->slots + newest % GDRC_LATEST_SLOTS * slot_bytes;
    int is_whole = 1;
    for (gdrc_u32 part = gdrc_lane(); part < 4 * latest->lines; part += GDRC_WARP) {
        gdrc_part found = gdrc_load_part(at + 16ull * part);
        is_whole &= found.number == newest;
        gdrc_put_words(to, latest->lines * GDRC_LINE_WORDS, 0, part, &found);
    }
    if (!gdrc_all(is_whole))
        return 0;
    gdrc_sync_warp();
    *version = newest;
    return 1;
}

#endif
