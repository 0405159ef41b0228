// Threads, locks and conditions of the system. Those of C++ throw, which would add 60 KB of the
// standard library to the binary.
#pragma once
#include <chrono>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <errno.h>
#include <pthread.h>
#include <time.h>
#endif

typedef std::chrono::steady_clock Clock;

#if defined(_WIN32)

class Lock {
public:
    bool try_lock() { return TryAcquireSRWLockExclusive(&lock_); }
    void lock() { AcquireSRWLockExclusive(&lock_); }
    void unlock() { ReleaseSRWLockExclusive(&lock_); }

private:
    friend class Condition;
    SRWLOCK lock_ = SRWLOCK_INIT;
};

class Condition {
public:
    void wait(Lock& lock) { SleepConditionVariableSRW(&condition_, &lock.lock_, INFINITE, 0); }
    // False at the deadline.
    bool wait(Lock& lock, Clock::time_point deadline) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        return left > 0 && SleepConditionVariableSRW(&condition_, &lock.lock_, (DWORD)left, 0);
    }
    void notify_all() { WakeAllConditionVariable(&condition_); }

private:
    CONDITION_VARIABLE condition_ = CONDITION_VARIABLE_INIT;
};

template <void (*run)(void*)> class Thread {
public:
    bool start(void* with) {
        const HANDLE thread = CreateThread(nullptr, 0, begin, with, 0, nullptr);
        return thread && CloseHandle(thread);
    }

private:
    static DWORD WINAPI begin(void* with) { return run(with), 0; }
};

// What to do with a pointer of each thread when the thread ends.
template <void (*end)(void*)> class AtThreadEnd {
public:
    AtThreadEnd() : key_(FlsAlloc(call)) {}
    void set(void* pointer) { FlsSetValue(key_, pointer); }

private:
    static void NTAPI call(void* pointer) { end(pointer); }

    DWORD key_;
};

#else

class Lock {
public:
    bool try_lock() { return pthread_mutex_trylock(&lock_) == 0; }
    void lock() { pthread_mutex_lock(&lock_); }
    void unlock() { pthread_mutex_unlock(&lock_); }

private:
    friend class Condition;
    pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
};

class Condition {
public:
    Condition() {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
        pthread_cond_init(&condition_, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    void wait(Lock& lock) { pthread_cond_wait(&condition_, &lock.lock_); }
    // False at the deadline.
    bool wait(Lock& lock, Clock::time_point deadline) {
        const int64_t left = std::chrono::nanoseconds(deadline - Clock::now()).count();
        if (left <= 0) return false;
#if defined(__APPLE__)
        const timespec time = {(time_t)(left / BILLION), (long)(left % BILLION)};
        return pthread_cond_timedwait_relative_np(&condition_, &lock.lock_, &time) != ETIMEDOUT;
#else
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        const int64_t nanoseconds = time.tv_nsec + left;
        time.tv_sec += (time_t)(nanoseconds / BILLION);
        time.tv_nsec = (long)(nanoseconds % BILLION);
        return pthread_cond_timedwait(&condition_, &lock.lock_, &time) != ETIMEDOUT;
#endif
    }
    void notify_all() { pthread_cond_broadcast(&condition_); }

private:
    static constexpr int64_t BILLION = 1000000000;
    pthread_cond_t condition_;
};

template <void (*run)(void*)> class Thread {
public:
    bool start(void* with) { return pthread_create(&thread_, nullptr, begin, with) == 0; }
    void join() { pthread_join(thread_, nullptr); }

private:
    static void* begin(void* with) { return run(with), nullptr; }

    pthread_t thread_;
};

// What to do with a pointer of each thread when the thread ends.
template <void (*end)(void*)> class AtThreadEnd {
public:
    AtThreadEnd() { pthread_key_create(&key_, end); }
    void set(void* pointer) { pthread_setspecific(key_, pointer); }

private:
    pthread_key_t key_;
};

#endif

class Locked {
public:
    explicit Locked(Lock& lock) : lock_(lock) { lock_.lock(); }
    ~Locked() { lock_.unlock(); }
    Locked(const Locked&) = delete;

private:
    Lock& lock_;
};
