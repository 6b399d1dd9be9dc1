/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * gdrapi_ext.h - what this library adds to gdrapi.h. Everything here begins with gdrx_ or GDRX_.
 *
 * Conventions and fork behaviour are those of gdrapi.h. A program that dlopens the library can tell by
 * dlsym("gdrx_last_error") whether it found this one.
 *
 * Threads
 *   gdrx_open .. gdrx_flush, gdrx_copier_*           any thread at any time, as in gdrapi.h
 *   gdrx_agent_*, gdrx_auto_*                        one thread at a time for each agent, each automatic copier
 *   gdrx_channel_send*, gdrx_channel_free_lines      one thread at a time for each channel's sending end
 *   gdrx_channel_recv*                               one thread at a time for each channel's receiving end
 *   gdrx_mailbox_call, _late; gdrx_latest_set        one thread at a time for each
 *   *_create, *_device, *_stop, *_kernel, *_destroy  any thread at any time
 *   One thread at a time: a call that finds another at work on the same thing never waits for it. It is EBUSY, and has
 *   done nothing; of two that begin at once, both may be. A call by another thread than the one before, as in a program
 *   that hands an end on behind a lock of its own, makes a system call, membarrier(2). While one thread goes on there is
 *   none, nor a lock, nor a locked instruction, which would drain the write-combining buffers.
 *   A handle that was destroyed is EINVAL, also while another thread destroys it. Destroying waits, for a second at most,
 *   until calls at work have ended, and is EBUSY, with nothing changed, if they have not.
 *
 * Options   Structures of options begin with their own size: set it to sizeof, and the rest to 0, which stands for the
 *           default of each. NULL in place of the structure is all defaults. An option that the library does not know,
 *           since the program was built for a later one, is EINVAL unless it is 0.
 */
#ifndef GDRAPI_EXT_H
#define GDRAPI_EXT_H

#include "gdrapi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- Errors ------------------------------------------------------------------------------------------------------- */

/* What went wrong, as a value to act on. New values may be added. */
typedef enum gdrx_error_kind {
    GDRX_ERROR_NONE = 0,                /* no call of this thread has failed */
    GDRX_ERROR_INVALID_ARGUMENT = 1,    /* an argument has no meaning */
    GDRX_ERROR_OUT_OF_BOUNDS = 2,       /* a range reaches past its mapping, buffer or allocation */
    GDRX_ERROR_INVALID_HANDLE = 3,      /* a handle was never made, was given up, or belongs to another gdr_t */
    GDRX_ERROR_STALE = 4,               /* the memory behind the pin was freed or replaced */
    GDRX_ERROR_ALREADY_MAPPED = 5,      /* the pin is mapped */
    GDRX_ERROR_NOT_MAPPED = 6,          /* the pin is not mapped */
    GDRX_ERROR_BUSY = 7,                /* in use, or the device did not finish in time */
    GDRX_ERROR_WRONG_PROCESS = 8,       /* the handle was made before a fork, by the parent */
    GDRX_ERROR_PERMISSION_DENIED = 9,   /* refused by the system, the driver or the administrator */
    GDRX_ERROR_NO_DRIVER = 10,          /* no GPU driver, or too old */
    GDRX_ERROR_NO_DEVICE = 11,          /* no such GPU */
    GDRX_ERROR_UNSUPPORTED_MEMORY = 12, /* managed, pool, host or foreign memory, or one that needs another level */
    GDRX_ERROR_UNSUPPORTED_FEATURE = 13,
    GDRX_ERROR_BAR1_EXHAUSTED = 14, /* no room in the GPU's aperture */
    GDRX_ERROR_OUT_OF_MEMORY = 15,
    GDRX_ERROR_UNKNOWN_LAYOUT = 16, /* the driver describes its memory in a way that was not proven to be understood */
    GDRX_ERROR_SYSTEM = 17,         /* the errno value says it all */
    GDRX_ERROR_INTERNAL = 18,       /* a bug in this library */
    GDRX_ERROR_WOULD_BLOCK = 19,    /* EAGAIN: no room in the ring, or no message, now */
    GDRX_ERROR_TIMED_OUT = 20,      /* ETIMEDOUT: the kernel did not act in time */
    GDRX_ERROR_KERNEL_GONE = 21     /* EPIPE: the kernel has ended, and all that it sent was received */
} gdrx_error_kind_t;

