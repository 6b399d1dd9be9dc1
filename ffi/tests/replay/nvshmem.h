/* NVSHMEM's transports: the versioned name, bound lazily; whole heap chunks; single loads and stores; dlclose. */
#ifndef NVSHMEM_H
#define NVSHMEM_H

#include "client.h"

static inline int nvshmem_run(int current)
{
    void *lib = library("libgdrapi.so.2", RTLD_LAZY);
    SYMBOL(runtime_version_fn, runtime_version, "gdr_runtime_get_version");
    int major = 0, minor = 0, drv_major = 0, drv_minor = 0, dma_buf = -1;
    /* Before anything is open. */
    runtime_version(&major, &minor);
    CHECK(major == 2 && minor >= (current ? 6 : 0));
    struct core8 f = core8(lib);
    SYMBOL(info_v1_fn, get_info, "gdr_get_info");
    SYMBOL(driver_version_fn, driver_version, "gdr_driver_get_version");
    SYMBOL_IF_ANY(pin_v2_fn, pin_v2, "gdr_pin_buffer_v2");
    SYMBOL_IF_ANY(map_v2_fn, map_v2, "gdr_map_v2");
    SYMBOL_IF_ANY(info_v2_fn, get_info_v2, "gdr_get_info_v2");
    SYMBOL_IF_ANY(attribute_fn, get_attribute, "gdr_get_attribute");
    gdr_t g = f.open();
    CHECK(g);
    if (current) {
        CHECK(pin_v2 && map_v2 && get_info_v2 && get_attribute);
        OK(get_attribute(g, 3, &dma_buf));
    }
    if (dma_buf <= 0) {
        OK(driver_version(g, &drv_major, &drv_minor));
        CHECK(drv_major == 2);
    }

    /* A heap chunk. */
    size_t chunk = 64 << 20;
    uint64_t heap = device_alloc(lib, g, chunk);
    gdr_mh_t mh;
    void *map = NULL;
    if (current) {
        int forced = 0;
        OK(get_attribute(g, 2, &forced));
        OK(pin_v2(g, heap, chunk, forced ? 1 : 0, &mh));
        OK(map_v2(g, mh, &map, chunk, 0));
        info_v2 info;
        OK(get_info_v2(g, mh, &info));
        CHECK(info.va == heap);
    } else {
        OK(f.pin(g, heap, chunk, 0, 0, &mh));
        OK(f.map(g, mh, &map, chunk));
        check_v1(get_info, g, mh, heap, chunk, 1);
    }
    volatile uint32_t *word = (volatile uint32_t *)((char *)map + chunk - 4);
    uint32_t value = 0;
    *word = 41;
    store_fence();
    device_read(lib, g, heap + chunk - 4, &value, sizeof value);
    CHECK(value == 41 && *word == 41);
    OK(f.from(mh, &value, map, sizeof value)); /* its fence */

    /* ibgda: pinned with a rounded size, mapped with the plain one. */
    uint64_t small = device_alloc(lib, g, 3000);
    gdr_mh_t small_mh;
    void *small_map = NULL;
    OK(f.pin(g, small, PAGE, 0, 0, &small_mh));
    OK(f.map(g, small_mh, &small_map, 3000));
    *(volatile uint64_t *)((char *)small_map + 2992) = 5;
    store_fence();
    uint64_t doorbell = 0;
    device_read(lib, g, small + 2992, &doorbell, sizeof doorbell);
    CHECK(doorbell == 5);

    OK(f.unmap(g, small_mh, small_map, 3000));
    OK(f.unpin(g, small_mh));
    OK(f.unmap(g, mh, map, chunk));
    OK(f.unpin(g, mh));
    device_free(lib, g, small);
    device_free(lib, g, heap);
    OK(f.close(g));
    CHECK(dlclose(lib) == 0);
    return 0;
}

#endif
