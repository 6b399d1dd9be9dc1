// For what has no other module to put it in.

#include "device.cuh"
#include "near.cuh"
