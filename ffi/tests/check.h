/* What the C tests share: checks that say where they failed, and device memory from the library under test. A program
 * prints nothing and exits with 0, or prints why and exits with 1. */
#ifndef CHECK_H
#define CHECK_H

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

/* The returned value in the message: it is an errno. */
#define RETURNS(expected, call)                                                                          \
    do {                                                                                                 \
        int got_ = (call);                                                                               \
        if (got_ != (expected)) {                                                                        \
            fprintf(stderr, "%s:%d: %s returned %d (%s), not %d\n", __FILE__, __LINE__, #call, got_,     \
                    strerror(got_), (int)(expected));                                                    \
            exit(1);                                                                                     \
        }                                                                                                \
    } while (0)

#define OK(call) RETURNS(0, call)

#define PAGE ((size_t)65536)

/* A pattern that differs in every byte's neighbourhood and by seed. */
static inline void fill(void *bytes, size_t size, unsigned seed)
{
    unsigned char *at = (unsigned char *)bytes;
    for (size_t i = 0; i < size; i++)
        at[i] = (unsigned char)((i * 167 + i / 251 + seed * 59) & 255);
}

static inline int is_filled(const void *bytes, size_t size, unsigned seed)
{
    const unsigned char *at = (const unsigned char *)bytes;
    for (size_t i = 0; i < size; i++)
        if (at[i] != (unsigned char)((i * 167 + i / 251 + seed * 59) & 255))
            return 0;
    return 1;
}

/* Loaded by name, as clients do it. */
static inline void *library(const char *name, int flags)
{
    void *found = dlopen(name, flags);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

static inline void *optional(void *lib, const char *name)
{
    return dlsym(lib, name);
}

static inline void *mandatory(void *lib, const char *name)
{
    void *found = dlsym(lib, name);
    if (!found) {
        fprintf(stderr, "no symbol %s\n", name);
        exit(1);
    }
    return found;
}

#endif
