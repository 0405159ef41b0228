// The product of a matrix with weights, x · w + bias, whose sums go over k in one order for every number of
// rows, columns and threads: one chain for each part of k, and the chains are added one after another.
#pragma once
#include "panel.h"
#include "rows.h"
#include "vectors.h"
#include "work.h"

namespace POLYATTN_UNIT {

// The products of a chain: more would lose accuracy.
constexpr int64_t CHAIN = 256;
// The most rows of a task, which share weights that are packed.
constexpr int64_t MOST_ROWS = 512;
// The most panels of a task of a single row, which reads rows of weights as streams.
constexpr int64_t MOST_PANELS = 128;

// In the letters of a call, x (rows, head_size) is the query and w (head_size, value_size) the key. Both have any
// strides by row and column, the bias by column; the columns of the output are contiguous.
template <typename T> class Product {
public:
    static Work work(const PolyattnCall& call) {
        Work work = {};
        const Product product(call, nullptr);
        work.tasks = (call.rows + MOST_ROWS - 1) / MOST_ROWS * product.groups;
        work.scratch = product.scratch_size;
        work.begin = [](const PolyattnCall& c, const Work&, int64_t task, void* scratch) {
            *Product(c, scratch).state = {task, 0};
        };
        work.step = [](const PolyattnCall& c, const Work&, void* scratch) { return Product(c, scratch).step(); };
        return work;
    }

private:
    static constexpr int width = Lanes<T>::width, vectors = 4, columns = vectors * width;
    // The rows of a tile: its sums, a vector of weights and the numbers fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
    static constexpr int tile_rows = 6;
#else
    static constexpr int tile_rows = 3;
#endif

    // What stays between two steps of a task.
    struct State {
        int64_t task, k;  // the first of the next part
    };

    const PolyattnCall& call;
    int64_t panels, size, groups;  // of the columns of w, of a task; tasks of some rows
    State* state;
    T* sums;    // [row][column] of a tile, or [column] of a single row
    T* packed;  // [k][column] of a panel
    size_t scratch_size;

    Product(const PolyattnCall& c, void* scratch) : call(c) {
        const int64_t threads = max(call.threads, 1);
        panels = (call.value_size + columns - 1) / columns;
        size = is_row() ? clamp((panels + threads - 1) / threads, 1, MOST_PANELS) : 1;
        groups = (panels + size - 1) / size;
        BumpAllocator memory(scratch);
        state = memory.take<State>(1);
        sums = memory.take<T>(max(size, tile_rows) * columns);
        packed = memory.take<T>(CHAIN * columns);
        scratch_size = memory.used();
    }

    // Whether a single row reads weights in place.
    bool is_row() const { return call.rows == 1 && call.key.column == 1; }

    // Compute one part of k of a task.
    bool step() {
        const int64_t chunk = state->task / groups, first = state->task % groups * size;
        const int64_t stop = min(first + size, panels), full = min(stop, call.value_size / columns);
        const Range rows = {chunk * MOST_ROWS, min((chunk + 1) * MOST_ROWS, call.rows)};
        const Range k = {state->k, min(state->k + CHAIN, call.head_size)};
        if (is_row()) {
            multiply_row(k, first * columns, (full - first) * columns);
            add_up(0, 1, first * columns, (full - first) * columns, k);
        }
        for (int64_t panel = is_row() ? full : first; panel < stop; ++panel) {
            const int64_t column = panel * columns, used = min(call.value_size - column, columns);
            pack(k, column, used);
            for (int64_t row = rows.first; row < rows.stop; row += tile_rows) {
                const int count = (int)min(tile_rows, rows.stop - row);
                multiply_up_to<tile_rows>(count, x_at(row, k.first), k.stop - k.first);
                add_up(row, count, column, used, k);
            }
        }
        state->k = k.stop;
        return k.stop == call.head_size;
    }

    const T* x_at(int64_t row, int64_t k) const {
        return (const T*)call.query.data + row * call.query.row + k * call.query.column;
    }
    const T* weight_at(int64_t k, int64_t column) const {
        return (const T*)call.key.data + k * call.key.row + column * call.key.column;
    }

    // A tile of M rows and a panel that is packed: its sums stay in registers.
    template <int M> void multiply_tile(const T* x, int64_t count) {
        const ptrdiff_t row = call.query.row, next = call.query.column;
        Vector<T> tile[M][vectors] = {};
        for (const T* weights = packed; count > 0; --count, weights += columns, x += next) {
            UNROLL for (int v = 0; v < vectors; ++v) {
                const Vector<T> weight = load(weights + v * width);
                UNROLL for (int m = 0; m < M; ++m)
                    tile[m][v] += x[m * row] * weight;
            }
        }
        UNROLL for (int m = 0; m < M; ++m) {
            UNROLL for (int v = 0; v < vectors; ++v)
                store<T>(sums + m * columns + v * width, tile[m][v]);
        }
    }

    template <int M> INLINE void multiply_up_to(int rows, const T* x, int64_t count) {
        if (rows == M) return multiply_tile<M>(x, count);
        if constexpr (M > 1) multiply_up_to<M - 1>(rows, x, count);
    }

    // A single row: its sums are in memory, and several rows of weights are added to them at a time,
    // while the next are asked of the memory: the processor does not fetch ahead over the rows' ends.
    void multiply_row(Range k, int64_t first, int64_t used) {
        constexpr int several = 8;
        const ptrdiff_t row = call.key.row, next = call.query.column;
        const T *x = x_at(0, k.first), *weights = weight_at(k.first, first);
        for (int64_t c = 0; c < used; ++c) sums[c] = 0;
        for (int64_t left = k.stop - k.first; left > 0;) {
            const int count = left >= several ? several : 1;
            T numbers[several];
            for (int i = 0; i < count; ++i) numbers[i] = x[i * next];
            for (int64_t c = 0; c < used; c += 2 * width) {
                Vector<T> sum[2] = {load(sums + c), load(sums + c + width)};
                const auto add = [&](int i) __attribute__((always_inline)) {
                    UNROLL for (int v = 0; v < 2; ++v)
                        sum[v] += numbers[i] * load(weights + i * row + c + v * width);
                };
                if (count == several) {
                    UNROLL for (int i = 0; i < several; ++i) {
                        __builtin_prefetch(weights + (several + i) * row + c, 0, 2);
                        add(i);
                    }
                } else {
                    add(0);
                }
                store<T>(sums + c, sum[0]);
                store<T>(sums + c + width, sum[1]);
            }
            x += count * next;
            weights += count * row;
            left -= count;
        }
    }

    // Add the sums of a part of k to the output, and the bias at the end.
    __attribute__((noinline)) void add_up(int64_t row, int rows, int64_t first, int64_t used, Range k) {
        const ptrdiff_t next = call.bias[0].column;
        const T* bias = k.stop == call.head_size ? (const T*)call.bias[0].data : nullptr;
        for (int m = 0; m < rows; ++m) {
            T* out = (T*)call.output.data + (row + m) * call.output.row + first;
            T* sum = sums + m * columns;
            int64_t c = 0;
            for (; c + width <= used; c += width) {
                Vector<T> total = load(sum + c), offset = {};
                if (k.first > 0) total += load(out + c);
                for (int i = 0; bias && i < width; ++i) offset[i] = bias[(first + c + i) * next];
                store<T>(out + c, bias ? total + offset : total);
            }
            for (; c < used; ++c) {
                if (k.first > 0) sum[c] += out[c];
                out[c] = bias ? sum[c] + bias[(first + c) * next] : sum[c];
            }
        }
    }

    // Copy a part of k of a panel; columns that it lacks are not used.
    void pack(Range k, int64_t first, int64_t used) {
        const T* weights = weight_at(k.first, first);
        const int64_t row = call.key.row, next = call.key.column;
        if (row == 1 && next != 1) {
            const T* each[columns];
            for (int64_t c = 0; c < columns; ++c) each[c] = weights + min(c, used - 1) * next;
            return transpose_rows<T>(each, columns, k.stop - k.first, 1, packed);
        }
        for (int64_t i = 0; i < k.stop - k.first; ++i, weights += row) {
            T* to = packed + i * columns;
            int64_t c = 0;
            for (; next == 1 && c + width <= used; c += width) store<T>(to + c, load(weights + c));
            for (; c < columns; ++c) to[c] = c < used ? weights[c * next] : 0;
        }
    }
};

}  // namespace POLYATTN_UNIT
