/* Agents and automatic copiers. On backend emulated, threads play the agent's kernel; on a GPU it is the real one. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

enum { SIZE = 700000, HALF = 300000 };

static gdr_t g;
static uint64_t dev;
static char host[SIZE], seen[SIZE];

static gdrx_agent_options_t defaults(void)
{
    gdrx_agent_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.cpu_stand_in = strcmp(gdrx_backend(g), "emulated") == 0;
    /* A machine with many programs may be slow. */
    options.deadline_us = 60 * 1000000;
    return options;
}

/* Two ranges: the first half million bytes from byte 100 on, and the last 1000. */
static gdrx_agent_t create(void)
{
    gdrx_range_t ranges[2] = { { dev + 100, 500000 }, { dev + SIZE - 1000, 1000 } };
    gdrx_agent_options_t options = defaults();
    gdrx_agent_t agent = { 0 };
    OK(gdrx_agent_create(g, ranges, 2, &options, &agent));
    CHECK(agent.h != 0);
    return agent;
}

static void refusals(void)
{
    gdrx_range_t range = { dev, 1000 };
    gdrx_agent_options_t options = defaults();
    gdrx_agent_t agent = { 7 };
    RETURNS(EINVAL, gdrx_agent_create(g, NULL, 1, &options, &agent));
    CHECK(agent.h == 0 && gdrx_last_error_kind() == GDRX_ERROR_INVALID_ARGUMENT);
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 0, &options, &agent));
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, NULL));
    RETURNS(EINVAL, gdrx_agent_create(NULL, &range, 1, &options, &agent));
    options.threads = 33;
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, &agent));
    CHECK(strstr(gdrx_last_error(), "33 threads"));
    options = defaults();
    options.idle_us = -2;
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, &agent));
    options = defaults();
    options.deadline_us = -1;
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, &agent));
    options = defaults();
    options.size = 3;
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, &agent));
    range.size = SIZE + 1;
    options = defaults();
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &options, &agent));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_OUT_OF_BOUNDS);
    range.size = 1000;
    struct {
        gdrx_agent_options_t known;
        uint64_t newer;
    } later = { defaults(), 0 };
    later.known.size = sizeof later;
    OK(gdrx_agent_create(g, &range, 1, &later.known, &agent));
    OK(gdrx_agent_destroy(agent));
    later.newer = 1;
    RETURNS(EINVAL, gdrx_agent_create(g, &range, 1, &later.known, &agent));
    if (defaults().cpu_stand_in) {
        RETURNS(EOPNOTSUPP, gdrx_agent_create(g, &range, 1, NULL, &agent));
        CHECK(gdrx_last_error_kind() == GDRX_ERROR_UNSUPPORTED_FEATURE);
    } else {
        OK(gdrx_agent_create(g, &range, 1, NULL, &agent));
        OK(gdrx_agent_destroy(agent));
    }
}

static void plain(void)
{
    static const size_t sizes[] = { 0, 1, 7, 64, 1000, 1024, 1025, 5000, 65536, 200000, 499000 };
    gdrx_agent_t agent = create();
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        size_t size = sizes[n], offset = n * 13;
        fill(host, SIZE, (unsigned)n);
        OK(gdrx_upload(g, dev, host, SIZE));
        memset(seen, 0, SIZE);
        OK(gdrx_agent_read(agent, 0, offset, seen, size));
        CHECK(memcmp(seen, host + 100 + offset, size) == 0 && seen[size] == 0);
        fill(seen, size, (unsigned)n + 50);
        OK(gdrx_agent_write(agent, 0, offset, seen, size));
        memcpy(host + 100 + offset, seen, size);
        OK(gdrx_download(g, dev, seen, SIZE));
        CHECK(memcmp(seen, host, SIZE) == 0);
    }
    OK(gdrx_agent_read(agent, 1, 999, seen, 1));
    CHECK(seen[0] == host[SIZE - 1]);
    RETURNS(EINVAL, gdrx_agent_read(agent, 1, 999, seen, 2));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_OUT_OF_BOUNDS);
    RETURNS(EINVAL, gdrx_agent_write(agent, 2, 0, seen, 1));
    RETURNS(EINVAL, gdrx_agent_read(agent, 0, 0, NULL, 1));
    int resident = -1;
    uint64_t launches = 0;
    OK(gdrx_agent_state(agent, &resident, &launches));
    CHECK((resident == 0 || resident == 1) && launches >= 1);
    RETURNS(EINVAL, gdrx_agent_state(agent, NULL, &launches));
    OK(gdrx_agent_destroy(agent));
}

