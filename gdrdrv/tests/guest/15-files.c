// SPDX-License-Identifier: MIT
/* What others look at: the node, /proc, /sys, parameters, limits and their accounting. */
#include "guest.h"

static char text[4096];

static bool has_line(const char *path, const char *line)
{
	size_t length = strlen(line);

	if (!read_file(path, text, sizeof(text)))
		return false;
	for (const char *at = text; (at = strstr(at, line)); at++) {
		if ((at == text || at[-1] == '\n') && at[length] == '\n')
			return true;
	}
	return false;
}

static unsigned int mode_of(const char *path)
{
	struct stat st;

	return stat(path, &st) ? 0 : st.st_mode & 07777;
}

static int device_major(void)
{
	const char *at;

	if (!read_file("/proc/devices", text, sizeof(text)))
		return -1;
	at = strstr(text, " gdrdrv\n");
	if (!at)
		return -1;
	while (at > text && at[-1] != '\n')
		at--;
	return atoi(at);
}

static void node(void)
{
	struct stat st;
	int major_number = device_major(), fd;

	ok(major_number > 0, "/proc/devices names gdrdrv");
	ok(!stat("/dev/gdrdrv", &st) && S_ISCHR(st.st_mode), "/dev/gdrdrv is made on load");
	ok(major(st.st_rdev) == (unsigned int)major_number && minor(st.st_rdev) == 0, "of that major number and minor 0");
	equal(mode_of("/dev/gdrdrv"), 0666, "mode 0666");

	unlink("/tmp/gdrdrv1");
	if (mknod("/tmp/gdrdrv1", S_IFCHR | 0666, makedev(major_number, 1)))
		bail("mknod: %s", strerror(errno));
	ok(open("/tmp/gdrdrv1", O_RDWR) < 0 && errno == ENXIO, "minor 1 is no device");
	fd = gdr_open();
	ok(lseek(fd, 0, SEEK_SET) < 0 && errno == ESPIPE, "no seeking");
	close(fd);
}

static void proc_and_sys(void)
{
	ok(has_line("/sys/module/gdrdrv/version", "2.6"), "/sys/module/gdrdrv/version");
	ok(access("/sys/module/gdrdrv/parameters", F_OK) < 0, "no parameter can be read or set in /sys");
	ok(has_line("/proc/driver/gdrdrv/params", "Version: 2.6"), "params: version");
	ok(has_line("/proc/driver/gdrdrv/params", "Built for NVIDIA driver flavor: opensource"), "params: flavor");
	ok(has_line("/proc/driver/gdrdrv/params", "Use persistent mapping: yes"), "params: persistent");
	ok(has_line("/proc/driver/gdrdrv/params", "dbg_enabled: 0"), "params: dbg_enabled");
	ok(has_line("/proc/driver/gdrdrv/params", "info_enabled: 0"), "params: info_enabled");
	equal(mode_of("/proc/driver/gdrdrv/params"), 0444, "params: mode 0444");
	ok(access("/proc/driver/gdrdrv/nv_get_pages_refcount", F_OK) < 0, "no nv_get_pages_refcount");
}

static void parameters(void)
{
	const char *refcount = "/proc/driver/gdrdrv/nv_get_pages_refcount";
	uint64_t handle;
	int fd;

	load("dbg_enabled=1 info_enabled=1 use_persistent_mapping=0 dev_mode=0640");
	ok(has_line("/proc/driver/gdrdrv/params", "Use persistent mapping: no"), "use_persistent_mapping=0");
	ok(has_line("/proc/driver/gdrdrv/params", "dbg_enabled: 1"), "dbg_enabled=1");
	ok(has_line("/proc/driver/gdrdrv/params", "info_enabled: 1"), "info_enabled=1");
	equal(mode_of("/dev/gdrdrv"), 0640, "dev_mode=0640");
	equal(mode_of(refcount), 0440, "nv_get_pages_refcount: mode 0440");
	ok(has_line(refcount, "0"), "it counts 0");
	fd = gdr_open();
	handle = must_pin(fd, BAR_VA, 1);
	must_pin(fd, BAR_VA, 1);
	ok(has_line(refcount, "2"), "2 after two pins");
	unpin(fd, handle);
	ok(has_line(refcount, "1"), "1 after unpin");
	free_gpu(BAR_VA, 1);
	ok(has_line(refcount, "0"), "0 after the memory was freed");
	close(fd);
}

static bool accounted(int fd, unsigned int pins, unsigned long bytes)
{
	char path[48], line[48];
	bool right;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	snprintf(line, sizeof(line), "gdrdrv-pins:\t%u", pins);
	right = has_line(path, line);
	snprintf(line, sizeof(line), "gdrdrv-bytes:\t%lu", bytes);
	return has_line(path, line) && right;
}

static void limits(void)
{
	uint64_t a, b, handle;
	int fd, other;

	load("max_pins=3 max_bytes=0x80000");
	fd = gdr_open();
	ok(accounted(fd, 0, 0), "fdinfo of a new file");
	a = must_pin(fd, BAR_VA, 4 * GPU_PAGE);
	b = must_pin(fd, BAR_VA, 4 * GPU_PAGE);
	ok(accounted(fd, 2, 8 * GPU_PAGE), "fdinfo counts pins and bytes");
	equal(pin(fd, BAR_VA, 1, &handle), -ENOMEM, "max_bytes holds");
	other = gdr_open();
	equal(pin(other, BAR_VA, 1, &handle), 0, "for each file by itself");
	equal(pin(other, BAR_VA, 8 * GPU_PAGE, &handle), -ENOMEM, "also for what is left");
	equal(pin(other, BAR_VA, 1ULL << 40, &handle), -ENOMEM, "and for one that is larger than all");
	close(other);
	unpin(fd, b);
	must_pin(fd, BAR_VA, 1);
	must_pin(fd, BAR_VA, 1);
	equal(pin(fd, BAR_VA, 1, &handle), -ENOMEM, "max_pins holds");
	unpin(fd, a);
	ok(accounted(fd, 2, 2 * GPU_PAGE), "unpinning is counted");
	/* With room for one more: the driver is asked each time. */
	for (int i = 0; i < 100; i++) {
		set_knob("fail_get", ENOMEM);
		pin(fd, BAR_VA, 1, &handle);
		pin_flags(fd, BAR_VA, 1, 8, &handle);
	}
	set_knob("fail_get", 0);
	ok(accounted(fd, 2, 2 * GPU_PAGE), "pins that failed are not counted");
	equal(pin(fd, BAR_VA, 1, &handle), 0, "and take no room");
	close(fd);
}

int main(void)
{
	load("");
	node();
	proc_and_sys();
	parameters();
	limits();
	return done();
}
