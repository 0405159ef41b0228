// The directional derivative. With the tangent t of a score, p · t sums to the tangent of the
// logsumexp, and that of the output is sum(p · t · value + p · tangent of value) less the output times
// the tangent of the logsumexp.
#pragma once
#include "products.h"
#include "scores.h"
#include "work.h"

namespace POLYATTN_UNIT {

// A task is a panel of rows.
template <typename T> class Tangent {
public:
    static Work work(const PolyattnCall& call) {
        const int64_t rows = call.rows * (call.heads / call.key_heads);
        Work work = {};
        work.rows = 2 * width;
        work.tasks = call.items * call.key_heads * ((rows + work.rows - 1) / work.rows);
        work.scratch = Tangent(call, nullptr).scratch_size;
        work.begin = [](const PolyattnCall& c, const Work& w, int64_t task, void* scratch) {
            Tangent(c, scratch).begin(w, task);
        };
        work.step = [](const PolyattnCall& c, const Work&, void* scratch) { return Tangent(c, scratch).step(); };
        return work;
    }

private:
    static constexpr int width = Lanes<T>::width;

    struct State {
        int64_t item, key_head, next;
        Range keys;  // that some row sees, from the first to the last
    };

    const PolyattnCall& call;
    State* state;
    Panel<T>* panel;
    T *query, *query_tangent, *output;  // [element][lane]
    T *weights, *shares, *bounded;      // [key][lane]: p, p · t, tanh(s / c)
    T *logsumexp, *sums;                // [lane]: the sums are tangents of the logsumexp
    T *key_block, *value_block;         // [key][element] of a block that is converted
    uint8_t* bytes;                     // [key][lane], of a mask or dropout
    size_t scratch_size;

    Tangent(const PolyattnCall& c, void* scratch) : call(c) {
        BumpAllocator memory(scratch);
        const int64_t lanes = 2 * width;
        state = memory.take<State>(1);
        panel = memory.take<Panel<T>>(1);
        query = memory.take<T>(lanes * call.head_size);
        query_tangent = memory.take<T>(lanes * call.head_size);
        output = memory.take<T>(lanes * (call.value_size + width));
        weights = memory.take<T>(BLOCK * lanes);
        shares = memory.take<T>(BLOCK * lanes);
        bounded = memory.take<T>(call.softcap != 0 ? BLOCK * lanes : 0);
        logsumexp = memory.take<T>(lanes);
        sums = memory.take<T>(lanes);
        key_block = memory.take<T>(converts(call) ? BLOCK * call.head_size : 0);
        value_block = memory.take<T>(converts(call) ? BLOCK * call.value_size : 0);
        bytes = memory.take<uint8_t>(BLOCK * lanes + 64);
        scratch_size = memory.used();
    }

    void begin(const Work& work, int64_t number) {
        const int64_t rows = call.rows * (call.heads / call.key_heads);
        const int64_t chunks = (rows + work.rows - 1) / work.rows, pair = number / chunks;
        state->item = pair / call.key_heads;
        state->key_head = pair % call.key_heads;
        panel->begin(call, state->item, state->key_head, number % chunks * work.rows, rows);
        state->keys = panel->ranges.hull();
        state->next = panel->ranges.next(0, BLOCK);
        const T *rows_of_query[2 * width], *rows_of_tangent[2 * width];
        for (int lane = 0; lane < panel->lanes(); ++lane) {
            const int64_t head = panel->head[lane], row = panel->row[lane];
            const int64_t offset = offset_of(call.query, state->item, head, row);
            T* buffer = key_block + lane * call.head_size;
            rows_of_query[lane] = numbers_at(call, (const T*)call.query.data, offset, call.head_size, buffer);
            rows_of_tangent[lane] = at<T>(call.query_tangent, state->item, head, row);
            const T found = *at<T>(call.logsumexp, state->item, head, row);
            logsumexp[lane] = found == -infinity<T>() ? EMPTY_ROW<T> : found;
            sums[lane] = 0;
        }
        transpose_rows(rows_of_query, panel->lanes(), call.head_size, (T)call.scale, query);
        if (call.query_tangent.data) {
            transpose_rows(rows_of_tangent, panel->lanes(), call.head_size, (T)call.scale, query_tangent);
        }
        for (int64_t i = 0; i < call.value_size * panel->lanes(); ++i) output[i] = 0;
    }

    bool step() {
        if (state->next < state->keys.stop) {
            const Range block = {max(state->next, state->keys.first), min(state->next + BLOCK, state->keys.stop)};
            panel->narrow(call, state->item, block);
            add({max(block.first, panel->any_key.first), min(block.stop, panel->any_key.stop)});
            state->next = panel->ranges.next(state->next + BLOCK, BLOCK);
        }
        if (state->next < state->keys.stop) return false;
        write();
        return true;
    }

    // Keys or values, or their tangents, which are not converted.
    Matrix<T> block(const PolyattnArray& array, Range keys, int64_t size, T* converted) {
        return block_of(call, array, state->item, state->key_head, keys, size, converted);
    }
    Matrix<T> tangent(const PolyattnArray& array, Range keys) {
        return {at<T>(array, state->item, state->key_head, keys.first), array.row};
    }

    void add(Range seen) {
        const int64_t count = seen.stop - seen.first;
        if (count <= 0) return;
        bool all = true;
        if (call.mask.data) {
            const Cells cells = look_at_mask(call, state->item, *panel, seen);
            if (!cells.any) return;
            all = cells.shows_all(0, count);
            if (!all) read_mask(call, state->item, *panel, seen, bytes);
        }
        const Matrix<T> keys = block(call.key, seen, call.head_size, key_block);
        multiply_rows_of(*panel, count, keys, query, call.head_size, weights);
        differentiate_scores(keys, seen, count);
        const bool hides = hide(call, state->item, *panel, seen, all, bytes, weights);
        if (call.seed) read_dropout(call, state->item, *panel, seen, bytes);
        weigh(count);
        const Matrix<T> values = block(call.value, seen, call.value_size, value_block);
        const bool hides_nonfinite = hides && !is_finite(values, count, call.value_size);
        const Accumulate<T> accumulate = {true, nullptr};
        multiply_weights(*panel, call.value_size, values, shares, count, output, accumulate, hides_nonfinite);
        if (call.value_tangent.data) {
            const Matrix<T> more = tangent(call.value_tangent, seen);
            multiply_weights(*panel, call.value_size, more, weights, count, output, accumulate, true);
        }
    }

    // Complete the scores up to the masks, and write their tangents.
    void differentiate_scores(Matrix<T> keys, Range seen, int64_t count) {
        const int64_t size = count * panel->lanes();
        for (int64_t i = 0; i < size; ++i) shares[i] = 0;
        if (call.query_tangent.data) {
            multiply_rows_of(*panel, count, keys, query_tangent, call.head_size, shares);
        }
        if (call.key_tangent.data) {
            const Matrix<T> more = tangent(call.key_tangent, seen);
            multiply_rows_of(*panel, count, more, query, call.head_size, shares, {true, nullptr});
        }
        if (call.softcap != 0) {
            cap<T>(weights, size, (T)call.softcap, bounded);
            for (int64_t i = 0; i < size; ++i) shares[i] *= 1 - bounded[i] * bounded[i];
        }
        for (const PolyattnArray& bias : call.bias) {
            if (bias.data) add_bias<T>(bias, state->item, *panel, seen, weights);
        }
        for (const PolyattnArray& bias : call.bias_tangent) {
            if (bias.data) add_bias<T>(bias, state->item, *panel, seen, shares);
        }
    }

    // Scores become weights, and their tangents the products of both; -0 where a key is hidden, and only there.
    void weigh(int64_t count) {
        const int lanes = panel->lanes();
        const Vector<T> hidden = broadcast<T>((T)-0.0);
        for (int v = 0; v < lanes; v += width) {
            const Vector<T> total = load(logsumexp + v);
            Vector<T> sum = load(sums + v);
            for (int64_t i = v; i < count * lanes; i += lanes) {
                const Vector<T> s = load(weights + i);
                const Ints<T> is_hidden = s == -infinity<T>();
                Vector<T> weight = softmax_weights<T>(s, total);
                Vector<T> share = weight * load(shares + i) + 0;
                sum += select<T>(is_hidden, Vector<T>{}, share);
                if (call.seed) {
                    const Ints<T> kept = is_set<T>(bytes + i);
                    weight = select<T>(kept, weight / (T)call.keep, Vector<T>{});
                    share = select<T>(kept, share / (T)call.keep, Vector<T>{});
                }
                store<T>(weights + i, select<T>(is_hidden, hidden, weight));
                store<T>(shares + i, select<T>(is_hidden, hidden, share));
            }
            store<T>(sums + v, sum);
        }
    }

    void write() {
        const int lanes = panel->lanes();
        T factor[2 * width];
        T* rows[2 * width];
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t head = panel->head[lane], row = panel->row[lane];
            const bool is_empty = logsumexp[lane] == EMPTY_ROW<T>;
            factor[lane] = is_empty ? 0 : 1;
            rows[lane] = nullptr;
            if (lane >= panel->used) continue;
            if (call.sinks_tangent && !is_empty) {
                const T weight = exponential(((const T*)call.sinks)[head] - logsumexp[lane]);
                sums[lane] += weight * ((const T*)call.sinks_tangent)[head];
            }
            rows[lane] = at<T>(call.output_tangent, state->item, head, row);
            *at<T>(call.logsumexp_tangent, state->item, head, row) = is_empty ? 0 : sums[lane];
        }
        write_rows<false>(output, factor, lanes, call.value_size, rows);
        for (int lane = 0; lane < panel->used; ++lane) {
            if (factor[lane] == 0) continue;
            const T* result = at<T>(call.output, state->item, panel->head[lane], panel->row[lane]);
            for (int64_t e = 0; e < call.value_size; ++e) rows[lane][e] -= sums[lane] * result[e];
        }
    }
};

}  // namespace POLYATTN_UNIT
