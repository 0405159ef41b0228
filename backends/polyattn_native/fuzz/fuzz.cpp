// Random calls of the C interface against the formula in double: `fuzz SEED COUNT [SET]`.
//
// The seeds of the calls are SEED to SEED + COUNT - 1. It prints the seed of the first wrong call,
// and then exits with 1. Without the name of an instruction set, each call takes one of all.
// `fuzz SEED COUNT sums` makes only calls whose tasks add to the same numbers, and compares their bits;
// `fuzz SEED COUNT cuts` only sequences of which rows are computed in several ways.
#include <stdio.h>
#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "arrays.h"
#include "cuts.h"

namespace {

enum Function { ATTEND, DIFFERENTIATE };

// ---- the call ----

struct Case {
    Random random;
    Function function;
    PolyattnCall call = {};
    Kind kind, sums;  // of the inputs, of the scores
    Array query, key, value, key_steps, value_steps, output, logsumexp, first, stop, mask, bias[2], sinks;
    Array output_gradient, logsumexp_gradient, query_gradient, key_gradient, value_gradient, delta, softcap_gradient;
    Array bias_gradient[2];
    const bool of_sums;  // of gradients to which several tasks add; any numbers, not those of the formula
    std::vector<int64_t> positions;
    std::vector<uint32_t> seed;
    std::vector<int32_t> table;

    explicit Case(uint64_t seed, bool adds = false) : random{seed}, of_sums(adds) {
        function = random.one_of({ATTEND, ATTEND, DIFFERENTIATE});
        kind = random.one_of({FLOAT32, FLOAT32, FLOAT64, FLOAT16, BFLOAT16});
        sums = kind == FLOAT64 ? FLOAT64 : FLOAT32;
        const int64_t size = random.one_of<int64_t>({8, 8, 40, 40, 300});
        call.items = random.between(1, 3);
        call.key_heads = random.between(1, 3);
        call.heads = call.key_heads * random.one_of<int64_t>({1, 1, 2, 3, 4, 8});
        call.rows = random.between(1, size);
        call.keys = random.between(1, size);
        if (function == ATTEND && random.chance(0.3)) call.page = random.one_of<int64_t>({1, 3, 8, 9, 16, 64});
        if (call.page) call.keys = (call.keys + call.page - 1) / call.page * call.page;
        call.head_size = random.between(1, random.one_of<int64_t>({8, 72, 300}));
        call.value_size = random.between(1, random.one_of<int64_t>({8, 72, 300}));
        if (size > 40) call.items = 1, call.heads = call.key_heads = random.between(1, 2);
        if (function == ATTEND && random.chance(0.2)) {  // few rows of a key head, whose lanes are elements
            call.rows = random.one_of<int64_t>({1, 1, 2, 3});
            call.head_size = 16 * random.between(1, 9), call.value_size = 16 * random.between(1, 9);
        }
        if (of_sums) {
            function = DIFFERENTIATE, call.page = 0;
            call.heads = call.key_heads * random.between(1, 8);
            call.rows = random.between(1, 100), call.keys = random.between(1, 300);
            call.head_size = random.between(1, 16), call.value_size = random.between(1, 16);
        }
        call.dtype = kind;
        call.scale = random.one_of({1.0, 0.3, -0.2}) / sqrt((double)call.head_size);
        if (function == ATTEND && random.chance(0.1)) call.scale *= 1000;
        call.keep = 1;
        add_inputs();
        add_masks();
        if (call.page) add_table();
        add_options();
        if (function == DIFFERENTIATE) add_gradients();
    }

    Array made(PolyattnArray& view, Kind of, std::vector<int64_t> shape, bool any_column = false) {
        Array array(random, of, std::move(shape), any_column);
        array.fill([&] { return random.normal(); });
        view = array.view;
        return array;
    }
    // The shape with some axes of length 1.
    std::vector<int64_t> some(std::vector<int64_t> shape) {
        for (int64_t& n : shape) n = random.chance(0.4) ? 1 : n;
        return shape;
    }
    std::vector<int64_t> by_row() const { return {call.items, call.heads, call.rows, 1}; }
    std::vector<int64_t> of_query() const { return {call.items, call.heads, call.rows, call.head_size}; }
    std::vector<int64_t> of_key() const { return {call.items, call.key_heads, call.keys, call.head_size}; }
    std::vector<int64_t> of_value() const { return {call.items, call.key_heads, call.keys, call.value_size}; }
    std::vector<int64_t> of_output() const { return {call.items, call.heads, call.rows, call.value_size}; }
    std::vector<int64_t> of_scores() const { return {call.items, call.heads, call.rows, call.keys}; }