/* Cause and way out of the calling thread's last failed call, in one line. Like errno it means something after a failure
 * only: success does not reset it. Never NULL; valid until the thread's next failure. */
const char *gdrx_last_error(void);

/* The kind of the same failure. */
gdrx_error_kind_t gdrx_last_error_kind(void);

/* --- Backends ----------------------------------------------------------------------------------------------------- */

/* As gdr_open with the backend chosen by the program ("gdrdrv", "rm", "emulated", or "vulkan" where it is built in), which
 * wins over GDRCOPY_BACKEND. NULL: as gdr_open. */
gdr_t gdrx_open(const char *backend);

/* The name of the backend in use; never freed. NULL if `g` is not valid. */
const char *gdrx_backend(gdr_t g);

/* Writes which backends were tried and why the others were passed over, one a line, cut to `size` bytes including the
 * terminating zero. */
int gdrx_probe_report(gdr_t g, char *text, size_t size);

/* --- Device memory that every backend can pin ----------------------------------------------------------------------- */

/* Allocates `size` bytes on the GPU with CUDA ordinal `gpu` (-1: that of the calling thread's context, or 0). *addr is a
 * device pointer, on a 64 KiB page, that kernels may use as any other. It owns its memory object: a mapping of it never
 * shows anything else. Freed with gdrx_free, else by gdr_close. ENOMEM, ENODEV, EINVAL. */
int gdrx_alloc(gdr_t g, int gpu, size_t size, uint64_t *addr);

/* Frees it. Unpin it first. As cudaFree it waits for kernels that run. EBUSY while an agent or an automatic copier has
 * it. */
int gdrx_free(gdr_t g, uint64_t addr);

/* Copies to and from such memory through the GPU's copy engine, at any offset inside: for set-up and for checking. */
int gdrx_upload(gdr_t g, uint64_t addr, const void *from, size_t size);
int gdrx_download(gdr_t g, uint64_t addr, void *to, size_t size);

/* --- Mappings ------------------------------------------------------------------------------------------------------- */

/* Maps a pin at any address: *ptr is the very byte that was pinned, and *size (may be NULL) the pinned size. Unmap with
 * gdr_unmap. Errors as gdr_map. */
int gdrx_map(gdr_t g, gdr_mh_t handle, void **ptr, size_t *size);

/* What a mapping shows once its memory was freed. */
typedef enum gdrx_after_free {
    GDRX_AFTER_FREE_UNKNOWN = 0,
    GDRX_AFTER_FREE_PERSISTENT = 1, /* the old bytes, until the pin is gone */
    GDRX_AFTER_FREE_ALIASED = 2,    /* the next owner's bytes: a small block that shares its memory object */
    GDRX_AFTER_FREE_SIGBUS = 3      /* nothing: access raises SIGBUS */
} gdrx_after_free_t;

typedef struct gdrx_mapping_facts {
    uint64_t window_bytes;           /* address space in use */
    uint64_t pin_ns;                 /* how long pinning took */
    uint64_t map_ns;                 /* how long mapping took */
    gdr_mapping_type_t mapping_type; /* as in gdr_info_t */
    gdrx_after_free_t after_free;
    int post_line_is_atomic; /* 1: gdrx_post_line is one 64-byte write by architecture (MOVDIR64B) */
    int pci_domain;          /* the GPU's PCI address; -1 for an emulated one */
    int pci_bus;
    int pci_device;
    char routine[16]; /* the copy routine that stores whole lines, as in GDRCOPY_COPY */
} gdrx_mapping_facts_t;

/* Reports on a live mapping. Pass sizeof(gdrx_mapping_facts_t): a later library fills as much as there is room for, and
 * zeroes what an earlier one does not know. */
int gdrx_get_mapping_facts(gdr_mh_t handle, gdrx_mapping_facts_t *facts, size_t size);

/* --- Writes without a fence per call ---------------------------------------------------------------------------------- */

/* Stores without a fence. Bytes leave in any order; a line that is partly filled may stay in the CPU until a fence. */
int gdrx_write_posted(gdr_mh_t handle, void *map_d_ptr, const void *from, size_t size);

/* Stores one 64-byte line (`map_d_ptr` a multiple of 64) without a fence; full lines leave at once. */
int gdrx_post_line(gdr_mh_t handle, void *map_d_ptr, const void *line);

