// Choosing tokens: argmax, and draws by Gumbel noise among the tokens that pass the filters (kernels/sampling.py).
//
// A row is one worker's: most take less time than it takes workers to meet. It is read in blocks of 64 logits. Sums go
// by chunks of 64 blocks, in lanes within one and in double precision over them.
//
// Few tokens need their noise. One whose logit plus a bound of its noise is below the best sum so far cannot be drawn;
// the largest logit of a block says so for the whole block.
#pragma once
#include "abi.h"
#include "pool.h"
#include "vec.h"

namespace ENGINE_ISA {

constexpr int ROW_BLOCK = 64;
constexpr int CHUNK_BLOCKS = 64;

// ---- Rows of logits

struct LogitRow {
    const float* logits;
    int64_t vocab;
    int64_t blocks;
    // The last block if the vocabulary ends within it, filled up with -inf.
    float tail[ROW_BLOCK];
};

static constexpr int64_t num_row_blocks(int64_t vocab) { return (vocab + ROW_BLOCK - 1) / ROW_BLOCK; }

ENGINE_INLINE LogitRow logit_row(const float* logits, int64_t vocab) {
    LogitRow row;
    row.logits = logits;
    row.vocab = vocab;
    row.blocks = num_row_blocks(vocab);
    const int64_t whole = vocab / ROW_BLOCK * ROW_BLOCK;
    for (int64_t i = 0; i < ROW_BLOCK; i++) row.tail[i] = whole + i < vocab ? logits[whole + i] : -INFINITY;
    return row;
}

ENGINE_INLINE const float* row_block(const LogitRow& row, int64_t block) {
    return (block + 1) * ROW_BLOCK <= row.vocab ? row.logits + block * ROW_BLOCK : row.tail;
}

// Where a chunk that begins at `block` ends.
ENGINE_INLINE int64_t chunk_end(const LogitRow& row, int64_t block) {
    return block + CHUNK_BLOCKS < row.blocks ? block + CHUNK_BLOCKS : row.blocks;
}

// A bit for each of the first n lanes.
ENGINE_INLINE uint32_t lanes_below(int64_t n) { return n >= W ? ALL_LANES : (1u << n) - 1; }

// Memory handed out piece by piece; without any, only counted.
struct Carver {
    uint8_t* base;
    size_t used;
};

template <typename T> inline T* carve(Carver& from, int64_t count) {
    T* piece = from.base == nullptr ? nullptr : (T*)(from.base + from.used);
    from.used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
    return piece;
}

// ---- Largest logits

struct Peak {
    float value;
    int32_t token;  // -1: the row holds a NaN
};

// The first token with the row's largest logit. KEEP: the largest logit of each block, too, unless there is a NaN.
template <bool KEEP> inline Peak find_peak(const LogitRow& row, float* block_max) {
    float value = -INFINITY;
    int64_t chunk = 0;
    for (int64_t begin = 0; begin < row.blocks; begin += CHUNK_BLOCKS) {
        vf peak = set1(-INFINITY);
        uint32_t nan = 0;
        const int64_t end = chunk_end(row, begin);
        for (int64_t block = begin; block < end; block++) {
            const float* x = row_block(row, block);
            vf even = set1(-INFINITY), odd = even;
            for (int i = 0; i < ROW_BLOCK; i += 2 * W) {
                const vf a = load(x + i), b = load(x + i + W);
                nan |= unordered_bits(a, b);
                even = vmax(a, even);
                odd = vmax(b, odd);
            }
            const vf most = vmax(even, odd);
            if (KEEP) block_max[block] = hmax(most);
            peak = vmax(peak, most);
        }
        if (nan != 0) return {NAN, -1};
        const float most = hmax(peak);
        if (most > value) {
            value = most;
            chunk = begin;
        }
    }
    const vf wanted = set1(value);
    for (int64_t block = chunk;; block++) {
        const float* x = row_block(row, block);
        for (int i = 0; i < ROW_BLOCK; i += W) {
            // Nothing is larger, so what is not less is equal.
            const uint32_t bits = ~less_bits(load(x + i), wanted) & ALL_LANES;
            if (bits != 0) return {value, (int32_t)(block * ROW_BLOCK + i + __builtin_ctz(bits))};
        }
    }
}

inline void argmax(const ArgmaxArgs& args, const Extent& extent, Worker& worker) {
    for (int64_t r; (r = worker.next(extent.num_rows, 1)) >= 0;) {
        args.tokens[r] = find_peak<false>(logit_row(args.logits + r * args.stride, args.vocab), nullptr).token;
    }
}

template <typename T> inline void sift_down(T* heap, int64_t size, int64_t at) {
    const T item = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] > heap[child]) child++;
        if (!(heap[child] > item)) break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

