/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * gdrapi_ext.h - what this library adds to gdrapi.h. Everything here begins with gdrx_ or GDRX_.
 *
 * Conventions, thread safety and fork behaviour are those of gdrapi.h. A program that dlopens the library can tell by
 * dlsym("gdrx_last_error") whether it found this one.
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
    GDRX_ERROR_INTERNAL = 18        /* a bug in this library */
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

/* Frees it. Unpin it first. As cudaFree it waits for kernels that run. */
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

#ifdef __cplusplus
}
#endif

#endif /* GDRAPI_EXT_H */
