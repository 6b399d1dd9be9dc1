/* Rust wrappers (gdrapi-sys and others): core8, gdr_get_info_v2 and the versions through bindgen; pins made on one thread,
 * mapped on a second, used on a third and given up on a fourth; single-byte atomics; one passes real P2P tokens. */
#include <pthread.h>

#include "client.h"

static struct core8 f;
static gdr_t g;
static gdr_mh_t mh;
static void *map;
static uint64_t dev;
static info_v2_fn get_info_v2;

/* Only a kernel module that is told of frees is not. */
static int expect_persistent(void)
{
    const char *backend = getenv("GDRCOPY_BACKEND");
    return !backend || strcmp(backend, "gdrdrv") != 0 || getenv("GDRCOPY_STANDIN_PERSISTENT");
}

static void *pinner(void *arg)
{
    int with_tokens = f.pin(g, dev, PAGE, 0x1234, 1, &mh); /* for drivers that do not pin persistently */
    CHECK(with_tokens == (expect_persistent() ? EINVAL : 0) && (with_tokens == 0) == (mh.h != 0));
    if (with_tokens == 0)
        OK(f.unpin(g, mh));
    OK(f.pin(g, dev, PAGE, 0, 0, &mh));
    return arg;
}

static void *mapper(void *arg)
{
    info_v2 info;
    OK(f.map(g, mh, &map, PAGE));
    OK(get_info_v2(g, mh, &info));
    CHECK(info.va == dev && info.mapped == 1);
    return arg;
}

static void *user(void *arg)
{
    unsigned char *flag = (unsigned char *)map + 17, byte = 0;
    __atomic_store_n(flag, 201, __ATOMIC_RELAXED);
    store_fence();
    OK(f.from(mh, &byte, flag, 1));
    CHECK(byte == 201 && __atomic_load_n(flag, __ATOMIC_RELAXED) == 201);
    return arg;
}

static void *ender(void *arg)
{
    OK(f.unmap(g, mh, map, PAGE));
    OK(f.unpin(g, mh));
    return arg;
}

int main(void)
{
    void *lib = library("libgdrapi.so.2", RTLD_NOW);
    f = core8(lib);
    *(void **)&get_info_v2 = mandatory(lib, "gdr_get_info_v2");
    mandatory(lib, "gdr_runtime_get_version");
    mandatory(lib, "gdr_driver_get_version");
    g = f.open();
    CHECK(g);
    dev = device_alloc(lib, g, PAGE);
    void *(*stages[])(void *) = { pinner, mapper, user, ender };
    for (int i = 0; i < 4; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, stages[i], NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    device_free(lib, g, dev);
    OK(f.close(g));
    return 0;
}