template <typename T> inline void make_heap(T* items, int64_t size) {
    for (int64_t i = size / 2; i-- > 0;) sift_down(items, size, i);
}

// Take the largest out of a heap.
template <typename T> inline T pop_heap(T* heap, int64_t& size) {
    const T most = heap[0];
    heap[0] = heap[--size];
    if (size > 1) sift_down(heap, size, 0);
    return most;
}

// A value that at least k logits reach, and not many more where they lie scattered: the k-th largest block's maximum.
inline float bound_of_largest(const LogitRow& row, const float* block_max, int64_t k, float* heap) {
    if (k > row.blocks) return -INFINITY;
    memcpy(heap, block_max, (size_t)row.blocks * sizeof(float));
    int64_t size = row.blocks;
    make_heap(heap, size);
    for (int64_t i = 1; i < k; i++) pop_heap(heap, size);
    return heap[0];
}

// ---- Filters

// Sum of exp(logit / temperature - peak). Without SCALED the temperature is 1.
template <bool SCALED> inline double row_mass(const LogitRow& row, float temperature, float peak) {
    const vf t = set1(temperature), most = set1(peak);
    double sum = 0;
    for (int64_t begin = 0; begin < row.blocks; begin += CHUNK_BLOCKS) {
        vf even = zero(), odd = zero();
        const int64_t end = chunk_end(row, begin);
        for (int64_t block = begin; block < end; block++) {
            const float* x = row_block(row, block);
            for (int i = 0; i < ROW_BLOCK; i += 2 * W) {
                const vf a = load(x + i), b = load(x + i + W);
                even = add(even, vexp(sub(SCALED ? div(a, t) : a, most)));
                odd = add(odd, vexp(sub(SCALED ? div(b, t) : b, most)));
            }
        }
        float lanes[W];
        store(lanes, add(even, odd));
        for (int i = 0; i < W; i++) sum += lanes[i];
    }
    return sum;
}

// The scaled logits that are at least `least`, in the order of their tokens. `out` has room for whole blocks and W more.
inline int64_t collect(const LogitRow& row, const float* block_max, float temperature, float least, float* out) {
    const vf t = set1(temperature), bound = set1(least);
    int64_t count = 0;
    for (int64_t group = 0; group < row.blocks; group += W) {
        uint32_t blocks = ~less_bits(div(load(block_max + group), t), bound) & lanes_below(row.blocks - group);
        for (; blocks != 0; blocks &= blocks - 1) {
            const float* x = row_block(row, group + __builtin_ctz(blocks));
            for (int i = 0; i < ROW_BLOCK; i += W) {
                const vf scaled = div(load(x + i), t);
                const uint32_t bits = ~less_bits(scaled, bound) & ALL_LANES;
                if (bits != 0) count += compress(out + count, scaled, bits);
            }
        }
    }
    return count;
}

// An integer that sorts like the float; the two zeros are one.
ENGINE_INLINE uint32_t sort_key(float x) {
    const float sum = x + 0.0f;
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

constexpr int BUCKETS = 1024;
constexpr int FEW = 32;

// The values of one bucket of many, those among which smallest_kept() will find its own. Adds what is above them.
inline void narrow(float* values, float* weights, int64_t& count, double target, double* buckets, double& above) {
    for (int64_t i = count; i < count + W; i++) {
        values[i] = values[0];
        weights[i] = 0.0f;
    }
    vf most = load(values), least = most;
    for (int64_t i = 0; i < count; i += W) {
        most = vmax(load(values + i), most);
        least = vmin(load(values + i), least);
    }
    const float high = hmax(most), range = high + hmax(sub(zero(), least));
    if (!(range > 1e-30f && range < 1e30f)) return;
    // Nothing here changes the order of two values; it may make them equal, to be told apart later.
    const vf top = set1(high), scale = set1((float)(BUCKETS - 1) / range);
    memset(buckets, 0, BUCKETS * sizeof(double));
    for (int64_t i = 0; i < count; i += W) {
        int32_t places[W];
        istore(places, to_int(mul(sub(top, load(values + i)), scale)));
        for (int lane = 0; lane < W; lane++) buckets[places[lane]] += weights[i + lane];
    }
    int bucket = 0;
    const int last = BUCKETS - 1;
    while (bucket < last && above + buckets[bucket] < target) above += buckets[bucket++];
    const vf wanted = set1((float)bucket);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += W) {
        const vf value = load(values + i), weight = load(weights + i);
        const vf place = vround(mul(sub(top, value), scale));
        const uint32_t other = less_bits(place, wanted) | less_bits(wanted, place);
        const uint32_t bits = ~other & lanes_below(count - i);
        if (bits == 0) continue;
        compress(weights + kept, weight, bits);
        kept += compress(values + kept, value, bits);
    }
    count = kept;
}

