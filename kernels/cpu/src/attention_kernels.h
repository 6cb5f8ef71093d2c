// The inner loops of attention: elements of the pages, scores, weights, weighted values.
#pragma once
#include "abi.h"
#include "attention_prefetch.h"
#include "attention_tiles.h"
#include "rotary.h"
#include "vec.h"

namespace ENGINE_ISA {
namespace paged {

// Keys of a transposed panel.
constexpr int64_t PANEL = 2 * W;
// Queries that a kernel has in registers at once.
constexpr int MAX_QUERIES = W == 16 ? 6 : 3;
constexpr int MAX_PANEL_QUERIES = 3;
// The same of the kernels for int8: scores straight from the pages, and weighted values.
constexpr int MAX_DIRECT_CODES = 4, MAX_CODE_QUERIES = 3;
// Keys whose weights share a scale, at fixed positions, and words of such weights.
constexpr int64_t CODE_BLOCK = 64, BLOCK_WORDS = CODE_BLOCK / VALUE_KEYS * VALUE_PARTS;

// --- elements of the pages

template <int TYPE> struct Stored;

template <> struct Stored<KV_F32> {
    using Element = float;
    ENGINE_INLINE vf vector(const Element* p) { return load(p); }
    ENGINE_INLINE vf eights(const Element* a, const Element* b) { return load_eights(a, b); }
};

template <> struct Stored<KV_F16> {
    using Element = uint16_t;
    ENGINE_INLINE vf vector(const Element* p) { return load_f16(p); }
    ENGINE_INLINE vf eights(const Element* a, const Element* b) { return load_eights_f16(a, b); }
};

template <> struct Stored<KV_BF16> {
    using Element = uint16_t;
    ENGINE_INLINE vf vector(const Element* p) { return load_bf16(p); }
    ENGINE_INLINE vf eights(const Element* a, const Element* b) { return load_eights_bf16(a, b); }
};

template <> struct Stored<KV_I8> {
    using Element = int8_t;
    ENGINE_INLINE vf vector(const Element* p) { return load_i8(p); }
};

// Up to W elements, then zeros.
template <int TYPE> ENGINE_INLINE vf load_elements(const char* p, int n) {
    using Element = typename Stored<TYPE>::Element;
    if (n == W) return Stored<TYPE>::vector((const Element*)p);
    Element part[W] = {};
    memcpy(part, p, sizeof(Element) * (size_t)n);
    return Stored<TYPE>::vector(part);
}

// e^x of x <= 0, within 4e-7 of it down to -20; 0 below -87.7, e^0 = 1, NaN stays NaN.
ENGINE_INLINE vf weight_of(vf x) {
    const vf c = vmax(set1(-200.0f), x), log2e = set1(1.44269504f);
    const vf n = vround(mul(c, log2e)), f = fma(c, log2e, sub(zero(), n));
    // 2^f for |f| <= 1/2, the least greatest relative error for this degree: 9.1e-8.
    vf p = set1(1.326472731307149e-3f);
    p = fma(p, f, set1(9.671512991189957e-3f));
    p = fma(p, f, set1(5.550733581185341e-2f));
    p = fma(p, f, set1(2.402224242687225e-1f));
    p = fma(p, f, set1(6.931470036506653e-1f));
    return times_power(fma(p, f, set1(1.0f)), n);
}

// --- scores

// A pointer that the compiler knows nothing of: it would put several into a vector, and take them out again.
template <class T> ENGINE_INLINE T* hidden(T* pointer) {
#if defined(__GNUC__)
    asm("" : "+r"(pointer));
#endif
    return pointer;
}

// Lines of an element's type that go by during 1 / (dim / 4) of W keys' scores, or 4 * W dimensions of a key's values.
template <class Element> constexpr int LINES_PER_STEP = larger(1, W * (int)sizeof(Element) / 16);

// Scores of W keys and NQ queries, straight from the pages. queries: [dim / 8, NQ, 8].
template <int TYPE, int NQ>
static inline void direct_scores(
    const char* keys, const int64_t* places, const float* queries, int64_t dim, float* out, PrefetchStream& stream) {
    using Element = typename Stored<TYPE>::Element;
    PrefetchCursor cursor(stream);
    vf halves[2][NQ];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const Element *a[4], *b[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const int row = eights_row(half * 4 + r);
            a[r] = (const Element*)hidden(keys + places[row]);
            b[r] = W == 16 ? (const Element*)hidden(keys + places[row + 8]) : a[r];
        }
        vf sums[4][NQ];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++)
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) sums[r][i] = zero();
        const float* query = queries;
        for (int64_t d = 0; d < dim; d += 8) {
            cursor.steps(LINES_PER_STEP<Element>);
            vf x[NQ];
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) x[i] = repeat_eight(query + i * 8);
            query += NQ * 8;
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                const vf key = Stored<TYPE>::eights(a[r] + d, b[r] + d);
#pragma GCC unroll 8
                for (int i = 0; i < NQ; i++) sums[r][i] = fma(key, x[i], sums[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++) halves[half][i] = fold_eights(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) store(out + i * PARTITION, finish_eights(halves[0][i], halves[1][i]));
}

// Lanes l and l + 4 of the dot products of a panel's keys.
template <int NQ>
ENGINE_INLINE void panel_lanes(const float* panel, const float* queries, int64_t dim, vf (&out)[NQ][2]) {
    vf low[NQ][2], high[NQ][2];
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) low[i][0] = low[i][1] = high[i][0] = high[i][1] = zero();
    for (int64_t d = 0; d < dim; d += 8) {
        vf a = in_register(load(panel + d * PANEL)), b = in_register(load(panel + d * PANEL + W));
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++) {
            const vf x = set1(queries[i * dim + d]);
            low[i][0] = fma(a, x, low[i][0]);
            low[i][1] = fma(b, x, low[i][1]);
        }
        a = in_register(load(panel + (d + 4) * PANEL));
        b = in_register(load(panel + (d + 4) * PANEL + W));
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++) {
            const vf x = set1(queries[i * dim + d + 4]);
            high[i][0] = fma(a, x, high[i][0]);
            high[i][1] = fma(b, x, high[i][1]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) {
        out[i][0] = add(low[i][0], high[i][0]);
        out[i][1] = add(low[i][1], high[i][1]);
    }
}

