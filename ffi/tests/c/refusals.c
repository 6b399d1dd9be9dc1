/* Every function with NULL, made-up, foreign and stale handles: an error, zeroed outputs, no crash, and a reason. */
#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

/* The 40-byte form, which the header's macro hides. */
#undef gdr_get_info
int gdr_get_info(gdr_t g, gdr_mh_t handle, void *info);

static const gdr_mh_t NONE = { 0 };
static char bytes[64];

static void failed_with(gdrx_error_kind_t kind)
{
    CHECK(gdrx_last_error_kind() == kind);
    CHECK(strlen(gdrx_last_error()) > 10 && !strchr(gdrx_last_error(), '\n'));
}

static int is_zero(const void *at, size_t size)
{
    const unsigned char *byte = (const unsigned char *)at;
    while (size--)
        if (*byte++)
            return 0;
    return 1;
}

/* All that takes a gdr_t, with one that is not valid. */
static void bad_session(gdr_t g, gdr_mh_t mh, uint64_t dev)
{
    gdr_mh_t out = { 1 };
    gdr_info_t info;
    gdrx_cost_t cost;
    void *ptr = &ptr;
    int major = 1, minor = 1, value = 1;
    uint64_t addr = 1;
    size_t size = 1;
    char text[16] = "x";
    memset(&info, 0xff, sizeof info);
    memset(&cost, 0xff, sizeof cost);

    RETURNS(EINVAL, gdr_close(g));
    failed_with(GDRX_ERROR_INVALID_HANDLE);
    RETURNS(EINVAL, gdr_pin_buffer(g, dev, PAGE, 0, 0, &out));
    CHECK(out.h == 0);
    out.h = 1;
    RETURNS(EINVAL, gdr_pin_buffer_v2(g, dev, PAGE, 0, &out));
    CHECK(out.h == 0);
    RETURNS(EINVAL, gdr_unpin_buffer(g, mh));
    RETURNS(EINVAL, gdr_get_callback_flag(g, mh, &value));
    CHECK(value == 0);
    RETURNS(EINVAL, gdr_get_info_v2(g, mh, &info));
    CHECK(info.va == 0 && info.mapped_size == 0 && info.mapped == 0 && info.mapping_type == 0);
    memset(&info, 0xff, sizeof info);
    RETURNS(EINVAL, gdr_get_info(g, mh, &info));
    CHECK(info.va == 0 && info.page_size == 0 && info.mapped == 0);
    RETURNS(EINVAL, gdr_map(g, mh, &ptr, PAGE));
    CHECK(ptr == NULL);
    ptr = &ptr;
    RETURNS(EINVAL, gdr_map_v2(g, mh, &ptr, PAGE, 0));
    CHECK(ptr == NULL);
    RETURNS(EINVAL, gdr_unmap(g, mh, bytes, PAGE));
    RETURNS(EINVAL, gdr_driver_get_version(g, &major, &minor));
    CHECK(major == 0 && minor == 0);
    value = 1;
    RETURNS(EINVAL, gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value));
    CHECK(value == 0);

    CHECK(gdrx_backend(g) == NULL);
    failed_with(GDRX_ERROR_INVALID_HANDLE);
    RETURNS(EINVAL, gdrx_probe_report(g, text, sizeof text));
    CHECK(text[0] == 0);
    RETURNS(EINVAL, gdrx_alloc(g, -1, PAGE, &addr));
    CHECK(addr == 0);
    RETURNS(EINVAL, gdrx_free(g, dev));
    RETURNS(EINVAL, gdrx_upload(g, dev, bytes, 1));
    RETURNS(EINVAL, gdrx_download(g, dev, bytes, 1));
    ptr = &ptr;
    RETURNS(EINVAL, gdrx_map(g, mh, &ptr, &size));
    CHECK(ptr == NULL && size == 0);
    RETURNS(EINVAL, gdrx_estimate_cost(g, -1, &cost));
    CHECK(is_zero(&cost, sizeof cost));
}

