/* Calls of the CUDA driver API: pointers, allocation, host memory, copies. */
#define _GNU_SOURCE
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

/* Page-locked host memory. */
struct host {
	unsigned char *bytes;
	size_t len;
	struct host *next;
};
static struct host *hosts;

static bool is_host(uint64_t pointer)
{
	for (struct host *host = hosts; host; host = host->next)
		if (pointer >= (uintptr_t)host->bytes && pointer - (uintptr_t)host->bytes < host->len)
			return true;
	return false;
}

/* One attribute of a pointer; of one that CUDA does not know all are 0. */
static CUresult attribute(int which, void *data, uint64_t pointer)
{
	enum {
		CONTEXT = 1,
		MEMORY_TYPE = 2,
		BUFFER_ID = 7,
		IS_MANAGED = 8,
		DEVICE_ORDINAL = 9,
		RANGE_START = 11,
		RANGE_SIZE = 12,
		MEMPOOL_HANDLE = 17,
		MAPPING_SIZE = 18,
		MAPPING_BASE = 19,
	};
	struct block *block = memory_block(pointer);
	struct slot *slot = block ? memory_slot(pointer) : NULL;
	bool vmm = block && block->kind == KIND_VMM;

	switch (which) {
	case CONTEXT:
		*(void **)data = block && !vmm ? &cuda_contexts[block->device] : NULL;
		return SUCCESS;
	case MEMORY_TYPE:
		*(unsigned *)data = block ? 2 : is_host(pointer) ? 1 : 0;
		return SUCCESS;
	case BUFFER_ID:
		*(uint64_t *)data = block ? block->id : 0;
		return SUCCESS;
	case IS_MANAGED:
		*(unsigned *)data = block && block->kind == KIND_MANAGED;
		return SUCCESS;
	case DEVICE_ORDINAL:
		*(int *)data = block ? block->device : -2;
		return SUCCESS;
	case RANGE_START:
		*(uint64_t *)data = vmm ? slot->base : block ? block->base : 0;
		return SUCCESS;
	case RANGE_SIZE:
		*(size_t *)data = vmm ? slot->bytes : block ? block->bytes : 0;
		return SUCCESS;
	case MEMPOOL_HANDLE:
		*(void **)data = block && block->kind == KIND_POOL ? &cuda_contexts[block->device] : NULL;
		return SUCCESS;
	case MAPPING_BASE:
		*(uint64_t *)data = vmm ? block->base : block ? slot->base : 0;
		return SUCCESS;
	case MAPPING_SIZE:
		*(size_t *)data = vmm ? block->bytes : block ? slot->bytes : 0;
		return SUCCESS;
	default:
		return INVALID_VALUE;
	}
}

static CUresult attributes(unsigned count, const int *which, void **data, uint64_t pointer)
{
	CUresult result = SUCCESS;

	for (unsigned at = 0; at < count && result == SUCCESS; at++)
		result = attribute(which[at], data[at], pointer);
	return result;
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *which, void **data, uint64_t pointer)
{
	CALL(attributes(count, which, data, pointer));
}

/* Sharing between processes is beyond a stand-in: no address qualifies. */
EXPORT CUresult cuIpcGetMemHandle(uint32_t handle[16], uint64_t pointer)
{
	(void)handle, (void)pointer;
	CALL(NOT_SUPPORTED);
}

static CUresult allocate(uint64_t *pointer, size_t bytes, enum kind kind)
{
	int device = cuda_current();

	if (device < 0)
		return INVALID_CONTEXT;
	if (!bytes)
		return INVALID_VALUE;
	*pointer = memory_allocate(device, bytes, kind);
	return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAlloc_v2(uint64_t *pointer, size_t bytes)
{
	CALL(allocate(pointer, bytes, KIND_DEVICE));
}

EXPORT CUresult cuMemAllocManaged(uint64_t *pointer, size_t bytes, unsigned flags)
{
	(void)flags;
	CALL(allocate(pointer, bytes, KIND_MANAGED));
}

EXPORT CUresult cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream)
{
	(void)stream;
	CALL(allocate(pointer, bytes, KIND_POOL));
}

EXPORT CUresult cuMemFree_v2(uint64_t pointer)
{
	CALL(cuda_current() < 0 ? INVALID_CONTEXT : !pointer || memory_free(pointer) ? SUCCESS : INVALID_VALUE);
}

static CUresult host_alloc(void **pointer, size_t bytes)
{
	struct host *host = calloc(1, sizeof(*host));

	if (!host || !bytes || posix_memalign((void **)&host->bytes, 4096, bytes)) {
		free(host);
		return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
	}
	host->len = bytes;
	host->next = hosts;
	hosts = host;
	*pointer = host->bytes;
	return SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
	(void)flags;
	CALL(cuda_current() < 0 ? INVALID_CONTEXT : host_alloc(pointer, bytes));
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(uint64_t *addr, void *pointer, unsigned flags)
{
	(void)addr, (void)pointer, (void)flags;
	CALL(NOT_SUPPORTED);
}

static CUresult host_free(void *pointer)
{
	for (struct host **at = &hosts; *at; at = &(*at)->next) {
		struct host *host = *at;

		if (host->bytes != pointer)
			continue;
		*at = host->next;
		free(host->bytes);
		free(host);
		return SUCCESS;
	}
	return INVALID_VALUE;
}

EXPORT CUresult cuMemFreeHost(void *pointer)
{
	CALL(host_free(pointer));
}

/* Copies between the host and consecutive device addresses, all of which have to be there. */
static CUresult copy(uint64_t device, unsigned char *host, size_t bytes, bool to_device)
{
	size_t run;

	if (cuda_current() < 0)
		return INVALID_CONTEXT;
	for (size_t at = 0; at < bytes; at += run)
		if (!memory_at(device + at, &run))
			return INVALID_VALUE;
	for (size_t at = 0; at < bytes; at += run) {
		unsigned char *place = memory_at(device + at, &run);

		if (run > bytes - at)
			run = bytes - at;
		if (to_device)
			memcpy(place, host + at, run);
		else
			memcpy(host + at, place, run);
	}
	return SUCCESS;
}

EXPORT CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
	CALL(copy(to, (unsigned char *)(uintptr_t)from, bytes, true));
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	CALL(copy(from, to, bytes, false));
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
	(void)stream;
	CALL(copy(to, (unsigned char *)(uintptr_t)from, bytes, true));
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
	(void)stream;
	CALL(copy(from, to, bytes, false));
}
