#include "interface.h"

#include <string.h>

#include <atomic>

#include "pool.h"
#include "work.h"

// The instruction set that every processor of its kind has; CMakeLists.txt says where it is `generic`.
#if defined(POLYATTN_GENERIC)
#define POLYATTN_BASE generic
#elif defined(__x86_64__)
#define POLYATTN_BASE sse2
#define POLYATTN_X86
#include <cpuid.h>
#else
#define POLYATTN_BASE neon
#endif

#define DECLARE(name) namespace name { extern const Unit unit; }
DECLARE(POLYATTN_BASE)
#if defined(POLYATTN_X86)
DECLARE(avx2)
DECLARE(avx512)
#endif

namespace {

#if defined(POLYATTN_X86)
// __builtin_cpu_supports is not used: some runtimes answer 0 to it.
struct Features {
    bool avx2 = false, avx512 = false;

    Features() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        const unsigned needed = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C;
        if ((c & needed) != needed) return;
        unsigned low, high;
        asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = (low & 6) == 6 && (b & bit_AVX2);
        const unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
        avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & wide) == wide;
    }
};
#endif

struct Units {
    const Unit* known[3] = {};
    int count = 0;
    char names[32] = "";
    std::atomic<const Unit*> used;

    Units() {
#if defined(POLYATTN_X86)
        const Features features;
        if (features.avx512) add(avx512::unit);
        if (features.avx2) add(avx2::unit);
#endif
        add(POLYATTN_BASE::unit);
        used = known[0];
    }

    void add(const Unit& unit) {
        known[count++] = &unit;
        if (names[0]) strcat(names, " ");
        strcat(names, unit.name);
    }
} units;

// Run the tasks of a call; without a state, until all is written.
int run_whole(const PolyattnCall& call, Work (*make)(const PolyattnCall&), void** state) {
    if (state) return run_tasks(call, make, *state);
    void* own = nullptr;
    int status;
    while ((status = run_tasks(call, make, own)) == 1) {}
    return status;
}

}  // namespace

extern "C" {

int polyattn_attend(const PolyattnCall* call, void** state) {
    return run_tasks(*call, units.used.load()->attend[call->dtype == POLYATTN_FLOAT64], *state);
}

int polyattn_attend_at(const PolyattnCall* call, int64_t threads, void* query, void* key, void* value, void* output,
                       void* logsumexp, void** state) {
    const uintptr_t size = call->dtype == POLYATTN_FLOAT64 ? 8 : call->dtype == POLYATTN_FLOAT32 ? 4 : 2;
    if (((uintptr_t)query | (uintptr_t)key | (uintptr_t)value) % size) return 2;
    PolyattnCall other = *call;
    other.threads = (int32_t)threads;
    other.query.data = query;
    other.key.data = key;
    other.value.data = value;
    other.output.data = output;
    other.logsumexp.data = logsumexp;
    return run_whole(other, units.used.load()->attend[call->dtype == POLYATTN_FLOAT64], state);
}

int polyattn_attend_to(const PolyattnCall* call, int64_t threads, void** query, void** key, void** value, void** output,
                       void** logsumexp, void** state) {
    return polyattn_attend_at(call, threads, *query, *key, *value, *output, logsumexp ? *logsumexp : nullptr, state);
}

int polyattn_differentiate(const PolyattnCall* call, void** state) {
    return run_tasks(*call, units.used.load()->differentiate[call->dtype == POLYATTN_FLOAT64], *state);
}

int polyattn_multiply(const PolyattnProduct* product, int64_t threads, void* x, void* w, void* bias, void* output,
                      void** state) {
    PolyattnCall call = {};
    call.rows = product->rows;
    call.head_size = product->inner;
    call.value_size = product->columns;
    call.threads = (int32_t)threads;
    call.query = {x, nullptr, 0, 0, product->x_row, product->x_column};
    call.key = {w, nullptr, 0, 0, product->w_row, product->w_column};
    call.bias[0] = {bias, nullptr, 0, 0, 0, product->bias_column};
    call.output = {output, nullptr, 0, 0, product->columns, 1};
    return run_whole(call, units.used.load()->multiply[product->dtype == POLYATTN_FLOAT64], state);
}

double polyattn_share(void* const* state) { return share_of_tasks(*state); }

void polyattn_cancel(void** state) { cancel_tasks(*state); }

const char* polyattn_instruction_sets(void) { return units.names; }

int polyattn_use(const char* instruction_set) {
    for (int i = 0; i < units.count; ++i) {
        if (strcmp(units.known[i]->name, instruction_set) == 0) {
            units.used = units.known[i];
            return 1;
        }
    }
    return 0;
}

int64_t polyattn_version(void) { return 9; }
int64_t polyattn_call_size(void) { return sizeof(PolyattnCall); }
}