template <int NQ> ENGINE_INLINE void add_to(vf (&x)[NQ][2], const vf (&y)[NQ][2]) {
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) {
        x[i][0] = add(x[i][0], y[i][0]);
        x[i][1] = add(x[i][1], y[i][1]);
    }
}

// Scores of a panel's keys and NQ queries.
template <int NQ> static inline void panel_scores(const float* panel, const float* queries, int64_t dim, float* out) {
    vf even[NQ][2], odd[NQ][2], other[NQ][2];
    panel_lanes<NQ>(panel, queries, dim, even);
    panel_lanes<NQ>(panel + 2 * PANEL, queries + 2, dim, other);
    add_to<NQ>(even, other);
    panel_lanes<NQ>(panel + PANEL, queries + 1, dim, odd);
    panel_lanes<NQ>(panel + 3 * PANEL, queries + 3, dim, other);
    add_to<NQ>(odd, other);
    add_to<NQ>(even, odd);
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) {
        store(out + i * PARTITION, even[i][0]);
        store(out + i * PARTITION + W, even[i][1]);
    }
}

// The same of codes.
template <int NQ>
static inline void panel_scores_i8(
    const int32_t* panel, const int8_t* codes, const int32_t* starts, const float* factors, const float* key_scales,
    int64_t dim, float* out) {
    vi sums[NQ][2];
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) sums[i][0] = sums[i][1] = iset1(starts[i]);
    for (int64_t d = 0; d < dim; d += 4) {
        const vi a = iload(panel), b = iload(panel + W);
        panel += PANEL;
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++) {
            int32_t four;
            memcpy(&four, codes + i * dim + d, 4);
            const vi x = iset1(four);
            sums[i][0] = dot4(sums[i][0], a, x);
            sums[i][1] = dot4(sums[i][1], b, x);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) {
        const vf factor = set1(factors[i]);
        store(out + i * PARTITION, mul(mul(to_float(sums[i][0]), load(key_scales)), factor));
        store(out + i * PARTITION + W, mul(mul(to_float(sums[i][1]), load(key_scales + W)), factor));
    }
}

// Query codes as direct_scores_i8 takes them: four codes at a time, as often as there are keys that meet them.
static inline void spread_codes(const int8_t* codes, int64_t dim, int32_t* out) {
    for (int64_t d = 0; d < dim / 4; d++) {
        int32_t four;
        memcpy(&four, codes + 4 * d, 4);
        int32_t* target = out + d / W * W * 4 + d % 4 * W + d % W / 4 * 4;
        for (int i = 0; i < 4; i++) target[i] = four;
    }
}

