// Rows of arrays as panels: converted to the numbers that are computed with, and transposed.
#pragma once
#include "interface.h"
#include "vectors.h"

namespace POLYATTN_UNIT {

// ---- 16-bit numbers, and integers ----

struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

template <typename To, typename From> INLINE To bit_cast(From from) { return __builtin_bit_cast(To, from); }

INLINE float to_float(BFloat16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }
INLINE float to_float(Float16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    // Not by a subnormal float, which is 0 in XLA's threads.
    if (rest < 0x400) return bit_cast<float>(sign | bit_cast<uint32_t>((float)rest * 0x1p-24f));
    return bit_cast<float>(sign | ((rest << 13) + (112 << 23)));
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    return x == x ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}
INLINE uint16_t to_float16(float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    // 65536 and above, infinity, NaN
    if (rest >= 0x47800000) return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (rest < 0x38800000) {  // subnormal: the sum rounds to units of 2^-24
        return (uint16_t)(sign | (bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000));
    }
    uint32_t odd = rest >> 13 & 1;
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + odd) >> 13));
}

inline void widen(int dtype, const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
    if (dtype == POLYATTN_BFLOAT16) {
#if defined(__AVX2__)
        for (; i + 8 <= count; i += 8) {
            const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + i)));
            _mm256_storeu_ps(to + i, (__m256)_mm256_slli_epi32(wide, 16));
        }
#endif
        for (; i < count; ++i) to[i] = to_float(BFloat16{from[i]});
        return;
    }
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
    }
#endif
    for (; i < count; ++i) to[i] = to_float(Float16{from[i]});
}

inline void narrow(int dtype, const float* from, int64_t count, uint16_t* to) {
    int64_t i = 0;
    if (dtype == POLYATTN_BFLOAT16) {
#if defined(__AVX2__)
        for (; i + 8 <= count; i += 8) {
            const __m256 x = _mm256_loadu_ps(from + i);
            const __m256i bits = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            const __m256i nan = _mm256_set1_epi32(0x7fc0), is_nan = (__m256i)_mm256_cmp_ps(x, x, _CMP_UNORD_Q);
            const __m256i half = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, is_nan);
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0xd8);
            _mm_storeu_si128((__m128i*)(to + i), _mm256_castsi256_si128(packed));
        }
#endif
        for (; i < count; ++i) to[i] = to_bfloat16(from[i]);
        return;
    }
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    }
#endif
    for (; i < count; ++i) to[i] = to_float16(from[i]);
}

INLINE bool converts(const PolyattnCall& call) { return call.dtype >= POLYATTN_FLOAT16; }

// The numbers of a row or key of query, key or value: in place, or converted in a buffer.
template <typename T>
const T* numbers_at(const PolyattnCall& call, const T* from, int64_t offset, int64_t size, T* buffer) {
    if constexpr (sizeof(T) == 4) {
        if (converts(call)) {
            widen(call.dtype, (const uint16_t*)from + offset, size, buffer);
            return buffer;
        }
    }
    return from + offset;
}

// The numbers of a vector in memory: as they are, or widened from integers.
template <typename T> INLINE Vector<T> load_numbers(const T* from) { return load(from); }
template <typename T> INLINE Vector<T> load_numbers(const int8_t* from) {
    constexpr int width = Lanes<T>::width;
#if defined(__AVX2__)
    // gcc's __builtin_convertvector takes less than 16 bytes one by one.
    if constexpr (sizeof(T) == 4) {
        __m128i codes = {};
        __builtin_memcpy(&codes, from, width);
#if defined(__AVX512F__)
        return (Vector<T>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
#else
        return (Vector<T>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
#endif
    }
#endif
    Vector<T> numbers;
    UNROLL for (int i = 0; i < width; ++i) { numbers[i] = from[i]; }
    return numbers;
}

// Integers times their steps, `column` apart: one for each, or the same for all.
template <typename T> void scale_codes(const int8_t* codes, const T* steps, int64_t column, int64_t size, T* to) {
    constexpr int width = Lanes<T>::width;
    const Vector<T> same = broadcast(*steps);
    int64_t i = 0;
    for (; i + width <= size; i += width) {
        store<T>(to + i, load_numbers<T>(codes + i) * (column ? load(steps + i) : same));
    }
    for (; i < size; ++i) to[i] = codes[i] * steps[i * column];
}

// ---- panels ----

// Gather rows as panel[element][lane], times a factor.
template <typename T>
void transpose_rows(const T* const* rows, int lanes, int64_t size, T factor, T* panel) {
    constexpr int width = Lanes<T>::width;
    for (int first = 0; first < lanes; first += width) {
        T* target = panel + first;
        int64_t e = 0;
        for (; e + width <= size; e += width) {
            Vector<T> square[width];
            UNROLL for (int i = 0; i < width; ++i) { square[i] = load(rows[first + i] + e) * factor; }
            transpose(square);
            UNROLL for (int i = 0; i < width; ++i) { store<T>(target + (e + i) * lanes, square[i]); }
        }
        for (; e < size; ++e) {
            for (int i = 0; i < width; ++i) target[e * lanes + i] = rows[first + i][e] * factor;
        }
    }
}

// Write panel[element][lane] times a factor by lane, or divided by it, to rows; a null row is left out.
template <bool divides, typename T>
void write_rows(const T* panel, const T* factor, int lanes, int64_t size, T* const* rows) {
    constexpr int width = Lanes<T>::width;
    for (int first = 0; first < lanes; first += width) {
        const Vector<T> factors = load(factor + first);
        const T* source = panel + first;
        int64_t e = 0;
        for (; e + width <= size; e += width) {
            Vector<T> square[width];
            UNROLL for (int i = 0; i < width; ++i)
                square[i] =
                    divides ? load(source + (e + i) * lanes) / factors : load(source + (e + i) * lanes) * factors;
            transpose(square);
            UNROLL for (int i = 0; i < width; ++i) {
                if (rows[first + i]) store<T>(rows[first + i] + e, square[i]);
            }
        }
        for (; e < size; ++e) {
            for (int i = 0; i < width; ++i) {
                const T number = source[e * lanes + i];
                if (rows[first + i]) rows[first + i][e] = divides ? number / factors[i] : number * factors[i];
            }
        }
    }
}

// Return whether no number is NaN or infinite, of rows that are `stride` apart.
template <typename T> bool is_finite(const T* numbers, int64_t rows, int64_t size, int64_t stride) {
    constexpr int width = Lanes<T>::width;
    Vector<T> sums = {};
    T sum = 0;
    if (stride == size) size *= rows, rows = 1;
    for (; rows > 0; --rows, numbers += stride) {
        int64_t i = 0;
        for (; i + width <= size; i += width) sums += load(numbers + i) * 0;
        for (; i < size; ++i) sum += numbers[i] * 0;
    }
    for (int lane = 0; lane < width; ++lane) sum += sums[lane];
    return sum == 0;
}

}  // namespace POLYATTN_UNIT
