/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * gdrapi.h - CPU access to NVIDIA GPU memory through PCIe BAR1.
 *
 * Names, types and values are those of libgdrapi 2.6, so that its clients build and run unmodified. What this library
 * adds is in gdrapi_ext.h. Link with -lgdrapi, or dlopen "libgdrapi.so.2"; no other library is needed.
 *
 *     gdr_t g = gdr_open();                                      once per process
 *     gdr_pin_buffer(g, addr, size, 0, 0, &mh);                  addr from cudaMalloc, on a 64 KiB page
 *     gdr_map(g, mh, &ptr, size);
 *     gdr_copy_to_mapping(mh, ptr, host, bytes);                 any number of these, from any thread
 *     gdr_unmap(g, mh, ptr, size);  gdr_unpin_buffer(g, mh);  gdr_close(g);
 *
 * Errors      Calls return 0, or a positive errno value, and then have zeroed their outputs. Nothing is printed unless
 *             GDRCOPY_ENABLE_LOGGING is set. gdrx_last_error() in gdrapi_ext.h says in words what was wrong. A handle
 *             that was never made, that was given up (also by another thread, also twice) or that belongs to another
 *             gdr_t is EINVAL; it is never dereferenced. Where more than one thing is wrong any one is reported.
 * Units       Sizes and addresses are in bytes. Pins are counted in pages of 64 KiB, whatever the backend does.
 * Threads     Every call may be made from any thread at any time. Calls on one handle wait for each other, except the
 *             copies, which take no lock, make no system call and allocate nothing (but for a thread's first copy, which
 *             enters the thread in a list). A copy that meets an unmap of its own handle finishes on the old mapping or
 *             returns EINVAL.
 * Ordering    Mappings are write-combined: plain stores through the pointer leave the CPU in any order, and stay in it
 *             for an unbounded time without a store fence (x86: SFENCE). gdr_copy_to_mapping ends with one: what the
 *             thread writes after it returned is seen after its bytes. gdr_copy_from_mapping returns bytes that were
 *             fetched from the GPU after the call began; lines of one call are fetched in any order. 1, 2, 4 or 8 bytes,
 *             naturally aligned on the device side, are one access of that width, and do not tear.
 * Fork        A child inherits no mapping. There, calls on the parent's handles return EACCES and touch nothing of the
 *             parent's; gdr_open gives the child handles of its own.
 * Lifetime    *The memory must stay allocated while it is mapped.* CUDA hands small freed blocks out again: an old
 *             mapping would show, and change, the next owner's bytes. Objects may be given up in any order; what is
 *             left goes with gdr_close. No call of a teardown calls CUDA, but to free and end what
 *             gdrapi_ext.h made: device memory, agents, channels.
 *
 * Environment, read by gdr_open (an unknown value makes it fail):
 *   GDRCOPY_BACKEND          the backend to use; by default the best that works: see README
 *   GDRCOPY_RM               off, vmm (default) or ipc: what backend rm may map; cudaMalloc memory needs ipc
 *   GDRCOPY_COPY             the copy routine: scalar, sse41, avx2, avx512, movdir64b
 *   GDRCOPY_POLICY           a file that a calibration wrote: the copy routine by size, unless GDRCOPY_COPY names one
 *   GDRCOPY_USE_DMABUF_MMAP  1: not through the kernel module; EINVAL together with another GDRCOPY_BACKEND
 *   GDRCOPY_ENABLE_LOGGING   1: messages on standard error, from GDRCOPY_LOG_LEVEL up: 0 or trace, 1 or debug,
 *                            2 or info, 3 or warn, 4 or error (default)
 */
#ifndef GDRAPI_H
#define GDRAPI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. */
#define GDR_API_MAJOR_VERSION 2
#define GDR_API_MINOR_VERSION 6
#define GDR_API_VERSION ((GDR_API_MAJOR_VERSION << 16) | GDR_API_MINOR_VERSION)

/* The oldest kernel module that the library works with, where one is used. */
#define MINIMUM_GDRDRV_MAJOR_VERSION 2
#define MINIMUM_GDRDRV_MINOR_VERSION 0
#define MINIMUM_GDRDRV_VERSION ((MINIMUM_GDRDRV_MAJOR_VERSION << 16) | MINIMUM_GDRDRV_MINOR_VERSION)

/* The page in which pins are counted. */
#define GPU_PAGE_SHIFT 16
#define GPU_PAGE_SIZE (1UL << GPU_PAGE_SHIFT)
#define GPU_PAGE_OFFSET (GPU_PAGE_SIZE - 1)
#define GPU_PAGE_MASK (~GPU_PAGE_OFFSET)

/* An open session; NULL is none. */
struct gdr;
typedef struct gdr *gdr_t;

/* A pin. `h` is never 0 for a live one; beyond that its value has no meaning. */
typedef struct gdr_mh_s {
    unsigned long h;
} gdr_mh_t;

/* How the CPU caches a mapping. */
typedef enum gdr_mapping_type {
    GDR_MAPPING_TYPE_NONE = 0,    /* not mapped */
    GDR_MAPPING_TYPE_WC = 1,      /* write-combined: BAR1 on x86 */
    GDR_MAPPING_TYPE_CACHING = 2, /* cached: coherent links, and backend emulated */
    GDR_MAPPING_TYPE_DEVICE = 3   /* uncached, aligned accesses only: some Arm machines */
} gdr_mapping_type_t;

