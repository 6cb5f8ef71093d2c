// Packing of weight matrices into tiles, once at load.
#pragma once
#include <stdint.h>

void pack_matrix(int packing, int64_t rows, int64_t cols, const uint8_t* src, int64_t src_stride, uint8_t* out);
void pack_int8(int64_t rows, int64_t cols, const float* src, int64_t src_stride, uint8_t* out);
