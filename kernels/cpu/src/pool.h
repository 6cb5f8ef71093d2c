// The one pool of threads. A run is a list of ops that every worker walks through; an op shares its work out by itself.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Pool;

// One thread's view of a run. Within an op: next() hands out work until there is none, barrier() ends a phase (all
// workers have arrived, their writes are seen, next() starts again from 0). A barrier follows every op by itself.
struct Worker {
    Pool* pool;
    int index;
    int count;

    // The first of up to `step` items [returned, returned + step) below total that nobody else has; -1: none left.
    int64_t next(int64_t total, int64_t step);
    void barrier();
    // Memory of this worker's own, 64-byte aligned, kept between calls: contents are anything.
    void* scratch(size_t bytes);
    // Memory of the op, the same for all workers. Every worker must call it, with the same size; it is a barrier.
    void* shared(size_t bytes);
};
