// What happens to a block of scores between the product and the softmax: steps 2, 4 and 5 of the
// formula, and dropout. Scores have the axes (key, lane).
#pragma once
#include "panel.h"
#include "rows.h"

namespace POLYATTN_UNIT {

// ---- bytes by key and lane, of mask arrays and dropout ----

// The most keys of a block.
constexpr int BLOCK = 256;

INLINE void transpose_bytes(uint64_t (&rows)[8]) {
    const uint64_t masks[3] = {0x00ff00ff00ff00ff, 0x0000ffff0000ffff, 0x00000000ffffffff};
    UNROLL for (int stage = 0; stage < 3; ++stage) {
        const int step = 1 << stage, shift = 8 << stage;
        UNROLL for (int i = 0; i < 8; ++i) {
            if (i & step) continue;
            uint64_t moved = (rows[i] >> shift ^ rows[i + step]) & masks[stage];
            rows[i + step] ^= moved;
            rows[i] ^= moved << shift;
        }
    }
}

struct Flags {
    bool any, all;
};

// Read a mask array for some keys, as bytes[key][lane], and return what is in it.
template <typename T>
Flags read_mask(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys, uint8_t* bytes) {
    const PolyattnArray& mask = call.mask;
    const int lanes = panel.lanes();
    const int64_t count = keys.stop - keys.first;
    const uint8_t* rows[2 * Lanes<T>::width];
    for (int lane = 0; lane < lanes; ++lane) {
        rows[lane] = at<uint8_t>(mask, item, panel.head[lane], panel.row[lane]) + keys.first * mask.column;
    }
    uint64_t any = 0, all = ~(uint64_t)0;
    int64_t key = 0;
    if (2 * Lanes<T>::width >= 8 && mask.column == 1 && lanes % 8 == 0) {
        for (; key + 8 <= count; key += 8) {
            for (int lane = 0; lane < lanes; lane += 8) {
                uint64_t square[8];
                UNROLL for (int i = 0; i < 8; ++i) {
                    __builtin_memcpy(&square[i], rows[lane + i] + key, 8);
                    any |= square[i];
                    all &= square[i];
                }
                transpose_bytes(square);
                UNROLL for (int i = 0; i < 8; ++i) {
                    __builtin_memcpy(bytes + (key + i) * lanes + lane, &square[i], 8);
                }
            }
        }
        all = all == 0x0101010101010101;
    }
    for (; key < count; ++key) {
        for (int lane = 0; lane < lanes; ++lane) {
            uint8_t seen = rows[lane][key * mask.column] != 0;
            bytes[key * lanes + lane] = seen;
            any |= seen;
            all &= seen;
        }
    }
    return {any != 0, (all & 1) != 0};
}

template <typename T> INLINE Ints<T> is_set(const uint8_t* bytes) {
    typedef uint8_t Bytes __attribute__((vector_size(Lanes<T>::width)));
    Bytes loaded;
    __builtin_memcpy(&loaded, bytes, sizeof loaded);
    return __builtin_convertvector(loaded, Ints<T>) != 0;
}

// Replace the scores whose byte is 0.
template <typename T> void keep_set(T* scores, int64_t size, const uint8_t* bytes, T other) {
    for (int64_t i = 0; i < size; i += Lanes<T>::width) {
        store<T>(scores + i, select<T>(is_set<T>(bytes + i), load(scores + i), all<T>(other)));
    }
}

// Multiply the weights whose byte is 0 by 0, which leaves -0 as it is.
template <typename T> void drop_unset(T* weights, int64_t size, const uint8_t* bytes) {
    for (int64_t i = 0; i < size; i += Lanes<T>::width) {
        Vector<T> weight = load(weights + i);
        store<T>(weights + i, select<T>(is_set<T>(bytes + i), weight, weight * 0));
    }
}

// ---- dropout ----

typedef uint32_t Words __attribute__((vector_size(POLYATTN_BYTES)));

// The high and low words of products with a number.
INLINE void multiply_words(Words x, uint32_t number, Words& high, Words& low) {
    low = x * number;
#if defined(__AVX512F__)
    __m512i n = _mm512_set1_epi32((int)number), even = _mm512_mul_epu32((__m512i)x, n);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), n);
    high = (Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    __m256i n = _mm256_set1_epi32((int)number), even = _mm256_mul_epu32((__m256i)x, n);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), n);
    high = (Words)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
    UNROLL for (size_t i = 0; i < sizeof(Words) / 4; ++i) { high[i] = (uint32_t)((uint64_t)x[i] * number >> 32); }
#endif
}

