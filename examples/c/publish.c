/* Hands records to a GPU: data first, then a flag, so that whoever sees the flag sees the data.
 *
 * A kernel would wait for `flag` with a volatile load and then read `data`; here gdrx_download looks instead. Many small
 * records are posted without a fence each, and one fence ends the batch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

struct slot {
    char data[56];
    uint64_t flag; /* in the same 64-byte line: a full line usually leaves as one packet */
};

static void must(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "%s failed: %s\n", what, gdrx_last_error());
        exit(1);
    }
}

int main(void)
{
    enum { SLOTS = 8 };
    struct slot seen[SLOTS];
    uint64_t addr = 0;
    gdr_mh_t mh;
    void *map = NULL;

    gdr_t g = gdr_open();
    must(g == NULL, "gdr_open");
    must(gdrx_alloc(g, -1, sizeof seen, &addr), "gdrx_alloc");
    must(gdr_pin_buffer(g, addr, sizeof seen, 0, 0, &mh), "gdr_pin_buffer");
    must(gdrx_map(g, mh, &map, NULL), "gdrx_map");
    struct slot *slots = (struct slot *)map;

    /* One record with its flag, which is 0 until then. */
    char zeroes[sizeof seen] = { 0 };
    must(gdr_copy_to_mapping(mh, map, zeroes, sizeof zeroes), "gdr_copy_to_mapping");
    must(gdrx_publish64(mh, slots[0].data, "first", 6, &slots[0].flag, 1), "gdrx_publish64");

    /* A batch: all data, one fence, then the flags. */
    for (int i = 1; i < SLOTS; i++) {
        char text[16];
        int size = snprintf(text, sizeof text, "record %d", i) + 1;
        must(gdrx_write_posted(mh, slots[i].data, text, (size_t)size), "gdrx_write_posted");
    }
    gdrx_fence();
    for (uint64_t i = 1; i < SLOTS; i++) {
        uint64_t flag = i + 1;
        must(gdrx_write_posted(mh, &slots[i].flag, &flag, sizeof flag), "gdrx_write_posted");
    }
    gdrx_fence();
    must(gdrx_flush(mh), "gdrx_flush"); /* all of it has arrived */

    must(gdrx_download(g, addr, seen, sizeof seen), "gdrx_download");
    for (int i = 0; i < SLOTS; i++)
        printf("%2llu %s\n", (unsigned long long)seen[i].flag, seen[i].data);
    must(gdr_close(g), "gdr_close");
    return seen[SLOTS - 1].flag != SLOTS;
}