    std::vector<int64_t> with_items(std::vector<int64_t> shape) {
        if (random.chance(0.15)) shape[0] = 1;
        if (random.chance(0.05)) shape[1] = 1;
        return shape;
    }

    void add_inputs() {
        query = made(call.query, kind, with_items(of_query()));
        if (call.page) {
            const int64_t pages = random.between(1, 2 * call.keys / call.page);
            do key = made(call.key, kind, {pages, call.key_heads, call.page, call.head_size});
            while (key.view.offsets);
            do value = made(call.value, kind, {pages, call.key_heads, call.page, call.value_size});
            while (value.view.offsets);
        } else if (function == ATTEND && kind == sums && random.chance(0.2)) {
            add_integers();
        } else {
            key = made(call.key, kind, with_items(of_key()));
            value = made(call.value, kind, with_items(of_value()));
        }
        output = made(call.output, function == ATTEND ? kind : sums, of_output());
        if (function != ATTEND || random.chance(0.7)) logsumexp = made(call.logsumexp, sums, by_row());
        // What is not finite, often where no row sees it.
        Array &of_keys = key_steps ? key_steps : key, &of_values = value_steps ? value_steps : value;
        while (random.chance(0.2)) poison(random.chance(0.5) ? of_keys : of_values, NAN);
        while (function == ATTEND && random.chance(0.1))
            poison(of_values, random.one_of<double>({INFINITY, -INFINITY}));
        while (random.chance(0.05)) poison(query, NAN);
    }
    void add_integers() {
        call.step_keys = random.between(1, call.keys);
        const int64_t blocks = (call.keys + call.step_keys - 1) / call.step_keys;
        key = made(call.key, INT8, with_items(of_key()));
        value = made(call.value, INT8, with_items(of_value()));
        for (Array* array : {&key, &value}) array->fill([&] { return (double)random.between(-127, 127); });
        key_steps = made(call.key_steps, sums, with_items({call.items, call.key_heads, blocks, call.head_size}));
        value_steps = made(call.value_steps, sums, with_items({call.items, call.key_heads, call.keys, 1}));
        for (Array* array : {&key_steps, &value_steps}) array->fill([&] { return random.unit() / 64; });
        call.value_steps.column = 0;
    }
    void poison(Array& array, double number) {
        int64_t at[4];
        for (size_t i = 0; i < 4; ++i) at[i] = random.between(0, array.shape()[i] - 1);
        array.set(at[0], at[1], at[2], at[3], number);
    }

    void add_masks() {
        const int64_t far = (int64_t)1 << 61;
        if (random.chance(0.4))
            call.has_high = 1,
            call.high = random.one_of<int64_t>({0, 0, call.keys - call.rows, random.between(-9, 9), far, -far});
        if (random.chance(0.3))
            call.has_low = 1, call.low = random.one_of<int64_t>({0, -20, random.between(-99, 9), far, -far});
        if (random.chance(0.3)) {
            for (int64_t i = 0; i < call.items; ++i) {
                positions.push_back(
                    random.one_of<int64_t>({random.between(-5, call.keys), random.between(-5, call.keys), far, -far}));
            }
            call.positions = positions.data();
        }
        std::vector<int64_t> by_head = some(by_row());
        if (random.chance(0.15)) {
            call.ranges = by_head[3] = random.between(2, POLYATTN_RANGES);
            first = made(call.first, INT32, by_head, true);
            stop = made(call.stop, INT32, by_head, true);
            first.each([&](int64_t i, int64_t h, int64_t r, int64_t c) {
                if (c == 0) add_ranges(i, h, r);
            });
        } else if (random.chance(0.25)) {
            first = made(call.first, INT32, by_head);
            first.fill([&] { return (double)random.between(0, call.keys); });
            call.first = first.view;
        }
        if (!call.ranges && random.chance(0.25)) {
            stop = made(call.stop, INT32, by_head);
            stop.fill([&] { return (double)random.between(0, call.keys); });
        }
        if (random.chance(0.3)) {
            mask = made(call.mask, UINT8, some(of_scores()), true);
            const double part = random.one_of({0.0, 0.1, 0.5, 0.9, 1.0});
            mask.fill([&] { return random.chance(part) ? 1.0 : 0.0; });
            if (random.chance(0.3)) {  // all of some columns
                const std::vector<int64_t> s = mask.shape();
                mask.each([&](int64_t i, int64_t h, int64_t r, int64_t c) {
                    if (c % 7 < 3 && s[3] > 1) mask.set(i, h, r, c, c % 7 == 0);
                });
            } else if (random.chance(0.3)) {  // nothing of two in three runs of columns
                const int64_t run = random.between(10, 40);
                mask.each([&](int64_t i, int64_t h, int64_t r, int64_t c) {
                    if (c / run % 3 && mask.shape()[3] > 1) mask.set(i, h, r, c, 0);
                });
            }
        }
    }

