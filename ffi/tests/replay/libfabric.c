/* libfabric: the plain name, then the versioned one; both ends of a range rounded to pages, also where the allocation is
 * smaller; the result of a copy not looked at; the same handle given up twice in a race of its CXI provider. */
#include "client.h"

static char host[5000], back[5000];

int main(void)
{
    void *lib = dlopen("libgdrapi.so", RTLD_NOW);
    if (!lib)
        lib = library("libgdrapi.so.2", RTLD_NOW);
    struct core8 f = core8(lib);
    gdr_t g = f.open();
    CHECK(g);

    /* 5000 bytes that begin in the middle of a page; the range is page-aligned at both ends. */
    uint64_t addr = device_alloc(lib, g, 3 * PAGE - 7000);
    uint64_t buffer = addr + PAGE + 12345, start = buffer & ~(uint64_t)(PAGE - 1);
    size_t size = ((buffer + sizeof host + PAGE - 1) & ~(PAGE - 1)) - start;
    gdr_mh_t mh;
    void *map = NULL;
    OK(f.pin(g, start, size, 0, 0, &mh));
    OK(f.map(g, mh, &map, size));
    char *at = (char *)map + (buffer - start);
    fill(host, sizeof host, 9);
    f.to(mh, at, host, sizeof host);
    device_read(lib, g, buffer, back, sizeof back);
    CHECK(is_filled(back, sizeof back, 9));
    fill(host, sizeof host, 10);
    device_write(lib, g, buffer, host, sizeof host);
    f.from(mh, back, at, sizeof back);
    CHECK(is_filled(back, sizeof back, 10));

    /* The end of the allocation, rounded past it. */
    gdr_mh_t tail;
    OK(f.pin(g, addr + 2 * PAGE, PAGE, 0, 0, &tail));

    OK(f.unmap(g, mh, map, size));
    OK(f.unpin(g, mh));
    RETURNS(EINVAL, f.unmap(g, mh, map, size));
    RETURNS(EINVAL, f.unpin(g, mh));
    OK(f.unpin(g, tail));
    device_free(lib, g, addr);
    OK(f.close(g));
    return 0;
}
