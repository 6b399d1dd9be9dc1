/* NCCL, of which the versions differ in what they resolve and ask for: everything is under one mutex except open and the
 * versions, buffers are over-allocated and aligned by hand, data goes through plain stores, and the handle is never
 * closed. */
#ifndef NCCL_H
#define NCCL_H

#include <pthread.h>

#include "client.h"

struct nccl {
    void *lib;
    struct core8 f;
    info_v1_fn get_info;
    info_v2_fn get_info_v2;
    pin_v2_fn pin_v2;
    attribute_fn get_attribute;
    gdr_t g;
    int runtime_minor;
};

static pthread_mutex_t nccl_lock = PTHREAD_MUTEX_INITIALIZER;
#define LOCKED(call)                        \
    do {                                    \
        pthread_mutex_lock(&nccl_lock);     \
        int result_ = (call);               \
        pthread_mutex_unlock(&nccl_lock);   \
        OK(result_);                        \
    } while (0)

/* `newest`: the optional symbols that the version knows. */
static inline struct nccl nccl_init(int knows_pin_v2, int knows_attributes)
{
    struct nccl n;
    memset(&n, 0, sizeof n);
    void *lib = n.lib = library("libgdrapi.so", RTLD_NOW);
    n.f = core8(lib);
    *(void **)&n.get_info = mandatory(lib, "gdr_get_info");
    SYMBOL(runtime_version_fn, runtime_version, "gdr_runtime_get_version");
    SYMBOL(driver_version_fn, driver_version, "gdr_driver_get_version");
    if (knows_pin_v2)
        *(void **)&n.pin_v2 = optional(lib, "gdr_pin_buffer_v2");
    if (knows_attributes) {
        *(void **)&n.get_info_v2 = optional(lib, "gdr_get_info_v2");
        *(void **)&n.get_attribute = optional(lib, "gdr_get_attribute");
    }
    n.g = n.f.open();
    CHECK(n.g);
    int lib_major = -1, drv_major = -1, drv_minor = -1, dma_buf = -1;
    runtime_version(&lib_major, &n.runtime_minor);
    CHECK(lib_major == 2 && n.runtime_minor >= 1);
    if (n.get_attribute && n.runtime_minor >= 6)
        OK(n.get_attribute(n.g, 3, &dma_buf));
    if (dma_buf <= 0) {
        OK(driver_version(n.g, &drv_major, &drv_minor));
        CHECK(drv_major == 2 && drv_minor >= 1);
    }
    return n;
}

struct nccl_memory {
    uint64_t dev, aligned;
    char *map, *ptr;
    size_t size;
    gdr_mh_t mh;
};

static inline struct nccl_memory nccl_calloc(struct nccl *n, size_t wanted)
{
    struct nccl_memory m;
    m.size = (wanted + PAGE - 1) & ~(PAGE - 1);
    m.dev = device_alloc(n->lib, n->g, m.size + PAGE - 1);
    m.aligned = (m.dev + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    m.mh.h = 0;
    void *map = NULL;
    if (n->pin_v2 && n->runtime_minor >= 5)
        LOCKED(n->pin_v2(n->g, m.aligned, m.size, 0, &m.mh));
    else
        LOCKED(n->f.pin(n->g, m.aligned, m.size, 0, 0, &m.mh));
    CHECK(m.mh.h != 0);
    LOCKED(n->f.map(n->g, m.mh, &map, m.size));
    uint64_t va;
    if (n->get_info_v2) {
        info_v2 info;
        LOCKED(n->get_info_v2(n->g, m.mh, &info));
        CHECK(info.mapped == 1 && info.mapping_type != 0);
        va = info.va;
    } else {
        check_v1(n->get_info, n->g, m.mh, m.aligned, m.size, 1);
        va = m.aligned;
    }
    m.map = (char *)map;
    m.ptr = m.map + (va - m.aligned);
    return m;
}

static inline void nccl_free(struct nccl *n, struct nccl_memory *m)
{
    LOCKED(n->f.unmap(n->g, m->mh, m->map, m->size));
    LOCKED(n->f.unpin(n->g, m->mh));
    device_free(n->lib, n->g, m->dev);
}

/* Direct stores, the proxy's flush, and the descriptor's copy. */
static inline int nccl_run(int knows_pin_v2, int knows_attributes)
{
    struct nccl n = nccl_init(knows_pin_v2, knows_attributes);
    struct nccl_memory fifo = nccl_calloc(&n, 1 << 20), proxy = nccl_calloc(&n, 64);
    volatile uint64_t *words = (volatile uint64_t *)fifo.ptr;
    uint64_t seen[4] = { 0 }, flushed = 0;
    for (unsigned i = 0; i < 4; i++)
        words[i] = 0x1122334455667788u + i;
    store_fence();
    device_read(n.lib, n.g, fifo.aligned, seen, sizeof seen);
    for (unsigned i = 0; i < 4; i++)
        CHECK(seen[i] == 0x1122334455667788u + i);
    uint64_t tail = 77;
    device_write(n.lib, n.g, proxy.aligned, &tail, sizeof tail);
    LOCKED(n.f.from(proxy.mh, &flushed, proxy.ptr, sizeof flushed));
    CHECK(flushed == 77);
    char work[600], back[600];
    fill(work, sizeof work, 3);
    LOCKED(n.f.to(fifo.mh, fifo.ptr + 40, work, sizeof work));
    device_read(n.lib, n.g, fifo.aligned + 40, back, sizeof back);
    CHECK(is_filled(back, sizeof back, 3));
    nccl_free(&n, &proxy);
    nccl_free(&n, &fifo);
    return 0;
}

#endif
