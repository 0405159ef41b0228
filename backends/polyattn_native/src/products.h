// Products of a strided matrix, whose numbers are broadcast, and a panel.
//
// A panel has a vector or two of columns: out[m][column] = sum over k of a(m, k) · panel[k][column].
// Each sum goes over k in order, whatever the tile, so its bits do not depend on how a block is cut.
#pragma once
#include "panel.h"
#include "rows.h"
#include "vectors.h"

namespace POLYATTN_UNIT {

// The most rows of a tile with so many vectors: its sums, a column and a number fill the registers.
template <int Count> constexpr int tile_rows() {
#if defined(__AVX512F__) || defined(__aarch64__)
    return Count == 2 ? 13 : 12;
#else
    return Count == 2 ? 6 : 12;
#endif
}

// The order of the numbers a(m, k): m or k is contiguous.
enum Order { OUTER, INNER };

// Where the sums begin: with 0, with out, or with it times a factor by column.
template <typename T> struct Accumulate {
    bool add = false;
    const T* factor = nullptr;
};

template <typename T> struct Matrix {
    const T* data;
    ptrdiff_t stride;  // between m if k is contiguous, between k otherwise
    // The numbers of k may be in parts, as long as `part` each: one after another, or as a table says.
    int64_t part = (int64_t)1 << 62;
    ptrdiff_t part_stride = 0;
    const int32_t* table = nullptr;
    int64_t first = 0;  // the place of k = 0 in its part

    // The numbers of a key, in a matrix of keys or values.
    const T* at(int64_t key) const {
        if (!table) return data + key * stride;
        return data + table[(first + key) / part] * part_stride + (first + key) % part * stride;
    }
    // The matrix without so many keys at its begin.
    Matrix after(int64_t keys) const {
        if (!table) return {data + keys * stride, stride};
        const int64_t from = first + keys;
        return {data, stride, part, part_stride, table + from / part, from % part};
    }
};

// Integers, and of each key the step of its numbers.
template <typename T> struct Codes {
    Matrix<int8_t> codes;
    Matrix<T> steps;

    Codes after(int64_t keys) const { return {codes.after(keys), steps.after(keys)}; }
};

// Pages of fewer keys are copied, unless few rows read them: they would leave most sums of a tile unused.
constexpr int64_t MIN_PAGE = 8;

// Whether the keys and values of a block are converted or copied.
INLINE bool copies(const PolyattnCall& call, bool few = false) {
    return converts(call) || call.key_steps.data || (call.table.data && call.page < MIN_PAGE && !few);
}

// Keys or values of a block, of integers times their steps.
template <typename T>
Matrix<T> scaled_block(const PolyattnCall& call, const PolyattnArray& array, int64_t item, int64_t head, Range keys,
                       int64_t size, T* block) {
    const bool is_key = &array == &call.key;
    const PolyattnArray& steps = is_key ? call.key_steps : call.value_steps;
    const int64_t each = is_key ? call.step_keys : 1;  // so many keys have one row of steps
    const T* row = at<T>(steps, item, head, keys.first / each);
    const int8_t* codes = (const int8_t*)array.data + offset_of(array, item, head, keys.first);
    int64_t left = each - keys.first % each;
    for (T* to = block; to < block + (keys.stop - keys.first) * size; to += size, codes += array.row) {
        scale_codes(codes, row, steps.column, size, to);
        if (--left == 0) row += steps.row, left = each;
    }
    return {block, size};
}

// Keys or values of a block: in place, or copied.
template <typename T>
Matrix<T> block_of(const PolyattnCall& call, const PolyattnArray& array, int64_t item, int64_t head, Range keys,
                   int64_t size, T* block, bool few = false) {
    const T* from = (const T*)array.data;
    const int32_t* table = call.table.data ? at<int32_t>(call.table, item, 0, 0) : nullptr;
    if (!copies(call, few)) {
        if (!table) return {from + offset_of(array, item, head, keys.first), array.row};
        const Matrix<T> whole = {from + head * array.head, array.row, call.page, array.item, table};
        return whole.after(keys.first);
    }
    if (call.key_steps.data) return scaled_block(call, array, item, head, keys, size, block);
    for (int64_t key = keys.first; key < keys.stop; ++key) {
        const int64_t offset =
            table ? offset_of(array, table[key / call.page], head, key % call.page) : offset_of(array, item, head, key);
        T* to = block + (key - keys.first) * size;
        const T* found = numbers_at(call, from, offset, size, to);
        if (found != to) __builtin_memcpy(to, found, (size_t)size * sizeof(T));
    }
    return {block, size};
}

// A tile of M rows: its sums stay in registers.
template <typename T, int Count, Order order, int M>
void multiply_tile(Matrix<T> a, const T* panel, int64_t inner, T* out, Accumulate<T> accumulate) {
    constexpr int width = Lanes<T>::width;
    Vector<T> sums[M][Count] = {};
    if (accumulate.factor) {
        Vector<T> factors[Count];
        UNROLL for (int v = 0; v < Count; ++v)
            factors[v] = load(accumulate.factor + v * width);
        UNROLL for (int m = 0; m < M; ++m) {
            UNROLL for (int v = 0; v < Count; ++v)
                sums[m][v] = load(out + (m * Count + v) * width) * factors[v];
        }
    } else if (accumulate.add) {
        UNROLL for (int m = 0; m < M; ++m) {
            UNROLL for (int v = 0; v < Count; ++v)
                sums[m][v] = load(out + (m * Count + v) * width);
        }
    }
    int64_t k = 0;
    for (int64_t part = 0, first = a.first; k < inner; ++part, first = 0) {
        const T* numbers = a.data + (a.table ? a.table[part] : part) * a.part_stride + first * a.stride;
        for (const int64_t stop = min(inner, k + a.part - first); k < stop; ++k) {
            Vector<T> columns[Count];
            UNROLL for (int v = 0; v < Count; ++v)
                columns[v] = load(panel + v * width);
            UNROLL for (int m = 0; m < M; ++m) {
                T number = order == INNER ? numbers[m * a.stride] : numbers[m];
                UNROLL for (int v = 0; v < Count; ++v)
                    sums[m][v] += number * columns[v];
            }
            panel += Count * width;
            numbers += order == INNER ? 1 : a.stride;
        }
    }
    UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int v = 0; v < Count; ++v)
            store<T>(out + (m * Count + v) * width, sums[m][v]);
    }
}

