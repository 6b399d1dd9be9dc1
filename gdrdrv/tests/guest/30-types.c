// SPDX-License-Identifier: MIT
/* Memory types: in the page table entries and in the kernel's list of reserved ranges. */
#include "guest.h"

#define PAGES	8U
#define SIZE	(PAGES * GPU_PAGE)

static int fd;
static char list[1 << 16];

/* Whether [start, end) lies in ranges that the kernel lists as write-combining. */
static bool reserved_wc(uint64_t start, uint64_t end)
{
	if (!read_file("/sys/kernel/debug/x86/pat_memtype_list", list, sizeof(list)))
		bail("pat_memtype_list: %s", strerror(errno));
	while (start < end) {
		uint64_t next = start;

		for (char *line = list; line; line = strchr(line, '\n')) {
			unsigned long long from, to;

			line += *line == '\n';
			if (sscanf(line, "PAT: [mem 0x%llx-0x%llx] write-combining", &from, &to) != 2 ||
			    !strstr(line, "write-combining"))
				continue;
			/* The list shows the end as the first byte beyond. */
			if (from <= next && to > next)
				next = to;
		}
		if (next == start)
			return false;
		start = next;
	}
	return true;
}

static bool any_wc(void)
{
	if (!read_file("/sys/kernel/debug/x86/pat_memtype_list", list, sizeof(list)))
		bail("pat_memtype_list: %s", strerror(errno));
	return strstr(list, "write-combining");
}

static void write_combined(enum order order, const char *name)
{
	uint64_t handle, physical[PAGES], first;
	bool wc = true, listed = true, whole_pages = true;
	uint8_t *at;

	ok(!any_wc(), "%s: nothing is reserved before", name);
	set_knob("order", order);
	handle = must_pin(fd, BAR_VA, SIZE);
	at = must_map(fd, handle, SIZE);
	for (unsigned int i = 0; i < PAGES; i++) {
		store_byte(at + i * GPU_PAGE, 1);
		for (size_t offset = 0; offset < GPU_PAGE; offset += HOST_PAGE) {
			uint64_t address = 0;
			const char *type = page_type(at + i * GPU_PAGE + offset, &address);

			if (!offset)
				first = address;
			if (strcmp(type, "WC"))
				diag("page %u + 0x%zx is %s", i, offset, type);
			wc &= !strcmp(type, "WC");
			whole_pages &= address == first + offset;
		}
		physical[i] = first;
		listed &= reserved_wc(first, first + GPU_PAGE);
	}
	ok(wc, "%s: every page is write-combined", name);
	ok(whole_pages, "%s: one touch maps its whole GPU page", name);
	ok(listed, "%s: every page is reserved", name);
	if (order == LINEAR)
		ok(physical[1] == physical[0] + GPU_PAGE, "%s: the pages adjoin", name);
	else
		ok(physical[1] != physical[0] + GPU_PAGE, "%s: the pages do not adjoin", name);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "%s: and reported as such", name);

	munmap(at, SIZE);
	ok(reserved_wc(physical[0], physical[0] + GPU_PAGE), "%s: reserved while it is pinned", name);
	equal(unpin(fd, handle), 0, "%s: unpin", name);
	ok(!any_wc(), "%s: nothing is reserved afterwards", name);
	set_knob("order", LINEAR);
}

static void overlapping(void)
{
	uint64_t a = must_pin(fd, BAR_VA, SIZE), b = must_pin(fd, BAR_VA + GPU_PAGE, SIZE);
	uint8_t *at = must_map(fd, b, SIZE);

	unpin(fd, a);
	store_byte(at, 1);
	ok(!strcmp(page_type(at, NULL), "WC"), "pins that overlap do not take the type from each other");
	unpin(fd, b);
	munmap(at, SIZE);
	ok(!any_wc(), "nothing is reserved afterwards");
}

static void given_back_by_callback(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);

	ok(any_wc(), "reserved while it is pinned");
	free_gpu(BAR_VA, SIZE);
	ok(!any_wc(), "not after the memory was freed");
	unpin(fd, handle);
}

static void cached(void)
{
	uint64_t handle = must_pin(fd, RAM_VA, SIZE), physical = 0;
	uint8_t *at = must_map(fd, handle, SIZE);

	store_byte(at, 1);
	ok(!strcmp(page_type(at, &physical), "WB"), "memory coherent with the CPU is cached");
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_CACHED, "and reported as such");
	ok(!any_wc(), "and not reserved");
	equal(request_type(fd, handle, GDRDRV_MAPPING_CACHED), -EBUSY, "no request while it is mapped");
	munmap(at, SIZE);
	equal(request_type(fd, handle, GDRDRV_MAPPING_WC), -EOPNOTSUPP, "it cannot be write-combined");
	equal(request_type(fd, handle, GDRDRV_MAPPING_DEVICE), -EOPNOTSUPP, "nor device memory");
	equal(request_type(fd, handle, GDRDRV_MAPPING_CACHED), 0, "cached can be asked for");
	at = must_map(fd, handle, SIZE);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_CACHED, "and is given");
	unpin(fd, handle);
	ok(!reachable(at), "unpinning reaches it, too");
	munmap(at, SIZE);
}

static void requests(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at;

	equal(request_type(fd, handle, GDRDRV_MAPPING_CACHED), -EOPNOTSUPP, "a BAR cannot be cached");
	equal(request_type(fd, handle, GDRDRV_MAPPING_DEVICE), -EOPNOTSUPP, "nor device memory on x86");
	equal(request_type(fd, handle, 4), -EINVAL, "an unknown type");
	equal(request_type(fd, handle, -1U), -EINVAL, "another one");
	equal(request_type(fd, handle, GDRDRV_MAPPING_WC), 0, "write-combined can be asked for");
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_NONE, "which maps nothing");
	at = must_map(fd, handle, SIZE);
	equal(mapping_type(fd, handle), GDRDRV_MAPPING_WC, "and is given");
	equal(request_type(fd, handle, GDRDRV_MAPPING_WC), -EBUSY, "no request while it is mapped");
	munmap(at, HOST_PAGE);
	equal(request_type(fd, handle, GDRDRV_MAPPING_WC), -EBUSY, "nor while a part is");
	munmap(at, SIZE);
	equal(request_type(fd, handle, GDRDRV_MAPPING_NONE), 0, "a request can be withdrawn");
	unpin(fd, handle);
}

int main(void)
{
	load("");
	fd = gdr_open();
	write_combined(LINEAR, "contiguous");
	write_combined(REVERSED, "reversed");
	write_combined(HOLES, "with holes");
	overlapping();
	cached();
	requests();
	close(fd);

	load("use_persistent_mapping=0");
	fd = gdr_open();
	write_combined(HOLES, "with holes, not persistent");
	given_back_by_callback();
	close(fd);
	return done();
}
