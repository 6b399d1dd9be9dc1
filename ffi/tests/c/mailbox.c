/* Mailboxes and latest values. On backend emulated a thread plays the kernel; elsewhere there is none. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>
#include <gdrcopy_channel.cuh>

#include "../check.h"
#include "../kernel.h"

static gdr_t g;

typedef char latest_has_its_size[sizeof(gdrc_latest) == GDRX_LATEST_BYTES ? 1 : -1];

/* 100 bytes of question, 56 of answer: its first 56, reversed; it does not answer when the first byte is 0. */
static void *answer(void *device)
{
    gdrc_port port;
    unsigned char request[3 * LINE], response[2 * LINE] = { 0 };
    gdrc_u32 words[3 * GDRC_LINE_WORDS], out[2 * GDRC_LINE_WORDS];
    gdrc_open(&port, (const gdrc_channel *)device, 0);
    while (gdrc_recv_lines(&port, 3, words)) {
        memcpy(request, words, sizeof request);
        if (request[0] == 0)
            break;
        for (int n = 0; n < 56; n++)
            response[n] = request[55 - n];
        memcpy(out, response, sizeof out);
        if (!gdrc_send_lines(&port, 2, out))
            break;
    }
    gdrc_close(&port);
    return NULL;
}

struct watch {
    gdrc_channel channel;
    gdrc_latest latest;
    gdrc_u32 last, seen, mixed, backward;
};

/* Looks at a value of 30 words, all the same, until it is the last one. */
static void *watch(void *at)
{
    struct watch *w = (struct watch *)at;
    gdrc_port port;
    gdrc_u32 words[3 * GDRC_LINE_WORDS], version = gdrc_latest_none(&w->latest), before = 0;
    gdrc_open(&port, &w->channel, 0);
    while (!gdrc_is_over(&port)) {
        if (!gdrc_latest_read(&w->latest, &version, words))
            continue;
        w->seen++;
        for (int n = 1; n < 30; n++)
            w->mixed += words[n] != words[0];
        w->backward += words[0] < before;
        before = words[0];
        if (before == w->last)
            break;
    }
    gdrc_close(&port);
    return NULL;
}

/* Without a kernel. */
static void alone(void)
{
    char message[16 * LINE];
    memset(message, 1, sizeof message);
    gdrx_channel_options_t options = small();
    gdrx_mailbox_t mailbox = { 7 };
    RETURNS(EINVAL, gdrx_mailbox_create(g, &options, 16 * LINE + 1, 8, &mailbox));
    CHECK(mailbox.h == 0);
    OK(gdrx_mailbox_create(g, &options, 16 * LINE, 0, &mailbox));
    RETURNS(ETIMEDOUT, gdrx_mailbox_call(mailbox, message, NULL, 1000));
    RETURNS(EINVAL, gdrx_mailbox_call(mailbox, NULL, NULL, 1000));
    uint64_t late = 0;
    OK(gdrx_mailbox_late(mailbox, &late));
    CHECK(late == 1);
    OK(gdrx_mailbox_destroy(mailbox));
    RETURNS(EINVAL, gdrx_mailbox_call(mailbox, message, NULL, 1000));

    gdrx_latest_t latest;
    gdrc_latest slots;
    RETURNS(EINVAL, gdrx_latest_create(g, -1, NULL, 8, &latest));
    OK(gdrx_latest_create(g, -1, message, 100, &latest));
    OK(gdrx_latest_device(latest, &slots, sizeof slots));
    CHECK(slots.lines == 3 && slots.slots != 0);
    RETURNS(EINVAL, gdrx_latest_device(latest, &slots, 8));
    OK(gdrx_latest_set(latest, message));
    RETURNS(EINVAL, gdrx_latest_set(latest, NULL));
    OK(gdrx_latest_destroy(latest));
    RETURNS(EINVAL, gdrx_latest_set(latest, message));
    RETURNS(EINVAL, gdrx_latest_destroy(latest));
}

