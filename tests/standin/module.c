/* The module behind the stand-in node: its versions, its calls, its pins. */
#define _GNU_SOURCE
#include "gdrdrv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Requests; most carry the size of a pointer, not of their structure. */
enum {
	PIN = 0xc028da01,
	UNPIN = 0xc008da02,
	CALLBACK_FLAG = 0xc008da03,
	INFO = 0xc008da04,
	INFO_V2 = 0xc008da05,
	ATTRIBUTE = 0xc008da06,
	PIN_V2 = 0xc020da07,
	REQUEST_TYPE = 0xc008da08,
	VERSION = 0xc008daff,
};
#define MAGIC(request) ((request) >> 8 & 0xff)

enum { TYPE_NONE, TYPE_WC, TYPE_CACHED, TYPE_DEVICE };
enum { FORCE_PCIE = 1 };

struct pin_args {
	uint64_t addr, size, token;
	uint32_t va_space;
	uint64_t handle;
};
struct pin_v2_args {
	uint64_t addr, size;
	uint32_t flags, pad;
	uint64_t handle;
};
struct word_args {
	uint64_t handle;
	uint32_t word, pad;
};
struct info_args {
	uint64_t handle, va, mapped_size;
	uint32_t page_size, tsc_khz;
	uint64_t tm_cycles;
	uint32_t mapped_or_type, wc_or_pad;
};
struct attribute_args {
	uint32_t attribute, value;
};
struct version_args {
	uint32_t driver, minimum;
};
_Static_assert(sizeof(struct pin_args) == 40 && sizeof(struct pin_v2_args) == 32, "pin");
_Static_assert(sizeof(struct word_args) == 16 && sizeof(struct info_args) == 48, "info");

struct node *module_nodes;

static uint32_t version_word(const char *name)
{
	const char *text = getenv(name);
	unsigned major = 2, minor = 0;

	if (text && sscanf(text, "%u.%u", &major, &minor) != 2)
		abort();
	return major << 16 | minor;
}

bool gdrdrv_is_emulated(void)
{
	return getenv("GDRCOPY_STANDIN_VERSION") != NULL;
}

int module_minor(void)
{
	return (int)(version_word("GDRCOPY_STANDIN_VERSION") & 0xffff);
}

/* Such a mode came with 2.4, which cannot be asked for it. */
bool module_persistent(void)
{
	const char *text = getenv("GDRCOPY_STANDIN_PERSISTENT");

	return module_minor() >= 4 && text && strcmp(text, "1") == 0;
}

int module_fault(const char *call)
{
	const char *text = getenv("GDRCOPY_STANDIN_FAULT");
	size_t len = strlen(call);

	return text && strncmp(text, call, len) == 0 && text[len] == ':' ? atoi(text + len + 1) : 0;
}

/* One write for each line, so that those of several threads and processes stay apart. */
void module_log(const char *format, ...)
{
	const char *path = getenv("GDRCOPY_STANDIN_LOG");
	char line[256];
	va_list args;
	int fd, len;

	if (!path)
		return;
	va_start(args, format);
	len = vsnprintf(line, sizeof(line) - 1, format, args);
	va_end(args);
	line[len++] = '\n';
	fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (fd < 0 || write(fd, line, (size_t)len) != len)
		abort();
	syscall(SYS_close, fd);
}

struct pin *module_pin_at(struct node *node, uint64_t handle)
{
	for (struct pin *pin = node->pins; pin; pin = pin->next)
		if (pin->handle == handle)
			return pin;
	return NULL;
}

/* Lets go of the memory, whose object may end with it. */
static void drop_runs(struct pin *pin)
{
	for (size_t at = 0; at < pin->run_count && module_persistent(); at++) {
		pin->runs[at].object->pins--;
		memory_settle(pin->runs[at].object);
	}
	free(pin->runs);
	pin->runs = NULL;
	pin->run_count = 0;
}

