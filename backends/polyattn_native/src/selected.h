// The gradients of rows that select keys one by one: each row is an item, whose keys are pages of one key, in order.
// A step takes the keys of a range of the memory, for all rows that select some of them, so that these keys and their
// gradients stay in the cache; the memory of a row follows that of the row before. Each sum goes over keys or rows in
// order. The lanes are elements, as in `few.h`.
#pragma once
#include "few.h"
#include "work.h"

namespace POLYATTN_UNIT {

template <typename T> T dot(const T* a, const T* b, int64_t count) {
    constexpr int width = Lanes<T>::width;
    Vector<T> sums = {};
    int64_t i = 0;
    for (; i + width <= count; i += width) sums += load(a + i) * load(b + i);
    T sum = 0;
    for (; i < count; ++i) sum += a[i] * b[i];
    for (int lane = 0; lane < width; ++lane) sum += sums[lane];
    return sum;
}

template <typename T> class Selected {
public:
    static bool fits(const PolyattnCall& call) {
        const bool adjusts = call.softcap != 0 || call.bias[0].data || call.bias[1].data || call.mask.data || call.seed;
        const bool has_lanes = call.head_size % width == 0 && call.value_size % width == 0;
        return call.table.data && call.page == 1 && call.rows == 1 && has_lanes && !adjusts && !call.same_bits;
    }

    static Work work(const PolyattnCall& call) {
        Work work = {};
        work.rows = 1;
        work.tasks = call.items / call.together * call.key_heads;
        work.scratch = Selected(call, nullptr).scratch_size;
        work.begin = [](const PolyattnCall& c, const Work&, int64_t task, void* scratch) {
            Selected(c, scratch).begin(task);
        };
        work.step = [](const PolyattnCall& c, const Work&, void* scratch) { return Selected(c, scratch).step(); };
        return work;
    }

private:
    static constexpr int width = Lanes<T>::width;
    // The bytes of the keys and values of a range, and of their gradients.
    static constexpr int64_t RANGE = 1 << 20;

    struct State {
        int64_t item, key_head, next;  // the first row, and the first key of the next range
    };

    const PolyattnCall& call;
    State* state;
    int32_t* places;  // of the next key of each row
    T *query, *weights, *shares, *key_block, *value_block;
    size_t scratch_size;

    Selected(const PolyattnCall& c, void* scratch) : call(c) {
        BumpAllocator memory(scratch);
        state = memory.take<State>(1);
        places = memory.take<int32_t>(call.together);
        query = memory.take<T>(2 * call.head_size);
        weights = memory.take<T>(BLOCK + width);
        shares = memory.take<T>(BLOCK + width);
        key_block = memory.take<T>(converts(call) ? BLOCK * call.head_size : 0);
        value_block = memory.take<T>(converts(call) ? BLOCK * call.value_size : 0);
        scratch_size = memory.used();
    }

    int64_t head_of(int64_t i) const { return state->key_head * (call.heads / call.key_heads) + i; }

    void begin(int64_t task) {
        state->item = task / call.key_heads * call.together;
        state->key_head = task % call.key_heads;
        state->next = 0;
        for (int64_t row = 0; row < call.together; ++row) {
            const int64_t item = state->item + row;
            places[row] = 0;
            for (int64_t i = 0; i < call.heads / call.key_heads; ++i) {
                const int64_t head = head_of(i);
                T d = 0;
                if (*at<T>(call.logsumexp, item, head, 0) != -infinity<T>()) {
                    d = dot(at<T>(call.output_gradient, item, head, 0), at<T>(call.output, item, head, 0),
                            call.value_size);
                    if (call.logsumexp_gradient.data) d -= *at<T>(call.logsumexp_gradient, item, head, 0);
                }
                *at<T>(call.delta, item, head, 0) = d;
            }
        }
    }

    bool step() {
        const int64_t stop = state->next + max(RANGE / (2 * (call.head_size + call.value_size) * sizeof(T)), 1);
        state->next = INT64_MAX;
        for (int64_t row = 0; row < call.together; ++row) {
            const int64_t item = state->item + row, count = keys_of_row(call, item, 0, 0, 0).stop;
            const int32_t* keys = at<int32_t>(call.table, item, 0, 0);
            int64_t first = places[row], last = first;
            while (last < count && keys[last] < stop) ++last;
            places[row] = (int32_t)last;
            if (last < count) state->next = min(state->next, keys[last]);
            for (; first < last; first += BLOCK) add(item, keys + first, min(last - first, BLOCK));
        }
        return state->next == INT64_MAX;
    }

    // Some keys of all heads, or the numbers of these keys that are converted.
    Matrix<T> matrix_of(const PolyattnArray& x, const int32_t* keys, int64_t count, int64_t size, T* block) const {
        const int64_t head = state->key_head * x.head;
        if (!converts(call)) return {(const T*)x.data + head, x.row, 1, x.item, keys};
        for (int64_t i = 0; i < count; ++i) {
            numbers_at(call, (const T*)x.data, head + keys[i] * x.item, size, block + i * size);
        }
        return {block, size};
    }

    void add(int64_t item, const int32_t* list, int64_t count) {
        const Matrix<T> keys = matrix_of(call.key, list, count, call.head_size, key_block);
        const Matrix<T> values = matrix_of(call.value, list, count, call.value_size, value_block);
        const Coming<T> none(keys, 0, 0);
        T ignored[width] = {};  // the totals of the shares
        for (int64_t i = 0; i < call.heads / call.key_heads; ++i) {
            const int64_t head = head_of(i), size = call.head_size, offset = offset_of(call.query, item, head, 0);
            const T total = *at<T>(call.logsumexp, item, head, 0), d = *at<T>(call.delta, item, head, 0);
            if (total == -infinity<T>()) continue;
            const T* q = numbers_at(call, (const T*)call.query.data, offset, size, query + size);
            const T* g = at<T>(call.output_gradient, item, head, 0);
            for (int64_t e = 0; e < size; ++e) query[e] = q[e] * (T)call.scale;
            multiply_few<T, 1>(query, keys, count, size, 1, weights, none);
            multiply_few<T, 1>(g, values, count, call.value_size, 1, shares, none);
            for (int64_t key = 0; key < count; key += width) {
                const Vector<T> weight = softmax_weights<T>(load(weights + key), broadcast<T>(total));
                store<T>(weights + key, weight);
                store<T>(shares + key, weight * (load(shares + key) - d) * (T)call.scale);
            }
            weigh_few<T, 1>(shares, shares, 1, keys, count, size, at<T>(call.query_gradient, item, head, 0),
                            {true, nullptr}, false, ignored, none, false);
            add_to(call.key_gradient, list, count, shares, q, size);
            add_to(call.value_gradient, list, count, weights, g, call.value_size);
        }
    }

    void add_to(const PolyattnArray& gradient, const int32_t* list, int64_t count, const T* factors, const T* row,
                int64_t size) const {
        for (int64_t key = 0; key < count; ++key) {
            T* to = (T*)gradient.data + state->key_head * gradient.head + list[key] * gradient.item;
            for (int64_t e = 0; e < size; e += width) store<T>(to + e, load(to + e) + factors[key] * load(row + e));
        }
    }
};

}  // namespace POLYATTN_UNIT