// The smallest value for which all larger ones together weigh less than `target`; the largest value in any case.
// Values and weights, with room for W more, are left in disorder.
inline float smallest_kept(float* values, float* weights, int64_t count, double target, double* buckets) {
    double above = 0;
    if (count > BUCKETS) narrow(values, weights, count, target, buckets, above);
    while (count > FEW) {
        uint32_t low = 0xFFFFFFFFu, high = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t key = sort_key(values[i]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (low == high) break;
        int shift = 0;
        while ((high - low) >> shift >= BUCKETS) shift++;
        memset(buckets, 0, BUCKETS * sizeof(double));
        for (int64_t i = 0; i < count; i++) buckets[(high - sort_key(values[i])) >> shift] += weights[i];
        uint32_t bucket = 0;
        const uint32_t last = (high - low) >> shift;
        while (bucket < last && above + buckets[bucket] < target) above += buckets[bucket++];
        // It is in this one: go on with what is.
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const float value = values[i], weight = weights[i];
            values[kept] = value;
            weights[kept] = weight;
            kept += (high - sort_key(value)) >> shift == bucket;
        }
        count = kept;
    }
    if (count > FEW) return values[0];
    for (int64_t i = 1; i < count; i++) {
        const float value = values[i], weight = weights[i];
        int64_t at = i;
        for (; at > 0 && values[at - 1] < value; at--) {
            values[at] = values[at - 1];
            weights[at] = weights[at - 1];
        }
        values[at] = value;
        weights[at] = weight;
    }
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        if (values[i] != values[at]) {
            if (!(above < target)) break;
            at = i;
        }
        above += weights[i];
    }
    return values[at];
}

// What a row's tokens are drawn by.
struct Draw {
    float temperature;
    int64_t top_k;  // 0: off
    double top_p;   // 1: off
    float min_p;    // 0: off
    int32_t key_a;
    int32_t key_b;
};

// Memory for one row. Only filters need what comes after block_max.
struct RowSpace {
    float* block_max;
    float* heap;
    float* values;
    float* weights;
    double* buckets;
};

inline RowSpace carve_row(Carver& from, int64_t vocab, bool filters) {
    RowSpace space = {};
    space.block_max = carve<float>(from, num_row_blocks(vocab) + W);
    if (!filters) return space;
    space.heap = carve<float>(from, num_row_blocks(vocab));
    space.values = carve<float>(from, num_row_blocks(vocab) * ROW_BLOCK + W);
    space.weights = carve<float>(from, num_row_blocks(vocab) * ROW_BLOCK + W);
    space.buckets = carve<double>(from, BUCKETS);
    return space;
}

// The smallest scaled logit that passes top-k, then top-p, then min-p. peak: the largest scaled logit.
inline float filter_threshold(const LogitRow& row, const Draw& draw, float peak, const RowSpace& space) {
    const float t = draw.temperature;
    float threshold = -INFINITY;
    if (draw.top_k != 0) {
        const float bound = bound_of_largest(row, space.block_max, draw.top_k, space.heap) / t;
        const int64_t count = collect(row, space.block_max, t, bound, space.values);
        for (int64_t i = 0; i < count; i++) space.weights[i] = 1.0f;
        threshold = smallest_kept(space.values, space.weights, count, (double)draw.top_k, space.buckets);
    }
    if (draw.top_p < 1) {
        double total = 0;
        float bound = threshold;
        if (draw.top_k == 0) {
            total = row_mass<true>(row, t, peak);
            // Lighter tokens weigh at most half of what may be left out, all together.
            const double depth = log((double)row.vocab / (0.5 * (1 - draw.top_p) * total));
            bound = (float)(peak - depth - 1e-6 * (fabs((double)peak) + depth));
        }
        const int64_t count = collect(row, space.block_max, t, bound, space.values);
        for (int64_t i = 0; i < count; i += W) {
            store(space.weights + i, vexp(sub(load(space.values + i), set1(peak))));
        }
        if (draw.top_k != 0) {
            for (int64_t i = 0; i < count; i++) total += space.weights[i];
        }
        const float kept = smallest_kept(space.values, space.weights, count, draw.top_p * total, space.buckets);
        threshold = kept > threshold ? kept : threshold;
    }
    if (draw.min_p > 0) {
        const float kept = peak + logf(draw.min_p);
        threshold = kept > threshold ? kept : threshold;
    }
    return threshold;
}

