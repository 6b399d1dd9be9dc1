/* What clients depend on, beyond the order of their own calls. */
#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

static unsigned char host[3 * 65536], back[3 * 65536];

static void unaligned_pins(gdr_t g, uint64_t dev)
{
    /* Pinning succeeds, gdr_map refuses, gdrx_map gives the very byte. */
    size_t offsets[] = { 1, 512, 4096, 65535 };
    for (size_t i = 0; i < 4; i++) {
        uint64_t addr = dev + offsets[i];
        gdr_mh_t mh;
        gdr_info_t info;
        void *map = host;
        size_t size = 0;
        OK(gdr_pin_buffer(g, addr, 600, 0, 0, &mh));
        OK(gdr_get_info(g, mh, &info));
        CHECK(info.va == dev && info.mapped == 0 && info.page_size == 65536);
        CHECK(info.mapped_size == (offsets[i] + 600 > PAGE ? 2 * PAGE : PAGE));
        RETURNS(EINVAL, gdr_map(g, mh, &map, 600));
        CHECK(map == NULL);
        OK(gdrx_map(g, mh, &map, &size));
        CHECK(size == 600);
        fill(host, 600, (unsigned)i);
        OK(gdr_copy_to_mapping(mh, map, host, 600));
        OK(gdrx_download(g, addr, back, 600));
        CHECK(is_filled(back, 600, (unsigned)i));
        RETURNS(EINVAL, gdr_copy_to_mapping(mh, (char *)map - 1, host, 1));
        RETURNS(EINVAL, gdr_copy_to_mapping(mh, (char *)map + 600, host, 1));
        OK(gdr_unmap(g, mh, map, size));
        OK(gdr_unpin_buffer(g, mh));
    }
}

static void sizes_of_maps(gdr_t g, uint64_t dev)
{
    gdr_mh_t mh;
    void *map = NULL, *again = host;
    OK(gdr_pin_buffer(g, dev, PAGE + 1, 0, 0, &mh));
    RETURNS(EINVAL, gdr_map(g, mh, &map, 0));
    RETURNS(EINVAL, gdr_map(g, mh, &map, 2 * PAGE + 1));
    RETURNS(EINVAL, gdr_map(g, mh, &map, (size_t)-1));
    RETURNS(EINVAL, gdr_map_v2(g, mh, &map, PAGE, 1));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_INVALID_ARGUMENT);
    /* Smaller than the pin, and no multiple of a page: rounded up to one. */
    OK(gdr_map(g, mh, &map, 5000));
    RETURNS(EAGAIN, gdr_map(g, mh, &again, 5000));
    CHECK(again == NULL && gdrx_last_error_kind() == GDRX_ERROR_ALREADY_MAPPED);
    OK(gdr_copy_to_mapping(mh, (char *)map + 8191, host, 1));
    RETURNS(EINVAL, gdr_copy_to_mapping(mh, (char *)map + 8191, host, 2));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_OUT_OF_BOUNDS);
    OK(gdr_unmap(g, mh, map, 5000));
    RETURNS(EINVAL, gdr_unmap(g, mh, map, 5000));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_NOT_MAPPED);
    OK(gdr_map(g, mh, &map, 2 * PAGE)); /* again, all of it */
    OK(gdr_copy_to_mapping(mh, (char *)map + 2 * PAGE - 1, host, 1));
    OK(gdr_unpin_buffer(g, mh)); /* mapped */
    RETURNS(EINVAL, gdr_copy_to_mapping(mh, map, host, 1));
}

static void neighbours_in_a_page(gdr_t g, uint64_t dev)
{
    gdr_mh_t first, second;
    void *map = NULL;
    OK(gdr_pin_buffer(g, dev, 40, 0, 0, &first));
    OK(gdr_pin_buffer(g, dev + 512, 40, 0, 0, &second));
    CHECK(first.h != second.h);
    OK(gdr_map(g, first, &map, 40));
    OK(gdr_unpin_buffer(g, second));
    fill(host, 40, 5);
    OK(gdr_copy_to_mapping(first, map, host, 40));
    OK(gdrx_download(g, dev, back, 40));
    CHECK(is_filled(back, 40, 5));
    OK(gdr_unpin_buffer(g, first));
}