    // Ranges of a row in order, of which the last ones may be empty.
    void add_ranges(int64_t item, int64_t head, int64_t row) {
        std::vector<int64_t> ends;
        const int64_t used = random.between(0, call.ranges);
        for (int64_t i = 0; i < 2 * used; ++i) ends.push_back(random.between(0, call.keys));
        std::sort(ends.begin(), ends.end());
        ends.resize(2 * call.ranges, call.keys);
        for (int64_t i = 0; i < call.ranges; ++i) {
            first.set(item, head, row, i, (double)ends[2 * i]);
            stop.set(item, head, row, i, (double)ends[2 * i + 1]);
        }
    }

    // Pages in any order, shared or not, and no number of one where no row of the item sees a key.
    void add_table() {
        for (int64_t item = 0; item < call.items; ++item) {
            int64_t end = stop ? 0 : call.keys;
            for (int64_t head = 0; stop && head < call.heads; ++head) {
                for (int64_t row = 0; row < call.rows; ++row) end = std::max(end, last_stop(item, head, row));
            }
            for (int64_t first = 0; first < call.keys; first += call.page)
                table.push_back(first < end ? (int32_t)random.between(0, key.shape()[0] - 1) : 1 << 30);
        }
        call.table.data = table.data();
        call.table.item = call.keys / call.page;
    }
    int64_t last_stop(int64_t item, int64_t head, int64_t row) const {
        return (int64_t)stop(item, head, row, std::max<int64_t>(call.ranges, 1) - 1);
    }
    // A number of a key or value.
    double at(const Array& array, int64_t item, int64_t head, int64_t row, int64_t column) const {
        if (key_steps && &array == &key)
            return array(item, head, row, column) * key_steps(item, head, row / call.step_keys, column);
        if (key_steps && &array == &value) return array(item, head, row, column) * value_steps(item, head, row, 0);
        if (!call.page) return array(item, head, row, column);
        const int64_t page = table[(size_t)(item * (call.keys / call.page) + row / call.page)];
        return array(page, head, row % call.page, column);
    }

    void add_options() {
        if (random.chance(0.25)) call.softcap = random.one_of({0.7, 20.0});
        for (int n = 0; n < 2; ++n) {
            if (!random.chance(0.25)) continue;
            bias[n] = made(call.bias[n], sums, some(of_scores()), true);
            const double part = random.one_of({0.0, 0.0, 0.2, 1.0});
            bias[n].fill([&] { return random.chance(part) ? -INFINITY : random.normal(); });
        }
        if (random.chance(0.25)) {
            PolyattnArray view;
            sinks = made(view, sums, {1, 1, 1, call.heads});
            if (function == ATTEND && random.chance(0.2)) poison(sinks, random.one_of({-(double)INFINITY, 1e4}));
            call.sinks = sinks.view.data;
        }
        if (random.chance(0.25)) {
            const double rate = random.one_of({0.3, 0.9, 0.999});
            call.keep = 1 - rate;
            call.threshold = (uint32_t)(rate * 0x1p32);
            seed = {(uint32_t)random.next(), (uint32_t)random.next()};
            for (int axis = 0; axis < 4; ++axis) {
                const int64_t start = random.one_of<int64_t>({0, 1, random.between(0, 99), 0xffffffff, 0xfffffff0});
                seed.push_back((uint32_t)start);
            }
            call.seed = seed.data();
        }
    }

    void add_gradients();