/* One store of 4 or 8 bytes (`map_d_ptr` a multiple of that) without a fence: whoever reads sees all of it or nothing. */
int gdrx_store32_posted(gdr_mh_t handle, void *map_d_ptr, uint32_t value);
int gdrx_store64_posted(gdr_mh_t handle, void *map_d_ptr, uint64_t value);

/* Ends a batch of posted writes of this thread, to any mappings: what it writes later is seen after them. Nothing begins a
 * batch: any number of the calls above, then this one. */
void gdrx_fence(void);

/* Data, fence, flag in one store, fence: whoever sees the flag sees the data. `flag_d_ptr` is a multiple of the flag's
 * size; both are in the same mapping. EOPNOTSUPP where the GPU does not order such writes. */
int gdrx_publish32(gdr_mh_t handle, void *data_d_ptr, const void *data, size_t size, void *flag_d_ptr, uint32_t flag);
int gdrx_publish64(gdr_mh_t handle, void *data_d_ptr, const void *data, size_t size, void *flag_d_ptr, uint64_t flag);

/* Returns once this thread's earlier writes through the mapping have arrived at the GPU: one round trip of the bus. It
 * says nothing about the writes of others, such as a NIC's. */
int gdrx_flush(gdr_mh_t handle);

/* --- Copies by several threads ---------------------------------------------------------------------------------------- */

/* One core has so many lines in flight, and no more: 1 KiB of reads in a round trip of the bus on recent Xeons. A copier
 * has threads that share each copy with its caller. They exist only where a program creates them. A thread spins on a CPU
 * of its own for its next share, and sleeps after some time without one; waking it takes longer than many a copy, so a
 * copy is shared among the threads that are awake. A long copy, and the second of a burst, wake the others. */
typedef struct gdrx_copier {
    unsigned long h; /* 0 for none */
} gdrx_copier_t;

/* Creates a copier near the GPU of a live mapping; it serves any mapping. Of its `threads` (1 to 64; 0: as many as gain
 * something and find a CPU, 8 at most) the caller of each copy is one. The others are kept on `cpus`, one each ("8-15" or
 * "3,5", in the notation of /sys); NULL: on those that the calling thread may use, whole cores near the GPU first, but for
 * the one it is on. `spin_us` is how long they spin before they sleep, in microseconds; -1: 40. EINVAL where there are not
 * so many CPUs, or the cpuset of the process does not have one. */
int gdrx_copier_create(gdr_mh_t handle, int threads, const char *cpus, int spin_us, gdrx_copier_t *copier);

/* How many threads share a copy, the caller among them: 1 where no CPU was to be had for another. */
int gdrx_copier_threads(gdrx_copier_t copier, int *threads);

/* Wakes the threads ahead of a copy: one system call for each that sleeps. */
int gdrx_copier_wake(gdrx_copier_t copier);

/* As gdr_copy_to_mapping and gdr_copy_from_mapping in every promise, of order too. Any number of threads may call; one copy
 * at a time has the copier's threads, others are done by their caller alone, and so are small ones. */
int gdrx_copier_write(gdrx_copier_t copier, gdr_mh_t handle, void *map_d_ptr, const void *h_ptr, size_t size);
int gdrx_copier_read(gdrx_copier_t copier, gdr_mh_t handle, void *h_ptr, const void *map_d_ptr, size_t size);

/* Ends the threads. A copier that is not destroyed keeps them until the process ends; gdr_close does not touch it. */
int gdrx_copier_destroy(gdrx_copier_t copier);

/* --- What it costs here ------------------------------------------------------------------------------------------------ */

/* Copying n bytes takes about overhead + n / bytes_per_second. A put counts until it has arrived. */
typedef struct gdrx_cost {
    double put_overhead_ns;
    double put_bytes_per_second;
    double get_overhead_ns;
    double get_bytes_per_second;
} gdrx_cost_t;

/* Measures on 64 KiB of scratch memory of one GPU (`gpu` as in gdrx_alloc), with the calling thread's core, in some
 * milliseconds. Keep the result; pin the thread first where its core matters. */
int gdrx_estimate_cost(gdr_t g, int gpu, gdrx_cost_t *cost);

/* --- The push agent: a block of threads on the GPU that copies ---------------------------------------------------- */

