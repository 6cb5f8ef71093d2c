// How the queries of attention are cut into tiles, and these shared out among workers.
#pragma once
#include "abi.h"
#include "packing.h"
#include "vec.h"

namespace ENGINE_ISA {
namespace paged {

// Keys that are worked off together, at fixed positions of a context; see attention.h.
constexpr int64_t PARTITION = 256;
// Up to so many queries of a tile go the direct way; the other way has about so many.
constexpr int64_t DIRECT_QUERIES = 24;
constexpr int64_t MIN_TILE_QUERIES = 24, MAX_TILE_QUERIES = 96;
// The longest run of heads side by side that are worked on together.
constexpr int64_t MAX_RUN_BYTES = 4096;
// The most tokens of a row with a tree; kernels/cpu/tree.py says so too.
constexpr int64_t MAX_TREE_TOKENS = 256;

static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Null without a tree.
ENGINE_INLINE const TreeArgs* tree_of(const AttentionArgs& args) {
    return args.tree != nullptr && args.tree->visible != nullptr ? args.tree : nullptr;
}

// Whatever depths holds, a node is no deeper than its row has tokens.
ENGINE_INLINE int64_t tree_depth(const TreeArgs& tree, int64_t token, int64_t row_tokens) {
    return larger(0, smaller(tree.depths[token], row_tokens - 1));
}

// Consecutive tokens of a row. Positions of a tree's tokens are those that they have by their depth.
struct Tile {
    int64_t row, num_tokens;
    int64_t token;       // the first one, in the step
    int64_t position;    // the same one, in the context; with a tree, that of its root
    int64_t begin, end;  // keys that some token sees
    int64_t ordered;     // up to here keys are in the pages by position: with a tree, the context before the step
    int64_t row_token, row_tokens;  // of the whole row
    int64_t first_partition, num_partitions;
    bool direct;
    // What a worker takes at once, an item, is `heads` KV heads over `chunk` partitions.
    int64_t heads, chunk;
    int64_t first_item;
    int64_t slots;  // of a split tile: where in shared memory the states of partitions and KV heads are left

    bool split() const { return chunk < num_partitions; }
};

// Sums over all tiles. A merge: a KV head of a tile that is split. A unit: a partition.
struct Totals {
    int64_t items, merges, slot_floats, cost, units, max_queries, max_heads, max_heads_queries;
    int64_t max_tree_tokens;  // of a row; 0 without trees
};

// What all tiles have in common.
struct Tiling {
    int64_t group;       // query heads of a KV head
    int64_t padded_dim;  // head_dim in whole vectors
    int64_t row_bytes;   // of a head in the pages
    int64_t tile_tokens;
    int64_t chunk_cost;
    bool heads_together;
};

// What a tile's queries have of some keys: the largest score, and the sums of weights and of weighted values.
struct State {
    float* acc;  // [queries, padded_dim]
    float* top;
    float* sum;
};

ENGINE_INLINE int64_t state_floats(const Tiling& tiling, int64_t queries) {
    return queries * tiling.padded_dim + 2 * round_up(queries, W);
}

ENGINE_INLINE State state_at(float* data, const Tiling& tiling, int64_t queries) {
    float* top = data + queries * tiling.padded_dim;
    return {data, top, top + round_up(queries, W)};
}

// Walks through the tiles in order.
struct TileWalk {
    const AttentionArgs& args;
    const Tiling& tiling;
    const TreeArgs* const tree;
    int64_t num_rows;
    int64_t row = -1, next_token = 0, row_end = 0, tile_tokens = 0;
    Totals totals = {};
    Tile tile = {};

    TileWalk(const AttentionArgs& args, const Tiling& tiling, int64_t num_rows)
        : args(args), tiling(tiling), tree(tree_of(args)), num_rows(num_rows) {}