/* What gdr_get_info_v2 reports. */
struct gdr_info_v2 {
    uint64_t va;            /* device address of the first page: the pinned address rounded down to 64 KiB */
    uint64_t mapped_size;   /* length of the pages that hold the pinned bytes */
    uint32_t page_size;     /* GPU_PAGE_SIZE */
    uint64_t tm_cycles;     /* how long mapping took, in cycles of a clock .. */
    uint32_t cycles_per_ms; /* .. with so many cycles per millisecond */
    unsigned mapped : 1;    /* 1 while mapped */
    unsigned wc_mapping : 1;         /* 1 while mapped write-combined */
    gdr_mapping_type_t mapping_type; /* absent before 2.4 */
};
typedef struct gdr_info_v2 gdr_info_v2_t;
typedef gdr_info_v2_t gdr_info_t;

/* Flags of gdr_pin_buffer_v2. */
typedef enum gdr_pin_flags {
    GDR_PIN_FLAG_DEFAULT = 0,
    GDR_PIN_FLAG_FORCE_PCIE = 1 /* over PCIe also where a coherent link is there; EINVAL where not supported */
} gdr_pin_flags_t;

/* Flags of gdr_map_v2. */
typedef enum gdr_map_flags {
    GDR_MAP_FLAG_DEFAULT = 0 /* the type that the backend chooses */
} gdr_map_flags_t;

/* Properties that gdr_get_attribute reports. */
typedef enum gdr_attr {
    GDR_ATTR_USE_PERSISTENT_MAPPING = 1,       /* 1: memory stays alive while it is pinned, also when freed */
    GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE = 2,  /* 1: the pin flag works on this machine */
    GDR_ATTR_USING_DMA_BUF_MMAP = 3            /* 1: mapped through dma-buf, without a kernel module of its own */
} gdr_attr_t;

/* Opens a session. NULL if no backend works here (gdrx_last_error() says why of each). Several may be open. */
gdr_t gdr_open(void);

/* Unmaps and unpins what is left and closes. It carries on past failures and returns the first.
 * EINVAL; EACCES in a child; or what the driver reported, with the session closed all the same. */
int gdr_close(gdr_t g);

/* Pins the 64 KiB pages around `size` bytes at the device address `addr`: any address, any size from 1. Pins of one page
 * are independent of each other. `p2p_token` and `va_space` must be 0 where pins are persistent.
 * EINVAL: size 0, not device memory, tokens; EOPNOTSUPP: a kind of memory that the backend cannot map; ENOMEM; EACCES. */
int gdr_pin_buffer(gdr_t g, unsigned long addr, size_t size, uint64_t p2p_token, uint32_t va_space, gdr_mh_t *handle);

/* The same with flags in place of tokens. Unsupported flags are EINVAL and leave nothing behind: retry with 0. */
int gdr_pin_buffer_v2(gdr_t g, unsigned long addr, size_t size, uint32_t flags, gdr_mh_t *handle);

/* Lets go of a pin; a mapping of it goes first. EINVAL; EACCES in a child. */
int gdr_unpin_buffer(gdr_t g, gdr_mh_t handle);

/* Sets *flag to 1 if the driver took the memory away because it was freed; always 0 where pins are persistent. */
int gdr_get_callback_flag(gdr_t g, gdr_mh_t handle, int *flag);

/* Reports on a pin, mapped or not: see struct gdr_info_v2. Programs built against headers older than 2.4 call a function
 * named gdr_get_info, which the library has too and which writes the first 40 bytes only. */
int gdr_get_info_v2(gdr_t g, gdr_mh_t handle, gdr_info_t *info);
#define gdr_get_info gdr_get_info_v2

/* Maps `size` bytes, rounded up to host pages, from the pin's first page on; *va is where. The mapping belongs to `addr`
 * only if that is on a 64 KiB page, so other pins are refused here; gdrx_map takes them.
 * EINVAL: such a pin, size 0 or larger than the pin; EAGAIN: mapped already; ENOMEM: BAR1 or address space is full. */
int gdr_map(gdr_t g, gdr_mh_t handle, void **va, size_t size);

/* The same with flags (gdr_map_flags_t); unsupported ones are EINVAL. */
int gdr_map_v2(gdr_t g, gdr_mh_t handle, void **va, size_t size, int flags);

/* Unmaps the pin's mapping, all of it. `va` and `size` are not looked at: known programs pass the device address.
 * EINVAL if not mapped. */
int gdr_unmap(gdr_t g, gdr_mh_t handle, void *va, size_t size);

/* Copies `size` bytes of host memory to `map_d_ptr`, any address inside the mapping, at any alignment of both; each byte
 * is stored once. 0 bytes are no access. EINVAL: not mapped, or not inside the mapping; nothing was written then. */
int gdr_copy_to_mapping(gdr_mh_t handle, void *map_d_ptr, const void *h_ptr, size_t size);

/* Copies `size` bytes from `map_d_ptr` to host memory; otherwise the same. Reads of BAR1 are slow: a round trip of the
 * bus, about a microsecond, for each few lines. */
int gdr_copy_from_mapping(gdr_mh_t handle, void *h_ptr, const void *map_d_ptr, size_t size);

/* The version of the library: at least that of the header. Works without gdr_open. NULL pointers are skipped. */
void gdr_runtime_get_version(int *major, int *minor);

/* The version of the kernel module in use; that of the library on backends without one. */
int gdr_driver_get_version(gdr_t g, int *major, int *minor);

/* Sets *v to a property of the open session. EINVAL for an unknown one, with *v = 0. */
int gdr_get_attribute(gdr_t g, gdr_attr_t attr, int *v);

/* "NONE", "WC", "CACHING", "DEVICE" or "UNKNOWN"; never NULL, never freed. */
const char *gdr_get_mapping_type_string(gdr_mapping_type_t mapping_type);

#ifdef __cplusplus
}
#endif

#endif /* GDRAPI_H */