/* Finds the memory of whole GPU pages; all of it must be there and made for RDMA. */
static int find_runs(struct pin *pin)
{
	pin->runs = calloc(pin->bytes / FRAME + 2, sizeof(*pin->runs));
	if (!pin->runs)
		return ENOMEM;
	for (uint64_t va = pin->va, end = pin->va + pin->bytes; va < end;) {
		struct slot *slot = memory_slot(va);
		size_t in_frame = va % FRAME, len = FRAME - in_frame;

		if (!slot || !slot->object || !slot->object->rdma)
			return EINVAL;
		if (len > end - va)
			len = end - va;
		pin->runs[pin->run_count++] = (struct run){
			slot->object, ((size_t)slot->object->first + slot->index) * FRAME + in_frame, len
		};
		va += len;
	}
	return 0;
}

static int pin_memory(struct node *node, uint64_t addr, uint64_t size, uint64_t *handle)
{
	uint64_t end, va = addr & ~(GPU_PAGE - 1);
	struct pin *pin;
	int error = 0;

	if (!addr || !size || __builtin_add_overflow(addr, size, &end) ||
	    __builtin_add_overflow(end, GPU_PAGE - 1, &end))
		return EINVAL;
	if (!memory_start() || (pin = calloc(1, sizeof(*pin))) == NULL)
		return ENOMEM;
	end &= ~(GPU_PAGE - 1);
	*pin = (struct pin){ .node = node, .handle = node->next_handle, .va = va, .bytes = end - va,
			     .aligned = va == addr, .next = node->pins };
	error = pin->bytes > memory_device_bytes() ? EINVAL : find_runs(pin);
	if (error) {
		free(pin->runs);
		free(pin);
		return error;
	}
	for (size_t at = 0; at < pin->run_count && module_persistent(); at++)
		pin->runs[at].object->pins++;
	node->pins = pin;
	node->next_handle += pin->bytes >> 12;
	*handle = pin->handle;
	return 0;
}

static int pin_v1(struct node *node, struct pin_args *args)
{
	int error = module_fault("pin");

	if (!error && module_persistent() && (args->token || args->va_space))
		error = EINVAL;
	if (!error)
		error = pin_memory(node, args->addr, args->size, &args->handle);
	module_log("pin addr=0x%lx size=0x%lx = %d", args->addr, args->size, -error);
	return error;
}

static int pin_v2(struct node *node, struct pin_v2_args *args)
{
	int error = module_fault("pin_v2");

	if (!error && args->flags & ~(uint32_t)FORCE_PCIE)
		error = EINVAL;
	if (!error && args->flags && !module_persistent())
		error = EINVAL;
	if (!error)
		error = pin_memory(node, args->addr, args->size, &args->handle);
	module_log("pin_v2 addr=0x%lx size=0x%lx flags=%u = %d", args->addr, args->size, args->flags, -error);
	return error;
}

static void unpin(struct pin *pin)
{
	struct pin **at = &pin->node->pins;

	while (*at != pin)
		at = &(*at)->next;
	*at = pin->next;
	windows_revoke(pin);
	windows_forget(pin);
	drop_runs(pin);
	free(pin);
}

static int info(const struct pin *pin, struct info_args *args, bool v2)
{
	bool mapped = pin->windows > 0;

	args->va = pin->va;
	args->mapped_size = pin->bytes;
	args->page_size = GPU_PAGE;
	args->tsc_khz = 1000000;
	args->tm_cycles = 1000;
	args->mapped_or_type = v2 ? pin->type : mapped;
	args->wc_or_pad = v2 ? 0 : pin->type == TYPE_WC;
	return 0;
}

static int request_type(struct pin *pin, uint32_t type)
{
	if (type == TYPE_NONE || type > TYPE_DEVICE)
		return EINVAL;
	if (pin->windows)
		return EBUSY;
	/* What is not CPU-cacheable is mapped write-combining on x86, or not at all. */
	if (type != TYPE_WC)
		return EOPNOTSUPP;
	pin->wanted = type;
	return 0;
}

