// Integer dot products of one block: 32 columns of W rows of a tile with the codes of MT activation rows.
#pragma once
#include "packing.h"
#include "vec.h"

namespace ENGINE_ISA {

// 8-bit codes are signed, but dpbusd wants one side unsigned: there they count from -128.
#if defined(__AVX512F__)
constexpr int ZERO_SHIFT_8_BITS = 7;
#else
constexpr int ZERO_SHIFT_8_BITS = -1;
#endif

#if defined(__AVX512F__)

// The four groups of a half of a block (columns 0-15 or 16-31) as unsigned bytes.
template <int BITS, int HALF>
ENGINE_INLINE void unpack_half(const uint8_t* codes, vi* groups) {
    for (int j = 0; j < 4; j++) {
        if constexpr (BITS == 8) {
            const vi code = _mm512_loadu_si512(codes + (4 * HALF + j) * 64);
            groups[j] = _mm512_xor_si512(code, _mm512_set1_epi8((char)0x80));
            continue;
        }
        const vi both = _mm512_loadu_si512(codes + j * 64);
        groups[j] = _mm512_and_si512(HALF ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(0x0F));
        if constexpr (BITS == 5) {
            uint64_t bits;
            memcpy(&bits, codes + 256 + (4 * HALF + j) * 8, 8);
            groups[j] = _mm512_or_si512(groups[j], _mm512_maskz_set1_epi8(bits, 16));
        }
        if constexpr (BITS == 6) {
            const vi bits = _mm512_loadu_si512(codes + 256 + HALF * 64);
            // Bits 2j and 2j + 1 of every byte to 4 and 5.
            const vi placed = j == 0   ? _mm512_slli_epi16(bits, 4)
                              : j == 1 ? _mm512_slli_epi16(bits, 2)
                              : j == 2 ? bits
                                       : _mm512_srli_epi16(bits, 2);
            groups[j] = _mm512_or_si512(groups[j], _mm512_and_si512(placed, _mm512_set1_epi8(0x30)));
        }
    }
}

// acc + codes . x over the 16 columns of a half.
ENGINE_INLINE vi dot_groups(const vi* groups, const int8_t* x, vi acc) {
    for (int j = 0; j < 4; j++) {
        int32_t four;
        memcpy(&four, x + 4 * j, 4);
        acc = _mm512_dpbusd_epi32(acc, groups[j], _mm512_set1_epi32(four));
    }
    return acc;
}

// acc[t][half] += codes . x[t], columns 0-15 and 16-31 apart.
template <int BITS, int MT>
ENGINE_INLINE void block_dot(const uint8_t* codes, int, const int8_t* const (&x)[MT], vi (&acc)[MT][2]) {
    vi groups[8];
    unpack_half<BITS, 0>(codes, groups);
    unpack_half<BITS, 1>(codes, groups + 4);
    for (int t = 0; t < MT; t++) {
        acc[t][0] = dot_groups(groups, x[t], acc[t][0]);
        acc[t][1] = dot_groups(groups + 4, x[t] + 16, acc[t][1]);
    }
}

template <int BITS, int HALF>
ENGINE_INLINE vi half_dot(const uint8_t* codes, int, const int8_t* x, vi acc) {
    vi groups[4];
    unpack_half<BITS, HALF>(codes, groups);
    return dot_groups(groups, x, acc);
}

#elif defined(__AVX2__)

ENGINE_INLINE vi broadcast_four(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

// Bit i of a 32-bit word as 0x10 in byte i.
ENGINE_INLINE vi fifth_bits(const uint8_t* word) {
    int32_t bits;
    memcpy(&bits, word, 4);
    const vi which = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3,
                                      3, 3, 3);
    const vi mask = _mm256_set1_epi64x((int64_t)0x8040201008040201ull);
    const vi spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), which), mask);
    return _mm256_and_si256(_mm256_cmpeq_epi8(spread, mask), _mm256_set1_epi8(0x10));
}

