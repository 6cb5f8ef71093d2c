// Causal grouped-query attention over pages.
//
// What a query gets depends on its own values and on those of the keys it sees, by their positions, and on nothing
// else: not on how its row is cut into tiles, on neighbours, on threads or on pages. So the arithmetic is fixed:
//
//   score      a dot product in 8 lanes (dimension d in lane d % 8, ascending), which are summed as vec.h sums eights;
//              int8: the exact sum of products of codes
//   partition  of keys [256 i, 256 i + 256) those seen: the largest score m, weights e^(score - m), their sum l in W
//              lanes by position, and acc = sum of weight * value, keys ascending; int8: in each 64 keys, weights
//              times scales are rounded to 15 or 16 bits of the largest of them, for an exact sum
//   context    (m, l, acc) of the partitions, merged in ascending order
//
// A token of a tree gets what it would get if the keys of its path, from the root to itself, came after its row's
// context: their scores go to these places, and their values are weighed apart, node by node.
//
// Two ways to it give the same bits. Few queries (decoding) read keys and values straight from the pages. Many
// (prefill) share a converted copy: keys transposed in panels, values in blocks.
#pragma once
#include <float.h>

#include "abi.h"
#include "attention_kernels.h"
#include "attention_prefetch.h"
#include "attention_tiles.h"
#include "packing.h"
#include "pool.h"
#include "rotary.h"
#include "vec.h"

namespace ENGINE_ISA {
namespace paged {

// Floats in a block of converted values: half of a small first-level cache.
constexpr int64_t VALUE_BLOCK = 4096;
// How far the direct way reads ahead, besides a block of values, and about what such a block is.
constexpr int64_t PREFETCH_LEAD_BYTES = 16 << 10, VALUE_RUN_BYTES = 16 << 10;
// The largest score of no keys.
constexpr float LOWEST = -FLT_MAX;

// --- a worker's memory

struct Scratch {
    float* queries;   // [item heads, tile queries, head_dim]: times scale; or int8 codes
    float* factors;   // [item heads, tile queries]: of codes, scale included
    int32_t* starts;  // [item heads, tile queries]: dot4_start of codes
    float* states;    // of the context so far, one per item head
    float* parts;     // of a partition, one per item head
    float* weights;   // [item heads, tile queries, PARTITION]: scores, then weights
    float* panel;     // [head_dim, PANEL]; or [head_dim / 4, PANEL] of four codes each
    float* values;    // VALUE_BLOCK
    float* scales;    // [PARTITION]: of keys or values
    float* value_scales;  // [item heads, CODE_BLOCK]
    int32_t* words;       // [item heads, tile queries, BLOCK_WORDS]: weights of int8 values
    float* units;         // [item heads, tile queries]: what 1 of these stands for
    int64_t* places;  // [2, PARTITION]: offsets of keys in the pages, of one partition and of the next
    int32_t* ranges;  // [2, tile queries]: the keys of the partition that a query sees
    PrefetchStream::Range* stream_ranges;  // PREFETCH_RANGES
    // Of trees; tokens of the row are in the order of the pages.
    int16_t* paths;       // [tile tokens, tokens of the row]: the token at each depth on the way to a node
    int64_t* own_places;  // [tokens of the row]
    float* own_scores;    // [tile queries, PARTITION]: of the tokens of the row
    float* own_values;    // [tokens of the row, padded_dim]
};

// A group of int8 values, interleaved.
ENGINE_INLINE int64_t group_words(int64_t dim) { return ceil_div(dim, VALUE_DIMS) * (VALUE_VECTORS * W); }

struct Memory {
    char* data;
    size_t used;

