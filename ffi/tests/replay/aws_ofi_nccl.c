/* aws-ofi-nccl: FORCE_PCIE first, and any error means "once more without"; a handle of 0 means "not pinned". */
#include "client.h"

static char host[2 << 20], back[2 << 20];

int main(void)
{
    void *lib = library("libgdrapi.so", RTLD_NOW | RTLD_LOCAL);
    struct core8 f = core8(lib);
    SYMBOL(runtime_version_fn, runtime_version, "gdr_runtime_get_version");
    SYMBOL(driver_version_fn, driver_version, "gdr_driver_get_version");
    gdr_t g = f.open();
    CHECK(g);
    int lib_major, lib_minor, drv_major, drv_minor;
    runtime_version(&lib_major, &lib_minor);
    OK(driver_version(g, &drv_major, &drv_minor));
    CHECK(lib_major == 2 && drv_major == 2 && lib_minor >= 5 && drv_minor >= 5);
    SYMBOL(pin_v2_fn, pin_v2, "gdr_pin_buffer_v2");

    uint64_t buffer = device_alloc(lib, g, sizeof host + PAGE) + 512;
    uint64_t start = buffer & ~(uint64_t)(PAGE - 1);
    size_t size = ((buffer + sizeof host + PAGE - 1) & ~(PAGE - 1)) - start;
    gdr_mh_t mh = { 0 };
    if (pin_v2(g, start, size, 1, &mh) != 0) {
        CHECK(mh.h == 0);
        OK(pin_v2(g, start, size, 0, &mh));
    }
    CHECK(mh.h != 0);
    void *map = NULL;
    OK(f.map(g, mh, &map, size));
    char *at = (char *)map + (buffer - start);
    size_t sizes[] = { 1, 8, 4096, 70001, sizeof host };
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fill(host, sizes[i], i);
        OK(f.to(mh, at, host, sizes[i]));
        OK(f.from(mh, back, at, sizes[i]));
        CHECK(is_filled(back, sizes[i], i));
    }
    OK(f.unmap(g, mh, map, size));
    OK(f.unpin(g, mh));
    OK(f.close(g));
    return 0;
}