/* Reads faster than a CPU's loads: a kernel that stays on the GPU waits for a doorbell, one line that the CPU stores
 * into GPU memory, and copies between device memory and page-locked host memory at the bus's own speed. It is opt-in,
 * for it takes an SM, and while its kernel runs cudaFree, cudaFreeHost, cudaHostRegister, cudaHostUnregister,
 * cudaDeviceSynchronize and the first launch of a kernel that CUDA has not loaded yet block, in the same process. So
 * the kernel ends by itself without requests (idle_us), and between requests after residency_us; the next request
 * launches it again. EOPNOTSUPP under MPS and on a GPU with a watchdog for kernels.
 *
 * Ordering  A read returns what was fetched after the call began, and sees what the calling thread wrote through a
 *           mapping before. After a write the bytes are in device memory: kernels see them that start later, or that
 *           acquire a flag which is set later. Neither waits for kernels: synchronise with the one that makes the data
 *           first.
 * Errors    EINVAL for arguments, EBUSY for another thread's call, and EACCES in a child change nothing. Any other is
 *           final, ETIMEDOUT where the deadline passed: every later request of the agent returns it. */
typedef struct gdrx_agent {
    unsigned long h; /* 0 for none */
} gdrx_agent_t;

/* Device memory: an address that CUDA or gdrx_alloc gave, or one inside, and bytes. */
typedef struct gdrx_range {
    uint64_t addr;
    size_t size;
} gdrx_range_t;

typedef struct gdrx_agent_options {
    size_t size;          /* sizeof(gdrx_agent_options_t) */
    int gpu;              /* CUDA ordinal of the GPU that all ranges are on */
    int threads;          /* of the block: a multiple of 32 from 64 to 1024; default 256 */
    int ring;             /* doorbells, a power of two from 16 to 1024, half of which can be in flight; default 64 */
    int packet_bytes;     /* reads of up to so many come as packets, without a fence on the GPU: 1 to 1024 (the default);
                           * -1: none */
    int64_t idle_us;      /* the kernel ends after so long without a request; default 200; -1: never */
    int64_t residency_us; /* .. and between two requests after so long in any case; default 10000; -1: never */
    int64_t deadline_us;  /* how long a request may take, and destroying waits; default 1000000 */
    int cpu_stand_in;     /* 1: threads of the CPU play the kernel, on backend "emulated" and nowhere else */
    int unused;           /* 0 */
} gdrx_agent_options_t;

/* Launches the kernel, which reaches these ranges and nothing else. **A range must stay allocated until the agent is
 * destroyed** (memory of gdrx_alloc does, by itself); a read of freed memory ends the CUDA context. */
int gdrx_agent_create(gdr_t g, const gdrx_range_t *ranges, size_t count, const gdrx_agent_options_t *options,
                      gdrx_agent_t *agent);

/* Reads `size` bytes from byte `offset` of range `range` (its place in the list) into any host memory, and writes them
 * from there. The kernel itself does that where it reaches all of the memory: a buffer of gdrx_agent_alloc, or what
 * gdrx_agent_register_host was told of. Otherwise it goes through page-locked memory inside the agent. EINVAL if that
 * reaches past the range. After an error that is final, registered memory is not to be touched until the agent has been
 * destroyed, for the kernel may still be at work on it. */
int gdrx_agent_read(gdrx_agent_t agent, size_t range, size_t offset, void *to, size_t size);
int gdrx_agent_write(gdrx_agent_t agent, size_t range, size_t offset, const void *from, size_t size);

/* Lets the kernel reach page-locked memory that is not the agent's, which saves a copy: that of cudaHostAlloc
 * (cuMemHostAlloc, PyTorch's pinned tensors), or what cudaHostRegister (cuMemHostRegister) has page-locked; any part of
 * it. **It must stay allocated and page-locked until it is taken back**, by its first byte, or the agent is destroyed.
 * EINVAL for memory that is not page-locked, or known already; with cpu_stand_in any memory will do. */
int gdrx_agent_register_host(gdrx_agent_t agent, void *memory, size_t size);
int gdrx_agent_unregister_host(gdrx_agent_t agent, void *memory);

/* Zeroed, page-locked host memory that the kernel itself reads and writes, which saves a copy. Its address names it
 * below. Freed memory is kept for the next gdrx_agent_alloc that it fits, and given back when the agent is destroyed;
 * none of it may be touched after that. EBUSY: a request of it is in flight. */
