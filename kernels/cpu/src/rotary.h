// Norm and rotary of query and key heads, keys and values into the pages.
#pragma once
#include "abi.h"
#include "packing.h"
#include "pool.h"
#include "vec.h"

namespace ENGINE_ISA {

constexpr int64_t MAX_HEAD_DIM = 256;

// A function of vectors applied to dim floats; the last vector may be part of one.
template <class Function> ENGINE_INLINE void map_vectors(int64_t dim, const Function& function) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) function(d, W);
    if (d < dim) function(d, (int)(dim - d));
}

ENGINE_INLINE vf load_upto(const float* p, int n) { return n < W ? load_part(p, n) : load(p); }
ENGINE_INLINE void store_upto(float* p, vf x, int n) {
    if (n < W) store_part(p, x, n);
    else store(p, x);
}

static inline void normalise_head(float* head, const float* weight, int64_t dim, double eps) {
    vf squares = zero();
    map_vectors(dim, [&](int64_t d, int n) {
        const vf x = load_upto(head + d, n);
        squares = fma(x, x, squares);
    });
    const vf scale = set1(1.0f / sqrtf(hsum(squares) / (float)dim + (float)eps));
    // Two products, as the reference rounds them.
    map_vectors(dim, [&](int64_t d, int n) {
        store_upto(head + d, mul(mul(load_upto(head + d, n), scale), load_upto(weight + d, n)), n);
    });
}

static inline void rotate_head(float* head, const float* cos_sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    map_vectors(half, [&](int64_t d, int n) {
        const vf first = load_upto(head + d, n), second = load_upto(head + half + d, n);
        const vf cosine = load_upto(cos_sin + d, n), sine = load_upto(cos_sin + half + d, n);
        store_upto(head + d, sub(mul(first, cosine), mul(second, sine)), n);
        store_upto(head + half + d, add(mul(second, cosine), mul(first, sine)), n);
    });
}

static inline void store_head(const float* head, int64_t dim, int64_t type, char* out) {
    if (type == KV_F32) {
        memcpy(out, head, sizeof(float) * (size_t)dim);
    } else if (type == KV_I8) {
        const float scale = quantise_i8(head, dim, (int8_t*)out);
        memcpy(out + dim, &scale, sizeof scale);
    } else {
        map_vectors(dim, [&](int64_t d, int n) {
            uint16_t halves[W];
            const vf x = load_upto(head + d, n);
            if (type == KV_F16) store_f16(halves, x);
            else store_bf16(halves, x);
            memcpy(out + 2 * d, halves, 2 * (size_t)n);
        });
    }
}

inline void rope_store(const RopeStoreArgs& args, const Extent& extent, Worker& worker) {
    const int64_t dim = args.head_dim;
    const KvPages& kv = args.kv;
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;) {
        const float* cos_sin = args.cos_sin + args.positions[t] * args.rotary_dim;
        for (int64_t h = 0; h < args.num_heads; h++) {
            float* head = args.q + t * args.token_stride + h * dim;
            if (args.q_norm != nullptr) normalise_head(head, args.q_norm, dim, args.eps);
            rotate_head(head, cos_sin, args.rotary_dim);
        }
        const int64_t page = args.locations[t] / kv.page_size, offset = args.locations[t] % kv.page_size;
        char* place = (char*)kv.data + page * kv.page_stride + offset * kv.token_stride;
        for (int64_t h = 0; h < args.num_kv_heads; h++) {
            float key[MAX_HEAD_DIM];
            memcpy(key, args.k + t * args.token_stride + h * dim, sizeof(float) * (size_t)dim);
            if (args.k_norm != nullptr) normalise_head(key, args.k_norm, dim, args.eps);
            rotate_head(key, cos_sin, args.rotary_dim);
            store_head(key, dim, kv.type, place + h * kv.head_stride);
            const float* value = args.v + t * args.token_stride + h * dim;
            store_head(value, dim, kv.type, place + kv.half_stride + h * kv.head_stride);
        }
    }
}

}  // namespace ENGINE_ISA
