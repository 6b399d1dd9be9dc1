/* Address space that shows pinned memory, and the functions through which programs come and go. */
#define _GNU_SOURCE
#include "gdrdrv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NODE "/dev/gdrdrv"
#define PARAMS "/proc/driver/gdrdrv/params"
#define DEVICES "/proc/devices"
#define MAX_FD 4096

/* A piece of address space. */
struct window {
	uintptr_t start, end;
	struct pin *pin;
	struct node *node;
	struct window *next;
};

static struct window *windows;
static atomic_size_t window_count;
/* Read without the lock by every close and ioctl of the program. */
static _Atomic(struct node *) nodes[MAX_FD];

static void *raw_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	return (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, offset);
}

static bool window_add(uintptr_t start, uintptr_t end, struct pin *pin, struct node *node)
{
	struct window *window = malloc(sizeof(*window));

	if (!window)
		return false;
	*window = (struct window){ start, end, pin, node, windows };
	windows = window;
	window_count++;
	node->windows++;
	if (pin)
		pin->windows++;
	return true;
}

static void window_remove(struct window **at)
{
	struct window *gone = *at;
	struct node *node = gone->node;

	*at = gone->next;
	window_count--;
	node->windows--;
	if (gone->pin && --gone->pin->windows == 0)
		gone->pin->type = 0;
	free(gone);
	module_settle(node);
}

void windows_gone(void *addr, size_t len)
{
	uintptr_t start = (uintptr_t)addr, end = start + len;
	struct window **at = &windows;

	while (*at) {
		struct window old = **at;

		if (old.end <= start || end <= old.start) {
			at = &(*at)->next;
			continue;
		}
		/* What is left on either side, before the file could end with its last window. */
		if ((old.start < start && !window_add(old.start, start, old.pin, old.node)) ||
		    (end < old.end && !window_add(end, old.end, old.pin, old.node)))
			abort();
		for (at = &windows; (*at)->start != old.start || (*at)->end != old.end; at = &(*at)->next)
			;
		window_remove(at);
		at = &windows;
	}
}

/* Pages past the end of an empty file. */
static int empty_file(void)
{
	static int fd = -1;

	if (fd < 0)
		fd = memfd_create("standin-revoked", MFD_CLOEXEC);
	return fd;
}

void windows_revoke(const struct pin *pin)
{
	for (struct window *window = windows; window; window = window->next) {
		void *start = (void *)window->start;
		size_t len = window->end - window->start;

		if (window->pin != pin)
			continue;
		if (raw_mmap(start, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty_file(), 0) != start)
			abort();
		madvise(start, len, MADV_DONTFORK);
	}
}

void windows_forget(const struct pin *pin)
{
	for (struct window *window = windows; window; window = window->next)
		if (window->pin == pin)
			window->pin = NULL;
}

int windows_map(struct pin *pin, void **addr, size_t len, int prot, bool fixed)
{
	size_t at = 0;
	unsigned char *start = raw_mmap(*addr, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | (fixed ? MAP_FIXED : 0), -1, 0);

	if (start == MAP_FAILED)
		return errno;
	for (size_t run = 0; run < pin->run_count && at < len; run++) {
		size_t part = pin->runs[run].bytes < len - at ? pin->runs[run].bytes : len - at;

		if (raw_mmap(start + at, part, prot, MAP_SHARED | MAP_FIXED, memory_fd(),
			     (off_t)pin->runs[run].offset) == MAP_FAILED)
			return EAGAIN;
		at += part;
	}
	madvise(start, len, MADV_DONTFORK);
	if (!window_add((uintptr_t)start, (uintptr_t)start + len, pin, pin->node))
		return ENOMEM;
	pin->type = pin->wanted ? pin->wanted : 1;
	*addr = start;
	return 0;
}

/* A text that the kernel would show. */
static int text_file(const char *text)
{
	int fd = memfd_create("standin-text", MFD_CLOEXEC);

	if (fd >= 0 && (write(fd, text, strlen(text)) < 0 || lseek(fd, 0, SEEK_SET) < 0))
		abort();
	return fd;
}

static int node_open(int flags)
{
	struct node *node;
	int fd = -1, error = module_fault("open");

	if (!error) {
		fd = (int)syscall(SYS_openat, AT_FDCWD, "/dev/null", flags, 0);
		error = fd < 0 ? errno : fd >= MAX_FD ? EMFILE : 0;
	}
	node = error ? NULL : calloc(1, sizeof(*node));
	if (!error && !node)
		abort();
	if (node) {
		*node = (struct node){ .opener = getpid(), .open = true, .next = module_nodes };
		module_nodes = node;
		nodes[fd] = node;
	}
	module_log("open cloexec=%d = %d", (flags & O_CLOEXEC) != 0, -error);
	if (error)
		errno = error;
	return error ? -1 : fd;
}

/* The major numbers that the kernel lists for gdrdrv and that the node has; false where the module is not listed. */
static bool majors(unsigned *listed, unsigned *of_node)
{
	const char *text = getenv("GDRCOPY_STANDIN_MAJORS");

	return text && sscanf(text, "%u,%u", listed, of_node) == 2;
}

static int devices_file(void)
{
	unsigned listed, of_node;
	char text[64] = "Character devices:\n";

	if (majors(&listed, &of_node))
		snprintf(text, sizeof(text), "Character devices:\n%3u gdrdrv\n\nBlock devices:\n", listed);
	return text_file(text);
}

