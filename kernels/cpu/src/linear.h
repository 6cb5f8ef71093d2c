// Products of packed matrices with activation rows.
//
// The lanes of a vector are rows of the matrix, a tile's columns go by in order: what a token's result is depends on
// its own activation row alone, bit for bit, however many tokens are worked on together.
#pragma once
#include "activation.h"
#include "block_dot.h"

namespace ENGINE_ISA {

// Vectors of rows in a tile.
constexpr int SIDES = TILE_ROWS / W;
constexpr int MAX_TOKENS = W == 16 ? 8 : 4;

enum class Scale { SYMMETRIC, AFFINE, SUPER, SUPER_16 };

// Bits of a code, how its zero is taken off (code - 2^ZERO_SHIFT; -1: not), and its scales.
template <int B, int SHIFT, Scale S>
struct FormatOf {
    static constexpr int BITS = B, ZERO_SHIFT = SHIFT;
    static constexpr Scale SCALE = S;
};
template <int P> struct Format;
template <> struct Format<PACK_Q4_0> : FormatOf<4, 3, Scale::SYMMETRIC> {};
template <> struct Format<PACK_Q4_1> : FormatOf<4, -1, Scale::AFFINE> {};
template <> struct Format<PACK_Q5_0> : FormatOf<5, 4, Scale::SYMMETRIC> {};
template <> struct Format<PACK_Q5_1> : FormatOf<5, -1, Scale::AFFINE> {};
template <> struct Format<PACK_Q8_0> : FormatOf<8, ZERO_SHIFT_8_BITS, Scale::SYMMETRIC> {};
template <> struct Format<PACK_Q4_K> : FormatOf<4, -1, Scale::SUPER> {};
template <> struct Format<PACK_Q5_K> : FormatOf<5, -1, Scale::SUPER> {};
template <> struct Format<PACK_Q6_K> : FormatOf<6, 5, Scale::SUPER_16> {};

// Scales of W rows of a block: of its halves (where they share one, twice the same), and of what is added per sum of x.
struct BlockScales {
    vf halves[2];
    vf offset;
};

template <int P>
ENGINE_INLINE BlockScales block_scales(const uint8_t* scales, int64_t block, int side) {
    using F = Format<P>;
    constexpr PackingInfo INFO = PACKINGS[P];
    const int row = side * W;
    BlockScales out;
    out.offset = zero();
    if constexpr (F::SCALE == Scale::SYMMETRIC || F::SCALE == Scale::AFFINE) {
        const uint16_t* at = (const uint16_t*)(scales + block * INFO.scale_bytes) + row;
        out.halves[0] = out.halves[1] = load_f16(at);
        if constexpr (F::SCALE == Scale::AFFINE) out.offset = load_f16(at + TILE_ROWS);
    } else {
        const uint8_t* super = scales + block / 8 * (INFO.super_bytes + 8 * INFO.scale_bytes);
        const uint8_t* at = super + INFO.super_bytes + block % 8 * INFO.scale_bytes + row;
        const vf d = load_f16((const uint16_t*)super + row);
        if constexpr (F::SCALE == Scale::SUPER) {
            out.halves[0] = out.halves[1] = mul(d, load_u8(at));
            const vf dmin = load_f16((const uint16_t*)super + TILE_ROWS + row);
            out.offset = mul(sub(zero(), dmin), load_u8(at + TILE_ROWS));
        } else {
            out.halves[0] = mul(d, load_i8((const int8_t*)at));
            out.halves[1] = mul(d, load_i8((const int8_t*)at + TILE_ROWS));
        }
    }
    return out;
}

template <int P>
ENGINE_INLINE vi zero_point(int32_t negative_codes) {
    if constexpr (Format<P>::ZERO_SHIFT < 0) return iset1(0);
    else return shift_left<Format<P>::ZERO_SHIFT>(iset1(negative_codes));
}

// sums + W rows of a tile with the fine groups of a row.
template <int P>
ENGINE_INLINE vf add_fine(const uint8_t* tile, const uint8_t* scales, int side, const ActivationRow& row, vf sums) {
    using F = Format<P>;
    constexpr PackingInfo INFO = PACKINGS[P];
    for (int64_t i = 0; i < *row.num_fine; i++) {
        const FineGroup& fine = row.fine[i];
        const int64_t block = fine.group / 2;
        const uint8_t* codes = tile + block * INFO.code_bytes;
        const BlockScales scale = block_scales<P>(scales, block, side);
        vi acc = zero_point<P>(fine.negative_codes);
        acc = fine.group % 2 ? half_dot<F::BITS, 1>(codes, side, fine.codes, acc)
                             : half_dot<F::BITS, 0>(codes, side, fine.codes, acc);
        sums = fma(mul(to_float(acc), scale.halves[fine.group % 2]), set1(fine.scale), sums);
        if constexpr (F::SCALE == Scale::AFFINE || F::SCALE == Scale::SUPER)
            sums = fma(scale.offset, set1(fine.sum), sums);
    }
    return sums;
}

// A tile with MT activation rows; out [MT][16].
template <int P, int MT>
__attribute__((noinline)) void tile_dot(
    const uint8_t* tile, int64_t blocks, const ActivationRow* rows, float (*out)[TILE_ROWS]) {
    using F = Format<P>;
    constexpr PackingInfo INFO = PACKINGS[P];
    const uint8_t* scales = tile + blocks * INFO.code_bytes;
    for (int side = 0; side < SIDES; side++) {
        const uint8_t* codes = tile;
        vf sums[MT];
        for (int t = 0; t < MT; t++) sums[t] = zero();
        for (int64_t block = 0; block < blocks; block++) {
            if constexpr (SIDES == 1) {
                // The codes go by at once and in order: ask for them ahead of the processor's own guess.
                for (int line = 0; line < INFO.code_bytes; line += 64) __builtin_prefetch(codes + 2048 + line);
            }
            const int8_t* x[MT];
            vi acc[MT][2];
            for (int t = 0; t < MT; t++) {
                x[t] = rows[t].codes + block * BLOCK;
                for (int half = 0; half < 2; half++)
                    acc[t][half] = zero_point<P>(rows[t].negative_codes[2 * block + half]);
            }
            block_dot<F::BITS, MT>(codes, side, x, acc);
            codes += INFO.code_bytes;
            const BlockScales scale = block_scales<P>(scales, block, side);
            for (int t = 0; t < MT; t++) {
                const float* x_scales = rows[t].scales + 2 * block;
                const vf first = to_float(acc[t][0]), second = to_float(acc[t][1]);
                if constexpr (F::SCALE == Scale::SUPER_16) {
                    sums[t] = fma(mul(first, scale.halves[0]), set1(x_scales[0]), sums[t]);
                    sums[t] = fma(mul(second, scale.halves[1]), set1(x_scales[1]), sums[t]);
                } else {
                    const vf dot = fma(second, set1(x_scales[1]), mul(first, set1(x_scales[0])));
                    sums[t] = fma(dot, scale.halves[0], sums[t]);
                }
                if constexpr (F::SCALE == Scale::AFFINE || F::SCALE == Scale::SUPER)
                    sums[t] = fma(scale.offset, set1(rows[t].sums[block]), sums[t]);
            }
        }
        for (int t = 0; t < MT; t++) store(out[t] + side * W, add_fine<P>(tile, scales, side, rows[t], sums[t]));
    }
}

typedef void (*TileDot)(const uint8_t* tile, int64_t blocks, const ActivationRow* rows, float (*out)[TILE_ROWS]);

#define ENGINE_TILE_DOTS(P) {tile_dot<P, 1>, tile_dot<P, 2>, tile_dot<P, 4>, tile_dot<P, MAX_TOKENS>}
// By packing, then by log2 of the tokens.
constexpr TileDot TILE_DOTS[NUM_PACKINGS][4] = {
    ENGINE_TILE_DOTS(PACK_Q4_0), ENGINE_TILE_DOTS(PACK_Q4_1), ENGINE_TILE_DOTS(PACK_Q5_0), ENGINE_TILE_DOTS(PACK_Q5_1),
    ENGINE_TILE_DOTS(PACK_Q8_0), ENGINE_TILE_DOTS(PACK_Q4_K), ENGINE_TILE_DOTS(PACK_Q5_K), ENGINE_TILE_DOTS(PACK_Q6_K),
};
#undef ENGINE_TILE_DOTS

// The largest number of tokens, at most `left`, that a tile_dot takes; its index in TILE_DOTS.
ENGINE_INLINE int tokens_at_once(int64_t left, int* size) {
    int log = 0;
    while (log < 3 && (2 << log) <= MAX_TOKENS && (2 << log) <= left) log++;
    *size = 1 << log;
    return log;
}

ENGINE_INLINE void activation_rows(const uint8_t* x, int64_t stride, int64_t blocks, int64_t t, int count,
                                   ActivationRow* rows) {
    for (int i = 0; i < count; i++) rows[i] = activation_row(x + (t + i) * stride, blocks);
}

// Tiles that a worker takes at a time: enough to be worth the asking, few enough to end together.
ENGINE_INLINE int64_t share_of(int64_t total, int workers) {
    const int64_t share = total / (8 * workers);
    return share < 1 ? 1 : share > 8 ? 8 : share;
}

inline void linear(const LinearArgs& args, const Extent& extent, Worker& worker) {
    int64_t total = 0;
    for (int64_t m = 0; m < args.num_matrices; m++) total += num_tiles(args.matrices[m].rows);
    const int64_t cols = args.matrices[0].cols, blocks = num_blocks(cols), stride = activation_bytes(cols);
    const int64_t share = share_of(total, worker.count);
    for (int64_t begin; (begin = worker.next(total, share)) >= 0;) {
        const int64_t end = begin + share < total ? begin + share : total;
        int64_t first_tile = 0, first_row = 0;
        const Matrix* matrix = args.matrices;
        for (int64_t tile = begin; tile < end; tile++) {
            while (tile - first_tile >= num_tiles(matrix->rows)) {
                first_tile += num_tiles(matrix->rows);
                first_row += matrix->rows;
                matrix++;
            }
            const int64_t row = (tile - first_tile) * TILE_ROWS;
            const int64_t left_rows = matrix->rows - row;
            const int num_rows = (int)(left_rows < TILE_ROWS ? left_rows : TILE_ROWS);
            const uint8_t* data = matrix->data + (tile - first_tile) * tile_bytes((int)matrix->packing, cols);
            float* out = args.out + first_row + row;
            const float* bias = args.bias == nullptr ? nullptr : args.bias + first_row + row;
            for (int64_t t = 0; t < extent.num_tokens;) {
                int count;
                const int log = tokens_at_once(extent.num_tokens - t, &count);
                ActivationRow rows[MAX_TOKENS];
                alignas(64) float result[MAX_TOKENS][TILE_ROWS];
                activation_rows(args.x, stride, blocks, t, count, rows);
                TILE_DOTS[matrix->packing][log](data, blocks, rows, result);
                for (int i = 0; i < count; i++, t++) {
                    float* to = out + t * args.out_stride;
                    if (bias != nullptr)
                        for (int r = 0; r < num_rows; r++) to[r] = result[i][r] + bias[r];
                    else
                        memcpy(to, result[i], (size_t)num_rows * sizeof(float));
                }
            }
        }
    }
}

ENGINE_INLINE vf silu(vf x) { return div(x, add(set1(1.0f), vexp(sub(zero(), x)))); }

inline void gated_linear(const GatedLinearArgs& args, const Extent& extent, Worker& worker) {
    const int64_t inner = args.matrices[0].rows, cols = args.matrices[0].cols, blocks = num_blocks(cols);
    const int64_t in_stride = activation_bytes(cols), out_stride = activation_bytes(inner);
    const int64_t tiles = num_tiles(inner), wide_stride = tiles * TILE_ROWS;
    float* wide = (float*)worker.shared((size_t)(extent.num_tokens * wide_stride) * sizeof(float));
    const int64_t share = share_of(tiles, worker.count);
    for (int64_t begin; (begin = worker.next(tiles, share)) >= 0;) {
        const int64_t end = begin + share < tiles ? begin + share : tiles;
        for (int64_t tile = begin; tile < end; tile++) {
            const int64_t row = tile * TILE_ROWS;
            for (int64_t t = 0; t < extent.num_tokens;) {
                int count;
                const int log = tokens_at_once(extent.num_tokens - t, &count);
                ActivationRow rows[MAX_TOKENS];
                activation_rows(args.x, in_stride, blocks, t, count, rows);
                alignas(64) float result[2][MAX_TOKENS][TILE_ROWS];
                for (int part = 0; part < 2; part++) {
                    const Matrix& matrix = args.matrices[part];
                    const uint8_t* data = matrix.data + tile * tile_bytes((int)matrix.packing, cols);
                    TILE_DOTS[matrix.packing][log](data, blocks, rows, result[part]);
                    if (args.bias == nullptr) continue;
                    for (int r = 0; r < TILE_ROWS && row + r < inner; r++)
                        for (int k = 0; k < count; k++) result[part][k][r] += args.bias[part * inner + row + r];
                }
                for (int k = 0; k < count; k++, t++)
                    for (int at = 0; at < TILE_ROWS; at += W)
                        store(wide + t * wide_stride + row + at,
                              mul(silu(load(result[0][k] + at)), load(result[1][k] + at)));
            }
        }
    }
    worker.barrier();
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;)
        quantise_row(wide + t * wide_stride, inner, args.out + t * out_stride);
}

}  // namespace ENGINE_ISA
