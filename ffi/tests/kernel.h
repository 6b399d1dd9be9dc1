/* For tests in which a thread plays a kernel, by gdrcopy_channel.cuh compiled for the CPU. */
#ifndef KERNEL_H
#define KERNEL_H

#include <pthread.h>

#include <gdrapi_ext.h>

#include "check.h"

/* Bytes of a line; longer than anything takes that does not hang. */
enum { LINE = 48, LONG_US = 60000000 };

/* The smallest rings. */
static inline gdrx_channel_options_t small(void)
{
    gdrx_channel_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.lines_to_gpu = options.lines_to_host = 32;
    options.kernel_limit_ms = 120000;
    return options;
}

static inline pthread_t start(void *(*kernel)(void *), void *device)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, kernel, device) == 0);
    return thread;
}

static inline void join(pthread_t thread)
{
    CHECK(pthread_join(thread, NULL) == 0);
}

#endif