// A tile of as many rows, M at most.
template <typename T, int Count, Order order, int M>
INLINE void multiply_up_to(int rows, Matrix<T> a, const T* panel, int64_t inner, T* out, Accumulate<T> accumulate) {
    if (rows == M) return multiply_tile<T, Count, order, M>(a, panel, inner, out, accumulate);
    if constexpr (M > 1) multiply_up_to<T, Count, order, M - 1>(rows, a, panel, inner, out, accumulate);
}

// Compute all rows, in tiles whose sizes differ by one at most.
template <typename T, int Count, Order order>
void multiply(int64_t rows, Matrix<T> a, const T* panel, int64_t inner, T* out, Accumulate<T> accumulate = {}) {
    constexpr int most_rows = tile_rows<Count>();
    int64_t tiles = (rows + most_rows - 1) / most_rows, done = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        int64_t end = rows * (tile + 1) / tiles;
        Matrix<T> part = a;
        part.data += done * (order == INNER ? a.stride : 1);
        multiply_up_to<T, Count, order, most_rows>((int)(end - done), part, panel, inner,
                                                   out + done * Count * Lanes<T>::width, accumulate);
        done = end;
    }
}

// The product of numbers and weights where a number may not be finite: a weight of -0 hides it. Its
// sums have the bits of `multiply`.
template <typename T>
void multiply_seen(int64_t rows, Matrix<T> a, const T* weights, int lanes, int64_t inner, T* out,
                   Accumulate<T> accumulate) {
    typedef typename Lanes<T>::Int Int;
    const Int sign = (Int)1 << (sizeof(T) * 8 - 1);
    for (int64_t m = 0; m < rows; ++m) {
        for (int v = 0; v < lanes; v += Lanes<T>::width) {
            T* to = out + m * lanes + v;
            Vector<T> sum = {};
            if (accumulate.factor) sum = load(to) * load(accumulate.factor + v);
            else if (accumulate.add) sum = load(to);
            for (int64_t k = 0; k < inner; ++k) {
                Vector<T> weight = load(weights + k * lanes + v);
                Vector<T> more = a.at(k)[m] * weight + sum;
                sum = select<T>((Ints<T>)weight == sign, sum, more);
            }
            store<T>(to, sum);
        }
    }
}

// Numbers of a block times the weights of a panel.
template <typename T>
void multiply_weights(const Panel<T>& panel, int64_t rows, Matrix<T> a, const T* weights, int64_t inner, T* out,
                      Accumulate<T> accumulate, bool hides_nonfinite) {
    if (hides_nonfinite) multiply_seen(rows, a, weights, panel.lanes(), inner, out, accumulate);
    else if (panel.count == 2) multiply<T, 2, OUTER>(rows, a, weights, inner, out, accumulate);
    else multiply<T, 1, OUTER>(rows, a, weights, inner, out, accumulate);
}

// The products of the rows of a panel and the numbers of a block.
template <typename T>
void multiply_rows_of(const Panel<T>& panel, int64_t keys, Matrix<T> a, const T* rows, int64_t size, T* out) {
    for (int64_t key = 0; key < keys;) {
        const Matrix<T> rest = a.after(key), piece = {rest.at(0), a.stride};
        const int64_t count = min(keys - key, rest.part - rest.first);
        T* to = out + key * panel.lanes();
        if (panel.count == 2) multiply<T, 2, INNER>(count, piece, rows, size, to);
        else multiply<T, 1, INNER>(count, piece, rows, size, to);
        key += count;
    }
}

template <typename T> bool is_finite(Matrix<T> a, int64_t keys, int64_t size) {
    for (int64_t key = 0; key < keys;) {
        const Matrix<T> rest = a.after(key);
        const int64_t count = min(rest.part - rest.first, keys - key);
        if (!is_finite(rest.at(0), count, size, a.stride)) return false;
        key += count;
    }
    return true;
}
template <typename T> bool is_finite(Codes<T> a, int64_t keys, int64_t) { return is_finite(a.steps, keys, 1); }

}  // namespace POLYATTN_UNIT
