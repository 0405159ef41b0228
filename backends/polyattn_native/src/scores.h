// What happens to a block of scores between the product and the softmax: steps 2, 4 and 5 of the
// formula, and dropout. Scores have the axes (key, lane).
#pragma once
#include "panel.h"
#include "rows.h"

namespace POLYATTN_UNIT {

// ---- bytes by key and lane, of mask arrays and dropout ----

// The most keys of a block.
constexpr int BLOCK = 256;

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Exchange rows and columns: a pass interleaves each row of the first half with one of the second.
template <int Rows> INLINE void transpose_bytes(Bytes (&rows)[Rows]) {
    UNROLL for (int pass = 1; pass < Rows; pass *= 2) {
        Bytes next[Rows];
        UNROLL for (int i = 0; i < Rows / 2; ++i) {
            const Bytes a = rows[i], b = rows[i + Rows / 2];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        UNROLL for (int i = 0; i < Rows; ++i) { rows[i] = next[i]; }
    }
}

// Read so many rows at a time for 16 keys at a time; return for how many keys.
template <int Rows>
int64_t read_squares(const uint8_t* const* rows, int lanes, int64_t count, uint8_t* bytes) {
    int64_t key = 0;
    for (; key + 16 <= count; key += 16) {
        for (int lane = 0; lane < lanes; lane += Rows) {
            Bytes square[Rows];
            UNROLL for (int i = 0; i < Rows; ++i) { __builtin_memcpy(&square[i], rows[lane + i] + key, 16); }
            transpose_bytes(square);
            UNROLL for (int i = 0; i < Rows; ++i) {
                __builtin_memcpy(bytes + (key + i * 16 / Rows) * lanes + lane, &square[i], 16);
            }
        }
    }
    return key;
}

// Whether the lanes of a panel read the same row.
template <typename N> bool are_same(const N* const* rows, int lanes) {
    bool same = true;
    for (int lane = 1; lane < lanes; ++lane) same = same && rows[lane] == rows[0];
    return same;
}

// The rows of a mask array, from a key on.
template <typename T>
void find_mask(const PolyattnCall& call, int64_t item, const Panel<T>& panel, int64_t key, const uint8_t** rows) {
    for (int lane = 0; lane < panel.lanes(); ++lane) {
        rows[lane] = at<uint8_t>(call.mask, item, panel.head[lane], panel.row[lane]) + key * call.mask.column;
    }
}

// The keys of a block in cells of so many, from the first: those that a mask array shows to some row of a panel,
// and those that it shows to all rows, as bits.
constexpr int CELL = 16;
struct Cells {
    uint32_t any, all;

    // Whether all rows see some keys, counted from the first of the block.
    bool shows_all(int64_t first, int64_t stop) const {
        const uint32_t bits = (2u << (stop - 1) / CELL) - (1u << first / CELL);
        return (all & bits) == bits;
    }
};

// Add up what the rows of a mask show of some keys: of each, whether any and whether all of them do.
template <int Keys>
INLINE void look_at_keys(const uint8_t* const* rows, int lanes, int64_t key, uint64_t* any, uint64_t* all) {
    typedef uint8_t Some __attribute__((vector_size(Keys)));
    Some some = {}, every = ~Some{}, row;
    for (int lane = 0; lane < lanes; ++lane) {
        __builtin_memcpy(&row, rows[lane] + key, Keys);
        some |= row;
        every &= row;
    }
    __builtin_memcpy(any, &some, Keys);
    __builtin_memcpy(all, &every, Keys);
}

template <typename T>
Cells look_at_mask(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys) {
    constexpr uint64_t ones = 0x0101010101010101ull;
    const int64_t count = keys.stop - keys.first, column = call.mask.column;
    const uint8_t* rows[2 * Lanes<T>::width];
    find_mask(call, item, panel, keys.first, rows);
    const int lanes = are_same(rows, panel.lanes()) ? 1 : panel.lanes();
    Cells cells = {0, ~0u};
    for (int64_t key = 0, stop; key < count; key = stop) {
        uint64_t any[8] = {}, all[8] = {ones, ones};
        stop = column == 1 && key + 64 <= count ? key + 64 : min(key + CELL, count);  // a line, or a cell
        if (stop - key == 64) look_at_keys<64>(rows, lanes, key, any, all);
        else if (column == 1 && stop - key == CELL) look_at_keys<CELL>(rows, lanes, key, any, all);
        else {
            for (int64_t at = key; at < stop; ++at) {
                for (int lane = 0; lane < lanes; ++lane) {
                    const uint64_t seen = rows[lane][at * column] * ones;
                    any[(at - key) / 8] |= seen;
                    all[(at - key) / 8] &= seen;
                }
            }
        }
        // What is shown is 1 in an array of bools; other numbers are looked at one by one.
        for (int64_t at = key; at < stop; at += 8) {
            cells.any |= (uint32_t)(any[(at - key) / 8] != 0) << at / CELL;
            cells.all &= ~((uint32_t)(all[(at - key) / 8] != ones) << at / CELL);
        }
    }
    return cells;
}

// Runs of keys of a block, in order.
struct Runs {
    int count;
    Range of[BLOCK / CELL / 2];

    explicit Runs(Range whole) : count(1) { of[0] = whole; }
    // The cells of the block that are among these.
    Runs(Range block, uint32_t cells) : count(0) {
        for (int64_t key = block.first; cells; cells >>= 1, key += CELL) {
            if (!(cells & 1)) continue;
            const int64_t stop = min(key + CELL, block.stop);
            if (count && of[count - 1].stop == key) of[count - 1].stop = stop;
            else of[count++] = {key, stop};
        }
    }
};

// Read a mask array for some keys, as bytes[key][lane].
template <typename T>
void read_mask(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys, uint8_t* bytes) {
    const int lanes = panel.lanes();
    const int64_t count = keys.stop - keys.first, column = call.mask.column;
    const uint8_t* rows[2 * Lanes<T>::width];
    find_mask(call, item, panel, keys.first, rows);
    int64_t key = 0;
    if (are_same(rows, lanes)) {
        for (; key < count; ++key) {
            // Eight lanes at a time: the next key, or the bytes after the last, take what is too much.
            const uint64_t seen = rows[0][key * column] * 0x0101010101010101ull;
            for (int lane = 0; lane < lanes; lane += 8) __builtin_memcpy(bytes + key * lanes + lane, &seen, 8);
        }
    } else if (column == 1) {
        if (lanes % 16 == 0) key = read_squares<16>(rows, lanes, count, bytes);
        else if (lanes == 8) key = read_squares<8>(rows, lanes, count, bytes);
    }
    for (; key < count; ++key) {
        for (int lane = 0; lane < lanes; ++lane) bytes[key * lanes + lane] = rows[lane][key * column];
    }
}

// Ask the memory for the mask of a panel, while another one computes.
template <typename T> void prefetch_mask(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys) {
    const PolyattnArray& mask = call.mask;
    for (int lane = 0; mask.column == 1 && lane < panel.lanes(); ++lane) {
        prefetch(at<uint8_t>(mask, item, panel.head[lane], panel.row[lane]) + keys.first, keys.stop - keys.first);
    }
}

template <typename T> INLINE Ints<T> is_set(const uint8_t* bytes) {
#if defined(__AVX2__)
    // gcc's __builtin_convertvector takes less than 16 bytes one by one.
    __m128i loaded = {};
    __builtin_memcpy(&loaded, bytes, Lanes<T>::width);
#if defined(__AVX512F__)
    const __m512i wide = sizeof(T) == 4 ? _mm512_cvtepu8_epi32(loaded) : _mm512_cvtepu8_epi64(loaded);
#else
    const __m256i wide = sizeof(T) == 4 ? _mm256_cvtepu8_epi32(loaded) : _mm256_cvtepu8_epi64(loaded);
#endif
    return (Ints<T>)wide != 0;
#else
    typedef uint8_t Loaded __attribute__((vector_size(Lanes<T>::width)));
    Loaded loaded;
    __builtin_memcpy(&loaded, bytes, sizeof loaded);
    return __builtin_convertvector(loaded, Ints<T>) != 0;
#endif
}

// Replace the scores whose byte is 0.
template <typename T> void select_or(T* scores, int64_t size, const uint8_t* bytes, T other) {
    for (int64_t i = 0; i < size; i += Lanes<T>::width) {
        store<T>(scores + i, select<T>(is_set<T>(bytes + i), load(scores + i), broadcast<T>(other)));
    }
}

// Multiply the weights whose byte is 0 by 0, which leaves -0 as it is.
template <typename T> void zero_unset(T* weights, int64_t size, const uint8_t* bytes) {
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
    const uint32_t* start = call.seed + 2;  // the item, head, row and key
    const int64_t shift = start[3];
    for (int first = 0; first < lanes; first += words) {
        Words rows = {}, heads = {};
        const int filled = lanes - first < words ? lanes - first : words;
        for (int lane = 0; lane < filled; ++lane) {
            rows[lane] = (uint32_t)(panel.row[first + lane] + start[2]);
            heads[lane] = (uint32_t)(panel.head[first + lane] + start[1]);
        }
        for (int64_t block = (keys.first + shift) / 4; block * 4 - shift < keys.stop; ++block) {
            Words a = Words{} + (uint32_t)block, b = rows, c = heads;
            Words d = Words{} + (uint32_t)(item + start[0]);
            uint32_t low = call.seed[0], high = call.seed[1];
            for (int round = 0; round < 10; ++round) {
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

template <typename T> INLINE Ints<T> add_bias(T* score, Vector<T> bias) {
    // -inf masks, whatever the score is.
    const Vector<T> sum = load(score) + bias;
    const Ints<T> hides = bias == -infinity<T>();
    store<T>(score, select<T>(hides, broadcast<T>(-infinity<T>()), sum));
    return hides;
}
template <typename T> INLINE bool any(Ints<T> found) {
    typename Lanes<T>::Int some = 0;
    UNROLL for (int lane = 0; lane < Lanes<T>::width; ++lane) { some |= found[lane]; }
    return some;
}

// Step 4, for some keys; return whether it hides one.
template <typename T>
bool add_bias(const PolyattnArray& bias, int64_t item, const Panel<T>& panel, Range keys, T* scores) {
    constexpr int width = Lanes<T>::width;
    const int lanes = panel.lanes();
    const int64_t count = keys.stop - keys.first;
    const T* rows[2 * width];
    for (int lane = 0; lane < lanes; ++lane) {
        rows[lane] = at<T>(bias, item, panel.head[lane], panel.row[lane]) + keys.first * bias.column;
    }
    Ints<T> hides = {};
    if (are_same(rows, lanes)) {
        for (int64_t i = 0; i < count * lanes; i += width) {
            hides |= add_bias(scores + i, broadcast<T>(rows[0][i / lanes * bias.column]));
        }
        return any<T>(hides);
    }
    for (int v = 0; v < lanes; v += width) {
        int64_t key = 0;
        if (bias.column == 1) {
            for (; key + width <= count; key += width) {
                Vector<T> square[width];
                UNROLL for (int i = 0; i < width; ++i) { square[i] = load(rows[v + i] + key); }
                transpose(square);
                UNROLL for (int i = 0; i < width; ++i) { hides |= add_bias(scores + (key + i) * lanes + v, square[i]); }
            }
        }
        for (; key < count; ++key) {
            Vector<T> column;
            for (int i = 0; i < width; ++i) column[i] = rows[v + i][key * bias.column];
            hides |= add_bias(scores + key * lanes + v, column);
        }
    }
    return any<T>(hides);
}

// Step 5 by the first and last keys of the rows, or of each of their ranges.
template <typename T>
void hide_outside(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys, T* scores) {
    constexpr int width = Lanes<T>::width;
    typedef typename Lanes<T>::Int Int;
    const int lanes = panel.lanes();
    const int64_t ranges = panel.has_gaps ? panel.ranges.count : 1;
    for (int v = 0; v < lanes; v += width) {
        Ints<T> first[POLYATTN_RANGES], stop[POLYATTN_RANGES];  // from the block's first key, so that 32 bits hold them
        for (int64_t i = 0; i < ranges; ++i) {
            for (int lane = 0; lane < width; ++lane) {
                Range seen = {panel.first[v + lane], panel.stop[v + lane]};
                if (panel.has_gaps) seen = keys_of_row(call, item, panel.head[v + lane], panel.row[v + lane], i);
                first[i][lane] = (Int)clamp(seen.first - keys.first, 0, BLOCK);
                stop[i][lane] = (Int)clamp(seen.stop - keys.first, 0, BLOCK);
            }
        }
        for (int64_t key = keys.first; key < keys.stop; ++key) {
            if (!panel.has_gaps && key >= panel.all_keys.first && key < panel.all_keys.stop) continue;
            T* score = scores + (key - keys.first) * lanes + v;
            Ints<T> at = Ints<T>{} + (Int)(key - keys.first);
            Ints<T> seen = (at >= first[0]) & (at < stop[0]);
            for (int64_t i = 1; i < ranges; ++i) seen |= (at >= first[i]) & (at < stop[i]);
            store<T>(score, select<T>(seen, load(score), broadcast<T>(-infinity<T>())));
        }
    }
}

// Hide what the rows do not see, also where bytes of a mask are 0; return whether anything may be hidden.
template <typename T>
bool hide(const PolyattnCall& call, int64_t item, const Panel<T>& panel, Range keys, bool all_set, const uint8_t* bytes,
          T* scores) {
    const bool inside = panel.sees_all(keys);
    if (!inside) hide_outside(call, item, panel, keys, scores);
    if (!all_set) select_or<T>(scores, (keys.stop - keys.first) * panel.lanes(), bytes, -infinity<T>());
    return !inside || !all_set || call.bias[0].data || call.bias[1].data;
}

// ---- where sums begin anew ----

// The keys of a block before which the lanes of a panel fold their sums, counted among those that are computed.
template <typename T> struct Folds {
    typedef typename Lanes<T>::Int Int;
    static constexpr Int NONE = 1 << 30;

    Int at[2 * Lanes<T>::width];
    int64_t first, last;  // of all lanes

    explicit Folds(Int place = NONE) : first(place), last(place) {
        for (Int& lane : at) lane = place;
    }

    // Count the keys of a block: those within the ranges, or those whose scores are not -inf.
    void count(Panel<T>& panel, Range keys, int64_t number, const T* scores, bool by_scores) {
        constexpr int width = Lanes<T>::width;
        const int lanes = panel.lanes();
        for (int v = 0; v < lanes; v += width) {
            const Ints<T> left = load_ints<T>(panel.until_fold + v);
            Ints<T> begin = {}, seen = {};
            if (by_scores) {
                for (int64_t key = 0; key < number; ++key) seen -= load(scores + key * lanes + v) != -infinity<T>();
            } else if (panel.sees_all(keys)) {
                seen += (Int)number;
            } else {
                for (int lane = 0; lane < width; ++lane) {
                    const int64_t start = max(panel.first[v + lane], keys.first);
                    begin[lane] = (Int)(start - keys.first);
                    seen[lane] = (Int)max(min(panel.stop[v + lane], keys.stop) - start, 0);
                }
            }
            const Ints<T> folds = seen > left;
            Ints<T> place = Ints<T>{} + NONE;
            if (any<T>(folds)) {
                Ints<T> until = begin + left, rest = left;
                if (by_scores) {
                    until = Ints<T>{};
                    for (int64_t key = 0; key < number; ++key) {
                        rest += load(scores + key * lanes + v) != -infinity<T>();
                        until -= rest >= 0;
                    }
                }
                place = folds ? until : place;
                for (int lane = 0; lane < width; ++lane) {
                    if (!folds[lane]) continue;
                    last = first == NONE ? place[lane] : max(last, place[lane]);
                    first = min(first, place[lane]);
                }
            }
            store_ints<T>(at + v, place);
            store_ints<T>(panel.until_fold + v, left - seen + (folds ? Ints<T>{} + FOLD : Ints<T>{}));
        }
    }
};

// Hide the weights between the first and the last fold that belong to the sum after a lane's fold, or before it.
template <typename T>
void split_at(const Folds<T>& folds, int stride, T hidden, bool is_after, const T* from, T* zone) {
    constexpr int width = Lanes<T>::width;
    typedef typename Lanes<T>::Int Int;
    const int step = stride < width ? 1 : width;
    for (int64_t i = 0, key = folds.first; key < folds.last; ++key) {
        for (int lane = 0; lane < stride; lane += step, i += step) {
            if (step == 1) {
                zone[i] = key < folds.at[lane] ? is_after ? hidden : from[i] : is_after ? from[i] : hidden;
                continue;
            }
            const Ints<T> before = Ints<T>{} + (Int)key < load_ints<T>(folds.at + lane),
                          hides = is_after ? before : ~before;
            store<T>(zone + i, select<T>(hides, broadcast<T>(hidden), load(from + i)));
        }
    }
}

// Add the sums of the lanes that fold to those of the keys before, which are scaled, as are the new ones.
template <typename T>
void fold_vectors(Ints<T> here, Vector<T> scale, Vector<T> factor, int64_t size, int64_t step, bool is_first, T* low,
                  T* high) {
    for (int64_t i = 0; i < size; i += step) {
        const Vector<T> sum = load(low + i) * factor, more = select<T>(here, sum, Vector<T>{});
        store<T>(high + i, is_first ? more : load(high + i) * scale + more);
        store<T>(low + i, select<T>(here, Vector<T>{}, sum));
    }
}

// ---- what derivatives compute again ----

// The logsumexp of a row that sees no key, in place of -inf: its weights are 0.
template <typename T> constexpr T EMPTY_ROW = (T)1e30;

// The weights of scores, by the logsumexp of their rows.
template <typename T> INLINE Vector<T> softmax_weights(Vector<T> scores, Vector<T> logsumexp) {
    const T largest = sizeof(T) == 4 ? 88 : 709;
    const Vector<T> x = scores - logsumexp;
    return exp<T>(select<T>(x > largest, broadcast<T>(largest), x));
}

}  // namespace POLYATTN_UNIT