    // The arrays that the call writes.
    std::vector<Array> written() const {
        if (function == ATTEND) return {output, logsumexp};
        return {query_gradient,   key_gradient,     value_gradient,  delta,
                softcap_gradient, bias_gradient[0], bias_gradient[1]};
    }
};

// ---- the formula ----

uint32_t philox(const PolyattnCall& call, int64_t item, int64_t head, int64_t row, int64_t key) {
    const uint32_t* start = call.seed + 2;
    const uint64_t at = (uint64_t)key + start[3];
    uint32_t a = (uint32_t)(at / 4), b = (uint32_t)row + start[2], c = (uint32_t)head + start[1];
    uint32_t d = (uint32_t)item + start[0], low = call.seed[0], high = call.seed[1];
    for (int round = 0; round < 10; ++round) {
        const uint64_t x = (uint64_t)a * 0xD2511F53, y = (uint64_t)c * 0xCD9E8D57;
        a = (uint32_t)(y >> 32) ^ b ^ low;
        c = (uint32_t)(x >> 32) ^ d ^ high;
        b = (uint32_t)y;
        d = (uint32_t)x;
        low += 0x9E3779B9;
        high += 0xBB67AE85;
    }
    const uint32_t words[4] = {a, b, c, d};
    return words[at % 4];
}

// A row of the scores, and what follows from them.
struct Row {
    const Case& x;
    const PolyattnCall& call;
    int64_t item, head, row, key_head;
    std::vector<int64_t> seen;
    std::vector<double> score, raw, bounded, kept;  // of the keys that are seen
    double top = -INFINITY, logsumexp, largest = 0;

    Row(const Case& c, int64_t i, int64_t h, int64_t r)
        : x(c), call(c.call), item(i), head(h), row(r), key_head(h / (c.call.heads / c.call.key_heads)) {
        for (int64_t key = 0; key < call.keys; ++key) {
            if (sees(key)) add(key);
        }
        if (x.sinks) top = std::max(top, sink());
        double total = x.sinks && top != -INFINITY ? exp(sink() - top) : 0;
        for (double s : score) total += exp(s - top);
        for (double s : score) top = s != s ? s : top;
        logsumexp = total == 0 ? -INFINITY : top + log(total);
    }
    double sink() const { return x.sinks(0, 0, 0, head); }

    bool sees(int64_t key) const {
        const int64_t p = row + (call.positions ? call.positions[item] : 0);
        if (call.has_low && key < p + call.low) return false;
        if (call.has_high && key > p + call.high) return false;
        bool in_range = false;
        for (int64_t i = 0; i < std::max<int64_t>(call.ranges, 1); ++i) {
            const bool after = !x.first || key >= x.first(item, head, row, i);
            in_range = in_range || (after && (!x.stop || key < x.stop(item, head, row, i)));
        }
        if (!in_range) return false;
        if (x.mask && x.mask(item, head, row, key) == 0) return false;
        for (const Array& bias : x.bias) {
            if (bias && bias(item, head, row, key) == -INFINITY) return false;
        }
        return true;
    }
    void add(int64_t key) {
        double s = 0, sum = 0;
        for (int64_t d = 0; d < call.head_size; ++d) {
            const double product = x.query(item, head, row, d) * x.at(x.key, item, key_head, key, d) * call.scale;
            s += product;
            sum += fabs(product);
        }
        if (sum > largest) largest = sum;
        raw.push_back(s);
        bounded.push_back(call.softcap != 0 ? tanh(s / call.softcap) : 0);
        if (call.softcap != 0) s = call.softcap * bounded.back();
        for (const Array& bias : x.bias) {
            if (bias) s += bias(item, head, row, key);
        }
        seen.push_back(key);
        score.push_back(s);
        kept.push_back(call.seed && philox(call, item, head, row, key) < call.threshold ? 0 : 1 / call.keep);
        top = std::max(top, s);
    }
    double value(size_t n, int64_t e) const { return x.at(x.value, item, key_head, seen[n], e); }
    double slope(size_t n) const { return call.softcap != 0 ? 1 - bounded[n] * bounded[n] : 1; }
};

// An expected array, as far as the call sums it up.
struct Expected {
    Array array;
    std::vector<double> numbers;