// Write which weights are kept as bytes[key][lane]: Philox 4x32-10 of the counter (key / 4, row,
// head, item), whose words belong to four keys.
template <typename T>
void read_dropout(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys, uint8_t* bytes) {
    constexpr int words = POLYATTN_BYTES / 4;
    const int lanes = panel.lanes();
    const int64_t shift = call.start[3];
    for (int first = 0; first < lanes; first += words) {
        Words rows = {}, heads = {};
        const int filled = lanes - first < words ? lanes - first : words;
        for (int lane = 0; lane < filled; ++lane) {
            rows[lane] = (uint32_t)(panel.row[first + lane] + call.start[2]);
            heads[lane] = (uint32_t)(panel.head[first + lane] + call.start[1]);
        }
        for (int64_t block = (keys.first + shift) / 4; block * 4 - shift < keys.stop; ++block) {
            Words a = Words{} + (uint32_t)block, b = rows, c = heads;
            Words d = Words{} + (uint32_t)(item + call.start[0]);
            uint32_t low = call.seed_low, high = call.seed_high;
            UNROLL for (int round = 0; round < 10; ++round) {
                Words high_a, low_a, high_c, low_c;
                multiply_words(a, 0xD2511F53, high_a, low_a);
                multiply_words(c, 0xCD9E8D57, high_c, low_c);
                a = high_c ^ b ^ low;
                c = high_a ^ d ^ high;
                b = low_c;
                d = low_a;
                low += 0x9E3779B9;
                high += 0xBB67AE85;
            }
            const Words found[4] = {a, b, c, d};
            for (int word = 0; word < 4; ++word) {
                const int64_t key = block * 4 + word - shift;
                if (key < keys.first || key >= keys.stop) continue;
                uint8_t* to = bytes + (key - keys.first) * lanes + first;
                for (int lane = 0; lane < filled; ++lane) to[lane] = found[word][lane] >= call.threshold;
            }
        }
    }
}

// ---- the steps ----

// Step 2; `bounded` receives tanh(s / c), for the gradient, if it is given.
template <typename T> void cap(T* scores, int64_t size, T softcap, T* bounded) {
    const T factor = 1 / softcap;
    for (int64_t i = 0; i < size; i += Lanes<T>::width) {
        Vector<T> t = tanh<T>(load(scores + i) * factor);
        if (bounded) store<T>(bounded + i, t);
        store<T>(scores + i, t * softcap);
    }
}

template <typename T> INLINE void add_bias(T* score, Vector<T> bias) {
    // -inf masks, whatever the score is.
    Vector<T> sum = load(score) + bias;
    store<T>(score, select<T>(bias == -infinity<T>(), all<T>(-infinity<T>()), sum));
}

// Step 4, for some keys.
template <typename T>
void add_bias(const PolyattnArray& bias, int64_t item, const Panel<T>& panel, Range keys, T* scores) {
    constexpr int width = Lanes<T>::width;
    const int lanes = panel.lanes();
    const int64_t count = keys.stop - keys.first;
    const T* rows[2 * width];
    for (int lane = 0; lane < lanes; ++lane) {
        rows[lane] = at<T>(bias, item, panel.head[lane], panel.row[lane]) + keys.first * bias.column;
    }
    bool same = true;
    for (int lane = 1; lane < lanes; ++lane) same = same && rows[lane] == rows[0];
    if (same) {
        for (int64_t i = 0; i < count * lanes; i += width) {
            add_bias(scores + i, all<T>(rows[0][i / lanes * bias.column]));
        }
        return;
    }
    for (int v = 0; v < lanes; v += width) {
        int64_t key = 0;
        if (bias.column == 1) {
            for (; key + width <= count; key += width) {
                Vector<T> square[width];
                UNROLL for (int i = 0; i < width; ++i)
                    square[i] = load(rows[v + i] + key);
                transpose(square);
                UNROLL for (int i = 0; i < width; ++i) { add_bias(scores + (key + i) * lanes + v, square[i]); }
            }
        }
        for (; key < count; ++key) {
            Vector<T> column;
            for (int i = 0; i < width; ++i) column[i] = rows[v + i][key * bias.column];
            add_bias(scores + key * lanes + v, column);
        }
    }
}

// Step 5 by the first and last keys of the rows.
template <typename T> void hide_outside(const Panel<T>& panel, Range keys, T* scores) {
    constexpr int width = Lanes<T>::width;
    typedef typename Lanes<T>::Int Int;
    const int lanes = panel.lanes();
    for (int v = 0; v < lanes; v += width) {
        Ints<T> first = load_ints<T>(panel.first + v), stop = load_ints<T>(panel.stop + v);
        for (int64_t key = keys.first; key < keys.stop; ++key) {
            if (key >= panel.every.first && key < panel.every.stop) continue;
            T* score = scores + (key - keys.first) * lanes + v;
            Ints<T> at = Ints<T>{} + (Int)key;
            Ints<T> seen = (at >= first) & (at < stop);
            store<T>(score, select<T>(seen, load(score), all<T>(-infinity<T>())));
        }
    }
}

}  // namespace POLYATTN_UNIT
