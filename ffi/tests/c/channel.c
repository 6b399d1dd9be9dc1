/* Channels. On backend emulated a thread plays the kernel, by gdrcopy_channel.cuh compiled for
 * the CPU; elsewhere there is no kernel, and what is tried is what happens then. */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>
#include <gdrcopy_channel.cuh>

#include "../check.h"
#include "../kernel.h"

static gdr_t g;
static int emulated;

typedef char channel_has_its_size[sizeof(gdrc_channel) == GDRX_CHANNEL_BYTES ? 1 : -1];

static gdrx_channel_t create(void)
{
    gdrx_channel_options_t options = small();
    gdrx_channel_t channel = { 0 };
    OK(gdrx_channel_create(g, &options, &channel));
    CHECK(channel.h != 0);
    return channel;
}

/* What plays a kernel: sends each line back, every word increased by 1. */
static void *echo_lines(void *device)
{
    gdrc_port port;
    gdrc_u32 words[GDRC_LINE_WORDS];
    gdrc_open(&port, (const gdrc_channel *)device, 0);
    while (gdrc_recv_lines(&port, 1, words)) {
        for (int n = 0; n < GDRC_LINE_WORDS; n++)
            words[n]++;
        if (!gdrc_send_lines(&port, 1, words))
            break;
    }
    gdrc_close(&port);
    return NULL;
}

/* Sends each message back, its bytes complemented. */
static void *echo_messages(void *device)
{
    static gdrc_u32 words[1024];
    gdrc_port port;
    gdrc_open(&port, (const gdrc_channel *)device, 0);
    for (;;) {
        int bytes = gdrc_recv(&port, words, sizeof words);
        if (bytes < 0)
            break;
        for (int n = 0; n < bytes; n++)
            ((unsigned char *)words)[n] ^= 0xff;
        if (!gdrc_send(&port, words, (gdrc_u32)bytes))
            break;
    }
    gdrc_close(&port);
    return NULL;
}

static int kernel_of(gdrx_channel_t channel)
{
    gdrx_kernel_state_t state;
    OK(gdrx_channel_kernel(channel, &state));
    return state;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Without a kernel: the ring fills, nothing comes, and each says so in its own way. */
static void alone(void)
{
    gdrx_channel_options_t options = small();
    gdrx_channel_t channel = { 7 };
    options.lines_to_gpu = 33;
    RETURNS(EINVAL, gdrx_channel_create(g, &options, &channel));
    CHECK(channel.h == 0 && strstr(gdrx_last_error(), "lines_to_gpu is 33"));
    options = small();
    options.placement = 2;
    RETURNS(EINVAL, gdrx_channel_create(g, &options, &channel));
    options = small();
    options.readers = 2;
    RETURNS(EINVAL, gdrx_channel_create(g, &options, &channel));
    options.size = 0;
    RETURNS(EINVAL, gdrx_channel_create(g, &options, &channel));
    RETURNS(EINVAL, gdrx_channel_create(g, NULL, NULL));
    RETURNS(EINVAL, gdrx_channel_create((gdr_t)(uintptr_t)5, NULL, &channel));

    channel = create();
    CHECK(kernel_of(channel) == GDRX_KERNEL_NOT_STARTED);
    gdrc_channel device;
    OK(gdrx_channel_device(channel, &device, sizeof device));
    CHECK(device.in_lines == 32 && device.out_lines == 32 && device.readers == 1 && device.in_ring && device.out_ring);
    CHECK(device.limit_ns == 120000000000ull);
    RETURNS(EINVAL, gdrx_channel_device(channel, &device, sizeof device - 8));
    RETURNS(EINVAL, gdrx_channel_device(channel, NULL, sizeof device));

    char lines[40][LINE], message[16 * LINE], line[LINE];
    uint32_t room = 0;
    size_t count = 0;
    memset(lines, 1, sizeof lines);
    memset(message, 1, sizeof message);
    OK(gdrx_channel_free_lines(channel, &room));
    CHECK(room == 32);
    OK(gdrx_channel_send_line(channel, lines, 0));
    OK(gdrx_channel_send(channel, message, 16 * LINE - 4, 0)); /* half of the ring */
    RETURNS(EINVAL, gdrx_channel_send(channel, message, 16 * LINE - 3, 0));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_OUT_OF_BOUNDS);
    RETURNS(EAGAIN, gdrx_channel_send(channel, message, 16 * LINE - 4, 0));
    OK(gdrx_channel_free_lines(channel, &room));
    CHECK(room == 15);
    OK(gdrx_channel_send_lines(channel, lines, 0, &count));
    CHECK(count == 0);
    OK(gdrx_channel_send_lines(channel, lines, 40, &count));
    CHECK(count == 15);
    RETURNS(EAGAIN, gdrx_channel_send_lines(channel, lines, 40, &count));
    CHECK(count == 0);
    RETURNS(EAGAIN, gdrx_channel_send_line(channel, lines, 0));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_WOULD_BLOCK);
    CHECK(strncmp(gdrx_last_error(), "gdrx_channel_send_line: the ring", 32) == 0);
    double since = seconds();
    RETURNS(ETIMEDOUT, gdrx_channel_send_line(channel, lines, 2000));
    CHECK(seconds() - since >= 0.002 && gdrx_last_error_kind() == GDRX_ERROR_TIMED_OUT);
    RETURNS(EINVAL, gdrx_channel_send_line(channel, NULL, 0));

    RETURNS(EAGAIN, gdrx_channel_recv_line(channel, line, 0));
    RETURNS(EAGAIN, gdrx_channel_recv_lines(channel, lines, 40, &count));
    CHECK(count == 0);
    count = 7;
    RETURNS(EAGAIN, gdrx_channel_recv(channel, line, LINE, &count, 0));
    CHECK(count == 0 && strstr(gdrx_last_error(), "no whole message"));
    RETURNS(ETIMEDOUT, gdrx_channel_recv_line(channel, line, 2000));
    RETURNS(ETIMEDOUT, gdrx_channel_recv(channel, line, LINE, &count, 2000));
    RETURNS(EINVAL, gdrx_channel_recv_line(channel, NULL, 0));
    RETURNS(EINVAL, gdrx_channel_recv(channel, line, LINE, NULL, 0));

    OK(gdrx_channel_stop(channel));
    OK(gdrx_channel_destroy(channel));
    RETURNS(EINVAL, gdrx_channel_destroy(channel));
    RETURNS(EINVAL, gdrx_channel_send_line(channel, lines, 0));
    RETURNS(EINVAL, gdrx_channel_recv_line(channel, line, 0));
    RETURNS(EINVAL, gdrx_channel_stop(channel));
    RETURNS(EINVAL, gdrx_channel_device(channel, &device, sizeof device));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_INVALID_HANDLE);

}

