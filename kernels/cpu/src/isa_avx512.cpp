// The kernels, compiled for avx512 (kernels/cpu/build.py has the flags).
#define ENGINE_ISA engine_avx512
#define ENGINE_TABLE AVX512_KERNELS
#define ENGINE_NAME "avx512"
#include "all_kernels.h"
