// Packing of weight matrices into tiles. The layouts of the files' blocks are those of the public GGUF format.
#include "pack.h"

#include <math.h>
#include <string.h>

#include "abi.h"
#include "packing.h"

namespace {

// One block of 32 columns of a row, unpacked: codes as stored, scales still apart.
struct Block {
    uint8_t codes[BLOCK];
    uint16_t d, m;         // float16; d and m, or d and dmin of the 256 columns around
    uint8_t scale[2];      // of the block, or of its two halves (int8)
    uint8_t minimum;
};

void nibbles(const uint8_t* bytes, uint8_t* codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = bytes[i] & 0x0F;
        codes[i + 16] = bytes[i] >> 4;
    }
}

void fifth_bits(const uint8_t* words, uint8_t* codes) {
    uint32_t bits;
    memcpy(&bits, words, 4);
    for (int i = 0; i < BLOCK; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// The 6-bit scale and minimum of block `i` of 8 in the 12 bytes of Q4_K and Q5_K.
void six_bit_scales(const uint8_t* packed, int i, Block* block) {
    if (i < 4) {
        block->scale[0] = packed[i] & 63;
        block->minimum = packed[i + 4] & 63;
    } else {
        block->scale[0] = (uint8_t)((packed[i + 4] & 0x0F) | (packed[i - 4] >> 6 << 4));
        block->minimum = (uint8_t)((packed[i + 4] >> 4) | (packed[i] >> 6 << 4));
    }
}

// Block `index` of a row, from the row's bytes in the file.
void unpack(int packing, const uint8_t* row, int64_t index, Block* out) {
    const PackingInfo& info = PACKINGS[packing];
    const uint8_t* from = row + index * BLOCK / info.file_columns * info.file_bytes;
    const int i = (int)(index % 8);
    memset(out, 0, sizeof *out);
    switch (packing) {
        case PACK_Q4_0:
            memcpy(&out->d, from, 2);
            nibbles(from + 2, out->codes);
            break;
        case PACK_Q4_1:
            memcpy(&out->d, from, 2);
            memcpy(&out->m, from + 2, 2);
            nibbles(from + 4, out->codes);
            break;
        case PACK_Q5_0:
            memcpy(&out->d, from, 2);
            nibbles(from + 6, out->codes);
            fifth_bits(from + 2, out->codes);
            break;
        case PACK_Q5_1:
            memcpy(&out->d, from, 2);
            memcpy(&out->m, from + 2, 2);
            nibbles(from + 8, out->codes);
            fifth_bits(from + 4, out->codes);
            break;
        case PACK_Q8_0:
            memcpy(&out->d, from, 2);
            memcpy(out->codes, from + 2, BLOCK);
            break;
        case PACK_Q4_K:
        case PACK_Q5_K: {
            memcpy(&out->d, from, 2);
            memcpy(&out->m, from + 2, 2);
            six_bit_scales(from + 4, i, out);
            const uint8_t* high = from + 16;
            const uint8_t* low = packing == PACK_Q5_K ? from + 48 : from + 16;
            for (int c = 0; c < BLOCK; c++) {
                out->codes[c] = (low[i / 2 * 32 + c] >> (i % 2 * 4)) & 0x0F;
                if (packing == PACK_Q5_K) out->codes[c] |= (uint8_t)((high[c] >> i & 1) << 4);
            }
            break;
        }
        case PACK_Q6_K: {
            // Halves of 128 columns; in each, four blocks share 64 low and 32 high bytes.
            const int half = i / 4, quarter = i % 4;
            const uint8_t* low = from + half * 64 + quarter % 2 * 32;
            const uint8_t* high = from + 128 + half * 32;
            for (int c = 0; c < BLOCK; c++) {
                out->codes[c] = (low[c] >> (quarter / 2 * 4)) & 0x0F;
                out->codes[c] |= (uint8_t)((high[c] >> (2 * quarter) & 3) << 4);
            }
            memcpy(out->scale, from + 192 + i * 2, 2);
            memcpy(&out->d, from + 208, 2);
            break;
        }
    }
}

void put_codes(int packing, const uint8_t* codes, int r, uint8_t* to) {
    if (packing == PACK_Q8_0) {
        for (int g = 0; g < 8; g++) memcpy(to + g * 64 + r * 4, codes + g * 4, 4);
        return;
    }
    for (int c = 0; c < 16; c++)
        to[c / 4 * 64 + r * 4 + c % 4] = (uint8_t)((codes[c] & 0x0F) | (codes[c + 16] & 0x0F) << 4);
    if (packing == PACK_Q5_0 || packing == PACK_Q5_1 || packing == PACK_Q5_K) {
        for (int c = 0; c < BLOCK; c++) {
            const int at = r * 4 + c % 4;
            to[256 + c / 4 * 8 + at / 8] |= (uint8_t)((codes[c] >> 4 & 1) << at % 8);
        }
    }
    if (packing == PACK_Q6_K) {
        for (int c = 0; c < BLOCK; c++) {
            const int g = c / 4;
            to[256 + g / 4 * 64 + r * 4 + c % 4] |= (uint8_t)((codes[c] >> 4 & 3) << (2 * (g % 4)));
        }
    }
}

void put_half(uint8_t* to, int at, uint16_t value) { memcpy(to + 2 * at, &value, 2); }

// Scales of row r; `super`: the block begins 256 columns.
void put_scales(int packing, const Block& block, int r, bool super, uint8_t* to) {
    const PackingInfo& info = PACKINGS[packing];
    if (info.super_bytes == 0) {
        put_half(to, r, block.d);
        if (info.scale_bytes == 64) put_half(to, TILE_ROWS + r, block.m);
        return;
    }
    if (super) {
        put_half(to, r, block.d);
        if (info.super_bytes == 64) put_half(to, TILE_ROWS + r, block.m);
        to += info.super_bytes;
    }
    to[r] = block.scale[0];
    to[TILE_ROWS + r] = packing == PACK_Q6_K ? block.scale[1] : block.minimum;
}

uint16_t to_half(float x) {
    // A scale is positive and, but for tiny ones, a normal number: round to nearest even by hand.
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (bits >= 0x477FF000u) return 0x7BFF;
    if (bits < 0x38800000u) {
        const float shifted = x + 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &shifted, 4);
        return (uint16_t)(rounded - 0x3F000000u);
    }
    return (uint16_t)((bits - 0x38000000u + 0xFFF + (bits >> 13 & 1)) >> 13);
}

float from_half(uint16_t h) {
    if ((h >> 10) == 0) return (float)h * 5.9604644775390625e-8f;
    const uint32_t bits = ((uint32_t)(h >> 10) + 112) << 23 | (uint32_t)(h & 0x3FF) << 13;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void quantise_block(const float* x, int count, Block* out) {
    memset(out, 0, sizeof *out);
    float largest = 0.0f;
    for (int c = 0; c < count; c++) largest = fabsf(x[c]) > largest ? fabsf(x[c]) : largest;
    out->d = to_half(largest / 127.0f);
    // A tiny scale is coarse: rounded down it would clip the largest weights.
    if (from_half(out->d) * 127.5f < largest) out->d++;
    // Codes for the scale as it is stored: rounding it must not cost accuracy twice.
    const float d = from_half(out->d);
    for (int c = 0; c < count; c++) {
        float code = d > 0.0f ? nearbyintf(x[c] / d) : 0.0f;
        code = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        out->codes[c] = (uint8_t)(int8_t)code;
    }
}

template <typename Unpack>
void pack_tiles(int packing, int64_t rows, int64_t cols, uint8_t* out, Unpack block_of) {
    const PackingInfo& info = PACKINGS[packing];
    const int64_t blocks = num_blocks(cols), bytes = tile_bytes(packing, cols);
    memset(out, 0, (size_t)(num_tiles(rows) * bytes));
    for (int64_t row = 0; row < rows; row++) {
        uint8_t* tile = out + row / TILE_ROWS * bytes;
        uint8_t* scales = tile + blocks * info.code_bytes;
        const int r = (int)(row % TILE_ROWS);
        for (int64_t index = 0; index < blocks; index++) {
            const bool super = info.super_bytes != 0 && index % 8 == 0;
            Block block;
            block_of(row, index, &block);
            put_codes(packing, block.codes, r, tile + index * info.code_bytes);
            put_scales(packing, block, r, super, scales);
            scales += info.scale_bytes + (super ? info.super_bytes : 0);
        }
    }
}

}  // namespace

void pack_matrix(int packing, int64_t rows, int64_t cols, const uint8_t* src, int64_t src_stride, uint8_t* out) {
    pack_tiles(packing, rows, cols, out, [&](int64_t row, int64_t index, Block* block) {
        unpack(packing, src + row * src_stride, index, block);
    });
}

void pack_int8(int64_t rows, int64_t cols, const float* src, int64_t src_stride, uint8_t* out) {
    pack_tiles(PACK_Q8_0, rows, cols, out, [&](int64_t row, int64_t index, Block* block) {
        const int64_t left = cols - index * BLOCK;
        quantise_block(src + row * src_stride + index * BLOCK, (int)(left < BLOCK ? left : BLOCK), block);
    });
}