static void lines_there_and_back(int placement)
{
    gdrx_channel_options_t options = small();
    options.placement = placement;
    gdrx_channel_t channel;
    OK(gdrx_channel_create(g, &options, &channel));
    gdrc_channel device;
    OK(gdrx_channel_device(channel, &device, sizeof device));
    pthread_t kernel = start(echo_lines, &device);

    const uint32_t total = getenv("CHECK_UNDER_CHECKER") ? 500 : 5000;
    uint32_t batch[20][12], back[20][12], one[12];
    uint32_t sent = 0, received = 0;
    while (received < total) {
        size_t count = total - sent < 20 ? total - sent : 20, done = 0;
        for (size_t n = 0; n < count; n++)
            for (uint32_t word = 0; word < 12; word++)
                batch[n][word] = (sent + (uint32_t)n) * 100 + word;
        if (count != 0) {
            int code = gdrx_channel_send_lines(channel, batch, count, &done);
            CHECK(code == (done == 0 ? EAGAIN : 0));
            sent += (uint32_t)done;
        }
        int code = gdrx_channel_recv_lines(channel, back, 20, &done);
        CHECK(code == (done == 0 ? EAGAIN : 0));
        for (size_t n = 0; n < done; n++, received++)
            for (uint32_t word = 0; word < 12; word++)
                CHECK(back[n][word] == received * 100 + word + 1);
        if (done == 0 && received < sent) {
            OK(gdrx_channel_recv_line(channel, one, LONG_US));
            CHECK(one[0] == received * 100 + 1 && one[11] == received * 100 + 12);
            received++;
        }
    }
    CHECK(kernel_of(channel) == GDRX_KERNEL_RUNS);
    OK(gdrx_channel_stop(channel));
    join(kernel);
    CHECK(kernel_of(channel) == GDRX_KERNEL_ENDED);
    RETURNS(EPIPE, gdrx_channel_recv_line(channel, one, LONG_US));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_KERNEL_GONE);
    OK(gdrx_channel_destroy(channel));
}

static void messages_of_any_length(void)
{
    gdrx_channel_t channel = create();
    gdrc_channel device;
    OK(gdrx_channel_device(channel, &device, sizeof device));
    pthread_t kernel = start(echo_messages, &device);
    unsigned char message[16 * LINE], back[16 * LINE];
    size_t size = 0;
    for (size_t bytes = 0; bytes <= 16 * LINE - 4; bytes += 1 + bytes / 9) {
        fill(message, bytes, (unsigned)bytes);
        OK(gdrx_channel_send(channel, message, bytes, LONG_US));
        if (bytes > 0) {
            /* No room: it stays. */
            int code;
            while ((code = gdrx_channel_recv(channel, back, bytes - 1, &size, 0)) == EAGAIN)
                sched_yield();
            CHECK(code == EINVAL && size == 0 && gdrx_last_error_kind() == GDRX_ERROR_OUT_OF_BOUNDS);
        }
        OK(gdrx_channel_recv(channel, back, sizeof back, &size, LONG_US));
        CHECK(size == bytes);
        for (size_t n = 0; n < bytes; n++)
            CHECK(back[n] == (message[n] ^ 0xff));
    }
    OK(gdrx_channel_stop(channel));
    join(kernel);
    OK(gdrx_channel_destroy(channel));
}

