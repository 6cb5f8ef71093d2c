// Reading pages ahead of attention.
#pragma once
#include "attention_tiles.h"

namespace ENGINE_ISA {
namespace paged {

// Pieces of memory that may be asked for at once.
constexpr int64_t PREFETCH_RANGES = 512;

// Asks for lines of memory some time before the direct way gets there, in the order it reads them: the keys of a
// partition, then its values. Without it a core waits for memory most of the time, as pages lie anywhere. Lines go to
// the second-level cache, one by one between computations (PrefetchCursor): a burst would hold up the loads at hand.
struct PrefetchStream {
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

    Range* ranges = nullptr;  // PREFETCH_RANGES of them: what may be asked for
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
        while (n > 0 && !idle && last < ranges + PREFETCH_RANGES) {
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
struct PrefetchCursor {
    PrefetchStream& stream;
    PrefetchStream::Range now;
    PrefetchStream::Range *next, *last;

    inline __attribute__((always_inline)) explicit PrefetchCursor(PrefetchStream& stream)
        : stream(stream), now(stream.now), next(stream.next), last(stream.last) {}
    inline __attribute__((always_inline)) ~PrefetchCursor() {
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

inline void PrefetchStream::finish() {
    PrefetchCursor cursor(*this);
    while (cursor.step()) {}
}

}  // namespace paged
}  // namespace ENGINE_ISA
