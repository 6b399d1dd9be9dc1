/* SPDX-License-Identifier: MIT */
/*
 * What the guest's test programs share: TAP output, the requests, the provider's knobs, accesses that may fault.
 *
 * Every program starts by loading the module afresh, so that each also shows that unloading left nothing behind.
 */
#ifndef GUEST_H
#define GUEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gdrdrv.h"

#define GPU_PAGE	0x10000ULL
#define BAR_VA		0x1000000000ULL	/* the provider's windows, see its provider.h */
#define RAM_VA		0x2000000000ULL
#define BAR_PAGES	256U		/* 16 MiB, as the runner sizes the BAR */
#define HOST_PAGE	4096UL

enum order { LINEAR, REVERSED, HOLES };

/* TAP. Not from forked children: they report through their exit status. */
bool ok(bool condition, const char *format, ...) __attribute__((format(printf, 2, 3)));
void diag(const char *format, ...) __attribute__((format(printf, 1, 2)));
int done(void);
_Noreturn void bail(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool equal(long long got, long long want, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Module. */
void load(const char *parameters);
int module_users(void);

/* Files of the kernel. */
bool read_file(const char *path, char *text, size_t size);
long knob(const char *name);
void set_knob(const char *name, unsigned int value);
void free_gpu(uint64_t va, uint64_t len);

/* Requests: 0 or a negative errno. */
int gdr_open(void);
int pin(int fd, uint64_t addr, uint64_t size, uint64_t *handle);
int pin_flags(int fd, uint64_t addr, uint64_t size, uint32_t flags, uint64_t *handle);
int unpin(int fd, uint64_t handle);
int info(int fd, uint64_t handle, struct gdrdrv_get_info_v2 *out);
int mapping_type(int fd, uint64_t handle);
int request_type(int fd, uint64_t handle, uint32_t type);
int cb_flag(int fd, uint64_t handle);
int request(int fd, unsigned long number, void *argument);
void *map(int fd, uint64_t handle, size_t size);
void *map_at(void *at, int fd, uint64_t handle, size_t size, int prot, int flags);
uint64_t must_pin(int fd, uint64_t addr, uint64_t size);
void *must_map(int fd, uint64_t handle, size_t size);

/* Accesses that report a fault: 0, or the signal. */
int load_byte(const volatile void *at, uint8_t *value);
int store_byte(volatile void *at, uint8_t value);
bool reachable(const volatile void *at);

/* "WC", "UC-", ..., or "none"; with the physical address if it is asked for. */
const char *page_type(const volatile void *at, uint64_t *physical);

/* In a child; its status as waitpid() tells. */
int in_child(int (*body)(void *), void *argument);

#endif /* GUEST_H */
