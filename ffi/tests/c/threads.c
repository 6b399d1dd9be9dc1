/* 16 threads: pin, map, copy, unmap and unpin on one gdr_t without a lock; races on one handle; copies against unmap. */
#include <pthread.h>
#include <sched.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

enum { THREADS = 16, BUFFERS = 16 };
static int rounds = 300;
static gdr_t g;
static uint64_t dev;
static pthread_barrier_t barrier;
static gdr_mh_t shared;
static void *shared_map;
static uint64_t shared_addr;
static int wins, stop;
static long copied;

static void *own_pins(void *arg)
{
    uintptr_t n = (uintptr_t)arg;
    unsigned char out[777], in[777];
    uint64_t addr = dev + n * PAGE;
    for (int i = 0; i < rounds; i++) {
        gdr_mh_t mh;
        void *map = NULL;
        gdr_info_t info;
        OK(gdr_pin_buffer(g, addr, PAGE, 0, 0, &mh));
        OK(gdr_map(g, mh, &map, PAGE));
        OK(gdr_get_info(g, mh, &info));
        CHECK(info.va == addr && info.mapped == 1);
        fill(out, sizeof out, (unsigned)i + (unsigned)n);
        OK(gdr_copy_to_mapping(mh, (char *)map + i, out, sizeof out));
        OK(gdr_copy_from_mapping(mh, in, (char *)map + i, sizeof in));
        CHECK(memcmp(out, in, sizeof in) == 0);
        if (i % 3)
            OK(gdr_unmap(g, mh, map, PAGE));
        OK(gdr_unpin_buffer(g, mh));
    }
    return NULL;
}

/* Of all that give one handle up, one succeeds. */
static void *one_winner(void *arg)
{
    for (int i = 0; i < rounds; i++) {
        if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD) {
            CHECK(i == 0 || wins == 1);
            wins = 0;
            OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &shared));
        }
        pthread_barrier_wait(&barrier);
        int result = gdr_unpin_buffer(g, shared);
        CHECK(result == 0 || result == EINVAL);
        if (result == 0)
            __atomic_add_fetch(&wins, 1, __ATOMIC_SEQ_CST);
    }
    return arg;
}

/* Copies meet an unmap of their own handle: they succeed or return EINVAL, and never fault. */
static void *copies(void *arg)
{
    char bytes[4096];
    memset(bytes, 1, sizeof bytes);
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        gdr_mh_t mh;
        mh.h = __atomic_load_n(&shared.h, __ATOMIC_RELAXED);
        void *map = __atomic_load_n(&shared_map, __ATOMIC_RELAXED);
        int to = gdr_copy_to_mapping(mh, map, bytes, sizeof bytes);
        int from = gdr_copy_from_mapping(mh, bytes, map, sizeof bytes);
        CHECK((to == 0 || to == EINVAL) && (from == 0 || from == EINVAL));
        __atomic_add_fetch(&copied, (to == 0) + (from == 0), __ATOMIC_RELAXED);
    }
    return arg;
}

static void unmap_under_copies(void)
{
    pthread_t threads[4];
    for (int n = 0; n < 4; n++)
        CHECK(pthread_create(&threads[n], NULL, copies, NULL) == 0);
    for (int i = 0; i < rounds * 3 || __atomic_load_n(&copied, __ATOMIC_RELAXED) < rounds; i++) {
        gdr_mh_t mh;
        void *map = NULL;
        OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &mh));
        int mapped;
        /* EAGAIN while a copy still holds the slot's last mapping. */
        while ((mapped = gdr_map(g, mh, &map, PAGE)) == EAGAIN)
            sched_yield();
        OK(mapped);
        __atomic_store_n(&shared_map, map, __ATOMIC_RELAXED);
        __atomic_store_n(&shared.h, mh.h, __ATOMIC_RELAXED);
        for (volatile int spin = 0; spin < 2000; spin++)
            ;
        if (i % 2)
            OK(gdr_unmap(g, mh, map, PAGE));
        OK(gdr_unpin_buffer(g, mh));
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int n = 0; n < 4; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);
}

/* Pins and maps until the session is closed under it. */
static void *until_closed(void *arg)
{
    gdr_t doomed = (gdr_t)arg;
    int result;
    do {
        gdr_mh_t mh = { 1 };
        void *map = NULL;
        result = gdr_pin_buffer(doomed, shared_addr, PAGE, 0, 0, &mh);
        CHECK(result == 0 || (result == EINVAL && mh.h == 0));
        if (result == 0) {
            int mapped = gdr_map(doomed, mh, &map, PAGE);
            CHECK(mapped == 0 || mapped == EINVAL || mapped == EAGAIN);
            if (mapped == 0) {
                int copied = gdr_copy_to_mapping(mh, map, "x", 1);
                CHECK(copied == 0 || copied == EINVAL);
            }
            int unpinned = gdr_unpin_buffer(doomed, mh);
            CHECK(unpinned == 0 || unpinned == EINVAL);
        }
    } while (result == 0);
    return NULL;
}

static void close_under_pins(void)
{
    for (int i = 0; i < rounds / 10; i++) {
        pthread_t threads[4];
        gdr_t doomed = gdr_open();
        CHECK(doomed);
        OK(gdrx_alloc(doomed, -1, PAGE, &shared_addr));
        for (int n = 0; n < 4; n++)
            CHECK(pthread_create(&threads[n], NULL, until_closed, doomed) == 0);
        for (volatile int spin = 0; spin < 100000; spin++)
            ;
        OK(gdr_close(doomed));
        RETURNS(EINVAL, gdr_close(doomed));
        for (int n = 0; n < 4; n++)
            CHECK(pthread_join(threads[n], NULL) == 0);
    }
}

static void with_threads(void *(*body)(void *))
{
    pthread_t threads[THREADS];
    for (uintptr_t n = 0; n < THREADS; n++)
        CHECK(pthread_create(&threads[n], NULL, body, (void *)n) == 0);
    for (int n = 0; n < THREADS; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);
}

int main(void)
{
    if (getenv("CHECK_UNDER_CHECKER"))
        rounds = 20;
    g = gdr_open();
    CHECK(g);
    OK(gdrx_alloc(g, -1, BUFFERS * PAGE, &dev));
    with_threads(own_pins);
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    with_threads(one_winner);
    CHECK(wins == 1);
    unmap_under_copies();
    close_under_pins();
    OK(gdr_close(g));
    return 0;
}
