// The gradients of a call.
//
// A task has the rows of a key head, or one of two parts of them. It takes its rows in groups of GROUP panels, and
// for each group the keys in blocks of KEYS. With P = softmax weights and G = gradients of the scores (`tile.h`):
//
//                 block of 128 keys                  gradient of the query  += scale G·K     query_sums
//                +-----------------+                 gradient of the key    += Gᵀ·(scale Q)  key_sums
//     panel 0    |                 |                 gradient of the value  += Pᵀ·dO         key_sums
//     panel 1    |  tile: P and G  |
//     panel 2    |                 |                 begin_group   reads Q and dO of 4 panels
//     panel 3    +-----------------+                 add_block     for each block: the tile, then three products
//      ... next group                                end_group     writes the gradient of the query
//
// Q and dO are kept twice. As panels, whose lanes are rows, they give the tile: queries[panel][element][lane]. As
// columns, whose lanes are elements, they give the gradients of keys and values: query_columns[columns][row][lane].
// With AVX2 and float32 a panel has 16 lanes: row 20 and element 5 of a query of 64 are queries[1][5][4] and
// query_columns[0][20][5]; element 37 is query_columns[2][20][5]. A last panel of one vector has half of the lanes,
// and so have last columns of so few elements.
// A task adds its groups in order, so the sums do not depend on the number of threads.
#pragma once
#include "products.h"
#include "selected.h"
#include "tile.h"
#include "turns.h"
#include "work.h"

