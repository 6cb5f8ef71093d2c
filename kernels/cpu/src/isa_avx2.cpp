// The kernels, compiled for avx2 (kernels/cpu/build.py has the flags).
#define ENGINE_ISA engine_avx2
#define ENGINE_TABLE AVX2_KERNELS
#define ENGINE_NAME "avx2"
#include "all_kernels.h"