/* What Rust's standard library asks for a file's device number. */
EXPORT int statx(int dir, const char *path, int flags, unsigned mask, struct statx *found)
{
	/* Declared never to be NULL, but that is how one asks whether the call exists. */
	const char *volatile name = path;
	unsigned listed, of_node;

	if (!gdrdrv_is_emulated() || !name || strcmp(path, NODE) != 0)
		return (int)syscall(SYS_statx, dir, path, flags, mask, found);
	if (!majors(&listed, &of_node)) {
		errno = ENOENT;
		return -1;
	}
	memset(found, 0, sizeof(*found));
	found->stx_mask = STATX_BASIC_STATS;
	found->stx_mode = S_IFCHR | 0666;
	found->stx_rdev_major = of_node;
	return 0;
}

static int open_any(int dir, const char *path, int flags, mode_t mode)
{
	int fd;

	if (gdrdrv_is_emulated() && strcmp(path, NODE) == 0) {
		standin_enter();
		fd = node_open(flags);
		standin_leave();
		return fd;
	}
	if (gdrdrv_is_emulated() && strcmp(path, PARAMS) == 0)
		return text_file(module_persistent() ? "Use persistent mapping: yes\n" : "Use persistent mapping: no\n");
	if (gdrdrv_is_emulated() && strcmp(path, DEVICES) == 0)
		return devices_file();
	return (int)syscall(SYS_openat, dir, path, flags, mode);
}

static mode_t mode_of(int flags, va_list args)
{
	return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(args, mode_t) : 0;
}

#define OPEN(dir)                                    \
	do {                                         \
		va_list args;                        \
		mode_t mode;                         \
		va_start(args, flags);               \
		mode = mode_of(flags, args);         \
		va_end(args);                        \
		return open_any(dir, path, flags, mode); \
	} while (0)

EXPORT int open(const char *path, int flags, ...)
{
	OPEN(AT_FDCWD);
}

EXPORT int open64(const char *path, int flags, ...)
{
	OPEN(AT_FDCWD);
}

EXPORT int openat(int dir, const char *path, int flags, ...)
{
	OPEN(dir);
}

EXPORT int openat64(int dir, const char *path, int flags, ...)
{
	OPEN(dir);
}

static struct node *node_of(int fd)
{
	return fd >= 0 && fd < MAX_FD ? nodes[fd] : NULL;
}

EXPORT int close(int fd)
{
	struct node *node = node_of(fd);

	if (node) {
		standin_enter();
		nodes[fd] = NULL;
		/* A child's copy of the descriptor: the file stays open in the parent. */
		if (node->opener == getpid()) {
			node->open = false;
			module_settle(node);
		}
		standin_leave();
	}
	return (int)syscall(SYS_close, fd);
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
	struct node *node = node_of(fd);
	void *argument;
	va_list args;
	int error;

	va_start(args, request);
	argument = va_arg(args, void *);
	va_end(args);
	if (!node)
		return (int)syscall(SYS_ioctl, fd, request, argument);
	standin_enter();
	error = module_ioctl(node, request, argument);
	standin_leave();
	if (error)
		errno = error;
	return error ? -1 : 0;
}

static int node_map(struct node *node, void **addr, size_t len, int prot, int flags, off_t offset)
{
	struct pin *pin = module_pin_at(node, (uint64_t)offset >> 12);
	int error = module_fault("mmap");

	len = (len + 4095) & ~(size_t)4095;
	if (!error && getpid() != node->opener)
		error = EACCES;
	if (!error && ((flags & MAP_TYPE) == MAP_PRIVATE || !pin || !pin->aligned || pin->dead || pin->windows ||
		       len > pin->bytes))
		error = EINVAL;
	if (!error) {
		if (flags & MAP_FIXED)
			windows_gone(*addr, len);
		error = windows_map(pin, addr, len, prot, flags & MAP_FIXED);
	}
	module_log("mmap handle=%lu len=0x%zx = %d", (unsigned long)offset >> 12, len, -error);
	return error;
}

static void *map_any(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	struct node *node = flags & MAP_ANONYMOUS ? NULL : node_of(fd);
	int error;

	if (!node && !(flags & MAP_FIXED && window_count))
		return raw_mmap(addr, len, prot, flags, fd, offset);
	standin_enter();
	if (!node) {
		void *placed = raw_mmap(addr, len, prot, flags, fd, offset);

		if (placed != MAP_FAILED)
			windows_gone(placed, len);
		standin_leave();
		return placed;
	}
	error = node_map(node, &addr, len, prot, flags, offset);
	standin_leave();
	if (error)
		errno = error;
	return error ? MAP_FAILED : addr;
}

EXPORT void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	return map_any(addr, len, prot, flags, fd, offset);
}

EXPORT void *mmap64(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
	return map_any(addr, len, prot, flags, fd, offset);
}

EXPORT int munmap(void *addr, size_t len)
{
	int result, error;

	if (!window_count)
		return (int)syscall(SYS_munmap, addr, len);
	standin_enter();
	result = (int)syscall(SYS_munmap, addr, len);
	error = errno;
	if (result == 0)
		windows_gone(addr, len);
	standin_leave();
	errno = error;
	return result;
}
