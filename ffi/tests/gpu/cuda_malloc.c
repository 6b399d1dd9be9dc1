/* On a GPU: pins, maps, writes, reads and verifies cudaMalloc memory (cuMemAlloc through libcuda, loaded by name) of many
 * sizes and alignments, checked through CUDA's own copies; and that what is refused is refused with a reason.
 *
 *     gcc cuda_malloc.c -I<include> -L<lib> -lgdrapi -ldl -o cuda_malloc
 *     GDRCOPY_RM=ipc ./cuda_malloc */
#include <time.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

/* What is used of the CUDA driver API, as cuda.h declares it. */
typedef unsigned long long CUdeviceptr;
static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDeviceGetName)(char *, int, int);
static int (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *);
static int (*cuMemAlloc)(CUdeviceptr *, size_t);
static int (*cuMemFree)(CUdeviceptr);
static int (*cuMemcpyDtoH)(void *, CUdeviceptr, size_t);
static int (*cuMemcpyHtoD)(CUdeviceptr, const void *, size_t);
static int (*cuCtxSynchronize)(void);

#define LOAD(variable, name) *(void **)&variable = mandatory(cuda, name)

static void *why(gdr_t g, const char *what)
{
    if (!g) {
        fprintf(stderr, "%s: %s\n", what, gdrx_last_error());
        exit(1);
    }
    return g;
}

