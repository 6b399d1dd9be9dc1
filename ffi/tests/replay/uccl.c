/* UCCL: linked; the info comes before the map, and its mapped_size is what is mapped. */
#include <gdrapi.h>

#include "../check.h"
#include <gdrapi_ext.h>

int main(void)
{
    gdr_t g = gdr_open();
    CHECK(g);
    uint64_t dev = 0;
    OK(gdrx_alloc(g, -1, 100000, &dev));
    gdr_mh_t mh;
    gdr_info_t info;
    OK(gdr_pin_buffer(g, dev, 100000, 0, 0, &mh));
    OK(gdr_get_info(g, mh, &info));
    CHECK(info.mapped == 0 && info.mapping_type == GDR_MAPPING_TYPE_NONE && info.mapped_size == 2 * PAGE);
    void *map = NULL;
    OK(gdr_map(g, mh, &map, info.mapped_size));
    volatile uint32_t *at = (volatile uint32_t *)((char *)map + (dev - info.va));
    at[24999] = 31;
    __asm__ volatile("sfence" ::: "memory");
    uint32_t seen = 0;
    OK(gdrx_download(g, dev + 4 * 24999, &seen, sizeof seen));
    CHECK(seen == 31);
    OK(gdr_unmap(g, mh, map, info.mapped_size));
    OK(gdr_unpin_buffer(g, mh));
    OK(gdr_close(g));
    return 0;
}
