// The table of kernels of one instruction set, and what main.cpp needs of the pool.
#pragma once
#include "abi.h"
#include "pool.h"

typedef void (*Kernel)(const void* args, const Extent& extent, Worker& worker);

struct KernelTable {
    const char* name;
    Kernel ops[NUM_OPS];
};

extern const KernelTable SCALAR_KERNELS;
#if defined(__x86_64__)
extern const KernelTable AVX2_KERNELS;
extern const KernelTable AVX512_KERNELS;
#endif

int pool_set_threads(int count);
int pool_threads();
void pool_run(const KernelTable* table, const Op* ops, int64_t num_ops, Extent extent);
