// The one pool of threads. A run is a list of ops that every worker walks through; an op shares its work out by itself.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Pool;

// One thread's view of a run. An op goes by in phases: workers take items by next() until there are none left, and
// barrier() waits until all items of the phase are done and their writes are seen; one follows every op by itself.
//
// No phase waits for a worker that has taken nothing: the front of the server shares the cores, and a worker may be off
// its core for longer than an op lasts. When it comes back it gets no items, its reads of what is shared there may give
// anything, and it leaves; only the end of the run waits for that, for the run's memory may go then.
struct Worker {
    Pool* pool;
    int index;
    int count;
    uint32_t phase;
    int64_t taken;  // items of this phase
    int64_t total;  // of all workers, in this phase; -1: nobody has asked

    // The first of up to `step` items [returned, min(returned + step, total)) that nobody else has; -1: none left.
    // All workers of a phase name the same total, below 2^32.
    int64_t next(int64_t total, int64_t step);
    void barrier();
    // Memory of this worker's own, 64-byte aligned, kept between calls: contents are anything.
    void* scratch(size_t bytes);
    // Memory of the op, the same for all workers. Every worker must call it, with the same size; it is a barrier.
    void* shared(size_t bytes);
};
