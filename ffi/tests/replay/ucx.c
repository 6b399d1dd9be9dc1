/* UCX's gdr_copy: linked with -lgdrapi and built against gdrapi.h; a handle opened and closed per query, then one for
 * many pins; the header's version must agree with the library's; FORCE_PCIE by request, else flags 0; copies of any
 * length without a lock. */
#include <gdrapi.h>

#include "../check.h"
#include <gdrapi_ext.h>

enum { PINS = 100 };
static char host[100000], back[100000];

int main(void)
{
    int major = 0, minor = 0;
    gdr_runtime_get_version(&major, &minor);
    CHECK(major == GDR_API_MAJOR_VERSION && minor >= GDR_API_MINOR_VERSION);
    for (int query = 0; query < 2; query++) {
        gdr_t probe = gdr_open();
        CHECK(probe);
        OK(gdr_close(probe));
    }
    gdr_t g = gdr_open();
    CHECK(g);
    uint64_t dev = 0;
    OK(gdrx_alloc(g, -1, PINS * 2 * PAGE, &dev));
    gdr_mh_t mh[PINS];
    void *bar[PINS];
    for (int i = 0; i < PINS; i++) {
        uint64_t addr = dev + (uint64_t)i * 2 * PAGE;
        gdr_info_t info;
        RETURNS(EINVAL, gdr_pin_buffer_v2(g, addr, 2 * PAGE, GDR_PIN_FLAG_FORCE_PCIE, &mh[i]));
        OK(gdr_pin_buffer_v2(g, addr, 2 * PAGE, 0, &mh[i]));
        OK(gdr_map(g, mh[i], &bar[i], 2 * PAGE));
        OK(gdr_get_info(g, mh[i], &info));
        CHECK(info.va == addr);
        for (int j = 0; j < i; j++)
            CHECK(mh[j].h != mh[i].h);
    }
    for (size_t length = 1; length < sizeof host; length = length * 3 + 1) {
        int i = (int)(length % PINS);
        char *at = (char *)bar[i] + 4321;
        fill(host, length, (unsigned)length);
        OK(gdr_copy_to_mapping(mh[i], at, host, length));
        OK(gdr_copy_from_mapping(mh[i], back, at, length));
        CHECK(is_filled(back, length, (unsigned)length));
    }
    for (int i = 0; i < PINS; i++) {
        OK(gdr_unmap(g, mh[i], bar[i], 2 * PAGE));
        OK(gdr_unpin_buffer(g, mh[i]));
    }
    OK(gdr_close(g));
    return 0;
}
