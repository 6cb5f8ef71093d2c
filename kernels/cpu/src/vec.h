// Vectors of W float or int32 lanes in the instruction set this file is compiled for. No standard templates here: what
// a linker might share between instruction sets must not be emitted.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ENGINE_ISA {

#define ENGINE_INLINE static inline __attribute__((always_inline))

ENGINE_INLINE float f16_to_f32_bits(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 0x1F, mantissa = h & 0x3FF;
    uint32_t bits;
    if (exponent == 0x1F) {
        bits = sign | 0x7F800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        // Subnormal: exact in float32.
        const float value = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even; too large becomes infinity.
ENGINE_INLINE uint16_t f32_to_f16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000u) return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000u) return (uint16_t)(sign | 0x7C00);
    if (bits < 0x38800000u) {
        // Below the smallest normal number: let the float adder round.
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        uint32_t shifted;
        memcpy(&shifted, &magnitude, 4);
        return (uint16_t)(sign | (shifted - 0x3F000000u));
    }
    const uint32_t odd = (bits >> 13) & 1;
    return (uint16_t)(sign | ((bits - 0x38000000u + 0xFFF + odd) >> 13));
}

#if defined(__AVX512F__)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
ENGINE_INLINE __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
ENGINE_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
ENGINE_INLINE vf load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
ENGINE_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
ENGINE_INLINE void store_part(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
ENGINE_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
ENGINE_INLINE vf zero() { return _mm512_setzero_ps(); }
ENGINE_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
ENGINE_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
ENGINE_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
ENGINE_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
ENGINE_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
ENGINE_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
ENGINE_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
ENGINE_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
ENGINE_INLINE vf vround(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ENGINE_INLINE float hsum(vf a) { return _mm512_reduce_add_ps(a); }
ENGINE_INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a); }
ENGINE_INLINE vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
ENGINE_INLINE void store_f16(uint16_t* p, vf x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ENGINE_INLINE vf load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
ENGINE_INLINE vf load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
ENGINE_INLINE vf load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// Lanes, already whole numbers in [-128, 127], as bytes.
ENGINE_INLINE void store_i8(int8_t* p, vf x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
ENGINE_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
ENGINE_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
ENGINE_INLINE vi iset1(int32_t x) { return _mm512_set1_epi32(x); }
ENGINE_INLINE vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
ENGINE_INLINE vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
ENGINE_INLINE vi imul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
ENGINE_INLINE vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
ENGINE_INLINE vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
template <int N> ENGINE_INLINE vi shift_left(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> ENGINE_INLINE vi shift_right(vi a) { return _mm512_srli_epi32(a, N); }
ENGINE_INLINE vf bits_to_float(vi a) { return _mm512_castsi512_ps(a); }
ENGINE_INLINE vi float_to_bits(vf a) { return _mm512_castps_si512(a); }
ENGINE_INLINE vi iload(const int32_t* p) { return _mm512_loadu_si512(p); }
ENGINE_INLINE void istore(int32_t* p, vi a) { _mm512_storeu_si512(p, a); }
ENGINE_INLINE int32_t ihsum(vi a) { return _mm512_reduce_add_epi32(a); }
// if_less: lanes of `yes` where a < b, else of `no` (`no` where either is NaN).
ENGINE_INLINE vf if_less(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// A bit per lane: a < b, and a != a.
ENGINE_INLINE uint32_t less_bits(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
ENGINE_INLINE uint32_t nan_bits(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
// Round to nearest even; NaN stays NaN.
ENGINE_INLINE void store_bf16(uint16_t* p, vf x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
// "Eights": the lanes as W / 8 rows of 8. Elements of row a, then (where there is room) of row b.
ENGINE_INLINE vf load_eights(const float* a, const float* b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
}
// Two conversions of 8 are quicker than one of 16 where the 512 bits are two halves anyway, and no slower elsewhere.
ENGINE_INLINE vf load_eights_f16(const uint16_t* a, const uint16_t* b) {
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)a));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)b)), 1);
}
ENGINE_INLINE vf load_eights_bf16(const uint16_t* a, const uint16_t* b) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)a));
    const __m256i both = _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)b), 1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
}
// The same 8 elements in all of the eights.
ENGINE_INLINE vf repeat_eight(const float* p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
// Sums of W eights, in two steps: of four vectors each, then of two such results. Vector i = 0..7 of the eight holds
// the rows eights_row(i) and eights_row(i) + 8, whose sums come out as the lanes of these numbers.
// The order of a sum: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
constexpr int eights_row(int i) { return i / 2 + 4 * (i % 2); }
ENGINE_INLINE vf fold_fours(vf a, vf b) {
    const __m512i other = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return add(_mm512_mask_blend_ps(0xF0F0, a, b), _mm512_permutex2var_ps(a, other, b));
}
ENGINE_INLINE vf fold_eights(vf a, vf b, vf c, vf d) {
    const vf ab = fold_fours(a, b), cd = fold_fours(c, d);
    return add(_mm512_mask_blend_ps(0xCCCC, ab, cd), _mm512_shuffle_ps(ab, cd, 0x4E));
}
ENGINE_INLINE vf finish_eights(vf a, vf b) {
    return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
// Lane j of vector i and lane i of vector j change places.
ENGINE_INLINE void transpose(vf (&x)[16]) {
    vf y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm512_shuffle_ps(y[i], y[i + 2], 0xEE);
        x[i + 2] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm512_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xDD);
        y[i + 8] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
        x[i + 4] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xDD);
        x[i + 12] = _mm512_shuffle_f32x4(y[i + 4], y[i + 12], 0xDD);
    }
}
// n bytes, a multiple of 4 and at most 4 * W, then zeros.
ENGINE_INLINE vi iload_bytes(const void* p, int n) { return _mm512_maskz_loadu_epi32(first(n / 4), p); }
// sum + the four products of signed bytes in each lane. One side is prepared by dot4_side, and the sum of products
// starts from dot4_start(the sum of the other side's bytes).
ENGINE_INLINE vi dot4_side(vi a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)0x80)); }
ENGINE_INLINE int32_t dot4_start(int32_t other_sum) { return -128 * other_sum; }
ENGINE_INLINE vi dot4(vi sum, vi side, vi other) { return _mm512_dpbusd_epi32(sum, side, other); }
// a in a register: used several times, it would else be loaded for every use.
ENGINE_INLINE vf in_register(vf a) {
    asm("" : "+v"(a));
    return a;
}
// a * 2^n for a whole n <= 0; 0 for n < -126, where it might be subnormal.
ENGINE_INLINE vf times_power(vf a, vf n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-126.0f), _CMP_NLT_UQ), a, n);
}
// A bit per lane: a or b is NaN.
ENGINE_INLINE uint32_t unordered_bits(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
// The lanes of these bits one after the other, then anything up to W floats; gives their number.
ENGINE_INLINE int compress(float* p, vf x, uint32_t bits) {
    // Not the instruction that stores: it takes far longer on some processors.
    store(p, _mm512_maskz_compress_ps((__mmask16)bits, x));
    return __builtin_popcount(bits);
}

// Fours: dwords of four vectors, which change places among them within each 128 bits.
ENGINE_INLINE void transpose_fours(vi (&x)[4]) {
    const vi a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const vi c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
}
// Sums of the fours of a vector, in two steps: of two vectors each, then of W / 8 such pairs. They come out as the
// first, the second, ... four lanes.
ENGINE_INLINE vi fold_pair(vi a, vi b) {
    return iadd(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
}
ENGINE_INLINE vi finish_pairs(const vi (&x)[2]) {
    return iadd(_mm512_shuffle_i32x4(x[0], x[1], 0x88), _mm512_shuffle_i32x4(x[0], x[1], 0xDD));
}
// dot4, where many sums are in registers: compilers move and spill those of the intrinsic.
ENGINE_INLINE vi dot4_kept(vi sum, vi side, vi other) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(side), "v"(other));
    return sum;
}
// Sums of bytes times whole weights in [0, TOP_WEIGHT], over groups of VALUE_KEYS rows of bytes: these are interleaved
// VALUE_DIMS bytes at a time into VALUE_VECTORS vectors, of which STEP_VECTORS are made at once. A word has a group's
// weights, or one of VALUE_PARTS parts.
constexpr int VALUE_KEYS = 4, VALUE_PARTS = 2, VALUE_DIMS = 64, VALUE_VECTORS = 4, STEP_VECTORS = 4;
constexpr int32_t TOP_WEIGHT = 65535;
// W weights, as a part of the words of n keys. High bytes come first.
ENGINE_INLINE void store_weights(int32_t* words, int64_t key, int64_t n, vi weights) {
    _mm_storeu_si128((__m128i*)((char*)words + key), _mm512_cvtepi32_epi8(_mm512_srli_epi32(weights, 8)));
    _mm_storeu_si128((__m128i*)((char*)words + n + key), _mm512_cvtepi32_epi8(weights));
}
// Of the first n bytes of rows, a multiple of 8, then zeros: the vectors from v on.
ENGINE_INLINE void interleave_keys(const int8_t* const (&rows)[VALUE_KEYS], int n, int, vi (&x)[STEP_VECTORS]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        x[i] = n == VALUE_DIMS ? _mm512_loadu_si512(rows[i]) : _mm512_maskz_loadu_epi32(first(n / 4), rows[i]);
    const vi a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    const vi c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi16(a, c);
    x[1] = _mm512_unpackhi_epi16(a, c);
    x[2] = _mm512_unpacklo_epi16(b, d);
    x[3] = _mm512_unpackhi_epi16(b, d);
}
ENGINE_INLINE vi dot_keys(vi sum, vi values, int32_t word) { return dot4_kept(sum, iset1(word), values); }
ENGINE_INLINE vi join_parts(const vi (&sums)[VALUE_PARTS]) { return iadd(_mm512_slli_epi32(sums[0], 8), sums[1]); }
// Sums of interleaved vectors into the order of the bytes.
ENGINE_INLINE void order_dims(vi (&x)[VALUE_VECTORS]) {
    const vi a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    const vi c = _mm512_shuffle_i32x4(x[0], x[1], 0xEE), d = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
    x[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
    x[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
ENGINE_INLINE vi first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
ENGINE_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
ENGINE_INLINE vf load_part(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
ENGINE_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
ENGINE_INLINE void store_part(float* p, vf x, int n) { _mm256_maskstore_ps(p, first(n), x); }
ENGINE_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
ENGINE_INLINE vf zero() { return _mm256_setzero_ps(); }
ENGINE_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
ENGINE_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
ENGINE_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
ENGINE_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
ENGINE_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
ENGINE_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
ENGINE_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
ENGINE_INLINE vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
ENGINE_INLINE vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
ENGINE_INLINE float hsum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
ENGINE_INLINE float hmax(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
ENGINE_INLINE vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
ENGINE_INLINE void store_f16(uint16_t* p, vf x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ENGINE_INLINE vf load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
ENGINE_INLINE vf load_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
ENGINE_INLINE vf load_u8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
ENGINE_INLINE void store_i8(int8_t* p, vf x) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
ENGINE_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
ENGINE_INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
ENGINE_INLINE vi iset1(int32_t x) { return _mm256_set1_epi32(x); }
ENGINE_INLINE vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
ENGINE_INLINE vi isub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
ENGINE_INLINE vi imul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
ENGINE_INLINE vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
ENGINE_INLINE vi ixor(vi a, vi b) { return _mm256_xor_si256(a, b); }
template <int N> ENGINE_INLINE vi shift_left(vi a) { return _mm256_slli_epi32(a, N); }
template <int N> ENGINE_INLINE vi shift_right(vi a) { return _mm256_srli_epi32(a, N); }
ENGINE_INLINE vf bits_to_float(vi a) { return _mm256_castsi256_ps(a); }
ENGINE_INLINE vi float_to_bits(vf a) { return _mm256_castps_si256(a); }
ENGINE_INLINE vi iload(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
ENGINE_INLINE void istore(int32_t* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
ENGINE_INLINE int32_t ihsum(vi a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
ENGINE_INLINE vf if_less(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
ENGINE_INLINE uint32_t less_bits(vf a, vf b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
ENGINE_INLINE uint32_t nan_bits(vf a) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
ENGINE_INLINE void store_bf16(uint16_t* p, vf x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
ENGINE_INLINE vf load_eights(const float* a, const float*) { return load(a); }
ENGINE_INLINE vf load_eights_f16(const uint16_t* a, const uint16_t*) { return load_f16(a); }
ENGINE_INLINE vf load_eights_bf16(const uint16_t* a, const uint16_t*) { return load_bf16(a); }
ENGINE_INLINE vf repeat_eight(const float* p) { return load(p); }
// Here vector i has one row, eights_row(i).
constexpr int eights_row(int i) { return i / 2 + 4 * (i % 2); }
ENGINE_INLINE vf fold_eights(vf a, vf b, vf c, vf d) {
    const vf ab = add(_mm256_blend_ps(a, b, 0xF0), _mm256_permute2f128_ps(a, b, 0x21));
    const vf cd = add(_mm256_blend_ps(c, d, 0xF0), _mm256_permute2f128_ps(c, d, 0x21));
    return add(_mm256_blend_ps(ab, cd, 0xCC), _mm256_shuffle_ps(ab, cd, 0x4E));
}
ENGINE_INLINE vf finish_eights(vf a, vf b) {
    return add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}
ENGINE_INLINE void transpose(vf (&x)[8]) {
    vf y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xEE);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        const vf low = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
        x[i] = low;
    }
}
ENGINE_INLINE vi iload_bytes(const void* p, int n) { return _mm256_maskload_epi32((const int*)p, first(n / 4)); }
ENGINE_INLINE vi dot4_side(vi a) { return a; }
ENGINE_INLINE int32_t dot4_start(int32_t) { return 0; }
ENGINE_INLINE vi dot4(vi sum, vi side, vi other) {
    // Bytes of -127..127 (one side may have -128): two products fit 16 bits.
    const vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(side), _mm256_sign_epi8(other, side));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
ENGINE_INLINE vf in_register(vf a) {
    asm("" : "+x"(a));
    return a;
}
ENGINE_INLINE vf times_power(vf a, vf n) {
    const vf power = bits_to_float(shift_left<23>(iadd(to_int(n), iset1(127))));
    return if_less(n, set1(-126.0f), zero(), mul(a, power));
}
ENGINE_INLINE uint32_t unordered_bits(vf a, vf b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
ENGINE_INLINE int compress(float* p, vf x, uint32_t bits) {
    float lanes[W];
    store(lanes, x);
    int count = 0;
    for (; bits != 0; bits &= bits - 1) p[count++] = lanes[__builtin_ctz(bits)];
    return count;
}

ENGINE_INLINE void transpose_fours(vi (&x)[4]) {
    const vi a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    const vi c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm256_unpacklo_epi64(a, c);
    x[1] = _mm256_unpackhi_epi64(a, c);
    x[2] = _mm256_unpacklo_epi64(b, d);
    x[3] = _mm256_unpackhi_epi64(b, d);
}
ENGINE_INLINE vi fold_pair(vi a, vi b) {
    return iadd(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}
ENGINE_INLINE vi finish_pairs(const vi (&x)[1]) { return x[0]; }
ENGINE_INLINE vi dot4_kept(vi sum, vi side, vi other) { return dot4(sum, side, other); }
constexpr int VALUE_KEYS = 2, VALUE_PARTS = 1, VALUE_DIMS = 32, VALUE_VECTORS = 4, STEP_VECTORS = 2;
constexpr int32_t TOP_WEIGHT = 32767;
ENGINE_INLINE void store_weights(int32_t* words, int64_t key, int64_t, vi weights) {
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(weights), _mm256_extracti128_si256(weights, 1));
    _mm_storeu_si128((__m128i*)((int16_t*)words + key), half);
}
ENGINE_INLINE void interleave_keys(const int8_t* const (&rows)[VALUE_KEYS], int n, int v, vi (&x)[STEP_VECTORS]) {
    __m256i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        if (n == VALUE_DIMS) {
            words[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(rows[i] + v * 8)));
        } else {
            __m128i bytes = _mm_setzero_si128();
            if (n > v * 8) memcpy(&bytes, rows[i] + v * 8, n < v * 8 + 16 ? 8 : 16);
            words[i] = _mm256_cvtepi8_epi16(bytes);
        }
    }
    x[0] = _mm256_unpacklo_epi16(words[0], words[1]);
    x[1] = _mm256_unpackhi_epi16(words[0], words[1]);
}
ENGINE_INLINE vi dot_keys(vi sum, vi values, int32_t word) {
    vi products;
    // The intrinsics take more registers than there are.
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(values), "x"(iset1(word)));
    return sum;
}
ENGINE_INLINE vi join_parts(const vi (&sums)[VALUE_PARTS]) { return sums[0]; }
ENGINE_INLINE void order_dims(vi (&x)[VALUE_VECTORS]) {
    for (int i = 0; i < 4; i += 2) {
        const vi low = _mm256_permute2x128_si256(x[i], x[i + 1], 0x20);
        x[i + 1] = _mm256_permute2x128_si256(x[i], x[i + 1], 0x31);
        x[i] = low;
    }
}

#else

constexpr int W = 8;
struct vf { float v[W]; };
struct vi { int32_t v[W]; };
#define ENGINE_LANES(type, expression) \
    type out; \
    for (int i = 0; i < W; i++) out.v[i] = (expression); \
    return out
ENGINE_INLINE vf load(const float* p) { ENGINE_LANES(vf, p[i]); }
ENGINE_INLINE vf load_part(const float* p, int n) { ENGINE_LANES(vf, i < n ? p[i] : 0.0f); }
ENGINE_INLINE void store(float* p, vf x) { memcpy(p, x.v, sizeof x.v); }
ENGINE_INLINE void store_part(float* p, vf x, int n) { memcpy(p, x.v, sizeof(float) * (size_t)n); }
ENGINE_INLINE vf set1(float x) { ENGINE_LANES(vf, x); }
ENGINE_INLINE vf zero() { return set1(0.0f); }
ENGINE_INLINE vf add(vf a, vf b) { ENGINE_LANES(vf, a.v[i] + b.v[i]); }
ENGINE_INLINE vf sub(vf a, vf b) { ENGINE_LANES(vf, a.v[i] - b.v[i]); }
ENGINE_INLINE vf mul(vf a, vf b) { ENGINE_LANES(vf, a.v[i] * b.v[i]); }
ENGINE_INLINE vf div(vf a, vf b) { ENGINE_LANES(vf, a.v[i] / b.v[i]); }
// Without an instruction for it: two roundings.
ENGINE_INLINE vf fma(vf a, vf b, vf c) { ENGINE_LANES(vf, a.v[i] * b.v[i] + c.v[i]); }
ENGINE_INLINE vf vmax(vf a, vf b) { ENGINE_LANES(vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ENGINE_INLINE vf vmin(vf a, vf b) { ENGINE_LANES(vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
ENGINE_INLINE vf vabs(vf a) { ENGINE_LANES(vf, fabsf(a.v[i])); }
ENGINE_INLINE vf vround(vf a) { ENGINE_LANES(vf, nearbyintf(a.v[i])); }
ENGINE_INLINE float hsum(vf a) {
    const float *x = a.v;
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
ENGINE_INLINE float hmax(vf a) {
    float m = a.v[0];
    for (int i = 1; i < W; i++) m = a.v[i] > m ? a.v[i] : m;
    return m;
}
ENGINE_INLINE vf load_f16(const uint16_t* p) { ENGINE_LANES(vf, f16_to_f32_bits(p[i])); }
ENGINE_INLINE void store_f16(uint16_t* p, vf x) {
    for (int i = 0; i < W; i++) p[i] = f32_to_f16_bits(x.v[i]);
}
ENGINE_INLINE vf load_bf16(const uint16_t* p) {
    vf out;
    for (int i = 0; i < W; i++) {
        const uint32_t bits = (uint32_t)p[i] << 16;
        memcpy(&out.v[i], &bits, 4);
    }
    return out;
}
ENGINE_INLINE vf load_i8(const int8_t* p) { ENGINE_LANES(vf, (float)p[i]); }
ENGINE_INLINE vf load_u8(const uint8_t* p) { ENGINE_LANES(vf, (float)p[i]); }
ENGINE_INLINE void store_i8(int8_t* p, vf x) {
    for (int i = 0; i < W; i++) p[i] = (int8_t)(int32_t)x.v[i];
}
ENGINE_INLINE vf to_float(vi a) { ENGINE_LANES(vf, (float)a.v[i]); }
ENGINE_INLINE vi to_int(vf a) { ENGINE_LANES(vi, (int32_t)nearbyintf(a.v[i])); }
ENGINE_INLINE vi iset1(int32_t x) { ENGINE_LANES(vi, x); }
ENGINE_INLINE vi iadd(vi a, vi b) { ENGINE_LANES(vi, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
ENGINE_INLINE vi isub(vi a, vi b) { ENGINE_LANES(vi, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i])); }
ENGINE_INLINE vi imul(vi a, vi b) { ENGINE_LANES(vi, (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i])); }
ENGINE_INLINE vi iand(vi a, vi b) { ENGINE_LANES(vi, a.v[i] & b.v[i]); }
ENGINE_INLINE vi ixor(vi a, vi b) { ENGINE_LANES(vi, a.v[i] ^ b.v[i]); }
template <int N> ENGINE_INLINE vi shift_left(vi a) { ENGINE_LANES(vi, (int32_t)((uint32_t)a.v[i] << N)); }
template <int N> ENGINE_INLINE vi shift_right(vi a) { ENGINE_LANES(vi, (int32_t)((uint32_t)a.v[i] >> N)); }
ENGINE_INLINE vf bits_to_float(vi a) {
    vf out;
    memcpy(out.v, a.v, sizeof out.v);
    return out;
}
ENGINE_INLINE vi float_to_bits(vf a) {
    vi out;
    memcpy(out.v, a.v, sizeof out.v);
    return out;
}
ENGINE_INLINE vi iload(const int32_t* p) { ENGINE_LANES(vi, p[i]); }
ENGINE_INLINE void istore(int32_t* p, vi a) { memcpy(p, a.v, sizeof a.v); }
ENGINE_INLINE int32_t ihsum(vi a) {
    uint32_t sum = 0;
    for (int i = 0; i < W; i++) sum += (uint32_t)a.v[i];
    return (int32_t)sum;
}
ENGINE_INLINE vf if_less(vf a, vf b, vf yes, vf no) { ENGINE_LANES(vf, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
ENGINE_INLINE uint32_t less_bits(vf a, vf b) {
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= (uint32_t)(a.v[i] < b.v[i]) << i;
    return bits;
}
ENGINE_INLINE uint32_t nan_bits(vf a) {
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= (uint32_t)(a.v[i] != a.v[i]) << i;
    return bits;
}
ENGINE_INLINE void store_bf16(uint16_t* p, vf x) {
    for (int i = 0; i < W; i++) {
        uint32_t bits;
        memcpy(&bits, &x.v[i], 4);
        p[i] = (uint16_t)((x.v[i] != x.v[i] ? bits | 0x400000 : bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
}
ENGINE_INLINE vf load_eights(const float* a, const float*) { return load(a); }
ENGINE_INLINE vf load_eights_f16(const uint16_t* a, const uint16_t*) { return load_f16(a); }
ENGINE_INLINE vf load_eights_bf16(const uint16_t* a, const uint16_t*) { return load_bf16(a); }
ENGINE_INLINE vf repeat_eight(const float* p) { return load(p); }
constexpr int eights_row(int i) { return i; }
// Lanes 0..3: the sums of the four vectors.
ENGINE_INLINE vf fold_eights(vf a, vf b, vf c, vf d) {
    const float sums[W] = {hsum(a), hsum(b), hsum(c), hsum(d), 0.0f, 0.0f, 0.0f, 0.0f};
    return load(sums);
}
ENGINE_INLINE vf finish_eights(vf a, vf b) { ENGINE_LANES(vf, i < 4 ? a.v[i] : b.v[i - 4]); }
ENGINE_INLINE void transpose(vf (&x)[W]) {
    for (int i = 0; i < W; i++) {
        for (int j = 0; j < i; j++) {
            const float kept = x[i].v[j];
            x[i].v[j] = x[j].v[i];
            x[j].v[i] = kept;
        }
    }
}
ENGINE_INLINE vi iload_bytes(const void* p, int n) {
    vi out = {{0}};
    memcpy(out.v, p, (size_t)n);
    return out;
}
ENGINE_INLINE vi dot4_side(vi a) { return a; }
ENGINE_INLINE int32_t dot4_start(int32_t) { return 0; }
ENGINE_INLINE vi dot4(vi sum, vi side, vi other) {
    int8_t a[4 * W], b[4 * W];
    memcpy(a, side.v, sizeof a);
    memcpy(b, other.v, sizeof b);
    for (int i = 0; i < 4 * W; i++) sum.v[i / 4] += a[i] * b[i];
    return sum;
}
ENGINE_INLINE vf in_register(vf a) { return a; }
ENGINE_INLINE vf times_power(vf a, vf n) {
    const vf power = bits_to_float(shift_left<23>(iadd(to_int(n), iset1(127))));
    return if_less(n, set1(-126.0f), zero(), mul(a, power));
}
ENGINE_INLINE uint32_t unordered_bits(vf a, vf b) {
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= (uint32_t)(a.v[i] != a.v[i] || b.v[i] != b.v[i]) << i;
    return bits;
}
ENGINE_INLINE int compress(float* p, vf x, uint32_t bits) {
    int count = 0;
    for (; bits != 0; bits &= bits - 1) p[count++] = x.v[__builtin_ctz(bits)];
    return count;
}
ENGINE_INLINE void transpose_fours(vi (&x)[4]) {
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++) {
            for (int k = 0; k < W; k += 4) {
                const int32_t kept = x[i].v[k + j];
                x[i].v[k + j] = x[j].v[k + i];
                x[j].v[k + i] = kept;
            }
        }
    }
}
ENGINE_INLINE vi fold_pair(vi a, vi b) {
    ENGINE_LANES(vi, i < 4 ? a.v[i] + a.v[i + 4] : b.v[i - 4] + b.v[i]);
}
ENGINE_INLINE vi finish_pairs(const vi (&x)[1]) { return x[0]; }
ENGINE_INLINE vi dot4_kept(vi sum, vi side, vi other) { return dot4(sum, side, other); }
constexpr int VALUE_KEYS = 2, VALUE_PARTS = 1, VALUE_DIMS = 8, VALUE_VECTORS = 1, STEP_VECTORS = 1;
constexpr int32_t TOP_WEIGHT = 32767;
ENGINE_INLINE void store_weights(int32_t* words, int64_t key, int64_t, vi weights) {
    int16_t codes[W];
    for (int i = 0; i < W; i++) codes[i] = (int16_t)weights.v[i];
    memcpy((int16_t*)words + key, codes, sizeof codes);
}
ENGINE_INLINE void interleave_keys(const int8_t* const (&rows)[VALUE_KEYS], int, int, vi (&x)[STEP_VECTORS]) {
    int16_t pairs[2 * W];
    for (int i = 0; i < 2 * W; i++) pairs[i] = rows[i % 2][i / 2];
    memcpy(x[0].v, pairs, sizeof pairs);
}
ENGINE_INLINE vi dot_keys(vi sum, vi values, int32_t word) {
    int16_t weights[2], pairs[2 * W];
    memcpy(weights, &word, sizeof weights);
    memcpy(pairs, values.v, sizeof pairs);
    for (int i = 0; i < W; i++) sum.v[i] += pairs[2 * i] * weights[0] + pairs[2 * i + 1] * weights[1];
    return sum;
}
ENGINE_INLINE vi join_parts(const vi (&sums)[VALUE_PARTS]) { return sums[0]; }
ENGINE_INLINE void order_dims(vi (&)[VALUE_VECTORS]) {}
#undef ENGINE_LANES

#endif

constexpr uint32_t ALL_LANES = (1u << W) - 1;

// exp(x) for x <= 0 and moderate x > 0, within 2 ulp; 0 below -87.3, NaN stays NaN.
ENGINE_INLINE vf vexp(vf x) {
    const vf floor = set1(-87.33654f);
    // vmax takes its second argument where one is NaN.
    const vf c = vmin(set1(88.0f), vmax(floor, x));
    const vf n = vround(mul(c, set1(1.44269504f)));
    vf r = fma(n, set1(-0.693359375f), c);
    r = fma(n, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    const vf scale = bits_to_float(shift_left<23>(iadd(to_int(n), iset1(127))));
    return if_less(x, floor, zero(), mul(p, scale));
}

// Natural logarithm of positive normal x, within 2 ulp.
ENGINE_INLINE vf vlog(vf x) {
    const vi bits = float_to_bits(x);
    // Mantissa in [sqrt(1/2), sqrt(2)), exponent to match.
    const vi shifted = isub(bits, iset1(0x3F3504F3));
    const vi exponent_bits = iand(shifted, iset1((int32_t)0xFF800000));
    const vf m = sub(bits_to_float(isub(bits, exponent_bits)), set1(1.0f));
    const vf e = mul(to_float(exponent_bits), set1(1.1920928955078125e-7f));
    vf p = set1(7.0376836292e-2f);
    p = fma(p, m, set1(-1.1514610310e-1f));
    p = fma(p, m, set1(1.1676998740e-1f));
    p = fma(p, m, set1(-1.2420140846e-1f));
    p = fma(p, m, set1(1.4249322787e-1f));
    p = fma(p, m, set1(-1.6668057665e-1f));
    p = fma(p, m, set1(2.0000714765e-1f));
    p = fma(p, m, set1(-2.4999993993e-1f));
    p = fma(p, m, set1(3.3333331174e-1f));
    const vf square = mul(m, m);
    vf y = mul(mul(p, m), square);
    y = fma(e, set1(-2.12194440e-4f), y);
    y = fma(square, set1(-0.5f), y);
    return fma(e, set1(0.693359375f), add(m, y));
}

// Whole numbers codes = round(x / scale) of n floats, a multiple of 8, scale = max|x| / 127 is returned; NaN (and zeros)
// where x has NaN or infinity.
ENGINE_INLINE float quantise_i8(const float* x, int64_t n, int8_t* codes) {
    vf top = zero();
    uint32_t nan = 0;
    for (int64_t i = 0; i < n; i += W) {
        const vf a = n - i < W ? load_part(x + i, (int)(n - i)) : load(x + i);
        nan |= nan_bits(a);
        top = vmax(vabs(a), top);
    }
    float scale = hmax(top) / 127.0f;
    if (nan != 0 || scale > 3.0e38f) scale = NAN;
    if (!(scale > 0.0f)) {
        memset(codes, 0, (size_t)n);
        return scale;
    }
    for (int64_t i = 0; i < n; i += W) {
        const int part = n - i < W ? (int)(n - i) : W;
        const vf a = part < W ? load_part(x + i, part) : load(x + i);
        // A subnormal scale may be far off.
        const vf code = vmax(set1(-127.0f), vmin(set1(127.0f), vround(div(a, set1(scale)))));
        int8_t bytes[W];
        store_i8(bytes, code);
        memcpy(codes + i, bytes, (size_t)part);
    }
    return scale;
}

}  // namespace ENGINE_ISA
