// The C interface: one call of attention, in the letters of the semantics.
//
// query (items, H, L, D), key (items, G, S, D), value (items, G, S, E), output (items, H, L, E);
// query head h reads the key head h / (H / G). All strides count elements.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { POLYATTN_RANGES = 8 };
enum { POLYATTN_FLOAT32, POLYATTN_FLOAT64, POLYATTN_FLOAT16, POLYATTN_BFLOAT16 };

// An array with the axes (item, head, row or key, element); a stride of 0 broadcasts an axis.
typedef struct {
    void* data;              // null if the call has no such array
    const int64_t* offsets;  // of each item; null for item * its stride
    int64_t item, head, row, column;
} PolyattnArray;

typedef struct {
    int64_t items, heads, key_heads, rows, keys, head_size, value_size;
    int32_t dtype;    // of query, key, value and output
    int32_t threads;  // at most so many compute
    PolyattnArray query, key, value, output;  // contiguous last axes; a derivative's output is of the scores' dtype
    PolyattnArray logsumexp;  // (item, head, row), float32 or float64
    // Keys and values in pages of `page` keys each, if there is a table: the item of `key` and `value` is
    // then a page, and the pages of an item are a row of the table. Entries beyond the last page that a row
    // sees are ignored.
    PolyattnArray table;  // int32: (item, 1, 1, keys / page), its last axis contiguous
    int64_t page;
    // Keys and values of int8, if there are steps: a key times row key / step_keys of its steps, by element, and
    // a value times its own. Of the dtype of scores, as the query is. Only polyattn_attend, without pages.
    PolyattnArray key_steps, value_steps;
    int64_t step_keys;
    double scale;
    double softcap;  // 0 for none
    // Row i sees the keys from i + low to i + high, both plus the item's position if there are any.
    int32_t has_low, has_high;
    int64_t low, high;
    const int64_t* positions;
    // int32 (item, head, row, range): row i sees the keys from first to before stop of each of its ranges, which
    // are in order and apart. At most POLYATTN_RANGES; 0 is one.
    PolyattnArray first, stop;
    int64_t ranges;
    PolyattnArray mask;  // uint8: a key takes part where it is not 0
    PolyattnArray bias[2];  // of the scores' dtype, added after the softcap: numbers by distance, and a bias
    const void* sinks;  // (heads), of the scores' dtype
    // Dropout keeps a weight whose word of Philox is at least the threshold.
    const uint32_t* seed;  // two words, and the item, head, row and key where counters begin; null for none
    uint32_t threshold;
    double keep;  // 1 - the rate: by this the output is divided; 1 without dropout
    // The derivative of the call: results, their gradients, and the gradients to write.
    PolyattnArray output_gradient, logsumexp_gradient;
    PolyattnArray query_gradient, key_gradient, value_gradient;  // of the scores' dtype
    PolyattnArray delta;  // (item, head, row): output gradient · output, less that of logsumexp
    PolyattnArray softcap_gradient;  // (item, head, row)
    // Those of biases are added to what is there. A number that rows or keys share belongs to one item and
    // head; any other may be shared by items and heads.
    PolyattnArray bias_gradient[2];
    int32_t is_part;  // whether the call has a part of the rows, and
    int32_t adds;  // whether the gradients of keys and values are added to those of parts before
    int32_t same_bits;  // whether few rows of a key head get the bits that they have among many
    // With a table: of so many items, one after another, the pages may be the same, so one task adds to their
    // gradients, which are in pages as keys and values are. Then `adds` is set.
    int64_t together;
} PolyattnCall;

#if defined(_WIN32)
#define POLYATTN_API __declspec(dllexport)
#else
#define POLYATTN_API __attribute__((visibility("default")))
#endif

// Compute; 0 once all is written, 1 after some 30 ms, to be called again, -1 without memory, -2 in the
// child of a fork amid the call, some of whose threads are in the parent only. `state` points to a null
// pointer at first, and belongs to the call until it is done.
POLYATTN_API int polyattn_attend(const PolyattnCall* call, void** state);
POLYATTN_API int polyattn_differentiate(const PolyattnCall* call, void** state);
// As polyattn_attend, with other arrays of the same strides in place of the call's. Without a state it returns when all
// is written, as polyattn_multiply does. 2 if an address is not aligned to the size of a number: then nothing is
// written. Not for integers.
POLYATTN_API int polyattn_attend_at(const PolyattnCall* call, int64_t threads, void* query, void* key, void* value,
                                    void* output, void* logsumexp, void** state);
// The same by pointers to the addresses of their data.
POLYATTN_API int polyattn_attend_to(const PolyattnCall* call, int64_t threads, void** query, void** key, void** value,
                                    void** output, void** logsumexp, void** state);
// output = x · w + bias: the bits of a row depend on nothing but a row of x, w and the bias, which may be null.
typedef struct {
    int64_t rows, inner, columns;  // x (rows, inner), w (inner, columns), bias (columns)
    int64_t x_row, x_column, w_row, w_column, bias_column;  // strides; the output is contiguous
    int64_t dtype;  // float32 or float64
} PolyattnProduct;
POLYATTN_API int polyattn_multiply(const PolyattnProduct* product, int64_t threads, void* x, void* w, void* bias,
                                   void* output, void** state);
// The share of a call under way that threads have begun, from 0 to 1.
POLYATTN_API double polyattn_share(void* const* state);
// End a call that will not be called again.
POLYATTN_API void polyattn_cancel(void** state);

// The instruction sets of this processor, best first, separated by spaces.
POLYATTN_API const char* polyattn_instruction_sets(void);
// Use one of them from now on; 0 if it is not known here.
POLYATTN_API int polyattn_use(const char* instruction_set);
POLYATTN_API int64_t polyattn_version(void);  // of this interface
POLYATTN_API int64_t polyattn_call_size(void);

#ifdef __cplusplus
}
#endif