static void copies(gdr_t g, uint64_t dev)
{
    gdr_mh_t mh;
    void *map = NULL;
    OK(gdr_pin_buffer(g, dev, 3 * PAGE, 0, 0, &mh));
    OK(gdr_map(g, mh, &map, 3 * PAGE));
    for (size_t offset = 0; offset < 70; offset += 3)
        for (size_t size = 0; size < 300; size += 1 + size / 7) {
            unsigned seed = (unsigned)(offset + size);
            char *at = (char *)map + PAGE - 100 + offset;
            fill(host, 1024, 200);
            OK(gdr_copy_to_mapping(mh, (char *)map + PAGE - 200, host, 1024));
            fill(host + 1, size, seed);
            OK(gdr_copy_to_mapping(mh, at, host + 1, size));
            memset(back, 0, sizeof back);
            OK(gdr_copy_from_mapping(mh, back + 3, at, size));
            CHECK(is_filled(back + 3, size, seed) && back[2] == 0 && back[3 + size] == 0);
            /* Nothing else changed. */
            fill(host, 1024, 200);
            fill(host + 100 + offset, size, seed);
            OK(gdrx_download(g, dev + PAGE - 200, back, 1024));
            CHECK(memcmp(host, back, 1024) == 0);
        }
    OK(gdr_unmap(g, mh, map, 3 * PAGE));
    OK(gdr_unpin_buffer(g, mh));
}

static void memory_kinds(gdr_t g, uint64_t dev)
{
    gdr_mh_t mh = { 7 };
    RETURNS(EINVAL, gdr_pin_buffer(g, dev, 0, 0, 0, &mh));
    CHECK(mh.h == 0);
    RETURNS(EINVAL, gdr_pin_buffer(g, 0, PAGE, 0, 0, &mh));
    RETURNS(EINVAL, gdr_pin_buffer(g, ~0ul - 8, 64, 0, 0, &mh));
    RETURNS(EINVAL, gdr_pin_buffer(g, (unsigned long)host, 64, 0, 0, &mh));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_UNSUPPORTED_MEMORY);
    RETURNS(EINVAL, gdr_pin_buffer(g, dev, (size_t)1 << 40, 0, 0, &mh));
    int persistent = 0;
    OK(gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, &persistent));
    if (persistent)
        RETURNS(EINVAL, gdr_pin_buffer(g, dev, PAGE, 1, 0, &mh));
    RETURNS(EINVAL, gdr_pin_buffer_v2(g, dev, PAGE, GDR_PIN_FLAG_FORCE_PCIE, &mh));
    RETURNS(EINVAL, gdr_pin_buffer_v2(g, dev, PAGE, 0x80000000u, &mh));
    CHECK(mh.h == 0);
}

static void queries(gdr_t g)
{
    int value = 9, major = 0, minor = 0;
    OK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value));
    CHECK(value == 0);
    OK(gdr_get_attribute(g, GDR_ATTR_SUPPORT_PIN_FLAG_FORCE_PCIE, &value));
    CHECK(value == 0);
    OK(gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, &value));
    CHECK(value == 0 || value == 1);
    value = 9;
    RETURNS(EINVAL, gdr_get_attribute(g, (gdr_attr_t)77, &value));
    CHECK(value == 0);
    OK(gdr_driver_get_version(g, &major, &minor));
    CHECK(major == 2 && minor >= 5);
    CHECK(strcmp(gdr_get_mapping_type_string(GDR_MAPPING_TYPE_WC), "WC") == 0);
    CHECK(strcmp(gdr_get_mapping_type_string(GDR_MAPPING_TYPE_NONE), "NONE") == 0);
    CHECK(strcmp(gdr_get_mapping_type_string((gdr_mapping_type_t)99), "UNKNOWN") == 0);
}

static void settings(void)
{
    /* A contradiction and an unknown name make gdr_open fail, and say so. */
    char *backend = getenv("GDRCOPY_BACKEND");
    char *kept = backend ? strdup(backend) : NULL;
    setenv("GDRCOPY_BACKEND", "emulated", 1);
    setenv("GDRCOPY_USE_DMABUF_MMAP", "1", 1);
    CHECK(gdr_open() == NULL);
    CHECK(strstr(gdrx_last_error(), "GDRCOPY_USE_DMABUF_MMAP") != NULL);
    setenv("GDRCOPY_USE_DMABUF_MMAP", "0", 1);
    gdr_t g = gdr_open();
    CHECK(g);
    OK(gdr_close(g));
    unsetenv("GDRCOPY_USE_DMABUF_MMAP");
    setenv("GDRCOPY_BACKEND", "warp", 1);
    CHECK(gdr_open() == NULL && strstr(gdrx_last_error(), "warp") != NULL);
    if (kept)
        setenv("GDRCOPY_BACKEND", kept, 1);
    else
        unsetenv("GDRCOPY_BACKEND");
    free(kept);
}

int main(void)
{
    gdr_t g = gdr_open();
    CHECK(g);
    uint64_t dev = 0;
    OK(gdrx_alloc(g, -1, 3 * PAGE, &dev));
    unaligned_pins(g, dev);
    sizes_of_maps(g, dev);
    neighbours_in_a_page(g, dev);
    copies(g, dev);
    memory_kinds(g, dev);
    queries(g);
    settings();
    OK(gdrx_free(g, dev));
    OK(gdr_close(g));
    return 0;
}