int gdrx_agent_alloc(gdrx_agent_t agent, size_t size, void **buffer);
int gdrx_agent_free(gdrx_agent_t agent, void *buffer);

/* A piece of a request: any size and alignment; the quickest has the same place in 16 bytes on both sides. */
typedef struct gdrx_segment {
    size_t range;
    size_t offset; /* first byte in the range */
    size_t size;
    size_t at; /* first byte in the host buffer */
} gdrx_segment_t;

/* Reads pieces of ranges into a buffer of gdrx_agent_alloc, or writes them from it, and waits for all of them. The
 * buffer is not to be touched meanwhile. After an error that is final the buffer is lost, for the kernel may still
 * write to it: EINVAL. */
int gdrx_agent_read_into(gdrx_agent_t agent, void *buffer, const gdrx_segment_t *segments, size_t count);
int gdrx_agent_write_from(gdrx_agent_t agent, void *buffer, const gdrx_segment_t *segments, size_t count);

/* The same without waiting: the request is in flight, and the buffer not to be touched, until gdrx_agent_wait. One of
 * each buffer, any number of buffers; served in the order in which they are made; beyond half of the ring the call
 * waits for room. EBUSY: one of this buffer is in flight. */
int gdrx_agent_submit_read(gdrx_agent_t agent, void *buffer, const gdrx_segment_t *segments, size_t count);
int gdrx_agent_submit_write(gdrx_agent_t agent, void *buffer, const gdrx_segment_t *segments, size_t count);

/* Whether the request of this buffer is done, and the end of it. EINVAL if none is in flight. */
int gdrx_agent_is_done(gdrx_agent_t agent, void *buffer, int *done);
int gdrx_agent_wait(gdrx_agent_t agent, void *buffer);

/* *resident: 1 if the kernel is on the GPU now, so that the next request needs no launch. *launches: how many there
 * were. */
int gdrx_agent_state(gdrx_agent_t agent, int *resident, uint64_t *launches);

/* Serves what is in flight, ends the kernel and frees the buffers; gdr_close does it to what is left. ETIMEDOUT, with
 * the memory left allocated for good, if the kernel does not end before the deadline. */
int gdrx_agent_destroy(gdrx_agent_t agent);

/* --- The quickest way at each size -------------------------------------------------------------------------------- */

/* An automatic copier measures, when it is made, what is quickest at each size: the caller's own loads and stores,
 * those of several threads, an agent, or the GPU's copy engine; then it uses that.
 *
 * Ordering  Whatever it uses: a read returns what was fetched after the call began, and sees what this thread wrote to
 *           the buffer before, through any mapping; what this thread writes after a write is seen after it. Neither
 *           waits for kernels. The copy engine's way is a CUDA call. */
typedef struct gdrx_auto {
    unsigned long h; /* 0 for none */
} gdrx_auto_t;

typedef struct gdrx_auto_options {
    size_t size;                       /* sizeof(gdrx_auto_options_t) */
    const gdrx_agent_options_t *agent; /* an agent may be used, with these options, on the buffer's GPU; NULL: none */
    int threads;                       /* of a copier, the caller included: 2 to 64; -1: as many as gain; 0: none */
    int page_locked;                   /* 1: the host memory of the copies is page-locked, and measured so; the agent
                                        * reaches what gdrx_auto_register_host was told of. 0: ordinary memory */
    const char *cpus;                  /* where they are kept, as in gdrx_copier_create */
    size_t largest;                    /* largest size that is measured, at least 64; default 64 MiB */
    uint64_t milliseconds;             /* about how long measuring may take; default 500 */
} gdrx_auto_options_t;

typedef enum gdrx_direction {
    GDRX_HOST_TO_DEVICE = 0,
    GDRX_DEVICE_TO_HOST = 1
} gdrx_direction_t;

/* Makes one for the buffer that gdrx_alloc returned at `addr`, which stays allocated until it is destroyed. */
int gdrx_auto_create(gdr_t g, uint64_t addr, const gdrx_auto_options_t *options, gdrx_auto_t *copier);

/* Copies from and to byte `offset` of the buffer. EINVAL past its end; otherwise what the way it is done returns. */
int gdrx_auto_read(gdrx_auto_t copier, size_t offset, void *to, size_t size);
int gdrx_auto_write(gdrx_auto_t copier, size_t offset, const void *from, size_t size);

