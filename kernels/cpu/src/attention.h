// Causal grouped-query attention over pages.
//
// What a query gets depends on its own values and on those of the keys it sees, by their positions, and on nothing else:
// not on how its row is cut into tiles, on neighbours, on threads or on pages. So the arithmetic is fixed:
//
//   score      a dot product in 8 lanes (dimension d in lane d % 8, ascending), which are summed as vec.h sums eights;
//              int8: the exact sum of products of codes
//   partition  keys [256 i, 256 i + 256): the largest score m, weights e^(score - m), their sum l in W lanes by position,
//              and acc = sum of weight * value, keys ascending
//   context    (m, l, acc) of the partitions, merged in ascending order
//
// Two ways to it give the same bits. Few queries (decoding) read keys and values straight from the pages. Many (prefill)
// share a converted copy: keys transposed in panels, values in blocks.
#pragma once
#include <float.h>

#include "abi.h"
#include "packing.h"
#include "pool.h"
#include "rotary.h"
#include "vec.h"

namespace ENGINE_ISA {
namespace paged {

constexpr int64_t PARTITION = 256;
// Keys of a transposed panel.
constexpr int64_t PANEL = 2 * W;
// Up to so many queries of a tile go the direct way; the other way has about so many.
constexpr int64_t DIRECT_QUERIES = 24;
constexpr int64_t MIN_TILE_QUERIES = 24, MAX_TILE_QUERIES = 96;
// Floats in a block of converted values: half of a small first-level cache.
constexpr int64_t VALUE_BLOCK = 4096;
// Queries that a kernel has in registers at once.
constexpr int MAX_QUERIES = W == 16 ? 6 : 3;
constexpr int MAX_PANEL_QUERIES = 3;
// How far a stream is ahead, besides a block of values; in how many pieces of memory; and what such a block is.
constexpr int64_t STREAM_LEAD_BYTES = 16 << 10, STREAM_RANGES = 512, STREAM_BLOCK_BYTES = 16 << 10;
// The longest run of heads side by side that are worked on together.
constexpr int64_t MAX_RUN_BYTES = 4096;
// The largest score of no keys.
constexpr float LOWEST = -FLT_MAX;

static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- elements of the pages ---------------------------------------------------------------------------------------------

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

// --- tiles: how the queries are cut and shared out ---------------------------------------------------------------------

// Consecutive tokens of a row, and the keys that some of them see.
struct Tile {
    int64_t row, num_tokens;
    int64_t token;     // of the step
    int64_t position;  // in the context; both of the first token
    int64_t begin, end;
    int64_t first_partition, num_partitions;
    bool direct;
    // An item, what a worker takes at once, is `heads` KV heads over `chunk` partitions. With several chunks partitions
    // leave their states at `slots` (floats, in shared memory), num_partitions * num_kv_heads of them.
    int64_t heads, chunk;
    int64_t first_item, num_items;
    int64_t slots;
};

// Sums over all tiles.
struct Totals {
    int64_t items, slot_floats, cost, units, max_queries, max_heads, max_heads_queries;
};

struct Cut {
    int64_t group, padded_dim;
    int64_t tile_tokens;
    int64_t chunk_cost;
    bool heads_together;
    int64_t row_bytes;  // of a head in the pages
};

// A query tile's running maxima, sums and weighted values.
struct State {
    float* acc;  // [queries, padded_dim]
    float* top;
    float* sum;
};

ENGINE_INLINE int64_t state_floats(const Cut& cut, int64_t queries) {
    return queries * cut.padded_dim + 2 * round_up(queries, W);
}

ENGINE_INLINE State state_at(float* data, const Cut& cut, int64_t queries) {
    float* top = data + queries * cut.padded_dim;
    return {data, top, top + round_up(queries, W)};
}

// Walks through the tiles in order.
struct TileWalk {
    const AttentionArgs& args;
    const Cut& cut;
    int64_t num_rows;
    int64_t row = -1, next_token = 0, row_end = 0, tile_tokens = 0;
    Totals totals = {};
    Tile tile = {};

    TileWalk(const AttentionArgs& args, const Cut& cut, int64_t num_rows) : args(args), cut(cut), num_rows(num_rows) {}

