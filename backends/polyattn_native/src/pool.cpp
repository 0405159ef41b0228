#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(_WIN32)
#include <malloc.h>
#endif

namespace {

typedef std::chrono::steady_clock Clock;

// A caller comes back so often, so that Python can handle an interrupt.
constexpr auto QUANTUM = std::chrono::milliseconds(30);
// A thread that looks for work pauses so often before it sleeps: waking it takes longer.
constexpr int SPINS = 2000;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// ---- memory ----

void* allocate(size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes, 64);
#else
    void* found = nullptr;
    return posix_memalign(&found, 64, bytes) ? nullptr : found;
#endif
}

void release(void* memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

// A thread's scratch memory is kept for its next call: fresh pages cost more than a small call.
struct Kept {
    void* memory = nullptr;
    size_t bytes = 0;
    bool lent = false;
    ~Kept() { release(memory); }
};
thread_local Kept kept;
constexpr size_t MOST_KEPT = 4 << 20;

struct Scratch {
    void* memory;
    bool is_kept;

    explicit Scratch(size_t bytes) : memory(nullptr), is_kept(!kept.lent && bytes <= MOST_KEPT) {
        if (!is_kept) {
            memory = allocate(bytes);
            return;
        }
        if (kept.bytes < bytes) {
            release(kept.memory);
            kept.memory = allocate(bytes);
            kept.bytes = kept.memory ? bytes : 0;
        }
        memory = kept.memory;
        kept.lent = memory != nullptr;
    }
    ~Scratch() {
        if (is_kept) kept.lent = false;
        else release(memory);
    }
    Scratch(const Scratch&) = delete;
};

// ---- a call under way ----

struct Run {
    PolyattnCall call;
    Work work;
    Scratch scratch;  // of the caller
    bool in_task = false, is_shared = false;
    std::atomic<int64_t> next{0};
    std::atomic<bool> stop{false};
    int places = 0;  // for more threads; under the pool's lock, as active is
    int active = 0;

    Run(const PolyattnCall& c, const Work& w) : call(c), work(w), scratch(w.scratch) {}

    bool begin_next(void* memory) {
        const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= work.tasks) return false;
        work.begin(call, work, task, memory);
        return true;
    }
};

// ---- the pool ----

class Pool {
public:
    // Offer a run to some threads; false if they work for another.
    bool offer(Run& run, int helpers) {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock() || run_ != nullptr) return false;
        while ((int)threads_.size() < helpers) {
            try {
                threads_.emplace_back([this] { serve(); });
            } catch (...) {
                break;
            }
        }
        run_ = &run;
        run.places = helpers;
        offers_.fetch_add(1);
        lock.unlock();
        if (sleepers_.load() > 0) offers_.notify_all();
        return true;
    }

    // Wait until no thread works on a run; false at the deadline.
    bool wait(Run& run, Clock::time_point deadline) {
        std::unique_lock lock(mutex_);
        if (run_ == &run) run_ = nullptr;
        for (int spin = 0; run.active > 0 && spin < SPINS; ++spin) {
            lock.unlock();
            pause();
            lock.lock();
        }
        return idle_.wait_until(lock, deadline, [&] { return run.active == 0; });
    }

    void end() {
        {
            std::lock_guard lock(mutex_);
            quitting_ = true;
            offers_.fetch_add(1);
        }
        offers_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

private:
    void serve() {
        for (uint32_t seen = 0;;) {
            for (int spin = 0; offers_.load() == seen && spin < SPINS; ++spin) pause();
            sleepers_.fetch_add(1);
            offers_.wait(seen);
            sleepers_.fetch_sub(1);
            seen = offers_.load();
            Run* run = nullptr;
            {
                std::lock_guard lock(mutex_);
                if (quitting_) return;
                if (run_ && run_->places > 0) {
                    run = run_;
                    --run->places;
                    ++run->active;
                }
            }
            if (!run) continue;
            work_on(*run);
            std::lock_guard lock(mutex_);
            if (--run->active == 0) idle_.notify_all();
        }
    }

    static void work_on(Run& run) {
        Scratch scratch(run.work.scratch);
        if (!scratch.memory) return;  // the caller takes the tasks
        while (!run.stop && run.begin_next(scratch.memory)) {
            while (!run.stop && !run.work.step(run.call, run.work, scratch.memory)) {
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable idle_;
    std::atomic<uint32_t> offers_{0};
    std::atomic<int> sleepers_{0};
    Run* run_ = nullptr;
    bool quitting_ = false;
    std::vector<std::thread> threads_;
};

// In the child of a fork there are no threads and a lock may be held: it gets a pool of its own, and
// the old one is never touched again.
alignas(Pool) char storage[2][sizeof(Pool)];
Pool* pool = nullptr;

struct Process {
    Process() {
        pool = new (storage[0]) Pool;
#if !defined(_WIN32)
        pthread_atfork(nullptr, nullptr, [] {
            std::memset(storage[1], 0, sizeof(Pool));
            pool = new (storage[pool == (Pool*)storage[0]]) Pool;
            kept.lent = false;
        });
#endif
    }
    ~Process() {
#if !defined(_WIN32)
        pool->end();
#endif
    }
} process;

void close(Run* run, void*& state) {
    release(run->work.shared_memory);
    delete run;
    state = nullptr;
}

}  // namespace

int run_tasks(const PolyattnCall& call, Work (*make)(const PolyattnCall&), void*& state) {
    Run* run = (Run*)state;
    if (!run) {
        Work work = make(call);
        if (work.shared) {
            work.shared_memory = allocate(work.shared);
            if (!work.shared_memory) return -1;
            std::memset(work.shared_memory, 0, work.shared);
        }
        run = new (std::nothrow) Run(call, work);
        if (!run) {
            release(work.shared_memory);
            return -1;
        }
        if (!run->scratch.memory) {
            close(run, state);
            return -1;
        }
        const int64_t helpers = (work.tasks < call.threads ? work.tasks : call.threads) - 1;
        run->is_shared = helpers > 0 && pool->offer(*run, (int)helpers);
    }
    state = run;
    const Clock::time_point deadline = Clock::now() + QUANTUM;
    while (run->in_task || (run->in_task = run->begin_next(run->scratch.memory))) {
        run->in_task = !run->work.step(run->call, run->work, run->scratch.memory);
        if (Clock::now() >= deadline) {
            if (run->in_task || run->next.load() < run->work.tasks) return 1;
            break;
        }
    }
    if (run->is_shared && !pool->wait(*run, deadline)) return 1;
    if (run->work.end) run->work.end(run->call, run->work, run->work.shared_memory);
    close(run, state);
    return 0;
}

void cancel_tasks(void*& state) {
    Run* run = (Run*)state;
    if (!run) return;
    run->stop = true;
    if (run->is_shared) {
        while (!pool->wait(*run, Clock::now() + QUANTUM)) {
        }
    }
    close(run, state);
}
