// Vectors of one instruction set. A unit defines POLYATTN_UNIT, the name of its namespace, and
// POLYATTN_BYTES, the size of a vector.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
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
template <typename T> INLINE Ints<T> load_ints(const typename Lanes<T>::Int* p) {
    return (Ints<T>)load<T>((const T*)p);
}
template <typename T> INLINE void store_ints(typename Lanes<T>::Int* p, Ints<T> v) { store<T>((T*)p, (Vector<T>)v); }
template <typename T> INLINE Vector<T> broadcast(T x) { return x - Vector<T>{}; }

template <typename T> INLINE Vector<T> select(Ints<T> where, Vector<T> yes, Vector<T> no) { return where ? yes : no; }
template <typename T> INLINE Vector<T> max(Vector<T> a, Vector<T> b) { return a > b ? a : b; }

// Ask the memory for the lines that hold numbers; with a locality of 2 in place of 3, into the second cache.
template <typename T, int locality = 3> INLINE void prefetch(const T* numbers, int64_t count) {
    const uintptr_t stop = (uintptr_t)(numbers + count);
    for (uintptr_t at = (uintptr_t)numbers & ~63; at < stop; at += 64) __builtin_prefetch((void*)at, 0, locality);
}

// x · y + z, rounded once where the processor can: then always, whatever the compiler makes of the code around it.
template <typename T> INLINE Vector<T> fused(Vector<T> x, T y, Vector<T> z) {
    [[maybe_unused]] const Vector<T> factor = broadcast<T>(y);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm512_fmadd_ps((__m512)x, (__m512)factor, (__m512)z);
    else return (Vector<T>)_mm512_fmadd_pd((__m512d)x, (__m512d)factor, (__m512d)z);
#elif defined(__FMA__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_fmadd_ps((__m256)x, (__m256)factor, (__m256)z);
    else return (Vector<T>)_mm256_fmadd_pd((__m256d)x, (__m256d)factor, (__m256d)z);
#elif defined(__aarch64__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)factor);
    else return (Vector<T>)vfmaq_f64((float64x2_t)z, (float64x2_t)x, (float64x2_t)factor);
#else
    return x * y + z;
#endif
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

// ---- weights ----

// exp(s) = 2^f · 2^n, n whole and f a function of s. A weight is 2^f · 2^(n - m), m the n of the largest score, plus 1:
// if m rises, weights and their sums are scaled by a power of two, which is exact. The parts of numbers:
template <typename T> struct Parts;
template <> struct Parts<float> {
    static constexpr int mantissa = 23, bias = 127;
    static constexpr float log2_e = 1.4426950408889634f, log2_e_low = 0, ln2 = 0.693359375f, ln2_low = -2.1219444e-4f;
};
template <> struct Parts<double> {
    static constexpr int mantissa = 52, bias = 1023;
    static constexpr double log2_e = 1.4426950408889634, log2_e_low = 2.0355273740931033e-17;
    static constexpr double ln2 = 0.69314718036912382, ln2_low = 1.9082149292705877e-10;
};

template <typename T> struct Reference : Parts<T> {
    using P = Parts<T>;
    static constexpr T magic = (T)1.5 * ((int64_t)1 << P::mantissa), far = (T)((int64_t)1 << (P::mantissa - 3));

    Vector<T> top, least;
    Ints<T> base;  // of the exponent's bits
    bool is_far;   // whether a row has scores of which the magic number has no n

    Reference() = default;
    // A row that sees no key yet has weights of 0, not NaN.
    explicit Reference(Vector<T> largest) : top(select<T>(largest == -infinity<T>(), Vector<T>{}, largest)) {
        const Vector<T> t = in_bits(top);
        least = t - (P::bias - 3);
        base = (Ints<T>)t - (P::bias - 1);
        const Ints<T> near = (top < far - 2 * P::bias) & (top > 2 * P::bias - far);
        typename Lanes<T>::Int all = -1;
        UNROLL for (int lane = 0; lane < Lanes<T>::width; ++lane)
            all &= near[lane];
        is_far = !all;
    }

    // n + magic
    static INLINE Vector<T> in_bits(Vector<T> s) { return fused<T>(s, P::log2_e, broadcast<T>(magic)); }
    static INLINE Vector<T> rest_of(Vector<T> s, Vector<T> n) {
#if defined(__FMA__) || defined(__aarch64__)
        const Vector<T> rest = fused<T>(s, P::log2_e, -n);
        return sizeof(T) == 4 ? rest : fused<T>(s, P::log2_e_low, rest);
#else
        return (s - n * P::ln2 - n * P::ln2_low) * P::log2_e;
#endif
    }

    // 0 where it might be subnormal; NaN stays.
    INLINE Vector<T> weigh(Vector<T> s) const {
        const Vector<T> t = in_bits(s), power = (Vector<T>)(((Ints<T>)t - base) << P::mantissa);
        return select<T>(t < least, Vector<T>{}, power + power * exp2_less_1(rest_of(s, t - magic)));
    }
    // By what sums relative to an earlier largest score are multiplied.
    INLINE Vector<T> scale_from(Vector<T> before) const {
        if (is_far) return weigh_far(before, true);
        const Vector<T> t = in_bits(before);
        return select<T>(t < least, Vector<T>{}, (Vector<T>)(((Ints<T>)t - base + 1) << P::mantissa));
    }

    // n / 4, which is finite, and f of a far score.
    static double quarter_of(T s, T n, T& rest) {
        if (s < far && s > -far) return n / 4;
        const double quarter = s * ((double)P::log2_e / 4), whole = 6755399441055744.0;
        const double found = quarter < 0x1p48 && quarter > -0x1p48 ? (4 * quarter + whole - whole) / 4 : quarter;
        rest = (T)(4 * (quarter - found));
        return found;
    }
    __attribute__((noinline)) Vector<T> weigh_far(Vector<T> s, bool is_scale = false) const {
        const Vector<T> n = in_bits(s) - magic, of_top = in_bits(top) - magic;
        Vector<T> rest = rest_of(s, n), power;
        for (int lane = 0; lane < Lanes<T>::width; ++lane) {
            T ignored, mine = rest[lane];
            const double below = quarter_of(s[lane], n[lane], mine) - quarter_of(top[lane], of_top[lane], ignored);
            const auto exponent = (typename Lanes<T>::Int)(below >= -256 ? 4 * below + P::bias - !is_scale : 0);
            power[lane] = exponent < 2 ? 0 : __builtin_bit_cast(T, exponent << P::mantissa);
            if (below != below) power[lane] = (T)below;
            rest[lane] = power[lane] == 0 ? 0 : mine;
        }
        return is_scale ? power : power + power * exp2_less_1(rest);
    }
};

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
