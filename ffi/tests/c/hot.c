/* What programs do millions of times a second makes no system call and allocates nothing, also when it says "not now".
 *
 * The thread under test may make no system call but to write and to end: seccomp(2), strict mode, kills it for any other. */
#define _GNU_SOURCE
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>
#include <gdrcopy_channel.cuh>

#include "../check.h"

static _Thread_local unsigned long allocations;

#ifndef __SANITIZE_ADDRESS__
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);

void *malloc(size_t size)
{
    allocations++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocations++;
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    allocations++;
    return __libc_realloc(old, size);
}
#endif

enum { LINE = 48, ROUNDS = 300, SIZE = 65536 };

static gdrx_channel_t channel;
static gdrx_latest_t latest;
static gdrx_auto_t copier;
static gdr_mh_t mh;
static char *map;
static volatile int done;

static void *echo_lines(void *device)
{
    gdrc_port port;
    gdrc_u32 words[GDRC_LINE_WORDS];
    gdrc_open(&port, (const gdrc_channel *)device, 0);
    while (gdrc_recv_lines(&port, 1, words) && gdrc_send_lines(&port, 1, words)) {
    }
    gdrc_close(&port);
    return NULL;
}

/* Four lines there and back, values and copies. */
static void round_of(uint32_t n)
{
    uint32_t lines[4][12] = { { n }, { n + 1 }, { n + 2 }, { n + 3 } }, line[12];
    char bytes[64];
    size_t count = 0;
    int code;
    OK(gdrx_latest_set(latest, lines));
    OK(gdr_copy_to_mapping(mh, map + 64, lines, 64));
    OK(gdr_copy_from_mapping(mh, bytes, map + 64, 64));
    CHECK(memcmp(bytes, lines, 64) == 0);
    OK(gdrx_auto_write(copier, 0, lines, 64));
    OK(gdrx_auto_read(copier, 0, bytes, 64));
    CHECK(memcmp(bytes, lines, 64) == 0);
    RETURNS(EAGAIN, gdrx_channel_recv_line(channel, line, 0));
    OK(gdrx_channel_send_line(channel, lines[0], 0));
    OK(gdrx_channel_send_lines(channel, lines[1], 3, &count));
    CHECK(count == 3);
    for (uint32_t at = 0; at < 4; at++) {
        do {
            code = gdrx_channel_recv_line(channel, line, 0);
            CHECK(code == 0 || code == EAGAIN);
        } while (code != 0);
        CHECK(line[0] == n + at);
    }
}

static void *under_test(void *unused)
{
    /* Each call once, so that the thread is known and owns its ends. */
    round_of(0);
    unsigned long before = allocations;
    /* Where it is not to be had, allocations are counted alone. */
    (void)prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    for (uint32_t n = 1; n < ROUNDS; n++)
        round_of(n * 4);
    if (allocations != before) {
        static const char text[] = "hot.c: the calls allocated\n";
        (void)!write(2, text, sizeof text - 1);
        syscall(SYS_exit, 1);
    }
    done = unused == NULL;
    /* The ordinary end of a thread makes other calls. */
    syscall(SYS_exit, 0);
    return NULL;
}

int main(void)
{
    if (getenv("GDRCOPY_STANDIN_VERSION") || getenv("CHECK_UNDER_CHECKER"))
        return 0; /* A stand-in has no page-locked memory, and checkers make system calls of their own. */
    gdr_t g = gdrx_open(NULL);
    CHECK(g);
    if (strcmp(gdrx_backend(g), "emulated") != 0)
        return gdr_close(g); /* There is no kernel at the other end. */
    free(malloc(10));
    CHECK(allocations > 0);

    uint64_t dev = 0;
    void *at = NULL;
    uint32_t zeros[48] = { 0 };
    gdrc_channel device;
    gdrx_auto_options_t quick;
    memset(&quick, 0, sizeof quick);
    quick.size = sizeof quick;
    quick.largest = 64;
    OK(gdrx_alloc(g, 0, SIZE, &dev));
    OK(gdr_pin_buffer(g, dev, SIZE, 0, 0, &mh));
    OK(gdr_map(g, mh, &at, SIZE));
    map = (char *)at;
    OK(gdrx_auto_create(g, dev, &quick, &copier));
    OK(gdrx_latest_create(g, -1, zeros, sizeof zeros, &latest));
    gdrx_channel_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.kernel_limit_ms = 120000;
    OK(gdrx_channel_create(g, &options, &channel));
    OK(gdrx_channel_device(channel, &device, sizeof device));

    pthread_t kernel, thread;
    CHECK(pthread_create(&kernel, NULL, echo_lines, &device) == 0);
    CHECK(pthread_create(&thread, NULL, under_test, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(done);
    OK(gdrx_channel_stop(channel));
    CHECK(pthread_join(kernel, NULL) == 0);
    OK(gdr_close(g));
    return 0;
}