static void buffers(void)
{
    gdrx_agent_t agent = create();
    void *a = NULL, *b = NULL, *c = &c;
    RETURNS(EINVAL, gdrx_agent_alloc(agent, 0, &c));
    CHECK(c == NULL);
    OK(gdrx_agent_alloc(agent, HALF, &a));
    OK(gdrx_agent_alloc(agent, 5000, &b));
    fill(host, SIZE, 3);
    OK(gdrx_upload(g, dev, host, SIZE));

    /* Scattered, back to front, with a piece of nothing. */
    gdrx_segment_t pieces[] = { { 0, 400001, 777, 100 }, { 1, 3, 900, 2000 }, { 0, 5, 0, 0 }, { 0, 0, 250000, 3000 } };
    OK(gdrx_agent_read_into(agent, a, pieces, 4));
    char *at = (char *)a;
    CHECK(memcmp(at + 100, host + 100 + 400001, 777) == 0 && memcmp(at + 2000, host + SIZE - 997, 900) == 0);
    CHECK(memcmp(at + 3000, host + 100, 250000) == 0 && at[99] == 0 && at[877] == 0);

    fill(b, 5000, 8);
    gdrx_segment_t back[] = { { 0, 17, 2000, 1000 }, { 1, 0, 1000, 4000 } };
    OK(gdrx_agent_write_from(agent, b, back, 2));
    memcpy(host + 117, (char *)b + 1000, 2000);
    memcpy(host + SIZE - 1000, (char *)b + 4000, 1000);
    OK(gdrx_download(g, dev, seen, SIZE));
    CHECK(memcmp(seen, host, SIZE) == 0);

    gdrx_segment_t past[] = { { 0, 0, 10, 4991 } }, beyond[] = { { 1, 995, 6, 0 } };
    RETURNS(EINVAL, gdrx_agent_read_into(agent, b, past, 1));
    RETURNS(EINVAL, gdrx_agent_read_into(agent, b, beyond, 1));
    RETURNS(EINVAL, gdrx_agent_read_into(agent, b, NULL, 1));
    RETURNS(EINVAL, gdrx_agent_read_into(agent, at + 64, back, 1));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_INVALID_HANDLE);
    OK(gdrx_agent_read_into(agent, b, NULL, 0));

    /* Several in flight, waited for in another order. */
    int done = 7;
    gdrx_segment_t first[] = { { 0, 0, HALF, 0 } }, second[] = { { 1, 0, 1000, 0 } };
    RETURNS(EINVAL, gdrx_agent_is_done(agent, a, &done));
    CHECK(done == 0);
    RETURNS(EINVAL, gdrx_agent_wait(agent, a));
    OK(gdrx_agent_submit_read(agent, a, first, 1));
    OK(gdrx_agent_submit_read(agent, b, second, 1));
    RETURNS(EBUSY, gdrx_agent_submit_write(agent, a, first, 1));
    RETURNS(EBUSY, gdrx_agent_read_into(agent, a, first, 1));
    RETURNS(EBUSY, gdrx_agent_free(agent, b));
    RETURNS(EINVAL, gdrx_agent_submit_read(agent, &done, first, 1));
    OK(gdrx_agent_wait(agent, b));
    CHECK(memcmp(b, host + SIZE - 1000, 1000) == 0);
    do {
        OK(gdrx_agent_is_done(agent, a, &done));
    } while (!done);
    OK(gdrx_agent_wait(agent, a));
    CHECK(memcmp(a, host + 100, HALF) == 0);
    fill(a, HALF, 9);
    OK(gdrx_agent_submit_write(agent, a, first, 1));
    OK(gdrx_agent_wait(agent, a));
    OK(gdrx_download(g, dev, seen, SIZE));
    CHECK(is_filled(seen + 100, HALF, 9));

    /* Freed memory comes back zeroed, and is not a buffer meanwhile. */
    OK(gdrx_agent_free(agent, b));
    RETURNS(EINVAL, gdrx_agent_free(agent, b));
    RETURNS(EINVAL, gdrx_agent_read_into(agent, b, second, 1));
    OK(gdrx_agent_alloc(agent, 4000, &c));
    CHECK(c == b);
    for (size_t n = 0; n < 4000; n++)
        CHECK(((char *)c)[n] == 0);
    gdrx_segment_t over[] = { { 0, 0, 1, 4000 } };
    RETURNS(EINVAL, gdrx_agent_read_into(agent, c, over, 1));

    /* One in flight at the end. */
    OK(gdrx_agent_submit_read(agent, a, first, 1));
    OK(gdrx_agent_destroy(agent));
    RETURNS(EINVAL, gdrx_agent_destroy(agent));
    RETURNS(EINVAL, gdrx_agent_read(agent, 0, 0, seen, 1));
    RETURNS(EINVAL, gdrx_agent_alloc(agent, 10, &c));
    RETURNS(EINVAL, gdrx_agent_wait(agent, a));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_INVALID_HANDLE);
    RETURNS(EINVAL, gdrx_agent_read((gdrx_agent_t){ 0 }, 0, 0, seen, 1));
}