namespace POLYATTN_UNIT {

template <typename T> class Backward {
public:
    static Work work(const PolyattnCall& call) {
        if constexpr (sizeof(T) == 4 && width > 4) {  // not for double and short vectors, to keep the library small
            if (Selected<T>::fits(call)) return Selected<T>::work(call);
        }
        Work work = {};
        work.rows = GROUP * 2 * width;
        const int64_t pairs = call.items / together(call) * call.key_heads;
        work.tasks = pairs * parts_of(call);
        work.scratch = Backward(call, work, nullptr).scratch_size;
        work.shared =
            Turns::size(call, work.tasks) + (size_t)pairs * (parts_of(call) - 1) * size_of_part(call) * sizeof(T);
        work.begin = [](const PolyattnCall& c, const Work& w, int64_t task, void* scratch) {
            Backward(c, w, scratch).begin(task);
        };
        work.step = [](const PolyattnCall& c, const Work& w, void* scratch) { return Backward(c, w, scratch).step(); };
        if (work.shared) work.end = join_parts;
        return work;
    }

private:
    static constexpr int width = Lanes<T>::width;

    struct State {
        int64_t number, item, stop_item, key_head, part;
        int64_t next_row, stop_row;
        int panels;    // of the group at hand; 0 before it is begun
        Ranges ranges;  // of keys that some row of the group sees
        Range keys;     // from the first to the last of them
        int64_t next;  // the first key of the next block
        bool finite;   // queries and output gradients of the group
    };

    struct Rows {
        T* first;
        int64_t stride;
        const int32_t* table = nullptr;  // of pages
        int64_t page = 0, page_stride = 0;
        T* at(int64_t key) const {
            if (!table) return first + key * stride;
            return first + table[key / page] * page_stride + key % page * stride;
        }
    };

    const PolyattnCall& call;
    const Work& work_;
    State* state;
    Panel<T>* panels;
    T *queries, *gradients;               // [panel][element][lane]: scale · Q, dO / keep
    T *query_columns, *gradient_columns;  // [columns][row][lane]: the same numbers
    T* query_sums;                        // [panel][element][lane]: G·K of the blocks so far
    T *folded, *spare;  // the same of the keys before the last fold; shares of keys where lanes fold
    Tile<T> tile;
    T* key_sums;  // [key][lane]: of one block and column, for keys and then for values
    T *key_block, *value_block;  // [key][element]: a block that is converted
    size_t scratch_size;

    // Few heads are cut into two parts, for two threads. That depends on the sizes of an item only, so
    // its sums do not depend on the batch.
    static int64_t parts_of(const PolyattnCall& call) {
        for (const PolyattnArray& bias : call.bias_gradient) {  // rows of both parts would add to a number
            if (bias.data && (bias.row == 0 || Turns::is_by_distance(bias))) return 1;
        }
        const int64_t rows = call.rows * (call.heads / call.key_heads), group = GROUP * 2 * width;
        return !call.table.data && call.key_heads < 4 && !call.is_part && rows > group ? 2 : 1;
    }
    // The items of a task.
    static int64_t together(const PolyattnCall& call) { return call.table.data ? call.together : 1; }
    // A part begins with a position: the heads of one may add to the same numbers of a bias, and turns do
    // not order the parts of a key head.
    static int64_t first_row_of(int64_t part, const PolyattnCall& call) {
        const int64_t heads = call.heads / call.key_heads, size = GROUP * 2 * width;
        const int64_t groups = (call.rows * heads + size - 1) / size;
        return min(groups * part / parts_of(call) * size / heads, call.rows) * heads;
    }
    static char* parts_in(void* shared, const PolyattnCall& call, const Work& work) {
        return (char*)shared + Turns::size(call, work.tasks);
    }
    static int64_t size_of_part(const PolyattnCall& call) { return call.keys * (call.head_size + call.value_size); }
    static int64_t columns_of(int64_t size) { return (size + 2 * width - 1) / (2 * width); }
    static int64_t lanes_of(int64_t column, int64_t size) {
        return size - column * 2 * width > width ? 2 * width : width;
    }

    Backward(const PolyattnCall& c, const Work& w, void* scratch) : call(c), work_(w) {
        BumpAllocator memory(scratch);
        const int64_t rows = GROUP * 2 * width, lanes = 2 * width;
        state = memory.take<State>(1);
        panels = memory.take<Panel<T>>(GROUP);
        queries = memory.take<T>(rows * call.head_size);
        gradients = memory.take<T>(rows * call.value_size);
        query_columns = memory.take<T>(rows * columns_of(call.head_size) * lanes);
        gradient_columns = memory.take<T>(rows * columns_of(call.value_size) * lanes);
        query_sums = memory.take<T>(rows * (call.head_size + width));
        folded = memory.take<T>(call.keys > FOLD ? rows * (call.head_size + width) : 0);
        spare = memory.take<T>(call.keys > FOLD ? KEYS * lanes : 0);
        tile.place(call, memory);
        key_sums = memory.take<T>(KEYS * lanes);
        key_block = memory.take<T>(copies(call) ? KEYS * call.head_size : 0);
        value_block = memory.take<T>(copies(call) ? KEYS * call.value_size : 0);
        scratch_size = memory.used();
    }

    // ---- tasks, groups, blocks ----

    void begin(int64_t number) {
        const int64_t parts = parts_of(call), pair = number / parts;
        state->number = number;
        state->item = pair / call.key_heads * together(call);
        state->stop_item = state->item + together(call);
        state->key_head = pair % call.key_heads;
        state->part = number % parts;
        state->next_row = first_row_of(state->part, call);
        state->stop_row = first_row_of(state->part + 1, call);
        state->panels = 0;
        // Part 0 adds to the call's gradients. Part 1 has sums of its own, which are 0 at first and which
        // `join_parts` adds at last.
        if (state->part == 0 && !call.adds) {
            clear(key_rows(), call.head_size);
            clear(value_rows(), call.value_size);
        }
    }
    static void clear(T* numbers, int64_t count) {
        for (int64_t i = 0; i < count; ++i) numbers[i] = 0;
    }
    void clear(Rows rows, int64_t size) const {
        if (rows.stride == size) return clear(rows.first, call.keys * size);
        for (int64_t key = 0; key < call.keys; ++key) clear(rows.at(key), size);
    }

    // Where the gradients of keys and of values are added up.
    T* part_sums() const {
        return (T*)parts_in(work_.shared_memory, call, work_) + state->number / 2 * size_of_part(call);
    }
    Rows rows_of(const PolyattnArray& x) const {
        if (!call.table.data) return {at<T>(x, state->item, state->key_head, 0), x.row};
        return {(T*)x.data + state->key_head * x.head, x.row, at<int32_t>(call.table, state->item, 0, 0), call.page,
                x.item};
    }
    Rows key_rows() const {
        if (state->part) return {part_sums(), call.head_size};
        return rows_of(call.key_gradient);
    }
    Rows value_rows() const {
        if (state->part) return {part_sums() + call.keys * call.head_size, call.value_size};
        return rows_of(call.value_gradient);
    }

    static void join_parts(const PolyattnCall& call, const Work& work, void* shared) {
        const T* sums = (const T*)parts_in(shared, call, work);
        const int64_t pairs = (parts_of(call) - 1) * call.items * call.key_heads;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t item = pair / call.key_heads, head = pair % call.key_heads;
            for (int64_t key = 0; key < call.keys; ++key, sums += call.head_size) {
                add(sums, call.head_size, at<T>(call.key_gradient, item, head, key));
            }
            for (int64_t key = 0; key < call.keys; ++key, sums += call.value_size) {
                add(sums, call.value_size, at<T>(call.value_gradient, item, head, key));
            }
        }
    }
    static void add(const T* more, int64_t count, T* to) {
        int64_t i = 0;
        for (; i + width <= count; i += width) store<T>(to + i, load(to + i) + load(more + i));
        for (; i < count; ++i) to[i] += more[i];
    }

