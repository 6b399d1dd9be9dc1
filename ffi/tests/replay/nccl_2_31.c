/* NCCL 2.31: also gdr_get_info_v2, and the dma-buf attribute from 2.6 on. */
#include "nccl.h"

int main(void)
{
    return nccl_run(1, 1);
}
