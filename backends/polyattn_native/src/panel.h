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

// The keys that a row may see by its position and by numbers for each row, of one of its ranges.
inline Range keys_of_row(const PolyattnCall& call, int64_t item, int64_t head, int64_t row, int64_t range) {
    Range keys = {0, call.keys};
    int64_t position = row + (call.positions ? call.positions[item] : 0);
    if (call.has_low) keys.first = clamp(position + call.low, 0, call.keys);
    if (call.has_high) keys.stop = clamp(position + call.high + 1, 0, call.keys);
    if (call.first.data) {
        keys.first = max(keys.first, at<int32_t>(call.first, item, head, row)[range * call.first.column]);
    }
    if (call.stop.data) keys.stop = min(keys.stop, at<int32_t>(call.stop, item, head, row)[range * call.stop.column]);
    return {min(keys.first, keys.stop), keys.stop};
}

// For each range of rows, the keys that some of them see. Those of two ranges may overlap.
struct Ranges {
    int64_t count;
    Range of[POLYATTN_RANGES];

    void clear(const PolyattnCall& call) {
        count = max(call.ranges, 1);
        for (int64_t i = 0; i < count; ++i) of[i] = {call.keys, 0};
    }
    void add(int64_t i, Range keys) {
        if (keys.first >= keys.stop) return;
        of[i] = {min(of[i].first, keys.first), max(of[i].stop, keys.stop)};
    }
    void add(const Ranges& more) {
        for (int64_t i = 0; i < count; ++i) add(i, more.of[i]);
    }
    // From the first to the last key of all.
    Range hull() const {
        Range keys = of[0];
        for (int64_t i = 1; i < count; ++i) keys = {min(keys.first, of[i].first), max(keys.stop, of[i].stop)};
        return keys;
    }
    // The first block of `size` keys at or after `from`, where one begins, of which a row may see a key. Blocks begin
    // at multiples of their size from a first key.
    int64_t next(int64_t from, int64_t size, int64_t first = 0) const {
        int64_t found = INT64_MAX;
        for (int64_t i = 0; i < count; ++i) {
            if (of[i].stop > from) found = min(found, max(from, first + (of[i].first - first) / size * size));
        }
        return found;
    }
    bool touches(Range block) const {
        for (int64_t i = 0; i < count; ++i) {
            if (of[i].first < block.stop && of[i].stop > block.first) return true;
        }
        return false;
    }
};

// The keys of a row that are added one after another: then their sum is added to that of the keys before, and the next
// begins with 0. Only keys that the row sees count, so its bits do not depend on where blocks begin.
constexpr int FOLD = 1024;

// Rows are counted over the query heads that share a key head: those of one position are adjacent.
template <typename T> struct Panel {
    static constexpr int width = Lanes<T>::width;

    int count;          // vectors: 1 or 2
    int used;           // rows; the lanes after them repeat the last, or all rows
    int64_t first_row;  // the number of the first
    int64_t head[2 * width], row[2 * width];  // of each lane
    Ranges ranges;                            // of keys that some row sees
    // The keys that any row sees, those that all rows see, and the first and last keys of each lane. If rows have
    // several ranges, `narrow` writes these for each block.
    Range any_key, all_keys;
    int64_t first[2 * width], stop[2 * width];
    bool has_gaps;  // whether a row sees two ranges of the block: then `hide_outside` reads the ranges again
    T maximum[2 * width], total[2 * width];
    bool has_output, has_folded;
    bool folds;                                // whether a row may see more keys than FOLD
    typename Lanes<T>::Int until_fold[2 * width];  // keys until the next fold
    T folded[2 * width], maximum_of_folded[2 * width];  // the totals of the keys before the last fold; their reference

    int lanes() const { return count * width; }
    bool sees_all(Range keys) const { return !has_gaps && keys.first >= all_keys.first && keys.stop <= all_keys.stop; }

    // With `cuts` the second vector ends before a row that sees later keys only, as that of another document.
    void begin(const PolyattnCall& call, int64_t item, int64_t key_head, int64_t number, int64_t stop_row,
               int repeat = 0, bool cuts = false) {
        const int64_t group = call.heads / call.key_heads;
        const int64_t left = stop_row - number;
        count = left > width ? 2 : 1;
        used = (int)min(left, lanes());
        first_row = number;
        any_key = {call.keys, 0};
        all_keys = {0, call.keys};
        has_gaps = has_output = has_folded = folds = false;
        ranges.clear(call);
        for (int lane = 0; lane < lanes(); ++lane) {
            const int64_t r = number + min(repeat ? lane % repeat : lane, used - 1);
            row[lane] = r / group;
            head[lane] = key_head * group + r % group;
            const Range keys = keys_of_row(call, item, head[lane], row[lane], 0);
            if (cuts && lane >= width && lane < used && keys.first >= any_key.stop) {
                used = lane--;  // and look at this lane again
                count = used > width ? 2 : 1;
                continue;
            }
            ranges.add(0, keys);
            int64_t most = keys.stop - keys.first;
            for (int64_t i = 1; i < ranges.count; ++i) {
                const Range more = keys_of_row(call, item, head[lane], row[lane], i);
                ranges.add(i, more);
                most += more.stop - more.first;
            }
            folds = folds || most > FOLD;
            until_fold[lane] = FOLD;
            first[lane] = keys.first;
            stop[lane] = keys.stop;
            any_key = {min(any_key.first, keys.first), max(any_key.stop, keys.stop)};
            all_keys = {max(all_keys.first, keys.first), min(all_keys.stop, keys.stop)};
            maximum[lane] = maximum_of_folded[lane] = -infinity<T>();
            total[lane] = folded[lane] = 0;
        }
    }

    // Look at what the rows see of a block, if they have several ranges. Of a row with the ranges 0-4 and 300-310,
    // and blocks of 256 keys, the first block has 0-4 and the second 300-310: no gaps. The ranges 0-4 and 100-110
    // are both in the first block: 0-110, with gaps.
    void narrow(const PolyattnCall& call, int64_t item, Range block) {
        if (ranges.count == 1) return;
        has_gaps = false;
        any_key = all_keys = {block.first, block.first};
        if (!ranges.touches(block)) return;
        any_key = {block.stop, block.first};
        all_keys = block;
        for (int lane = 0; lane < lanes(); ++lane) {
            Range found = {block.stop, block.first};  // none
            for (int64_t i = 0; i < ranges.count; ++i) {
                Range keys = keys_of_row(call, item, head[lane], row[lane], i);
                keys = {max(keys.first, block.first), min(keys.stop, block.stop)};
                if (keys.first >= keys.stop) continue;
                has_gaps = has_gaps || found.first < found.stop;
                found = {min(found.first, keys.first), keys.stop};
            }
            first[lane] = found.first;
            stop[lane] = found.stop;
            if (found.first < found.stop) any_key = {min(any_key.first, found.first), max(any_key.stop, found.stop)};
            all_keys = {max(all_keys.first, found.first), min(all_keys.stop, found.stop)};
        }
    }
};

}  // namespace POLYATTN_UNIT