    explicit Expected(const Array& a) : array(a) {
        if (a) numbers.resize((size_t)(a.shape()[0] * a.shape()[1] * a.shape()[2] * a.shape()[3]));
    }
    // Axes of length 1 are repeated.
    double& operator()(int64_t i, int64_t h, int64_t r, int64_t c) {
        const std::vector<int64_t>& n = array.shape();
        if (n[0] == 1) i = 0;
        if (n[1] == 1) h = 0;
        if (n[2] == 1) r = 0;
        if (n[3] == 1) c = 0;
        return numbers[(size_t)(((i * n[1] + h) * n[2] + r) * n[3] + c)];
    }
    // Expect what is added to the numbers that are there.
    void begin() {
        if (!array) return;
        array.each([this](int64_t i, int64_t h, int64_t r, int64_t c) { (*this)(i, h, r, c) = array(i, h, r, c); });
    }
};

template <typename F> void each_row(const Case& x, F function) {
    for (int64_t item = 0; item < x.call.items; ++item)
        for (int64_t head = 0; head < x.call.heads; ++head)
            for (int64_t row = 0; row < x.call.rows; ++row) {
                Row r(x, item, head, row);
                function(r);
            }
}

void attend(const Case& x, std::vector<Expected>& to, double& largest) {
    each_row(x, [&](Row& r) {
        largest = std::max(largest, r.largest);
        if (x.logsumexp) to[1](r.item, r.head, r.row, 0) = r.logsumexp;
        for (int64_t e = 0; e < x.call.value_size; ++e) {
            double sum = 0;
            for (size_t n = 0; n < r.seen.size(); ++n) sum += exp(r.score[n] - r.logsumexp) * r.kept[n] * r.value(n, e);
            to[0](r.item, r.head, r.row, e) = sum;
        }
    });
}

// What a derivative gets: the output and a logsumexp that may be of more keys.
void add_results(Case& x) {
    each_row(x, [&](Row& r) {
        const double more = x.random.chance(0.1) ? fabs(x.random.normal()) : 0;
        x.logsumexp.set(r.item, r.head, r.row, 0, r.logsumexp + more);
    });
}

void differentiate(const Case& x, std::vector<Expected>& to, double& largest) {
    const PolyattnCall& call = x.call;
    Expected &query = to[0], &key = to[1], &value = to[2];
    if (call.adds) {
        key.begin();
        value.begin();
    }
    for (size_t bias : {5, 6}) to[bias].begin();
    each_row(x, [&](Row& r) {
        largest = std::max(largest, r.largest);
        const double logsumexp = x.logsumexp(r.item, r.head, r.row, 0);
        if (logsumexp == -INFINITY) return;
        double delta = x.logsumexp_gradient ? -x.logsumexp_gradient(r.item, r.head, r.row, 0) : 0, of_cap = 0;
        for (int64_t e = 0; e < call.value_size; ++e) {
            delta += x.output_gradient(r.item, r.head, r.row, e) * x.output(r.item, r.head, r.row, e);
        }
        for (size_t n = 0; n < r.seen.size(); ++n) {
            const double weight = exp(r.score[n] - logsumexp);
            double product = 0;
            for (int64_t e = 0; e < call.value_size; ++e) {
                const double g = x.output_gradient(r.item, r.head, r.row, e);
                product += g * r.value(n, e);
                value(r.item, r.key_head, r.seen[n], e) += weight * r.kept[n] * g;
            }
            double share = weight * ((r.kept[n] == 0 ? 0 : r.kept[n] * product) - delta);
            if (call.softcap != 0) of_cap += share * (r.bounded[n] - r.raw[n] / call.softcap * r.slope(n));
            for (size_t bias = 0; bias < 2; ++bias) {
                if (x.bias_gradient[bias]) to[5 + bias](r.item, r.head, r.row, r.seen[n]) += share;
            }
            share *= r.slope(n) * call.scale;
            for (int64_t d = 0; d < call.head_size; ++d) {
                query(r.item, r.head, r.row, d) += share * x.key(r.item, r.key_head, r.seen[n], d);
                key(r.item, r.key_head, r.seen[n], d) += share * x.query(r.item, r.head, r.row, d);
            }
        }
        to[3](r.item, r.head, r.row, 0) = delta;
        if (x.softcap_gradient) to[4](r.item, r.head, r.row, 0) = of_cap;
    });
}

void Case::add_gradients() {
    if (of_sums) logsumexp.fill([&] { return 6 + random.normal(); });
    else add_results(*this);
    output_gradient = made(call.output_gradient, sums, with_items(of_output()));
    if (random.chance(0.5)) logsumexp_gradient = made(call.logsumexp_gradient, sums, by_row());
    query_gradient = made(call.query_gradient, sums, of_query());
    key_gradient = made(call.key_gradient, sums, of_key());
    value_gradient = made(call.value_gradient, sums, of_value());
    delta = made(call.delta, sums, by_row());
    if (call.softcap != 0) softcap_gradient = made(call.softcap_gradient, sums, by_row());
    for (int n = 0; n < 2; ++n) {
        if (!random.chance(of_sums ? 0.8 : 0.3)) continue;
        PolyattnArray& view = call.bias_gradient[n];
        if (of_sums && random.chance(0.2)) {  // numbers by distance
            bias_gradient[n] = made(view, sums, {call.items, call.heads, 1, call.rows + call.keys - 1});
            view.data = (char*)view.data + (call.rows - 1) * bytes_of(sums), view.row = -1;
            continue;
        }
        std::vector<int64_t> shape = some(of_scores());
        if (shape[2] < call.rows || shape[3] < call.keys) shape[0] = call.items, shape[1] = call.heads;
        bias_gradient[n] = made(view, sums, shape, true);
    }
    call.adds = random.chance(0.3);
}

// ---- the comparison ----

int compute(Case& x, const PolyattnCall& call, void** state) {
    if (x.function == DIFFERENTIATE) return polyattn_differentiate(&call, state);
    if (call.threads % 2 || x.key_steps) return polyattn_attend(&call, state);
    PolyattnCall other = call;
    void* to[] = {call.query.data, call.key.data, call.value.data, call.output.data, call.logsumexp.data};
    other.query.data = other.key.data = other.value.data = other.output.data = other.logsumexp.data = nullptr;
    return polyattn_attend_to(&other, call.threads, &to[0], &to[1], &to[2], &to[3], to[4] ? &to[4] : nullptr,
                              call.threads == 2 ? state : nullptr);
}

bool is_near(double found, double wanted, double tolerance, bool drops, bool is_exact) {
    // A weight that dropout leaves out may hide a NaN or not.
    if (drops && wanted != wanted) return true;
    if (wanted - wanted != 0 || found - found != 0) {  // not finite
        if (is_exact) return found == wanted || (found != found && wanted != wanted);
        return wanted - wanted != 0 && found - found != 0;
    }
    return fabs(found - wanted) <= tolerance;
}

bool compare(Expected& expected, double tolerance, bool drops, const char* name, uint64_t seed) {
    double largest = 1;
    for (double number : expected.numbers) {
        if (fabs(number) > largest && fabs(number) < INFINITY) largest = fabs(number);
    }
    bool same = true;
    // -inf of a row that sees no key.
    const bool is_exact = strcmp(name, "logsumexp") == 0;
    expected.array.each([&](int64_t i, int64_t h, int64_t r, int64_t c) {
        const double found = expected.array(i, h, r, c), wanted = expected(i, h, r, c);
        if (!same || is_near(found, wanted, tolerance * largest, drops, is_exact)) return;
        same = false;
        printf("seed %llu: %s[%lld, %lld, %lld, %lld] is %.9g, not %.9g\n", (unsigned long long)seed, name,
               (long long)i, (long long)h, (long long)r, (long long)c, found, wanted);
    });
    return same;
}

// Whether a random call is right on one thread, and has the same bits on more; only the latter if of sums.
bool is_right(uint64_t seed, bool of_sums = false) {
    static const char* const names[2][7] = {{"output", "logsumexp"},
                                            {"query's gradient", "key's gradient", "value's gradient", "delta",
                                             "softcap's gradient", "first bias's gradient", "second bias's gradient"}};
    Case x(seed, of_sums);
    std::vector<Array> written = x.written();
    std::vector<Expected> expected(written.begin(), written.end());
    double largest = 1;
    auto* formula = x.function == ATTEND ? attend : differentiate;
    if (!of_sums) formula(x, expected, largest);
    std::vector<std::vector<char>> before, bits;
    for (const Array& array : written) before.push_back(array ? array.bytes() : std::vector<char>());
    for (int run = 0; run < (of_sums ? 5 : 2); ++run) {
        for (size_t n = 0; n < written.size(); ++n) {
            if (written[n]) written[n].restore(before[n]);
        }
        PolyattnCall call = x.call;
        call.threads = run ? (int32_t)x.random.between(2, 4) : 1;
        void* state = nullptr;
        int status;
        while ((status = compute(x, call, &state)) == 1) {}
        if (status != 0 || state) return printf("seed %llu: status %d\n", (unsigned long long)seed, status), false;
        for (size_t n = 0; n < written.size(); ++n) {
            if (run == 0) bits.push_back(written[n] ? written[n].bytes() : std::vector<char>());
            if (!written[n] || written[n].bytes() == bits[n]) continue;
            const char* name = names[x.function][n];
            return printf("seed %llu: bits of %s on more threads\n", (unsigned long long)seed, name), false;
        }
    }
    for (size_t n = 0; n < written.size(); ++n) {
        if (!written[n] || of_sums) continue;
        const char* name = names[x.function][n];
        double tolerance = (x.sums == FLOAT32 ? 2e-6 : 1e-14) * (x.function == ATTEND ? 2 : 20) * (1 + largest);
        if (x.function == ATTEND && n == 0) tolerance += x.kind == FLOAT16 ? 5.5e-4 : x.kind == BFLOAT16 ? 4.5e-3 : 0;
        if (!compare(expected[n], tolerance, x.call.seed, name, seed)) return false;
        if (!written[n].keeps_gaps(before[n]))
            return printf("seed %llu: written beside %s\n", (unsigned long long)seed, name), false;
    }
    return true;
}

// Whether a random product is right, and a part of it has its bits.
template <typename T> bool is_right_product(uint64_t seed) {
    Random random{seed};
    const int64_t rows = random.between(0, 40), columns = random.between(0, 200);
    const int64_t inner = random.one_of({random.between(0, 30), random.between(250, 262), random.between(0, 800)});
    const bool x_turned = random.chance(0.3), w_turned = random.chance(0.5), has_bias = random.chance(0.7);
    PolyattnProduct product = {
        rows, inner, columns, inner, 1, columns, 1, 1, sizeof(T) == 8 ? POLYATTN_FLOAT64 : POLYATTN_FLOAT32};
    if (x_turned) product.x_row = 1, product.x_column = rows;
    if (w_turned) product.w_row = 1, product.w_column = inner;
    std::vector<T> x(rows * inner), w(inner * columns), bias(columns), whole(rows * columns), part(rows * columns);
    for (auto* numbers : {&x, &w, &bias}) {
        for (T& number : *numbers) number = (T)random.normal();
    }
    T* const offset = has_bias ? bias.data() : nullptr;
    polyattn_multiply(&product, random.between(1, 3), x.data(), w.data(), offset, whole.data(), nullptr);
    const int64_t row = random.between(0, rows), column = random.between(0, columns);
    product.rows = random.chance(0.5) ? std::min(rows - row, (int64_t)1) : rows - row;
    product.columns = random.between(0, columns - column);
    polyattn_multiply(&product, random.between(1, 3), x.data() + row * product.x_row,
                      w.data() + column * product.w_column, offset ? offset + column : offset, part.data(), nullptr);
    for (int64_t i = 0; i < rows * columns; ++i) {
        const int64_t r = i / columns, c = i % columns;
        double sum = has_bias ? bias[c] : 0, size = 1;
        for (int64_t k = 0; k < inner; ++k) {
            const double more =
                (double)x[x_turned ? k * rows + r : r * inner + k] * w[w_turned ? c * inner + k : k * columns + c];
            sum += more;
            size += fabs(more);
        }
        if (!(fabs(sum - whole[i]) <= size * (sizeof(T) == 8 ? 1e-14 : 4e-6)))
            return printf("seed %llu: product[%lld] is %g, not %g\n", (unsigned long long)seed, (long long)i,
                          (double)whole[i], sum),
                   false;
    }
    for (int64_t i = 0; i < product.rows * product.columns; ++i) {
        const T& other = whole[(row + i / product.columns) * columns + column + i % product.columns];
        if (memcmp(&other, &part[i], sizeof(T)))
            return printf("seed %llu: bits of a part of a product\n", (unsigned long long)seed), false;
    }
    return true;
}

// ---- calls at once, and calls that last ----

// Whether the child of a fork computes, which has no threads yet.
bool is_right_in_child(uint64_t seed) {
#if defined(_WIN32) || defined(__SANITIZE_THREAD__)  // which does not let a child begin threads
    return is_right(seed);
#else
    int status = 1;
    const pid_t child = fork();
    if (child == 0) _exit(!is_right(seed));
    return waitpid(child, &status, 0) == child && status == 0;
#endif
}

// Whether threads that call at once are right: the pool works for one of them, or for none.
bool are_right(uint64_t seed) {
    std::atomic<bool> right{true};
    std::vector<std::thread> callers;
    for (uint64_t caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&right, first = seed + 8 * caller] {
            for (uint64_t n = first; n < first + 8; ++n) right = is_right(n) && right;
        });
    }
    for (std::thread& caller : callers) caller.join();
    return right;
}