    bool next() {
        while (next_token == row_end) {
            if (++row == num_rows) return false;
            row_end += args.q_lens[row];
            // Tiles of a row are about equal.
            const int64_t tokens = args.q_lens[row], tiles = ceil_div(tokens, tiling.tile_tokens);
            tile_tokens = tiles == 0 ? 0 : ceil_div(tokens, tiles);
        }
        tile.row = row;
        tile.row_tokens = args.q_lens[row];
        tile.row_token = row_end - tile.row_tokens;
        tile.token = next_token;
        tile.num_tokens = smaller(tile_tokens, row_end - next_token);
        next_token += tile.num_tokens;
        if (tree != nullptr) {
            set_tree_keys();
        } else {
            tile.position = args.kv_lens[row] - (row_end - tile.token);
            tile.begin = args.window > 0 ? larger(0, tile.position - args.window + 1) : 0;
            tile.end = tile.ordered = larger(tile.begin, tile.position + tile.num_tokens);
        }
        tile.first_partition = tile.begin / PARTITION;
        tile.num_partitions = ceil_div(tile.end, PARTITION) - tile.first_partition;
        const int64_t queries = tile.num_tokens * tiling.group;
        tile.direct = queries <= DIRECT_QUERIES && args.head_dim % W == 0;
        tile.heads = tiling.heads_together && tile.direct ? args.num_kv_heads : 1;
        // Reading a key costs about as much as two queries' work with it.
        const int64_t partition_cost = (queries + 2) * tile.heads;
        tile.chunk = smaller(larger(tile.num_partitions, 1), larger(1, tiling.chunk_cost / partition_cost));
        tile.first_item = totals.items;
        tile.slots = totals.slot_floats;
        totals.items += args.num_kv_heads / tile.heads * larger(1, ceil_div(tile.num_partitions, tile.chunk));
        if (tile.split()) {
            totals.merges += args.num_kv_heads;
            totals.slot_floats += state_floats(tiling, queries) * tile.num_partitions * args.num_kv_heads;
        }
        totals.cost += partition_cost * tile.num_partitions * (args.num_kv_heads / tile.heads);
        totals.units += larger(1, tile.num_partitions);
        totals.max_queries = larger(totals.max_queries, queries);
        totals.max_heads = larger(totals.max_heads, tile.heads);
        totals.max_heads_queries = larger(totals.max_heads_queries, queries * tile.heads);
        return true;
    }

    void set_tree_keys() {
        int64_t least = tile.row_tokens, most = 0;
        for (int64_t token = tile.token; token < tile.token + tile.num_tokens; token++) {
            const int64_t depth = tree_depth(*tree, token, tile.row_tokens);
            least = smaller(least, depth);
            most = larger(most, depth);
        }
        tile.position = tile.ordered = args.kv_lens[row] - tile.row_tokens;
        tile.begin = args.window > 0 ? larger(0, tile.position + smaller(0, least - args.window + 1)) : 0;
        tile.end = tile.position + most + 1;
        totals.max_tree_tokens = larger(totals.max_tree_tokens, tile.row_tokens);
    }
};

static inline Tiling make_tiling(const AttentionArgs& args, const Extent& extent, int workers, int64_t row_bytes) {
    Tiling tiling;
    tiling.row_bytes = row_bytes;
    tiling.group = args.num_heads / args.num_kv_heads;
    tiling.padded_dim = round_up(args.head_dim, W);
    const int64_t share = extent.num_tokens * args.num_heads / (4 * workers);
    const int64_t tile_queries = smaller(MAX_TILE_QUERIES, larger(MIN_TILE_QUERIES, share));
    tiling.tile_tokens = larger(1, tile_queries / tiling.group);
    // One worker splits nothing; of several, each gets some items even of a single long context.
    tiling.chunk_cost = INT64_MAX;
    // Heads side by side are read as one run of memory, unless that leaves workers without work.
    tiling.heads_together = args.kv.head_stride == row_bytes && row_bytes * args.num_kv_heads <= MAX_RUN_BYTES;
    if (workers > 1) {
        TileWalk walk(args, tiling, extent.num_rows);
        while (walk.next()) {}
        tiling.chunk_cost = walk.totals.cost / (workers * 8);
        tiling.heads_together = tiling.heads_together && walk.totals.units >= workers * 4;
    }
    return tiling;
}

}  // namespace paged
}  // namespace ENGINE_ISA
