/* dlopen, open, pin, map, copy, close, dlclose, a thousand times: threads, descriptors, mappings and heap stay flat. */
#include <dirent.h>
#include <malloc.h>
#include <unistd.h>

#include "../replay/client.h"

static int entries(const char *folder)
{
    DIR *dir = opendir(folder);
    CHECK(dir);
    int count = 0;
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int maps(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file);
    int lines = 0;
    for (int c; (c = getc(file)) != EOF;)
        lines += c == '\n';
    fclose(file);
    return lines;
}

struct use {
    int threads, fds, maps;
    size_t heap;
};

static struct use use(void)
{
    struct use now = { entries("/proc/self/task"), entries("/proc/self/fd"), maps(), mallinfo2().uordblks };
    return now;
}

static void cycle(int n)
{
    void *lib = library(n % 2 ? "libgdrapi.so" : "libgdrapi.so.2", n % 3 ? RTLD_LAZY : RTLD_NOW);
    struct core8 f = core8(lib);
    gdr_t g = f.open();
    CHECK(g);
    uint64_t dev = device_alloc(lib, g, PAGE);
    gdr_mh_t mh;
    void *map = NULL;
    OK(f.pin(g, dev, PAGE, 0, 0, &mh));
    OK(f.map(g, mh, &map, PAGE));
    OK(f.to(mh, map, "again", 6));
    RETURNS(EINVAL, f.unpin(g, (gdr_mh_t){ 1 })); /* a failure and its text, too */
    if (n % 4) {
        OK(f.unmap(g, mh, map, PAGE));
        OK(f.unpin(g, mh));
        device_free(lib, g, dev);
    }
    OK(f.close(g));
    CHECK(dlclose(lib) == 0);
}

int main(int argc, char **argv)
{
    /* Blocks in malloc's per-thread cache count as used. */
    if (argc == 1 && !getenv("GLIBC_TUNABLES") && !getenv("CHECK_UNDER_CHECKER")) {
        setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1);
        execv("/proc/self/exe", argv);
    }
    /* A memory checker is slow, and maps memory of its own. */
    int under_checker = getenv("CHECK_UNDER_CHECKER") != NULL;
    for (int n = 0; n < 12; n++)
        cycle(n);
    struct use before = use();
    for (int n = 0; n < (under_checker ? 20 : 1000); n++)
        cycle(n);
    struct use after = use();
    CHECK(after.threads == before.threads);
    CHECK(after.fds == before.fds);
    CHECK(under_checker || after.maps == before.maps);
    CHECK(under_checker || after.heap <= before.heap);
    return 0;
}
