// SPDX-License-Identifier: MIT
/* Which mappings are made, what can be done to them, and that unpinning reaches all that is left of them. */
#include "guest.h"

#define PAGES	4
#define SIZE	(PAGES * GPU_PAGE)

static int fd;

static void refused(void *at, int error, const char *name)
{
	int got = errno;

	if (!ok(at == MAP_FAILED && got == error, "mmap refused: %s", name) && at == MAP_FAILED)
		diag("%s", strerror(got));
}

static void offsets_and_lengths(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE), skewed = must_pin(fd, BAR_VA + 4096, 8);
	struct gdrdrv_get_info v1 = { .handle = handle };
	uint8_t *at;

	refused(map(fd, handle + 1, HOST_PAGE), EINVAL, "an offset inside the pin");
	refused(map(fd, handle - 1, HOST_PAGE), EINVAL, "an offset before the pin");
	refused(map(fd, handle, SIZE + HOST_PAGE), EINVAL, "longer than the pin");
	refused(map(fd, skewed, HOST_PAGE), EINVAL, "a pin whose address is not that of a GPU page");

	at = must_map(fd, handle, SIZE);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "GET_INFO_V2 says write-combined at once");
	equal(request(fd, GDRDRV_IOC_GET_INFO, &v1), 0, "GET_INFO");
	ok(v1.mapped == 1 && v1.wc_mapping == 1, "and says so, too");
	refused(map(fd, handle, HOST_PAGE), EINVAL, "a second mapping of the handle");
	equal(munmap(at, SIZE), 0, "munmap");
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_NONE, "then it is mapped no more");
	ok(!reachable(at), "and nothing is there");

	at = must_map(fd, handle, 3 * HOST_PAGE);
	ok(reachable(at + 2 * HOST_PAGE), "a part of the pin can be mapped");
	munmap(at, 3 * HOST_PAGE);
	at = must_map(fd, handle, 5000);
	ok(reachable(at + 8191), "a length is rounded up to host pages");
	munmap(at, 5000);
	equal(unpin(fd, handle), 0, "unpin");
	equal(unpin(fd, skewed), 0, "unpin of what could not be mapped");
}

static void protections(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	int read_only = open("/dev/gdrdrv", O_RDONLY | O_CLOEXEC);
	uint64_t other = must_pin(read_only, BAR_VA, SIZE);
	uint8_t *at;

	refused(map_at(NULL, fd, handle, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE), EINVAL, "private");
	refused(map_at(NULL, fd, handle, SIZE, PROT_READ, MAP_PRIVATE), EINVAL, "private and only read");
	refused(map_at(NULL, fd, handle, SIZE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED), EACCES, "executable");
	refused(map_at(NULL, read_only, other, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED), EACCES, "writable from a read-only file");
	close(read_only);

	at = must_map(fd, handle, SIZE);
	ok(mprotect(at, SIZE, PROT_READ | PROT_EXEC) && errno == EACCES, "it cannot be made executable");
	ok(madvise(at, SIZE, MADV_DOFORK) && errno == EINVAL, "it cannot be made inheritable");
	equal(store_byte(at, 1), 0, "it can be written");
	equal(mprotect(at, SIZE, PROT_READ), 0, "it can be made read-only");
	equal(store_byte(at, 1), SIGSEGV, "and is");
	ok(reachable(at), "and can be read");
	equal(unpin(fd, handle), 0, "unpin");
	ok(!reachable(at), "then nothing is there");
	munmap(at, SIZE);
}

static void flags(void)
{
	static const char * const set[] = { " rd", " wr", " sh", " io", " pf", " dc", " de", " dd" };
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = must_map(fd, handle, SIZE);
	static char smaps[1 << 16];
	char start[24], *line, *end;

	snprintf(start, sizeof(start), "%lx-", (unsigned long)at);
	if (!read_file("/proc/self/smaps", smaps, sizeof(smaps)))
		bail("smaps: %s", strerror(errno));
	line = strstr(smaps, start);
	line = line ? strstr(line, "VmFlags:") : NULL;
	if (!line)
		bail("no VmFlags of our mapping");
	end = strchr(line, '\n');
	*end = 0;
	diag("%s", line);
	for (size_t i = 0; i < sizeof(set) / sizeof(set[0]); i++)
		ok(strstr(line, set[i]), "flag%s", set[i]);
	ok(!strstr(line, " me"), "no flag me");
	munmap(at, SIZE);
	unpin(fd, handle);
}