    bool step() {
        const Turns turns(call, parts_of(call), work_.shared_memory);
        if (state->panels == 0 && state->next_row < state->stop_row) begin_group();
        if (state->panels > 0 && state->next < state->keys.stop) {
            const int64_t blocks = (call.keys + KEYS - 1) / KEYS, heads = call.heads / call.key_heads;
            const int64_t block = panels[0].first_row / work_.rows * blocks + state->next / KEYS;
            // Heads of a position may be in more than one group of rows. All must be done by the task before.
            const int64_t more = (heads - 1 + work_.rows - 1) / work_.rows * blocks;
            if (!turns.is_open(state->number, block + more)) return false;
            add_block({max(state->next, state->keys.first), min(state->next + KEYS, state->keys.stop)});
            state->next = state->ranges.next(state->next + KEYS, KEYS);
            turns.pass(state->number, block);
            if (state->next < state->keys.stop) return false;
        }
        if (state->panels > 0) end_group();
        if (state->next_row == state->stop_row && state->item + 1 < state->stop_item) {
            ++state->item;
            state->next_row = first_row_of(0, call);
        }
        if (state->next_row < state->stop_row || !turns.is_open(state->number, Turns::LAST)) return false;
        turns.pass(state->number, Turns::LAST);
        return true;
    }

    void begin_group() {
        state->ranges.clear(call);
        state->finite = true;
        const int64_t stop = min(state->next_row + work_.rows, state->stop_row);
        while (state->next_row < stop) {
            Panel<T>& panel = panels[state->panels];
            panel.begin(call, state->item, state->key_head, state->next_row, stop);
            read_rows(panel, state->panels);
            state->ranges.add(panel.ranges);
            state->next_row += panel.used;
            ++state->panels;
        }
        clear(query_sums, tile.start_of(state->panels) * call.head_size);
        clear(tile.softcap_sums, work_.rows);
        state->keys = state->ranges.hull();
        state->next = state->ranges.next(0, KEYS);
    }