// The same straight from the pages; dim is a multiple of 4 * W. queries: spread, [NQ, dim].
// ONE: it is just that.
template <int NQ, bool ONE>
static inline void direct_scores_i8(
    const char* keys, const int64_t* places, const int32_t* queries, const int32_t* starts, const float* factors,
    const float* key_scales, int64_t dim, float* out, PrefetchStream& stream) {
    PrefetchCursor cursor(stream);
    // Registers for the queries, where there are enough.
    constexpr bool KEPT = ONE && W == 16 && NQ <= 3;
    vf kept[KEPT ? NQ : 1][4];
    if (KEPT) {
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) kept[i][j] = in_register(load((const float*)queries + i * (4 * W) + j * W));
    }
    for (int64_t first = 0; first < PANEL; first += W) {
        vi pairs[NQ][W / 8];
#pragma GCC unroll 2
        for (int p = 0; p < W / 8; p++) {
            vi sums[2][NQ];
#pragma GCC unroll 2
            for (int g = 0; g < 2; g++) {
                const char* rows[4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) rows[j] = hidden(keys + places[first + p * 8 + g * 4 + j]);
#pragma GCC unroll 8
                for (int i = 0; i < NQ; i++) sums[g][i] = iset1(0);
                int64_t d = 0;
                do {
                    cursor.steps(W / 4);
                    vi x[4];
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) x[j] = dot4_side(iload((const int32_t*)(rows[j] + d)));
                    transpose_fours(x);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
#pragma GCC unroll 8
                        for (int i = 0; i < NQ; i++) {
                            const vi query =
                                KEPT ? float_to_bits(kept[i][j]) : iload(queries + i * dim + d + j * W);
                            sums[g][i] = dot4_kept(sums[g][i], x[j], query);
                        }
                    }
                    d += 4 * W;
                } while (!ONE && d < dim);
            }
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) pairs[i][p] = fold_pair(sums[0][i], sums[1][i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < NQ; i++) {
            const vi sum = iadd(finish_pairs(pairs[i]), iset1(starts[i]));
            store(out + i * PARTITION + first, mul(mul(to_float(sum), load(key_scales + first)), set1(factors[i])));
        }
    }
}

// keys: the pages at the KV head; places: of the panel's keys.
template <int TYPE>
static inline void fill_panel(const char* keys, const int64_t* places, int64_t dim, float* panel) {
    for (int64_t half = 0; half < PANEL; half += W) {
        map_vectors(dim, [&](int64_t d, int n) {
            using Element = typename Stored<TYPE>::Element;
            vf x[W];
            for (int i = 0; i < W; i++)
                x[i] = load_elements<TYPE>(keys + places[half + i] + d * (int64_t)sizeof(Element), n);
            transpose(x);
            for (int i = 0; i < n; i++) store(panel + (d + i) * PANEL + half, x[i]);
        });
    }
}

static inline void fill_panel_i8(
    const char* keys, const int64_t* places, int64_t dim, int32_t* panel, PrefetchStream& stream) {
    PrefetchCursor cursor(stream);
    for (int64_t half = 0; half < PANEL; half += W) {
        map_vectors(dim / 4, [&](int64_t d, int n) {
            // The lines of so many bytes.
            cursor.steps(W * W * 4 / 64);
            vf x[W];
            for (int i = 0; i < W; i++) x[i] = bits_to_float(iload_bytes(keys + places[half + i] + 4 * d, 4 * n));
            transpose(x);
            for (int i = 0; i < n; i++) istore(panel + (d + i) * PANEL + half, dot4_side(float_to_bits(x[i])));
        });
    }
}

// The scales that follow the codes of n heads, a multiple of 4.
static inline void gather_scales(const char* heads, const int64_t* places, int64_t dim, int64_t n, float* out) {
    const char* scales = heads + dim;
    for (int64_t i = 0; i < n; i += 4) {
        uint32_t bits[4];
        memcpy(bits + 0, scales + places[i + 0], 4);
        memcpy(bits + 1, scales + places[i + 1], 4);
        memcpy(bits + 2, scales + places[i + 2], 4);
        memcpy(bits + 3, scales + places[i + 3], 4);
        memcpy(out + i, bits, 16);
    }
}

// --- weighted values

