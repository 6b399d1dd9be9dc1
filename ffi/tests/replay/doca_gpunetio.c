/* DOCA GPUNetIO: the pointer of gdr_map is used as it is, by code that rings doorbells; no versions, no info. */
#include "client.h"

int main(void)
{
    void *lib = library("libgdrapi.so.2", RTLD_NOW);
    struct core8 f = core8(lib);
    mandatory(lib, "gdr_runtime_get_version");
    mandatory(lib, "gdr_driver_get_version");
    SYMBOL_IF_ANY(pin_v2_fn, pin_v2, "gdr_pin_buffer_v2");
    SYMBOL_IF_ANY(attribute_fn, get_attribute, "gdr_get_attribute");
    CHECK(pin_v2 && get_attribute);
    gdr_t g = f.open();
    CHECK(g);
    int force_pcie = -1;
    OK(get_attribute(g, 2, &force_pcie));
    uint64_t addr = device_alloc(lib, g, 2 * PAGE);
    gdr_mh_t mh;
    void *map = NULL;
    OK(pin_v2(g, addr, 2 * PAGE, force_pcie ? 1 : 0, &mh));
    OK(f.map(g, mh, &map, 2 * PAGE));
    volatile uint64_t *doorbell = (volatile uint64_t *)((char *)map + PAGE);
    *doorbell = 0xd00b;
    store_fence();
    uint64_t seen = 0;
    device_read(lib, g, addr + PAGE, &seen, sizeof seen);
    CHECK(seen == 0xd00b && *doorbell == 0xd00b);
    OK(f.unmap(g, mh, map, 2 * PAGE));
    OK(f.unpin(g, mh));
    device_free(lib, g, addr);
    OK(f.close(g));
    CHECK(dlclose(lib) == 0);
    return 0;
}