// Group j of a half of a block, for the rows of a side, as unsigned bytes (8 bits: signed).
template <int BITS, int HALF>
ENGINE_INLINE vi unpack_group(const uint8_t* codes, int side, int j) {
    if constexpr (BITS == 8) return _mm256_loadu_si256((const vi*)(codes + (4 * HALF + j) * 64 + side * 32));
    const vi both = _mm256_loadu_si256((const vi*)(codes + j * 64 + side * 32));
    vi group = _mm256_and_si256(HALF ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(0x0F));
    // Of the words of 8 bytes, a side has 4.
    if constexpr (BITS == 5) group = _mm256_or_si256(group, fifth_bits(codes + 256 + (4 * HALF + j) * 8 + side * 4));
    if constexpr (BITS == 6) {
        const vi bits = _mm256_loadu_si256((const vi*)(codes + 256 + HALF * 64 + side * 32));
        const vi placed = j == 0   ? _mm256_slli_epi16(bits, 4)
                          : j == 1 ? _mm256_slli_epi16(bits, 2)
                          : j == 2 ? bits
                                   : _mm256_srli_epi16(bits, 2);
        group = _mm256_or_si256(group, _mm256_and_si256(placed, _mm256_set1_epi8(0x30)));
    }
    return group;
}

// acc[t * stride] += codes . x[t] over the 16 columns of a half.
template <int BITS, int HALF, int MT>
ENGINE_INLINE void half_dots(const uint8_t* codes, int side, const int8_t* const* x, int from, vi* acc, int stride) {
    const vi ones = _mm256_set1_epi16(1);
    // Sums of products in 16 bits stay exact for the 4 groups of a half with 4 or 5 bits, for 2 with 6, for 1 with 8.
    constexpr int EXACT = BITS <= 5 ? 4 : BITS == 6 ? 2 : 1;
    for (int first_j = 0; first_j < 4; first_j += EXACT) {
        vi sums[MT];
        for (int j = first_j; j < first_j + EXACT; j++) {
            const vi group = unpack_group<BITS, HALF>(codes, side, j);
            for (int t = 0; t < MT; t++) {
                const vi four = broadcast_four(x[t] + from + 4 * j);
                const vi pairs = BITS == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(group), _mm256_sign_epi8(four, group))
                                           : _mm256_maddubs_epi16(group, four);
                sums[t] = j == first_j ? pairs : _mm256_add_epi16(sums[t], pairs);
            }
        }
        for (int t = 0; t < MT; t++)
            acc[t * stride] = _mm256_add_epi32(acc[t * stride], _mm256_madd_epi16(sums[t], ones));
    }
}

template <int BITS, int MT>
ENGINE_INLINE void block_dot(const uint8_t* codes, int side, const int8_t* const (&x)[MT], vi (&acc)[MT][2]) {
    half_dots<BITS, 0, MT>(codes, side, x, 0, &acc[0][0], 2);
    half_dots<BITS, 1, MT>(codes, side, x, 16, &acc[0][1], 2);
}

template <int BITS, int HALF>
ENGINE_INLINE vi half_dot(const uint8_t* codes, int side, const int8_t* x, vi acc) {
    half_dots<BITS, HALF, 1>(codes, side, &x, 0, &acc, 1);
    return acc;
}

#else

template <int BITS, int HALF>
ENGINE_INLINE vi half_dot(const uint8_t* codes, int side, const int8_t* x, vi acc) {
    for (int j = 0; j < 4; j++) {
        const int g = 4 * HALF + j;
        for (int r = 0; r < W; r++) {
            for (int b = 0; b < 4; b++) {
                const int at = (side * W + r) * 4 + b;
                int w;
                if constexpr (BITS == 8) {
                    w = ((const int8_t*)codes)[g * 64 + at];
                } else {
                    w = (codes[j * 64 + at] >> (4 * HALF)) & 0x0F;
                    if constexpr (BITS == 5) w |= ((codes[256 + g * 8 + at / 8] >> (at % 8)) & 1) << 4;
                    if constexpr (BITS == 6) w |= ((codes[256 + HALF * 64 + at] >> (2 * j)) & 3) << 4;
                }
                acc.v[r] += w * x[4 * j + b];
            }
        }
    }
    return acc;
}

template <int BITS, int MT>
ENGINE_INLINE void block_dot(const uint8_t* codes, int side, const int8_t* const (&x)[MT], vi (&acc)[MT][2]) {
    for (int t = 0; t < MT; t++) {
        acc[t][0] = half_dot<BITS, 0>(codes, side, x[t], acc[t][0]);
        acc[t][1] = half_dot<BITS, 1>(codes, side, x[t] + 16, acc[t][1]);
    }
}

#endif

}  // namespace ENGINE_ISA