    bool next() {
        while (next_token == row_end) {
            if (++row == num_rows) return false;
            row_end += args.q_lens[row];
            // Tiles of a row are about equal.
            const int64_t tokens = args.q_lens[row], tiles = ceil_div(tokens, cut.tile_tokens);
            tile_tokens = tiles == 0 ? 0 : ceil_div(tokens, tiles);
        }
        tile.row = row;
        tile.token = next_token;
        tile.num_tokens = smaller(tile_tokens, row_end - next_token);
        tile.position = args.kv_lens[row] - (row_end - next_token);
        next_token += tile.num_tokens;
        tile.begin = args.window > 0 ? larger(0, tile.position - args.window + 1) : 0;
        tile.end = larger(tile.begin, tile.position + tile.num_tokens);
        tile.first_partition = tile.begin / PARTITION;
        tile.num_partitions = ceil_div(tile.end, PARTITION) - tile.first_partition;
        const int64_t queries = tile.num_tokens * cut.group;
        tile.direct = queries <= DIRECT_QUERIES && args.head_dim % W == 0;
        tile.heads = cut.heads_together && tile.direct ? args.num_kv_heads : 1;
        // Reading a key costs about as much as two queries' work with it.
        const int64_t partition_cost = (queries + 2) * tile.heads;
        tile.chunk = smaller(larger(tile.num_partitions, 1), larger(1, cut.chunk_cost / partition_cost));
        tile.first_item = totals.items;
        tile.num_items = args.num_kv_heads / tile.heads * larger(1, ceil_div(tile.num_partitions, tile.chunk));
        tile.slots = totals.slot_floats;
        totals.items += tile.num_items;
        if (tile.chunk < tile.num_partitions)
            totals.slot_floats += state_floats(cut, queries) * tile.num_partitions * args.num_kv_heads;
        totals.cost += partition_cost * tile.num_partitions * (args.num_kv_heads / tile.heads);
        totals.units += larger(1, tile.num_partitions);
        totals.max_queries = larger(totals.max_queries, queries);
        totals.max_heads = larger(totals.max_heads, tile.heads);
        totals.max_heads_queries = larger(totals.max_heads_queries, queries * tile.heads);
        return true;
    }
};

static inline Cut make_cut(const AttentionArgs& args, const Extent& extent, int workers, int64_t row_bytes) {
    Cut cut;
    cut.row_bytes = row_bytes;
    cut.group = args.num_heads / args.num_kv_heads;
    cut.padded_dim = round_up(args.head_dim, W);
    const int64_t share = extent.num_tokens * args.num_heads / (4 * workers);
    const int64_t tile_queries = smaller(MAX_TILE_QUERIES, larger(MIN_TILE_QUERIES, share));
    cut.tile_tokens = larger(1, tile_queries / cut.group);
    cut.chunk_cost = INT64_MAX;
    // Heads side by side are read as one run.
    cut.heads_together = args.kv.head_stride == row_bytes && row_bytes * args.num_kv_heads <= MAX_RUN_BYTES;
    if (workers > 1) {
        TileWalk walk(args, cut, extent.num_rows);
        while (walk.next()) {}
        cut.chunk_cost = walk.totals.cost / (workers * 8);
        cut.heads_together = cut.heads_together && walk.totals.units >= workers * 4;
    }
    return cut;
}

// --- reading ahead --------------------------------------------------------------------------------------------------------

// Asks for lines of memory some time before the direct way gets there, in the order it reads them: the keys of a
// partition, then its values. Without it a core waits for memory most of the time. Lines are asked for one by one
// between computations (Asking): a burst would hold up the loads of what is at hand.
struct Stream {
    struct Part {
        const char* keys;
        const int64_t* places;
        int64_t begin, end;
        int64_t run_bytes;  // of one position
        int64_t lead;       // in positions
    };
    struct Range {
        const char *line, *end;
    };

    Range* ranges = nullptr;  // STREAM_RANGES of them: what may be asked for
    Range *next = nullptr, *last = nullptr;
    Range now = {};
    int64_t half_stride = 0;
    Part part = {}, fed = {};
    bool idle = true, values = false;
    int64_t key = 0, owed = 0;

    // What to read after what was fed before.
    void feed(const Part& more) {
        if (!idle) {
            fed = more;
            return;
        }
        part = more;
        idle = values = false;
        key = part.begin;
        owed = part.lead;
    }

    // The next n positions may be asked for.
    void grant(int64_t n) {
        finish();
        next = last = ranges;
        n += owed;
        owed = 0;
        while (n > 0 && !idle && last < ranges + STREAM_RANGES) {
            if (key == part.end && !turn()) break;
            const int64_t first = part.places[key], stop = smaller(part.end, key + n), from = key;
            int64_t end = first;
            // Positions one after the other in memory are one range.
            for (; key < stop && part.places[key] == end; key++) end += part.run_bytes;
            n -= key - from;
            const char* data = part.keys + (values ? half_stride : 0);
            *last++ = {(const char*)((uintptr_t)(data + first) & ~(uintptr_t)63), data + end};
        }
    }