static gdrx_channel_t shared;

static void *receive_all(void *count)
{
    uint32_t line[12];
    int code;
    while ((code = gdrx_channel_recv_line(shared, line, LONG_US)) == 0 || code == EBUSY) {
        if (code == EBUSY)
            continue;
        CHECK(line[0] == *(uint32_t *)count + 1);
        __atomic_store_n((uint32_t *)count, line[0], __ATOMIC_RELEASE);
    }
    CHECK(code == EPIPE);
    return NULL;
}

/* One thread sends, another receives, a third stops it; and one end used by two at once is refused. */
static void threads(void)
{
    shared = create();
    gdrc_channel device;
    OK(gdrx_channel_device(shared, &device, sizeof device));
    pthread_t kernel = start(echo_lines, &device);
    uint32_t count = 0, line[12] = { 0 };
    pthread_t receiver = start(receive_all, &count);
    const uint32_t total = getenv("CHECK_UNDER_CHECKER") ? 200 : 2000;
    for (uint32_t n = 0; n < total; n++) {
        line[0] = n;
        OK(gdrx_channel_send_line(shared, line, LONG_US));
    }
    /* The receiver waits inside for the next one. */
    while (__atomic_load_n(&count, __ATOMIC_ACQUIRE) < total)
        sched_yield();
    int code;
    while ((code = gdrx_channel_recv_line(shared, line, 0)) != EBUSY) {
        /* In between two of its calls. */
        CHECK(code == EAGAIN);
        sched_yield();
    }
    CHECK(strstr(gdrx_last_error(), "another thread"));
    OK(gdrx_channel_stop(shared));
    join(receiver);
    join(kernel);

    /* Destroyed while a thread waits in a call: stopping ends the kernel, and so the call. */
    OK(gdrx_channel_destroy(shared));
    shared = create();
    OK(gdrx_channel_device(shared, &device, sizeof device));
    kernel = start(echo_lines, &device);
    count = 0;
    receiver = start(receive_all, &count);
    line[0] = 0;
    OK(gdrx_channel_send_line(shared, line, LONG_US));
    while (__atomic_load_n(&count, __ATOMIC_ACQUIRE) < 1)
        sched_yield();
    /* The thread that plays the kernel uses the memory until it has ended. */
    OK(gdrx_channel_stop(shared));
    join(kernel);
    join(receiver);
    OK(gdrx_channel_destroy(shared));
}

static void *receive_once(void *code)
{
    char line[LINE];
    /* Of two calls that begin at once both may be refused. */
    do {
        *(int *)code = gdrx_channel_recv_line(shared, line, 3000000);
    } while (*(int *)code == EBUSY);
    return NULL;
}

/* Where the kernel does not end, and so the call does not either, nothing is destroyed. */
static void in_use(void)
{
    shared = create();
    int code = -1;
    char line[LINE] = { 0 };
    pthread_t receiver = start(receive_once, &code);
    /* Once may be when both begin at once. */
    for (int refused = 0; refused < 3; refused++) {
        usleep(20000);
        if (gdrx_channel_recv_line(shared, line, 0) != EBUSY)
            refused = -1;
    }
    RETURNS(EBUSY, gdrx_channel_destroy(shared));
    OK(gdrx_channel_send_line(shared, line, 0));
    join(receiver);
    CHECK(code == ETIMEDOUT);
    OK(gdrx_channel_destroy(shared));
}

static void forked(void)
{
    gdrx_channel_t channel = create();
    char line[LINE] = { 0 };
    gdrc_channel device;
    gdrx_kernel_state_t state;
    OK(gdrx_channel_send_line(channel, line, 0));
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        RETURNS(EACCES, gdrx_channel_send_line(channel, line, 0));
        RETURNS(EACCES, gdrx_channel_recv_line(channel, line, 0));
        RETURNS(EACCES, gdrx_channel_stop(channel));
        RETURNS(EACCES, gdrx_channel_kernel(channel, &state));
        RETURNS(EACCES, gdrx_channel_device(channel, &device, sizeof device));
        RETURNS(EACCES, gdrx_channel_destroy(channel));
        CHECK(gdrx_last_error_kind() == GDRX_ERROR_WRONG_PROCESS);
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(gdrx_channel_send_line(channel, line, 0));
    /* It goes with the session. */
}

int main(void)
{
    if (getenv("GDRCOPY_STANDIN_VERSION"))
        return 0; /* What plays the GPU there has no page-locked memory. */
    g = gdrx_open(NULL);
    CHECK(g);
    emulated = strcmp(gdrx_backend(g), "emulated") == 0;
    alone();
    if (emulated) {
        lines_there_and_back(GDRX_RING_IN_GPU_MEMORY);
        lines_there_and_back(GDRX_RING_IN_HOST_MEMORY);
        messages_of_any_length();
        threads();
    }
    in_use();
    forked();
    OK(gdr_close(g));
    return 0;
}
