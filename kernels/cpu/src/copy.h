// Rows of float32 to another place, or added to what is there.
#pragma once
#include <string.h>

#include "norm.h"

namespace ENGINE_ISA {

inline void copy(const CopyArgs& args, const Extent& extent, Worker& worker) {
    for (int64_t t; (t = worker.next(extent.num_tokens, 1)) >= 0;) {
        const float* x = args.x + t * args.x_stride;
        float* out = args.out + t * args.out_stride;
        if (args.adds) add_row(x, out, args.dim);
        else memcpy(out, x, sizeof(float) * (size_t)args.dim);
    }
}

}  // namespace ENGINE_ISA
