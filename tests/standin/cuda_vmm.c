/* Calls of the CUDA driver API: virtual memory management. */
#define _GNU_SOURCE
#include "cuda.h"

#include <fcntl.h>

struct location {
	unsigned kind;
	int id;
};

struct allocation_prop {
	unsigned kind, handle_types;
	struct location location;
	void *win32;
	uint8_t compression, rdma;
	uint16_t usage;
	uint8_t reserved[4];
};

struct access_desc {
	struct location location;
	unsigned flags;
};

/* Properties that a GPU's exportable memory can have. */
static bool prop_valid(const struct allocation_prop *prop)
{
	return prop->kind == 1 && prop->handle_types <= 1 && prop->location.kind == 1 &&
	       cuda_known(prop->location.id) == SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_prop *prop, int option)
{
	(void)option;
	CALL(prop_valid(prop) ? (*bytes = FRAME, SUCCESS) : INVALID_VALUE);
}

static CUresult create(struct object **handle, size_t bytes, const struct allocation_prop *prop)
{
	if (!bytes || bytes % FRAME || !prop_valid(prop))
		return INVALID_VALUE;
	if (bytes > memory_device_bytes())
		return OUT_OF_MEMORY;
	*handle = memory_object(prop->location.id, bytes / FRAME, prop->rdma, prop->handle_types);
	return *handle ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT CUresult cuMemCreate(struct object **handle, size_t bytes, const struct allocation_prop *prop, uint64_t flags)
{
	CALL(flags ? INVALID_VALUE : create(handle, bytes, prop));
}

static CUresult release_object(struct object *object)
{
	if (!object || !object->handles)
		return INVALID_VALUE;
	object->handles--;
	memory_settle(object);
	return SUCCESS;
}

EXPORT CUresult cuMemRelease(struct object *handle)
{
	CALL(release_object(handle));
}

EXPORT CUresult cuMemAddressReserve(uint64_t *pointer, size_t bytes, size_t align, uint64_t hint, uint64_t flags)
{
	(void)hint;
	CALL(flags || align > FRAME || !bytes || bytes % FRAME ? INVALID_VALUE :
	     (*pointer = memory_reserve(0, bytes))	       ? SUCCESS :
								 OUT_OF_MEMORY);
}

EXPORT CUresult cuMemAddressFree(uint64_t pointer, size_t bytes)
{
	CALL(memory_unreserve(pointer, bytes) ? SUCCESS : INVALID_VALUE);
}

EXPORT CUresult cuMemMap(uint64_t pointer, size_t bytes, size_t offset, struct object *handle, uint64_t flags)
{
	CALL(!flags && handle && memory_map(pointer, bytes, offset, handle) ? SUCCESS : INVALID_VALUE);
}

EXPORT CUresult cuMemUnmap(uint64_t pointer, size_t bytes)
{
	CALL(memory_unmap(pointer, bytes) ? SUCCESS : INVALID_VALUE);
}

/* Every mapping in the span becomes accessible; the span must be covered. */
static CUresult set_access(uint64_t pointer, size_t bytes, const struct access_desc *access, size_t count)
{
	uint64_t end = pointer + bytes;

	while (count == 1 && pointer < end) {
		struct block *block = memory_block(pointer);

		if (!block || block->kind != KIND_VMM || block->base != pointer)
			return INVALID_VALUE;
		block->accessible = access->location.id == block->device && access->flags == 3;
		pointer += block->bytes;
	}
	return count == 1 && pointer == end ? SUCCESS : INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(uint64_t pointer, size_t bytes, const struct access_desc *access, size_t count)
{
	CALL(set_access(pointer, bytes, access, count));
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, struct object *handle, int kind, uint64_t flags)
{
	CALL(!flags && handle && kind == 1 && handle->handle_types & 1 ?
		     ((*(int *)out = fcntl(memory_fd(), F_DUPFD_CLOEXEC, 0)) < 0 ? OUT_OF_MEMORY : SUCCESS) :
		     INVALID_VALUE);
}

static CUresult retain_object(struct object **handle, uint64_t pointer)
{
	struct block *block = memory_block(pointer);

	if (!block || block->kind != KIND_VMM)
		return INVALID_VALUE;
	*handle = memory_slot(pointer)->object;
	(*handle)->handles++;
	return SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(struct object **handle, void *pointer)
{
	CALL(retain_object(handle, (uintptr_t)pointer));
}

static CUresult properties(struct allocation_prop *prop, const struct object *object)
{
	if (!object)
		return INVALID_VALUE;
	*prop = (struct allocation_prop){ .kind = 1, .handle_types = object->handle_types,
					  .location = { 1, object->device }, .rdma = object->rdma };
	return SUCCESS;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(struct allocation_prop *prop, struct object *handle)
{
	CALL(properties(prop, handle));
}
