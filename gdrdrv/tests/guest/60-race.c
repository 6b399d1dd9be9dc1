// SPDX-License-Identifier: MIT
/*
 * One thread maps and touches pins while another one ends them, close behind it. However they meet, once a pin has ended
 * nothing of it may be reachable. The second thread's delay changes from pin to pin, so that it hits every point of the
 * first one's way. The threads wait for each other after a batch only: the host need not run both processors at once.
 */
#include "guest.h"

#include <x86intrin.h>

#define SIZE		(2 * GPU_PAGE)
#define BATCH		64
#define MOST_WAITING	20000

enum by { UNPIN, FREED };

struct result {
	long rounds, mapped, refused, touched, overlapped, stale;
	double seconds;
};

/* One pin's way: both threads' part of it. */
struct round {
	uint64_t handle;
	uint8_t *at;
	unsigned long long map_start, map_end, end_start, end_end;
};

static int fd, probe, free_file;
static enum by by;
static struct round rounds[BATCH];
static long published, batches;
static bool stop;
static pthread_barrier_t barrier;

/* Not PAUSE: an emulated one gives up the processor. */
static void relax(void)
{
	__asm__ volatile("" ::: "memory");
}

/* Whether the byte can be read, without a signal: the kernel reads it for us. */
static bool readable(const void *at)
{
	return pwrite(probe, at, 1, 0) == 1;
}

static void end_pin(const struct round *round)
{
	uint64_t va = BAR_VA + (round - rounds) * SIZE;
	char text[48];
	int length;

	if (by == UNPIN) {
		if (unpin(fd, round->handle))
			bail("unpin failed");
		return;
	}
	length = snprintf(text, sizeof(text), "%" PRIx64 " %llx", va, SIZE);
	if (write(free_file, text, length) != length)
		bail("free: %s", strerror(errno));
}

static void *ender(void *unused)
{
	(void)unused;
	for (;;) {
		pthread_barrier_wait(&barrier);
		if (stop)
			return NULL;
		for (long i = 0; i < BATCH; i++) {
			while (__atomic_load_n(&published, __ATOMIC_ACQUIRE) <= i)
				relax();
			for (long wait = (batches * BATCH + i) * 797 % MOST_WAITING; wait; wait--)
				relax();
			rounds[i].end_start = __rdtsc();
			end_pin(&rounds[i]);
			rounds[i].end_end = __rdtsc();
		}
		pthread_barrier_wait(&barrier);
	}
}

/* Pins, maps and touches BATCH times, with the other thread behind. */
static void batch(struct result *result)
{
	published = 0;
	pthread_barrier_wait(&barrier);
	for (long i = 0; i < BATCH; i++) {
		struct round *round = &rounds[i];

		round->handle = must_pin(fd, BAR_VA + i * SIZE, SIZE);
		__atomic_store_n(&published, i + 1, __ATOMIC_RELEASE);
		round->map_start = __rdtsc();
		round->at = map(fd, round->handle, SIZE);
		round->map_end = __rdtsc();
		/* Seldom: it costs an interrupt of the other processor when the pin ends. */
		if (round->at != MAP_FAILED && i % 16 == 1)
			result->touched += readable(round->at + HOST_PAGE);
	}
	pthread_barrier_wait(&barrier);
	batches++;
}

static void judge(struct result *result)
{
	for (long i = 0; i < BATCH; i++) {
		struct round *round = &rounds[i];

		result->rounds++;
		result->overlapped += round->map_start < round->end_end && round->end_start < round->map_end;
		if (round->at == MAP_FAILED) {
			result->refused++;
		} else {
			result->mapped++;
			result->stale += readable(round->at) || readable(round->at + HOST_PAGE);
			munmap(round->at, SIZE);
		}
		if (by == FREED && unpin(fd, round->handle))
			bail("unpin after the memory was freed");
	}
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

/* For @seconds at least, and until @raced calls of mmap() had another thread end their pin behind them. */
static struct result race(enum by how, double seconds, long raced)
{
	struct result result = { };
	double start = now();
	pthread_t thread;

	by = how;
	stop = false;
	pthread_barrier_init(&barrier, NULL, 2);
	pthread_create(&thread, NULL, ender, NULL);
	while ((result.seconds < seconds || result.rounds < raced) &&
	       result.seconds < 8 * seconds && result.stale < 1000) {
		batch(&result);
		judge(&result);
		result.seconds = now() - start;
	}
	stop = true;
	pthread_barrier_wait(&barrier);
	pthread_join(thread, NULL);
	pthread_barrier_destroy(&barrier);
	return result;
}

static void report(const char *name, struct result result, double seconds, long raced)
{
	diag("%s: %ld races in %.1f s, %ld of them with the end during mmap(): %ld mapped, %ld refused; %ld touched before the end; %ld stale",
	     name, result.rounds, result.seconds, result.overlapped, result.mapped, result.refused, result.touched,
	     result.stale);
	equal(result.stale, 0, "%s: no stale mapping", name);
	ok(result.seconds >= seconds, "%s: for %.0f s", name, seconds);
	ok(result.rounds >= raced, "%s: over %ld calls of mmap()", name, raced);
	/* How many depends on how much of its two processors the guest gets. */
	ok(result.overlapped >= raced / 100, "%s: the pin of one in a hundred ended during the call", name);
	ok(result.mapped >= raced / 10, "%s: one in ten made a mapping", name);
	ok(result.touched > 0, "%s: some were touched before the end", name);
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
