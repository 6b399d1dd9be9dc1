/* TensorRT-LLM: a probe opened, closed and opened again; info before and after the map; its test pins 4 KiB of a page;
 * copies of many threads without a lock (the others are under one). */
#include <pthread.h>

#include "client.h"

static struct core8 f;
static gdr_mh_t mh;
static void *map;

static void *copier(void *arg)
{
    uintptr_t n = (uintptr_t)arg;
    unsigned char out[500], in[500];
    unsigned char *at = (unsigned char *)map + n * 512 + n;
    for (unsigned round = 0; round < 500; round++) {
        fill(out, sizeof out, round);
        OK(f.to(mh, at, out, sizeof out));
        OK(f.from(mh, in, at, sizeof in));
        CHECK(memcmp(out, in, sizeof in) == 0);
    }
    return NULL;
}

int main(void)
{
    void *lib = library("libgdrapi.so", RTLD_NOW);
    f = core8(lib);
    SYMBOL(info_v1_fn, get_info, "gdr_get_info");
    SYMBOL(runtime_version_fn, runtime_version, "gdr_runtime_get_version");
    SYMBOL(driver_version_fn, driver_version, "gdr_driver_get_version");
    gdr_t probe = f.open();
    CHECK(probe);
    int major = 0, minor = 0;
    runtime_version(&major, &minor);
    CHECK(major == 2 && minor >= 1);
    OK(driver_version(probe, &major, &minor));
    CHECK(major == 2 && minor >= 1);
    OK(f.close(probe));

    gdr_t g = f.open();
    CHECK(g);
    uint64_t dev = device_alloc(lib, g, 2 * PAGE);
    OK(f.pin(g, dev, 4096, 0, 0, &mh));
    check_v1(get_info, g, mh, dev, 4096, 0);
    OK(f.map(g, mh, &map, PAGE));
    check_v1(get_info, g, mh, dev, 4096, 1);
    char line[300];
    fill(line, sizeof line, 1);
    memcpy((char *)map + 100, line, sizeof line);
    store_fence();
    memset(line, 0, sizeof line);
    device_read(lib, g, dev + 100, line, sizeof line);
    CHECK(is_filled(line, sizeof line, 1));

    pthread_t threads[16];
    for (uintptr_t n = 0; n < 16; n++)
        CHECK(pthread_create(&threads[n], NULL, copier, (void *)n) == 0);
    for (int n = 0; n < 16; n++)
        CHECK(pthread_join(threads[n], NULL) == 0);

    OK(f.unmap(g, mh, map, PAGE));
    OK(f.unpin(g, mh));
    device_free(lib, g, dev);
    OK(f.close(g));
    CHECK(dlclose(lib) == 0);
    return 0;
}
