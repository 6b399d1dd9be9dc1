/* gdrapi_ext.h at work. */
#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

int main(void)
{
    gdr_t g = gdrx_open(NULL);
    CHECK(g && gdrx_backend(g));
    char report[400], cut[5];
    OK(gdrx_probe_report(g, report, sizeof report));
    CHECK(strstr(report, gdrx_backend(g)) != NULL);
    OK(gdrx_probe_report(g, cut, sizeof cut));
    CHECK(strlen(cut) == 4 && strncmp(cut, report, 4) == 0);

    uint64_t dev = 0;
    OK(gdrx_alloc(g, 0, PAGE, &dev));
    gdr_mh_t mh;
    void *at = NULL;
    OK(gdr_pin_buffer(g, dev + 64, 1024, 0, 0, &mh));
    OK(gdrx_map(g, mh, &at, NULL));
    char *map = (char *)at, line[64], seen[1024];

    gdrx_mapping_facts_t facts;
    OK(gdrx_get_mapping_facts(mh, &facts, sizeof facts));
    CHECK(facts.window_bytes >= PAGE && facts.mapping_type != GDR_MAPPING_TYPE_NONE);
    CHECK(facts.after_free != GDRX_AFTER_FREE_UNKNOWN && strlen(facts.routine) > 2);
    /* An older program's structure, and a newer one's. */
    struct {
        gdrx_mapping_facts_t known;
        char more[16];
    } newer;
    memset(&newer, 0xff, sizeof newer);
    OK(gdrx_get_mapping_facts(mh, &newer.known, sizeof newer));
    CHECK(newer.more[0] == 0 && newer.more[15] == 0 && newer.known.window_bytes == facts.window_bytes);
    memset(&newer, 0xff, sizeof newer);
    OK(gdrx_get_mapping_facts(mh, &newer.known, 24));
    CHECK(newer.known.window_bytes == facts.window_bytes && (int)newer.known.after_free == -1);

    fill(line, sizeof line, 1);
    OK(gdrx_post_line(mh, map + 128, line));
    RETURNS(EINVAL, gdrx_post_line(mh, map + 129, line));
    OK(gdrx_write_posted(mh, map + 3, line, 50));
    gdrx_fence();
    OK(gdrx_flush(mh));
    OK(gdrx_download(g, dev + 64, seen, sizeof seen));
    CHECK(is_filled(seen + 128, 64, 1) && is_filled(seen + 3, 50, 1));

    uint64_t flag = 0;
    OK(gdrx_publish32(mh, map + 256, line, 64, map + 512, 0xf1a6));
    OK(gdrx_publish64(mh, map + 320, line, 64, map + 520, 0x123456789abcdef0u));
    RETURNS(EINVAL, gdrx_publish64(mh, map + 320, line, 64, map + 516, 1));  /* not aligned */
    RETURNS(EINVAL, gdrx_publish64(mh, map + 320, line, 64, map + 1020, 1)); /* not inside */
    OK(gdrx_download(g, dev + 64, seen, sizeof seen));
    memcpy(&flag, seen + 512, 4);
    CHECK(flag == 0xf1a6 && is_filled(seen + 256, 64, 1));
    memcpy(&flag, seen + 520, 8);
    CHECK(flag == 0x123456789abcdef0u && is_filled(seen + 320, 64, 1));

    gdrx_cost_t cost;
    OK(gdrx_estimate_cost(g, -1, &cost));
    CHECK(cost.put_bytes_per_second > 1e6 && cost.get_bytes_per_second > 1e6);
    CHECK(cost.put_overhead_ns >= 0 && cost.get_overhead_ns > 0 && cost.get_overhead_ns < 1e9);

    RETURNS(EINVAL, gdr_unmap(g, (gdr_mh_t){ 5 }, at, 1024));
    OK(gdr_unmap(g, mh, at, 1024));
    OK(gdr_close(g));
    return 0;
}