// ---- Noise (kernels/noise.py)

constexpr uint32_t HASH_M1 = 0x7FEB352D, HASH_M2 = 0x46CA68B5, HASH_STEP = 0x1E3779B9;
constexpr uint32_t HASH_A = 0x2545F491, HASH_B = 0x5851F42D;

ENGINE_INLINE int32_t row_key(uint32_t key, int64_t seed, int64_t position, int64_t purpose) {
    const uint32_t words[] = {(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32), (uint32_t)position, (uint32_t)purpose};
    for (const uint32_t word : words) {
        key = (key ^ word) + HASH_STEP;
        key = (key ^ key >> 16) * HASH_M1;
        key = (key ^ key >> 15) * HASH_M2;
        key ^= key >> 16;
    }
    return (int32_t)key;
}

// column_hash: columns times HASH_STEP, plus key_a. Gives u * 2**31, u in (0, 1) but where it rounds to 1.
ENGINE_INLINE vf uniform(vi column_hash, vi key_b) {
    vi x = ixor(column_hash, shift_right<16>(column_hash));
    x = iadd(imul(x, iset1((int32_t)HASH_M1)), key_b);
    x = ixor(x, shift_right<15>(x));
    x = imul(x, iset1((int32_t)HASH_M2));
    x = ixor(x, shift_right<16>(x));
    return add(to_float(iand(x, iset1(0x7FFFFFFF))), set1(0.5f));
}

// -log(-log(1 - u)).
ENGINE_INLINE vf gumbel(vf uniform) {
    const vf u = vmin(mul(uniform, set1(0x1p-31f)), set1(1 - 0x1p-24f));
    const vf one = set1(1.0f);
    const vf rest = sub(one, u);
    // What 1 - u lost by rounding is lost of the logarithm: for small u it is all there is.
    const vf lost = sub(u, sub(one, rest));
    return sub(zero(), vlog(sub(lost, vlog(rest))));
}

// At least gumbel(): -log(-log(1 - u)) <= -log(u), and log2 of a float is at least what its bits say as a number.
ENGINE_INLINE vf gumbel_bound(vf uniform) {
    return fma(to_float(float_to_bits(uniform)), set1(-8.2629582e-8f), set1(158 * 0.69314718f + 1e-3f));
}

// Above gumbel() of the smallest u, -log(2**-32) = 22.1807.
constexpr float MAX_NOISE = 22.19f;

// ---- Drawing

// lanes: HASH_STEP times 0, 1, 2, ...
ENGINE_INLINE void draw_block(const LogitRow& row, int64_t block, const Draw& draw, float threshold, vi lanes, Peak& best) {
    const float* x = row_block(row, block);
    const vf t = set1(draw.temperature), least = set1(threshold);
    const vi key_b = iset1(draw.key_b);
    for (int i = 0; i < ROW_BLOCK; i += W) {
        const uint32_t first_column = (uint32_t)(block * ROW_BLOCK + i);
        const vi column_hash = iadd(lanes, iset1((int32_t)(first_column * HASH_STEP + (uint32_t)draw.key_a)));
        const vf scaled = div(load(x + i), t);
        const vf u = uniform(column_hash, key_b);
        const uint32_t behind = less_bits(add(gumbel_bound(u), scaled), set1(best.value)) | less_bits(scaled, least);
        if (behind == ALL_LANES) continue;
        float sums[W];
        store(sums, add(gumbel(u), scaled));
        for (uint32_t bits = ~behind & ALL_LANES; bits != 0; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            const int32_t token = (int32_t)first_column + lane;
            if (sums[lane] > best.value || (sums[lane] == best.value && token < best.token)) best = {sums[lane], token};
        }
    }
}

