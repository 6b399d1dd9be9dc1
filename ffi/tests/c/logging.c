/* Messages: none without GDRCOPY_ENABLE_LOGGING, also for failures; with it, lines on standard error from a level up. */
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

static void work(void)
{
    gdr_t g = gdr_open();
    CHECK(g);
    uint64_t dev = 0;
    gdr_mh_t mh;
    OK(gdrx_alloc(g, -1, PAGE, &dev));
    OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &mh));
    RETURNS(EINVAL, gdr_map(g, mh, NULL, PAGE));
    OK(gdr_close(g));
}

/* What the work prints in a process of its own: the settings are read once in each. */
static const char *said(const char *enable, const char *level)
{
    static char text[16384];
    int ends[2], status = -1;
    size_t size = 0;
    CHECK(pipe(ends) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        setenv("GDRCOPY_ENABLE_LOGGING", enable, 1);
        setenv("GDRCOPY_LOG_LEVEL", level, 1);
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        work();
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], text + size, sizeof text - 1 - size)) > 0;)
        size += (size_t)got;
    close(ends[0]);
    text[size] = 0;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return text;
}

int main(void)
{
    CHECK(strlen(said("", "debug")) == 0);
    CHECK(strlen(said("0", "debug")) == 0);
    const char *text = said("1", "");
    CHECK(strstr(text, "gdrcopy: ERROR: va is NULL call=\"gdr_map\" errno=22\n") == text);
    CHECK(strchr(text, '\n')[1] == 0);
    text = said("1", "debug");
    CHECK(strstr(text, "chosen by") && strstr(text, "gdr_pin_buffer") && strstr(text, "va is NULL"));
    CHECK(!strstr(said("1", "2"), "gdr_pin_buffer"));
    return 0;
}
