/* MSCCL++: linked; needs /dev/gdrdrv to exist before it calls anything, which this replay leaves out; one page round the
 * target, FORCE_PCIE then 0; atomic 64-bit stores, and 8-byte copies that a kernel polls. */
#include <pthread.h>

#include <gdrapi.h>

#include "../check.h"
#include <gdrapi_ext.h>

enum { ROUNDS = 20000 };
static gdr_mh_t mh;
static uint64_t *flag;

/* Stands for the running kernel: no value may be torn. */
static void *poller(void *arg)
{
    uint64_t last = 0;
    while ((uint32_t)last < ROUNDS) {
        last = __atomic_load_n((uint64_t *)arg, __ATOMIC_RELAXED);
        CHECK((uint32_t)last == (uint32_t)(last >> 32));
    }
    return NULL;
}

int main(void)
{
    gdr_t g = gdr_open();
    CHECK(g);
    int major, minor;
    gdr_runtime_get_version(&major, &minor);
    OK(gdr_driver_get_version(g, &major, &minor));
    CHECK(major == 2 && minor >= 5);
    uint64_t dev = 0;
    OK(gdrx_alloc(g, -1, PAGE, &dev));
    uint64_t target = dev + 4040;
    void *map = NULL;
    if (gdr_pin_buffer_v2(g, target & GPU_PAGE_MASK, GPU_PAGE_SIZE, GDR_PIN_FLAG_FORCE_PCIE, &mh) != 0)
        OK(gdr_pin_buffer_v2(g, target & GPU_PAGE_MASK, GPU_PAGE_SIZE, 0, &mh));
    OK(gdr_map(g, mh, &map, GPU_PAGE_SIZE));
    flag = (uint64_t *)((char *)map + (target & GPU_PAGE_OFFSET));
    __atomic_store_n(flag, 0, __ATOMIC_RELEASE);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, poller, flag) == 0);
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        uint64_t value = i << 32 | i, seen = 0;
        OK(gdr_copy_to_mapping(mh, flag, &value, sizeof value));
        OK(gdr_copy_from_mapping(mh, &seen, flag, sizeof seen));
        CHECK(seen == value);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    OK(gdr_unmap(g, mh, map, GPU_PAGE_SIZE));
    OK(gdr_unpin_buffer(g, mh));
    OK(gdr_close(g));
    return 0;
}
