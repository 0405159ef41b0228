// A tile of scores for the gradients: its weights, computed again from the logsumexp as
// p = exp(s - logsumexp), and its shares, the gradients of the scores. With d = output gradient · output,
// a share is p · (output gradient · value - d).
#pragma once
#include "products.h"
#include "scores.h"
#include "work.h"

namespace POLYATTN_UNIT {

// Panels of a group of rows, and keys of a block: their weights stay in the cache.
constexpr int GROUP = 4;
constexpr int KEYS = 128;

template <typename T> struct Tile {
    static constexpr int width = Lanes<T>::width;

    T *weights, *shares;                  // [panel][key][lane]: P and G
    T *raw, *bounded;                     // [key][lane], with a softcap: q·k, then shares before it; tanh
    T *logsumexp, *delta, *softcap_sums;  // [row] of the group: [panel][lane]
    uint8_t* bytes;                       // [key][lane], of a mask or dropout
    bool shown[GROUP];                    // whether a panel sees any key of the block
    Folds<T> folds[GROUP];                // of the gradients of the query

    void place(const PolyattnCall& call, BumpAllocator& memory) {
        const int64_t rows = GROUP * 2 * width, lanes = 2 * width;
        weights = memory.take<T>(rows * KEYS);
        shares = memory.take<T>(rows * KEYS);
        raw = memory.take<T>(call.softcap != 0 ? lanes * KEYS : 0);
        bounded = memory.take<T>(call.softcap != 0 ? lanes * KEYS : 0);
        logsumexp = memory.take<T>(rows);
        delta = memory.take<T>(rows);
        softcap_sums = memory.take<T>(rows);
        bytes = memory.take<uint8_t>(KEYS * lanes + 64);
    }

    // Panels have room for two vectors each, also the last with one.
    static int64_t start_of(int panel) { return (int64_t)panel * 2 * width; }
    T* weights_of(int panel) const { return weights + start_of(panel) * KEYS; }
    T* shares_of(int panel) const { return shares + start_of(panel) * KEYS; }

    // Write the part of a panel, and add the shares to the gradients of biases; return whether any key is
    // hidden: its weight and share are -0, which products leave out where a number may not be finite.
    bool write(const PolyattnCall& call, int64_t item, int number, Panel<T>& panel, Range block, Matrix<T> keys,
               Matrix<T> values, const T* query, const T* gradient) {
        const int lanes = panel.lanes();
        const int64_t count = block.stop - block.first, size = count * lanes;
        T *p = weights_of(number), *g = shares_of(number);
        panel.narrow(call, item, block);
        const Range seen = {max(block.first, panel.any_key.first), min(block.stop, panel.any_key.stop)};
        bool any = seen.first < seen.stop, all = true;
        if (any && call.mask.data) {
            const Cells cells = look_at_mask(call, item, panel, block);
            any = cells.any;
            all = cells.shows_all(0, count);
            if (any && !all) read_mask(call, item, panel, block, bytes);
        }
        shown[number] = any;
        folds[number] = Folds<T>();
        if (!any) {
            for (int64_t i = 0; i < size; ++i) p[i] = g[i] = (T)-0.0;
            return true;
        }
        multiply_rows_of(panel, count, keys, query, call.head_size, p);
        multiply_rows_of(panel, count, values, gradient, call.value_size, g);
        if (call.softcap != 0) {
            for (int64_t i = 0; i < size; ++i) raw[i] = p[i];
            cap<T>(p, size, (T)call.softcap, bounded);
        }
        bool by_scores = panel.has_gaps || !all;
        for (const PolyattnArray& bias : call.bias) {
            if (bias.data) by_scores = add_bias<T>(bias, item, panel, block, p) || by_scores;
        }
        const bool hides = hide(call, item, panel, block, all, bytes, p);
        if (panel.folds) folds[number].count(panel, block, count, p, by_scores);
        if (call.seed) {
            read_dropout(call, item, panel, block, bytes);
            select_or<T>(g, size, bytes, 0);
        }
        if (panel.count == 2) weigh<2>(call, number, count);
        else weigh<1>(call, number, count);
        for (const PolyattnArray& bias : call.bias_gradient) {
            if (bias.data) add_to_bias(bias, item, panel, block, call.softcap != 0 ? raw : g);
        }
        return hides || folds[number].first < folds[number].last;
    }

private:
    template <int Count> void weigh(const PolyattnCall& call, int number, int64_t count) {
        constexpr int lanes = Count * width;
        const int64_t start = start_of(number);
        T *p = weights_of(number), *g = shares_of(number);
        const Vector<T> hidden = broadcast<T>((T)-0.0);
        for (int v = 0; v < lanes; v += width) {
            const Vector<T> total = load(logsumexp + start + v), d = load(delta + start + v);
            Vector<T> softcap_sum = load(softcap_sums + start + v);
            for (int64_t i = v; i < count * lanes; i += lanes) {
                const Vector<T> s = load(p + i);
                Vector<T> weight = softmax_weights<T>(s, total);
                // -0 marks what is hidden, so a share of -0 becomes 0.
                Vector<T> share = weight * (load(g + i) - d) + 0;
                const Ints<T> is_hidden = s == -infinity<T>();
                if (call.softcap != 0) {
                    const Vector<T> t = load(bounded + i), slope = 1 - t * t;
                    const Vector<T> of_cap = share * (t - load(raw + i) / (T)call.softcap * slope);
                    softcap_sum += select<T>(is_hidden, Vector<T>{}, of_cap);
                    store<T>(raw + i, select<T>(is_hidden, hidden, share));
                    share = share * slope + 0;
                }
                if (call.seed) weight = select<T>(is_set<T>(bytes + i), weight, Vector<T>{});
                store<T>(p + i, select<T>(is_hidden, hidden, weight));
                store<T>(g + i, select<T>(is_hidden, hidden, share));
            }
            store<T>(softcap_sums + start + v, softcap_sum);
        }
    }

    static void add_to_bias(const PolyattnArray& bias, int64_t item, const Panel<T>& panel, Range block,
                            const T* shares) {
        const int lanes = panel.lanes();
        const int64_t count = block.stop - block.first;
        for (int v = 0; v < panel.used; v += width) {
            const int used = (int)min(width, panel.used - v);
            T* rows[width];
            for (int i = 0; i < used; ++i) {
                rows[i] = at<T>(bias, item, panel.head[v + i], panel.row[v + i]) + block.first * bias.column;
            }
            if (bias.column == 0) {
                Vector<T> sum = {};
                for (int64_t key = 0; key < count; ++key) sum += load(shares + key * lanes + v);
                for (int i = 0; i < used; ++i) *rows[i] += sum[i];
                continue;
            }
            int64_t key = 0;
            for (; bias.column == 1 && key + width <= count; key += width) {
                Vector<T> square[width];
                UNROLL for (int i = 0; i < width; ++i)
                    square[i] = load(shares + (key + i) * lanes + v);
                transpose(square);
                // One after the other: rows may share numbers.
                for (int i = 0; i < used; ++i) store<T>(rows[i] + key, load(rows[i] + key) + square[i]);
            }
            for (; key < count; ++key) {
                for (int i = 0; i < used; ++i) rows[i][key * bias.column] += shares[key * lanes + v + i];
            }
        }
    }
};

}  // namespace POLYATTN_UNIT
