// Random numbers, and arrays in random layouts whose memory ends where the array does.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../src/interface.h"

struct Random {
    uint64_t state;

    uint64_t next() {  // splitmix64
        uint64_t x = state += 0x9E3779B97F4A7C15;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
        x = (x ^ x >> 27) * 0x94D049BB133111EB;
        return x ^ x >> 31;
    }
    int64_t between(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }
    double unit() { return (double)(next() >> 11) * 0x1p-53; }
    bool chance(double p) { return unit() < p; }
    double normal() {
        double sum = -6;
        for (int i = 0; i < 12; ++i) sum += unit();
        return sum;
    }
    template <typename T> T one_of(std::initializer_list<T> from) {
        return from.begin()[between(0, (int64_t)from.size() - 1)];
    }
};

// ---- kinds of numbers ----

enum Kind { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT32, UINT8, INT8 };

inline int64_t bytes_of(Kind kind) {
    return kind == FLOAT64 ? 8 : kind >= UINT8 ? 1 : kind == FLOAT16 || kind == BFLOAT16 ? 2 : 4;
}

// 16-bit numbers with so many bits behind the point.
inline uint16_t encode(double x, int mantissa, int bias) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0, infinite = (uint16_t)(0x7fff >> mantissa << mantissa);
    if (x != x) return infinite | 1;
    int exponent;
    frexp(x, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    const double bits = ((exponent + bias - 1) << mantissa) + nearbyint(ldexp(fabs(x), mantissa - exponent));
    return sign | (uint16_t)std::min(bits, (double)infinite);
}
inline double decode(uint16_t bits, int mantissa, int bias) {
    const int exponent = (bits & 0x7fff) >> mantissa, rest = bits & ((1 << mantissa) - 1);
    double x = ldexp(rest + (exponent ? 1 << mantissa : 0), std::max(exponent, 1) - bias - mantissa);
    if (exponent == 0x7fff >> mantissa) x = rest ? NAN : INFINITY;
    return bits & 0x8000 ? -x : x;
}

inline void put(Kind kind, char* to, double x) {
    const float f = (float)x;
    const int32_t i = kind == INT32 ? (int32_t)x : 0;
    const uint16_t half = kind == FLOAT16 ? encode(x, 10, 15) : kind == BFLOAT16 ? encode(x, 7, 127) : 0;
    const uint8_t byte = x != 0;
    if (kind == FLOAT32) memcpy(to, &f, 4);
    else if (kind == FLOAT64) memcpy(to, &x, 8);
    else if (kind == INT32) memcpy(to, &i, 4);
    else if (kind == UINT8) memcpy(to, &byte, 1);
    else if (kind == INT8) *to = (char)(int8_t)x;
    else memcpy(to, &half, 2);
}
inline double get(Kind kind, const char* from) {
    float f;
    double d;
    int32_t i;
    uint16_t half;
    if (kind == FLOAT32) return memcpy(&f, from, 4), f;
    if (kind == FLOAT64) return memcpy(&d, from, 8), d;
    if (kind == INT32) return memcpy(&i, from, 4), i;
    if (kind == UINT8) return *from;
    if (kind == INT8) return (int8_t)*from;
    memcpy(&half, from, 2);
    return kind == FLOAT16 ? decode(half, 10, 15) : decode(half, 7, 127);
}

// ---- arrays ----

// An array (item, head, row, column) in memory of its own; axes of length 1 are repeated.
class Array {
public:
    PolyattnArray view = {};

