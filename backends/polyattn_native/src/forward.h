// Attention of some rows: over blocks of keys, the scores, their softmax and its product with the
// values, with sums that are scaled anew when a maximum rises.
#pragma once
#include "few.h"
#include "scores.h"
#include "work.h"

namespace POLYATTN_UNIT {

// The most rows of a task.
constexpr int64_t ROWS = 256;
// The keys that are asked of the memory at a time: the processor has no room for many requests.
constexpr int64_t AHEAD = 8;

template <typename T> class Forward {
public:
    static Work work(const PolyattnCall& call) {
        const int64_t group = call.heads / call.key_heads, rows = call.rows * group;
        const int64_t pairs = call.items * call.key_heads, panel = 2 * width;
        // At least four tasks for each thread, if there are as many panels.
        int64_t parts = (4 * max(call.threads, 1) + pairs - 1) / max(pairs, 1);
        int64_t size = clamp((rows + parts - 1) / parts, panel, ROWS);
        size = min((size + panel - 1) / panel * panel, ROWS);
        Work work = {};
        work.rows = size;
        work.tasks = pairs * ((rows + size - 1) / size);
        work.scratch = Forward(call, work, nullptr).scratch_size;
        work.begin = [](const PolyattnCall& c, const Work& w, int64_t task, void* scratch) {
            Forward(c, w, scratch).begin(task);
        };
        work.step = [](const PolyattnCall& c, const Work& w, void* scratch) { return Forward(c, w, scratch).step(); };
        return work;
    }

private:
    static constexpr int width = Lanes<T>::width;

    // What stays between two steps of a task.
    struct State {
        int64_t item, key_head;
        int panels;
        Ranges ranges;  // of keys that some row sees
        Range keys;     // from the first to the last of them
        int64_t next;  // the first of the next block
    };

    const PolyattnCall& call;
    const Work& work_;
    State* state;
    const int few;  // rows of a key head, if its lanes are elements; the lanes of the panel repeat them then
    const bool copied;  // whether blocks of keys are; few rows read pages of any size in place, and integers
    Panel<T>* panels;
    T *queries, *outputs;        // [panel][element][lane]: scale · Q, the output before the division; [row][element]
                                 // of few rows
    T* folded;                   // the outputs of the keys before the last fold, if rows may fold
    T* scores;                   // [key][lane] of a block and a panel, then weights
    T* spare;                    // weights of the keys at which its lanes fold
    T *key_block, *value_block;  // [key][element] of a block that is converted or copied; queries and weights times
                                 // the steps of integers
    T* key_panel;                // [element][lane] of two vectors of keys, of few rows with the bits of many
    uint8_t* bytes;              // [key][lane], of a mask or dropout
    size_t scratch_size;

    Forward(const PolyattnCall& c, const Work& w, void* scratch)
        : call(c), work_(w), few(few_rows<T>(c)), copied(copies(c, few) && !widens<T>(c)) {
        BumpAllocator memory(scratch);
        const int64_t rows = (cuts(call, few) ? 2 : 1) * work_.rows + 2 * width;  // of all panels
        state = memory.take<State>(1);
        panels = memory.take<Panel<T>>(rows / width + 1);
        queries = memory.take<T>(rows * call.head_size);
        outputs = memory.take<T>(rows * (call.value_size + width));
        folded = memory.take<T>(call.keys > FOLD ? rows * (call.value_size + width) : 0);
        scores = memory.take<T>(BLOCK * 2 * width);
        spare = memory.take<T>(call.keys > FOLD ? BLOCK * 2 * width : 0);
        key_panel = memory.take<T>(few && call.same_bits ? 2 * width * call.head_size : 0);
        bytes = memory.take<uint8_t>(BLOCK * 2 * width + 64);
        key_block = memory.take<T>(copied ? BLOCK * call.head_size : call.key_steps.data ? few * call.head_size : 0);
        value_block = memory.take<T>(copied ? BLOCK * call.value_size : call.key_steps.data ? BLOCK * width : 0);
        scratch_size = memory.used();
    }

    // Whether a panel may have one row more than a vector in place of two vectors.
    static bool cuts(const PolyattnCall& call, int few) { return !few && call.first.data && call.ranges <= 1; }

    T* query_of(int panel) { return queries + (int64_t)panel * 2 * width * call.head_size; }
    int64_t start_of(int panel) const { return (int64_t)panel * 2 * width * call.value_size; }
    T* output_of(int panel) { return outputs + start_of(panel); }
    int64_t size_of(const Panel<T>& panel) const { return call.value_size * (few ? few : panel.lanes()); }

    void begin(int64_t number) {
        const int64_t group = call.heads / call.key_heads, rows = call.rows * group;
        const int64_t chunks = (rows + work_.rows - 1) / work_.rows;
        // The last rows first: under causal they see the most keys.
        const int64_t chunk = chunks - 1 - number % chunks, pair = number / chunks;
        state->item = pair / call.key_heads;
        state->key_head = pair % call.key_heads;
        state->panels = 0;
        state->ranges.clear(call);
        const int64_t stop = min((chunk + 1) * work_.rows, rows);
        for (int64_t row = chunk * work_.rows; row < stop;) {
            Panel<T>& panel = panels[state->panels];
            panel.begin(call, state->item, state->key_head, row, stop, few, cuts(call, few));
            read_query(panel, query_of(state->panels));
            state->ranges.add(panel.ranges);
            row += panel.used;
            ++state->panels;
        }
        state->keys = state->ranges.hull();
        state->next = state->keys.first;
    }

    void read_query(const Panel<T>& panel, T* to) {
        const T* rows[2 * width];
        for (int lane = 0; lane < panel.lanes(); ++lane) {
            const int64_t offset = offset_of(call.query, state->item, panel.head[lane], panel.row[lane]);
            // A block of keys has room for as many rows.
            T* buffer = key_block + lane * call.head_size;
            rows[lane] = numbers_at(call, (const T*)call.query.data, offset, call.head_size, buffer);
        }
        if (!few) return transpose_rows(rows, panel.lanes(), call.head_size, (T)call.scale, to);
        for (int row = 0; row < few; ++row) {
            for (int64_t e = 0; e < call.head_size; ++e) to[row * call.head_size + e] = rows[row][e] * (T)call.scale;
        }
    }

    bool step() {
        if (state->next < state->keys.stop) {
            const Range block = {state->next, min(state->next + BLOCK, state->keys.stop)};
            attend_to(block);
            state->next = state->ranges.next(state->next + BLOCK, BLOCK, state->keys.first);
        }
        if (state->next < state->keys.stop) return false;
        for (int i = 0; i < state->panels; ++i) write(panels[i], i);
        return true;
    }

    void attend_to(Range block) {
        if constexpr (sizeof(T) == 4) {
            if (widens<T>(call)) {
                const T* steps = at<T>(call.value_steps, state->item, state->key_head, block.first);
                return attend_to(block, codes_of(call.key, block),
                                 Codes<T>{codes_of(call.value, block), {steps, call.value_steps.row}});
            }
        }
        attend_to(block, block_of(call, call.key, state->item, state->key_head, block, call.head_size, key_block, few),
                  block_of(call, call.value, state->item, state->key_head, block, call.value_size, value_block, few));
    }
    Matrix<int8_t> codes_of(const PolyattnArray& array, Range block) const {
        return {(const int8_t*)array.data + offset_of(array, state->item, state->key_head, block.first), array.row};
    }

    template <typename Keys, typename Values> void attend_to(Range block, const Keys& keys, const Values& values) {
        int finite = -1;  // not known yet
        for (int i = 0; i < state->panels; ++i) {
            Panel<T>& panel = panels[i];
            panel.narrow(call, state->item, block);
            const Range seen = {max(block.first, panel.any_key.first), min(block.stop, panel.any_key.stop)};
            if (seen.first >= seen.stop) continue;
            Cells cells = {~0u, ~0u};
            Runs runs(seen);
            if (call.mask.data) {
                cells = look_at_mask(call, state->item, panel, seen);
                if (i + 1 < state->panels) prefetch_mask(call, state->item, panels[i + 1], seen);
                if (!cells.any) continue;
                runs = runs_of(seen, cells);
            }
            bool hides = false, by_scores = panel.has_gaps || (runs.count > 1 && !panel.sees_all(seen));
            int64_t count = 0;
            for (int n = 0; n < runs.count; ++n) {
                const Range run = runs.of[n];
                T* to = scores + count * panel.lanes();
                count += run.stop - run.first;
                multiply_keys(i, keys.after(run.first - block.first), values.after(run.first - block.first), run, to);
                by_scores = adjust(panel, run, to) || by_scores;
                const bool all = cells.shows_all(run.first - seen.first, run.stop - seen.first);
                if (!all) read_mask(call, state->item, panel, run, bytes);
                hides = hide(call, state->item, panel, run, all, bytes, to) || hides;
                by_scores = by_scores || !all;
            }
            Folds<T> folds;
            if (panel.folds) folds.count(panel, runs.count == 1 ? runs.of[0] : seen, count, scores, by_scores);
            hides = hides || folds.first < folds.last;
            if (hides && finite < 0) finite = is_finite(values, block.stop - block.first, call.value_size);
            int32_t parts[BLOCK / CELL];
            const Values some = values_of(runs, values, block, parts);
            const int64_t left = few ? min(state->keys.stop - seen.stop, BLOCK) : 0;
            const Coming<T> coming = coming_of(keys.after(seen.stop - block.first), left, call.head_size);
            weigh(i, runs, count, some, folds, hides && !finite, coming);
        }
    }

    // The keys that a panel computes with: one run where pages are read in place, which have parts of their own.
    Runs runs_of(Range seen, Cells cells) const {
        const int first = __builtin_ctz(cells.any), last = 31 - __builtin_clz(cells.any);
        const bool is_whole = call.table.data && !copied;
        return Runs(seen, is_whole ? (2u << last) - (1u << first) : cells.any);
    }
    // The values of runs: of several, in parts of a cell, whose numbers are written.
    template <typename N> static Matrix<N> values_of(const Runs& runs, Matrix<N> values, Range block, int32_t* parts) {
        const int64_t start = runs.of[0].first;
        values = values.after(start - block.first);
        if (runs.count == 1) return values;
        int count = 0;
        for (int n = 0; n < runs.count; ++n) {
            for (int64_t key = runs.of[n].first; key < runs.of[n].stop; key += CELL) {
                parts[count++] = (int32_t)((key - start) / CELL);
            }
        }
        return {values.data, values.stride, CELL, CELL * values.stride, parts};
    }
    static Codes<T> values_of(const Runs& runs, const Codes<T>& values, Range block, int32_t* parts) {
        return {values_of(runs, values.codes, block, parts), values_of(runs, values.steps, block, parts)};
    }
    static Coming<T> coming_of(Matrix<T> keys, int64_t count, int64_t size) { return Coming<T>(keys, count, size); }
    static Coming<T> coming_of(Matrix<int8_t>, int64_t, int64_t) { return {}; }

    void multiply_keys(int panel, Matrix<T> keys, Matrix<T> values, Range run, T* to) {
        const int64_t count = run.stop - run.first;
        if (few) {
            if (run.first == state->keys.first) {
                const Coming<T> own(keys, count, call.head_size);
                for (int64_t key = 0; key < count; ++key) own.ask(key);
            }
            const Coming<T> coming(values, count, call.value_size);
            const int stride = stride_of(panels[panel], run);
            if (call.same_bits) {
                return multiply_in_order<T>(query_of(panel), few, keys, count, call.head_size, stride, key_panel, to,
                                            coming);
            }
            return with_rows<T>(few, [&]<int Rows>(Sequence<Rows>) {
                multiply_few<T, Rows>(query_of(panel), keys, count, call.head_size, stride, to, coming);
            });
        }
        if (panel == 0 && !copied) return multiply_ahead(panels[0], keys, values, run, to);
        multiply_rows_of(panels[panel], count, keys, query_of(panel), call.head_size, to);
    }

    // The same of integers: as many keys as have the same steps at a time, with queries times these.
    void multiply_keys(int panel, Matrix<int8_t> keys, const Codes<T>&, Range run, T* to) {
        const int stride = stride_of(panels[panel], run);
        const T* query = query_of(panel);
        for (int64_t key = run.first, stop; key < run.stop; key = stop) {
            const int64_t number = key / call.step_keys;
            const T* steps = at<T>(call.key_steps, state->item, state->key_head, number);
            stop = min((number + 1) * call.step_keys, run.stop);
            for (int64_t e = 0; e < call.head_size; e += width) {
                Vector<T> factors = broadcast(steps[0]);
                if (call.key_steps.column) factors = load(steps + e);
                for (int64_t i = e; i < few * call.head_size; i += call.head_size) {
                    store<T>(key_block + i, load(query + i) * factors);
                }
            }
            with_rows<T>(few, [&]<int Rows>(Sequence<Rows>) {
                multiply_few<T, Rows>(key_block, keys.after(key - run.first), stop - key, call.head_size, stride,
                                      to + (key - run.first) * stride, {});
            });
        }
    }

    // The lanes of a key in a block: of few rows one for each, if nothing happens to single scores. Then it is one run.
    int stride_of(const Panel<T>& panel, Range seen) const {
        const bool adjusts = call.softcap != 0 || call.bias[0].data || call.bias[1].data || call.mask.data || call.seed;
        return few && !adjusts && panel.sees_all(seen) ? few : panel.lanes();
    }

    // The scores of the first panel, while the next keys and the values are on their way.
    void multiply_ahead(const Panel<T>& panel, Matrix<T> keys, Matrix<T> values, Range seen, T* found) {
        const int64_t count = seen.stop - seen.first, left = state->keys.stop - seen.first;
        for (int64_t key = 0; key < count; key += AHEAD) {
            const int64_t stop = min(key + AHEAD, count);
            for (int64_t i = stop; i < min(stop + AHEAD, left); ++i) prefetch<T, 2>(keys.at(i), call.head_size);
            for (int64_t i = key; i < stop; ++i) prefetch<T, 2>(values.at(i), call.value_size);
            T* to = found + key * panel.lanes();
            multiply_rows_of(panel, stop - key, keys.after(key), query_of(0), call.head_size, to);
        }
    }

    // Softcap and biases; return whether a bias hides keys.
    bool adjust(const Panel<T>& panel, Range seen, T* to) {
        const int64_t count = seen.stop - seen.first;
        if (call.softcap != 0) cap<T>(to, count * panel.lanes(), (T)call.softcap, nullptr);
        bool hides = false;
        for (const PolyattnArray& bias : call.bias) {
            if (bias.data) hides = add_bias<T>(bias, state->item, panel, seen, to) || hides;
        }
        return hides;
    }

    template <typename Values>
    void weigh(int number, const Runs& runs, int64_t count, const Values& values, const Folds<T>& folds,
               bool hides_nonfinite, const Coming<T>& coming) {
        Panel<T>& panel = panels[number];
        const int stride = stride_of(panel, runs.of[0]);
        T factor[2 * width], before[width];
        const bool is_compact = stride < width;  // then `weigh_few` adds up the totals, one for each row
        for (int lane = 0; is_compact && lane < width; ++lane) before[lane] = panel.total[lane % few];
        const Folds<T> none;
        if (panel.count == 2) soften<2>(panel, count, factor, hides_nonfinite, folds);
        else soften<1>(panel, (count * stride + width - 1) / width, factor, hides_nonfinite, is_compact ? none : folds);
        for (int lane = 0; is_compact && lane < width; ++lane) panel.total[lane] = before[lane] * factor[lane];
        T* weights = scores;
        for (int n = 0; call.seed && n < runs.count; ++n) {
            const int64_t size = (runs.of[n].stop - runs.of[n].first) * panel.lanes();
            read_dropout(call, state->item, panel, runs.of[n], bytes);
            zero_unset<T>(weights, size, bytes);
            weights += size;
        }
        Accumulate<T> accumulate = {false, panel.has_output ? factor : nullptr};
        panel.has_output = true;
        const auto add = [&](int64_t first, int64_t stop) {
            add_product(number, stride, scores + first * stride, values.after(first), stop - first, accumulate,
                        hides_nonfinite, coming);
            accumulate = {true, nullptr};
        };
        if (folds.first == folds.NONE) return add(0, count);
        // The keys between the first and the last fold are in both sums, each with the weights that belong to it.
        const int64_t size = (folds.last - folds.first) * stride;
        T* zone = scores + folds.first * stride;
        __builtin_memcpy(spare, zone, (size_t)size * sizeof(T));
        const T hidden = hides_nonfinite ? (T)-0.0 : (T)0;
        split_at(folds, stride, hidden, false, spare, zone);
        if (folds.last > 0) add(0, folds.last);
        fold(number, folds, accumulate.factor, is_compact);
        accumulate = {true, nullptr};
        split_at(folds, stride, hidden, true, spare, zone);
        add(folds.first, count);
    }

    // Add the sums of the lanes that fold to those of the keys before.
    void fold(int number, const Folds<T>& folds, const T* factor, bool of_totals) {
        Panel<T>& panel = panels[number];
        T *low = output_of(number), *high = folded + start_of(number);
        const bool is_first = !panel.has_folded;
        panel.has_folded = true;
        for (int v = 0; v < panel.lanes(); v += width) {
            T* before = panel.maximum_of_folded + v;
            const Vector<T> one = broadcast<T>(1),
                            scale = Reference<T>(load(panel.maximum + v)).scale_from(load(before));
            const Vector<T> of_low = factor ? load(factor + v) : one;
            const Ints<T> here = load_ints<T>(folds.at + v) != (Ints<T>{} + folds.NONE);
            store<T>(before, load(panel.maximum + v));
            if (of_totals) fold_vectors<T>(here, one, one, width, width, false, panel.total + v, panel.folded + v);
            for (int row = 0; row < few; ++row) {
                const int64_t start = row * call.value_size;
                fold_vectors<T>(Ints<T>{} + here[row], broadcast<T>(scale[row]), broadcast<T>(of_low[row]),
                                call.value_size, width, is_first, low + start, high + start);
            }
            if (few) continue;
            fold_vectors<T>(here, scale, of_low, size_of(panel) - v, panel.lanes(), is_first, low + v, high + v);
        }
    }

    template <typename Values>
    void add_product(int number, int stride, const T* weights, const Values& values, int64_t count,
                     Accumulate<T> accumulate, bool hides_nonfinite, const Coming<T>& coming) {
        Panel<T>& panel = panels[number];
        T* output = output_of(number);
        if constexpr (!__is_same(Values, Codes<T>)) {
            if (!few) {
                return multiply_weights(panel, call.value_size, values, weights, count, output, accumulate,
                                        hides_nonfinite);
            }
        }
        T ignored[width] = {};
        T* totals = stride < width ? panel.total : ignored;
        with_rows<T>(few, [&]<int Rows>(Sequence<Rows>) {
            const auto weigh = [&](auto numbers, const T* factors, bool in_cache) {
                weigh_few<T, Rows>(weights, factors, stride, numbers, count, call.value_size, output, accumulate,
                                   hides_nonfinite, totals, coming, in_cache);
            };
            if constexpr (__is_same(Values, Codes<T>)) {
                if (stride == Rows) scale_weights<Rows>(weights, values.steps, count, value_block);
                else scale_weights<width>(weights, values.steps, count, value_block);
                weigh(values.codes, value_block, true);
            } else weigh(values, weights, converts(call));
        });
        for (int lane = few; totals == panel.total && lane < width; ++lane) totals[lane] = totals[lane % few];
    }

    // Turn scores into weights, and write by what the sums so far are to be multiplied. If hides_nonfinite,
    // the weight of a hidden key is -0.
    template <int Count>
    void soften(Panel<T>& panel, int64_t count, T* factor, bool hides_nonfinite, const Folds<T>& folds) {
        constexpr int lanes = Count * width;
        Vector<T> top[Count], total[Count], high[Count];
        Reference<T> references[Count];
        UNROLL for (int v = 0; v < Count; ++v)
            top[v] = load(panel.maximum + v * width);
        for (int64_t key = 0; key < count; ++key) {
            UNROLL for (int v = 0; v < Count; ++v) { top[v] = max<T>(load(scores + key * lanes + v * width), top[v]); }
        }
        if (few) top[0] = largest_of_rows<T>(top[0], few);
        bool is_far = false;
        UNROLL for (int v = 0; v < Count; ++v) {
            references[v] = Reference<T>(top[v]);
            const Vector<T> f = references[v].scale_from(load(panel.maximum + v * width));
            store<T>(panel.maximum + v * width, top[v]);
            store<T>(factor + v * width, f);
            total[v] = load(panel.total + v * width) * f;
            high[v] = load(panel.folded + v * width) * f;
            is_far = is_far || references[v].is_far;
        }
        const Vector<T> hidden = broadcast<T>(hides_nonfinite ? (T)-0.0 : (T)0);
        const auto weigh_all = [&](auto weigh) {
            for (int64_t key = 0; key < count;) {
                if (key >= folds.first && key <= folds.last) {
                    UNROLL for (int v = 0; v < Count; ++v) {
                        const Ints<T> here =
                            load_ints<T>(folds.at + v * width) == (Ints<T>{} + (typename Lanes<T>::Int)key);
                        high[v] += select<T>(here, total[v], Vector<T>{});
                        total[v] = select<T>(here, Vector<T>{}, total[v]);
                    }
                }
                const int64_t stop = key < folds.first ? min(folds.first, count) : key < folds.last ? key + 1 : count;
                for (; key < stop; ++key) {
                    UNROLL for (int v = 0; v < Count; ++v) {
                        T* score = scores + key * lanes + v * width;
                        Vector<T> s = load(score), weight = weigh(references[v], s);
                        total[v] += weight;
                        if (hides_nonfinite) weight = select<T>(s == -infinity<T>(), hidden, weight);
                        store<T>(score, weight);
                    }
                }
            }
        };
        if (is_far) weigh_all([](const Reference<T>& reference, Vector<T> s) { return reference.weigh_far(s); });
        else
            weigh_all([](const Reference<T>& reference, Vector<T> s)
                          __attribute__((always_inline)) { return reference.weigh(s); });
        UNROLL for (int v = 0; v < Count; ++v) {
            store<T>(panel.total + v * width, total[v]);
            store<T>(panel.folded + v * width, high[v]);
        }
    }

    // Divide, with the sink in the denominator, and write output and logsumexp.
    void write(Panel<T>& panel, int number) {
        T* output = output_of(number);
        const int lanes = panel.lanes();
        for (int64_t i = 0; !panel.has_output && i < size_of(panel); ++i) output[i] = 0;
        if (panel.has_folded) {
            const Folds<T> all(0);
            fold(number, all, nullptr, true);
            for (int lane = 0; lane < lanes; ++lane) panel.total[lane] = panel.folded[lane];
            output = folded + start_of(number);
        }
        T divisor[2 * width], own[2 * width];  // the weight of the largest score
        for (int v = 0; v < lanes; v += width) {
            const Vector<T> top = load(panel.maximum + v);
            const Reference<T> reference(top);
            store<T>(own + v, reference.is_far ? reference.weigh_far(reference.top) : reference.weigh(reference.top));
        }
        T* rows[2 * width];
        for (int lane = 0; lane < lanes; ++lane) {
            T top = panel.maximum[lane], total = panel.total[lane], kept = (T)call.keep;
            if (call.sinks) {
                const T sink = ((const T*)call.sinks)[panel.head[lane]];
                // A NaN stays one.
                const T both = sink > top || sink != sink ? sink : top;
                if (both != -infinity<T>()) {
                    const T scaled = top == -infinity<T>() ? 0 : exponential(top - both);
                    total = total * scaled + exponential(sink - both) * own[lane];
                    kept /= scaled;
                    top = both;
                }
            }
            divisor[lane] = total == 0 ? infinity<T>() : total * kept;
            rows[lane] = nullptr;
            if (lane >= panel.used) continue;
            rows[lane] = converts(call) ? value_block + lane * call.value_size
                                        : at<T>(call.output, state->item, panel.head[lane], panel.row[lane]);
            if (call.logsumexp.data) {
                *at<T>(call.logsumexp, state->item, panel.head[lane], panel.row[lane]) =
                    total == 0 ? -infinity<T>() : top + logarithm(total / own[lane]);
            }
        }
        if (!few) write_rows<true>(output, divisor, lanes, call.value_size, rows);
        for (int row = 0; few && row < panel.used; ++row) {
            const Vector<T> total = broadcast<T>(divisor[row]);
            for (int64_t e = 0; e < call.value_size; e += width) {
                store<T>(rows[row] + e, load(output + row * call.value_size + e) / total);
            }
        }
        if constexpr (sizeof(T) == 4) {
            for (int lane = 0; converts(call) && lane < panel.used; ++lane) {
                uint16_t* to = at<uint16_t>(call.output, state->item, panel.head[lane], panel.row[lane]);
                narrow(call.dtype, rows[lane], call.value_size, to);
            }
        }
    }

    static float logarithm(float x) { return __builtin_logf(x); }
    static double logarithm(double x) { return __builtin_log(x); }
};

}  // namespace POLYATTN_UNIT
