// SPDX-License-Identifier: MIT
/*
 * Nobody reaches memory that is no longer his: after unpin, after close, after the driver took the pages back, in any
 * order and while others are at work.
 */
#include "guest.h"

#define SIZE	(4 * GPU_PAGE)

static int fd;

static bool all_gone(const uint8_t *at)
{
	for (size_t offset = 0; offset < SIZE; offset += HOST_PAGE) {
		uint8_t value;

		if (load_byte(at + offset, &value) != SIGBUS || strcmp(page_type(at + offset, NULL), "none"))
			return false;
	}
	return true;
}

static uint8_t *touched(uint64_t handle)
{
	uint8_t *at = must_map(fd, handle, SIZE);

	for (size_t offset = 0; offset < SIZE; offset += HOST_PAGE)
		store_byte(at + offset, 1);
	return at;
}

static void after_unpin(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE), next;
	uint8_t *at = touched(handle), *other;

	equal(unpin(fd, handle), 0, "unpin under a mapping");
	ok(all_gone(at), "SIGBUS everywhere");
	equal(store_byte(at, 1), SIGBUS, "also for stores");
	next = must_pin(fd, BAR_VA, SIZE);
	other = touched(next);
	ok(all_gone(at), "a new pin of the memory does not revive the mapping");
	munmap(at, SIZE);
	ok(reachable(other) && mapping_type(fd, next) == GDRDRV_MAPPING_WC, "unmapping the dead one leaves the new one alone");
	munmap(other, SIZE);
	unpin(fd, next);

	handle = must_pin(fd, BAR_VA, SIZE);
	at = must_map(fd, handle, SIZE);
	unpin(fd, handle);
	ok(all_gone(at), "a mapping never touched before unpin: SIGBUS, too");
	munmap(at, SIZE);
}

/* munmap() of another range closes the last descriptor's file only after the mapping is gone: close() keeps it. */
static void after_close(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = touched(handle);

	close(fd);
	ok(reachable(at), "a mapping keeps the file, and so its pins, after close");
	equal(knob("live"), 1, "the pages are still pinned");
	munmap(at, SIZE);
	equal(knob("live"), 0, "until it is unmapped");
	fd = gdr_open();
}

static void after_free_persistent(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	uint8_t *at = touched(handle);

	free_gpu(BAR_VA, SIZE);
	ok(reachable(at), "persistent pages stay when the memory is freed");
	equal(cb_flag(fd, handle), 0, "without a callback");
	equal(unpin(fd, handle), 0, "unpin");
	ok(all_gone(at), "then they are gone");
	munmap(at, SIZE);
}

static void after_free(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE), other;
	uint8_t *at = touched(handle);

	equal(cb_flag(fd, handle), 0, "callback flag 0 before");
	free_gpu(BAR_VA, SIZE);
	ok(all_gone(at), "SIGBUS everywhere after the memory was freed");
	equal(cb_flag(fd, handle), 1, "callback flag 1");
	ok(map(fd, handle, SIZE) == MAP_FAILED && errno == EINVAL, "it cannot be mapped again");
	munmap(at, SIZE);
	ok(map(fd, handle, SIZE) == MAP_FAILED && errno == EINVAL, "also not once it is unmapped");
	equal(unpin(fd, handle), 0, "unpin of what was taken back");
	equal(unpin(fd, handle), -EINVAL, "once");

	handle = must_pin(fd, BAR_VA, SIZE);
	other = must_pin(fd, BAR_VA + SIZE, SIZE);
	at = touched(other);
	free_gpu(BAR_VA, SIZE);
	ok(reachable(at), "other memory is not touched");
	equal(cb_flag(fd, other), 0, "and its flag not set");
	unpin(fd, handle);
	unpin(fd, other);
	munmap(at, SIZE);
}

static void callback_before_pin_returns(void)
{
	uint64_t handle;
	long before = knob("live");

	set_knob("callback_in_get", 1);
	equal(pin(fd, BAR_VA, SIZE, &handle), 0, "memory freed while it is being pinned");
	equal(knob("live"), before, "the driver has its page table back");
	equal(cb_flag(fd, handle), 1, "callback flag 1");
	ok(map(fd, handle, SIZE) == MAP_FAILED && errno == EINVAL, "it cannot be mapped");
	equal(unpin(fd, handle), 0, "unpin");
	set_knob("callback_in_get", 0);
}