/* Lets the copier's agent reach page-locked memory itself, as gdrx_agent_register_host does, and under the same
 * conditions: the memory stays until it is taken back or the copier is destroyed. Without an agent there is nothing to
 * do. */
int gdrx_auto_register_host(gdrx_auto_t copier, void *memory, size_t size);
int gdrx_auto_unregister_host(gdrx_auto_t copier, void *memory);

/* Writes in one line what it does with a copy of `size` bytes, what each way took when it was measured (medians, in
 * nanoseconds), and how order is kept, cut to `room` bytes including the terminating zero. */
int gdrx_auto_explain(gdrx_auto_t copier, gdrx_direction_t direction, size_t size, char *text, size_t room);

/* gdr_close does it to what is left. */
int gdrx_auto_destroy(gdrx_auto_t copier);

/* --- Messages to and from a kernel that runs ---------------------------------------------------------------------- */

/* A channel has two rings of 64-byte lines: one in GPU memory, which the CPU writes with one store for each line, and
 * one in page-locked host memory, which the kernel writes. No CUDA call is made between the kernel's launch and its
 * end. The kernel's side is gdrcopy_channel.cuh, which says how lines look and how messages are made of them: a line
 * carries 48 bytes; a message of a number of lines that both sides know is sent and received line by line
 * (gdrc_recv_lines, gdrc_send_lines there); a message of any length carries its length (gdrx_channel_send and
 * gdrc_recv, gdrc_send and gdrx_channel_recv). None is lost, sent twice, torn or out of order.
 *
 * Timeouts  in microseconds. 0: EAGAIN at once if there is no room, or no message. Otherwise ETIMEDOUT once it has
 *           passed, and nothing was sent or received. EPIPE if the kernel has ended. Neither these nor
 *           success cost an allocation, and calls that do not wait make no system call (but for a thread's first). One
 *           that waits spins, and from about 100 us on yields the processor between two rounds of looks.
 * Ordering  Messages order nothing else: data that one refers to is written with gdr_copy_to_mapping, which fences,
 *           before it is sent, and a kernel puts __threadfence_system() before its own.
 * Needs     AVX; and, where GPU memory is mapped write-combined, AVX-512 or MOVDIR64B: EOPNOTSUPP. */
typedef struct gdrx_channel {
    unsigned long h; /* 0 for none */
} gdrx_channel_t;

typedef enum gdrx_placement {
    GDRX_RING_IN_GPU_MEMORY = 0,
    GDRX_RING_IN_HOST_MEMORY = 1 /* the ring to the GPU too: the kernel polls it over the bus. For comparison: slower */
} gdrx_placement_t;

typedef struct gdrx_channel_options {
    size_t size;              /* sizeof(gdrx_channel_options_t) */
    int gpu;                  /* as in gdrx_alloc */
    uint32_t lines_to_gpu;    /* powers of two, 32 to 1048576; default 1024 */
    uint32_t lines_to_host;
    uint32_t readers;         /* warps that receive, 32 lines each in turn; default 1. For more, single lines only */
    int placement;            /* a gdrx_placement_t */
    int unused;               /* 0 */
    uint64_t kernel_limit_ms; /* the kernel ends by itself so long after its start; default 10000 */
} gdrx_channel_options_t;

/* Makes one, before the kernel is launched. */
int gdrx_channel_create(gdr_t g, const gdrx_channel_options_t *options, gdrx_channel_t *channel);

/* Writes what the kernel takes by value, a struct gdrc_channel, to `device`. `size` is its sizeof, GDRX_CHANNEL_BYTES;
 * EINVAL for another, which a header of another library would have. */
#define GDRX_CHANNEL_BYTES 80
int gdrx_channel_device(gdrx_channel_t channel, void *device, size_t size);

/* Sends 48 bytes. */
int gdrx_channel_send_line(gdrx_channel_t channel, const void *line, uint64_t timeout_us);

/* Sends as many of `count` lines of 48 bytes, from the first on, as there is room for now: *sent. EAGAIN if none. */
int gdrx_channel_send_lines(gdrx_channel_t channel, const void *lines, size_t count, size_t *sent);

/* Sends a message with its length, whole or not at all. EINVAL if it takes more than half of the ring. */
int gdrx_channel_send(gdrx_channel_t channel, const void *message, size_t size, uint64_t timeout_us);

