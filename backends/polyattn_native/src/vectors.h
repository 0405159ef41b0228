// Vectors of one instruction set. A unit defines POLYATTN_UNIT, the name of its namespace, and
// POLYATTN_BYTES, the size of a vector.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace POLYATTN_UNIT {

template <typename T> struct IntOf;
template <> struct IntOf<float> {
    typedef int32_t type;
};
template <> struct IntOf<double> {
    typedef int64_t type;
};

// Vectors of numbers T, one lane for each row, and of integers as wide.
template <typename T> struct Lanes {
    typedef typename IntOf<T>::type Int;
    static constexpr int width = POLYATTN_BYTES / sizeof(T);
    typedef T Vector __attribute__((vector_size(POLYATTN_BYTES)));
    typedef Int Ints __attribute__((vector_size(POLYATTN_BYTES)));
    typedef T Loose __attribute__((vector_size(POLYATTN_BYTES), aligned(sizeof(T)), may_alias));
};
template <typename T> using Vector = typename Lanes<T>::Vector;
template <typename T> using Ints = typename Lanes<T>::Ints;

template <typename T> INLINE Vector<T> load(const T* p) { return *(const typename Lanes<T>::Loose*)p; }
template <typename T> INLINE void store(T* p, Vector<T> v) { *(typename Lanes<T>::Loose*)p = v; }
template <typename T> INLINE Vector<T> broadcast(T x) { return x - Vector<T>{}; }

template <typename T> INLINE Vector<T> select(Ints<T> where, Vector<T> yes, Vector<T> no) { return where ? yes : no; }
template <typename T> INLINE Vector<T> max(Vector<T> a, Vector<T> b) { return a > b ? a : b; }

// Ask the memory for numbers; with a locality of 2 in place of 3, into the second cache.
template <typename T, int locality = 3> INLINE void prefetch(const T* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(numbers + i, 0, locality);
}

template <typename T> constexpr T infinity() { return (T)__builtin_inf(); }

// ---- transposes ----

template <int... Lane> struct Sequence {};
template <int N, int... Lane> struct Count : Count<N - 1, N - 1, Lane...> {};
template <int... Lane> struct Count<0, Lane...> {
    typedef Sequence<Lane...> type;
};

template <int Step, bool High, typename V, int... Lane>
INLINE V exchange(V a, V b, Sequence<Lane...>) {
    constexpr int width = sizeof...(Lane);
    return __builtin_shufflevector(
        a, b, (High ? ((Lane & Step) ? width + Lane : Lane + Step) : ((Lane & Step) ? width + Lane - Step : Lane))...);
}

template <int Step, int Width, typename V> INLINE void transpose_from(V (&rows)[Width]) {
    if constexpr (Step < Width) {
        UNROLL for (int i = 0; i < Width; ++i) {
            if (i & Step) continue;
            V a = rows[i], b = rows[i + Step];
            rows[i] = exchange<Step, false>(a, b, typename Count<Width>::type{});
            rows[i + Step] = exchange<Step, true>(a, b, typename Count<Width>::type{});
        }
        transpose_from<Step * 2>(rows);
    }
}

// Exchange rows and columns of a square of numbers.
template <int Width, typename V> INLINE void transpose(V (&rows)[Width]) { transpose_from<1>(rows); }

// ---- functions ----

// 2^f - 1 for f from -1/2 to 1/2. A polynomial without a constant is exact at 0. That of float has the
// least largest error, 9.2e-8 of 2^f before rounding; that of double is the Taylor series, 2.5e-16.
INLINE Vector<float> exp2_less_1(Vector<float> f) {
    Vector<float> q = 0.0013264590756428482f * f + 0.009671619003726643f;
    q = q * f + 0.055507350315633225f;
    q = q * f + 0.24022240460534383f;
    q = q * f + 0.6931469763829023f;
    return q * f;
}
INLINE Vector<double> exp2_less_1(Vector<double> f) {
    Vector<double> q = 2.5678435993488206e-11 * f + 4.4455382718708116e-10;
    q = q * f + 7.054911620801123e-09;
    q = q * f + 1.01780860092397e-07;
    q = q * f + 1.321548679014431e-06;
    q = q * f + 1.5252733804059841e-05;
    q = q * f + 0.0001540353039338161;
    q = q * f + 0.0013333558146428443;
    q = q * f + 0.009618129107628477;
    q = q * f + 0.05550410866482158;
    q = q * f + 0.24022650695910072;
    q = q * f + 0.6931471805599453;
    return q * f;
}

// The parts of exp(x): 2^n as a number, and 2^f - 1.
template <typename T> INLINE void split_exp(Vector<T> x, Vector<T>& power, Vector<T>& rest);
template <> INLINE void split_exp<float>(Vector<float> x, Vector<float>& power, Vector<float>& rest) {
    // The sum with 1.5 · 2^23 rounds to a whole number n, and its low bits are n: with the bias added,
    // those of an exponent.
    const float log2_e = 1.4426950408889634f, magic = 12582912.0f + 127;
    Vector<float> t = x * log2_e + magic;
    Ints<float> bits = (Ints<float>)t << 23;
    power = (Vector<float>)bits;
    rest = exp2_less_1(x * log2_e - (t - magic));
}
template <> INLINE void split_exp<double>(Vector<double> x, Vector<double>& power, Vector<double>& rest) {
    const double log2_e = 1.4426950408889634, magic = 6755399441055744.0 + 1023;  // 1.5 · 2^52
    Vector<double> t = x * log2_e + magic;
    Ints<double> bits = (Ints<double>)t << 52;
    power = (Vector<double>)bits;
    // The error of log2(e) would be one of the result for large x.
    const double log2_e_low = 2.0355273740931033e-17;
    rest = exp2_less_1(x * log2_e - (t - magic) + x * log2_e_low);
}
template <typename T> constexpr T min_exponent();
template <> constexpr float min_exponent<float>() { return -87.0f; }
template <> constexpr double min_exponent<double>() { return -708.0; }

// exp(x) for x that is not above the largest exponent; 0 where it would be subnormal; NaN stays.
template <typename T> INLINE Vector<T> exp(Vector<T> x) {
    Vector<T> power, rest;
    split_exp<T>(x, power, rest);
    return select<T>(x < min_exponent<T>(), Vector<T>{}, power + power * rest);
}

INLINE float exponential(float x) { return __builtin_expf(x); }
INLINE double exponential(double x) { return __builtin_exp(x); }

// tanh(x), exact where x is small too.
template <typename T> INLINE Vector<T> tanh(Vector<T> x) {
    const T limit = sizeof(T) == 4 ? 10 : 20;
    Vector<T> far = select<T>(x < 0, -x, x);
    Vector<T> twice = 2 * select<T>(far > limit, broadcast<T>(limit), far), power, rest;
    split_exp<T>(twice, power, rest);
    Vector<T> e = power * rest + (power - 1);  // exp(2x) - 1
    Vector<T> t = e / (e + 2);
    return select<T>(x < 0, -t, t);
}

}  // namespace POLYATTN_UNIT
