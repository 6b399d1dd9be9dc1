// SPDX-License-Identifier: MIT
/*
 * One thread maps and touches a pin while another one ends it. However they meet, once the pin has ended nothing of it may
 * be reachable. Each round is one such race; the second thread waits a little longer from round to round and then starts
 * over, so that it hits every point of the first one's way.
 */
#include "guest.h"

#define SIZE		(2 * GPU_PAGE)
#define MOST_WAITING	4000

enum by { UNPIN, FREED };

struct result {
	long rounds, mapped, refused, touched, stale;
	double seconds;
};

static int fd, probe, free_file;
static enum by by;
static uint64_t handle;
static long go, finished;

static void relax(void)
{
	__builtin_ia32_pause();
}

/* Whether the byte can be read, without a signal: the kernel reads it for us. */
static bool readable(const void *at)
{
	return pwrite(probe, at, 1, 0) == 1;
}

static void end_pin(void)
{
	char text[48];
	int length;

	if (by == UNPIN) {
		if (unpin(fd, handle))
			bail("unpin failed");
		return;
	}
	length = snprintf(text, sizeof(text), "%llx %llx", BAR_VA, SIZE);
	if (write(free_file, text, length) != length)
		bail("free: %s", strerror(errno));
}

static void *ender(void *unused)
{
	(void)unused;
	for (long round = 1;; round++) {
		long wanted;

		while ((wanted = __atomic_load_n(&go, __ATOMIC_ACQUIRE)) < round) {
			if (wanted < 0)
				return NULL;
			relax();
		}
		for (long wait = round * 7 % MOST_WAITING; wait; wait--)
			relax();
		end_pin();
		__atomic_store_n(&finished, round, __ATOMIC_RELEASE);
	}
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

static struct result race(enum by how, double seconds, long mapped)
{
	struct result result = { };
	double start = now();
	pthread_t thread;

	by = how;
	go = finished = 0;
	pthread_create(&thread, NULL, ender, NULL);
	while (result.seconds < seconds || result.mapped < mapped) {
		long round = ++result.rounds;
		uint8_t *at;

		handle = must_pin(fd, BAR_VA, SIZE);
		__atomic_store_n(&go, round, __ATOMIC_RELEASE);
		at = map(fd, handle, SIZE);
		if (at != MAP_FAILED && round & 1)
			result.touched += readable(at + HOST_PAGE);
		while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < round)
			relax();

		if (at == MAP_FAILED) {
			result.refused++;
		} else {
			result.mapped++;
			result.stale += readable(at) || readable(at + HOST_PAGE);
			munmap(at, SIZE);
		}
		if (how == FREED && unpin(fd, handle))
			bail("unpin after the memory was freed");
		result.seconds = now() - start;
		if (result.seconds > 8 * seconds)
			break;
	}
	__atomic_store_n(&go, -1, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
	return result;
}

static void report(const char *name, struct result result, double seconds, long mapped)
{
	diag("%s: %ld races in %.1f s: %ld mapped, of which %ld touched before the end; %ld refused; %ld stale", name,
	     result.rounds, result.seconds, result.mapped, result.touched, result.refused, result.stale);
	equal(result.stale, 0, "%s: no stale mapping", name);
	ok(result.seconds >= seconds, "%s: for %.0f s", name, seconds);
	ok(result.mapped >= mapped, "%s: over %ld mappings", name, mapped);
	ok(result.touched > 0 && result.touched < result.mapped, "%s: with the end before and after the first touch", name);
}

int main(void)
{
	probe = memfd_create("probe", MFD_CLOEXEC);
	load("");
	fd = gdr_open();
	report("unpin", race(UNPIN, 15, 100000), 15, 100000);
	close(fd);

	load("use_persistent_mapping=0");
	free_file = open("/sys/kernel/debug/nvp2p/free", O_WRONLY | O_CLOEXEC);
	fd = gdr_open();
	report("unpin, not persistent", race(UNPIN, 2, 5000), 2, 5000);
	report("memory freed", race(FREED, 3, 5000), 3, 5000);
	close(fd);
	return done();
}