static void questions(void)
{
    gdrx_channel_options_t options = small();
    gdrx_mailbox_t mailbox;
    OK(gdrx_mailbox_create(g, &options, 100, 56, &mailbox));
    gdrc_channel device;
    OK(gdrx_mailbox_device(mailbox, &device, sizeof device));
    unsigned char request[100], response[57];
    fill(request, sizeof request, 1);
    request[0] = 1;
    response[56] = 0x5a;
    /* Nobody is there yet: the answer comes late, and is not taken for the next one's. */
    RETURNS(ETIMEDOUT, gdrx_mailbox_call(mailbox, request, response, 1000));
    gdrx_kernel_state_t state;
    OK(gdrx_mailbox_kernel(mailbox, &state));
    CHECK(state == GDRX_KERNEL_NOT_STARTED);
    pthread_t kernel = start(answer, &device);
    for (unsigned round = 0; round < 200; round++) {
        fill(request, sizeof request, round);
        request[0] = 1;
        OK(gdrx_mailbox_call(mailbox, request, response, LONG_US));
        for (int n = 0; n < 56; n++)
            CHECK(response[n] == request[55 - n]);
    }
    CHECK(response[56] == 0x5a);
    uint64_t late = 7;
    OK(gdrx_mailbox_late(mailbox, &late));
    CHECK(late == 0);
    request[0] = 0;
    RETURNS(EPIPE, gdrx_mailbox_call(mailbox, request, response, LONG_US));
    join(kernel);
    OK(gdrx_mailbox_stop(mailbox));
    OK(gdrx_mailbox_destroy(mailbox));
}

static void newest(void)
{
    gdrx_channel_options_t options = small();
    gdrx_channel_t channel;
    gdrx_kernel_state_t state;
    OK(gdrx_channel_create(g, &options, &channel));
    gdrx_latest_t latest;
    uint32_t words[30] = { 0 };
    struct watch w = { .last = getenv("CHECK_UNDER_CHECKER") ? 2000 : 20000 };
    OK(gdrx_latest_create(g, 0, words, sizeof words, &latest));
    OK(gdrx_channel_device(channel, &w.channel, sizeof w.channel));
    OK(gdrx_latest_device(latest, &w.latest, sizeof w.latest));
    pthread_t kernel = start(watch, &w);
    for (uint32_t number = 1; number <= w.last; number++) {
        for (int n = 0; n < 30; n++)
            words[n] = number;
        OK(gdrx_latest_set(latest, words));
        if (number % 1000 == 0)
            sched_yield();
    }
    join(kernel);
    CHECK(w.seen > 0 && w.mixed == 0 && w.backward == 0);
    OK(gdrx_channel_kernel(channel, &state));
    CHECK(state == GDRX_KERNEL_ENDED);
    OK(gdrx_latest_destroy(latest));
    OK(gdrx_channel_destroy(channel));
}

static void forked(void)
{
    gdrx_channel_options_t options = small();
    gdrx_mailbox_t mailbox;
    gdrx_latest_t latest;
    gdrc_channel device;
    char line[LINE] = { 0 };
    OK(gdrx_mailbox_create(g, &options, LINE, LINE, &mailbox));
    OK(gdrx_latest_create(g, -1, line, LINE, &latest));
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        RETURNS(EACCES, gdrx_mailbox_call(mailbox, line, line, 1000));
        RETURNS(EACCES, gdrx_mailbox_stop(mailbox));
        RETURNS(EACCES, gdrx_mailbox_device(mailbox, &device, sizeof device));
        RETURNS(EACCES, gdrx_mailbox_destroy(mailbox));
        RETURNS(EACCES, gdrx_latest_set(latest, line));
        RETURNS(EACCES, gdrx_latest_destroy(latest));
        CHECK(gdrx_last_error_kind() == GDRX_ERROR_WRONG_PROCESS);
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(gdrx_latest_set(latest, line));
    /* Both go with the session. */
}

int main(void)
{
    if (getenv("GDRCOPY_STANDIN_VERSION"))
        return 0; /* What plays the GPU there has no page-locked memory. */
    g = gdrx_open(NULL);
    CHECK(g);
    alone();
    if (strcmp(gdrx_backend(g), "emulated") == 0) {
        questions();
        newest();
    }
    forked();
    OK(gdr_close(g));
    return 0;
}
