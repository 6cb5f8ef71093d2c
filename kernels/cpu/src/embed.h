// Rows of a packed matrix, de-quantised.
#pragma once
#include "linear.h"

namespace ENGINE_ISA {

// Code of row r, column c (within the block).
ENGINE_INLINE int code_at(int bits, const uint8_t* codes, int r, int c) {
    const int g = c / 4, at = r * 4 + c % 4;
    if (bits == 8) return ((const int8_t*)codes)[g * 64 + at];
    int code = (codes[g % 4 * 64 + at] >> (g / 4 * 4)) & 0x0F;
    if (bits == 5) code |= ((codes[256 + g * 8 + at / 8] >> (at % 8)) & 1) << 4;
    if (bits == 6) code |= ((codes[256 + g / 4 * 64 + at] >> (2 * (g % 4))) & 3) << 4;
    return code;
}

template <int P>
void unpack_row(const uint8_t* tile, int64_t cols, int r, float* out) {
    using F = Format<P>;
    constexpr PackingInfo INFO = PACKINGS[P];
    const int64_t blocks = num_blocks(cols);
    const uint8_t* scales = tile + blocks * INFO.code_bytes;
    float d = 0.0f, m = 0.0f;
    for (int64_t block = 0; block < blocks; block++) {
        const uint8_t* codes = tile + block * INFO.code_bytes;
        if (F::SCALE == Scale::SYMMETRIC || F::SCALE == Scale::AFFINE || block % 8 == 0) {
            d = f16_to_f32_bits(((const uint16_t*)scales)[r]);
            if (F::SCALE == Scale::AFFINE || F::SCALE == Scale::SUPER)
                m = f16_to_f32_bits(((const uint16_t*)scales)[TILE_ROWS + r]);
            if (F::SCALE == Scale::SUPER || F::SCALE == Scale::SUPER_16) scales += INFO.super_bytes;
        }
        const int64_t left = cols - block * BLOCK;
        for (int c = 0; c < BLOCK && c < left; c++) {
            const float q = (float)code_at(F::BITS, codes, r, c);
            float& to = out[block * BLOCK + c];
            if (F::SCALE == Scale::SYMMETRIC) to = d * (q - (F::BITS == 8 ? 0.0f : F::BITS == 5 ? 16.0f : 8.0f));
            if (F::SCALE == Scale::AFFINE) to = d * q + m;
            if (F::SCALE == Scale::SUPER) to = d * (float)scales[r] * q - m * (float)scales[TILE_ROWS + r];
            if (F::SCALE == Scale::SUPER_16)
                to = d * (float)((const int8_t*)scales)[c / 16 * TILE_ROWS + r] * (q - 32.0f);
        }
        scales += INFO.scale_bytes;
    }
}

typedef void (*UnpackRow)(const uint8_t* tile, int64_t cols, int r, float* out);
constexpr UnpackRow UNPACK_ROWS[NUM_PACKINGS] = {
    unpack_row<PACK_Q4_0>, unpack_row<PACK_Q4_1>, unpack_row<PACK_Q5_0>, unpack_row<PACK_Q5_1>,
    unpack_row<PACK_Q8_0>, unpack_row<PACK_Q4_K>, unpack_row<PACK_Q5_K>, unpack_row<PACK_Q6_K>,
};

inline void embed(const EmbedArgs& args, const Extent& extent, Worker& worker) {
    const Matrix& table = *args.table;
    const int64_t bytes = tile_bytes((int)table.packing, table.cols);
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;) {
        const int64_t id = args.ids[t];
        UNPACK_ROWS[table.packing](
            table.data + id / TILE_ROWS * bytes, table.cols, (int)(id % TILE_ROWS), args.out + t * args.out_stride);
    }
}

}  // namespace ENGINE_ISA
