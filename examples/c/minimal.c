/* Writes into GPU memory from the CPU and reads it back.
 *
 *     gcc minimal.c $(pkg-config --cflags --libs gdrapi) -o minimal && ./minimal
 *
 * The memory comes from gdrx_alloc, which every backend can map. Memory of cudaMalloc works the same way: pin its
 * address; without the gdrdrv kernel module that takes GDRCOPY_RM=ipc. Without a GPU try GDRCOPY_BACKEND=emulated. */
#include <stdio.h>
#include <string.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

static int failed(const char *what)
{
    fprintf(stderr, "%s failed: %s\n", what, gdrx_last_error());
    return 1;
}

int main(void)
{
    const char message[] = "from the CPU";
    char back[sizeof message];
    uint64_t addr = 0;
    gdr_mh_t mh;
    void *map = NULL;

    gdr_t g = gdr_open();
    if (!g)
        return failed("gdr_open");
    if (gdrx_alloc(g, -1, GPU_PAGE_SIZE, &addr) != 0)
        return failed("gdrx_alloc");
    if (gdr_pin_buffer(g, addr, GPU_PAGE_SIZE, 0, 0, &mh) != 0)
        return failed("gdr_pin_buffer");
    if (gdr_map(g, mh, &map, GPU_PAGE_SIZE) != 0)
        return failed("gdr_map");

    if (gdr_copy_to_mapping(mh, map, message, sizeof message) != 0)
        return failed("gdr_copy_to_mapping");
    if (gdr_copy_from_mapping(mh, back, map, sizeof back) != 0)
        return failed("gdr_copy_from_mapping");
    printf("backend %s, mapped at %p, read back: %s\n", gdrx_backend(g), map, back);

    /* What is left open goes with gdr_close, in the right order. */
    if (gdr_close(g) != 0)
        return failed("gdr_close");
    return strcmp(message, back) != 0;
}