// Weights times scales as whole numbers of a block; of keys [begin, end), the others have 0. Gives what 1 stands for:
// NaN if there is NaN or infinity among them. Scales are not negative.
static inline float round_weights(
    const float* weights, const float* scales, int64_t begin, int64_t end, int32_t* words) {
    constexpr int N = CODE_BLOCK / W;
    vf x[N];
    if (end - begin == CODE_BLOCK) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) x[i] = mul(load(weights + i * W), load(scales + i * W));
    } else {
        // A weight of 0 would not do for keys that the query does not see: 0 times NaN is NaN.
        float products[CODE_BLOCK] = {};
        for (int64_t i = begin; i < end; i++) products[i] = weights[i] * scales[i];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) x[i] = load(products + i * W);
    }
    vf tops = zero(), sums = zero();
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        tops = vmax(x[i], tops);
        sums = add(sums, x[i]);
    }
    const float top = hmax(tops);
    // vmax lets NaN pass.
    if (nan_bits(sums) != 0 || top > 3.0e38f) {
        memset(words, 0, BLOCK_WORDS * sizeof *words);
        return NAN;
    }
    const float factor = top > 1.0e-33f ? (float)TOP_WEIGHT / top : 1.0e37f;
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) store_weights(words, i * W, CODE_BLOCK, to_int(mul(x[i], set1(factor))));
    return 1.0f / factor;
}

// Groups of int8 values as they are in the pages. places: of the block.
struct PageGroups {
    const char* data;
    const int64_t* places;
    PrefetchStream& stream;

    using Pace = PrefetchCursor;
    static constexpr int STEP = larger(1, VALUE_KEYS * VALUE_DIMS / 64);
    inline __attribute__((always_inline)) Pace pace() const { return PrefetchCursor(stream); }
    using Rows = const int8_t* [VALUE_KEYS];
    inline __attribute__((always_inline)) void find(int64_t group, int64_t d, Rows& rows) const {
#pragma GCC unroll 4
        for (int i = 0; i < VALUE_KEYS; i++) rows[i] = (const int8_t*)hidden(data + places[group * VALUE_KEYS + i]) + d;
    }
    ENGINE_INLINE void take(const Rows& rows, int n, int v, vi (&x)[STEP_VECTORS]) { interleave_keys(rows, n, v, x); }
};

// A block of interleaved values.
struct BlockGroups {
    int32_t* data;
    int64_t group_words;

    struct Pace {
        inline __attribute__((always_inline)) void steps(int) {}
    };
    static constexpr int STEP = 0;
    inline __attribute__((always_inline)) Pace pace() const { return {}; }
    inline __attribute__((always_inline)) int32_t* at(int64_t group, int64_t d) const {
        return data + group * group_words + d / VALUE_DIMS * (VALUE_VECTORS * W);
    }
    using Rows = const int32_t* [1];
    inline __attribute__((always_inline)) void find(int64_t group, int64_t d, Rows& rows) const {
        rows[0] = at(group, d);
    }
    ENGINE_INLINE void take(const Rows& rows, int, int v, vi (&x)[STEP_VECTORS]) {
#pragma GCC unroll 4
        for (int i = 0; i < STEP_VECTORS; i++)
            x[i] = float_to_bits(in_register(bits_to_float(iload(rows[0] + (v + i) * W))));
    }
};

