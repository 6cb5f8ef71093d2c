// Log probabilities of tokens, and of the most likely ones beside them (kernels/logprobs.py).
#pragma once
#include "sampling.h"

namespace ENGINE_ISA {

// The `width` largest logits' tokens, best first, ties: the lowest first. `keys` has room for whole blocks.
inline void largest_tokens(
    const LogitRow& row, const float* block_max, int64_t width, float* heap, uint64_t* keys, int64_t* ids) {
    const float least = bound_of_largest(row, block_max, width, heap);
    const vf bound = set1(least);
    int64_t count = 0;
    for (int64_t block = 0; block < row.blocks; block++) {
        if (block_max[block] < least) continue;
        const float* x = row_block(row, block);
        for (int i = 0; i < ROW_BLOCK; i += W) {
            for (uint32_t bits = ~less_bits(load(x + i), bound) & ALL_LANES; bits != 0; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits);
                // All different: under the logit, the token counted from the end.
                keys[count++] = (uint64_t)sort_key(x[at]) << 32 | (0xFFFFFFFFu - (uint32_t)(block * ROW_BLOCK + at));
            }
        }
    }
    make_heap(keys, count);
    for (int64_t i = 0; i < width; i++) ids[i] = 0xFFFFFFFFu - (uint32_t)pop_heap(keys, count);
}

inline void score(const ScoreArgs& args, const Extent& extent, Worker& worker) {
    const int64_t width = args.width;
    float* block_max = nullptr;
    float* heap = nullptr;
    uint64_t* keys = nullptr;
    const auto lay_out = [&](Carver& from) {
        block_max = carve<float>(from, num_row_blocks(args.vocab));
        if (width == 0) return;
        heap = carve<float>(from, num_row_blocks(args.vocab));
        keys = carve<uint64_t>(from, num_row_blocks(args.vocab) * ROW_BLOCK);
    };
    Carver size = {nullptr, 0};
    lay_out(size);
    Carver memory = {(uint8_t*)worker.scratch(size.used), 0};
    lay_out(memory);

    for (int64_t r; (r = worker.next(extent.num_rows, 1)) >= 0;) {
        const LogitRow row = logit_row(args.logits + r * args.stride, args.vocab);
        int64_t* ids = args.ids + r * width;
        float* tops = args.tops + r * width;
        const Peak peak = find_peak<true>(row, block_max);
        if (peak.token < 0) {
            args.chosen[r] = NAN;
            for (int64_t i = 0; i < width; i++) {
                ids[i] = i;
                tops[i] = NAN;
            }
            continue;
        }
        const float log_mass = (float)log(row_mass<false>(row, 1.0f, peak.value));
        args.chosen[r] = row.logits[args.tokens[r]] - peak.value - log_mass;
        if (width == 0) continue;
        largest_tokens(row, block_max, width, heap, keys, ids);
        for (int64_t i = 0; i < width; i++) tops[i] = row.logits[ids[i]] - peak.value - log_mass;
    }
}

}  // namespace ENGINE_ISA
