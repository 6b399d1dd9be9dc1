/* NCCL 2.28: version 1 symbols, all mandatory. */
#include "nccl.h"

int main(void)
{
    return nccl_run(0, 0);
}