/* All that takes a gdr_mh_t, with one that is not valid for `g`. */
static void bad_pin(gdr_t g, gdr_mh_t mh)
{
    gdr_info_t info;
    void *ptr = &ptr;
    int value = 1;
    memset(&info, 0xff, sizeof info);
    RETURNS(EINVAL, gdr_unpin_buffer(g, mh));
    failed_with(GDRX_ERROR_INVALID_HANDLE);
    RETURNS(EINVAL, gdr_get_callback_flag(g, mh, &value));
    CHECK(value == 0);
    RETURNS(EINVAL, gdr_get_info_v2(g, mh, &info));
    CHECK(info.va == 0 && info.mapped == 0);
    RETURNS(EINVAL, gdr_get_info(g, mh, &info));
    RETURNS(EINVAL, gdr_map(g, mh, &ptr, PAGE));
    CHECK(ptr == NULL);
    RETURNS(EINVAL, gdr_map_v2(g, mh, &ptr, PAGE, 0));
    RETURNS(EINVAL, gdr_unmap(g, mh, bytes, PAGE));
    RETURNS(EINVAL, gdrx_map(g, mh, &ptr, NULL));
    CHECK(ptr == NULL);
}

/* The calls that take no gdr_t. */
static void bad_copies(gdr_mh_t mh)
{
    gdrx_mapping_facts_t facts;
    memset(&facts, 0xff, sizeof facts);
    RETURNS(EINVAL, gdr_copy_to_mapping(mh, bytes, bytes, 1));
    RETURNS(EINVAL, gdr_copy_from_mapping(mh, bytes, bytes, 1));
    RETURNS(EINVAL, gdr_copy_to_mapping(mh, bytes, bytes, 0));
    RETURNS(EINVAL, gdr_copy_from_mapping(mh, bytes, bytes, 0));
    RETURNS(EINVAL, gdrx_get_mapping_facts(mh, &facts, sizeof facts));
    CHECK(is_zero(&facts, sizeof facts));
    RETURNS(EINVAL, gdrx_write_posted(mh, bytes, bytes, 1));
    RETURNS(EINVAL, gdrx_post_line(mh, bytes, bytes));
    RETURNS(EINVAL, gdrx_publish32(mh, bytes, bytes, 1, bytes, 1));
    RETURNS(EINVAL, gdrx_publish64(mh, bytes, bytes, 1, bytes, 1));
    RETURNS(EINVAL, gdrx_flush(mh));
}

