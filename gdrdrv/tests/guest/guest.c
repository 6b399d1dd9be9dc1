// SPDX-License-Identifier: MIT
#include "guest.h"

static unsigned int tests, failures;

static void say(const char *before, const char *format, va_list args)
{
	fputs(before, stdout);
	vprintf(format, args);
	putchar('\n');
	fflush(stdout);
}

bool ok(bool condition, const char *format, ...)
{
	char start[40];
	va_list args;

	if (!condition)
		failures++;
	snprintf(start, sizeof(start), "%sok %u - ", condition ? "" : "not ", ++tests);
	va_start(args, format);
	say(start, format, args);
	va_end(args);
	return condition;
}

bool equal(long long got, long long want, const char *format, ...)
{
	char text[200];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (ok(got == want, "%s", text))
		return true;
	diag("got %lld, expected %lld", got, want);
	return false;
}

void diag(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	say("# ", format, args);
	va_end(args);
}

void bail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	say("Bail out! ", format, args);
	va_end(args);
	exit(2);
}

int done(void)
{
	equal(knob("live"), 0, "the provider got every page table back");
	printf("1..%u\n", tests);
	return failures ? 1 : 0;
}

/* --- module ------------------------------------------------------------------------------------------------------- */

int module_users(void)
{
	char text[32];

	return read_file("/sys/module/gdrdrv/refcnt", text, sizeof(text)) ? atoi(text) : -1;
}

void load(const char *parameters)
{
	int fd;

	if (syscall(SYS_delete_module, "gdrdrv", O_NONBLOCK) && errno != ENOENT)
		bail("unloading: %s", strerror(errno));
	fd = open("/modules/gdrdrv.ko", O_RDONLY | O_CLOEXEC);
	if (fd < 0 || syscall(SYS_finit_module, fd, parameters, 0))
		bail("loading gdrdrv.ko: %s", strerror(errno));
	close(fd);
}

/* --- files of the kernel ------------------------------------------------------------------------------------------ */

bool read_file(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t length = 0;
	ssize_t got = -1;

	if (fd < 0)
		return false;
	while (length < size - 1 && (got = read(fd, text + length, size - 1 - length)) > 0)
		length += got;
	text[length] = 0;
	close(fd);
	return got >= 0;
}

static void knob_path(char *path, size_t size, const char *name)
{
	snprintf(path, size, "/sys/kernel/debug/nvp2p/%s", name);
}

long knob(const char *name)
{
	char path[80], text[32];

	knob_path(path, sizeof(path), name);
	if (!read_file(path, text, sizeof(text)))
		bail("%s: %s", path, strerror(errno));
	return atol(text);
}