#define SAYS_OK(call)                                                            \
    do {                                                                         \
        int result_ = (call);                                                    \
        if (result_) {                                                           \
            fprintf(stderr, "%s:%d: %s: %d: %s\n", __FILE__, __LINE__, #call, result_, gdrx_last_error()); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static unsigned char host[8 << 20], back[8 << 20];

/* A whole block, as a client that rounds and aligns by hand pins it. */
static void block(gdr_t g, size_t bytes)
{
    CUdeviceptr dev = 0;
    OK(cuMemAlloc(&dev, bytes + PAGE - 1));
    CUdeviceptr start = (dev + PAGE - 1) & ~(CUdeviceptr)(PAGE - 1);
    size_t size = (bytes + PAGE - 1) & ~(PAGE - 1);
    gdr_mh_t mh;
    gdr_info_t info;
    void *map = NULL;
    SAYS_OK(gdr_pin_buffer(g, start, size, 0, 0, &mh));
    SAYS_OK(gdr_map(g, mh, &map, size));
    SAYS_OK(gdr_get_info(g, mh, &info));
    CHECK(info.va == start && info.mapped_size == size && info.mapped == 1);
    CHECK(info.mapping_type == GDR_MAPPING_TYPE_WC && info.wc_mapping == 1);

    fill(host, bytes, 1);
    SAYS_OK(gdr_copy_to_mapping(mh, map, host, bytes));
    OK(cuMemcpyDtoH(back, start, bytes));
    CHECK(is_filled(back, bytes, 1));
    fill(host, bytes, 2);
    OK(cuMemcpyHtoD(start, host, bytes));
    OK(cuCtxSynchronize());
    size_t read = bytes < 1 << 20 ? bytes : 1 << 20; /* reads are slow */
    memset(back, 0, read);
    SAYS_OK(gdr_copy_from_mapping(mh, back, map, read));
    CHECK(is_filled(back, read, 2));

    SAYS_OK(gdr_unmap(g, mh, map, size));
    SAYS_OK(gdr_unpin_buffer(g, mh));
    OK(cuMemFree(dev));
    printf("%8zu bytes: pinned, mapped, written, read, verified\n", bytes);
}

/* A small block in the middle of a page: gdr_map refuses it, gdrx_map gives the very byte. */
static void odd_address(gdr_t g)
{
    CUdeviceptr dev[40];
    for (int i = 0; i < 40; i++)
        OK(cuMemAlloc(&dev[i], 512));
    for (int i = 1; i < 40; i += 13) {
        CUdeviceptr at = dev[i] + 4;
        gdr_mh_t mh;
        void *map = NULL;
        SAYS_OK(gdr_pin_buffer(g, at, 300, 0, 0, &mh));
        if (at % PAGE)
            RETURNS(EINVAL, gdr_map(g, mh, &map, 300));
        SAYS_OK(gdrx_map(g, mh, &map, NULL));
        fill(host, 300, (unsigned)i);
        SAYS_OK(gdr_copy_to_mapping(mh, map, host, 300));
        OK(cuMemcpyDtoH(back, at, 300));
        CHECK(is_filled(back, 300, (unsigned)i));
        SAYS_OK(gdr_unpin_buffer(g, mh));
    }
    /* Rounded down to a page whose first byte is nobody's any more. */
    CUdeviceptr page = dev[39] & ~(CUdeviceptr)(PAGE - 1);
    int first = 0;
    while (first < 39 && dev[first] < page)
        first++;
    for (int i = first; i < 39; i++)
        OK(cuMemFree(dev[i]));
    gdr_mh_t mh;
    void *map = NULL;
    SAYS_OK(gdr_pin_buffer(g, page, PAGE, 0, 0, &mh));
    SAYS_OK(gdr_map(g, mh, &map, PAGE));
    SAYS_OK(gdr_copy_to_mapping(mh, (char *)map + (dev[39] - page), "last", 5));
    OK(cuMemcpyDtoH(back, dev[39], 5));
    CHECK(strcmp((char *)back, "last") == 0);
    SAYS_OK(gdr_unpin_buffer(g, mh));
    OK(cuMemFree(dev[39]));
    for (int i = 0; i < first; i++)
        OK(cuMemFree(dev[i]));
    printf("odd addresses and a page whose start is free: verified\n");
}

static void costs(gdr_t g)
{
    enum { ROUNDS = 2000 };
    CUdeviceptr dev = 0;
    OK(cuMemAlloc(&dev, 2 << 20));
    CUdeviceptr start = (dev + PAGE - 1) & ~(CUdeviceptr)(PAGE - 1);
    gdr_mh_t mh;
    void *map = NULL;
    gdrx_mapping_facts_t facts;
    gdrx_cost_t cost;
    SAYS_OK(gdr_pin_buffer(g, start, 1 << 20, 0, 0, &mh));
    SAYS_OK(gdr_map(g, mh, &map, 1 << 20));
    SAYS_OK(gdrx_get_mapping_facts(mh, &facts, sizeof facts));
    printf("routine %s, pinned in %.1f us, mapped in %.1f us\n", facts.routine, (double)facts.pin_ns / 1e3,
           (double)facts.map_ns / 1e3);
    double begun = now();
    for (int i = 0; i < ROUNDS; i++)
        OK(gdr_copy_to_mapping(mh, map, host, 8));
    double put = (now() - begun) / ROUNDS;
    begun = now();
    for (int i = 0; i < ROUNDS; i++)
        OK(gdr_copy_from_mapping(mh, back, map, 8));
    double get = (now() - begun) / ROUNDS;
    printf("8 bytes: gdr_copy_to_mapping %.0f ns, gdr_copy_from_mapping %.0f ns per call, mean of %d\n", put, get,
           (int)ROUNDS);
    SAYS_OK(gdrx_estimate_cost(g, -1, &cost));
    printf("estimate: put %.0f ns + n / %.2f GB/s, get %.0f ns + n / %.2f GB/s\n", cost.put_overhead_ns,
           cost.put_bytes_per_second / 1e9, cost.get_overhead_ns, cost.get_bytes_per_second / 1e9);
    SAYS_OK(gdr_unpin_buffer(g, mh));
    OK(cuMemFree(dev));
}

int main(void)
{
    void *cuda = library("libcuda.so.1", RTLD_NOW);
    LOAD(cuInit, "cuInit");
    LOAD(cuDeviceGet, "cuDeviceGet");
    LOAD(cuDeviceGetName, "cuDeviceGetName");
    LOAD(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    LOAD(cuCtxSetCurrent, "cuCtxSetCurrent");
    LOAD(cuMemAlloc, "cuMemAlloc_v2");
    LOAD(cuMemFree, "cuMemFree_v2");
    LOAD(cuMemcpyDtoH, "cuMemcpyDtoH_v2");
    LOAD(cuMemcpyHtoD, "cuMemcpyHtoD_v2");
    LOAD(cuCtxSynchronize, "cuCtxSynchronize");
    int device = 0, value = -1;
    void *context = NULL;
    char name[100] = "";
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDeviceGetName(name, sizeof name, device));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));

    gdr_t g = gdr_open();
    why(g, "gdr_open");
    OK(gdr_get_attribute(g, GDR_ATTR_USING_DMA_BUF_MMAP, &value));
    printf("%s, backend %s, dma-buf %d\n", name, gdrx_backend(g), value);
    size_t sizes[] = { 1, 64, 4000, PAGE, PAGE + 1, 1 << 20, (2 << 20) - PAGE, 2 << 20, (4 << 20) + 12345, 8 << 20 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        block(g, sizes[i]);
    odd_address(g);
    gdr_mh_t mh = { 1 };
    RETURNS(EINVAL, gdr_pin_buffer(g, (unsigned long)host, 64, 0, 0, &mh));
    printf("host memory: %s\n", gdrx_last_error());
    costs(g);
    OK(gdr_close(g));
    printf("passed\n");
    return 0;
}