static void null_outputs(gdr_t g, gdr_mh_t pinned, gdr_mh_t mapped, char *map)
{
    int value = 0;
    RETURNS(EINVAL, gdr_pin_buffer(g, PAGE, PAGE, 0, 0, NULL));
    failed_with(GDRX_ERROR_INVALID_ARGUMENT);
    RETURNS(EINVAL, gdr_pin_buffer_v2(g, PAGE, PAGE, 0, NULL));
    RETURNS(EINVAL, gdr_get_callback_flag(g, pinned, NULL));
    RETURNS(EINVAL, gdr_get_info_v2(g, pinned, NULL));
    RETURNS(EINVAL, gdr_get_info(g, pinned, NULL));
    RETURNS(EINVAL, gdr_map(g, pinned, NULL, PAGE));
    RETURNS(EINVAL, gdr_map_v2(g, pinned, NULL, PAGE, 0));
    RETURNS(EINVAL, gdr_driver_get_version(g, NULL, &value));
    RETURNS(EINVAL, gdr_driver_get_version(g, &value, NULL));
    RETURNS(EINVAL, gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, NULL));
    gdr_runtime_get_version(NULL, NULL);
    RETURNS(EINVAL, gdrx_probe_report(g, NULL, 8));
    RETURNS(EINVAL, gdrx_probe_report(g, bytes, 0));
    RETURNS(EINVAL, gdrx_alloc(g, -1, PAGE, NULL));
    RETURNS(EINVAL, gdrx_map(g, pinned, NULL, NULL));
    RETURNS(EINVAL, gdrx_estimate_cost(g, -1, NULL));
    RETURNS(EINVAL, gdrx_get_mapping_facts(mapped, NULL, 8));

    RETURNS(EINVAL, gdr_copy_to_mapping(mapped, map, NULL, 1));
    RETURNS(EINVAL, gdr_copy_from_mapping(mapped, NULL, map, 1));
    RETURNS(EINVAL, gdr_copy_to_mapping(mapped, NULL, bytes, 1));
    RETURNS(EINVAL, gdr_copy_from_mapping(mapped, bytes, NULL, 1));
    RETURNS(EINVAL, gdr_copy_to_mapping(mapped, map, bytes, (size_t)-1));
    RETURNS(EINVAL, gdrx_write_posted(mapped, map, NULL, 1));
    RETURNS(EINVAL, gdrx_post_line(mapped, map, NULL));
    RETURNS(EINVAL, gdrx_publish32(mapped, map, NULL, 1, map, 1));
    RETURNS(EINVAL, gdrx_publish64(mapped, map, bytes, 1, NULL, 1));
    OK(gdr_copy_to_mapping(mapped, map, NULL, 0));
    OK(gdr_copy_from_mapping(mapped, NULL, map, 0));
}

int main(void)
{
    gdr_t g = gdr_open(), other = gdr_open();
    CHECK(g && other && g != other);
    uint64_t dev = 0;
    OK(gdrx_alloc(g, -1, 2 * PAGE, &dev));
    gdr_mh_t pinned, mapped, stale;
    void *map = NULL;
    OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &pinned));
    OK(gdr_pin_buffer(g, dev + PAGE, PAGE, 0, 0, &mapped));
    OK(gdr_map(g, mapped, &map, PAGE));
    OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &stale));
    OK(gdr_unpin_buffer(g, stale));
    /* The slot is in use again, by another pin. */
    gdr_mh_t after;
    OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &after));
    CHECK(after.h != stale.h);

    gdr_mh_t made_up[] = { { 1 }, { (unsigned long)&bytes }, { ~0ul }, { pinned.h + (1ul << 20) }, { pinned.h ^ 1 } };
    null_outputs(g, pinned, mapped, (char *)map);
    bad_session(NULL, pinned, dev);
    bad_session((gdr_t)(void *)bytes, pinned, dev);
    bad_session((gdr_t)(uintptr_t)-1, pinned, dev);
    bad_pin(g, NONE);
    bad_pin(g, stale);
    bad_pin(other, pinned); /* another session's */
    bad_copies(NONE);
    bad_copies(stale);
    bad_copies(pinned); /* not mapped */
    for (size_t i = 0; i < sizeof made_up / sizeof *made_up; i++) {
        if (made_up[i].h == mapped.h || made_up[i].h == after.h)
            continue;
        bad_pin(g, made_up[i]);
        bad_copies(made_up[i]);
    }

    OK(gdr_close(other));
    bad_session(other, pinned, dev); /* stale */
    RETURNS(EINVAL, gdrx_free(g, dev + 1));
    RETURNS(EINVAL, gdrx_upload(g, dev + 2 * PAGE, bytes, 1));
    RETURNS(EINVAL, gdrx_download(g, dev + 2 * PAGE - 1, bytes, 2));
    RETURNS(EINVAL, gdrx_alloc(g, -2, PAGE, &dev));
    CHECK(gdrx_open("no-such-backend") == NULL);
    failed_with(GDRX_ERROR_INVALID_ARGUMENT);

    /* What is left goes with the session, and every handle to it. */
    OK(gdr_close(g));
    bad_session(g, pinned, dev);
    bad_pin(g, pinned);
    bad_copies(mapped);
    return 0;
}