    void read_rows(const Panel<T>& panel, int number) {
        const int lanes = panel.lanes();
        const int64_t start = tile.start_of(number);
        const T* query_rows[2 * width];
        const T* gradient_rows[2 * width];
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t head = panel.head[lane], row = panel.row[lane], r = start + lane;
            // A block of keys has room for as many rows.
            const int64_t offset = offset_of(call.query, state->item, head, row);
            T* buffer = key_block + lane * call.head_size;
            query_rows[lane] = numbers_at(call, (const T*)call.query.data, offset, call.head_size, buffer);
            gradient_rows[lane] = at<T>(call.output_gradient, state->item, head, row);
            const T found = *at<T>(call.logsumexp, state->item, head, row);
            const bool is_used = lane < panel.used && found != -infinity<T>();
            // The weights of a row that sees no key are 0.
            tile.logsumexp[r] = found == -infinity<T>() ? EMPTY_ROW<T> : found;
            T d = 0;
            if (is_used) {
                d = dot(gradient_rows[lane], at<T>(call.output, state->item, head, row), call.value_size);
                if (call.logsumexp_gradient.data) d -= *at<T>(call.logsumexp_gradient, state->item, head, row);
            }
            tile.delta[r] = d;
            if (lane < panel.used) *at<T>(call.delta, state->item, head, row) = d;
            const T *q = is_used ? query_rows[lane] : nullptr, *g = is_used ? gradient_rows[lane] : nullptr;
            as_columns(q, call.head_size, (T)call.scale, r, query_columns);
            as_columns(g, call.value_size, (T)(1 / call.keep), r, gradient_columns);
        }
        transpose_rows(query_rows, lanes, call.head_size, (T)call.scale, queries + start * call.head_size);
        T* to = gradients + start * call.value_size;
        transpose_rows(gradient_rows, lanes, call.value_size, (T)(1 / call.keep), to);
        for (int lane = 0; lane < lanes; ++lane) {
            if (lane < panel.used && tile.logsumexp[start + lane] != EMPTY_ROW<T>) continue;
            for (int64_t e = 0; e < call.value_size; ++e) to[e * lanes + lane] = 0;
        }
        state->finite = state->finite && is_finite(queries + start * call.head_size, call.head_size, lanes, lanes) &&
                        is_finite(to, call.value_size, lanes, lanes);
    }

    // Write a row, the r-th of the group, or zeros: element e to columns[e / (2 * width)][r][e % (2 * width)].
    void as_columns(const T* row, int64_t size, T factor, int64_t r, T* columns) {
        for (int64_t column = 0; column < columns_of(size); ++column) {
            const int64_t lanes = lanes_of(column, size), first = column * 2 * width;
            T* to = columns + first * work_.rows + r * lanes;
            for (int64_t lane = 0; lane < lanes; lane += width) {
                const int64_t left = row ? size - first - lane : 0;
                if (left >= width) {
                    store<T>(to + lane, load(row + first + lane) * factor);
                    continue;
                }
                for (int64_t i = 0; i < width; ++i) to[lane + i] = i < left ? row[first + lane + i] * factor : 0;
            }
        }
    }

    void end_group() {
        for (int number = 0; number < state->panels; ++number) {
            const Panel<T>& panel = panels[number];
            const int64_t start = tile.start_of(number);
            T* rows[2 * width];
            T factor[2 * width];
            for (int lane = 0; lane < panel.lanes(); ++lane) {
                factor[lane] = (T)call.scale;
                rows[lane] = nullptr;
                if (lane >= panel.used) continue;
                rows[lane] = at<T>(call.query_gradient, state->item, panel.head[lane], panel.row[lane]);
                if (call.softcap_gradient.data) {
                    *at<T>(call.softcap_gradient, state->item, panel.head[lane], panel.row[lane]) =
                        tile.softcap_sums[start + lane];
                }
            }
            if (panel.has_folded) fold(number, Folds<T>(0));
            const T* sums = panel.has_folded ? folded : query_sums;
            write_rows<false>(sums + start * call.head_size, factor, panel.lanes(), call.head_size, rows);
        }
        state->panels = 0;
    }

    // ---- a block ----

    void add_block(Range block) {
        const Matrix<T> keys = block_of(call, call.key, state->item, state->key_head, block, call.head_size, key_block);
        const Matrix<T> values =
            block_of(call, call.value, state->item, state->key_head, block, call.value_size, value_block);
        const int64_t count = block.stop - block.first;
        bool hides = false, shown = false;
        for (int number = 0; number < state->panels; ++number) {
            const int64_t start = tile.start_of(number);
            hides = tile.write(call, state->item, number, panels[number], block, keys, values,
                               queries + start * call.head_size, gradients + start * call.value_size) ||
                    hides;
            shown = shown || tile.shown[number];
        }
        if (!shown) return;
        // What is hidden has the weight -0: it counts where it meets a number that is not finite.
        const bool hides_nonfinite = hides && !(state->finite && is_finite(keys, count, call.head_size));
        for (int number = 0; number < state->panels; ++number) {
            if (tile.shown[number]) add_to_queries(number, keys, count, hides_nonfinite);
        }
        add_to_keys(block, tile.shares, query_columns, call.head_size, hides_nonfinite, key_rows());
        add_to_keys(block, tile.weights, gradient_columns, call.value_size, hides_nonfinite, value_rows());
    }

    void add_to_queries(int number, Matrix<T> keys, int64_t count, bool hides_nonfinite) {
        const Panel<T>& panel = panels[number];
        const Folds<T>& folds = tile.folds[number];
        const int lanes = panel.lanes();
        const T* shares = tile.shares_of(number);
        const auto add = [&](int64_t first, int64_t stop, const T* of_first) {
            if (first >= stop) return;
            multiply_weights(panel, call.head_size, keys.after(first), of_first, stop - first,
                             query_sums + tile.start_of(number) * call.head_size, {true, nullptr}, hides_nonfinite);
        };
        if (folds.first == folds.NONE) return add(0, count, shares);
        const T* zone = shares + folds.first * lanes;
        add(0, folds.first, shares);
        split_at<T>(folds, lanes, (T)-0.0, false, zone, spare);
        add(folds.first, folds.last, spare);
        fold(number, folds);
        split_at<T>(folds, lanes, (T)-0.0, true, zone, spare);
        add(folds.first, folds.last, spare);
        add(folds.last, count, shares + folds.last * lanes);
    }
    void fold(int number, const Folds<T>& folds) {
        Panel<T>& panel = panels[number];
        const Vector<T> one = broadcast<T>(1);
        const int64_t start = tile.start_of(number) * call.head_size, size = panel.lanes() * call.head_size;
        for (int v = 0; v < panel.lanes(); v += width) {
            const Ints<T> here = load_ints<T>(folds.at + v) != (Ints<T>{} + folds.NONE);
            fold_vectors<T>(here, one, one, size - v, panel.lanes(), !panel.has_folded, query_sums + start + v,
                            folded + start + v);
        }
        panel.has_folded = true;
    }

    static void add_seen(T factor, T number, T& sum) {
        if (factor != 0 || !__builtin_signbit(factor)) sum = factor * number + sum;
    }

    // Add factors[panel][key][lane] · columns[row] to the gradients of keys or values.
    void add_to_keys(Range block, const T* factors, const T* columns, int64_t size, bool hides_nonfinite,
                     Rows gradients) {
        const int64_t count = block.stop - block.first;
        for (int64_t column = 0; column < columns_of(size); ++column) {
            const int64_t lanes = lanes_of(column, size), first = column * 2 * width;
            const T* from = columns + first * work_.rows;
            if (hides_nonfinite) multiply_seen_columns(count, factors, from, lanes);
            else if (lanes > width) multiply_columns<2>(count, factors, from);
            else multiply_columns<1>(count, factors, from);
            for (int64_t key = 0; key < count; ++key) {
                add(key_sums + key * lanes, min(lanes, size - first), gradients.at(block.first + key) + first);
            }
        }
    }

    // Write the products of a column of so many vectors to key_sums.
    template <int Count> void multiply_columns(int64_t count, const T* factors, const T* column) {
        constexpr int lanes = 2 * width;
        const int last = state->panels - 1, whole = panels[last].count == 2 ? last + 1 : last;
        const Matrix<T> all_lanes = {factors, lanes, lanes, KEYS * lanes};
        if (whole) multiply<T, Count, INNER>(count, all_lanes, column, whole * lanes, key_sums);
        if (whole > last) return;
        const Matrix<T> half = {factors + (int64_t)whole * KEYS * lanes, width};
        const T* rest = column + whole * lanes * Count * width;
        multiply<T, Count, INNER>(count, half, rest, width, key_sums, {whole > 0, nullptr});
    }

    void multiply_seen_columns(int64_t count, const T* factors, const T* columns, int64_t row_lanes) {
        for (int64_t key = 0; key < count; ++key) {
            for (int64_t column = 0; column < row_lanes; ++column) {
                T sum = 0;
                for (int number = 0; number < state->panels; ++number) {
                    const int size = panels[number].lanes();
                    for (int lane = 0; lane < size; ++lane) {
                        add_seen(factors[tile.start_of(number) * KEYS + key * size + lane],
                                 columns[(tile.start_of(number) + lane) * row_lanes + column], sum);
                    }
                }
                key_sums[key * row_lanes + column] = sum;
            }
        }
    }
};

}  // namespace POLYATTN_UNIT
