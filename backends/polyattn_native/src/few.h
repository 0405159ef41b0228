// Products where few rows read a key: the lanes are the elements of a key or value, in place of rows.
#pragma once
#include "products.h"
#include "scores.h"

namespace POLYATTN_UNIT {

// The rows of such a call, as a power of two; 0 for others. It depends on sizes only, as bits do.
template <typename T> int few_rows(const PolyattnCall& call) {
    constexpr int width = Lanes<T>::width;
    if (call.is_part || call.head_size % width || call.value_size % width) return 0;
    int few = 1;
    while (few <= width && few < call.rows * (call.heads / call.key_heads)) few *= 2;
    return 2 * few <= width ? few : 0;
}

// Whether integers are multiplied where they lie: their steps then scale queries and weights. Not in double, to keep
// the library small.
template <typename T> bool widens(const PolyattnCall& call) {
    return sizeof(T) == 4 && call.key_steps.data && !call.value_steps.column && !call.same_bits && few_rows<T>(call);
}

// The numbers of one key after another, also of pages.
template <typename T> struct Cursor {
    const Matrix<T>& a;
    int64_t part = 0, place = a.first;
    const T* now = a.at(0);

    explicit Cursor(const Matrix<T>& of) : a(of) {}
    const T* next() {
        if (place++ == a.part) now = a.data + a.table[++part] * a.part_stride, place = 1;
        const T* found = now;
        now += a.stride;
        return found;
    }
};

// The numbers that are read after those of a block. The processor fetches ahead only within a page, so those in pages
// are asked of the memory a block before, into the second cache: the first has room for few requests.
// Not for double, to keep the library small.
template <typename T> struct Coming {
    const T* at[BLOCK];
    int64_t count = 0, size;

    Coming() : size(0) {}
    __attribute__((noinline)) Coming(Matrix<T> a, int64_t keys, int64_t of_key) : size(of_key) {
        if (sizeof(T) == 8 || !a.table || keys <= 0) return;
        for (Cursor<T> cursor(a); count < keys;) at[count++] = cursor.next();
    }
    INLINE void ask(int64_t key) const {
        if (sizeof(T) == 4 && key < count) prefetch<T, 2>(at[key], size);
    }
};

// The sums over the lanes of each vector, as the lanes of one.
template <int Step, int Width, typename V> INLINE V sum_lanes(V (&vectors)[Width]) {
    if constexpr (Step < Width) {
        UNROLL for (int i = 0; i < Width; i += 2 * Step) {
            const V a = vectors[i], b = vectors[i + Step];
            vectors[i] = exchange<Step, false>(a, b, typename Count<Width>::type{}) +
                         exchange<Step, true>(a, b, typename Count<Width>::type{});
        }
        return sum_lanes<2 * Step>(vectors);
    }
    return vectors[0];
}

// The scores of some keys as [key][stride], of rows as [row][element]. With a stride of all lanes, they repeat the
// rows; else -inf fills the last vector. Keys are read one after another, as the processor fetches them ahead.
template <typename T, int Rows, typename N>
void multiply_few(const T* rows, Matrix<N> keys, int64_t count, int64_t size, int stride, T* scores,
                  const Coming<T>& coming) {
    constexpr int width = Lanes<T>::width, tile = width / Rows;
    Cursor<N> cursor(keys);
    const N* from = nullptr;
    for (int64_t key = 0; key < count; key += tile) {
        for (int m = 0; m < tile; ++m) coming.ask(key + m);
        Vector<T> sums[width] = {};
        UNROLL for (int m = 0; m < tile; ++m) {
            if (key + m < count) from = cursor.next();
            for (int64_t e = 0; e < size; e += width) {
                const Vector<T> numbers = load_numbers<T>(from + e);
                UNROLL for (int r = 0; r < Rows; ++r) { sums[m * Rows + r] += numbers * load(rows + r * size + e); }
            }
        }
        const Vector<T> found = sum_lanes<1>(sums);
        if (stride == Rows) {
            store<T>(scores + key * Rows, found);
            for (int64_t i = (count - key) * Rows; i < width; ++i) scores[key * Rows + i] = -infinity<T>();
            continue;
        }
        for (int m = 0; m < min(tile, count - key); ++m) {
            for (int lane = 0; lane < width; ++lane) scores[(key + m) * width + lane] = found[m * Rows + lane % Rows];
        }
    }
}

// The same in the order of a panel, so with its bits: each sum goes over the elements, one after another. The lanes
// are keys, of which `panel` has room for two vectors.
template <typename T>
void multiply_in_order(const T* rows, int few, Matrix<T> keys, int64_t count, int64_t size, int stride, T* panel,
                       T* scores, const Coming<T>& coming) {
    constexpr int width = Lanes<T>::width, lanes = 2 * width;
    Cursor<T> cursor(keys);
    const T* from[lanes];
    T found[width / 2 * lanes];
    for (int64_t key = 0; key < count; key += lanes) {
        const int tile = (int)min(lanes, count - key);
        for (int lane = 0; lane < lanes; ++lane) {
            from[lane] = lane < tile ? cursor.next() : from[lane - 1];
            if (!keys.table) prefetch(from[lane] + lanes * keys.stride, size);
            coming.ask(key + lane);
        }
        transpose_rows<T>(from, lanes, size, 1, panel);
        multiply<T, 2, INNER>(few, {rows, size}, panel, size, found);
        for (int lane = 0; lane < tile; ++lane) {
            T* to = scores + (key + lane) * stride;
            for (int i = 0; i < stride; ++i) to[i] = found[(i & (few - 1)) * lanes + lane];
        }
    }
    for (int64_t i = count * stride; i % width; ++i) scores[i] = -infinity<T>();
}

// So many vectors of the values of a block times factors as [key][stride], into out as [row][element]. The factors are
// the weights, of integers times their steps.
template <typename T, int Rows, int Vectors, typename N>
void weigh_part(const T* weights, const T* factors, int stride, Matrix<N> values, int64_t count, int64_t first,
                int64_t size, T* out, Accumulate<T> accumulate, bool hides_nonfinite, T* totals,
                const Coming<T>& coming) {
    typedef typename Lanes<T>::Int Int;
    constexpr int width = Lanes<T>::width;
    const Int hidden = (Int)1 << (sizeof(T) * 8 - 1);  // -0
    Vector<T> sums[Rows][Vectors] = {};
    Vector<T> total = load(totals);  // in the lanes of its rows
    UNROLL for (int r = 0; r < Rows; ++r) {
        UNROLL for (int v = 0; v < Vectors; ++v) {
            const T* from = out + r * size + first + v * width;
            if (accumulate.factor) sums[r][v] = load(from) * accumulate.factor[r];
            else if (accumulate.add) sums[r][v] = load(from);
        }
    }
    Cursor<N> cursor(values);
    for (int64_t key = 0; key < count; ++key) {
        Vector<T> numbers[Vectors];
        const N* from = cursor.next() + first;
        if (Vectors > 1 && first == 0) {
            coming.ask(key);
            prefetch(from + Vectors * width, size - Vectors * width);  // for the next parts, while its row is open
        }
        UNROLL for (int v = 0; v < Vectors; ++v) { numbers[v] = load_numbers<T>(from + v * width); }
        if (Rows == 1 || first == 0) total += load(weights + key * stride);
        UNROLL for (int r = 0; r < Rows; ++r) {
            const int64_t i = key * stride + r;
            if (hides_nonfinite && bit_cast<Int>(weights[i]) == hidden) continue;
            UNROLL for (int v = 0; v < Vectors; ++v) { sums[r][v] += factors[i] * numbers[v]; }
        }
    }
    if (first == 0) store<T>(totals, total);
    UNROLL for (int r = 0; r < Rows; ++r) {
        UNROLL for (int v = 0; v < Vectors; ++v) { store<T>(out + r * size + first + v * width, sums[r][v]); }
    }
}

// The vectors of a value that are read at once. Values of 512 bytes, read at once, come from the memory at its rate; in
// parts, or with requests for the next keys, at half of it. Of more rows the registers have room for parts only; two
// rows, which are rare, keep the library small. Copies of 16-bit values are in the cache.
template <typename T, int Rows> constexpr int vectors_at_once() {
    constexpr bool is_double = sizeof(T) == 8, has_few_registers = tile_rows<2>() == 6;
    constexpr int sums = has_few_registers ? (Rows == 1 && !is_double && POLYATTN_BYTES == 32 ? 16 : 8)
                         : is_double       ? 16
                         : Rows == 2       ? 8
                                           : 32;
    constexpr int most = is_double ? 4 : 512 / POLYATTN_BYTES;
    return sums / Rows < most ? sums / Rows : most;
}

template <typename T, int Rows, typename N>
void weigh_few(const T* weights, const T* factors, int stride, Matrix<N> values, int64_t count, int64_t size, T* out,
               Accumulate<T> accumulate, bool hides_nonfinite, T* totals, const Coming<T>& coming, bool in_cache) {
    constexpr int width = Lanes<T>::width, most = vectors_at_once<T, Rows>(), some = most > 4 ? 4 : most;
    int64_t e = 0;
    const auto weigh_parts = [&]<int Vectors>(Sequence<Vectors>) __attribute__((always_inline)) {
        for (; e + Vectors * width <= size; e += Vectors * width) {
            weigh_part<T, Rows, Vectors>(weights, factors, stride, values, count, e, size, out, accumulate,
                                         hides_nonfinite, totals, coming);
        }
    };
    if constexpr (most > some && sizeof(N) > 1) {
        if (!in_cache) weigh_parts(Sequence<most>{});
    }
    weigh_parts(Sequence<some>{});
    weigh_parts(Sequence<1>{});
}

// Weights as [key][Stride], times the step of each key.
template <int Stride, typename T> void scale_weights(const T* weights, Matrix<T> steps, int64_t count, T* to) {
    typedef T Part __attribute__((vector_size(Stride * sizeof(T)), aligned(alignof(T)), may_alias));
    Cursor<T> cursor(steps);
    for (int64_t i = 0; i < count * Stride; i += Stride)
        *(Part*)(to + i) = *(const Part*)(weights + i) * *cursor.next();
}

// In the lanes of each row, the largest of them.
template <typename T> INLINE Vector<T> largest_of_rows(Vector<T> x, int rows) {
    for (int lane = rows; lane < Lanes<T>::width; ++lane) {
        if (x[lane] > x[lane % rows]) x[lane % rows] = x[lane];
    }
    for (int lane = rows; lane < Lanes<T>::width; ++lane) x[lane] = x[lane % rows];
    return x;
}

// Call a function with the number of rows as a constant.
template <typename T, int Rows = 1, typename F> INLINE void with_rows(int rows, F function) {
    if constexpr (2 * Rows <= Lanes<T>::width) {
        if (rows == Rows) function(Sequence<Rows>{});
        else with_rows<T, 2 * Rows>(rows, function);
    }
}

}  // namespace POLYATTN_UNIT
