/* The library built with backend vulkan, where the Vulkan loader cannot be loaded: what is missing and the way out, whether
 * the program or GDRCOPY_BACKEND asks for it. */
#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

static void refused(gdr_t g)
{
    CHECK(g == NULL);
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_NO_DRIVER);
    CHECK(strstr(gdrx_last_error(), "libvulkan.so.1 cannot be loaded: "));
    CHECK(strstr(gdrx_last_error(), "; install the Vulkan loader (Debian: libvulkan1)"));
}

int main(void)
{
    refused(gdrx_open("vulkan"));
    CHECK(setenv("GDRCOPY_BACKEND", "vulkan", 1) == 0);
    refused(gdr_open());
    gdr_t g = gdrx_open("emulated");
    CHECK(g);
    OK(gdr_close(g));
    return 0;
}
