/* NCCL 2.30: gdr_pin_buffer_v2 where the library is 2.5 or newer. */
#include "nccl.h"

int main(void)
{
    return nccl_run(1, 0);
}
