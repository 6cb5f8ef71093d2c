// Activation rows (packing.h): groups of 16 float32 as int8.
#pragma once
#include "abi.h"
#include "packing.h"
#include "pool.h"
#include "vec.h"

namespace ENGINE_ISA {

constexpr int GROUP_VECTORS = GROUP / W;

// A group is kept finely from this many times the row's root mean square on.
constexpr float FINE_FROM = 5.0f;

// 16 values as codes; returns the sum of the codes. Takes inverse = 0 for values that are not finite.
ENGINE_INLINE int32_t round_group(const vf* x, float inverse, int8_t* codes, vf* rounded) {
    vi sum = iset1(0);
    for (int i = 0; i < GROUP_VECTORS; i++) {
        rounded[i] = inverse == 0.0f ? zero() : vround(mul(x[i], set1(inverse)));
        store_i8(codes + i * W, rounded[i]);
        sum = iadd(sum, to_int(rounded[i]));
    }
    return ihsum(sum);
}

// One group of a row. A NaN or an infinity makes all of it NaN. fine_from: the largest magnitude that is kept as it is.
ENGINE_INLINE void quantise_group(const vf* x, const ActivationRow& row, int64_t group, float fine_from) {
    vf most = vabs(x[0]);
    uint32_t nan = nan_bits(x[0]);
    for (int i = 1; i < GROUP_VECTORS; i++) {
        most = vmax(most, vabs(x[i]));
        nan |= nan_bits(x[i]);
    }
    const float largest = hmax(most);
    const bool finite = nan == 0 && largest < INFINITY;
    const float scale = finite ? largest / 127.0f : NAN;
    vf rounded[GROUP_VECTORS];
    // Below that, 127 / largest would not be a number; nobody will see the difference to 0.
    const float inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
    const int32_t total = round_group(x, inverse, row.codes + group * GROUP, rounded);
    row.scales[group] = scale;
    row.negative_codes[group] = -total;
    const float sum = scale * (float)total;
    if (group % 2 == 0)
        row.sums[group / 2] = sum;
    else
        row.sums[group / 2] += sum;
    if (!(largest > fine_from) || inverse == 0.0f) return;
    FineGroup& fine = row.fine[(*row.num_fine)++];
    vf left[GROUP_VECTORS], ignored[GROUP_VECTORS];
    for (int i = 0; i < GROUP_VECTORS; i++) left[i] = fma(rounded[i], set1(-scale), x[i]);
    // Rounding left half a step at most.
    const int32_t fine_total = round_group(left, 254.0f / scale, fine.codes, ignored);
    fine.group = (int32_t)group;
    fine.negative_codes = -fine_total;
    fine.scale = scale / 254.0f;
    fine.sum = fine.scale * (float)fine_total;
}

// A whole row of `dim` values; the last block is filled up with zeros.
ENGINE_INLINE void quantise_row(const float* x, int64_t dim, uint8_t* out) {
    const int64_t blocks = num_blocks(dim);
    const ActivationRow row = activation_row(out, blocks);
    vf squares = zero();
    int64_t at = 0;
    for (; at + W <= dim; at += W) squares = fma(load(x + at), load(x + at), squares);
    if (at < dim) {
        const vf rest = load_part(x + at, (int)(dim - at));
        squares = fma(rest, rest, squares);
    }
    const float fine_from = FINE_FROM * sqrtf(hsum(squares) / (float)dim);
    *row.num_fine = 0;
    for (int64_t group = 0; group < 2 * blocks; group++) {
        vf values[GROUP_VECTORS];
        for (int i = 0; i < GROUP_VECTORS; i++) {
            const int64_t begin = group * GROUP + i * W, left = dim - begin;
            values[i] = left >= W ? load(x + begin) : left > 0 ? load_part(x + begin, (int)left) : zero();
        }
        quantise_group(values, row, group, fine_from);
    }
}

inline void quantise(const QuantiseArgs& args, const Extent& extent, Worker& worker) {
    const int64_t stride = activation_bytes(args.dim);
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;)
        quantise_row(args.x + t * args.x_stride, args.dim, args.out + t * stride);
}

}  // namespace ENGINE_ISA