// Whether a call of some thousand rows may be ended in the middle, and is right if it is not.
bool ends(uint64_t seed, Function function) {
    const int64_t n = 4000, size = 32;
    std::vector<float> ones((size_t)(n * size), 1), by_row((size_t)n, logf((float)n)), results[4];
    PolyattnCall call = {};
    call.items = call.heads = call.key_heads = 1;
    call.rows = call.keys = n;
    call.head_size = call.value_size = size;
    call.threads = 1 + (int)(seed % 3);
    call.keep = 1;
    for (PolyattnArray* array : {&call.query, &call.key, &call.value, &call.output_gradient}) {
        *array = {ones.data(), nullptr, 0, 0, size, 1};
    }
    PolyattnArray* const large[] = {&call.output, &call.query_gradient, &call.key_gradient, &call.value_gradient};
    for (int i = 0; i < 4; ++i) {
        results[i].resize((size_t)(n * size), 1);
        *large[i] = {results[i].data(), nullptr, 0, 0, size, 1};
    }
    std::vector<float> delta((size_t)n);
    call.logsumexp = {by_row.data(), nullptr, 0, 0, 1, 1};
    call.delta = {delta.data(), nullptr, 0, 0, 1, 1};
    auto* run = function == ATTEND ? polyattn_attend : polyattn_differentiate;
    for (int64_t steps = (int64_t)(seed / 8 % 4);; --steps) {
        static void* state;
        const int status = run(&call, &state);
        if (status == 0) break;
        if (status < 0) return false;
        if (steps > 0) continue;
        polyattn_cancel(&state);
        return !state;
    }
    for (float x : results[0]) {
        if (fabsf(x - 1) > 1e-5f) return printf("seed %llu: a long call\n", (unsigned long long)seed), false;
    }
    return true;
}

}  // namespace