    Array() = default;
    Array(Random& random, Kind kind, std::vector<int64_t> shape, bool any_column = false)
        : kind_(kind), shape_(std::move(shape)) {
        std::vector<int> axes = {0, 1, 2};
        if (any_column) axes.push_back(3);
        for (size_t i = axes.size(); i > 1; --i)
            std::swap(axes[i - 1], axes[(size_t)random.between(0, (int64_t)i - 1)]);
        int64_t strides[4] = {0, 0, 0, 1}, size = any_column ? 1 : shape_[3], start = 0;
        for (int axis : axes) {
            const int64_t n = shape_[(size_t)axis], stride = size + (random.chance(0.2) ? random.between(0, 9) : 0);
            if (n == 1) {
                strides[axis] = 0;
                continue;
            }
            const bool back = random.chance(0.15);
            strides[axis] = back ? -stride : stride;
            start += back ? stride * (n - 1) : 0;
            // The last of an axis ends where it ends.
            size += stride * (n - 1);
        }
        if (!any_column && shape_[3] == 1) strides[3] = random.between(0, 1);
        memory_ = std::make_shared<Memory>((size_t)(size * bytes_of(kind)));
        view.item = strides[0], view.head = strides[1], view.row = strides[2], view.column = strides[3];
        view.data = memory_->at + start * bytes_of(kind);
        if (random.chance(0.4)) place_items(random);
    }

    explicit operator bool() const { return memory_ != nullptr; }
    const std::vector<int64_t>& shape() const { return shape_; }

    double operator()(int64_t item, int64_t head, int64_t row, int64_t column) const {
        return get(kind_, place(item, head, row, column));
    }
    void set(int64_t item, int64_t head, int64_t row, int64_t column, double x) {
        put(kind_, place(item, head, row, column), x);
    }
    // Call a function with the indices of each number.
    template <typename F> void each(F function) const {
        for (int64_t i = 0; i < shape_[0]; ++i)
            for (int64_t h = 0; h < shape_[1]; ++h)
                for (int64_t r = 0; r < shape_[2]; ++r)
                    for (int64_t c = 0; c < shape_[3]; ++c) function(i, h, r, c);
    }
    template <typename F> void fill(F function) {
        each([&](int64_t i, int64_t h, int64_t r, int64_t c) { set(i, h, r, c, function()); });
    }

    std::vector<char> bytes() const { return {memory_->at, memory_->at + memory_->size}; }
    void restore(const std::vector<char>& bytes) { memcpy(memory_->at, bytes.data(), bytes.size()); }
    // Whether the bytes between the numbers are those of before.
    bool keeps_gaps(const std::vector<char>& before) const {
        std::vector<char> now = bytes();
        each([&](int64_t i, int64_t h, int64_t r, int64_t c) {
            const ptrdiff_t at = place(i, h, r, c) - memory_->at;
            memcpy(now.data() + at, before.data() + at, (size_t)bytes_of(kind_));
        });
        return now == before;
    }

private:
    struct Memory {
        char* at;
        size_t size;
        explicit Memory(size_t n) : at((char*)malloc(n)), size(n) { memset(at, 0x5a, n); }
        ~Memory() { free(at); }
        Memory(const Memory&) = delete;
    };

    char* place(int64_t item, int64_t head, int64_t row, int64_t column) const {
        const int64_t first = offsets_ ? (*offsets_)[(size_t)item] : item * view.item;
        const int64_t at = first + head * view.head + row * view.row + (shape_[3] == 1 ? 0 : column * view.column);
        return (char*)view.data + at * bytes_of(kind_);
    }
    // The items in another order.
    void place_items(Random& random) {
        offsets_ = std::make_shared<std::vector<int64_t>>();
        // Of a repeated axis there are as many offsets as items.
        for (int64_t i = 0; i < std::max(shape_[0], (int64_t)8); ++i) offsets_->push_back(i * view.item);
        for (int64_t i = shape_[0]; i > 1; --i) {
            std::swap((*offsets_)[(size_t)i - 1], (*offsets_)[(size_t)random.between(0, i - 1)]);
        }
        view.offsets = offsets_->data();
        view.item = 12345;
    }

    Kind kind_ = FLOAT32;
    std::vector<int64_t> shape_;
    std::shared_ptr<Memory> memory_;
    std::shared_ptr<std::vector<int64_t>> offsets_;
};
