/* Calls of the CUDA driver API: devices, contexts, streams. What is queued is done when the call returns. */
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct context cuda_contexts[MAX_GPUS];
bool cuda_initialized;

#define STACK 32
static __thread struct context *stack[STACK];
static __thread size_t depth;

EXPORT CUresult cuInit(unsigned flags)
{
	CUresult result;

	standin_enter();
	if (flags)
		result = INVALID_VALUE;
	else if (memory_foreign() || !memory_start())
		result = NOT_INITIALIZED;
	else
		result = memory_gpus() ? SUCCESS : NO_DEVICE;
	cuda_initialized = cuda_initialized || result == SUCCESS;
	standin_leave();
	return result;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name)
{
	static const struct {
		CUresult code;
		const char *name;
	} names[] = {
		{ SUCCESS, "CUDA_SUCCESS" },
		{ INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
		{ OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" },
		{ NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
		{ NO_DEVICE, "CUDA_ERROR_NO_DEVICE" },
		{ INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE" },
		{ INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT" },
		{ INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE" },
		{ NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED" },
	};

	*name = NULL;
	for (size_t at = 0; at < sizeof(names) / sizeof(*names); at++)
		if (names[at].code == code)
			*name = names[at].name;
	return *name ? SUCCESS : INVALID_VALUE;
}

CUresult cuda_known(int device)
{
	return device >= 0 && device < memory_gpus() ? SUCCESS : INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
	CALL((*count = memory_gpus(), SUCCESS));
}

EXPORT CUresult cuDeviceGet(int *device, int ordinal)
{
	CALL((*device = ordinal, cuda_known(ordinal)));
}

EXPORT CUresult cuDeviceGetName(char *name, int len, int device)
{
	CALL((snprintf(name, (size_t)len, "stand-in GPU"), cuda_known(device)));
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	CALL((*bytes = memory_device_bytes(), cuda_known(device)));
}

/* A GPU of no other driver: nothing is to be found by it. */
static CUresult uuid(uint8_t bytes[16], int device)
{
	static const uint8_t family[16] = "stand-in GPU";

	memcpy(bytes, family, sizeof(family));
	bytes[15] = (uint8_t)device;
	return cuda_known(device);
}

EXPORT CUresult cuDeviceGetUuid(uint8_t bytes[16], int device)
{
	CALL(uuid(bytes, device));
}

EXPORT CUresult cuDeviceGetUuid_v2(uint8_t bytes[16], int device)
{
	CALL(uuid(bytes, device));
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int len, int device)
{
	CALL((snprintf(text, (size_t)len, "0000:%02x:00.0", 0x0a + device), cuda_known(device)));
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
	enum { KERNEL_EXEC_TIMEOUT = 17, RDMA_SUPPORTED = 116, RDMA_WRITES_ORDERING = 118, MPS_ENABLED = 133 };
	const char *watchdog = getenv("GDRCOPY_STANDIN_WATCHDOG"), *mps = getenv("GDRCOPY_STANDIN_MPS");

	switch (attribute) {
	case KERNEL_EXEC_TIMEOUT:
		*value = watchdog != NULL;
		break;
	case RDMA_SUPPORTED:
		*value = 1;
		break;
	case RDMA_WRITES_ORDERING:
		*value = 100; /* for the owner */
		break;
	case MPS_ENABLED:
		if (mps && !strcmp(mps, "unknown"))
			return INVALID_VALUE;
		*value = mps != NULL;
		break;
	default:
		return INVALID_VALUE;
	}
	CALL(cuda_known(device));
}

int cuda_current(void)
{
	struct context *context = depth ? stack[depth - 1] : NULL;

	return context && context->retained ? (int)(context - cuda_contexts) : -1;
}

static CUresult retain(struct context **context, int device)
{
	if (cuda_known(device) != SUCCESS)
		return INVALID_DEVICE;
	cuda_contexts[device].retained++;
	*context = &cuda_contexts[device];
	return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(struct context **context, int device)
{
	CALL(retain(context, device));
}

static CUresult release(int device)
{
	if (cuda_known(device) != SUCCESS)
		return INVALID_DEVICE;
	if (!cuda_contexts[device].retained)
		return INVALID_CONTEXT;
	if (--cuda_contexts[device].retained == 0)
		memory_reset(device);
	return SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device)
{
	CALL(release(device));
}

static CUresult push(struct context *context)
{
	if (!context || !context->retained || depth == STACK)
		return INVALID_CONTEXT;
	stack[depth++] = context;
	return SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(struct context *context)
{
	CALL(push(context));
}

EXPORT CUresult cuCtxPopCurrent_v2(struct context **context)
{
	CALL(depth ? (*context = stack[--depth], SUCCESS) : INVALID_CONTEXT);
}

EXPORT CUresult cuCtxSetCurrent(struct context *context)
{
	CALL((depth -= depth > 0, context ? push(context) : SUCCESS));
}

EXPORT CUresult cuCtxGetDevice(int *device)
{
	CALL((*device = cuda_current()) >= 0 ? SUCCESS : INVALID_CONTEXT);
}

EXPORT CUresult cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	CALL(cuda_current() < 0 ? INVALID_CONTEXT : target == 0 && (scope == 100 || scope == 200) ? SUCCESS : INVALID_VALUE);
}

/* A stream or an event. */
struct queue {
	bool alive;
};

static CUresult queue_new(struct queue **queue)
{
	if (cuda_current() < 0)
		return INVALID_CONTEXT;
	*queue = malloc(sizeof(**queue));
	if (!*queue)
		return OUT_OF_MEMORY;
	(*queue)->alive = true;
	return SUCCESS;
}

static CUresult queue_end(struct queue *queue)
{
	if (!queue || !queue->alive)
		return INVALID_HANDLE;
	queue->alive = false;
	free(queue);
	return SUCCESS;
}

/* The default stream, NULL, is always there. */
static CUresult stream_alive(const struct queue *stream)
{
	return !stream || stream->alive ? SUCCESS : INVALID_HANDLE;
}

static CUresult event_alive(const struct queue *event)
{
	return event && event->alive ? SUCCESS : INVALID_HANDLE;
}

EXPORT CUresult cuStreamCreateWithPriority(struct queue **stream, unsigned flags, int priority)
{
	(void)priority;
	CALL(flags > 1 ? INVALID_VALUE : queue_new(stream));
}

EXPORT CUresult cuStreamSynchronize(struct queue *stream)
{
	CALL(stream_alive(stream));
}

EXPORT CUresult cuStreamDestroy_v2(struct queue *stream)
{
	CALL(queue_end(stream));
}

EXPORT CUresult cuEventCreate(struct queue **event, unsigned flags)
{
	CALL(flags > 7 ? INVALID_VALUE : queue_new(event));
}

EXPORT CUresult cuEventRecord(struct queue *event, struct queue *stream)
{
	CALL(event_alive(event) == SUCCESS ? stream_alive(stream) : INVALID_HANDLE);
}

EXPORT CUresult cuEventQuery(struct queue *event)
{
	CALL(event_alive(event));
}

EXPORT CUresult cuEventDestroy_v2(struct queue *event)
{
	CALL(queue_end(event));
}

EXPORT CUresult cuStreamQuery(struct queue *stream)
{
	CALL(stream_alive(stream));
}

/* Running kernels is beyond a stand-in. */
EXPORT CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned options, unsigned *which, void **values)
{
	(void)module, (void)image, (void)options, (void)which, (void)values;
	CALL(NOT_SUPPORTED);
}

EXPORT CUresult cuModuleUnload(void *module)
{
	(void)module;
	CALL(INVALID_HANDLE);
}

EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
	(void)function, (void)module, (void)name;
	CALL(INVALID_HANDLE);
}

EXPORT CUresult cuFuncGetAttribute(int *value, int attribute, void *function)
{
	(void)value, (void)attribute, (void)function;
	CALL(INVALID_HANDLE);
}

EXPORT CUresult cuFuncSetAttribute(void *function, int attribute, int value)
{
	(void)function, (void)attribute, (void)value;
	CALL(INVALID_HANDLE);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared)
{
	(void)blocks, (void)function, (void)threads, (void)shared;
	CALL(INVALID_HANDLE);
}

EXPORT CUresult cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
			       unsigned block_y, unsigned block_z, unsigned shared, struct queue *stream,
			       void **parameters, void **extra)
{
	(void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
	(void)shared, (void)stream, (void)parameters, (void)extra;
	CALL(INVALID_HANDLE);
}