static void put_fails(void)
{
	uint64_t handle = must_pin(fd, BAR_VA, SIZE);
	int users = module_users();
	uint8_t *at = touched(handle);

	set_knob("fail_put", EIO);
	equal(unpin(fd, handle), 0, "unpin although the driver keeps the pages");
	ok(all_gone(at), "SIGBUS all the same");
	equal(module_users(), users, "the callback still holds the module");
	free_gpu(BAR_VA, SIZE);
	equal(module_users(), users - 1, "until it comes");
	munmap(at, SIZE);
}

/* --- the callback against unpin and close ------------------------------------------------------------------------- */

static void *free_later(void *unused)
{
	(void)unused;
	free_gpu(BAR_VA, SIZE);
	return NULL;
}

static void *unpin_later(void *handle)
{
	return (void *)(long)unpin(fd, *(uint64_t *)handle);
}

/* Both at once, with a delay that makes one of them wait for the other inside the driver. */
static void unpin_against_callback(const char *delay, const char *name)
{
	pthread_t threads[2];
	uint64_t handle;
	uint8_t *at;
	void *result;

	set_knob(delay, 50);
	handle = must_pin(fd, BAR_VA, SIZE);
	at = touched(handle);
	pthread_create(&threads[0], NULL, free_later, NULL);
	pthread_create(&threads[1], NULL, unpin_later, &handle);
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], &result);
	set_knob(delay, 0);
	equal((long)result, 0, "unpin while the memory is freed, %s", name);
	ok(all_gone(at), "SIGBUS everywhere");
	equal(knob("live"), 0, "the driver has its page table back, once");
	munmap(at, SIZE);
}

static void storm(void)
{
	pthread_t threads[2];
	bool right = true;
	void *result;

	for (int i = 0; i < 100; i++) {
		uint64_t handle = must_pin(fd, BAR_VA, SIZE);
		uint8_t *at = touched(handle);

		pthread_create(&threads[i & 1], NULL, free_later, NULL);
		pthread_create(&threads[~i & 1], NULL, unpin_later, &handle);
		pthread_join(threads[i & 1], NULL);
		pthread_join(threads[~i & 1], &result);
		right &= !result && !reachable(at) && !reachable(at + SIZE - HOST_PAGE);
		munmap(at, SIZE);
	}
	ok(right, "100 times more, without a delay");
	equal(knob("live"), 0, "the driver has all page tables back");
}

/* --- two unpins of one pin ---------------------------------------------------------------------------------------- */

static uint64_t contended;
static pthread_barrier_t barrier;

static void *unpin_contended(void *unused)
{
	(void)unused;
	pthread_barrier_wait(&barrier);
	return (void *)(long)unpin(fd, contended);
}

static void double_unpin(void)
{
	long live = knob("live");
	int both = 0, none = 0;

	pthread_barrier_init(&barrier, NULL, 2);
	for (int i = 0; i < 200; i++) {
		pthread_t thread;
		void *theirs;
		long mine;

		contended = must_pin(fd, BAR_VA, SIZE);
		pthread_create(&thread, NULL, unpin_contended, NULL);
		mine = (long)unpin_contended(NULL);
		pthread_join(thread, &theirs);
		both += !mine && !theirs;
		none += mine && theirs;
	}
	ok(!both && !none, "of two unpins at once one succeeds (200 times: both %d, none %d)", both, none);
	equal(knob("live"), live, "every page table was given back once");
	pthread_barrier_destroy(&barrier);
}

int main(void)
{
	load("");
	fd = gdr_open();
	after_unpin();
	after_close();
	after_free_persistent();
	double_unpin();
	close(fd);

	load("use_persistent_mapping=0");
	fd = gdr_open();
	after_unpin();
	after_close();
	after_free();
	callback_before_pin_returns();
	put_fails();
	unpin_against_callback("delay_callback_ms", "the callback first");
	unpin_against_callback("delay_put_ms", "the unpin first");
	storm();
	double_unpin();
	equal(knob("puts_not_found") > 0, 1, "some puts came after the callback, as they should in this test");
	close(fd);
	return done();
}
