/* NVSHMEM 3.8: version 2 symbols, attributes. */
#include "nvshmem.h"

int main(void)
{
    return nvshmem_run(1);
}
