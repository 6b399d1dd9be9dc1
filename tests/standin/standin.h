/*
 * A GPU without a GPU: a stand-in libcuda.so.1 whose device memory is a file, and, preloaded, a stand-in for
 * /dev/gdrdrv that makes the same file's bytes appear where a program maps them.
 *
 *   memory.c   device memory: frames of the file, device addresses, blocks
 *   cuda*.c    the calls of the CUDA driver API that the library makes
 *   module.c   the module behind the node: its calls, its pins
 *   windows.c  address space that shows pins: open, ioctl, mmap, munmap and close of the program
 *
 * Environment:
 *   GDRCOPY_STANDIN_MEMORY      file that is the device memory (a memfd where unset)
 *   GDRCOPY_STANDIN_VA          first device address (0x7e0000000000)
 *   GDRCOPY_STANDIN_GPUS        number of GPUs, which share the file (1)
 *   GDRCOPY_STANDIN_WATCHDOG    1: kernels have a time limit
 *   GDRCOPY_STANDIN_MPS         1: the process runs under MPS; "unknown": the driver does not know that attribute
 *   GDRCOPY_STANDIN_VERSION     version of the module, "2.6"; the real device is used where unset
 *   GDRCOPY_STANDIN_MINIMUM     lowest API version the module supports ("2.0")
 *   GDRCOPY_STANDIN_PERSISTENT  1: pinned memory outlives its allocation
 *   GDRCOPY_STANDIN_FAULT       "CALL:ERRNO": every call of this name fails so (names as in the log)
 *   GDRCOPY_STANDIN_MAJORS      "240,239": major numbers, as the kernel lists the module and of the node
 *   GDRCOPY_STANDIN_LOG         file to which each call on the node adds a line
 *   GDRCOPY_STANDIN_FREE        file to which "ADDRESS LENGTH" of freed memory is written, in hex (the real
 *                               module's provider); freed addresses are not given out again then
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Only the calls of the CUDA driver and the interposed functions are visible. */
#define EXPORT __attribute__((visibility("default")))

/* What CUDA backs with one memory object, and the granularity of its virtual memory management. */
#define FRAME ((size_t)2 << 20)
/* CUDA places small blocks at multiples of this. */
#define SMALL ((size_t)512)
/* The GPU's page, in units of which the module pins. */
#define GPU_PAGE ((size_t)64 << 10)
#define MAX_GPUS 8

/* Physical memory: frames of the file that follow each other. */
struct object {
	int device;
	size_t frames;
	ssize_t first; /* frame of the file; -1 until the memory is first mapped */
	bool vmm, rdma;
	unsigned handle_types;
	unsigned handles, maps, pins; /* what keeps it */
};

enum kind { KIND_DEVICE, KIND_MANAGED, KIND_POOL, KIND_VMM };

/* An allocation, or a mapping of virtual memory management. */
struct block {
	uint64_t base;
	size_t bytes;
	uint64_t id; /* never used twice */
	enum kind kind;
	int device;
	bool accessible;
	struct block *next;
};

/* A frame of device addresses. */
struct slot {
	struct object *object; /* what it shows */
	size_t index;	       /* which frame of it */
	bool spent; /* had memory once */
	bool taken;	       /* allocated or reserved */
	bool small;	       /* cut into small blocks */
	uint64_t base;	       /* of the whole allocation or reservation */
	size_t bytes;
};

/* lock.c */
void standin_enter(void);
void standin_leave(void);

/* memory.c. All under the lock, after memory_start succeeded. */
bool memory_start(void);
/* Whether the caller is a forked child, in which CUDA does not work and no page of the parent's may be touched. */
bool memory_foreign(void);
int memory_fd(void);
int memory_gpus(void);
size_t memory_device_bytes(void);
struct slot *memory_slot(uint64_t va);
struct block *memory_block(uint64_t va);
/* The bytes at `va` as this process sees them, and in `*run` how many follow; NULL where there is no such memory. */
unsigned char *memory_at(uint64_t va, size_t *run);
uint64_t memory_allocate(int device, size_t bytes, enum kind kind);
bool memory_free(uint64_t va);
/* Frees what cuMemAlloc gave out on a device, as the end of its primary context does. */
void memory_reset(int device);
uint64_t memory_reserve(int device, size_t bytes);
bool memory_unreserve(uint64_t va, size_t bytes);
bool memory_map(uint64_t va, size_t bytes, size_t offset, struct object *object);
bool memory_unmap(uint64_t va, size_t bytes);
struct object *memory_object(int device, size_t frames, bool rdma, unsigned handle_types);
/* Gives the memory back once nothing keeps it. */
void memory_settle(struct object *object);

/* module.c: device addresses are about to lose their memory. */
void gdrdrv_freed(uint64_t va, size_t bytes);
bool gdrdrv_is_emulated(void);

#endif