/* Memory of the program's that the kernel reaches. What is not page-locked will do for the stand-in alone. */
static void registered(void)
{
    gdrx_agent_t agent = create();
    void *buffer = NULL;
    OK(gdrx_agent_alloc(agent, HALF, &buffer));
    fill(host, SIZE, 30);
    OK(gdrx_upload(g, dev, host, SIZE));
    RETURNS(EINVAL, gdrx_agent_register_host(agent, NULL, 10));
    RETURNS(EINVAL, gdrx_agent_register_host(agent, seen, 0));
    RETURNS(EINVAL, gdrx_agent_register_host(agent, buffer, 10));
    RETURNS(EINVAL, gdrx_agent_unregister_host(agent, seen));
    if (!defaults().cpu_stand_in) {
        RETURNS(EINVAL, gdrx_agent_register_host(agent, seen, HALF));
        CHECK(strstr(gdrx_last_error(), "not page-locked") && strstr(gdrx_last_error(), "cuMemHostRegister"));
    } else {
        OK(gdrx_agent_register_host(agent, seen + 5, HALF));
        RETURNS(EINVAL, gdrx_agent_register_host(agent, seen + HALF, 10));
    }
    char *places[2] = { seen + 5, (char *)buffer };
    for (int n = 0; n < 2; n++) {
        char *at = places[n];
        memset(at, 0, HALF);
        OK(gdrx_agent_read(agent, 0, 3, at + 1, HALF - 2));
        CHECK(memcmp(at + 1, host + 103, HALF - 2) == 0 && at[0] == 0 && at[HALF - 1] == 0);
        fill(at, HALF, 31 + (unsigned)n);
        OK(gdrx_agent_write(agent, 0, 3, at + 1, HALF - 2));
        memcpy(host + 103, at + 1, HALF - 2);
        memset(at, 0, HALF);
        OK(gdrx_download(g, dev + 103, at, HALF - 2));
        CHECK(memcmp(at, host + 103, HALF - 2) == 0);
    }
    if (defaults().cpu_stand_in) {
        OK(gdrx_agent_unregister_host(agent, seen + 5));
        RETURNS(EINVAL, gdrx_agent_unregister_host(agent, seen + 5));
    }
    OK(gdrx_agent_destroy(agent));
    RETURNS(EINVAL, gdrx_agent_register_host(agent, seen, 10));
    RETURNS(EINVAL, gdrx_agent_unregister_host(agent, seen));
}

static gdrx_agent_t shared;

/* Handed on by the join, so never refused. */
static void *one_read(void *into)
{
    OK(gdrx_agent_read(shared, 0, 0, into, 2000));
    return NULL;
}

/* Beside others: each call is done rightly, or refused. */
static void *many_reads(void *count)
{
    char own[2000];
    for (int n = 0; n < 500; n++) {
        memset(own, 0, sizeof own);
        int code = gdrx_agent_read(shared, 0, 0, own, sizeof own);
        if (code == 0)
            CHECK(memcmp(own, host + 100, sizeof own) == 0);
        else if (code == EINVAL)
            break;
        else
            CHECK(code == EBUSY);
        *(int *)count += code == 0;
    }
    return NULL;
}

