// Steps 2 to 7 of the formula on a block of rows of scores, and their gradients: one thread block a
// row.
//
// Weights replace the scores in memory, and gradients of scores those of weights. Numbers of 16 bits
// fill the first half of their row, so all threads must have read theirs before one of them writes:
// hence the __syncthreads() of the last loop.

typedef long long integer;

// CUDA's headers are not used, since not every installation has them.
#ifdef __CUDACC__
struct float16 {
    unsigned short bits;
    __device__ float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const
    {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};
#else
typedef _Float16 float16;
#endif

struct bfloat16 {
    unsigned short bits;
    __device__ bfloat16(float x)
    {
        unsigned int whole = __float_as_uint(x);
        whole += 0x7fff + (whole >> 16 & 1);  // to the nearest, ties to even
        bits = x == x ? whole >> 16 : 0x7fff;
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};

// Strides of an array that broadcasts to (batch item, head, row, key), in elements.
struct Strides {
    integer item, head, row, key;
};

// Every member has eight bytes, so the memory is that of the NumPy record it is filled from.
struct Rows {
    void *scores;           // as many rows as the grid has blocks
    void *logsumexp;        // of the whole call, (items, heads, length), or null
    void *slopes;           // of the weights, then of the scores, in rows like these; or null
    const void *delta;      // of each row what is subtracted from the slopes of its weights, or null
    void *cap_slopes;       // of the softcap, each row's share: (items, heads, length), or null
    const bool *mask;       // or null
    const void *bias;       // or null
    const void *sinks;      // one per head, or null
    const integer *offset;  // one per batch item, or null
    Strides mask_strides, bias_strides;
    integer pitch;           // from one row of scores to the next
    integer pair, row, key;  // the first of this block: pair of item and key head, folded row, key
    integer rows, keys;      // their number in this block
    integer length;          // query rows of one head
    integer groups;          // key heads
    integer group_size;      // query heads of one key head, folded into its rows
    integer low, high;       // the band: i + low <= j <= i + high
    double softcap;          // or 0
    double weight_scale;     // the factor by which weights are written too large
};

// The online softmax of some scores of a row: the greatest, and the sum of exp(score - top).
template <class Real> struct SoftmaxState {
    Real top, sum;

    __device__ void add(Real score, Real none)
    {
        if (score > top) {
            sum = sum * exp(top - score) + 1;
            top = score;
        } else if (score != none) {
            sum += exp(score - top);
        }
    }

    __device__ void combine(const SoftmaxState &other, Real none)
    {
        Real both = top > other.top ? top : other.top;
        // If top is -inf, the sum is 0, or NaN, which must stay.
        sum = (top == none ? sum : sum * exp(top - both))
            + (other.top == none ? other.sum : other.sum * exp(other.top - both));
        top = both;
    }
};

// What a thread block knows of its row.
template <class Real, class Bias> struct Row {
    const Rows &x;
    integer item, head, i, position;
    Real *scores, softcap, none;
    const bool *mask;
    const Bias *bias;

    __device__ Row(const Rows &rows) : x(rows)
    {
        none = __uint_as_float(0xff800000);  // -inf: the score of an absent key
        const integer pair = x.pair + blockIdx.x / x.rows, folded = x.row + blockIdx.x % x.rows;
        item = pair / x.groups;
        head = pair % x.groups * x.group_size + folded / x.length;
        i = folded % x.length;
        position = i + (x.offset ? x.offset[item] : 0);
        scores = (Real *)x.scores + blockIdx.x * x.pitch;
        softcap = (Real)x.softcap;
        const Strides m = x.mask_strides, b = x.bias_strides;
        mask = x.mask ? x.mask + item * m.item + head * m.head + i * m.row : 0;
        bias = (const Bias *)x.bias;
        bias = bias ? bias + item * b.item + head * b.head + i * b.row : 0;
    }

    // Its place in an array of a number for each row.
    __device__ integer place() const
    {
        return (item * x.groups * x.group_size + head) * x.length + i;
    }

    __device__ Real score(integer column) const
    {
        const integer j = x.key + column;
        if (j < position + x.low || j > position + x.high) return none;
        if (mask && !mask[j * x.mask_strides.key]) return none;
        Real s = scores[column];
        if (softcap > 0) s = softcap * tanh(s / softcap);
        if (!bias) return s;
        const Real added = (Real)bias[j * x.bias_strides.key];
        return added == none ? none : s + added;
    }
};

template <class Weight, class Real, class Bias> __global__ void softmax(const Rows x)
{
    const Row<Real, Bias> row(x);
    const Real none = row.none;

    SoftmaxState<Real> mine = {none, 0};
    if (x.sinks && threadIdx.x == 0) mine.add(((const Real *)x.sinks)[row.head], none);
    for (integer j = threadIdx.x; j < x.keys; j += blockDim.x) mine.add(row.score(j), none);

    __shared__ Real tops[MOST_THREADS], sums[MOST_THREADS];
    tops[threadIdx.x] = mine.top, sums[threadIdx.x] = mine.sum;
    for (unsigned int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const SoftmaxState<Real> other = {tops[threadIdx.x + half], sums[threadIdx.x + half]};
            mine.combine(other, none);
            tops[threadIdx.x] = mine.top, sums[threadIdx.x] = mine.sum;
        }
    }
    __syncthreads();
    const Real top = tops[0], sum = sums[0], scale = (Real)x.weight_scale;

    if (x.logsumexp && threadIdx.x == 0) {
        ((Real *)x.logsumexp)[row.place()] = sum == 0 ? none : top + log(sum);
    }
    Weight *weights = (Weight *)row.scores;
    for (integer first = 0; first < x.keys; first += blockDim.x) {
        const integer j = first + threadIdx.x;
        Real weight = 0;
        if (j < x.keys) {
            const Real s = row.score(j);
            if (s != none) weight = exp(s - top) / sum * scale;
        }
        if (sizeof(Weight) < sizeof(Real)) __syncthreads();
        if (j < x.keys) weights[j] = (Weight)weight;
    }
}

// Weights by the logsumexp that is known, and the gradients of the scores by those of the weights.
template <class Weight, class Real> __global__ void softmax_gradient(const Rows x)
{
    const Row<Real, Real> row(x);
    const Real logsumexp = ((const Real *)x.logsumexp)[row.place()];
    const Real delta = ((const Real *)x.delta)[row.place()];
    Real *slopes = (Real *)x.slopes + blockIdx.x * x.pitch, of_cap = 0;

    for (integer first = 0; first < x.keys; first += blockDim.x) {
        const integer j = first + threadIdx.x;
        Real weight = 0, slope = 0;
        if (j < x.keys) {
            const Real s = row.score(j);
            if (s != row.none) {
                weight = exp(s - logsumexp);
                slope = weight * (slopes[j] - delta);
                if (row.softcap > 0) {
                    const Real inner = row.scores[j] / row.softcap, bent = tanh(inner);
                    const Real flatness = 1 - bent * bent;
                    of_cap += slope * (bent - inner * flatness);
                    slope *= flatness;
                }
            }
        }
        if (sizeof(Weight) < sizeof(Real)) __syncthreads();
        if (j < x.keys) {
            ((Weight *)row.scores)[j] = (Weight)weight;
            ((Weight *)slopes)[j] = (Weight)slope;
        }
    }
    if (!x.cap_slopes) return;
    __shared__ Real sums[MOST_THREADS];
    sums[threadIdx.x] = of_cap;
    for (unsigned int half = blockDim.x / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) ((Real *)x.cap_slopes)[row.place()] = sums[0];
}
