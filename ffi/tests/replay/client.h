/* What a client of libgdrapi declares for itself instead of including gdrapi.h, and device memory for it to work on.
 * Each replay is one row of real client behaviour: the name it loads, the symbols it needs, the arguments it passes, in
 * its order, with its teardown. The backend is the environment's choice. */
#ifndef CLIENT_H
#define CLIENT_H

#include "../check.h"

typedef struct gdr *gdr_t;

typedef struct gdr_mh_s {
    unsigned long h;
} gdr_mh_t;

/* As headers before 2.4 have it: 40 bytes. */
typedef struct {
    uint64_t va;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
} info_v1;

typedef struct {
    uint64_t va;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
    int mapping_type;
} info_v2;

typedef gdr_t (*open_fn)(void);
typedef int (*close_fn)(gdr_t);
typedef int (*pin_fn)(gdr_t, unsigned long, size_t, uint64_t, uint32_t, gdr_mh_t *);
typedef int (*pin_v2_fn)(gdr_t, unsigned long, size_t, uint32_t, gdr_mh_t *);
typedef int (*unpin_fn)(gdr_t, gdr_mh_t);
typedef int (*map_fn)(gdr_t, gdr_mh_t, void **, size_t);
typedef int (*map_v2_fn)(gdr_t, gdr_mh_t, void **, size_t, int);
typedef int (*unmap_fn)(gdr_t, gdr_mh_t, void *, size_t);
typedef int (*to_fn)(gdr_mh_t, void *, const void *, size_t);
typedef int (*from_fn)(gdr_mh_t, void *, const void *, size_t);
typedef int (*info_v1_fn)(gdr_t, gdr_mh_t, info_v1 *);
typedef int (*info_v2_fn)(gdr_t, gdr_mh_t, info_v2 *);
typedef void (*runtime_version_fn)(int *, int *);
typedef int (*driver_version_fn)(gdr_t, int *, int *);
typedef int (*attribute_fn)(gdr_t, int, int *);

#define SYMBOL(type, variable, name) \
    type variable;                   \
    *(void **)&variable = mandatory(lib, name)

#define SYMBOL_IF_ANY(type, variable, name) \
    type variable;                          \
    *(void **)&variable = optional(lib, name)

/* The eight functions that every client has. */
struct core8 {
    open_fn open;
    close_fn close;
    pin_fn pin;
    unpin_fn unpin;
    map_fn map;
    unmap_fn unmap;
    to_fn to;
    from_fn from;
};

static inline struct core8 core8(void *lib)
{
    SYMBOL(open_fn, open, "gdr_open");
    SYMBOL(close_fn, close, "gdr_close");
    SYMBOL(pin_fn, pin, "gdr_pin_buffer");
    SYMBOL(unpin_fn, unpin, "gdr_unpin_buffer");
    SYMBOL(map_fn, map, "gdr_map");
    SYMBOL(unmap_fn, unmap, "gdr_unmap");
    SYMBOL(to_fn, to, "gdr_copy_to_mapping");
    SYMBOL(from_fn, from, "gdr_copy_from_mapping");
    struct core8 all = { open, close, pin, unpin, map, unmap, to, from };
    return all;
}

/* What CUDA is to the client. */
static inline uint64_t device_alloc(void *lib, gdr_t g, size_t size)
{
    typedef int (*alloc_fn)(gdr_t, int, size_t, uint64_t *);
    SYMBOL(alloc_fn, alloc, "gdrx_alloc");
    uint64_t addr = 0;
    OK(alloc(g, -1, size, &addr));
    CHECK(addr % PAGE == 0);
    return addr;
}

static inline void device_free(void *lib, gdr_t g, uint64_t addr)
{
    typedef int (*free_fn)(gdr_t, uint64_t);
    SYMBOL(free_fn, release, "gdrx_free");
    OK(release(g, addr));
}

/* What a kernel would see, and what it would do. */
static inline void device_read(void *lib, gdr_t g, uint64_t addr, void *to, size_t size)
{
    typedef int (*download_fn)(gdr_t, uint64_t, void *, size_t);
    SYMBOL(download_fn, download, "gdrx_download");
    OK(download(g, addr, to, size));
}

static inline void device_write(void *lib, gdr_t g, uint64_t addr, const void *from, size_t size)
{
    typedef int (*upload_fn)(gdr_t, uint64_t, const void *, size_t);
    SYMBOL(upload_fn, upload, "gdrx_upload");
    OK(upload(g, addr, from, size));
}

/* A 40-byte info with guard bytes behind it. */
struct guarded_v1 {
    info_v1 info;
    unsigned char guard[64];
};

static inline void check_v1(info_v1_fn get_info, gdr_t g, gdr_mh_t mh, uint64_t addr, size_t size, int mapped)
{
    struct guarded_v1 got;
    memset(&got, 0xa5, sizeof got);
    OK(get_info(g, mh, &got.info));
    for (size_t i = 0; i < sizeof got.guard; i++)
        CHECK(got.guard[i] == 0xa5);
    CHECK(got.info.va == (addr & ~(PAGE - 1)));
    CHECK(got.info.mapped_size == ((addr + size + PAGE - 1) & ~(PAGE - 1)) - got.info.va);
    CHECK(got.info.page_size == PAGE);
    CHECK(got.info.mapped == (unsigned)mapped);
}

static inline void store_fence(void)
{
    __asm__ volatile("sfence" ::: "memory");
}

#endif