/* A request about one pin. */
static int about_pin(struct node *node, unsigned long request, struct word_args *args)
{
	struct pin *pin = module_pin_at(node, args->handle);
	const char *call = request == UNPIN	    ? "unpin" :
			   request == CALLBACK_FLAG ? "callback_flag" :
			   request == INFO	    ? "info" :
			   request == INFO_V2	    ? "info_v2" :
						      "request_type";
	int error = module_fault(call);

	if (!error && !pin)
		error = EINVAL;
	if (!error && request == UNPIN)
		unpin(pin);
	else if (!error && request == CALLBACK_FLAG)
		args->word = pin->dead;
	else if (!error && request == REQUEST_TYPE)
		error = request_type(pin, args->word);
	else if (!error)
		error = info(pin, (void *)args, request == INFO_V2);
	module_log("%s handle=%lu = %d", call, args->handle, -error);
	return error;
}

static int version(struct version_args *args)
{
	int error = module_fault("version");

	args->driver = version_word("GDRCOPY_STANDIN_VERSION");
	args->minimum = version_word("GDRCOPY_STANDIN_MINIMUM");
	module_log("version = %d", -error);
	return error;
}

static int attribute(struct attribute_args *args)
{
	int error = module_fault("attribute");

	if (!error && (args->attribute < 1 || args->attribute > 2))
		error = EINVAL;
	/* Persistent mode, and FORCE_PCIE, which comes with it. */
	args->value = !error && module_persistent();
	module_log("attribute %u = %d", args->attribute, -error);
	return error;
}

static int since(unsigned long request)
{
	switch (request) {
	case INFO_V2:
		return 4;
	case ATTRIBUTE:
	case PIN_V2:
	case REQUEST_TYPE:
		return 5;
	default:
		return 0;
	}
}

int module_ioctl(struct node *node, unsigned long request, void *argument)
{
	if (MAGIC(request) != 0xda)
		return EINVAL;
	if (getpid() != node->opener)
		return EACCES;
	if (module_minor() < since(request)) {
		module_log("unknown request=0x%lx = %d", request, -ENOTTY);
		return ENOTTY;
	}
	switch (request) {
	case PIN:
		return pin_v1(node, argument);
	case PIN_V2:
		return pin_v2(node, argument);
	case VERSION:
		return version(argument);
	case ATTRIBUTE:
		return attribute(argument);
	case UNPIN:
	case CALLBACK_FLAG:
	case INFO:
	case INFO_V2:
	case REQUEST_TYPE:
		return about_pin(node, request, argument);
	default:
		module_log("unknown request=0x%lx = %d", request, -ENOTTY);
		return ENOTTY;
	}
}

void module_settle(struct node *node)
{
	struct node **at = &module_nodes;

	/* A window refers to its file: what it shows stays until it is unmapped. */
	if (node->open || node->windows)
		return;
	while (node->pins)
		unpin(node->pins);
	while (*at != node)
		at = &(*at)->next;
	*at = node->next;
	module_log("released");
	free(node);
}

/* Tells a provider of the real module, which cannot know otherwise. */
static void tell_freed(uint64_t va, size_t bytes)
{
	const char *path = getenv("GDRCOPY_STANDIN_FREE");
	char text[48];
	int fd;

	if (!path)
		return;
	fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, text, (size_t)snprintf(text, sizeof(text), "%llx %llx\n", (unsigned long long)va,
					 (unsigned long long)bytes)) < 0)
		perror("GDRCOPY_STANDIN_FREE");
	if (fd >= 0)
		syscall(SYS_close, fd);
}

void gdrdrv_freed(uint64_t va, size_t bytes)
{
	tell_freed(va, bytes);
	for (struct node *node = module_nodes; node && !module_persistent(); node = node->next)
		for (struct pin *pin = node->pins; pin; pin = pin->next)
			if (pin->va < va + bytes && va < pin->va + pin->bytes && !pin->dead) {
				pin->dead = true;
				windows_revoke(pin);
				drop_runs(pin);
			}
}