    // To the values, or to the next partition.
    bool turn() {
        if (values) {
            if (fed.places == nullptr) {
                idle = true;
                return false;
            }
            part = fed;
            fed.places = nullptr;
        }
        values = !values;
        key = part.begin;
        return true;
    }

    void finish();
};

// A stream in the hands of a kernel.
struct Asking {
    Stream& stream;
    Stream::Range now;
    Stream::Range *next, *last;

    inline __attribute__((always_inline)) explicit Asking(Stream& stream)
        : stream(stream), now(stream.now), next(stream.next), last(stream.last) {}
    inline __attribute__((always_inline)) ~Asking() {
        stream.now = now;
        stream.next = next;
    }
    inline __attribute__((always_inline)) bool step() {
        if (now.line >= now.end) {
            if (next == last) return false;
            now = *next++;
        }
        __builtin_prefetch(now.line, 0, 2);
        now.line += 64;
        return true;
    }
    inline __attribute__((always_inline)) void steps(int n) {
        for (int i = 0; i < n; i++) step();
    }
};

inline void Stream::finish() {
    Asking asking(*this);
    while (asking.step()) {}
}

// --- one worker's memory -----------------------------------------------------------------------------------------------

struct Scratch {
    float* queries;       // [item heads, tile queries, head_dim]: times scale; or int8 codes
    float* factors;       // [item heads, tile queries]: of codes, scale included
    int32_t* starts;      // [item heads, tile queries]: dot4_start of codes
    float* states;        // of the context so far, one per item head
    float* parts;         // of a partition, one per item head
    float* weights;       // [item heads, tile queries, PARTITION]: scores, then weights
    float* panel;         // [head_dim, PANEL]; or [head_dim / 4, PANEL] of four codes each
    float* values;        // VALUE_BLOCK
    float* scales;        // [PARTITION]: of keys or values
    int64_t* places;      // [2, PARTITION]: offsets of keys in the pages, of one partition and of the next
    int32_t* ranges;      // [2, tile queries]: the keys of the partition that a query sees
    Stream::Range* stream_ranges;  // STREAM_RANGES
};

struct Memory {
    char* data;
    size_t used;

