/* Device memory: frames of one file, and device addresses that lead to them. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DEFAULT_BYTES ((size_t)4 << 30)
#define DEFAULT_VA 0x7e0000000000ULL

static struct {
	bool started;
	pid_t owner;
	int fd;
	unsigned char *bytes;
	uint64_t va;
	int gpus;
	size_t frames; /* of the file, and of device addresses */
	struct slot *slots;
	bool *used; /* frames of the file */
	struct block *blocks;
	uint64_t last_id;
} memory;

/* Raw calls: the functions of these names are interposed in this very object. */
static int memory_open(void)
{
	const char *path = getenv("GDRCOPY_STANDIN_MEMORY");

	if (!path)
		return memfd_create("standin-memory", MFD_CLOEXEC);
	return (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

bool memory_start(void)
{
	const char *va = getenv("GDRCOPY_STANDIN_VA"), *gpus = getenv("GDRCOPY_STANDIN_GPUS");
	struct stat stat;
	size_t size;

	if (memory.started)
		return true;
	memory.va = va ? strtoull(va, NULL, 0) : DEFAULT_VA;
	memory.gpus = gpus ? atoi(gpus) : 1;
	memory.fd = memory_open();
	if (memory.fd < 0 || fstat(memory.fd, &stat) < 0 || memory.gpus < 0 || memory.gpus > MAX_GPUS)
		return false;
	size = (size_t)stat.st_size;
	if (size == 0) {
		size = DEFAULT_BYTES;
		if (ftruncate(memory.fd, (off_t)size) < 0)
			return false;
	}
	memory.bytes = (void *)syscall(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
	if (memory.bytes == MAP_FAILED)
		return false;
	memory.frames = size / FRAME;
	memory.slots = calloc(memory.frames, sizeof(*memory.slots));
	memory.used = calloc(memory.frames, sizeof(*memory.used));
	memory.owner = getpid();
	memory.started = memory.slots && memory.used;
	return memory.started;
}

bool memory_foreign(void)
{
	return memory.started && memory.owner != getpid();
}

int memory_fd(void)
{
	return memory.fd;
}

int memory_gpus(void)
{
	return memory.gpus;
}

size_t memory_device_bytes(void)
{
	return memory.frames / (size_t)memory.gpus * FRAME;
}

static uint64_t slot_va(size_t number)
{
	return memory.va + number * FRAME;
}

struct slot *memory_slot(uint64_t va)
{
	if (va < memory.va || (va - memory.va) / FRAME >= memory.frames)
		return NULL;
	return &memory.slots[(va - memory.va) / FRAME];
}

struct block *memory_block(uint64_t va)
{
	for (struct block *block = memory.blocks; block; block = block->next)
		if (va >= block->base && va - block->base < block->bytes)
			return block;
	return NULL;
}

unsigned char *memory_at(uint64_t va, size_t *run)
{
	struct block *block = memory_block(va);
	struct slot *slot = memory_slot(va);
	size_t in_frame = (va - memory.va) % FRAME;

	if (!block || !block->accessible || !slot->object)
		return NULL;
	*run = block->base + block->bytes - va;
	if (*run > FRAME - in_frame)
		*run = FRAME - in_frame;
	return memory.bytes + ((size_t)slot->object->first + slot->index) * FRAME + in_frame;
}

/* The first of `count` frames that `busy` says are free, in the device's share; -1 where there are none. */
static ssize_t first_fit(int device, size_t count, bool (*busy)(size_t))
{
	size_t share = memory.frames / (size_t)memory.gpus, run = 0;
	size_t start = share * (size_t)device;

	for (size_t at = start; at < start + share; at++) {
		run = busy(at) ? 0 : run + 1;
		if (run == count)
			return (ssize_t)(at + 1 - count);
	}
	return -1;
}

static bool slot_busy(size_t number)
{
	/* Beside the real module memory lies where its address says: what a pin may still hold is not given out again. */
	if (memory.slots[number].spent && getenv("GDRCOPY_STANDIN_FREE"))
		return true;
	return memory.slots[number].taken;
}

static bool frame_busy(size_t number)
{
	return memory.used[number];
}

static void forget(struct slot *slot, size_t frames)
{
	for (size_t at = 0; at < frames; at++)
		slot[at] = (struct slot){ .spent = true };
}

/* Finds memory for an object: where the address says, so that a provider that knows addresses alone finds it too. */
static bool bind(struct object *object, size_t preferred)
{
	bool fits = preferred + object->frames <= memory.frames;

	if (object->first >= 0)
		return true;
	for (size_t at = 0; fits && at < object->frames; at++)
		fits = !memory.used[preferred + at];
	object->first = fits ? (ssize_t)preferred : first_fit(object->device, object->frames, frame_busy);
	for (size_t at = 0; object->first >= 0 && at < object->frames; at++)
		memory.used[(size_t)object->first + at] = true;
	return object->first >= 0;
}

struct object *memory_object(int device, size_t frames, bool rdma, unsigned handle_types)
{
	struct object *object = calloc(1, sizeof(*object));

	if (object)
		*object = (struct object){ .device = device, .frames = frames, .first = -1, .vmm = true, .rdma = rdma,
					   .handle_types = handle_types, .handles = 1 };
	return object;
}

void memory_settle(struct object *object)
{
	if (object->handles || object->maps || object->pins)
		return;
	if (object->first >= 0) {
		size_t at = (size_t)object->first;

		memset(&memory.used[at], 0, object->frames * sizeof(*memory.used));
		/* A device's own memory cannot be punched; then the old bytes stay, as on a GPU. */
		fallocate(memory.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(at * FRAME),
			  (off_t)(object->frames * FRAME));
	}
	free(object);
}

static struct block *block_add(uint64_t base, size_t bytes, enum kind kind, int device, bool accessible)
{
	struct block *block = calloc(1, sizeof(*block));

	if (!block)
		return NULL;
	*block = (struct block){ base, bytes, ++memory.last_id, kind, device, accessible, memory.blocks };
	memory.blocks = block;
	return block;
}

static void block_remove(struct block *gone)
{
	struct block **at = &memory.blocks;

	while (*at != gone)
		at = &(*at)->next;
	*at = gone->next;
	free(gone);
}

/* Shows `frames` frames of the object at a slot. */
static void show(struct slot *slot, size_t frames, struct object *object, size_t index)
{
	for (size_t at = 0; at < frames; at++) {
		slot[at].object = object;
		slot[at].index = index + at;
	}
	object->maps++;
}

static void take(struct slot *slot, size_t frames, uint64_t base, bool small)
{
	for (size_t at = 0; at < frames; at++)
		slot[at] = (struct slot){ .taken = true, .small = small, .base = base, .bytes = frames * FRAME };
}

/* Takes the memory from the addresses. */
static void hide(uint64_t va, size_t frames)
{
	struct slot *slot = memory_slot(va);
	struct object *object = slot->object;

	gdrdrv_freed(va, frames * FRAME);
	for (size_t at = 0; at < frames; at++)
		slot[at].object = NULL;
	object->maps--;
	memory_settle(object);
}

/* Addresses with memory of their own; 0 where there are none. */
static uint64_t frames_allocate(int device, size_t frames, enum kind kind, bool small)
{
	ssize_t number = first_fit(device, frames, slot_busy);
	struct object *object;
	struct slot *slot;

	if (number < 0)
		return 0;
	object = memory_object(device, frames, kind == KIND_DEVICE, 0);
	if (!object)
		return 0;
	object->vmm = false;
	object->handles = 0;
	if (!bind(object, (size_t)number)) {
		free(object);
		return 0;
	}
	slot = &memory.slots[number];
	take(slot, frames, slot_va((size_t)number), small);
	show(slot, frames, object, 0);
	return slot->base;
}

/* Room for a small block between those of a frame; 0 where it is full. */
static uint64_t small_fit(uint64_t frame, size_t bytes)
{
	uint64_t at = frame;

	while (at + bytes <= frame + FRAME) {
		struct block *block, *in_way = NULL;

		for (block = memory.blocks; block; block = block->next)
			if (block->base < at + bytes && at < block->base + block->bytes)
				in_way = block;
		if (!in_way)
			return at;
		at = (in_way->base + in_way->bytes + SMALL - 1) / SMALL * SMALL;
	}
	return 0;
}

uint64_t memory_allocate(int device, size_t bytes, enum kind kind)
{
	size_t frames = bytes / FRAME + (bytes % FRAME != 0), share = memory.frames / (size_t)memory.gpus;
	bool small = kind == KIND_DEVICE && bytes < FRAME;
	uint64_t va = 0;

	for (size_t at = share * (size_t)device; small && !va && at < share * (size_t)(device + 1); at++)
		if (memory.slots[at].small)
			va = small_fit(slot_va(at), bytes);
	if (!va)
		va = frames_allocate(device, frames, kind, small);
	if (!va || !block_add(va, bytes, kind, device, true))
		return 0;
	return va;
}

static bool frame_empty(uint64_t frame)
{
	for (struct block *block = memory.blocks; block; block = block->next)
		if (block->base >= frame && block->base < frame + FRAME)
			return false;
	return true;
}

bool memory_free(uint64_t va)
{
	struct block *block = memory_block(va);
	struct slot *slot = memory_slot(va);
	uint64_t base;
	size_t frames;

	if (!block || block->base != va || block->kind == KIND_VMM)
		return false;
	block_remove(block);
	/* CUDA keeps a frame of small blocks while one of them lives: the module hears nothing of the others. */
	if (slot->small && !frame_empty(slot->base))
		return true;
	base = slot->base;
	frames = slot->bytes / FRAME;
	hide(base, frames);
	forget(&memory.slots[(base - memory.va) / FRAME], frames);
	return true;
}

void memory_reset(int device)
{
	struct block *block = memory.blocks;

	while (block) {
		if (block->device == device && block->kind != KIND_VMM) {
			memory_free(block->base);
			block = memory.blocks;
		} else {
			block = block->next;
		}
	}
}

uint64_t memory_reserve(int device, size_t bytes)
{
	ssize_t number = bytes % FRAME ? -1 : first_fit(device, bytes / FRAME, slot_busy);

	if (number < 0 || bytes == 0)
		return 0;
	take(&memory.slots[number], bytes / FRAME, slot_va((size_t)number), false);
	return slot_va((size_t)number);
}

/* The slots of a whole number of frames inside one reservation; NULL where there is no such thing. */
static struct slot *reserved(uint64_t va, size_t bytes)
{
	struct slot *slot = memory_slot(va);

	if (!slot || !slot->taken || va % FRAME || bytes == 0 || bytes % FRAME)
		return NULL;
	return va + bytes <= slot->base + slot->bytes ? slot : NULL;
}

bool memory_unreserve(uint64_t va, size_t bytes)
{
	struct slot *slot = reserved(va, bytes);

	if (!slot || slot->base != va || slot->bytes != bytes)
		return false;
	for (size_t at = 0; at < bytes / FRAME; at++)
		if (slot[at].object)
			return false;
	forget(slot, bytes / FRAME);
	return true;
}

bool memory_map(uint64_t va, size_t bytes, size_t offset, struct object *object)
{
	struct slot *slot = reserved(va, bytes);

	if (!slot || offset % FRAME || offset / FRAME + bytes / FRAME > object->frames)
		return false;
	for (size_t at = 0; at < bytes / FRAME; at++)
		if (slot[at].object)
			return false;
	if (!bind(object, (size_t)(slot - memory.slots)) || !block_add(va, bytes, KIND_VMM, object->device, false))
		return false;
	show(slot, bytes / FRAME, object, offset / FRAME);
	return true;
}

bool memory_unmap(uint64_t va, size_t bytes)
{
	struct block *block = memory_block(va);

	if (!block || block->base != va || block->bytes != bytes || block->kind != KIND_VMM)
		return false;
	block_remove(block);
	hide(va, bytes / FRAME);
	return true;
}