static void threads(void)
{
    fill(host, SIZE, 20);
    OK(gdrx_upload(g, dev, host, SIZE));
    shared = create();
    pthread_t thread[3];
    for (int n = 0; n < 3; n++) {
        memset(seen, 0, 2000);
        CHECK(pthread_create(&thread[0], NULL, one_read, seen) == 0);
        CHECK(pthread_join(thread[0], NULL) == 0);
        CHECK(memcmp(seen, host + 100, 2000) == 0);
        one_read(seen);
    }
    int counts[3] = { 0 };
    for (int n = 0; n < 3; n++)
        CHECK(pthread_create(&thread[n], NULL, many_reads, &counts[n]) == 0);
    for (int n = 0; n < 3; n++)
        CHECK(pthread_join(thread[n], NULL) == 0);
    CHECK(counts[0] + counts[1] + counts[2] > 0);

    /* Destroyed under a reader: that one is refused from then on. */
    int before = 0;
    CHECK(pthread_create(&thread[0], NULL, many_reads, &before) == 0);
    OK(gdrx_agent_destroy(shared));
    CHECK(pthread_join(thread[0], NULL) == 0);
    RETURNS(EINVAL, gdrx_agent_read(shared, 0, 0, seen, 1));
}

static void forked(void)
{
    gdrx_agent_t agent = create();
    void *buffer = NULL, *other = NULL, *flying = NULL;
    int done = 0;
    uint64_t launches = 0;
    gdrx_segment_t piece = { 0, 0, 1, 0 };
    OK(gdrx_agent_alloc(agent, 100, &buffer));
    OK(gdrx_agent_alloc(agent, 100, &flying));
    OK(gdrx_agent_submit_read(agent, flying, &piece, 1));
    OK(gdrx_agent_read(agent, 0, 0, seen, 1));
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        RETURNS(EACCES, gdrx_agent_read(agent, 0, 0, seen, 1));
        CHECK(gdrx_last_error_kind() == GDRX_ERROR_WRONG_PROCESS);
        RETURNS(EACCES, gdrx_agent_read_into(agent, buffer, &piece, 1));
        RETURNS(EACCES, gdrx_agent_submit_read(agent, buffer, &piece, 1));
        RETURNS(EACCES, gdrx_agent_wait(agent, flying));
        RETURNS(EACCES, gdrx_agent_is_done(agent, flying, &done));
        RETURNS(EACCES, gdrx_agent_state(agent, &done, &launches));
        RETURNS(EACCES, gdrx_agent_alloc(agent, 100, &other));
        RETURNS(EACCES, gdrx_agent_register_host(agent, seen, 1));
        RETURNS(EACCES, gdrx_agent_unregister_host(agent, seen));
        RETURNS(EACCES, gdrx_agent_destroy(agent));
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(gdrx_agent_wait(agent, flying));
    CHECK(*(char *)flying == seen[0]);
    OK(gdrx_agent_read(agent, 0, 0, seen, 1));
    RETURNS(EBUSY, gdrx_free(g, dev));
    OK(gdrx_agent_destroy(agent));
}

