/* A child inherits no mapping, gets EACCES on its parent's handles, can open its own, and disturbs nothing by ending. */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gdrapi.h>
#include <gdrapi_ext.h>

#include "../check.h"

static gdr_t g;
static gdr_mh_t mh, unmapped;
static void *map;
static uint64_t dev;

static void child(void)
{
    gdr_mh_t other;
    gdr_info_t info;
    void *ptr = NULL;
    int value = 0;
    char byte = 0;
    unsigned char resident;
    CHECK(mincore(map, 4096, &resident) != 0 && errno == ENOMEM);
    RETURNS(EACCES, gdr_copy_to_mapping(mh, map, &byte, 1));
    CHECK(gdrx_last_error_kind() == GDRX_ERROR_WRONG_PROCESS);
    RETURNS(EACCES, gdr_copy_from_mapping(mh, &byte, map, 1));
    RETURNS(EACCES, gdr_pin_buffer(g, dev, PAGE, 0, 0, &other));
    CHECK(other.h == 0);
    RETURNS(EACCES, gdr_map(g, unmapped, &ptr, PAGE));
    RETURNS(EACCES, gdr_get_info(g, mh, &info));
    RETURNS(EACCES, gdr_get_attribute(g, GDR_ATTR_USE_PERSISTENT_MAPPING, &value));
    RETURNS(EACCES, gdr_unmap(g, mh, map, PAGE));
    RETURNS(EACCES, gdr_unpin_buffer(g, mh));
    RETURNS(EACCES, gdr_close(g));

    gdr_t own = gdr_open();
    uint64_t mine = 0;
    CHECK(own);
    if (strcmp(gdrx_backend(own), "emulated") != 0) {
        /* CUDA allocates nothing in a child of a process that used it. */
        OK(gdr_close(own));
        return;
    }
    OK(gdrx_alloc(own, -1, PAGE, &mine));
    OK(gdr_pin_buffer(own, mine, PAGE, 0, 0, &other));
    OK(gdr_map(own, other, &ptr, PAGE));
    OK(gdr_copy_to_mapping(other, ptr, "x", 1));
    OK(gdr_close(own));
}

int main(void)
{
    g = gdr_open();
    CHECK(g);
    OK(gdrx_alloc(g, -1, 2 * PAGE, &dev));
    OK(gdr_pin_buffer(g, dev, PAGE, 0, 0, &mh));
    OK(gdr_pin_buffer(g, dev + PAGE, PAGE, 0, 0, &unmapped));
    OK(gdr_map(g, mh, &map, PAGE));
    OK(gdr_copy_to_mapping(mh, map, "parent", 7));
    for (int by_exit = 0; by_exit < 2; by_exit++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            child();
            if (by_exit)
                exit(0);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    char seen[7] = "";
    OK(gdr_copy_from_mapping(mh, seen, map, 7));
    CHECK(strcmp(seen, "parent") == 0);
    OK(gdr_map(g, unmapped, &map, PAGE));
    OK(gdr_close(g));
    return 0;
}
