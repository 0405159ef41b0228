// How a call is cut into tasks, and what the pool needs of a unit to run them.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "interface.h"

// The tasks of a call, which threads take in turn, and what each does one step at a time.
struct Work {
    int64_t tasks;
    int64_t rows;     // of a task
    size_t scratch;   // bytes that a thread needs
    // Begin a task; take one step of it, true once it is done.
    void (*begin)(const PolyattnCall&, const Work&, int64_t task, void* scratch);
    bool (*step)(const PolyattnCall&, const Work&, void* scratch);
    // What follows once all tasks are done; or null.
    void (*end)(const PolyattnCall&, const Work&, void* shared);
    size_t shared;  // bytes that all threads share, zeros at first
    void* shared_memory;
};

// The functions of an instruction set, in float and double.
struct Unit {
    const char* name;
    Work (*attend[2])(const PolyattnCall&);
    Work (*differentiate[2])(const PolyattnCall&);
    Work (*multiply[2])(const PolyattnCall&);
};

// What a thread does between two looks at what another one writes.
inline __attribute__((always_inline)) void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Memory cut into arrays that begin at multiples of 64 bytes.
class BumpAllocator {
public:
    explicit BumpAllocator(void* base) : at_((char*)base), used_(0) {}
    template <typename T> T* take(int64_t count) {
        T* found = (T*)(at_ + used_);
        used_ += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return found;
    }
    size_t used() const { return used_; }

private:
    char* at_;
    size_t used_;
};