static void write_knob(const char *name, const char *text)
{
	char path[80];
	int fd;

	knob_path(path, sizeof(path), name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		bail("%s: %s", path, strerror(errno));
	close(fd);
}

void set_knob(const char *name, unsigned int value)
{
	char text[16];

	snprintf(text, sizeof(text), "%u", value);
	write_knob(name, text);
}

void free_gpu(uint64_t va, uint64_t len)
{
	char text[48];

	snprintf(text, sizeof(text), "%" PRIx64 " %" PRIx64, va, len);
	write_knob("free", text);
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

int request(int fd, unsigned long number, void *argument)
{
	return ioctl(fd, number, argument) < 0 ? -errno : 0;
}

int gdr_open(void)
{
	int fd = open("/dev/gdrdrv", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		bail("/dev/gdrdrv: %s", strerror(errno));
	return fd;
}

int pin(int fd, uint64_t addr, uint64_t size, uint64_t *handle)
{
	struct gdrdrv_pin_buffer arg = { .addr = addr, .size = size };
	int err = request(fd, GDRDRV_IOC_PIN_BUFFER, &arg);

	*handle = arg.handle;
	return err;
}

int pin_flags(int fd, uint64_t addr, uint64_t size, uint32_t flags, uint64_t *handle)
{
	struct gdrdrv_pin_buffer_v2 arg = { .addr = addr, .size = size, .flags = flags };
	int err = request(fd, GDRDRV_IOC_PIN_BUFFER_V2, &arg);

	*handle = arg.handle;
	return err;
}

int unpin(int fd, uint64_t handle)
{
	struct gdrdrv_unpin_buffer arg = { .handle = handle };

	return request(fd, GDRDRV_IOC_UNPIN_BUFFER, &arg);
}

int info(int fd, uint64_t handle, struct gdrdrv_get_info_v2 *out)
{
	out->handle = handle;
	return request(fd, GDRDRV_IOC_GET_INFO_V2, out);
}

int mapping_type(int fd, uint64_t handle)
{
	struct gdrdrv_get_info_v2 out;
	int err = info(fd, handle, &out);

	return err ? err : (int)out.mapping_type;
}

int request_type(int fd, uint64_t handle, uint32_t type)
{
	struct gdrdrv_req_mapping_type arg = { .handle = handle, .mapping_type = type };

	return request(fd, GDRDRV_IOC_REQ_MAPPING_TYPE, &arg);
}

int cb_flag(int fd, uint64_t handle)
{
	struct gdrdrv_get_cb_flag arg = { .handle = handle };
	int err = request(fd, GDRDRV_IOC_GET_CB_FLAG, &arg);

	return err ? err : (int)arg.flag;
}

void *map_at(void *at, int fd, uint64_t handle, size_t size, int prot, int flags)
{
	return mmap(at, size, prot, flags, fd, handle * HOST_PAGE);
}

void *map(int fd, uint64_t handle, size_t size)
{
	return map_at(NULL, fd, handle, size, PROT_READ | PROT_WRITE, MAP_SHARED);
}

uint64_t must_pin(int fd, uint64_t addr, uint64_t size)
{
	uint64_t handle;
	int err = pin(fd, addr, size, &handle);

	if (err)
		bail("pinning 0x%" PRIx64 " bytes: %s", size, strerror(-err));
	return handle;
}

void *must_map(int fd, uint64_t handle, size_t size)
{
	void *at = map(fd, handle, size);

	if (at == MAP_FAILED)
		bail("mapping 0x%zx bytes: %s", size, strerror(errno));
	return at;
}

/* --- accesses ----------------------------------------------------------------------------------------------------- */

static _Thread_local sigjmp_buf after_fault;

static void on_fault(int signal)
{
	siglongjmp(after_fault, signal);
}

static void catch_faults(void)
{
	struct sigaction action = { .sa_handler = on_fault, .sa_flags = SA_NODEFER };

	sigaction(SIGBUS, &action, NULL);
	sigaction(SIGSEGV, &action, NULL);
}

int load_byte(const volatile void *at, uint8_t *value)
{
	int signal;

	catch_faults();
	signal = sigsetjmp(after_fault, 0);
	if (!signal)
		*value = *(const volatile uint8_t *)at;
	return signal;
}

int store_byte(volatile void *at, uint8_t value)
{
	int signal;

	catch_faults();
	signal = sigsetjmp(after_fault, 0);
	if (!signal)
		*(volatile uint8_t *)at = value;
	return signal;
}

bool reachable(const volatile void *at)
{
	uint8_t value;

	return !load_byte(at, &value);
}

const char *page_type(const volatile void *at, uint64_t *physical)
{
	static char type[8];
	char text[40];
	unsigned long long address;
	int fd = open("/sys/kernel/debug/nvp2p/pte", O_RDWR | O_CLOEXEC);
	ssize_t got;

	snprintf(text, sizeof(text), "%lx", (unsigned long)at);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		bail("pte: %s", strerror(errno));
	got = pread(fd, text, sizeof(text) - 1, 0);
	close(fd);
	if (got < 0)
		bail("pte: %s", strerror(errno));
	text[got] = 0;
	if (sscanf(text, "%llx %7s", &address, type) != 2)
		return "none";
	if (physical)
		*physical = address;
	return type;
}

int in_child(int (*body)(void *), void *argument)
{
	pid_t pid = fork();
	int status;

	if (pid < 0)
		bail("fork: %s", strerror(errno));
	if (!pid)
		_exit(body(argument));
	if (waitpid(pid, &status, 0) != pid)
		bail("waitpid: %s", strerror(errno));
	return status;
}
