/* gdrapi_ext.h at work. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

/* Copies by several threads, over a mapping of its own. */
static void copiers(gdr_t g)
{
    enum { SIZE = 200000 };
    static char from[SIZE], to[SIZE], seen[SIZE];
    uint64_t dev = 0;
    OK(gdrx_alloc(g, 0, SIZE, &dev));
    gdr_mh_t mh;
    void *at = NULL;
    OK(gdr_pin_buffer(g, dev, SIZE, 0, 0, &mh));
    OK(gdrx_map(g, mh, &at, NULL));
    char *map = (char *)at;

    gdrx_copier_t copier = { 7 };
    int threads = 0;
    RETURNS(EINVAL, gdrx_copier_create(mh, 65, NULL, -1, &copier));
    CHECK(copier.h == 0 && strstr(gdrx_last_error(), "65 threads, of 1 to 64"));
    RETURNS(EINVAL, gdrx_copier_create(mh, -1, NULL, -1, &copier));
    RETURNS(EINVAL, gdrx_copier_create(mh, 0, "one", -1, &copier));
    RETURNS(EINVAL, gdrx_copier_create(mh, 0, NULL, -1, NULL));
    RETURNS(EINVAL, gdrx_copier_create((gdr_mh_t){ 5 }, 0, NULL, -1, &copier));
    RETURNS(EINVAL, gdrx_copier_threads(copier, &threads));
    OK(gdrx_copier_create(mh, 0, NULL, -1, &copier));
    OK(gdrx_copier_threads(copier, &threads));
    CHECK(threads >= 1 && threads <= 8);
    OK(gdrx_copier_destroy(copier));
    RETURNS(EINVAL, gdrx_copier_destroy(copier));

    /* A worker on the very CPU that this thread is on: slow, but it needs no other. */
    char cpu[16];
    snprintf(cpu, sizeof cpu, "%d", sched_getcpu());
    OK(gdrx_copier_create(mh, 2, cpu, 100, &copier));
    OK(gdrx_copier_threads(copier, &threads));
    CHECK(threads == 2);
    for (unsigned round = 0; round < 20; round++) {
        size_t offset = round * 7 % 64, size = SIZE - 64 - round * 1000;
        fill(from, SIZE, round);
        OK(gdrx_copier_wake(copier));
        OK(gdrx_copier_write(copier, mh, map + offset, from, size));
        OK(gdrx_copier_read(copier, mh, to, map + offset, size));
        CHECK(memcmp(from, to, size) == 0);
        OK(gdrx_flush(mh));
        OK(gdrx_download(g, dev + offset, seen, size));
        CHECK(memcmp(from, seen, size) == 0);
    }
    RETURNS(EINVAL, gdrx_copier_write(copier, mh, map + 1, from, SIZE));
    RETURNS(EINVAL, gdrx_copier_read(copier, (gdr_mh_t){ 5 }, to, map, SIZE));
    RETURNS(EINVAL, gdrx_copier_read((gdrx_copier_t){ 5 }, mh, to, map, SIZE));

    /* A child has no such threads, and does not wait for them. */
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        RETURNS(EACCES, gdrx_copier_read(copier, mh, to, map, SIZE));
        RETURNS(EACCES, gdrx_copier_destroy(copier));
        /* Not _exit: a memory checker would take what the parent's threads hold for lost. */
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    OK(gdrx_copier_read(copier, mh, to, map, SIZE));

    OK(gdrx_copier_destroy(copier));
    RETURNS(EINVAL, gdrx_copier_write(copier, mh, map, from, SIZE));
    OK(gdr_unmap(g, mh, at, SIZE));
    OK(gdr_unpin_buffer(g, mh));
    OK(gdrx_free(g, dev));
}

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

    OK(gdrx_store32_posted(mh, map + 192, 0x89abcdefu));
    OK(gdrx_store64_posted(mh, map + 200, 0x0123456789abcdefu));
    RETURNS(EINVAL, gdrx_store32_posted(mh, map + 194, 1));
    RETURNS(EINVAL, gdrx_store64_posted(mh, map + 204, 1));
    RETURNS(EINVAL, gdrx_store64_posted(mh, map + 1020, 1));
    gdrx_fence();
    OK(gdrx_flush(mh));
    OK(gdrx_download(g, dev + 64, seen, sizeof seen));
    uint64_t flag = 0;
    memcpy(&flag, seen + 192, 4);
    CHECK(flag == 0x89abcdefu);
    memcpy(&flag, seen + 200, 8);
    CHECK(flag == 0x0123456789abcdefu);

    flag = 0;
    OK(gdrx_publish32(mh, map + 256, line, 64, map + 512, 0xf1a6));
    OK(gdrx_publish64(mh, map + 320, line, 64, map + 520, 0x123456789abcdef0u));
    RETURNS(EINVAL, gdrx_publish64(mh, map + 320, line, 64, map + 516, 1));  /* not aligned */
    RETURNS(EINVAL, gdrx_publish64(mh, map + 320, line, 64, map + 1020, 1)); /* not inside */
    OK(gdrx_download(g, dev + 64, seen, sizeof seen));
    memcpy(&flag, seen + 512, 4);
    CHECK(flag == 0xf1a6 && is_filled(seen + 256, 64, 1));
    memcpy(&flag, seen + 520, 8);
    CHECK(flag == 0x123456789abcdef0u && is_filled(seen + 320, 64, 1));

    copiers(g);

    gdrx_cost_t cost;
    OK(gdrx_estimate_cost(g, -1, &cost));
    CHECK(cost.put_bytes_per_second > 1e6 && cost.get_bytes_per_second > 1e6);
    CHECK(cost.put_overhead_ns >= 0 && cost.get_overhead_ns > 0 && cost.get_overhead_ns < 1e9);

    RETURNS(EINVAL, gdr_unmap(g, (gdr_mh_t){ 5 }, at, 1024));
    OK(gdr_unmap(g, mh, at, 1024));
    OK(gdr_close(g));
    return 0;
}
