// Random sequences, whole and cut: the same rows beside other rows, heads, items and keys, in other layouts, have the
// same bits.
#pragma once
#include <stdio.h>

#include "arrays.h"

struct Sequence {
    Random random;
    Kind kind = FLOAT32, sums = FLOAT32;
    bool is_integer, has_gradient, has_bias, has_sinks, has_dropout;
    int64_t key_heads, group, rows, keys, head_size, value_size;
    double scale, softcap;
    std::vector<double> query, key, value, steps, gradient, bias, sinks;  // [head][row or key][element]
    std::vector<char> seen;                                     // [row][key]
    std::vector<uint32_t> seed;

    explicit Sequence(uint64_t start) : random{start} {
        is_integer = random.chance(0.15);
        if (!is_integer) kind = random.one_of({FLOAT32, FLOAT32, FLOAT64, FLOAT16, BFLOAT16});
        if (kind == FLOAT64) sums = FLOAT64;
        has_gradient = kind == sums && !is_integer && random.chance(0.4);
        keys = random.between(1, random.one_of<int64_t>({20, 300, 700, 700, 1500, 2600}));
        rows = std::min(keys, random.between(1, random.one_of<int64_t>({8, 40, 40, keys > 700 ? 60 : 300})));
        key_heads = random.between(1, 2), group = random.one_of<int64_t>({1, 1, 2, 3, 8});
        const bool even = random.chance(0.5);
        head_size = even ? 16 * random.between(1, 4) : random.between(1, 40);
        value_size = even ? 16 * random.between(1, 4) : random.between(1, 40);
        scale = random.one_of({1.0, 1.0, 8.0, 60.0, 1e6}) / sqrt((double)head_size);
        softcap = random.one_of({0.0, 0.0, 0.0, 20.0});
        fill(query, key_heads * group * rows * head_size);
        fill(key, key_heads * keys * head_size);
        fill(value, key_heads * keys * value_size);
        fill(steps, 2 * keys);
        fill(gradient, key_heads * group * rows * value_size);
        if (random.chance(0.2)) value[(size_t)random.between(0, (int64_t)value.size() - 1)] = INFINITY;
        if (is_integer) {
            for (std::vector<double>* codes : {&key, &value}) {
                for (double& x : *codes) x = (double)random.between(-127, 127);
            }
        }
        if ((has_bias = random.chance(0.3))) fill(bias, key_heads * group * rows * keys);
        if ((has_sinks = random.chance(0.2))) fill(sinks, key_heads * group);
        if ((has_dropout = random.chance(0.1))) {
            for (int i = 0; i < 6; ++i) seed.push_back((uint32_t)random.between(500, 999));
        }
        const double part = random.one_of({1.0, 1.0, 1.0, 0.5, 0.95});
        const int64_t document = random.one_of<int64_t>({keys, keys, keys, 50, 600}),
                      prefix = random.one_of<int64_t>({0, 0, 4});
        const int64_t window = random.one_of<int64_t>({keys, keys, keys, 30, 600, 1100});
        const bool causal = random.chance(0.8);
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t k = 0, at = row + keys - rows; k < keys; ++k) {
                const bool near = k > at - window && k / document == at / document;
                seen.push_back((!causal || k <= at) && (near || k < prefix) && random.chance(part));
            }
        }
    }
    void fill(std::vector<double>& numbers, int64_t count) {
        for (int64_t i = 0; i < count; ++i) numbers.push_back(random.normal());
    }
};

// A call of some rows, heads and keys: places[k] is the key of the sequence that the k-th of the call is, or -1.
struct Part {
    PolyattnCall call = {};
    std::vector<Array> arrays;
    std::vector<int32_t> table;
    std::vector<uint32_t> seed;
    std::vector<char> sinks;
    int64_t item;
    Array output, logsumexp, query_gradient;

    template <typename F>
    Array made(Random& random, PolyattnArray& view, Kind kind, std::vector<int64_t> shape, F number, bool any = false) {
        Array array(random, kind, shape, any);
        array.each([&](int64_t i, int64_t h, int64_t r, int64_t c) { array.set(i, h, r, c, number(i, h, r, c)); });
        view = array.view;
        arrays.push_back(array);
        return array;
    }

