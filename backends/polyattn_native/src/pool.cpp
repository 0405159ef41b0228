#include "pool.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>

#include "threads.h"

#if defined(_WIN32)
#include <malloc.h>
#endif

namespace {

// A caller comes back so often, so that Python can handle an interrupt.
constexpr auto QUANTUM = std::chrono::milliseconds(30);
// A thread that looks for work pauses so often before it sleeps: waking it takes longer.
constexpr int SPINS = 2000;
constexpr int MAX_THREADS = 1024;

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
struct Arena {
    void* memory = nullptr;
    size_t bytes = 0;
    bool in_use = false;
};
thread_local Arena arena;
AtThreadEnd<release> at_thread_end;
constexpr size_t MAX_ARENA = 4 << 20;

struct Scratch {
    void* memory;
    bool uses_arena;

    explicit Scratch(size_t bytes) : memory(nullptr), uses_arena(!arena.in_use && bytes <= MAX_ARENA) {
        if (!uses_arena) {
            memory = allocate(bytes);
            return;
        }
        if (arena.bytes < bytes) {
            release(arena.memory);
            arena.memory = allocate(bytes);
            arena.bytes = arena.memory ? bytes : 0;
            at_thread_end.set(arena.memory);
        }
        memory = arena.memory;
        arena.in_use = memory != nullptr;
    }
    ~Scratch() {
        if (uses_arena) arena.in_use = false;
        else release(memory);
    }
    Scratch(const Scratch&) = delete;
};

// ---- a call under way ----

// How many forks led to this process since the library was loaded.
int forks = 0;

struct Run {
    PolyattnCall call;
    Work work;
    Scratch scratch;  // of the caller
    bool in_task = false, is_shared = false;
    std::atomic<int64_t> next{0};
    std::atomic<bool> stop{false};
    int places = 0;  // for more threads; under the pool's lock, as active is
    int active = 0;
    const int began = forks;
    fenv_t arithmetic;  // of the caller: how it rounds, and whether it flushes small numbers to 0

    Run(const PolyattnCall& c, const Work& w) : call(c), work(w), scratch(w.scratch) { fegetenv(&arithmetic); }

    // In the child of a fork, whether threads had begun to work: they are in the parent only.
    bool is_cut() {
        if (began != forks) is_shared = false;
        return began != forks && active > 0;
    }

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
        if (!lock_.try_lock()) return false;
        const bool is_free = run_ == nullptr;
        if (is_free) {
            while (count_ < helpers && count_ < MAX_THREADS && threads_[count_].start(this)) ++count_;
            run_ = &run;
            run.places = helpers;
            offers_.fetch_add(1);
        }
        lock_.unlock();
        if (is_free) offered_.notify_all();
        return is_free;
    }

    // Wait until no thread works on a run; false at the deadline.
    bool wait(Run& run, Clock::time_point deadline) {
        Locked locked(lock_);
        if (run_ == &run) run_ = nullptr;
        for (int spin = 0; run.active > 0 && spin < SPINS; ++spin) {
            lock_.unlock();
            relax();
            lock_.lock();
        }
        while (run.active > 0) {
            if (!idle_.wait(lock_, deadline)) return run.active == 0;
        }
        return true;
    }

#if !defined(_WIN32)
    void end() {
        {
            Locked locked(lock_);
            quitting_ = true;
            offers_.fetch_add(1);
        }
        offered_.notify_all();
        for (int i = 0; i < count_; ++i) threads_[i].join();
    }
#endif

private:
    static void serve(void* pool) { ((Pool*)pool)->serve(); }

    void serve() {
        for (uint32_t seen = 0;;) {
            for (int spin = 0; offers_.load() == seen && spin < SPINS; ++spin) relax();
            Run* run = nullptr;
            {
                Locked locked(lock_);
                while (offers_.load() == seen) offered_.wait(lock_);
                seen = offers_.load();
                if (quitting_) return;
                if (run_ && run_->places > 0) {
                    run = run_;
                    --run->places;
                    ++run->active;
                }
            }
            if (!run) continue;
            work_on(*run);
            Locked locked(lock_);
            if (--run->active == 0) idle_.notify_all();
        }
    }

    // A process that ends waits for the tasks that its threads have begun.
    void work_on(Run& run) {
        Scratch scratch(run.work.scratch);
        if (!scratch.memory) return;  // the caller takes the tasks
        fesetenv(&run.arithmetic);
        while (!run.stop && !quitting_ && run.begin_next(scratch.memory)) {
            while (!run.stop && !run.work.step(run.call, run.work, scratch.memory)) {}
        }
    }

    Lock lock_;
    Condition offered_, idle_;
    std::atomic<uint32_t> offers_{0};
    Run* run_ = nullptr;
    std::atomic<bool> quitting_{false};
    int count_ = 0;
    Thread<serve> threads_[MAX_THREADS];
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
            memset(storage[1], 0, sizeof(Pool));
            pool = new (storage[pool == (Pool*)storage[0]]) Pool;
            ++forks;
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
    run->~Run();
    release(run);
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
            memset(work.shared_memory, 0, work.shared);
        }
        void* memory = allocate(sizeof(Run));
        if (!memory) {
            release(work.shared_memory);
            return -1;
        }
        run = new (memory) Run(call, work);
        if (!run->scratch.memory) {
            close(run, state);
            return -1;
        }
        const int64_t helpers = (work.tasks < call.threads ? work.tasks : call.threads) - 1;
        run->is_shared = helpers > 0 && pool->offer(*run, (int)helpers);
    } else if (run->is_cut()) {
        close(run, state);
        return -2;
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

double share_of_tasks(const void* state) {
    const Run* run = (const Run*)state;
    if (!run) return 0;
    const int64_t begun = run->next.load(), tasks = run->work.tasks;
    return begun < tasks ? (double)begun / (double)tasks : 1;
}

void cancel_tasks(void*& state) {
    Run* run = (Run*)state;
    if (!run) return;
    run->stop = true;
    run->is_cut();  // then nothing is to wait for
    if (run->is_shared) {
        while (!pool->wait(*run, Clock::now() + QUANTUM)) {}
    }
    close(run, state);
}