inline bool holds_infinity(const LogitRow& row) {
    for (int64_t i = 0; i < row.vocab; i++) {
        if (fabsf(row.logits[i]) == INFINITY) return true;
    }
    return false;
}

// The row's token where no draw decides it, else -2. peak: of the logits as they are.
inline int32_t settled_token(const LogitRow& row, const Draw& draw, const Peak& peak) {
    if (peak.token < 0 || draw.temperature < 1e-6f) return peak.token;
    // Over these temperatures logits become NaN.
    if (draw.temperature != draw.temperature) return -1;
    if (draw.temperature == INFINITY && holds_infinity(row)) return -1;
    // Noise makes no difference to -inf.
    if (peak.value / draw.temperature == -INFINITY) return 0;
    return -2;
}

inline int32_t draw_row(const LogitRow& row, Draw draw, const RowSpace& space) {
    const Peak peak = find_peak<true>(row, space.block_max);
    const int32_t settled = settled_token(row, draw, peak);
    if (settled != -2) return settled;
    const float most = peak.value / draw.temperature;
    if (most == INFINITY || draw.temperature == INFINITY) {
        // All that can be drawn are equals.
        draw.top_k = 0;
        draw.top_p = 1;
    }
    float threshold = -INFINITY;
    if (draw.top_k != 0 || draw.top_p < 1 || draw.min_p > 0) threshold = filter_threshold(row, draw, most, space);
    // min_p above 1 lets nothing pass.
    if (most < threshold) return 0;

    // The most likely token first: few others can then still be drawn.
    const vi column_hash = iset1((int32_t)((uint32_t)peak.token * HASH_STEP + (uint32_t)draw.key_a));
    float sums[W];
    store(sums, add(gumbel(uniform(column_hash, iset1(draw.key_b))), set1(most)));
    Peak best = {sums[0], peak.token};

    int32_t steps[W];
    for (int i = 0; i < W; i++) steps[i] = (int32_t)((uint32_t)i * HASH_STEP);
    const vi lanes = iload(steps);
    const vf t = set1(draw.temperature), least = set1(threshold);
    for (int64_t group = 0; group < row.blocks; group += W) {
        const vf blocks = div(load(space.block_max + group), t);
        const uint32_t behind = less_bits(add(blocks, set1(MAX_NOISE)), set1(best.value)) | less_bits(blocks, least);
        for (uint32_t bits = ~behind & lanes_below(row.blocks - group); bits != 0; bits &= bits - 1) {
            draw_block(row, group + __builtin_ctz(bits), draw, threshold, lanes, best);
        }
    }
    return best.token;
}

ENGINE_INLINE Draw draw_of(const SampleArgs& args, int64_t r) {
    Draw draw;
    draw.temperature = args.temperature[r];
    const int64_t seed = args.seeds[r], position = args.positions[r];
    draw.key_a = row_key(HASH_A, seed, position, args.purpose);
    draw.key_b = row_key(HASH_B, seed, position, args.purpose);
    draw.top_k = 0;
    draw.top_p = 1;
    draw.min_p = 0;
    // A threshold that is not a number keeps nothing out.
    if (args.needs_filter && args.min_p[r] >= 0) {
        const int64_t top_k = args.top_k[r];
        if (top_k >= 1 && top_k < args.vocab) draw.top_k = top_k;
        if (args.top_p[r] < 1) draw.top_p = args.top_p[r] > 0 ? args.top_p[r] : 0;
        draw.min_p = args.min_p[r];
    }
    return draw;
}

inline void sample(const SampleArgs& args, const Extent& extent, Worker& worker) {
    Carver size = {nullptr, 0};
    carve_row(size, args.vocab, args.needs_filter != 0);
    Carver memory = {(uint8_t*)worker.scratch(size.used), 0};
    const RowSpace space = carve_row(memory, args.vocab, args.needs_filter != 0);
    for (int64_t r; (r = worker.next(extent.num_rows, 1)) >= 0;) {
        const LogitRow row = logit_row(args.logits + r * args.stride, args.vocab);
        args.tokens[r] = draw_row(row, draw_of(args, r), space);
    }
}

}  // namespace ENGINE_ISA