/* How many lines there is room for now. */
int gdrx_channel_free_lines(gdrx_channel_t channel, uint32_t *lines);

/* Receives 48 bytes. */
int gdrx_channel_recv_line(gdrx_channel_t channel, void *line, uint64_t timeout_us);

/* Receives as many lines as are there now, `count` at most: *received. EAGAIN if none. */
int gdrx_channel_recv_lines(gdrx_channel_t channel, void *lines, size_t count, size_t *received);

/* Receives a message with its length, *size. EINVAL if it is longer than `room`: it stays. EPROTO for what is no
 * message. */
int gdrx_channel_recv(gdrx_channel_t channel, void *to, size_t room, size_t *size, uint64_t timeout_us);

/* Asks the kernel to end, which it does within about a millisecond while it waits. Who waits for it gets EPIPE. */
int gdrx_channel_stop(gdrx_channel_t channel);

/* What the kernel reported last. */
typedef enum gdrx_kernel_state {
    GDRX_KERNEL_NOT_STARTED = 0,
    GDRX_KERNEL_RUNS = 1,
    GDRX_KERNEL_ENDED = 2
} gdrx_kernel_state_t;
int gdrx_channel_kernel(gdrx_channel_t channel, gdrx_kernel_state_t *state);

/* Asks the kernel to end and frees the memory, which waits for the kernel; gdr_close does it to what is left. After EBUSY
 * all is as it was, but that the kernel was asked. */
int gdrx_channel_destroy(gdrx_channel_t channel);

/* Questions to a kernel, with a deadline: a channel of its own. The kernel receives each request with gdrc_recv_lines
 * and answers each, in order, with gdrc_send_lines; sizes in bytes are fixed, and fill (size + 47) / 48 lines, at least
 * one. */
typedef struct gdrx_mailbox {
    unsigned long h; /* 0 for none */
} gdrx_mailbox_t;

/* EINVAL for sizes that take more than half of a ring, and for more than 1 reader. */
int gdrx_mailbox_create(gdr_t g, const gdrx_channel_options_t *options, size_t request_size, size_t response_size,
                        gdrx_mailbox_t *mailbox);
int gdrx_mailbox_device(gdrx_mailbox_t mailbox, void *device, size_t size);

/* Asks and waits for the answer, about `timeout_us` microseconds at most for room and as long for the answer. ETIMEDOUT:
 * the request found no room, or its answer did not come; that one is dropped when it comes, and no later call is given
 * it. EPIPE: the kernel has ended without answering. *response is undefined then. */
int gdrx_mailbox_call(gdrx_mailbox_t mailbox, const void *request, void *response, uint64_t timeout_us);

/* Answers that are owed to calls which timed out. */
int gdrx_mailbox_late(gdrx_mailbox_t mailbox, uint64_t *count);

/* As those of a channel. */
int gdrx_mailbox_stop(gdrx_mailbox_t mailbox);
int gdrx_mailbox_kernel(gdrx_mailbox_t mailbox, gdrx_kernel_state_t *state);
int gdrx_mailbox_destroy(gdrx_mailbox_t mailbox);

/* A value in GPU memory that the CPU keeps replacing, and of which a kernel sees the newest, never a mix of two,
 * whenever it looks (gdrc_latest_read). At most 768 KiB; kernels catch values of one line, 48 bytes, best. */
typedef struct gdrx_latest {
    unsigned long h; /* 0 for none */
} gdrx_latest_t;

/* `gpu` as in gdrx_alloc. `first`, `size` bytes, has arrived on return. */
int gdrx_latest_create(gdr_t g, int gpu, const void *first, size_t size, gdrx_latest_t *latest);

/* Writes what the kernel takes by value, a struct gdrc_latest, to `device`; `size` is its sizeof, GDRX_LATEST_BYTES. */
#define GDRX_LATEST_BYTES 16
int gdrx_latest_device(gdrx_latest_t latest, void *device, size_t size);

/* Replaces it, by as many bytes: one store for each line, without a fence and without waiting for anybody. */
int gdrx_latest_set(gdrx_latest_t latest, const void *value);

/* Takes the memory away, and does not wait for kernels: end those that read it first. gdr_close does it to what is
 * left. */
int gdrx_latest_destroy(gdrx_latest_t latest);

#ifdef __cplusplus
}
#endif

#endif /* GDRAPI_EXT_H */
