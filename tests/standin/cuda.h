/*
 * What the files of the stand-in libcuda.so.1 share. Names, structures and results are those of the reference of the
 * CUDA driver API.
 */
#ifndef STANDIN_CUDA_H
#define STANDIN_CUDA_H

#include "standin.h"

typedef int CUresult;
enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	INVALID_HANDLE = 400,
	NOT_SUPPORTED = 801,
};

/* A GPU's primary context: there are no others. */
struct context {
	unsigned retained;
};

extern struct context cuda_contexts[MAX_GPUS];
extern bool cuda_initialized;

/* The current context's GPU, or -1. */
int cuda_current(void);
CUresult cuda_known(int device);

/* Takes the lock and runs the call's body, unless CUDA does not work in this process. */
#define CALL(body)                                          \
	do {                                                \
		CUresult result = NOT_INITIALIZED;          \
		standin_enter();                            \
		if (cuda_initialized && !memory_foreign())       \
			result = (body);                    \
		standin_leave();                            \
		return result;                              \
	} while (0)

#endif
