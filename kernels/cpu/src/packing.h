// Layout of packed weight matrices and of activation rows.
//
// A matrix is cut into tiles of 16 rows (the last one filled up with zeros), stored one after the other. A tile has its
// codes, block after block of 32 columns, then its scales, and is rounded up to 64 bytes. Within a block the column
// groups g = 0..7 hold columns 4g..4g+3, and byte [r][b] of a 64-byte vector (r * 4 + b) is row r, column 4g + b:
//
//   4 bits    4 vectors; vector j holds group j in the low and group j + 4 in the high nibbles
//   5 bits    the same, then 64 bytes: 8 words of 64 bits, word g has bit r * 4 + b = fifth bit of group g
//   6 bits    the same 4 vectors, then 2 vectors; vector h holds bits 4-5 of group 4h + i at bit 2i, i = 0..3
//   8 bits    8 vectors, signed; vector g is group g
//
// Scales of a tile, w = code * scale + offset (d, m, dmin: float16, 16 rows side by side):
//
//   Q4_0, Q5_0, Q8_0    per block: d;      w = d * (q - 8 | 16 | 0)
//   Q4_1, Q5_1          per block: d, m;   w = d * q + m
//   Q4_K, Q5_K          per 256 columns: d, dmin, then per block: sc uint8, mn uint8; w = d * sc * q - dmin * mn
//   Q6_K                per 256 columns: d, then per 16 columns: sc int8;  w = d * sc * (q - 32)
//
// An activation row of K columns (padded to 32: P) is P int8 codes; per 16 columns (a group) a float32 scale; per 32
// columns the sum of scale * code; per group the negative int32 sum of the codes. x = code * scale, scale = max|x| / 127 of
// the group. The sums, in the form that a kernel adds them, are for packings whose zero is not code 0.
//
// A group that is far larger than the row's root mean square would be rounded coarsely, and the result with it. What the
// rounding left of such groups follows, as a count (int64) and as many FineGroups in order of columns; there is room for
// all groups. Rows are rounded up to 64 bytes.
#pragma once
#include <stdint.h>

#include "abi.h"

constexpr int TILE_ROWS = 16;
constexpr int BLOCK = 32;

struct PackingInfo {
    int code_bytes;    // per block of a tile
    int scale_bytes;   // per block of a tile
    int super_bytes;   // per 256 columns of a tile; 0: no super blocks
    int file_columns;  // columns of a block in a GGUF file
    int file_bytes;    // bytes of such a block
};

constexpr PackingInfo PACKINGS[NUM_PACKINGS] = {
    {256, 32, 0, 32, 18},    // Q4_0
    {256, 64, 0, 32, 20},    // Q4_1
    {320, 32, 0, 32, 22},    // Q5_0
    {320, 64, 0, 32, 24},    // Q5_1
    {512, 32, 0, 32, 34},    // Q8_0
    {256, 32, 64, 256, 144},  // Q4_K
    {320, 32, 64, 256, 176},  // Q5_K
    {384, 32, 32, 256, 210},  // Q6_K
};

static constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static constexpr int64_t num_blocks(int64_t cols) { return (cols + BLOCK - 1) / BLOCK; }
static constexpr int64_t num_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

static constexpr int64_t tile_bytes(int packing, int64_t cols) {
    const PackingInfo& info = PACKINGS[packing];
    return round_up(num_blocks(cols) * (info.code_bytes + info.scale_bytes) + cols / 256 * info.super_bytes, 64);
}

constexpr int GROUP = 16;

// 16 columns once more: code * scale is to be added.
struct FineGroup {
    int32_t group;
    int32_t negative_codes;
    float scale;
    float sum;
    int8_t codes[GROUP];
};

static constexpr int64_t activation_bytes(int64_t cols) {
    return round_up(num_blocks(cols) * (BLOCK + 20 + 2 * (int64_t)sizeof(FineGroup)) + 16, 64);
}

struct ActivationRow {
    int8_t* codes;
    float* scales;
    float* sums;
    int32_t* negative_codes;
    int64_t* num_fine;
    FineGroup* fine;
};

static inline __attribute__((always_inline)) ActivationRow activation_row(const uint8_t* row, int64_t blocks) {
    uint8_t* at = (uint8_t*)row;
    uint8_t* fine = at + round_up(blocks * (BLOCK + 20), 8);
    return {(int8_t*)at,
            (float*)(at + blocks * BLOCK),
            (float*)(at + blocks * (BLOCK + 8)),
            (int32_t*)(at + blocks * (BLOCK + 12)),
            (int64_t*)fine,
            (FineGroup*)(fine + 8)};
}
