// Pool and Worker: threads that sleep between runs and share out the items of a run's phases.
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "kernels.h"

#if defined(__x86_64__)
#define ENGINE_PAUSE() __builtin_ia32_pause()
#else
#define ENGINE_PAUSE() ((void)0)
#endif

namespace {

// How long a worker that waits burns its core before it sleeps. Others may want the core: the front of the server
// shares it.
constexpr int64_t SPIN_NS = 20 * 1000;
constexpr int MAX_THREADS = 1024;
// Phases that a helper may be behind.
constexpr uint32_t LATE = 4;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// A number that threads wait for to change.
struct alignas(64) Event {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void wait_while(uint32_t seen) {
        int64_t deadline = 0;
        for (uint32_t turn = 0;; turn++) {
            if (value.load(std::memory_order_acquire) != seen) return;
            ENGINE_PAUSE();
            if (turn % 32 == 31) {
                const int64_t now = now_ns();
                if (deadline == 0) deadline = now + SPIN_NS;
                if (now >= deadline) break;
            }
        }
        sleepers.fetch_add(1);
        while (value.load() == seen) {
            syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        }
        sleepers.fetch_sub(1);
    }

    void advance() {
        value.fetch_add(1);
        if (sleepers.load() != 0) syscall(SYS_futex, (uint32_t*)&value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
};

struct Buffer {
    void* data = nullptr;
    size_t size = 0;

    void* at_least(size_t bytes) {
        if (bytes > size) {
            free(data);
            const size_t rounded = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            data = aligned_alloc(4096, rounded);
            size = data == nullptr ? 0 : rounded;
            if (data == nullptr) {
                // There is no way to go on, and none back to Python from the middle of an op.
                fprintf(stderr, "engine: the CPU kernels got no %zu bytes of memory to work in\n", rounded);
                abort();
            }
        }
        return data;
    }
};

}  // namespace

struct Run {
    const KernelTable* table = nullptr;
    const Op* ops = nullptr;
    int64_t num_ops = 0;
    Extent extent = {0, 0};
    uint32_t first_phase = 0;
};

struct Pool {
    int count = 1;
    pthread_t threads[MAX_THREADS];
    Buffer own[MAX_THREADS];
    Buffer common;
    bool ending = false;

    Run run;
    Event start;
    // Workers that may be reading the run; and whether there is still one to join.
    alignas(64) std::atomic<int> inside{0};
    std::atomic<bool> open{false};

    // The phase (upper half) and how many of its items are taken (lower half): one number, so that a worker that is behind
    // never takes an item of a phase it does not know of.
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> done{0};
    // The phase once more, to wait for.
    Event phase;
};

namespace {

Pool pool;
pthread_mutex_t run_mutex = PTHREAD_MUTEX_INITIALIZER;

void walk(Worker& worker) {
    const Run& run = pool.run;
    for (int64_t i = 0; i < run.num_ops; i++) {
        // A helper that has been off its core does not walk through what is done: the run's end waits for it to leave.
        if (worker.index != 0 && (uint32_t)(pool.ticket.load(std::memory_order_relaxed) >> 32) - worker.phase > LATE)
            return;
        run.table->ops[run.ops[i].kind](run.ops[i].args, run.extent, worker);
        worker.barrier();
    }
}

struct Seat {
    int index;
    uint32_t seen;
};

void* serve(void* argument) {
    Seat seat = *(Seat*)argument;
    delete (Seat*)argument;
    while (true) {
        pool.start.wait_while(seat.seen);
        seat.seen = pool.start.value.load();
        if (pool.ending) return nullptr;
        pool.inside.fetch_add(1);
        // A run that has ended meanwhile is not to be read: its memory may be gone.
        if (pool.open.load()) {
            Worker worker{&pool, seat.index, pool.count, pool.run.first_phase, 0, -1};
            walk(worker);
        }
        pool.inside.fetch_sub(1);
    }
}

void end_threads() {
    if (pool.count == 1) return;
    pool.ending = true;
    pool.start.advance();
    for (int i = 1; i < pool.count; i++) pthread_join(pool.threads[i], nullptr);
    pool.ending = false;
    pool.count = 1;
}

// After a fork the child has this thread alone.
void forget_threads() {
    pool.count = 1;
    pool.inside.store(0);
    pool.open.store(false);
    pool.done.store(0);
    pool.ticket.store(0);
    pool.phase.value.store(0);
    pool.phase.sleepers.store(0);
    pool.start.sleepers.store(0);
    pthread_mutex_init(&run_mutex, nullptr);
}

}  // namespace

// At load, so that it holds for the first run too.
static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);

int64_t Worker::next(int64_t items, int64_t step) {
    total = items;
    uint64_t seen = pool->ticket.load(std::memory_order_acquire);
    while (true) {
        const int64_t begin = (int64_t)(uint32_t)seen;
        if ((uint32_t)(seen >> 32) != phase || begin >= items) return -1;
        const int64_t end = begin + step < items ? begin + step : items;
        const uint64_t after = (seen & ~0xFFFFFFFFull) | (uint64_t)end;
        if (pool->ticket.compare_exchange_weak(seen, after, std::memory_order_acq_rel)) {
            taken += end - begin;
            return begin;
        }
    }
}

void Worker::barrier() {
    // A phase that nobody shares out has one item: having been there.
    if (total < 1) next(1, 1);
    if (taken > 0 && pool->done.fetch_add(taken, std::memory_order_acq_rel) + taken == total) {
        pool->done.store(0, std::memory_order_relaxed);
        pool->ticket.store((uint64_t)(phase + 1) << 32, std::memory_order_release);
        pool->phase.advance();
    } else {
        pool->phase.wait_while(phase);
    }
    phase++;
    taken = 0;
    total = -1;
}

void* Worker::scratch(size_t bytes) { return pool->own[index].at_least(bytes); }

void* Worker::shared(size_t bytes) {
    if (next(1, 1) == 0) pool->common.at_least(bytes);
    barrier();
    return pool->common.data;
}

int pool_set_threads(int count) {
    if (count < 1 || count > MAX_THREADS) return EINVAL;
    pthread_mutex_lock(&run_mutex);
    end_threads();
    int error = 0;
    for (int i = 1; i < count && error == 0; i++) {
        Seat* seat = new Seat{i, pool.start.value.load()};
        error = pthread_create(&pool.threads[i], nullptr, serve, seat);
        if (error == 0) pool.count = i + 1;
        else delete seat;
    }
    pthread_mutex_unlock(&run_mutex);
    return error;
}

int pool_threads() { return pool.count; }

void pool_run(const KernelTable* table, const Op* ops, int64_t num_ops, Extent extent) {
    pthread_mutex_lock(&run_mutex);
    const uint32_t phase = (uint32_t)(pool.ticket.load() >> 32);
    pool.run = Run{table, ops, num_ops, extent, phase};
    Worker worker{&pool, 0, pool.count, phase, 0, -1};
    pool.open.store(true);
    if (pool.count > 1) pool.start.advance();
    walk(worker);
    pool.open.store(false);
    for (int turn = 0; pool.inside.load() != 0; turn++) {
        // Whoever is inside may need this core to get out.
        if (turn < 1000) ENGINE_PAUSE();
        else sched_yield();
    }
    pthread_mutex_unlock(&run_mutex);
}