int main(int count_of_words, char** words) {
    const uint64_t seed = count_of_words > 1 ? strtoull(words[1], nullptr, 10) : 0;
    const uint64_t count = count_of_words > 2 ? strtoull(words[2], nullptr, 10) : 1000;
    std::vector<std::string> sets;
    const std::string known = std::string(polyattn_instruction_sets()) + " ";
    for (size_t at = 0, end; (end = known.find(' ', at)) != std::string::npos; at = end + 1)
        sets.push_back(known.substr(at, end - at));
    const bool only_sums = count_of_words > 3 && strcmp(words[3], "sums") == 0;
    const bool only_cuts = count_of_words > 3 && strcmp(words[3], "cuts") == 0;
    if (count_of_words > 3 && !only_sums && !only_cuts) sets = {words[3]};
    for (uint64_t n = seed; n < seed + count; ++n) {
        const std::string& set = sets[(size_t)(n % sets.size())];
        if (!polyattn_use(set.c_str())) return printf("%s is not known here\n", set.c_str()), 2;
        const bool right = only_cuts || n % 97 % 12 == 9   ? is_invariant(n)
                           : only_sums || n % 97 % 12 == 6 ? is_right(n, true)
                           : n % 97 % 24 == 13             ? is_right_product<float>(n)
                           : n % 97 % 24 == 14             ? is_right_product<double>(n)
                           : n % 97 == 96                  ? ends(n, (Function)(n / 97 % 2))
                           : n % 97 == 48                  ? are_right(n)
                           : n % 97 == 72                  ? is_right_in_child(n)
                                                           : is_right(n);
        if (!right) return printf("%s: seed %llu is wrong\n", set.c_str(), (unsigned long long)n), 1;
    }
    printf("%llu calls by %sare right\n", (unsigned long long)count, known.c_str());
    return 0;
}