    template <class T> void take(T*& target, int64_t count) {
        if (data != nullptr) target = (T*)(data + used);
        used += (size_t)round_up(count * (int64_t)sizeof(T), 64);
    }
};

// Lays the scratch out in data; returns its bytes.
static inline size_t lay_out(Scratch& scratch, char* data, const AttentionArgs& args, const Cut& cut, const Totals& totals) {
    Memory memory{data, 0};
    const int64_t heads = totals.max_heads, all = totals.max_heads_queries, most = totals.max_queries;
    // Every head's state has its own padding.
    const int64_t states = all * cut.padded_dim + 2 * heads * round_up(most, W);
    memory.take(scratch.queries, all * args.head_dim);
    memory.take(scratch.factors, all);
    memory.take(scratch.starts, all);
    memory.take(scratch.states, states);
    memory.take(scratch.parts, states);
    memory.take(scratch.weights, all * PARTITION);
    memory.take(scratch.panel, args.head_dim * PANEL);
    memory.take(scratch.values, VALUE_BLOCK);
    memory.take(scratch.scales, PARTITION);
    memory.take(scratch.places, 2 * PARTITION);
    memory.take(scratch.ranges, 2 * most);
    memory.take(scratch.stream_ranges, STREAM_RANGES);
    return memory.used;
}

// --- scores ------------------------------------------------------------------------------------------------------------

// A pointer that the compiler knows nothing of: it would put several into a vector, and take them out again.
template <class T> ENGINE_INLINE T* hidden(T* pointer) {
#if defined(__GNUC__)
    asm("" : "+r"(pointer));
#endif
    return pointer;
}

// Lines of an element's type that go by during 1 / (dim / 4) of W keys' scores, or 4 * W dimensions of a key's values.
template <class Element> constexpr int STREAM_STEP = larger(1, W * (int)sizeof(Element) / 16);

// Scores of W keys and NQ queries, straight from the pages. queries: [dim / 8, NQ, 8].
template <int TYPE, int NQ>
static inline void direct_scores(
    const char* keys, const int64_t* places, const float* queries, int64_t dim, float* out, Stream& stream) {
    using Element = typename Stored<TYPE>::Element;
    Asking asking(stream);
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
            asking.steps(STREAM_STEP<Element>);
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
    const char* keys, const int64_t* places, int64_t dim, int32_t* panel, Stream& stream) {
    Asking asking(stream);
    for (int64_t half = 0; half < PANEL; half += W) {
        map_vectors(dim / 4, [&](int64_t d, int n) {
            asking.steps(W);
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

// --- weighted values ---------------------------------------------------------------------------------------------------

// Values as they are in the pages.
template <int TYPE> struct PageValues {
    const char* data;
    const int64_t* places;
    Stream& stream;

    using Pace = Asking;
    static constexpr int STEP = STREAM_STEP<typename Stored<TYPE>::Element>;
    inline __attribute__((always_inline)) Pace pace() const { return Asking(stream); }
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
    inline __attribute__((always_inline)) const float* row(int64_t key) const { return data + (key - first) * padded_dim; }
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
            for (int v = 0; v < NV; v++) x[v] = W == 16 ? in_register(Values::vector(row, d + v * W)) : Values::vector(row, d + v * W);
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

// --- a tile ------------------------------------------------------------------------------------------------------------

template <int N> struct Count {
    static constexpr int value = N;
};

// Calls function with n, in 1..MAX, as a constant.
template <int MAX, class Function> ENGINE_INLINE void with_count(int64_t n, const Function& function) {
    if constexpr (MAX > 1) {
        if (n < MAX) {
            with_count<MAX - 1>(n, function);
            return;
        }
    }
    function(Count<MAX>());
}

// The size of about equal pieces of n, none above most.
ENGINE_INLINE int64_t piece_size(int64_t n, int64_t most) { return n <= most ? n : ceil_div(n, ceil_div(n, most)); }

// Calls function(first, Count) for pieces of n.
template <int MAX, class Function> ENGINE_INLINE void in_pieces(int64_t n, int64_t step, const Function& function) {
    for (int64_t i = 0; i < n; i += step)
        with_count<MAX>(smaller(step, n - i), [&](auto count) { function(i, count); });
}

// What a worker carries from item to item.
struct Progress {
    Stream stream;
    int buffer = 0;  // of scratch.places
    bool fed = false;  // the next item's first partition: it is in the other buffer
};

// One item: some KV heads of a tile over some partitions.
template <int TYPE> struct TileWork {
    const AttentionArgs& args;
    const Cut& cut;
    const Tile tile;
    const Scratch& scratch;
    const int64_t num_queries, dim;
    const int64_t pieces;  // queries that go together
    int64_t first_head = 0, from = 0, to = 0;  // KV head, partitions
    // Of the partition: its first position, and the keys of it that the tile sees.
    int64_t start = 0, begin = 0, end = 0;
    const int64_t* places = nullptr;
    int32_t *begins, *ends;

    TileWork(const AttentionArgs& args, const Cut& cut, const Tile& tile, const Scratch& scratch, int64_t item)
        : args(args), cut(cut), tile(tile), scratch(scratch), num_queries(tile.num_tokens * cut.group),
          dim(args.head_dim), pieces(piece_size(num_queries, MAX_QUERIES)), begins(scratch.ranges), ends(scratch.ranges + num_queries) {
        const int64_t number = item - tile.first_item, head_items = args.num_kv_heads / tile.heads;
        first_head = number % head_items * tile.heads;
        from = tile.first_partition + number / head_items * tile.chunk;
        to = smaller(from + tile.chunk, tile.first_partition + tile.num_partitions);
    }

    bool split() const { return tile.chunk < tile.num_partitions; }
    const char* keys(int64_t h) const { return (const char*)args.kv.data + (first_head + h) * args.kv.head_stride; }
    const char* values(int64_t h) const { return keys(h) + args.kv.half_stride; }
    float* weights(int64_t h) const { return scratch.weights + h * num_queries * PARTITION; }
    State state(float* states, int64_t h) const {
        return state_at(states + h * state_floats(cut, num_queries), cut, num_queries);
    }
    // A partition's state: where the merge will look for it, if that comes later.
    State part(float* shared, int64_t partition, int64_t h) const {
        if (!split()) return state(scratch.parts, h);
        return state(shared + tile.slots, (partition - tile.first_partition) * args.num_kv_heads + first_head + h);
    }

    // Query number t * group + g is query head g of the KV head for token t.
    void gather_queries() const {
        for (int64_t h = 0; h < tile.heads; h++) {
            for (int64_t i = 0; i < num_queries; i++) {
                const int64_t token = tile.token + i / cut.group, head = (first_head + h) * cut.group + i % cut.group;
                const float* source = args.q + token * args.q_stride + head * dim;
                const int64_t number = h * num_queries + i;
                if constexpr (TYPE == KV_I8) {
                    int8_t* codes = (int8_t*)scratch.queries + number * dim;
                    scratch.factors[number] = quantise_i8(source, dim, codes) * (float)args.scale;
                    int32_t sum = 0;
                    for (int64_t d = 0; d < dim; d++) sum += codes[d];
                    scratch.starts[number] = dot4_start(sum);
                } else {
                    const vf scale = set1((float)args.scale);
                    float* target = scratch.queries + h * num_queries * dim;
                    if (tile.direct) {
                        // [pieces, dim / 8, queries of the piece, 8]
                        const int64_t first = i / pieces * pieces, width = smaller(pieces, num_queries - first);
                        target += first * dim + (i - first) * 8;
                        for (int64_t d = 0; d < dim; d += 8)
                            for (int64_t e = 0; e < 8; e++) target[d * width + e] = source[d + e] * (float)args.scale;
                    } else {
                        target += i * dim;
                        map_vectors(dim, [&](int64_t d, int n) {
                            store_upto(target + d, mul(load_upto(source + d, n), scale), n);
                        });
                    }
                }
            }
        }
    }

    void clear(const State& state) const {
        clear_acc(state);
        for (int64_t i = 0; i < num_queries; i += W) {
            store(state.top + i, set1(LOWEST));
            store(state.sum + i, zero());
        }
    }

    void clear_acc(const State& state) const {
        for (int64_t i = 0; i < num_queries * cut.padded_dim; i += W) store(state.acc + i, zero());
    }

    // The keys of a partition that the tile sees.
    int64_t first_key(int64_t partition) const { return larger(0, tile.begin - partition * PARTITION); }
    int64_t end_key(int64_t partition) const { return smaller(PARTITION, tile.end - partition * PARTITION); }

    // Where a partition's keys are. What the tile does not see, in panels that it sees some of, is told to be where
    // its neighbour is: reading that does no harm.
    void locate(int64_t partition, int64_t* out) const {
        const int32_t* table = args.page_table + tile.row * args.page_table_stride;
        const int64_t first = first_key(partition), last = end_key(partition);
        const int64_t position = partition * PARTITION + first;
        int64_t page = position / args.kv.page_size, offset = position % args.kv.page_size;
        for (int64_t key = first; key < last; page++, offset = 0) {
            const int64_t stop = smaller(last, key + args.kv.page_size - offset);
            int64_t place = table[page] * args.kv.page_stride + offset * args.kv.token_stride;
            for (; key < stop; key++, place += args.kv.token_stride) out[key] = place;
        }
        for (int64_t key = first / PANEL * PANEL; key < first; key++) out[key] = out[first];
        for (int64_t key = last; key % PANEL != 0; key++) out[key] = out[last - 1];
    }

    void enter(int64_t partition) {
        start = partition * PARTITION;
        begin = first_key(partition);
        end = end_key(partition);
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t position = tile.position + i / cut.group - start;
            const int64_t seen = args.window > 0 ? position - args.window + 1 : 0;
            ends[i] = (int32_t)larger(0, smaller(position + 1, PARTITION));
            begins[i] = (int32_t)smaller(larger(seen, 0), PARTITION);
        }
    }

    bool sees(int64_t query) const { return begins[query] < ends[query]; }

    // --- the stream of the direct way

    int64_t run_bytes() const { return tile.heads * cut.row_bytes; }
    // Keys whose values are taken head by head before the next ones.
    int64_t stream_block() const { return smaller(64, larger(16, STREAM_BLOCK_BYTES / run_bytes() / 16 * 16)); }

    void feed(Progress& progress, int64_t partition) const {
        int64_t* out = scratch.places + (1 - progress.buffer) * PARTITION;
        locate(partition, out);
        const int64_t lead = stream_block() + STREAM_LEAD_BYTES / run_bytes();
        progress.stream.feed({keys(0), out, first_key(partition), end_key(partition), run_bytes(), lead});
    }

    // --- scores

    void score_direct(int64_t h, int64_t key, Stream& stream) const {
        const float* queries = scratch.queries + h * num_queries * dim;
        float* out = weights(h) + key;
        in_pieces<MAX_QUERIES>(num_queries, pieces, [&](int64_t i, auto count) {
            direct_scores<TYPE, decltype(count)::value>(
                keys(h), places + key, queries + i * dim, dim, out + i * PARTITION, stream);
        });
    }

    void score_panel(int64_t h, int64_t key, Stream& stream) const {
        if constexpr (TYPE == KV_I8) {
            gather_scales(keys(h), places + key, dim, PANEL, scratch.scales + key);
            fill_panel_i8(keys(h), places + key, dim, (int32_t*)scratch.panel, stream);
        } else {
            fill_panel<TYPE>(keys(h), places + key, dim, scratch.panel);
        }
        // Its queries: from some on for the causal mask, up to some for a window.
        int64_t first = 0, last = num_queries;
        while (first < last && ends[first] <= key) first++;
        while (last > first && begins[last - 1] >= key + PANEL) last--;
        if (first == last) return;
        const int64_t number = h * num_queries + first;
        float* out = weights(h) + first * PARTITION + key;
        in_pieces<MAX_PANEL_QUERIES>(last - first, piece_size(last - first, MAX_PANEL_QUERIES), [&](int64_t i, auto count) {
            constexpr int NQ = decltype(count)::value;
            const int64_t query = number + i;
            if constexpr (TYPE == KV_I8) {
                const int8_t* codes = (const int8_t*)scratch.queries + query * dim;
                panel_scores_i8<NQ>(
                    (const int32_t*)scratch.panel, codes, scratch.starts + query, scratch.factors + query,
                    scratch.scales + key, dim, out + i * PARTITION);
            } else {
                panel_scores<NQ>(scratch.panel, scratch.queries + query * dim, dim, out + i * PARTITION);
            }
        });
    }

    // Scores become weights.
    void soften(int64_t h, const State& part) const {
        for (int64_t i = 0; i < num_queries; i++) {
            if (!sees(i)) {
                part.top[i] = LOWEST;
                part.sum[i] = 0.0f;
                continue;
            }
            float* row = weights(h) + i * PARTITION;
            const int64_t first = begins[i] / W * W, last = round_up(ends[i], W);
            for (int64_t key = first; key < begins[i]; key++) row[key] = -INFINITY;
            for (int64_t key = ends[i]; key < last; key++) row[key] = -INFINITY;
            // vmax passes NaN over; the weight of NaN is NaN all the same.
            vf tops = set1(LOWEST);
            for (int64_t key = first; key < last; key += W) tops = vmax(load(row + key), tops);
            const float top = hmax(tops);
            vf sums = zero();
            for (int64_t key = first; key < last; key += W) {
                const vf weight = weight_of(sub(load(row + key), set1(top)));
                sums = add(sums, weight);
                store(row + key, weight);
            }
            part.top[i] = top;
            part.sum[i] = hsum(sums);
        }
    }

    // --- values

    // The weights of int8 values from first on, a multiple of W, are for codes from now on.
    void apply_scales(int64_t h, int64_t first, int64_t last) const {
        if constexpr (TYPE == KV_I8) {
            const int64_t from = larger(first, begin / W * W);
            gather_scales(values(h), places + from, dim, round_up(last, W) - from, scratch.scales + from);
            for (int64_t i = 0; i < num_queries; i++) {
                float* row = weights(h) + i * PARTITION;
                for (int64_t key = larger(first, begins[i] / W * W); key < smaller(last, ends[i]); key += W)
                    store(row + key, mul(load(row + key), load(scratch.scales + key)));
            }
        }
    }

    template <class Values> void weigh(const Values& source, int64_t h, int64_t first, int64_t last, float* acc) const {
        in_pieces<MAX_QUERIES>(num_queries, pieces, [&](int64_t query, auto count) {
            constexpr int NQ = decltype(count)::value;
            // What all of them see goes together; at the edges each has its own keys. A weight of 0 would not do for
            // those it does not see: 0 times NaN is NaN.
            int64_t low = first, high = last;
            for (int64_t i = query; i < query + NQ; i++) {
                low = larger(low, begins[i]);
                high = smaller(high, ends[i]);
            }
            low = smaller(low, last);
            high = larger(low, high);
            const auto alone = [&](int64_t lower, int64_t upper) {
                for (int64_t i = query; i < query + NQ; i++) {
                    const int64_t key = larger(lower, begins[i]), stop = smaller(upper, ends[i]);
                    if (key < stop)
                        weigh_queries<1>(source, weights(h) + i * PARTITION, key, stop, acc + i * cut.padded_dim, cut.padded_dim);
                }
            };
            if (first < low) alone(first, low);
            if (low < high)
                weigh_queries<NQ>(
                    source, weights(h) + query * PARTITION, low, high, acc + query * cut.padded_dim, cut.padded_dim);
            if (high < last) alone(high, last);
        });
    }

    void weigh_direct(int64_t h, int64_t first, int64_t last, float* acc, Stream& stream) const {
        weigh(PageValues<TYPE>{values(h), places, stream}, h, first, last, acc);
    }

    void weigh_block(int64_t h, int64_t first, int64_t last, float* acc) const {
        for (int64_t key = first; key < last; key++) {
            float* target = scratch.values + (key - first) * cut.padded_dim;
            const char* row = values(h) + places[key];
            map_vectors(dim, [&](int64_t d, int n) {
                store(target + d, load_elements<TYPE>(row + d * (int64_t)sizeof(typename Stored<TYPE>::Element), n));
            });
        }
        weigh(BlockValues{scratch.values, first, cut.padded_dim}, h, first, last, acc);
    }

    // --- states

    // into = both together; queries that see nothing of the partition keep what they have.
    void merge(const State& into, const State& part) const {
        for (int64_t first = 0; first < num_queries; first += W) {
            const vf old_top = load(into.top + first), part_top = load(part.top + first);
            const vf top = vmax(old_top, part_top);
            const vf kept = weight_of(sub(old_top, top)), taken = weight_of(sub(part_top, top));
            float keep[W], take[W];
            store(keep, kept);
            store(take, taken);
            store(into.top + first, top);
            store(into.sum + first, fma(load(part.sum + first), taken, mul(load(into.sum + first), kept)));
            for (int64_t i = first; i < smaller(first + W, num_queries); i++) {
                if (!sees(i)) continue;
                float* acc = into.acc + i * cut.padded_dim;
                const float* other = part.acc + i * cut.padded_dim;
                const vf a = set1(keep[i - first]), b = set1(take[i - first]);
                for (int64_t d = 0; d < cut.padded_dim; d += W)
                    store(acc + d, fma(load(other + d), b, mul(load(acc + d), a)));
            }
        }
    }

    void write(int64_t h, const State& state) const {
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t token = tile.token + i / cut.group, head = (first_head + h) * cut.group + i % cut.group;
            float* out = args.out + token * args.out_stride + head * dim;
            const float* acc = state.acc + i * cut.padded_dim;
            const vf inverse = set1(1.0f / state.sum[i]);
            map_vectors(dim, [&](int64_t d, int n) { store_upto(out + d, mul(load(acc + d), inverse), n); });
        }
    }

    // --- the item

    // next_item: called before the last partition; says what to read after it by feeding the stream.
    template <class Function> void run(Progress& progress, float* shared, const Function& next_item) {
        gather_queries();
        if (!split())
            for (int64_t h = 0; h < tile.heads; h++) clear(state(scratch.states, h));
        if (!progress.fed && from < to) feed_or_locate(progress, from);
        progress.fed = false;
        for (int64_t partition = from; partition < to; partition++) {
            progress.buffer = 1 - progress.buffer;
            places = scratch.places + progress.buffer * PARTITION;
            enter(partition);
            if (partition + 1 < to) feed_or_locate(progress, partition + 1);
            else next_item();
            if (tile.direct) run_direct(progress.stream, shared, partition);
            else run_panels(progress.stream, shared, partition);
            if (split()) continue;
            for (int64_t h = 0; h < tile.heads; h++) merge(state(scratch.states, h), part(shared, partition, h));
        }
        if (split()) return;
        for (int64_t h = 0; h < tile.heads; h++) write(h, state(scratch.states, h));
    }

    void feed_or_locate(Progress& progress, int64_t partition) const {
        if (tile.direct) feed(progress, partition);
        else locate(partition, scratch.places + (1 - progress.buffer) * PARTITION);
    }

    void run_direct(Stream& stream, float* shared, int64_t partition) const {
        constexpr int64_t STEP = TYPE == KV_I8 ? PANEL : W;
        for (int64_t key = begin / STEP * STEP; key < end; key += STEP) {
            stream.grant(smaller(key + STEP, end) - larger(key, begin));
            for (int64_t h = 0; h < tile.heads; h++) {
                if constexpr (TYPE == KV_I8) score_panel(h, key, stream);
                else score_direct(h, key, stream);
            }
            stream.finish();
        }
        for (int64_t h = 0; h < tile.heads; h++) {
            soften(h, part(shared, partition, h));
            clear_acc(part(shared, partition, h));
        }
        const int64_t step = stream_block();
        for (int64_t key = begin / step * step; key < end; key += step) {
            const int64_t first = larger(key, begin), last = smaller(key + step, end);
            stream.grant(last - first);
            for (int64_t h = 0; h < tile.heads; h++) {
                apply_scales(h, key, last);
                weigh_direct(h, first, last, part(shared, partition, h).acc, stream);
            }
            stream.finish();
        }
    }

    void run_panels(Stream& stream, float* shared, int64_t partition) const {
        for (int64_t h = 0; h < tile.heads; h++) {
            for (int64_t key = begin / PANEL * PANEL; key < end; key += PANEL) score_panel(h, key, stream);
            const State state = part(shared, partition, h);
            soften(h, state);
            clear_acc(state);
            const int64_t step = VALUE_BLOCK / cut.padded_dim / W * W;
            for (int64_t key = begin / step * step; key < end; key += step) {
                apply_scales(h, key, smaller(key + step, end));
                weigh_block(h, larger(key, begin), smaller(key + step, end), state.acc);
            }
        }
    }

    // The item was split: the states of its partitions come together.
    void merge_parts(float* shared) {
        const State total = state(scratch.states, 0);
        clear(total);
        for (int64_t i = 0; i < tile.num_partitions; i++) {
            enter(tile.first_partition + i);
            merge(total, part(shared, tile.first_partition + i, 0));
        }
        write(0, total);
    }
};

template <int TYPE> static inline void attend(const AttentionArgs& args, const Extent& extent, Worker& worker) {
    const int64_t scale_bytes = TYPE == KV_I8 ? (int64_t)sizeof(float) : 0;
    const int64_t row_bytes = args.head_dim * (int64_t)sizeof(typename Stored<TYPE>::Element) + scale_bytes;
    const Cut cut = make_cut(args, extent, worker.count, row_bytes);
    TileWalk all(args, cut, extent.num_rows);
    while (all.next()) {}
    const int64_t num_items = all.totals.items, slot_floats = all.totals.slot_floats;
    Scratch scratch;
    const size_t bytes = lay_out(scratch, nullptr, args, cut, all.totals);
    lay_out(scratch, (char*)worker.scratch(bytes), args, cut, all.totals);
    float* shared = slot_floats == 0 ? nullptr : (float*)worker.shared(sizeof(float) * (size_t)slot_floats);

    TileWalk walk(args, cut, extent.num_rows);
    const auto find = [&](int64_t item) {
        while (walk.totals.items <= item) walk.next();
        return TileWork<TYPE>(args, cut, walk.tile, scratch, item);
    };
    Progress progress;
    progress.stream.ranges = scratch.stream_ranges;
    progress.stream.half_stride = args.kv.half_stride;
    int64_t item = worker.next(num_items, 1);
    while (item >= 0) {
        int64_t next = 0;
        find(item).run(progress, shared, [&] {
            // Taking an item early is for when there are plenty.
            if (num_items - item <= 3 * worker.count) return;
            next = worker.next(num_items, 1);
            if (next < 0) return;
            const TileWork<TYPE> work = find(next);
            if (!work.tile.direct || work.from >= work.to) return;
            work.feed(progress, work.from);
            progress.fed = true;
        });
        item = next == 0 ? worker.next(num_items, 1) : next;
    }
    if (slot_floats == 0) return;
    worker.barrier();
    TileWalk counted(args, cut, extent.num_rows), again(args, cut, extent.num_rows);
    int64_t num_merges = 0;
    while (counted.next()) num_merges += counted.tile.chunk < counted.tile.num_partitions ? args.num_kv_heads : 0;
    int64_t number = 0, mine = worker.next(num_merges, 1);
    while (again.next()) {
        if (again.tile.chunk >= again.tile.num_partitions) continue;
        for (int64_t kv_head = 0; kv_head < args.num_kv_heads; kv_head++) {
            if (number++ != mine) continue;
            TileWork<TYPE> work(args, cut, again.tile, scratch, again.tile.first_item);
            work.first_head = kv_head;
            work.merge_parts(shared);
            mine = worker.next(num_merges, 1);
        }
    }
}

}  // namespace paged

inline void attention(const AttentionArgs& args, const Extent& extent, Worker& worker) {
    switch (args.kv.type) {
        case KV_F32: return paged::attend<KV_F32>(args, extent, worker);
        case KV_F16: return paged::attend<KV_F16>(args, extent, worker);
        case KV_BF16: return paged::attend<KV_BF16>(args, extent, worker);
        case KV_I8: return paged::attend<KV_I8>(args, extent, worker);
    }
}

}  // namespace ENGINE_ISA