static void automatic(void)
{
    gdrx_agent_options_t agent = defaults();
    gdrx_auto_options_t options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.agent = &agent;
    options.largest = 65536;
    options.milliseconds = 20;
    gdrx_auto_t copier = { 7 };
    RETURNS(EINVAL, gdrx_auto_create(g, dev + 1, &options, &copier));
    CHECK(copier.h == 0);
    options.largest = 63;
    RETURNS(EINVAL, gdrx_auto_create(g, dev, &options, &copier));
    options.largest = 65536;
    options.threads = -2;
    RETURNS(EINVAL, gdrx_auto_create(g, dev, &options, &copier));
    options.threads = 0;
    OK(gdrx_auto_create(g, dev, &options, &copier));
    for (unsigned n = 0; n < 12; n++) {
        size_t size = (size_t)1 << (2 * n % 20), offset = n * 7;
        fill(host, size, n);
        OK(gdrx_auto_write(copier, offset, host, size));
        OK(gdrx_auto_read(copier, offset, seen, size));
        CHECK(memcmp(host, seen, size) == 0);
        OK(gdrx_download(g, dev + offset, seen, size));
        CHECK(memcmp(host, seen, size) == 0);
    }
    RETURNS(EINVAL, gdrx_auto_read(copier, SIZE, seen, 1));
    char text[800], cut[6];
    OK(gdrx_auto_explain(copier, GDRX_DEVICE_TO_HOST, 4096, text, sizeof text));
    CHECK(strstr(text, "d2h of 4096 bytes: ") && strstr(text, "(at ") && strstr(text, "=") && strstr(text, "measured now"));
    OK(gdrx_auto_explain(copier, GDRX_HOST_TO_DEVICE, 4096, cut, sizeof cut));
    CHECK(strlen(cut) == 5);
    RETURNS(EINVAL, gdrx_auto_explain(copier, (gdrx_direction_t)2, 4096, text, sizeof text));
    CHECK(text[0] == 0);
    RETURNS(EINVAL, gdrx_auto_explain(copier, GDRX_HOST_TO_DEVICE, 4096, text, 0));
    RETURNS(EBUSY, gdrx_free(g, dev));
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        RETURNS(EACCES, gdrx_auto_read(copier, 0, seen, 1));
        RETURNS(EACCES, gdrx_auto_register_host(copier, seen, 1));
        RETURNS(EACCES, gdrx_auto_unregister_host(copier, seen));
        RETURNS(EACCES, gdrx_auto_destroy(copier));
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(gdrx_auto_destroy(copier));
    RETURNS(EINVAL, gdrx_auto_read(copier, 0, seen, 1));
    RETURNS(EINVAL, gdrx_auto_destroy(copier));
    OK(gdrx_auto_create(g, dev, NULL, &copier));
    OK(gdrx_auto_read(copier, 0, seen, SIZE));
    OK(gdrx_auto_register_host(copier, seen, SIZE)); /* without an agent, nothing */
    OK(gdrx_auto_unregister_host(copier, seen));
    OK(gdrx_auto_destroy(copier));

    options.page_locked = 1;
    OK(gdrx_auto_create(g, dev, &options, &copier));
    OK(gdrx_auto_explain(copier, GDRX_DEVICE_TO_HOST, 1, text, sizeof text));
    CHECK(strstr(text, " agent_pinned=") && strstr(text, " copy_engine_pinned="));
    if (agent.cpu_stand_in) {
        OK(gdrx_auto_register_host(copier, seen, SIZE));
        RETURNS(EINVAL, gdrx_auto_register_host(copier, seen, 1));
    } else {
        RETURNS(EINVAL, gdrx_auto_register_host(copier, seen, SIZE));
    }
    fill(host, SIZE, 60);
    OK(gdrx_auto_write(copier, 0, host, SIZE));
    OK(gdrx_auto_read(copier, 1, seen + 1, SIZE - 1));
    CHECK(memcmp(seen + 1, host + 1, SIZE - 1) == 0);
    if (agent.cpu_stand_in)
        OK(gdrx_auto_unregister_host(copier, seen));
    RETURNS(EINVAL, gdrx_auto_unregister_host(copier, seen));
    OK(gdrx_auto_destroy(copier));
}

int main(void)
{
    if (getenv("GDRCOPY_STANDIN_VERSION"))
        return 0; /* What plays the GPU there runs no kernels. */
    g = gdrx_open(NULL);
    CHECK(g);
    OK(gdrx_alloc(g, 0, SIZE, &dev));
    refusals();
    plain();
    buffers();
    registered();
    threads();
    forked();
    automatic();

    /* What is left goes with the session. */
    gdrx_agent_t left = create();
    gdrx_auto_options_t quick = { 0 };
    quick.size = sizeof quick;
    quick.largest = 64;
    gdrx_auto_t copier;
    OK(gdrx_auto_create(g, dev, &quick, &copier));
    OK(gdr_close(g));
    RETURNS(EINVAL, gdrx_agent_read(left, 0, 0, seen, 1));
    RETURNS(EINVAL, gdrx_auto_read(copier, 0, seen, 1));
    return 0;
}
