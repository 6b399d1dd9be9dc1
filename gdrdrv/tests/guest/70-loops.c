// SPDX-License-Identifier: MIT
/* Whole lives of a file, many times: nothing may be left over. */
#include "guest.h"

#define SIZE		(2 * GPU_PAGE)
#define TOLERATED_KB	512	/* one lost object of 64 bytes in each of 10000 loops would be more */

static long unreclaimable_kb(void)
{
	static char text[1 << 14];
	const char *at;

	if (!read_file("/proc/meminfo", text, sizeof(text)))
		bail("meminfo: %s", strerror(errno));
	at = strstr(text, "SUnreclaim:");
	return at ? atol(at + strlen("SUnreclaim:")) : 0;
}

static void once(int i)
{
	int fd = gdr_open();
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = must_map(fd, handle, SIZE);

	*(volatile uint8_t *)at = 1;
	/* Every way to the end: all in order, unmapped only, nothing done, partly unmapped. */
	switch (i % 4) {
	case 0:
		munmap(at, SIZE);
		unpin(fd, handle);
		break;
	case 1:
		munmap(at, SIZE);
		break;
	case 3:
		munmap(at + HOST_PAGE, HOST_PAGE);
		break;
	}
	close(fd);
	munmap(at, SIZE);
}

static void loops(const char *mode, int count)
{
	long before, grown;

	for (int i = 0; i < count / 10; i++)
		once(i);
	sleep(1);	/* files are freed a little later */
	before = unreclaimable_kb();
	for (int i = 0; i < count; i++)
		once(i);
	sleep(1);
	grown = unreclaimable_kb() - before;
	diag("%s: %d loops, kernel objects grew by %ld kB", mode, count, grown);
	ok(grown < TOLERATED_KB, "%s: kernel objects do not pile up", mode);
	equal(knob("live"), 0, "%s: the driver has every page table back", mode);
	equal(module_users(), 0, "%s: nothing holds the module", mode);
}

int main(void)
{
	load("");
	loops("persistent", 10000);
	load("use_persistent_mapping=0");
	loops("not persistent", 1000);
	return done();
}