/* Unmaps a part, unpins, and looks at all of it. */
static void partial(const char *name, size_t from, size_t to)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = must_map(fd, handle, SIZE);
	bool before = true, after = false;

	for (size_t offset = 0; offset < SIZE; offset += HOST_PAGE)
		store_byte(at + offset, 1);
	equal(munmap(at + from, to - from), 0, "unmapping the %s", name);
	for (size_t offset = 0; offset < SIZE; offset += HOST_PAGE)
		before &= reachable(at + offset) == (offset < from || offset >= to);
	ok(before, "the rest, and only the rest, is reachable");
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "the pin still counts as mapped");
	refused(map(fd, handle, SIZE), EINVAL, "a second mapping while a part is left");
	equal(unpin(fd, handle), 0, "unpin");
	for (size_t offset = 0; offset < SIZE; offset += HOST_PAGE)
		after |= reachable(at + offset) || strcmp(page_type(at + offset, NULL), "none");
	ok(!after, "no part is reachable any more");
	munmap(at, SIZE);
}

static void piecemeal(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = must_map(fd, handle, SIZE);

	for (size_t offset = 0; offset < SIZE; offset += 2 * HOST_PAGE)
		munmap(at + offset, HOST_PAGE);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "every other page unmapped: still mapped");
	for (size_t offset = HOST_PAGE; offset < SIZE; offset += 2 * HOST_PAGE)
		munmap(at + offset, HOST_PAGE);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_NONE, "the others, too: mapped no more");
	at = must_map(fd, handle, SIZE);
	ok(reachable(at), "it can be mapped again");
	munmap(at, SIZE);
	unpin(fd, handle);
}

static void moves(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = must_map(fd, handle, SIZE), *room, *moved;

	store_byte(at, 1);
	room = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	moved = mremap(at, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, room);
	ok(moved == MAP_FAILED, "mremap does not move a mapping");
	ok(mremap(at, SIZE, 2 * SIZE, MREMAP_MAYMOVE) == MAP_FAILED, "mremap does not grow it");
	ok(mremap(at, 0, SIZE, MREMAP_MAYMOVE) == MAP_FAILED, "mremap does not double it");
	ok(reachable(at), "it is where it was");
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "and counts as mapped");
	ok(mremap(at, SIZE, SIZE / 2, 0) == at, "mremap shrinks it");
	equal(unpin(fd, handle), 0, "unpin");
	ok(!reachable(at), "it is gone");
	ok(moved == MAP_FAILED || !reachable(moved), "also where it might have been moved to");
	munmap(at, SIZE);
	munmap(room, SIZE);
}

static long faults(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_minflt;
}

static void fault_count(enum order order, const char *name, long most)
{
	uint64_t handle;
	uint8_t *at;
	long before, count;

	set_knob("order", order);
	handle = must_pin(fd, BAR_VA, 128 * GPU_PAGE);
	at = must_map(fd, handle, 128 * GPU_PAGE);
	before = faults();
	for (size_t offset = 0; offset < 128 * GPU_PAGE; offset += HOST_PAGE)
		*(volatile uint8_t *)(at + offset);
	count = faults() - before;
	ok(count >= 4 && count <= most, "%ld faults for 8 MiB, %s pages", count, name);
	set_knob("order", LINEAR);
	munmap(at, 128 * GPU_PAGE);
	unpin(fd, handle);
}

/* Wherever the mapping lies: here its second GPU page lies across a boundary of 2 MiB. */
static void whole_gpu_pages(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *room = mmap(NULL, 8 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *boundary = (uint8_t *)(((uintptr_t)room + (4 << 20)) & -(2UL << 20));
	uint8_t *at = boundary - GPU_PAGE - 5 * HOST_PAGE;
	bool whole = true;

	if (map_at(at, fd, handle, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED) != at)
		bail("mapping at an address: %s", strerror(errno));
	store_byte(at + GPU_PAGE + 3 * HOST_PAGE, 1);
	for (size_t offset = GPU_PAGE; offset < 2 * GPU_PAGE; offset += HOST_PAGE)
		whole &= strcmp(page_type(at + offset, NULL), "none") != 0;
	ok(whole, "one touch maps a whole GPU page across 2 MiB");
	munmap(room, 8 << 20);
	unpin(fd, handle);
}

int main(void)
{
	load("");
	fd = gdr_open();
	whole_gpu_pages();
	offsets_and_lengths();
	protections();
	flags();
	partial("head", 0, HOST_PAGE);
	partial("middle", GPU_PAGE, 2 * GPU_PAGE);
	partial("tail", SIZE - HOST_PAGE, SIZE);
	piecemeal();
	moves();
	fault_count(LINEAR, "contiguous", 8);
	fault_count(HOLES, "scattered", 136);
	close(fd);
	return done();
}