// Groups [from, to) added to dimensions [d, d + n) of NQ queries' acc.
template <int NQ, class Groups>
ENGINE_INLINE void weigh_group_dims(
    const Groups& source, int64_t d, int n, const int32_t* words, const float* units, int64_t from, int64_t to,
    float* acc, int64_t padded_dim) {
    auto pace = source.pace();
    vi sums[NQ][VALUE_VECTORS][VALUE_PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
#pragma GCC unroll 2
            for (int part = 0; part < VALUE_PARTS; part++) sums[i][v][part] = iset1(0);
    for (int64_t group = from; group < to; group++) {
        pace.steps(Groups::STEP);
        typename Groups::Rows rows;
        source.find(group, d, rows);
#pragma GCC unroll 2
        for (int first = 0; first < VALUE_VECTORS; first += STEP_VECTORS) {
            vi x[STEP_VECTORS];
            Groups::take(rows, n, first, x);
            // Weights are loaded for every step: there are no registers to keep them.
            const int32_t* weights = hidden(words + group);
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) {
#pragma GCC unroll 2
                for (int part = 0; part < VALUE_PARTS; part++) {
                    const int32_t word = weights[i * BLOCK_WORDS + part * (CODE_BLOCK / VALUE_KEYS)];
#pragma GCC unroll 4
                    for (int v = 0; v < STEP_VECTORS; v++)
                        sums[i][first + v][part] = dot_keys(sums[i][first + v][part], x[v], word);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++) {
        vi joined[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) joined[v] = join_parts(sums[i][v]);
        order_dims(joined);
        float* target = acc + i * padded_dim + d;
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) {
            if (v * W >= n) continue;
            store(target + v * W, fma(to_float(joined[v]), set1(units[i]), load(target + v * W)));
        }
    }
}

template <int NQ, class Groups>
static inline void weigh_groups(
    const Groups& source, int64_t dim, const int32_t* words, const float* units, int64_t from, int64_t to, float* acc,
    int64_t padded_dim) {
    int64_t d = 0;
    for (; d + VALUE_DIMS <= dim; d += VALUE_DIMS)
        weigh_group_dims<NQ>(source, d, VALUE_DIMS, words, units, from, to, acc, padded_dim);
    if (d < dim) weigh_group_dims<NQ>(source, d, (int)(dim - d), words, units, from, to, acc, padded_dim);
}

// Values as they are in the pages.
template <int TYPE> struct PageValues {
    const char* data;
    const int64_t* places;
    PrefetchStream& stream;

    using Pace = PrefetchCursor;
    static constexpr int STEP = LINES_PER_STEP<typename Stored<TYPE>::Element>;
    inline __attribute__((always_inline)) Pace pace() const { return PrefetchCursor(stream); }
    inline __attribute__((always_inline)) const char* row(int64_t key) const { return data + places[key]; }
    ENGINE_INLINE vf vector(const char* row, int64_t d) {
        return Stored<TYPE>::vector((const typename Stored<TYPE>::Element*)row + d);
    }
};

// A block of converted values.
struct BlockValues {
    const float* data;
    int64_t first, padded_dim;

    struct Pace {
        inline __attribute__((always_inline)) void steps(int) {}
    };
    static constexpr int STEP = 0;
    inline __attribute__((always_inline)) Pace pace() const { return {}; }
    inline __attribute__((always_inline)) const float* row(int64_t key) const {
        return data + (key - first) * padded_dim;
    }
    ENGINE_INLINE vf vector(const float* row, int64_t d) { return load(row + d); }
};

// Converted values of a tree's tokens, by the path to one of them: its first key is that at depth 0.
struct PathValues {
    const float* data;
    const int16_t* path;
    int64_t first, padded_dim;

    using Pace = BlockValues::Pace;
    static constexpr int STEP = 0;
    inline __attribute__((always_inline)) Pace pace() const { return {}; }
    inline __attribute__((always_inline)) const float* row(int64_t key) const {
        return data + path[key - first] * padded_dim;
    }
    ENGINE_INLINE vf vector(const float* row, int64_t d) { return load(row + d); }
};

// Keys [from, to) added to dimensions [0, NV * W) of NQ queries' acc.
template <int NQ, int NV, class Values>
static inline void weigh_vectors(
    const Values& values, int64_t d, const float* weights, int64_t from, int64_t to, float* acc, int64_t padded_dim) {
    auto pace = values.pace();
    vf sums[NQ][NV];
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) sums[i][v] = load(acc + i * padded_dim + v * W);
    for (int64_t key = from; key < to; key++) {
        const auto row = values.row(key);
        if (NV > 1) pace.steps(Values::STEP);
        // Few registers: the weights are kept, not the values.
        vf weight[NQ], x[NV];
        if (W == 8 && Values::STEP != 0) {
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) weight[i] = set1(weights[i * PARTITION + key]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                x[v] = Values::vector(row, d + v * W);
#pragma GCC unroll 8
                for (int i = 0; i < NQ; i++) sums[i][v] = fma(weight[i], x[v], sums[i][v]);
            }
        } else {
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                x[v] = Values::vector(row, d + v * W);
                if (W == 16) x[v] = in_register(x[v]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < NQ; i++) {
                weight[i] = set1(weights[i * PARTITION + key]);
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) sums[i][v] = fma(weight[i], x[v], sums[i][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(acc + i * padded_dim + v * W, sums[i][v]);
}

template <int NQ, class Values>
static inline void weigh_queries(
    const Values& values, const float* weights, int64_t from, int64_t to, float* acc, int64_t padded_dim) {
    int64_t d = 0;
    for (; d + 4 * W <= padded_dim; d += 4 * W)
        weigh_vectors<NQ, 4>(values, d, weights, from, to, acc + d, padded_dim);
    for (; d < padded_dim; d += W) weigh_vectors<NQ, 1>(values, d, weights, from, to, acc + d, padded_dim);
}

}  // namespace paged
}  // namespace ENGINE_ISA
