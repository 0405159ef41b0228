// Some rows of one item and key head, as the lanes of a vector or two, and the keys that they see.
#pragma once
#include "interface.h"
#include "vectors.h"

namespace POLYATTN_UNIT {

INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Where a row of an array begins.
INLINE int64_t offset_of(const PolyattnArray& x, int64_t item, int64_t head, int64_t row) {
    return (x.offsets ? x.offsets[item] : item * x.item) + head * x.head + row * x.row;
}
template <typename T> INLINE T* at(const PolyattnArray& x, int64_t item, int64_t head, int64_t row) {
    return (T*)x.data + offset_of(x, item, head, row);
}

struct Range {
    int64_t first, stop;
};

// The keys that a row may see by its position and by numbers for each row.
inline Range keys_of_row(const PolyattnCall& call, int64_t item, int64_t head, int64_t row) {
    Range keys = {0, call.keys};
    int64_t position = row + (call.positions ? call.positions[item] : 0);
    if (call.has_low) keys.first = clamp(position + call.low, 0, call.keys);
    if (call.has_high) keys.stop = clamp(position + call.high + 1, 0, call.keys);
    if (call.first.data) keys.first = max(keys.first, *at<int32_t>(call.first, item, head, row));
    if (call.stop.data) keys.stop = min(keys.stop, *at<int32_t>(call.stop, item, head, row));
    return {min(keys.first, keys.stop), keys.stop};
}

// Rows are counted over the query heads that share a key head: those of one position are adjacent.
template <typename T> struct Panel {
    static constexpr int width = Lanes<T>::width;

    int count;          // vectors: 1 or 2
    int used;           // rows; the lanes after them repeat the last
    int64_t first_row;  // the number of the first
    Range any_key, all_keys;  // the keys that any row sees, and those that all rows see
    int64_t first[2 * width], stop[2 * width], head[2 * width], row[2 * width];
    T maximum[2 * width], total[2 * width];
    bool has_output;

    int lanes() const { return count * width; }

    void begin(const PolyattnCall& call, int64_t item, int64_t key_head, int64_t number, int64_t stop_row) {
        const int64_t group = call.heads / call.key_heads;
        const int64_t left = stop_row - number;
        count = left > width ? 2 : 1;
        used = (int)min(left, lanes());
        first_row = number;
        any_key = {call.keys, 0};
        all_keys = {0, call.keys};
        has_output = false;
        for (int lane = 0; lane < lanes(); ++lane) {
            const int64_t r = number + (lane < used ? lane : used - 1);
            row[lane] = r / group;
            head[lane] = key_head * group + r % group;
            Range keys = keys_of_row(call, item, head[lane], row[lane]);
            first[lane] = keys.first;
            stop[lane] = keys.stop;
            any_key = {min(any_key.first, keys.first), max(any_key.stop, keys.stop)};
            all_keys = {max(all_keys.first, keys.first), min(all_keys.stop, keys.stop)};
            maximum[lane] = -infinity<T>();
            total[lane] = 0;
        }
    }
};

}  // namespace POLYATTN_UNIT