    Part(const Sequence& s, Random& random, int64_t first, int64_t rows, int64_t head, int64_t heads, int64_t group,
         const std::vector<int64_t>& places) {
        const int64_t keys = call.keys = (int64_t)places.size(), g0 = head / s.group;
        const bool pages = !s.is_integer && !s.has_gradient && random.chance(0.3);
        call.items = random.between(1, 3), item = random.between(0, call.items - 1);
        call.heads = heads, call.key_heads = heads / group, call.rows = rows;
        call.head_size = s.head_size, call.value_size = s.value_size, call.scale = s.scale, call.softcap = s.softcap;
        call.dtype = s.kind, call.keep = s.has_dropout ? 0.7 : 1, call.same_bits = 1;
        call.threads = (int32_t)random.between(1, 3), call.is_part = random.chance(0.2);
        const auto other = [&] { return random.chance(0.02) ? NAN : random.normal(); };
        made(random, call.query, s.kind, {call.items, heads, rows, s.head_size},
             [&](int64_t i, int64_t h, int64_t r, int64_t e) {
                 return i == item ? s.query[(size_t)(((head + h) * s.rows + first + r) * s.head_size + e)] : other();
             });
        if (pages) call.page = random.one_of<int64_t>({1, 3, 8, 16, 100, 256});
        const int64_t each = pages ? (keys + call.page - 1) / call.page : 1, page = pages ? call.page : keys;
        const auto number = [&](const std::vector<double>& from, int64_t size) {
            return [&, size](int64_t i, int64_t h, int64_t k, int64_t e) {
                // The pages of an item are those from `each` times its number on, backwards.
                const int64_t key = pages ? (each - 1 - i % each) * page + k : k,
                              at = key < keys ? places[(size_t)key] : -1;
                if (i / each != item || at < 0) return s.is_integer ? 1.0 : other();
                return from[(size_t)(((g0 + h) * s.keys + at) * size + e)];
            };
        };
        const Kind of_key = s.is_integer ? INT8 : s.kind;
        const std::vector<int64_t> shape = {call.items * each, call.key_heads, page};
        const auto made_keys = [&](PolyattnArray& view, const std::vector<double>& from, int64_t size) {
            do made(random, view, of_key, {shape[0], shape[1], shape[2], size}, number(from, size));
            while (pages && view.offsets);
        };
        made_keys(call.key, s.key, s.head_size);
        made_keys(call.value, s.value, s.value_size);
        if (pages) {
            for (int64_t i = 0; i < call.items; ++i) {
                for (int64_t n = 0; n < each; ++n) table.push_back((int32_t)(i * each + each - 1 - n));
            }
            call.keys = each * page;
            call.table.data = table.data(), call.table.item = each;
        }
        if (s.is_integer) {
            call.step_keys = 1;
            const auto step = [&](int64_t of_value) {
                return [&, of_value](int64_t, int64_t, int64_t k, int64_t) {
                    return places[(size_t)k] < 0 ? 0.5 : s.steps[(size_t)(2 * places[(size_t)k] + of_value)] / 100;
                };
            };
            made(random, call.key_steps, s.sums, {1, call.key_heads, keys, s.head_size}, step(0));
            made(random, call.value_steps, s.sums, {1, call.key_heads, keys, 1}, step(1));
            call.value_steps.column = 0;
        }
        add_mask(s, random, first, head, places);
        if (s.has_sinks) {
            for (int64_t h = 0; h < heads; ++h) {
                sinks.resize((size_t)((h + 1) * bytes_of(s.sums)));
                put(s.sums, sinks.data() + h * bytes_of(s.sums), s.sinks[(size_t)(head + h)]);
            }
            call.sinks = sinks.data();
        }
        if (s.has_dropout) {
            seed = s.seed;
            seed[2] -= (uint32_t)item, seed[3] += (uint32_t)head, seed[4] += (uint32_t)first;
            int64_t k = 0;
            while (k + 1 < keys && places[(size_t)k] < 0) ++k;
            seed[5] += (uint32_t)(places[(size_t)k] - k);
            call.seed = seed.data(), call.threshold = 1u << 30;
        }
        output = made(random, call.output, s.kind, {call.items, heads, rows, s.value_size}, [](auto...) { return 7; });
        logsumexp = made(random, call.logsumexp, s.sums, {call.items, heads, rows, 1}, [](auto...) { return 7; });
        if (!s.has_gradient) return;
        const auto nothing = [](auto...) { return 0; };
        made(random, call.output_gradient, s.sums, {call.items, heads, rows, s.value_size},
             [&](int64_t i, int64_t h, int64_t r, int64_t e) {
                 const int64_t row = (head + h) * s.rows + first + r;
                 return i == item ? s.gradient[(size_t)(row * s.value_size + e)] : random.normal();
             });
        query_gradient = made(random, call.query_gradient, s.sums, {call.items, heads, rows, s.head_size}, nothing);
        made(random, call.key_gradient, s.sums, {call.items, call.key_heads, keys, s.head_size}, nothing);
        made(random, call.value_gradient, s.sums, {call.items, call.key_heads, keys, s.value_size}, nothing);
        made(random, call.delta, s.sums, {call.items, heads, rows, 1}, nothing);
    }

    bool sees(const Sequence& s, const std::vector<int64_t>& places, int64_t row, int64_t key) const {
        return key < (int64_t)places.size() && places[(size_t)key] >= 0 &&
               s.seen[(size_t)(row * s.keys + places[(size_t)key])];
    }

