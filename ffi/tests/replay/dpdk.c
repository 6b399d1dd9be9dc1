/* DPDK's gpudev: five symbols; the caller's raw size; stores through the pointer; the *device address* given to
 * gdr_unmap, with the pinned size; never closed. */
#include <sys/mman.h>

#include "client.h"

int main(void)
{
    char path[4096];
    const char *folder = getenv("GDRCOPY_PATH_L");
    snprintf(path, sizeof path, "%s%slibgdrapi.so", folder ? folder : "", folder ? "/" : "");
    void *lib = library(path, RTLD_LAZY);
    SYMBOL(open_fn, open, "gdr_open");
    SYMBOL(pin_fn, pin, "gdr_pin_buffer");
    SYMBOL(unpin_fn, unpin, "gdr_unpin_buffer");
    SYMBOL(map_fn, map, "gdr_map");
    SYMBOL(unmap_fn, unmap, "gdr_unmap");
    gdr_t g = open();
    CHECK(g);
    uint64_t dev = device_alloc(lib, g, 1024);

    /* Stands for CUDA's reservation, which an unmap that trusts its arguments would punch a hole in: DPDK's argument is
     * the device address, and CUDA reserves that range on the CPU as well. */
    char *reserved = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(reserved != MAP_FAILED);
    reserved[0] = 'r';

    for (int round = 0; round < 3; round++) {
        gdr_mh_t mh;
        void *ptr = NULL;
        OK(pin(g, dev, 1024, 0, 0, &mh));
        OK(map(g, mh, &ptr, 1024));
        ((volatile char *)ptr)[1000] = (char)(33 + round);
        store_fence();
        char seen = 0;
        device_read(lib, g, dev + 1000, &seen, 1);
        CHECK(seen == 33 + round);
        void *wrong = round == 0 ? (void *)(uintptr_t)dev : reserved;
        OK(unmap(g, mh, wrong, 1024));
        RETURNS(EINVAL, unmap(g, mh, wrong, 1024));
        /* The recorded mapping is gone: its page is nobody's. */
        unsigned char resident;
        CHECK(mincore(ptr, 4096, &resident) != 0 && errno == ENOMEM);
        OK(unpin(g, mh));
    }
    CHECK(reserved[0] == 'r');
    return 0;
}
