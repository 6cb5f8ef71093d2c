// What Python and the kernels agree on. kernels/cpu/abi.py has the same structs for ctypes; change both, and
// ENGINE_ABI with them.
#pragma once
#include <stdint.h>

#define ENGINE_ABI 4

extern "C" {

enum OpKind : int32_t {
    OP_EMBED = 0,
    OP_QUANTISE = 1,
    OP_NORM = 2,
    OP_LINEAR = 3,
    OP_GATED_LINEAR = 4,
    OP_ROPE_STORE = 5,
    OP_ATTENTION = 6,
    OP_ARGMAX = 7,
    OP_SAMPLE = 8,
    OP_SCORE = 9,
    OP_COPY = 10,
    NUM_OPS = 11,
};

// Packings of a weight matrix; packing.h has the layouts.
enum Packing : int32_t {
    PACK_Q4_0 = 0,
    PACK_Q4_1 = 1,
    PACK_Q5_0 = 2,
    PACK_Q5_1 = 3,
    PACK_Q8_0 = 4,
    PACK_Q4_K = 5,
    PACK_Q5_K = 6,
    PACK_Q6_K = 7,
    NUM_PACKINGS = 8,
};

enum KvType : int32_t { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2, KV_I8 = 3 };

// One op of a program: a kind and its arguments, one of the structs below.
struct Op {
    int64_t kind;
    const void* args;
};

// How much of their buffers a run's ops use. All strides are in elements unless they say bytes.
struct Extent {
    int64_t num_tokens;
    int64_t num_rows;
};

struct Matrix {
    int64_t packing;
    int64_t rows;
    int64_t cols;
    const uint8_t* data;
};

// out[t] = row ids[t] of table; float32.
struct EmbedArgs {
    const Matrix* table;
    const int64_t* ids;
    float* out;
    int64_t out_stride;
};

// Rows of float32 as int8 in groups of 32 (activation rows, packing.h).
struct QuantiseArgs {
    const float* x;
    int64_t x_stride;
    uint8_t* out;
    int64_t dim;
};

// residual (if given) += x, and what is normalised is the sum; else x. Writes out (float32) or codes (activation rows).
struct NormArgs {
    const float* x;
    int64_t x_stride;
    float* residual;
    const float* weight;
    float* out;
    uint8_t* codes;
    int64_t dim;
    double eps;
};

// out[t] = concatenation over matrices of matrix @ x[t], plus bias (float32, or null). x: activation rows.
struct LinearArgs {
    const Matrix* matrices;
    int64_t num_matrices;
    const uint8_t* x;
    const float* bias;
    float* out;
    int64_t out_stride;
};

// silu(gate @ x[t] + bias) * (up @ x[t] + bias) as activation rows. matrices: gate, up; bias: both in a row, or null.
struct GatedLinearArgs {
    const Matrix* matrices;
    const uint8_t* x;
    const float* bias;
    uint8_t* out;
};

// One layer's pages, [num_pages, 2, page_size, num_kv_heads, head_dim]; strides in bytes. int8 heads are head_dim codes
// followed by their float32 scale.
struct KvPages {
    void* data;
    int64_t type;
    int64_t page_size;
    int64_t page_stride;
    int64_t half_stride;
    int64_t token_stride;
    int64_t head_stride;
};

// Norms of query and key heads (null: none), rotary in place on q, keys and values into the pages.
struct RopeStoreArgs {
    float* q;
    float* k;
    const float* v;
    int64_t token_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    const float* q_norm;
    const float* k_norm;
    double eps;
    const int64_t* positions;
    const int64_t* locations;
    const float* cos_sin;
    int64_t rotary_dim;
    KvPages kv;
};

// The trees that a step's rows add (kernels/attention.py's TreeMask); null pointers: there are none. Programs share one,
// which changes between their runs.
struct TreeArgs {
    const uint8_t* visible;  // [num_tokens, stride]
    int64_t stride;
    const int32_t* depths;  // [num_tokens]
};

// Causal grouped-query attention of num_rows rows; token t of row r sees keys up to its own position, or what its tree
// says.
struct AttentionArgs {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    double scale;
    int64_t window;  // 0: none
    const int32_t* q_lens;
    const int64_t* kv_lens;
    const int32_t* page_table;
    int64_t page_table_stride;
    KvPages kv;
    const TreeArgs* tree;  // or null
};

// tokens[r] = argmax of logits[r] (lowest id among equals), -1 with a NaN in the row.
struct ArgmaxArgs {
    const float* logits;
    int64_t vocab;
    int64_t stride;
    int32_t* tokens;
};

// kernels/sampling.py's sample().
struct SampleArgs {
    const float* logits;
    int64_t vocab;
    int64_t stride;
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seeds;
    const int64_t* positions;
    int64_t needs_filter;
    int64_t purpose;
    int32_t* tokens;
};

// A step's inputs, made from the slots: tokens, positions and KV locations of its tokens; lengths and pages of its rows.
struct StepInputs {
    int64_t* seq_len;           // of slots: tokens before the step, then after it
    const int64_t* last_token;  // of slots: what decode rows add
    const int32_t* slot_pages;  // [slots, pages_stride]
    int64_t pages_stride;       // of slot_pages and page_table
    int64_t page_size;
    int64_t* tokens;
    int64_t* positions;
    int64_t* locations;
    int32_t* q_lens;
    int64_t* kv_lens;
    int32_t* page_table;
};

// kernels/logprobs.py's score_tokens().
struct ScoreArgs {
    const float* logits;
    int64_t vocab;
    int64_t stride;
    const int64_t* tokens;
    int64_t width;
    float* chosen;
    int64_t* ids;
    float* tops;
};

// out[t] = x[t], or with `adds` the sum of both: rows of `dim` float32.
struct CopyArgs {
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t out_stride;
    int64_t dim;
    int64_t adds;
};

}  // extern "C"
