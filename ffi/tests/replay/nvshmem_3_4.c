/* NVSHMEM 3.4. */
#include "nvshmem.h"

int main(void)
{
    return nvshmem_run(0);
}