    template <class T> void take(T*& target, int64_t count) {
        if (data != nullptr) target = (T*)(data + used);
        used += (size_t)round_up(count * (int64_t)sizeof(T), 64);
    }
};

// Lays the scratch out in data; returns its bytes.
static inline size_t lay_out(
    Scratch& scratch, char* data, const AttentionArgs& args, const Tiling& tiling, const Totals& totals) {
    Memory memory{data, 0};
    const int64_t heads = totals.max_heads, all = totals.max_heads_queries, most = totals.max_queries;
    // Every head's state has its own padding.
    const int64_t states = all * tiling.padded_dim + 2 * heads * round_up(most, W);
    memory.take(scratch.queries, all * args.head_dim);
    memory.take(scratch.factors, all);
    memory.take(scratch.starts, all);
    memory.take(scratch.states, states);
    memory.take(scratch.parts, states);
    memory.take(scratch.weights, all * PARTITION);
    memory.take(scratch.panel, args.head_dim * PANEL);
    memory.take(scratch.values, larger(VALUE_BLOCK, CODE_BLOCK / VALUE_KEYS * group_words(args.head_dim)));
    memory.take(scratch.scales, PARTITION);
    memory.take(scratch.value_scales, heads * CODE_BLOCK);
    memory.take(scratch.words, all * BLOCK_WORDS);
    memory.take(scratch.units, all);
    memory.take(scratch.places, 2 * PARTITION);
    memory.take(scratch.ranges, 2 * most);
    memory.take(scratch.stream_ranges, PREFETCH_RANGES);
    const int64_t nodes = totals.max_tree_tokens;
    memory.take(scratch.paths, most / tiling.group * nodes);
    memory.take(scratch.own_places, round_up(nodes, PANEL));
    memory.take(scratch.own_scores, nodes == 0 ? 0 : most * PARTITION);
    memory.take(scratch.own_values, nodes * tiling.padded_dim);
    return memory.used;
}

// --- a tile

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
    PrefetchStream stream;
    int buffer = 0;    // of scratch.places
    bool fed = false;  // the next item's first partition: it is in the other buffer
};

// One item: some KV heads of a tile over some partitions.
template <int TYPE> struct TileWork {
    const AttentionArgs& args;
    const Tiling& tiling;
    const Tile tile;
    const Scratch& scratch;
    const TreeArgs* const tree;
    const int64_t num_queries, dim;
    const int64_t pieces;                      // queries that go together
    int64_t first_head = 0, from = 0, to = 0;  // KV head, partitions
    // Of the partition: its first position, and the keys of it that the tile sees, but for those of trees.
    int64_t start = 0, begin = 0, end = 0;
    const int64_t* places = nullptr;
    int32_t *begins, *ends;

    TileWork(const AttentionArgs& args, const Tiling& tiling, const Tile& tile, const Scratch& scratch, int64_t item)
        : args(args), tiling(tiling), tile(tile), scratch(scratch), tree(tree_of(args)),
          num_queries(tile.num_tokens * tiling.group), dim(args.head_dim), pieces(piece_size(num_queries, MAX_QUERIES)),
          begins(scratch.ranges), ends(scratch.ranges + num_queries) {
        const int64_t number = item - tile.first_item, head_items = args.num_kv_heads / tile.heads;
        first_head = number % head_items * tile.heads;
        from = tile.first_partition + number / head_items * tile.chunk;
        to = smaller(from + tile.chunk, tile.first_partition + tile.num_partitions);
    }

    const char* keys(int64_t h) const { return (const char*)args.kv.data + (first_head + h) * args.kv.head_stride; }
    const char* values(int64_t h) const { return keys(h) + args.kv.half_stride; }
    float* weights(int64_t h) const { return scratch.weights + h * num_queries * PARTITION; }
    State state(float* states, int64_t h) const {
        return state_at(states + h * state_floats(tiling, num_queries), tiling, num_queries);
    }
    // A partition's state: where the merge will look for it, if that comes later.
    State part(float* shared, int64_t partition, int64_t h) const {
        if (!tile.split()) return state(scratch.parts, h);
        return state(shared + tile.slots, (partition - tile.first_partition) * args.num_kv_heads + first_head + h);
    }

    // Query number t * group + g is query head g of the KV head for token t.
    int64_t token(int64_t query) const { return tile.token + query / tiling.group; }
    int64_t head(int64_t h, int64_t query) const { return (first_head + h) * tiling.group + query % tiling.group; }

    // Few int8 queries meet the keys without a panel.
    bool spread() const { return tile.direct && num_queries <= MAX_DIRECT_CODES && dim % (4 * W) == 0; }

    void gather_queries() const {
        for (int64_t h = 0; h < tile.heads; h++) {
            for (int64_t i = 0; i < num_queries; i++) {
                const float* source = args.q + token(i) * args.q_stride + head(h, i) * dim;
                const int64_t number = h * num_queries + i;
                if constexpr (TYPE == KV_I8) {
                    int8_t* codes = (int8_t*)scratch.queries + number * dim;
                    int8_t own[256];
                    if (spread()) codes = own;
                    scratch.factors[number] = quantise_i8(source, dim, codes) * (float)args.scale;
                    int32_t sum = 0;
                    for (int64_t d = 0; d < dim; d++) sum += codes[d];
                    scratch.starts[number] = dot4_start(sum);
                    if (spread()) spread_codes(codes, dim, (int32_t*)scratch.queries + number * dim);
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
        for (int64_t i = 0; i < num_queries * tiling.padded_dim; i += W) store(state.acc + i, zero());
    }

    // The keys of a partition that the tile sees, but for those of trees.
    int64_t first_key(int64_t partition) const { return larger(0, tile.begin - partition * PARTITION); }
    int64_t end_key(int64_t partition) const { return smaller(PARTITION, tile.ordered - partition * PARTITION); }

    // Where a partition's keys are. What the tile does not see, in panels that it sees some of, is told to be where
    // its neighbour is: reading that does no harm.
    void locate(int64_t partition, int64_t* out) const {
        locate(partition * PARTITION, first_key(partition), end_key(partition), out);
    }

    void locate(int64_t start, int64_t first, int64_t last, int64_t* out) const {
        if (first >= last) return;
        const int32_t* table = args.page_table + tile.row * args.page_table_stride;
        const int64_t position = start + first;
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
        if (tree != nullptr) {
            see_paths();
            return;
        }
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t position = tile.position + i / tiling.group - start;
            const int64_t seen = args.window > 0 ? position - args.window + 1 : 0;
            ends[i] = (int32_t)larger(0, smaller(position + 1, PARTITION));
            begins[i] = (int32_t)smaller(larger(seen, 0), PARTITION);
        }
    }

    // The same with a tree, of whose keys a window hides none.
    void see_paths() {
        if (begin >= end) begin = end = 0;
        const int64_t context = tile.ordered - start;
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t position = context + tree_depth(*tree, token(i), tile.row_tokens);
            const int64_t seen = args.window > 0 ? smaller(context, position - args.window + 1) : 0;
            ends[i] = (int32_t)larger(0, smaller(position + 1, PARTITION));
            begins[i] = (int32_t)smaller(larger(seen, 0), PARTITION);
        }
    }

    bool sees(int64_t query) const { return begins[query] < ends[query]; }

    // --- the stream of the direct way

    int64_t run_bytes() const { return tile.heads * tiling.row_bytes; }
    // Keys whose values are taken head by head before the next ones.
    int64_t stream_block() const {
        return TYPE == KV_I8 ? CODE_BLOCK : smaller(64, larger(16, VALUE_RUN_BYTES / run_bytes() / 16 * 16));
    }

    void feed(Progress& progress, int64_t partition) const {
        int64_t* out = scratch.places + (1 - progress.buffer) * PARTITION;
        locate(partition, out);
        if (first_key(partition) >= end_key(partition)) return;
        const int64_t lead = stream_block() + PREFETCH_LEAD_BYTES / run_bytes();
        progress.stream.feed({keys(0), out, first_key(partition), end_key(partition), run_bytes(), lead});
    }

    // --- scores

    // The keys at these places; out: of the first query. Called here and for trees: so the kernels are inlined once.
    __attribute__((noinline)) void score_direct(
        int64_t h, const int64_t* at, float* out, PrefetchStream& stream) const {
        const float* queries = scratch.queries + h * num_queries * dim;
        in_pieces<MAX_QUERIES>(num_queries, pieces, [&](int64_t i, auto count) {
            direct_scores<TYPE, decltype(count)::value>(
                keys(h), at, queries + i * dim, dim, out + i * PARTITION, stream);
        });
    }

    // The queries that a panel at a key of the partition is for: from some on for the causal mask, up to some for a
    // window.
    struct Queries {
        int64_t first, last;
    };
    Queries panel_queries(int64_t key) const {
        int64_t first = 0, last = num_queries;
        while (first < last && ends[first] <= key) first++;
        while (last > first && begins[last - 1] >= key + PANEL) last--;
        return {first, last};
    }

    void score_panel(int64_t h, const int64_t* at, const Queries& some, float* out, PrefetchStream& stream) const {
        if constexpr (TYPE == KV_I8) {
            gather_scales(keys(h), at, dim, PANEL, scratch.scales);
            if (spread()) {
                const int64_t number = h * num_queries;
                with_count<MAX_DIRECT_CODES>(num_queries, [&](auto count) {
                    constexpr int NQ = decltype(count)::value;
                    const auto run = dim == 4 * W ? direct_scores_i8<NQ, true> : direct_scores_i8<NQ, false>;
                    run(keys(h), at, (const int32_t*)scratch.queries + number * dim, scratch.starts + number,
                        scratch.factors + number, scratch.scales, dim, out, stream);
                });
                return;
            }
            fill_panel_i8(keys(h), at, dim, (int32_t*)scratch.panel, stream);
        } else {
            fill_panel<TYPE>(keys(h), at, dim, scratch.panel);
        }
        const int64_t count = some.last - some.first;
        if (count == 0) return;
        const int64_t number = h * num_queries + some.first;
        out += some.first * PARTITION;
        const int64_t size = piece_size(count, MAX_PANEL_QUERIES);
        in_pieces<MAX_PANEL_QUERIES>(count, size, [&](int64_t i, auto count) {
            constexpr int NQ = decltype(count)::value;
            const int64_t query = number + i;
            if constexpr (TYPE == KV_I8) {
                const int8_t* codes = (const int8_t*)scratch.queries + query * dim;
                panel_scores_i8<NQ>(
                    (const int32_t*)scratch.panel, codes, scratch.starts + query, scratch.factors + query,
                    scratch.scales, dim, out + i * PARTITION);
            } else {
                panel_scores<NQ>(scratch.panel, scratch.queries + query * dim, dim, out + i * PARTITION);
            }
        });
    }

    // With a tree: all tokens of the row, of which each query gets its path.
    void score_own(int64_t h, PrefetchStream& stream) const {
        const bool panels = TYPE == KV_I8 || !tile.direct;
        for (int64_t key = 0; key < tile.row_tokens; key += panels ? PANEL : W) {
            const int64_t* at = scratch.own_places + key;
            float* out = scratch.own_scores + key;
            if (panels) score_panel(h, at, {0, num_queries}, out, stream);
            else if constexpr (TYPE != KV_I8) score_direct(h, at, out, stream);
        }
        for (int64_t i = 0; i < num_queries; i++) {
            const float* own = scratch.own_scores + i * PARTITION;
            const int16_t* steps = path(i);
            float* row = weights(h) + i * PARTITION;
            for (int64_t key = own_key(); key < ends[i]; key++) row[key] = own[steps[key - own_start()]];
        }
    }

    // Scores become weights.
    void softmax(int64_t h, const State& part) const {
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
            part.top[i] = hmax(tops);
        }
        for (int64_t i = 0; i < num_queries; i++) {
            if (!sees(i)) continue;
            float* row = weights(h) + i * PARTITION;
            const int64_t first = begins[i] / W * W, last = round_up(ends[i], W);
            const float top = part.top[i];
            vf sums = zero();
            for (int64_t key = first; key < last; key += W) {
                const vf weight = weight_of(sub(load(row + key), set1(top)));
                sums = add(sums, weight);
                store(row + key, weight);
            }
            part.sum[i] = hsum(sums);
        }
    }

    // --- values

    // What is done for int8 values of the block at first, step by step for all heads of the item: each step takes a
    // while until its results can be loaded.
    void gather_value_scales(int64_t h, int64_t first) const {
        const int64_t from = larger(first, begin / W * W), last = smaller(first + CODE_BLOCK, end);
        float* out = scratch.value_scales + h * CODE_BLOCK + from - first;
        gather_scales(values(h), places + from, dim, round_up(last, W) - from, out);
    }

    void round_codes(int64_t h, int64_t first, int64_t from, int64_t to) const {
        const float* scales = scratch.value_scales + h * CODE_BLOCK;
        for (int64_t i = from; i < to; i++) {
            const int64_t low = larger(first, begins[i]), high = smaller(first + CODE_BLOCK, ends[i]);
            const int64_t number = h * num_queries + i;
            int32_t* words = scratch.words + number * BLOCK_WORDS;
            if (low < high) {
                const float* row = weights(h) + i * PARTITION + first;
                scratch.units[number] = round_weights(row, scales, low - first, high - first, words);
            } else {
                scratch.units[number] = 0.0f;
                memset(words, 0, BLOCK_WORDS * sizeof *words);
            }
        }
    }

    void weigh_codes(int64_t h, int64_t first, float* acc, PrefetchStream& stream) const {
        const int64_t from = larger(first, begin / W * W), last = smaller(first + CODE_BLOCK, end);
        const int64_t width = tiling.padded_dim;
        const int32_t* words = scratch.words + h * num_queries * BLOCK_WORDS;
        const float* units = scratch.units + h * num_queries;
        const int64_t low = (from - first) / VALUE_KEYS, high = ceil_div(last - first, VALUE_KEYS);
        const PageGroups pages{values(h), places + first, stream};
        if (num_queries <= MAX_CODE_QUERIES) {
            with_count<MAX_CODE_QUERIES>(num_queries, [&](auto count) {
                weigh_groups<decltype(count)::value>(pages, dim, words, units, low, high, acc, width);
            });
            return;
        }
        const BlockGroups block{(int32_t*)scratch.values, group_words(dim)};
        {
            auto pace = pages.pace();
            for (int64_t group = low; group < high; group++) {
                for (int64_t d = 0; d < dim; d += VALUE_DIMS) {
                    pace.steps(PageGroups::STEP);
                    PageGroups::Rows rows;
                    pages.find(group, d, rows);
                    for (int first = 0; first < VALUE_VECTORS; first += STEP_VECTORS) {
                        vi x[STEP_VECTORS];
                        PageGroups::take(rows, (int)smaller(VALUE_DIMS, dim - d), first, x);
                        for (int v = 0; v < STEP_VECTORS; v++) istore(block.at(group, d) + (first + v) * W, x[v]);
                    }
                }
            }
        }
        const int64_t size = piece_size(num_queries, MAX_CODE_QUERIES);
        in_pieces<MAX_CODE_QUERIES>(num_queries, size, [&](int64_t i, auto count) {
            constexpr int NQ = decltype(count)::value;
            int64_t stop = 0, start = PARTITION;
            for (int64_t j = i; j < i + NQ; j++) {
                stop = larger(stop, ends[j]);
                start = smaller(start, begins[j]);
            }
            stop = smaller(high, ceil_div(stop - first, VALUE_KEYS));
            start = larger(low, (start - first) / VALUE_KEYS);
            if (start >= stop) return;
            weigh_groups<NQ>(block, dim, words + i * BLOCK_WORDS, units + i, start, stop, acc + i * width, width);
        });
    }

    template <class Values> void weigh(const Values& source, int64_t h, int64_t first, int64_t last, float* acc) const {
        const int64_t width = tiling.padded_dim;
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
                        weigh_queries<1>(source, weights(h) + i * PARTITION, key, stop, acc + i * width, width);
                }
            };
            if (first < low) alone(first, low);
            if (low < high)
                weigh_queries<NQ>(source, weights(h) + query * PARTITION, low, high, acc + query * width, width);
            if (high < last) alone(high, last);
        });
    }

    void weigh_direct(int64_t h, int64_t first, int64_t last, float* acc, PrefetchStream& stream) const {
        weigh(PageValues<TYPE>{values(h), places, stream}, h, first, last, acc);
    }

    void convert_values(int64_t h, const int64_t* at, int64_t count, float* out) const {
        for (int64_t key = 0; key < count; key++) {
            float* target = out + key * tiling.padded_dim;
            const char* row = values(h) + at[key];
            map_vectors(dim, [&](int64_t d, int n) {
                store(target + d, load_elements<TYPE>(row + d * (int64_t)sizeof(typename Stored<TYPE>::Element), n));
            });
        }
    }

    void weigh_block(int64_t h, int64_t first, int64_t last, float* acc) const {
        convert_values(h, places + first, last - first, scratch.values);
        weigh(BlockValues{scratch.values, first, tiling.padded_dim}, h, first, last, acc);
    }

    // --- trees

    // Whether a tree's keys come to places in the partition; from own_key() on.
    bool has_own() const { return tree != nullptr && own_start() < PARTITION; }
    int64_t own_start() const { return tile.ordered - start; }
    int64_t own_key() const { return larger(0, own_start()); }
    int16_t* path(int64_t query) const { return scratch.paths + query / tiling.group * tile.row_tokens; }

    void find_paths() const {
        locate(tile.ordered, 0, tile.row_tokens, scratch.own_places);
        for (int64_t t = 0; t < tile.num_tokens; t++) {
            const int64_t node = tile.token + t, depth = tree_depth(*tree, node, tile.row_tokens);
            const uint8_t* visible = tree->visible + node * tree->stride;
            int16_t* steps = path(t * tiling.group);
            for (int64_t d = 0; d <= depth; d++) steps[d] = (int16_t)(node - tile.row_token);
            for (int64_t i = 0; i < tile.row_tokens; i++) {
                if (visible[i] == 0) continue;
                const int64_t d = tree_depth(*tree, tile.row_token + i, tile.row_tokens);
                if (d < depth) steps[d] = (int16_t)i;
            }
        }
    }

    void weigh_own(int64_t h, float* acc) const {
        const int64_t width = tiling.padded_dim;
        convert_values(h, scratch.own_places, tile.row_tokens, scratch.own_values);
        const int64_t size = piece_size(tiling.group, MAX_QUERIES);
        for (int64_t query = 0; query < num_queries; query += tiling.group) {
            const int64_t from = own_key(), to = ends[query];
            if (from >= to) continue;
            const PathValues source{scratch.own_values, path(query), own_start(), width};
            in_pieces<MAX_QUERIES>(tiling.group, size, [&](int64_t i, auto count) {
                weigh_queries<decltype(count)::value>(
                    source, weights(h) + (query + i) * PARTITION, from, to, acc + (query + i) * width, width);
            });
        }
    }

    // The blocks that have such keys, with the keys of the context in them: a block's weights share a scale.
    void weigh_own_codes(int64_t h, float* acc, PrefetchStream& stream) const {
        const int64_t width = tiling.padded_dim, size = piece_size(tiling.group, MAX_CODE_QUERIES);
        for (int64_t query = 0; query < num_queries; query += tiling.group) {
            const int16_t* steps = path(query);
            for (int64_t first = own_key() / CODE_BLOCK * CODE_BLOCK; first < ends[query]; first += CODE_BLOCK) {
                const int64_t low = larger(first, begins[query]) - first;
                const int64_t high = smaller(first + CODE_BLOCK, ends[query]) - first;
                // Scales are gathered by four.
                const int64_t from = low / 4 * 4, to = round_up(high, 4);
                int64_t at[CODE_BLOCK];
                for (int64_t i = low; i < high; i++) {
                    const int64_t depth = first + i - own_start();
                    at[i] = depth < 0 ? places[first + i] : scratch.own_places[steps[depth]];
                }
                for (int64_t i = from; i < low; i++) at[i] = at[low];
                for (int64_t i = high; i < to; i++) at[i] = at[high - 1];
                gather_scales(values(h), at + from, dim, to - from, scratch.value_scales + h * CODE_BLOCK + from);
                round_codes(h, first, query, query + tiling.group);
                in_pieces<MAX_CODE_QUERIES>(tiling.group, size, [&](int64_t i, auto count) {
                    const int64_t number = h * num_queries + query + i;
                    weigh_groups<decltype(count)::value>(
                        PageGroups{values(h), at, stream}, dim, scratch.words + number * BLOCK_WORDS,
                        scratch.units + number, from / VALUE_KEYS, to / VALUE_KEYS, acc + (query + i) * width, width);
                });
            }
        }
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
                float* acc = into.acc + i * tiling.padded_dim;
                const float* other = part.acc + i * tiling.padded_dim;
                const vf a = set1(keep[i - first]), b = set1(take[i - first]);
                for (int64_t d = 0; d < tiling.padded_dim; d += W)
                    store(acc + d, fma(load(other + d), b, mul(load(acc + d), a)));
            }
        }
    }

    void write(int64_t h, const State& state) const {
        for (int64_t i = 0; i < num_queries; i++) {
            float* out = args.out + token(i) * args.out_stride + head(h, i) * dim;
            const float* acc = state.acc + i * tiling.padded_dim;
            const vf inverse = set1(1.0f / state.sum[i]);
            map_vectors(dim, [&](int64_t d, int n) { store_upto(out + d, mul(load(acc + d), inverse), n); });
        }
    }

    // --- the item

    // next_item: called before the last partition; says what to read after it by feeding the stream.
    template <class Function> void run(Progress& progress, float* shared, const Function& next_item) {
        gather_queries();
        if (!tile.split())
            for (int64_t h = 0; h < tile.heads; h++) clear(state(scratch.states, h));
        if (tree != nullptr && tile.ordered < to * PARTITION) find_paths();
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
            if (tile.split()) continue;
            for (int64_t h = 0; h < tile.heads; h++) merge(state(scratch.states, h), part(shared, partition, h));
        }
        if (tile.split()) return;
        for (int64_t h = 0; h < tile.heads; h++) write(h, state(scratch.states, h));
    }

    void feed_or_locate(Progress& progress, int64_t partition) const {
        if (tile.direct) feed(progress, partition);
        else locate(partition, scratch.places + (1 - progress.buffer) * PARTITION);
    }

    void run_direct(PrefetchStream& stream, float* shared, int64_t partition) const {
        constexpr int64_t STEP = TYPE == KV_I8 ? PANEL : W;
        for (int64_t key = begin / STEP * STEP; key < end; key += STEP) {
            stream.grant(smaller(key + STEP, end) - larger(key, begin));
            for (int64_t h = 0; h < tile.heads; h++) {
                float* out = weights(h) + key;
                if constexpr (TYPE == KV_I8) score_panel(h, places + key, panel_queries(key), out, stream);
                else score_direct(h, places + key, out, stream);
            }
            stream.finish();
        }
        for (int64_t h = 0; h < tile.heads; h++) {
            if (has_own()) score_own(h, stream);
            softmax(h, part(shared, partition, h));
            clear_acc(part(shared, partition, h));
        }
        const int64_t step = TYPE == KV_I8 ? CODE_BLOCK : stream_block(), stop = value_end();
        for (int64_t key = begin / step * step; key < stop; key += step) {
            const int64_t first = larger(key, begin), last = smaller(key + step, stop);
            stream.grant(last - first);
            if constexpr (TYPE == KV_I8) {
                for (int64_t h = 0; h < tile.heads; h++) gather_value_scales(h, key);
                for (int64_t h = 0; h < tile.heads; h++) round_codes(h, key, 0, num_queries);
            }
            for (int64_t h = 0; h < tile.heads; h++) {
                float* acc = part(shared, partition, h).acc;
                if constexpr (TYPE == KV_I8) weigh_codes(h, key, acc, stream);
                else weigh_direct(h, first, last, acc, stream);
            }
            stream.finish();
        }
        if (!has_own()) return;
        stream.grant(end - larger(begin, stop));
        for (int64_t h = 0; h < tile.heads; h++) finish_own(h, part(shared, partition, h).acc, stream);
        stream.finish();
    }

    // Up to where values are weighed for all queries together: to the block that a tree's keys are in.
    int64_t value_end() const { return TYPE == KV_I8 && has_own() ? end / CODE_BLOCK * CODE_BLOCK : end; }

    void finish_own(int64_t h, float* acc, PrefetchStream& stream) const {
        if constexpr (TYPE == KV_I8) weigh_own_codes(h, acc, stream);
        else weigh_own(h, acc);
    }

    void run_panels(PrefetchStream& stream, float* shared, int64_t partition) const {
        for (int64_t h = 0; h < tile.heads; h++) {
            for (int64_t key = begin / PANEL * PANEL; key < end; key += PANEL)
                score_panel(h, places + key, panel_queries(key), weights(h) + key, stream);
            if (has_own()) score_own(h, stream);
            const State state = part(shared, partition, h);
            softmax(h, state);
            clear_acc(state);
            const int64_t step = TYPE == KV_I8 ? CODE_BLOCK : VALUE_BLOCK / tiling.padded_dim / W * W;
            for (int64_t key = begin / step * step; key < value_end(); key += step) {
                if constexpr (TYPE == KV_I8) {
                    gather_value_scales(h, key);
                    round_codes(h, key, 0, num_queries);
                    weigh_codes(h, key, state.acc, stream);
                    continue;
                }
                weigh_block(h, larger(key, begin), smaller(key + step, end), state.acc);
            }
            if (has_own()) finish_own(h, state.acc, stream);
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
    const Tiling tiling = make_tiling(args, extent, worker.count, row_bytes);
    TileWalk all(args, tiling, extent.num_rows);
    while (all.next()) {}
    const int64_t num_items = all.totals.items, slot_floats = all.totals.slot_floats;
    Scratch scratch;
    const size_t bytes = lay_out(scratch, nullptr, args, tiling, all.totals);
    lay_out(scratch, (char*)worker.scratch(bytes), args, tiling, all.totals);
    float* shared = slot_floats == 0 ? nullptr : (float*)worker.shared(sizeof(float) * (size_t)slot_floats);

    TileWalk walk(args, tiling, extent.num_rows);
    const auto find = [&](int64_t item) {
        while (walk.totals.items <= item) walk.next();
        return TileWork<TYPE>(args, tiling, walk.tile, scratch, item);
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
    TileWalk again(args, tiling, extent.num_rows);
    const int64_t num_merges = all.totals.merges;
    int64_t number = 0, mine = worker.next(num_merges, 1);
    while (again.next()) {
        if (!again.tile.split()) continue;
        for (int64_t kv_head = 0; kv_head < args.num_kv_heads; kv_head++) {
            if (number++ != mine) continue;
            TileWork<TYPE> work(args, tiling, again.tile, scratch, again.tile.first_item);
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
