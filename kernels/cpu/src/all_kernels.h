// Every kernel and their table; included once per instruction set.
#include "attention.h"
#include "activation.h"
#include "copy.h"
#include "embed.h"
#include "kernels.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"
#include "sampling.h"
#include "scores.h"

#define ENGINE_OP(function, type) \
    [](const void* args, const Extent& extent, Worker& worker) { ENGINE_ISA::function(*(const type*)args, extent, worker); }

const KernelTable ENGINE_TABLE = {
    ENGINE_NAME,
    {
        ENGINE_OP(embed, EmbedArgs),
        ENGINE_OP(quantise, QuantiseArgs),
        ENGINE_OP(norm, NormArgs),
        ENGINE_OP(linear, LinearArgs),
        ENGINE_OP(gated_linear, GatedLinearArgs),
        ENGINE_OP(rope_store, RopeStoreArgs),
        ENGINE_OP(attention, AttentionArgs),
        ENGINE_OP(argmax, ArgmaxArgs),
        ENGINE_OP(sample, SampleArgs),
        ENGINE_OP(score, ScoreArgs),
        ENGINE_OP(copy, CopyArgs),
    },
};
