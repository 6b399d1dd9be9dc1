// SPDX-License-Identifier: MIT
/*
 * Writes a pattern of its own to each page through mappings, and says at which page of the BAR it must lie: the runner looks
 * there from outside once the machine has stopped. Hence the last test.
 */
#include "guest.h"

#define PAGES	16U

static uint8_t pattern(uint8_t seed, size_t at)
{
	return seed * 31 + at * 7 + (at >> 8) * 13;
}

/* The page of the BAR behind a page of the window, as the orders are defined in the provider's header. */
static unsigned int place(enum order order, unsigned int page)
{
	switch (order) {
	case REVERSED:
		return BAR_PAGES - 1 - page;
	case HOLES:
		return page < BAR_PAGES / 2 ? 2 * page : 2 * (page - BAR_PAGES / 2) + 1;
	default:
		return page;
	}
}

static void lay_out(int fd, enum order order, const char *name, unsigned int first)
{
	uint64_t handle;
	uint8_t *at, page[GPU_PAGE];
	unsigned int wrong = 0;

	set_knob("order", order);
	handle = must_pin(fd, BAR_VA + first * GPU_PAGE, PAGES * GPU_PAGE);
	at = must_map(fd, handle, PAGES * GPU_PAGE);
	for (unsigned int i = 0; i < PAGES; i++) {
		uint8_t seed = order * PAGES + i + 1;

		for (size_t byte = 0; byte < GPU_PAGE; byte++)
			page[byte] = pattern(seed, byte);
		/* In pieces that cross host pages and are not aligned. */
		for (size_t done = 0, piece; done < GPU_PAGE; done += piece) {
			piece = done + 5003 < GPU_PAGE ? 5003 : GPU_PAGE - done;
			memcpy(at + i * GPU_PAGE + done, page + done, piece);
		}
		printf("# layout %u %u\n", place(order, first + i), seed);
	}
	munmap(at, PAGES * GPU_PAGE);

	at = must_map(fd, handle, PAGES * GPU_PAGE);
	for (unsigned int i = 0; i < PAGES; i++) {
		for (size_t byte = 0; byte < GPU_PAGE; byte++)
			wrong += at[i * GPU_PAGE + byte] != pattern(order * PAGES + i + 1, byte);
	}
	equal(wrong, 0, "%s: a second mapping reads what the first one wrote", name);
	munmap(at, PAGES * GPU_PAGE);
	unpin(fd, handle);
	set_knob("order", LINEAR);
}

int main(void)
{
	int fd;

	load("");
	fd = gdr_open();
	/* Windows chosen so that no two share a page of the BAR. */
	lay_out(fd, LINEAR, "contiguous", 0);
	lay_out(fd, REVERSED, "reversed", 0);
	lay_out(fd, HOLES, "with holes", 20);
	close(fd);
	return done();
}
