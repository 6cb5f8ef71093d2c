// Root-mean-square normalisation, with the residual addition before it and quantisation after it.
#pragma once
#include "activation.h"

namespace ENGINE_ISA {

ENGINE_INLINE float inverse_rms(const float* x, int64_t dim, float eps) {
    vf sum = zero();
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        const vf v = load(x + i);
        sum = fma(v, v, sum);
    }
    if (i < dim) {
        const vf v = load_part(x + i, (int)(dim - i));
        sum = fma(v, v, sum);
    }
    return 1.0f / sqrtf(hsum(sum) / (float)dim + eps);
}

// out may be x.
ENGINE_INLINE void scale_row(const float* x, const float* weight, float scale, int64_t dim, float* out) {
    const vf factor = set1(scale);
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
    const int rest = (int)(dim - i);
    if (rest) store_part(out + i, mul(mul(load_part(x + i, rest), factor), load_part(weight + i, rest)), rest);
}

ENGINE_INLINE void add_row(const float* x, float* sum, int64_t dim) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) store(sum + i, add(load(sum + i), load(x + i)));
    const int rest = (int)(dim - i);
    if (rest) store_part(sum + i, add(load_part(sum + i, rest), load_part(x + i, rest)), rest);
}

inline void norm(const NormArgs& args, const Extent& extent, Worker& worker) {
    const int64_t dim = args.dim;
    float* wide = args.out == nullptr ? (float*)worker.scratch((size_t)dim * sizeof(float)) : nullptr;
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;) {
        const float* x = args.x + t * args.x_stride;
        if (args.residual != nullptr) {
            add_row(x, args.residual + t * dim, dim);
            x = args.residual + t * dim;
        }
        float* out = args.out == nullptr ? wide : args.out + t * dim;
        scale_row(x, args.weight, inverse_rms(x, dim, (float)args.eps), dim, out);
        if (args.codes != nullptr) quantise_row(out, dim, args.codes + t * activation_bytes(dim));
    }
}

}  // namespace ENGINE_ISA