    // What the rows see, as ranges, a mask or a bias of -inf.
    void add_mask(const Sequence& s, Random& random, int64_t first, int64_t head, const std::vector<int64_t>& places) {
        const int64_t keys = call.keys;
        std::vector<std::vector<int64_t>> ends((size_t)call.rows);
        int64_t ranges = 1;
        for (int64_t r = 0; r < call.rows; ++r) {
            std::vector<int64_t>& of_row = ends[(size_t)r];
            for (int64_t k = 0; k <= keys; ++k) {
                if (sees(s, places, first + r, k) != (of_row.size() % 2 == 1)) of_row.push_back(k);
            }
            ranges = std::max(ranges, (int64_t)of_row.size() / 2);
        }
        const int way = random.chance(0.2) ? 2 : ranges > POLYATTN_RANGES || random.chance(0.3) ? 1 : 0;
        if (way == 0) {
            call.ranges = ranges;
            for (int stop = 0; stop < 2; ++stop) {
                made(
                    random, stop ? call.stop : call.first, INT32, {1, 1, call.rows, ranges},
                    [&](int64_t, int64_t, int64_t r, int64_t n) {
                        const std::vector<int64_t>& of_row = ends[(size_t)r];
                        return 2 * n < (int64_t)of_row.size() ? (double)of_row[(size_t)(2 * n + stop)] : (double)keys;
                    },
                    true);
            }
        } else if (way == 1) {
            made(
                random, call.mask, UINT8, {1, 1, call.rows, keys},
                [&](int64_t, int64_t, int64_t r, int64_t k) { return sees(s, places, first + r, k); },
                random.chance(0.5));
        }
        if (!s.has_bias && way != 2) return;
        made(
            random, call.bias[1], s.sums, {1, call.heads, call.rows, keys},
            [&](int64_t, int64_t h, int64_t r, int64_t k) {
                if (way == 2 && !sees(s, places, first + r, k)) return -(double)INFINITY;
                if (!s.has_bias || k >= (int64_t)places.size() || places[(size_t)k] < 0) return 0.0;
                return s.bias[(size_t)(((head + h) * s.rows + first + r) * s.keys + places[(size_t)k])];
            },
            random.chance(0.5));
    }

    static bool run(int (*function)(const PolyattnCall*, void**), const PolyattnCall& call) {
        void* state = nullptr;
        int status;
        while ((status = function(&call, &state)) == 1) {}
        return status == 0;
    }
    bool compute() const {
        return run(polyattn_attend, call) && (!call.query_gradient.data || run(polyattn_differentiate, call));
    }
};

// Whether rows of a random sequence have the same bits in three cuts of it.
inline bool is_invariant(uint64_t start) {
    Sequence s(start);
    Random& random = s.random;
    std::vector<int64_t> all;
    for (int64_t k = 0; k < s.keys; ++k) all.push_back(k);
    Part whole(s, random, 0, s.rows, 0, s.key_heads * s.group, s.group, all);
    if (!whole.compute()) return false;
    for (int cut = 0; cut < 3; ++cut) {
        const int64_t first = random.between(0, s.rows - 1), left = s.rows - first;
        const int64_t rows = std::min(left, random.one_of<int64_t>({1, 1, 2, 3, 16, 100, random.between(1, left)}));
        const bool one = random.chance(0.2);  // one head of a group
        const int64_t g = random.between(0, s.key_heads - 1),
                      head = g * s.group + (one ? random.between(0, s.group - 1) : 0);
        const int64_t heads = one ? 1 : (s.key_heads - g) * s.group;
        // Keys before, after and among those that the rows see.
        std::vector<int64_t> places;
        const int64_t before = random.one_of<int64_t>({0, 1, 7, 16, 255, 256, 300}), after = random.between(0, 40);
        const double inserted = s.has_dropout ? 0 : random.one_of({0.0, 0.0, 0.1}),
                     dropped = random.one_of({0.0, 0.5, 1.0});
        for (int64_t k = 0; k < before; ++k) places.push_back(-1);
        for (int64_t k = 0; k < s.keys; ++k) {
            bool seen = s.has_dropout;
            for (int64_t r = first; r < first + rows; ++r) seen = seen || s.seen[(size_t)(r * s.keys + k)];
            if (random.chance(inserted)) places.push_back(-1);
            if (seen || !random.chance(dropped)) places.push_back(k);
        }
        for (int64_t k = 0; k < after || places.empty(); ++k) places.push_back(-1);
        Part part(s, random, first, rows, head, heads, one ? 1 : s.group, places);
        if (!part.compute()) return false;
        static const char* const names[] = {"output", "logsumexp", "query's gradient"};
        const Array* found[] = {&part.output, &part.logsumexp, &part.query_gradient};
        const Array* wanted[] = {&whole.output, &whole.logsumexp, &whole.query_gradient};
        for (int n = 0; n < (s.has_gradient ? 3 : 2); ++n) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t r = 0; r < rows; ++r) {
                    for (int64_t e = 0; e < wanted[n]->shape()[3]; ++e) {
                        const double a = (*wanted[n])(whole.item, head + h, first + r, e),
                                     b = (*found[n])(part.item, h, r, e);
                        // 0 · infinity, and what is left of it where dropout takes the others, if a weight underflows.
                        if (a == b || (a - a != 0 && b - b != 0) || fabs(a - b) < 0x1p-100) continue;
                        printf("seed %llu: %s of row %lld, head %lld is %.17g in whole, %.17g in cut %d\n",
                               (unsigned long long)start, names[n], (long long)(first + r), (long long)(head + h), a, b,
                               cut);
                        return false;
                    }
                }
            }
        }
    }
    return true;
}
