// The C interface: what kernels/cpu/native.py calls through ctypes.
#include <errno.h>
#include <string.h>

#include "kernels.h"
#include "pack.h"
#include "packing.h"

#define ENGINE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

bool runs_here(const KernelTable* table) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (table == &AVX2_KERNELS)
        // Whatever has AVX2 has F16C, which not every compiler can ask for.
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(ENGINE_WITH_AVX512)
    if (table == &AVX512_KERNELS)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)table;
    return true;
}

// Best first.
const KernelTable* const TABLES[] = {
#if defined(ENGINE_WITH_AVX512)
    &AVX512_KERNELS,
#endif
#if defined(__x86_64__)
    &AVX2_KERNELS,
#endif
    &SCALAR_KERNELS,
};

const KernelTable* best() {
    for (const KernelTable* table : TABLES)
        if (runs_here(table)) return table;
    return &SCALAR_KERNELS;
}

const KernelTable* chosen = best();

}  // namespace

ENGINE_EXPORT int32_t engine_cpu_abi() { return ENGINE_ABI; }

ENGINE_EXPORT const char* engine_cpu_isa() { return chosen->name; }

// 0, or EINVAL where there is no such instruction set, or ENOTSUP where this machine has not got it.
ENGINE_EXPORT int32_t engine_cpu_set_isa(const char* name) {
    for (const KernelTable* table : TABLES) {
        if (strcmp(table->name, name) != 0) continue;
        if (!runs_here(table)) return ENOTSUP;
        chosen = table;
        return 0;
    }
    return EINVAL;
}

ENGINE_EXPORT int32_t engine_cpu_set_threads(int32_t count) { return pool_set_threads(count); }

ENGINE_EXPORT int32_t engine_cpu_threads() { return pool_threads(); }

ENGINE_EXPORT void engine_cpu_run(const Op* ops, int64_t num_ops, int64_t num_tokens, int64_t num_rows) {
    pool_run(chosen, ops, num_ops, Extent{num_tokens, num_rows});
}

// last_token of slot rows[i] = drawn[i], 0 where that is -1.
ENGINE_EXPORT void engine_cpu_advance(int64_t* last_token, const int64_t* rows, const int32_t* drawn, int64_t count) {
    for (int64_t i = 0; i < count; i++) last_token[rows[i]] = drawn[i] < 0 ? 0 : drawn[i];
}

// Fill in a step of `num_rows` rows (slots), the first `num_decode` of which add their slot's last token, the others
// q_lens tokens each of `host_tokens`. The slots' lengths
// are those after the step from then on. Returns the number of tokens, -1 where a row is longer than its page table.
ENGINE_EXPORT int64_t engine_cpu_step_inputs(
    const StepInputs* step, const int64_t* rows, int64_t num_rows, int64_t num_decode, const int32_t* q_lens,
    const int32_t* host_tokens) {
    int64_t token = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t slot = rows[row], context = step->seq_len[slot], end = context + q_lens[row];
        const int64_t num_pages = (end + step->page_size - 1) / step->page_size;
        if (num_pages > step->pages_stride) return -1;
        const int32_t* pages = step->slot_pages + slot * step->pages_stride;
        memcpy(step->page_table + row * step->pages_stride, pages, (size_t)num_pages * sizeof(int32_t));
        step->q_lens[row] = q_lens[row];
        step->kv_lens[row] = end;
        step->seq_len[slot] = end;
        for (int64_t position = context; position < end; position++, token++) {
            step->tokens[token] = row < num_decode ? step->last_token[slot] : (int64_t)*host_tokens++;
            step->positions[token] = position;
            step->locations[token] =
                (int64_t)pages[position / step->page_size] * step->page_size + position % step->page_size;
        }
    }
    return token;
}

ENGINE_EXPORT int64_t engine_cpu_packed_bytes(int32_t packing, int64_t rows, int64_t cols) {
    return num_tiles(rows) * tile_bytes(packing, cols);
}

// Tiles [first_tile, end_tile) of a matrix from a GGUF file's rows, `src_stride` bytes apart.
ENGINE_EXPORT void engine_cpu_pack(
    int32_t packing, int64_t rows, int64_t cols, const uint8_t* src, int64_t src_stride, uint8_t* out) {
    pack_matrix(packing, rows, cols, src, src_stride, out);
}

// The same from float32 rows, as Q8_0: groups of 32 columns, the last one filled up with zeros.
ENGINE_EXPORT void engine_cpu_pack_int8(int64_t rows, int64_t cols, const float* src, int64_t src_stride, uint8_t* out) {
    pack_int8(rows, cols, src, src_stride, out);
}
