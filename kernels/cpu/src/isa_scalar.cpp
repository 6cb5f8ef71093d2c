// The kernels, compiled for scalar (kernels/cpu/build.py has the flags).
#define ENGINE_ISA engine_scalar
#define ENGINE_TABLE SCALAR_KERNELS
#define ENGINE_NAME "scalar"
#include "all_kernels.h"
