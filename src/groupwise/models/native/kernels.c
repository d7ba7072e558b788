/* Fused loops for bf16 and fp32 models on CPUs: what lies between the matrix products of a layer; decode steps, their products too; and, on
 * processors with matrix units, all products.
 *
 * PyTorch runs each of these as a chain of operations, every one a pass over memory and a meeting of all threads. A decode step has
 * some 1,500 of them. Here each chain is one loop. The file needs no header of PyTorch's: it is compiled in about two seconds, at the
 * first use on a machine (build.py), and called with plain addresses (calls.py). Written with vector extensions that GCC and Clang have
 * for every processor; nothing is specific to one but that the low half of a number comes first in memory. Only the products of bf16
 * and of bytes, at the end, are for processors that have instructions for them.
 *
 * `number` is what a model is made of: bf16, or fp32 where this is compiled with -DFP32. Arithmetic is fp32 within a loop, and is rounded
 * once, when stored. No result depends on the number of threads, since each row, head or product's number is one thread's from start to
 * end.
 *
 * Axes: B rows, H query heads, K key-value heads, U = H / K, E head width, P prompt positions, C own positions, V vocabulary, D model
 * width, F feed-forward width.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Numbers in a register. Vectors of several registers would be split by the compiler, which GCC does through memory. */
#ifdef __AVX512F__
enum { LANES = 16 };
#define LOW_PAIRS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_PAIRS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
enum { LANES = 8 };
#define LOW_PAIRS 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_PAIRS 4, 12, 5, 13, 6, 14, 7, 15
#else
enum { LANES = 4 };
#define LOW_PAIRS 0, 4, 1, 5
#define HIGH_PAIRS 2, 6, 3, 7
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#ifdef FP32
typedef float number;

static inline float widen(number x) { return x; }

static inline number narrow(float x) { return x; }

static inline vec load(const number *p) { return *(const vec *)p; }

static inline vec rounded(vec x) { return x; }

static inline void store(number *p, vec x) { *(vec *)p = x; }

/* 2 * LANES numbers: the first half, and the second. */
static inline void load_pairs(const number *p, vec *one, vec *two) {
    *one = load(p);
    *two = load(p + LANES);
}

static inline void store_pairs(number *p, vec one, vec two) {
    store(p, one);
    store(p + LANES, two);
}

static inline void in_order(float *to, vec one, vec two) { store_pairs(to, one, two); }

#else
typedef uint16_t number;

static inline float widen(number x) {
    uint32_t b = (uint32_t)x << 16;
    float y;
    memcpy(&y, &b, 4);
    return y;
}

static inline number narrow(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return (number)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

static inline vec load(const number *p) {
    return (vec)(__builtin_convertvector(*(const half_vec *)p, bits) << 16);
}

static inline vec rounded(vec x) { /* to nearest, ties to even; the value stays in fp32 */
    bits b = (bits)x;
    b += 0x7fff + ((b >> 16) & 1);
    return (vec)(b & 0xffff0000u);
}

static inline void store(number *p, vec x) {
    *(half_vec *)p = __builtin_convertvector(((bits)rounded(x)) >> 16, half_vec);
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "load_pairs takes the low half of a word for the first of two numbers");

/* 2 * LANES numbers: those at even places, and those at odd ones. An operation a vector less than reading them in order. */
static inline void load_pairs(const number *p, vec *one, vec *two) {
    const bits both = *(const bits *)p;
    *one = (vec)(both << 16);
    *two = (vec)(both & 0xffff0000u);
}

static inline void store_pairs(number *p, vec one, vec two) {
    *(bits *)p = ((bits)rounded(one) >> 16) | (bits)rounded(two);
}

#ifdef __clang__
#define CHOOSE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define CHOOSE(A, B, ...) __builtin_shuffle(A, B, (mask){__VA_ARGS__})
#endif

/* Pairs in order again. */
static inline void in_order(float *to, vec one, vec two) {
    *(vec *)to = CHOOSE(one, two, LOW_PAIRS);
    *(vec *)(to + LANES) = CHOOSE(one, two, HIGH_PAIRS);
}
#endif

static inline vec splat(float x) { return x - (vec){0}; }

static inline vec pick(mask where, vec yes, vec no) { return (vec)(((bits)where & (bits)yes) | (~(bits)where & (bits)no)); }

static inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

static inline float sum(vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

static inline float largest(vec x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* e^x to about 1e-7 relative: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r, and n into the exponent. Below the smallest
 * normal number: 0. NaN stays NaN: a step that went wrong has to be seen. */
static inline vec exponential(vec given) {
    mask tiny = given < -87.0f;
    vec x = pick(given > 88.0f, splat(88.0f), pick(tiny, splat(-87.0f), given));
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer nearest lands in the low bits */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec power = pick(tiny, splat(0), (vec)((bits)p + ((bits)shifted << 23)));
    return pick(given == given, power, given);
}

static inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* One row of a norm: x * scale, rounded, times weight; with an offset x * scale * (offset + weight), rounded once (Gemma's). */
static inline void norm_row(const number *x, const number *weight, number *out, int64_t width, float scale, float offset) {
    if (offset == 0)
        for (int64_t i = 0; i < width; i += LANES) store(out + i, rounded(load(x + i) * scale) * load(weight + i));
    else
        for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * (offset + load(weight + i)));
}

/* x += y (y may be NULL), then out = x / rms(x) * (offset + weight), row by row. */
void gw_add_norm(
    number *x, const number *y, const number *weight, number *out, int64_t rows, int64_t width, float epsilon, float offset) {
#pragma omp parallel for schedule(static) if (rows * width > 65536)
    for (int64_t row = 0; row < rows; row++) {
        number *in = x + row * width, *to = out + row * width;
        vec squares = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            vec v = load(in + i);
            if (y) {
                v = rounded(v + load(y + row * width + i));
                store(in + i, v);
            }
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum(squares) / width + epsilon);
        norm_row(in, weight, to, width, scale, offset);
    }
}

/* In place: the norm of each query and key head of qkv [rows, H + 2K, E]. */
void gw_norm_heads(
    number *qkv, const number *q_weight, const number *k_weight, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
    float epsilon, float offset) {
#pragma omp parallel for schedule(static) if (rows * heads * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        number *q = qkv + row * (heads + 2 * kv_heads) * width, *k = q + heads * width;
        gw_add_norm(q, NULL, q_weight, q, heads, width, epsilon, offset);
        gw_add_norm(k, NULL, k_weight, k, kv_heads, width, epsilon, offset);
    }
}

/* GELU by tanh is g * sigmoid(GELU_SLOPE * (g + GELU_CUBE * g^3)), since tanh(x) = 2 sigmoid(2 x) - 1; SiLU is g * sigmoid(g). */
#define GELU_SLOPE 1.595769122f
#define GELU_CUBE 0.044715f

/* out = act(gate) * up for gate_up [rows, 2F]; act is SiLU, or GELU by tanh. */
void gw_gated(const number *gate_up, number *out, int64_t rows, int64_t width, int gelu) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; row++) {
        const number *gate = gate_up + 2 * row * width, *up = gate + width;
        if (gelu)
            for (int64_t i = 0; i < width; i += LANES) {
                vec g = load(gate + i);
                store(out + row * width + i, g * sigmoid(GELU_SLOPE * (g + GELU_CUBE * g * g * g)) * load(up + i));
            }
        else
            for (int64_t i = 0; i < width; i += LANES) {
                vec g = load(gate + i);
                store(out + row * width + i, g * sigmoid(g) * load(up + i));
            }
    }
}

/* Scores of `queries` (1 to 4) heads against 2 * LANES keys whose columns lie `stride` apart. */
#define SCORES(QUERIES)                                                                                                   \
    static void scores_##QUERIES(const float *q, const number *keys, int64_t stride, int64_t width, float *to, int64_t room) { \
        vec one[QUERIES] = {{0}}, two[QUERIES] = {{0}}, a, b;                                                             \
        for (int64_t e = 0; e < width; e++) {                                                                             \
            load_pairs(keys + e * stride, &a, &b);                                                                        \
            for (int u = 0; u < QUERIES; u++) one[u] += a * q[u * width + e], two[u] += b * q[u * width + e];             \
        }                                                                                                                 \
        for (int u = 0; u < QUERIES; u++) in_order(to + u * room, one[u], two[u]);                                        \
    }
SCORES(1) SCORES(2) SCORES(3) SCORES(4)

/* Add to `queries` (1 to 4) heads' outputs, at 2 * LANES of their places, the values of `count` positions by their weights. Each 2 *
 * LANES outputs are held as load_pairs gives them. */
#define VALUES(QUERIES)                                                                                                   \
    static void values_##QUERIES(                                                                                         \
        const float *weights, int64_t room, const number *values, int64_t count, int64_t width, float *to) {              \
        vec one[QUERIES], two[QUERIES], a, b;                                                                             \
        for (int u = 0; u < QUERIES; u++) one[u] = *(vec *)(to + u * width), two[u] = *(vec *)(to + u * width + LANES);   \
        for (int64_t c = 0; c < count; c++) {                                                                             \
            load_pairs(values + c * width, &a, &b);                                                                       \
            for (int u = 0; u < QUERIES; u++) one[u] += a * weights[u * room + c], two[u] += b * weights[u * room + c];   \
        }                                                                                                                 \
        for (int u = 0; u < QUERIES; u++) *(vec *)(to + u * width) = one[u], *(vec *)(to + u * width + LANES) = two[u];   \
    }
VALUES(1) VALUES(2) VALUES(3) VALUES(4)

typedef void (*scores_of)(const float *, const number *, int64_t, int64_t, float *, int64_t);
typedef void (*values_of)(const float *, int64_t, const number *, int64_t, int64_t, float *);
static const scores_of SCORES_OF[] = {scores_1, scores_2, scores_3, scores_4};
static const values_of VALUES_OF[] = {values_1, values_2, values_3, values_4};

/* Scores of U heads against the first `count` of keys stored [E, room]. */
static void score(const float *q, int64_t heads, const number *keys, int64_t count, int64_t room, int64_t width, float *to, int64_t line) {
    for (int64_t c = 0; c < count; c += 2 * LANES)
        for (int64_t u = 0; u < heads; u += 4)
            SCORES_OF[(heads - u < 4 ? heads - u : 4) - 1](q + u * width, keys + c, room, width, to + u * line + c, line);
}

static void weigh(const float *weights, int64_t heads, int64_t line, const number *values, int64_t count, int64_t width, float *to) {
    for (int64_t e = 0; e < width; e += 2 * LANES)
        for (int64_t u = 0; u < heads; u += 4)
            VALUES_OF[(heads - u < 4 ? heads - u : 4) - 1](weights + u * line, line, values + e, count, width, to + u * width + e);
}

/* In place: e^(s - max) over both parts of a line; returns the sum. The first `hidden` of a part, and what lies between its end and the
 * next multiple of 2 * LANES, are set to 0. */
static float soften(
    float *prompt, int64_t prompt_count, int64_t prompt_hidden, float *own, int64_t own_count, int64_t own_hidden) {
    float *parts[] = {prompt, own};
    int64_t counts[] = {prompt_count, own_count}, hidden[] = {prompt_hidden, own_hidden};
    vec most = splat(-INFINITY), total = {0};
    for (int part = 0; part < 2; part++) {
        for (int64_t c = 0; c < hidden[part]; c++) parts[part][c] = -INFINITY;
        for (int64_t c = counts[part]; c % (2 * LANES); c++) parts[part][c] = -INFINITY;
        for (int64_t c = 0; c < counts[part]; c += LANES) most = larger(*(vec *)(parts[part] + c), most);
    }
    float top = largest(most);
    for (int part = 0; part < 2; part++)
        for (int64_t c = 0; c < counts[part]; c += LANES) {
            vec w = exponential(*(vec *)(parts[part] + c) - top);
            total += w;
            *(vec *)(parts[part] + c) = w;
        }
    return sum(total);
}

/* The rotary embedding of one head (two halves), times `scale`, rounded before scaling. */
static void rotate(const number *x, const number *cosine, const number *sine, int64_t width, float scale, float *to) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        *(vec *)(to + i) = rounded(a * c - b * s) * scale;
        *(vec *)(to + half + i) = rounded(b * c + a * s) * scale;
    }
}

/* One decode step's attention: rotates the fed token's queries and key, appends its key and value, and attends to prompt and own
 * tokens. qkv [B, H + 2K, E]; cosine, sine [B, E/2]; own_keys [B, K, E, C], own_values [B, K, C, E]; prompt_keys [S, K, E, P],
 * prompt_values [S, K, P, E]; own_lengths [B] before this token; group_of_row [B]; prompt_lengths [S]; out [B, H, E].
 * C and P are multiples of 32, E too. A token sees the last `window` positions, itself included; all where it is 0. */
void gw_decode_attention(
    const number *qkv, const number *cosine, const number *sine, number *own_keys, number *own_values, const number *prompt_keys,
    const number *prompt_values, const int64_t *own_lengths, const int64_t *group_of_row, const int64_t *prompt_lengths, number *out,
    int64_t rows, int64_t heads, int64_t kv_heads, int64_t width, int64_t own_room, int64_t prompt_room, int64_t window,
    float scale) {
    const int64_t unit = heads / kv_heads, line = prompt_room + own_room;
#pragma omp parallel
    {
        float *q = malloc(sizeof(float) * unit * (2 * width + line));
        float *sums = q + unit * width, *weights = sums + unit * width;
#pragma omp for schedule(dynamic, 4)
        for (int64_t task = 0; task < rows * kv_heads; task++) {
            const int64_t row = task / kv_heads, k = task % kv_heads, at = own_lengths[row], group = group_of_row[row];
            const number *in = qkv + row * (heads + 2 * kv_heads) * width;
            const number *c = cosine + row * width / 2, *s = sine + row * width / 2;
            number *keys = own_keys + task * width * own_room, *values = own_values + task * width * own_room;
            rotate(in + (heads + k) * width, c, s, width, 1.0f, q);
            for (int64_t e = 0; e < width; e++) keys[e * own_room + at] = narrow(q[e]);
            memcpy(values + at * width, in + (heads + kv_heads + k) * width, width * sizeof(number));
            for (int64_t u = 0; u < unit; u++) rotate(in + (k * unit + u) * width, c, s, width, scale, q + u * width);

            const int64_t prompt = prompt_lengths[group], head = (group * kv_heads + k) * width * prompt_room;
            const int64_t past = window && prompt + at + 1 > window ? prompt + at + 1 - window : 0; /* positions out of sight */
            const int64_t hidden = past < prompt ? past : prompt, own_hidden = past - hidden;
            const int64_t p = hidden / (2 * LANES) * 2 * LANES, o = own_hidden / (2 * LANES) * 2 * LANES; /* whole blocks are skipped */
            score(q, unit, prompt_keys + head + p, prompt - p, prompt_room, width, weights + p, line);
            score(q, unit, keys + o, at + 1 - o, own_room, width, weights + prompt_room + o, line);
            memset(sums, 0, sizeof(float) * unit * width);
            float totals[unit];
            for (int64_t u = 0; u < unit; u++) {
                float *to = weights + u * line;
                totals[u] = soften(to + p, prompt - p, hidden - p, to + prompt_room + o, at + 1 - o, own_hidden - o);
            }
            weigh(weights + p, unit, line, prompt_values + head + p * width, prompt - p, width, sums);
            weigh(weights + prompt_room + o, unit, line, values + o * width, at + 1 - o, width, sums);
            for (int64_t u = 0; u < unit; u++)
                for (int64_t e = 0; e < width; e += 2 * LANES) {
                    const vec *pair = (vec *)(sums + u * width + e);
                    store_pairs(out + (row * heads + k * unit + u) * width + e, pair[0] / totals[u], pair[1] / totals[u]);
                }
        }
        free(q);
    }
}

static double uniform(int64_t key, int64_t position) { /* splitmix64, as models/ops.py has it */
    uint64_t x = (uint64_t)key + (uint64_t)(position + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

enum { BLOCK = 256 };

static vec scaled(const number *logits, int64_t at, int64_t count, float temperature) {
    if (at + LANES <= count) return load(logits + at) / temperature;
    vec part;
    for (int i = 0; i < LANES; i++) {
        part[i] = (at + i < count ? widen(logits[at + i]) : -INFINITY) / temperature;
    }
    return part;
}

/* One token a row by the inverse of the cumulative distribution of softmax(logits / temperature), and its log-probability.
 * With `greedy`, the most likely token (the first of equals). logits [B, V]; keys, positions [B]. */
void gw_draw(
    const number *logits, const int64_t *keys, const int64_t *positions, int64_t *tokens, float *logprobs, int64_t rows,
    int64_t vocabulary, float temperature, int greedy) {
    const int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        double *mass = malloc(sizeof(double) * blocks);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            const number *in = logits + row * vocabulary;
            vec most = splat(-INFINITY);
            for (int64_t i = 0; i < vocabulary; i += LANES) most = larger(scaled(in, i, vocabulary, temperature), most);
            const float top = largest(most);
            double total = 0;
            for (int64_t block = 0; block < blocks; block++) {
                vec part = {0};
                int64_t end = (block + 1) * BLOCK < vocabulary ? (block + 1) * BLOCK : vocabulary;
                for (int64_t i = block * BLOCK; i < end; i += LANES)
                    part += exponential(scaled(in, i, vocabulary, temperature) - top);
                mass[block] = total += sum(part);
            }
            int64_t token = -1;
            float weight = 1.0f;
            if (greedy) {
                for (int64_t i = 0; token < 0 && i < vocabulary; i += LANES) {
                    vec part = scaled(in, i, vocabulary, temperature);
                    for (int j = 0; token < 0 && j < LANES && i + j < vocabulary; j++)
                        if (part[j] == top) token = i + j;
                }
            } else {
                const double target = uniform(keys[row], positions[row]) * total;
                int64_t block = 0;
                while (block < blocks - 1 && mass[block] <= target) block++;
                double before = block ? mass[block - 1] : 0.0;
                /* Rounding can carry the target past the block's last weight; then its last token that has any weight is right. */
                for (int64_t i = block * BLOCK, found = 0; !found && i < (block + 1) * BLOCK && i < vocabulary; i += LANES) {
                    vec part = exponential(scaled(in, i, vocabulary, temperature) - top);
                    for (int j = 0; !found && j < LANES && i + j < vocabulary; j++)
                        if (part[j] > 0) {
                            token = i + j, weight = part[j], before += part[j];
                            found = before > target;
                        }
                }
            }
            tokens[row] = token < 0 ? 0 : token; /* only where all logits are NaN */
            logprobs[row] = token < 0 ? NAN : (float)log((double)weight / total);
        }
        free(mass);
    }
}

/* ---- Learning: element-wise passes, forward and backward ---- */

static vec load_part(const number *p, int64_t count) { /* past `count`: zeros */
    if (count >= LANES) return load(p);
    number part[LANES] = {0};
    memcpy(part, p, count * sizeof(number));
    return load(part);
}

static void store_part(number *p, vec x, int64_t count) {
    if (count >= LANES) {
        store(p, x);
        return;
    }
    number part[LANES];
    store(part, x);
    memcpy(p, part, count * sizeof(number));
}

static inline vec counting(void) {
    vec x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

/* out = x / rms(x) * (offset + weight), and 1 / rms of each row. */
void gw_norm(
    const number *x, const number *weight, number *out, float *scales, int64_t rows, int64_t width, float epsilon, float offset) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *in = x + row * width;
        vec squares = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            vec v = load(in + i);
            squares += v * v;
        }
        const float scale = scales[row] = 1.0f / sqrtf(sum(squares) / width + epsilon);
        norm_row(in, weight, out + row * width, width, scale, offset);
    }
}

/* Gradients of gw_norm. grad_x gets `residual` added (unless NULL); the weight's gradient is summed in `parts` [ceil(rows / chunk), D],
 * one line for each `chunk` rows. */
void gw_norm_backward(
    const number *grad, const number *x, const float *scales, const number *weight, const number *residual, number *grad_x, float *parts,
    int64_t rows, int64_t width, int64_t chunk, float offset) {
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < (rows + chunk - 1) / chunk; part++) {
        float *sums = parts + part * width;
        memset(sums, 0, width * sizeof(float));
        for (int64_t row = part * chunk; row < rows && row < (part + 1) * chunk; row++) {
            const int64_t at = row * width;
            const float scale = scales[row];
            vec products = {0};
            for (int64_t i = 0; i < width; i += LANES) {
                vec g = load(grad + at + i), normal = load(x + at + i) * scale;
                *(vec *)(sums + i) += g * normal;
                products += g * (offset + load(weight + i)) * normal;
            }
            const float dot = sum(products) / width;
            for (int64_t i = 0; i < width; i += LANES) {
                vec back = (load(grad + at + i) * (offset + load(weight + i)) - load(x + at + i) * scale * dot) * scale;
                if (residual) back = rounded(back) + load(residual + at + i);
                store(grad_x + at + i, back);
            }
        }
    }
}

/* Gradient of gw_gated's input, and its output once more. */
void gw_gated_backward(
    const number *grad, const number *gate_up, number *grad_gate_up, number *out, int64_t rows, int64_t width, int gelu) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t gate = 2 * row * width, up = gate + width, at = row * width;
        if (gelu)
            for (int64_t i = 0; i < width; i += LANES) {
                vec g = load(gate_up + gate + i), u = load(gate_up + up + i), d = load(grad + at + i);
                vec s = sigmoid(GELU_SLOPE * (g + GELU_CUBE * g * g * g)), slope = GELU_SLOPE * (1.0f + 3 * GELU_CUBE * g * g);
                store(out + at + i, g * s * u);
                store(grad_gate_up + gate + i, d * u * s * (1.0f + g * slope * (1.0f - s)));
                store(grad_gate_up + up + i, d * g * s);
            }
        else for (int64_t i = 0; i < width; i += LANES) {
            vec g = load(gate_up + gate + i), u = load(gate_up + up + i), d = load(grad + at + i), s = sigmoid(g);
            store(out + at + i, g * s * u);
            store(grad_gate_up + gate + i, d * u * s * (1.0f + g * (1.0f - s)));
            store(grad_gate_up + up + i, d * g * s);
        }
    }
}

/* How many keys a line of scores may see: lines are queries x unit heads, again and again; query i sees offset + i + 1 keys.
 * offset < 0: all. */
static inline int64_t seen(int64_t line, int64_t queries, int64_t unit, int64_t offset, int64_t keys) {
    return offset < 0 ? keys : offset + line % (queries * unit) / unit + 1;
}

/* Set the scores of keys before the first that a line may see to minus infinity: `low` [queries], or NULL where there are none. */
static inline void hide(number *scores, const int64_t *low, int64_t line, int64_t queries, int64_t unit) {
    const int64_t first = low ? low[line % (queries * unit) / unit] : 0;
    for (int64_t i = 0; i < first; i++) scores[i] = narrow(-INFINITY);
}

/* In place: e^(s - max) of each line of scores [lines, keys] where the line may see, else 0; the max, and the sum of the new line. */
void gw_soften(
    number *scores, number *top, float *total, const int64_t *low, int64_t lines, int64_t keys, int64_t queries, int64_t unit,
    int64_t offset) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < lines; line++) {
        number *s = scores + line * keys;
        const int64_t count = seen(line, queries, unit, offset, keys);
        hide(s, low, line, queries, unit);
        vec most = splat(-INFINITY), sums = {0};
        const vec places = counting();
        for (int64_t i = 0; i < count; i += LANES)
            most = larger(pick(places < (float)(count - i), load_part(s + i, keys - i), most), most);
        const float highest = largest(most);
        for (int64_t i = 0; i < keys; i += LANES) {
            vec w = {0};
            if (i < count)
                w = pick(places < (float)(count - i), rounded(exponential(load_part(s + i, keys - i) - highest)), w);
            sums += w;
            store_part(s + i, w, keys - i);
        }
        top[line] = narrow(highest);
        total[line] = sum(sums);
    }
}

/* In place, for lines as of gw_soften: scores to weights w = e^(s - top), and grads g to (g - delta) w. */
void gw_soften_backward(
    number *scores, number *grads, const number *top, const number *delta, const int64_t *low, int64_t lines, int64_t keys,
    int64_t queries, int64_t unit, int64_t offset) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < lines; line++) {
        number *s = scores + line * keys, *g = grads + line * keys;
        const int64_t count = seen(line, queries, unit, offset, keys);
        hide(s, low, line, queries, unit);
        const float t = widen(top[line]), d = widen(delta[line]);
        const vec places = counting();
        for (int64_t i = 0; i < keys; i += LANES) {
            vec w = {0};
            if (i < count)
                w = pick(places < (float)(count - i), rounded(exponential(load_part(s + i, keys - i) - t)), w);
            store_part(g + i, (load_part(g + i, keys - i) - d) * w, keys - i);
            store_part(s + i, w, keys - i);
        }
    }
}

/* Rows of `heads` x `bytes` each, at index [sequences * queries] (or, where it is NULL, from `first` on), to heads of rows:
 * out [sequences, heads, queries] x `bytes`. With `back`, the other way round. */
void gw_by_heads(
    char *rows, const int64_t *index, int64_t first, char *out, int64_t sequences, int64_t queries, int64_t heads, int64_t bytes,
    int back) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < sequences * queries; i++) {
        char *row = rows + (index ? index[i] : first + i) * heads * bytes;
        char *to = out + (i / queries * heads * queries + i % queries) * bytes;
        for (int64_t head = 0; head < heads; head++) {
            if (back) memcpy(row + head * bytes, to + head * queries * bytes, bytes);
            else memcpy(to + head * queries * bytes, row + head * bytes, bytes);
        }
    }
}

/* As gw_by_heads back to rows, added to what is there; `width` numbers a head. No row may be named twice, but for row `skipped`. */
void gw_add_by_heads(
    number *rows, const int64_t *index, int64_t skipped, const number *values, int64_t sequences, int64_t queries, int64_t heads,
    int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < sequences * queries; i++) {
        if (index[i] == skipped) continue;
        number *row = rows + index[i] * heads * width;
        const number *from = values + (i / queries * heads * queries + i % queries) * width;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t e = 0; e < width; e += LANES) {
                number *at = row + head * width + e;
                store(at, load(at) + load(from + head * queries * width + e));
            }
    }
}

/* For each line of E numbers: delta = (grad . out) / total, and grad / total. */
void gw_delta(
    const number *grad, const number *out, const float *total, number *delta, number *divided, int64_t lines, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t line = 0; line < lines; line++) {
        const float factor = 1.0f / total[line];
        vec products = {0};
        for (int64_t i = line * width; i < (line + 1) * width; i += LANES) {
            vec g = load(grad + i);
            products += g * load(out + i);
            store(divided + i, g * factor);
        }
        delta[line] = narrow(sum(products) * factor);
    }
}

/* Take a slice of logits [rows, columns], divided by the temperature, into each row's running maximum, sum of e^(l - max) and (unless
 * NULL) sum of e^(l - max) (l - max). */
void gw_take_logits(
    const number *logits, float *top, float *total, float *weighted, int64_t rows, int64_t columns, float temperature) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *in = logits + row * columns;
        vec most = splat(-INFINITY), sums = {0}, products = {0};
        const float factor = 1.0f / temperature;
        for (int64_t i = 0; i < columns; i += LANES) {
            vec l = load_part(in + i, columns - i);
            most = larger(pick(counting() < (float)(columns - i), l, most), most);
        }
        const float least = -3.4e38f / fmaxf(factor, 1); /* of a slice of -inf: its product with the factor is finite */
        const float peak = fmaxf(largest(most), least), before = top[row], highest = fmaxf(before, peak * factor);
        const float below = fminf(peak * factor - before, 0); /* how far the slice's maximum lies below the highest */
        for (int64_t i = 0; i < columns; i += LANES) {
            vec moved = (load_part(in + i, columns - i) - peak) * factor + below; /* 0 at the maximum, also where it is fused */
            vec w = pick(counting() < (float)(columns - i), exponential(moved), splat(0));
            sums += w;
            products += w * moved;
        }
        const float moved = before - highest, shrink = expf(moved);
        if (weighted) weighted[row] = (total[row] ? (weighted[row] + total[row] * moved) * shrink : 0) + sum(products);
        total[row] = total[row] * shrink + sum(sums);
        top[row] = highest;
    }
}

/* Logits [rows, columns] to their gradient, in place, with p = e^(l / temperature - normaliser): grad (onehot(target) - p) - entropy's
 * p (log p + entropy) grad_entropy. targets count from the slice's first column; grad_entropy and entropy may be NULL. */
void gw_logit_gradients(
    number *logits, const float *normaliser, const float *grad, const float *grad_entropy, const float *entropy,
    const int64_t *targets, int64_t rows, int64_t columns, float temperature) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        number *in = logits + row * columns;
        const int64_t target = targets[row];
        const float factor = 1.0f / temperature, g = grad[row], of_entropy = entropy ? grad_entropy[row] : 0;
        const float h = entropy ? entropy[row] : 0;
        float chosen = 0;
        if (target >= 0 && target < columns) {
            const volatile float scaled = widen(in[target]) * factor; /* volatile: rounded, as in the normaliser, and not fused */
            const float log_p = scaled - normaliser[row], p = expf(log_p);
            chosen = g - p * (g + of_entropy * (log_p + h)); /* in fp32: where p is near 1, little is left of onehot - p */
        }
        for (int64_t i = 0; i < columns; i += LANES) {
            vec log_p = load_part(in + i, columns - i) * factor - normaliser[row];
            store_part(in + i, -exponential(log_p) * (g + of_entropy * (log_p + h)), columns - i);
        }
        if (target >= 0 && target < columns) in[target] = narrow(chosen);
    }
}

/* The rotary embedding of the first `turned` of `heads` heads of x [rows, heads, E] into out (not x); the rest is copied. `inverse`
 * turns back. */
void gw_rotate(
    const number *x, const number *cosine, const number *sine, number *out, int64_t rows, int64_t heads, int64_t turned, int64_t width,
    int inverse) {
    const int64_t half = width / 2;
    const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < turned; head++) {
            const int64_t at = (row * heads + head) * width;
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = load(x + at + i), b = load(x + at + half + i);
                vec c = load(cosine + row * half + i), s = load(sine + row * half + i) * sign;
                store(out + at + i, a * c - b * s);
                store(out + at + half + i, b * c + a * s);
            }
        }
        const int64_t rest = (row * heads + turned) * width;
        memcpy(out + rest, x + rest, (heads - turned) * width * sizeof(number));
    }
}

#ifndef FP32
/* ---- Weights rounded from fp32: masters, and adapters merged ---- */

enum { GOLDEN = 0x9E37, PLASTIC = 0xC13F }; /* as models/merging.py has them */

/* `count` rows of gw_merge from `row` on. */
static inline __attribute__((always_inline)) void merge_rows(
    const number *frozen, const float *a, const float *b, number *out, int64_t row, const int count, int64_t width, int64_t rank,
    float scaling) {
    bits steps;
    for (int i = 0; i < LANES; i++) steps[i] = (uint32_t)i * PLASTIC;
    for (int64_t c = 0; c < width; c += LANES) {
        vec sums[8] = {{0}};
        for (int64_t r = 0; r < rank; r++) {
            const vec of_a = *(const vec *)(a + r * width + c);
            for (int q = 0; q < count; q++) sums[q] += of_a * b[(row + q) * rank + r];
        }
        for (int q = 0; q < count; q++) {
            const vec exact = load(frozen + (row + q) * width + c) + sums[q] * scaling;
            const bits thresholds = (steps + (uint32_t)(row + q) * GOLDEN + (uint32_t)c * PLASTIC) & 0xffff;
            *(half_vec *)(out + (row + q) * width + c) = __builtin_convertvector(((bits)exact + thresholds) >> 16, half_vec);
        }
    }
}

/* out = frozen + scaling * b a, rounded by the thresholds of merging.py's `dithered`; frozen, out [rows, width], a [rank, width] and
 * b [rows, rank] in fp32. */
void gw_merge(
    const number *frozen, const float *a, const float *b, number *out, int64_t rows, int64_t width, int64_t rank, float scaling) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row += 8) {
        if (row + 8 <= rows) merge_rows(frozen, a, b, out, row, 8, width, rank, scaling);
        else
            for (int64_t last = row; last < rows; last++) merge_rows(frozen, a, b, out, last, 1, width, rank, scaling);
    }
}

/* fp32 `exact` [rows, width], rows from `start` of their tensor on, into out, rounded by the thresholds of merging.py's `dithered`. */
void gw_dither(const float *exact, number *out, int64_t start, int64_t rows, int64_t width) {
    bits steps;
    for (int i = 0; i < LANES; i++) steps[i] = (uint32_t)i * PLASTIC;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t *in = (const uint32_t *)(exact + row * width);
        number *to = out + row * width;
        const uint32_t first = (uint32_t)(start + row) * GOLDEN;
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) {
            const bits thresholds = (steps + first + (uint32_t)c * PLASTIC) & 0xffff;
            *(half_vec *)(to + c) = __builtin_convertvector((*(const bits *)(in + c) + thresholds) >> 16, half_vec);
        }
        for (; c < width; c++) to[c] = (in[c] + ((first + (uint32_t)c * PLASTIC) & 0xffff)) >> 16;
    }
}
#endif

#if defined(FP32) || (defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VNNI__))
/* ---- Matrix products of decode steps, and the steps ----
 *
 * The weight is packed: panels of columns, in which the numbers at one depth lie beside each other, so that they are read from end to end.
 * A product's number is one sum through its numbers in a fixed order, whatever rows and columns are beside it, rounded once. Threads take
 * panels as they become free: where another program has half of a core, equal shares fixed at the start took 1.4 times as long. */
enum { STEP = 32, PANEL = 256 }; /* PANEL: rows at a time, which stay in the cache */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t whole_steps(int64_t x) { return (x + STEP - 1) / STEP * STEP; }

/* Columns that a thread takes at a time. */
static inline int64_t grain_of(int64_t columns) { return columns < 2048 ? STEP : columns < 8192 ? 4 * STEP : 8 * STEP; }

#if defined(__AVX__)
#include <immintrin.h>
#endif

#ifdef FP32
/* A weight [columns, depth] to panels of WIDE columns, of [depth, WIDE] each. */
enum { WIDE = 2 * LANES };

void gw_pack(const number *weight, number *out, int64_t columns, int64_t depth) {
    enum { PART = 16 }; /* numbers of a line of the cache */
    const int64_t deep = whole_steps(depth);
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t j = 0; j < whole_steps(columns); j += WIDE)
        for (int64_t c = 0; c < deep; c += PART)
            for (int64_t w = 0; w < WIDE; w++)
                for (int64_t i = c; i < c + PART; i++)
                    out[j * deep + i * WIDE + w] = j + w < columns && i < depth ? weight[(j + w) * depth + i] : 0;
}

#else
enum { WIDE = STEP, TILE = 16, PACKED = 2 * TILE * STEP };

/* `count` rows or columns of `depth` numbers. `by_depth`: the numbers at one depth lie beside each other, else those of one row or column;
 * `line` from one such line to the next. */
typedef struct {
    const number *at;
    int64_t line, count, depth;
    int by_depth;
} operand;

static inline __mmask32 first_of(int64_t count) { return count >= 32 ? ~(__mmask32)0 : count <= 0 ? 0 : ((__mmask32)1 << count) - 1; }

/* Transpose 16 x 16 numbers of 32 bits. */
static inline void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            x[i + 2 * h] = _mm512_unpacklo_epi64(y[i + h], y[i + 2 + h]);
            x[i + 2 * h + 1] = _mm512_unpackhi_epi64(y[i + h], y[i + 2 + h]);
        }
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 16; h += 8) {
            y[i + h] = _mm512_shuffle_i32x4(x[i + h], x[i + h + 4], 0x88);
            y[i + h + 4] = _mm512_shuffle_i32x4(x[i + h], x[i + h + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

/* 32 rows or columns from `first` on, at depths start .. end, as pairs of tiles, in pairs of rows where `pairs`; zeros past the end. */
static void pack(const operand *from, int64_t first, int64_t start, int64_t end, int pairs, number *to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t c = start; c < end; c += STEP, to += PACKED) {
        __m512i one[16], two[16];
        if (from->by_depth) {
            const __mmask32 there = first_of(from->count - first);
            for (int i = 0; i < 16; i++) {
                const number *row = from->at + (c + 2 * i) * from->line + first;
                _mm_prefetch((const char *)(row + STEP * from->line), _MM_HINT_T0); /* they lie too far apart to be foreseen */
                _mm_prefetch((const char *)(row + (STEP + 1) * from->line), _MM_HINT_T0);
                const __m512i even = _mm512_maskz_loadu_epi16(c + 2 * i < from->depth ? there : 0, row);
                const __m512i odd = _mm512_maskz_loadu_epi16(c + 2 * i + 1 < from->depth ? there : 0, row + from->line);
                one[i] = _mm512_permutex2var_epi16(even, low, odd);
                two[i] = _mm512_permutex2var_epi16(even, high, odd);
            }
        } else {
            const __mmask32 there = first_of(from->depth - c);
            for (int i = 0; i < 16; i++) {
                const number *row = from->at + (first + i) * from->line + c;
                one[i] = _mm512_maskz_loadu_epi16(first + i < from->count ? there : 0, row);
                two[i] = _mm512_maskz_loadu_epi16(first + i + TILE < from->count ? there : 0, row + TILE * from->line);
            }
        }
        if (from->by_depth != pairs) transpose(one), transpose(two);
        for (int i = 0; i < 16; i++) {
            _mm512_store_si512(to + STEP * i, one[i]);
            _mm512_store_si512(to + STEP * (TILE + i), two[i]);
        }
    }
}

/* A weight [columns, depth], each rounded up to a multiple of 32, to panels of 32 columns: pairs of tiles, in pairs of rows. */
void gw_pack(const number *weight, number *out, int64_t columns, int64_t depth) {
    const operand from = {weight, depth, columns, depth, 0};
    const int64_t deep = whole_steps(depth);
#pragma omp parallel for schedule(dynamic, 8)
    for (int64_t j = 0; j < columns; j += STEP) pack(&from, j, 0, deep, 1, out + j * deep);
}
#endif

/* ---- Weights of 8 bits ----
 *
 * A number is a whole one, -127 to 127, times its column's scale. Panels of WIDE columns lie as [depth / TAKEN, WIDE, TAKEN], the depth
 * rounded up to whole lines of the cache: TAKEN pairs of numbers are multiplied at a time for one sum. A row of inputs is whole numbers of
 * 16 bits times a scale of its own: with a row's largest number 127 * 256 times the scale, the error of each is below 1 / 65,024 of that.
 * Processors with instructions for bytes have each as 256 high + low, two of 8 bits, and multiply four pairs of bytes at a time. On others
 * with vectors weights are widened to 16 bits in the registers, and two pairs of such multiplied at a time, whose sums are exact for PART
 * depths. */
enum { LINE = 64, MOST_HIGH = 127 * 256 };
#if !defined(FP32) && defined(__linux__) && \
    ((defined(__AMX_BF16__) && defined(__AMX_INT8__)) || (defined(__AMXBF16__) && defined(__AMXINT8__))) /* GCC's names, Clang's */
#define MATRIX_UNITS
#elif defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define BYTES_BY_DOTS /* of unsigned weights, 128 more, with signed inputs */
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define BYTES_BY_PAIRS
#endif
#ifdef BYTES_BY_DOTS
enum { SHIFT = 128 };
#else
enum { SHIFT = 0 };
#endif
#ifdef BYTES_BY_PAIRS
enum { TAKEN = 2 };
#else
enum { TAKEN = 4 };
#endif

static inline int64_t whole_lines(int64_t x) { return (x + LINE - 1) / LINE * LINE; }

/* The largest magnitude of a row. Numbers without their signs are ordered as their bits are. */
static inline float largest_of(const number *x, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
#ifdef FP32
        uint32_t of;
        memcpy(&of, x + i, 4);
        of &= 0x7fffffff;
#else
        const uint32_t of = (uint32_t)(x[i] & 0x7fff) << 16;
#endif
        most = of > most ? of : most;
    }
    float found;
    memcpy(&found, &most, 4);
    return found;
}

/* A weight [columns, depth] to the nearest whole numbers, and a scale for each column. */
void gw_pack_8bit(const number *weight, int8_t *out, float *scales, int64_t columns, int64_t depth) {
    const int64_t deep = whole_lines(depth);
#pragma omp parallel
    {
        int8_t *column = calloc(deep, 1);
#pragma omp for schedule(dynamic, 8)
        for (int64_t j = 0; j < whole_steps(columns); j += WIDE)
            for (int64_t w = 0; w < WIDE; w++) {
                const number *from = weight + (j + w) * depth;
                const int there = j + w < columns;
                const float most = there ? largest_of(from, depth) : 0, inverse = most == 0 ? 0 : 127 / most;
                scales[j + w] = most / 127;
                for (int64_t i = 0; i < depth; i++) column[i] = there ? (int8_t)(int32_t)rintf(widen(from[i]) * inverse) : 0;
                for (int64_t i = 0; i < deep; i += TAKEN)
                    for (int64_t k = 0; k < TAKEN; k++) out[j * deep + i * WIDE + TAKEN * w + k] = (int8_t)(column[i + k] ^ SHIFT);
            }
        free(column);
    }
}

#if defined(MATRIX_UNITS) || defined(BYTES_BY_DOTS)
/* A row of inputs in bytes, high [depth] and low [depth], with zeros up to `deep`; returns the scale. */
static float split_row(const number *restrict x, int64_t depth, int64_t deep, int8_t *restrict high, int8_t *restrict low) {
    const float most = largest_of(x, depth), inverse = most == 0 ? 0 : MOST_HIGH / most;
    for (int64_t i = 0; i < depth; i++) {
        const int32_t whole = (int32_t)rintf(widen(x[i]) * inverse);
        low[i] = (int8_t)whole;
        high[i] = (int8_t)((whole + 128) >> 8);
    }
    memset(high + depth, 0, deep - depth);
    memset(low + depth, 0, deep - depth);
    return most / MOST_HIGH;
}
#endif

#ifdef MATRIX_UNITS
/* ---- Matrix products on the processor's matrix units (Intel's AMX), for learning too ----
 *
 * A unit multiplies tiles of 16 rows of 64 bytes: one step adds to 16 x 16 sums the products over 32 numbers. The left tile holds 16 rows
 * of 32 numbers each; the right one 16 pairs of rows, in which the numbers of the two rows alternate. Both are packed here from what lies
 * in memory, so that transposed operands cost no pass of their own. */
#include <sys/syscall.h>
#include <unistd.h>

/* At most so much depth at a time; so many columns whose sums are held meanwhile; so many packed numbers; larger results go around the
 * cache. */
enum { DEEPEST = 1792, WIDEST = 1024, HELD = 1 << 24, LARGE = 1 << 20 };

int omp_get_max_threads(void);

/* `count` in parts of at most `most`: how large, if they are alike. */
static inline int64_t evenly(int64_t count, int64_t most) {
    const int64_t parts = (count + most - 1) / most;
    return whole_steps((count + parts - 1) / parts);
}

/* Begin with tiles of 16 x 64 bytes in this thread. */
static inline void take_tiles(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = TILE;
    __asm__ volatile("ldtilecfg %0" ::"m"(shape)); /* GCC takes what _tile_loadconfig reads for unused */
}

static inline void leave_tiles(void) { __asm__ volatile("tilerelease"); }

static inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* 32 x 32 sums on their way out, [4, 16, 16]: where they go, how many rows are written already, and what is added to each column. */
typedef struct {
    const float *sums;
    number *to;
    int64_t columns, written, rows;
    __m512 low, high;
    __mmask32 there;
    int past;
} block;

/* The sums of `out` [rows, columns] from `row` and `column` on, with `bias` for each column if there is one. `past`: around the cache. */
static inline block block_at(
    const float *sums, const number *bias, number *out, int64_t row, int64_t column, int64_t rows, int64_t columns, int past) {
    const __mmask32 there = first_of(columns - column);
    const __m512i both = bias ? _mm512_maskz_loadu_epi16(there, bias + column) : _mm512_setzero_si512();
    return (block){
        sums, out + row * columns + column, columns, 0, least(STEP, rows - row), widened(_mm512_castsi512_si256(both)),
        widened(_mm512_extracti64x4_epi64(both, 1)), there, past};
}

/* Write up to `count` rows more. */
static inline __attribute__((always_inline)) void put_sums(block *b, int64_t count) {
    for (const int64_t end = least(b->rows, b->written + count); b->written < end; b->written++) {
        const float *from = b->sums + b->written / TILE * 512 + b->written % TILE * TILE;
        number *to = b->to + b->written * b->columns;
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(
            _mm512_add_ps(_mm512_load_ps(from + 256), b->high), _mm512_add_ps(_mm512_load_ps(from), b->low));
        if (b->past) _mm512_stream_si512((__m512i *)to, both);
        else _mm512_mask_storeu_epi16(to, b->there, both);
    }
}

/* Add the products of 32 rows and 32 columns, `length` numbers of each, to `sums` [4, 16, 16]; with `fresh` to zeros. `whole`: whether
 * there are more than 16 rows. Meanwhile `lines` pieces of 64 bytes a step, from `soon` on, are fetched into the cache, and the sums
 * `before` these, which may lie in the same place, are written: the units need not wait for that. */
static inline __attribute__((always_inline)) void add_products(
    const number *left, const number *right, int64_t length, float *sums, int fresh, int whole, const number *soon, int64_t lines,
    block *before) {
    __asm__ volatile("" ::: "memory"); /* GCC does not know that _tile_loadd reads memory */
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    }
    for (int64_t at = 0; at < length * STEP; at += PACKED) {
        for (int64_t i = 0; i < lines; i++, soon += STEP) _mm_prefetch((const char *)soon, _MM_HINT_T1);
        _tile_loadd(4, left + at, 64);
        _tile_loadd(6, right + at, 64);
        if (whole) _tile_loadd(5, left + at + TILE * STEP, 64);
        _tile_loadd(7, right + at + TILE * STEP, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (whole) _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (whole) _tile_dpbf16ps(3, 5, 7);
        put_sums(before, 2);
    }
    put_sums(before, STEP);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* Whether this process may use the units: asked of the system once. */
int gw_may_multiply(void) {
    enum { REQUEST = 0x1023, TILES = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

/* out [rows, columns] = a [rows, depth] times b [depth, columns], with bias [columns] added unless NULL; depth > 0. a_line, b_line: from
 * one line in memory to the next; `by_depth` as for an operand: 1 for a transposed a, 0 for a transposed b. */
void gw_multiply(
    const number *a, const number *b, const number *bias, number *out, int64_t a_line, int64_t b_line, int64_t rows, int64_t columns,
    int64_t depth, int a_by_depth, int b_by_depth) {
    const operand left = {a, a_line, rows, depth, a_by_depth}, right = {b, b_line, columns, depth, b_by_depth};
    /* The smaller one is packed whole, or so many rows or columns of it as stay in the cache; threads take panels of the other as they
     * become free. */
    const int by_rows = rows >= columns;
    const operand *walked = by_rows ? &left : &right, *kept = by_rows ? &right : &left;
    const int64_t deep = whole_steps(depth), part = evenly(deep, DEEPEST);
    const int64_t most = whole_steps(HELD / deep + 1), width = evenly(kept->count, part < deep ? least(WIDEST, most) : most);
    const int64_t panels = 4 * omp_get_max_threads(), panel = least(PANEL, whole_steps((walked->count + panels - 1) / panels));
    const int past = columns % STEP == 0 && (uintptr_t)out % 64 == 0 && rows * columns > LARGE;
    number *held = aligned_alloc(64, width * deep * sizeof(number));
#pragma omp parallel
    {
        number *taken = aligned_alloc(64, panel * part * sizeof(number));
        float *sums = aligned_alloc(64, (part < deep ? panel * width : STEP * STEP) * sizeof(float));
        block before = {0};
        take_tiles();
        for (int64_t from = 0; from < kept->count; from += width) {
            const int64_t wide = least(width, whole_steps(kept->count - from));
#pragma omp for schedule(dynamic) collapse(2)
            for (int64_t c = 0; c < deep; c += part)
                for (int64_t j = 0; j < wide; j += STEP) {
                    const int64_t end = least(c + part, deep);
                    pack(kept, from + j, c, end, by_rows, held + c * wide + j * (end - c));
                }
#pragma omp for schedule(dynamic)
            for (int64_t at = 0; at < walked->count; at += panel) {
                const int64_t high = least(panel, whole_steps(walked->count - at));
                for (int64_t c = 0; c < deep; c += part) {
                    const int64_t length = least(c + part, deep) - c;
                    for (int64_t i = 0; i < high; i += STEP) pack(walked, at + i, c, c + length, !by_rows, taken + i * length);
                    for (int64_t j = 0; j < wide; j += STEP)
                        for (int64_t i = 0; i < high; i += STEP) {
                            float *sum = sums + (part < deep ? j * panel + i * STEP : 0);
                            const number *x = taken + i * length, *y = held + c * wide + j * length;
                            const number *soon = y + (STEP + STEP * i / panel) * length; /* a share of the next columns */
                            const int64_t lines = (STEP * STEP + panel - 1) / panel;
                            add_products(by_rows ? x : y, by_rows ? y : x, length, sum, c == 0, 1, soon, lines, &before);
                            if (c + part < deep) continue;
                            const int64_t row = by_rows ? at + i : from + j, column = by_rows ? from + j : at + i;
                            before = block_at(sum, bias, out, row, column, rows, columns, past);
                        }
                }
                put_sums(&before, STEP);
            }
        }
        _mm_sfence();
        free(taken);
        free(sums);
        leave_tiles();
    }
    free(held);
}

/* Write 16 rows of 32 columns: `sums` [4, 16, 16] are those of high bytes and of low ones, each in two halves. */
static inline void put_bytes(
    const int32_t *sums, const float *row_scales, const float *scales, const number *bias, number *out, int64_t row, int64_t column,
    int64_t rows, int64_t columns) {
    const block to = block_at(NULL, bias, out, row, column, rows, columns, 0);
    const __m512 by[2] = {_mm512_loadu_ps(scales + column), _mm512_loadu_ps(scales + column + TILE)}, more[2] = {to.low, to.high};
    for (int64_t r = 0; r < least(TILE, to.rows); r++) {
        const __m512 row_scale = _mm512_set1_ps(row_scales[row + r]);
        __m512 half[2];
        for (int h = 0; h < 2; h++) {
            const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums + h * 256 + r * TILE));
            const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums + 512 + h * 256 + r * TILE));
            const __m512 sum = _mm512_fmadd_ps(high, _mm512_set1_ps(256), low);
            half[h] = _mm512_fmadd_ps(sum, _mm512_mul_ps(row_scale, by[h]), more[h]);
        }
        _mm512_mask_storeu_epi16(to.to + r * columns, to.there, (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]));
    }
}

/* gw_multiply_packed with a weight of 8 bits. */
static void multiply_8bit(
    const number *x, const int8_t *packed, const float *scales, const number *bias, number *out, int64_t rows, int64_t columns,
    int64_t depth) {
    const int64_t deep = whole_lines(depth), grain = grain_of(columns), most = least(PANEL, (rows + TILE - 1) / TILE * TILE);
    int8_t *held = aligned_alloc(LINE, 2 * most * deep); /* [rows / 16, depth / 64, high and low, 16, 64] */
    float *row_scales = malloc(rows * sizeof(float));
#pragma omp parallel
    {
        int32_t sums[2][1024] __attribute__((aligned(64)));
        int8_t *row = malloc(2 * deep);
        take_tiles();
        for (int64_t first = 0; first < rows; first += PANEL) { /* so many rows as stay in the cache */
            const int64_t count = least(PANEL, rows - first);
            int64_t before[2] = {-1, -1}, turn = 0;
#pragma omp for schedule(static)
            for (int64_t r = 0; r < count; r++) { /* what other rows of a tile hold, nobody reads */
                int8_t *to = held + 2 * (r / TILE * TILE) * deep + r % TILE * LINE;
                row_scales[first + r] = split_row(x + (first + r) * depth, depth, deep, row, row + deep);
                for (int64_t c = 0; c < deep; c += LINE, to += 2 * TILE * LINE) {
                    memcpy(to, row + c, LINE);
                    memcpy(to + TILE * LINE, row + deep + c, LINE);
                }
            }
#pragma omp for schedule(dynamic)
            for (int64_t at = 0; at < columns; at += grain)
                for (int64_t j = at; j < least(at + grain, columns); j += STEP)
                    for (int64_t i = 0; i < count; i += TILE) {
                        const int8_t *left = held + 2 * i * deep, *right = packed + j * deep;
                        __asm__ volatile("" ::: "memory");
                        _tile_zero(0);
                        _tile_zero(1);
                        _tile_zero(2);
                        _tile_zero(3);
                        for (int64_t c = 0; c < deep; c += LINE, left += 2 * TILE * LINE, right += STEP * LINE) {
                            if (i == 0)
                                for (int64_t k = 0; k < STEP; k++) _mm_prefetch((const char *)(right + (4 * STEP + k) * LINE), _MM_HINT_T1);
                            _tile_loadd(4, left, LINE);
                            _tile_loadd(5, left + TILE * LINE, LINE);
                            _tile_loadd(6, right, 2 * LINE);
                            _tile_loadd(7, right + LINE, 2 * LINE);
                            _tile_dpbssd(0, 4, 6);
                            _tile_dpbssd(1, 4, 7);
                            _tile_dpbssd(2, 5, 6);
                            _tile_dpbssd(3, 5, 7);
                        }
                        if (before[0] >= 0) /* the units need not wait for that */
                            put_bytes(sums[1 - turn], row_scales, scales, bias, out, before[0], before[1], rows, columns);
                        int32_t *to = sums[turn];
                        _tile_stored(0, to, LINE);
                        _tile_stored(1, to + 256, LINE);
                        _tile_stored(2, to + 512, LINE);
                        _tile_stored(3, to + 768, LINE);
                        __asm__ volatile("" ::: "memory"); /* GCC does not know that _tile_stored writes memory */
                        before[0] = first + i, before[1] = j, turn = 1 - turn;
                    }
            if (before[0] >= 0) put_bytes(sums[1 - turn], row_scales, scales, bias, out, before[0], before[1], rows, columns);
        }
        leave_tiles();
        free(row);
    }
    free(held);
    free(row_scales);
}

/* gw_multiply_packed with a weight as it is: the numbers are those of gw_multiply. */
static void multiply_whole(
    const number *x, const number *packed, const number *bias, number *out, int64_t rows, int64_t columns, int64_t depth) {
    const operand left = {x, depth, rows, depth, 0};
    const int64_t deep = whole_steps(depth), grain = grain_of(columns);
    number *held = aligned_alloc(64, least(PANEL, whole_steps(rows)) * deep * sizeof(number));
    for (int64_t first = 0; first < rows; first += PANEL) { /* so many rows as stay in the cache */
        const int64_t end = least(first + PANEL, rows);
        for (int64_t i = first; i < end; i += STEP) pack(&left, i, 0, deep, 0, held + (i - first) * deep);
#pragma omp parallel
        {
            float sums[STEP * STEP] __attribute__((aligned(64)));
            block before = {0};
            take_tiles();
#pragma omp for schedule(dynamic)
            for (int64_t at = 0; at < columns; at += grain)
                for (int64_t i = first; i < end; i += STEP)
                    for (int64_t j = at; j < least(at + grain, columns); j += STEP) {
                        const number *y = packed + j * deep;
                        add_products(
                            held + (i - first) * deep, y, deep, sums, 1, rows > i + TILE, y + 2 * PACKED, i > first ? 0 : STEP, &before);
                        before = block_at(sums, bias, out, i, j, rows, columns, 0);
                    }
            put_sums(&before, STEP);
            leave_tiles();
        }
    }
    free(held);
}
#else
/* For DEEP numbers of each sum at a time: a panel's, in two registers, and those of a row of x, which all columns take. */
#ifdef FP32
enum { DEEP = 1 };
typedef vec lines;
typedef float factor;

static inline void take_lines(const number *panel, int64_t depth, lines *one, lines *two) {
    __builtin_prefetch(panel + (depth + STEP) * WIDE, 0, 2);
    if (WIDE > 16) __builtin_prefetch(panel + (depth + STEP) * WIDE + 16, 0, 2);
    *one = load(panel + depth * WIDE), *two = load(panel + depth * WIDE + LANES);
}

static inline factor factor_of(const number *x) { return *x; }

static inline vec add_lines(vec sum, lines by, factor x) { return sum + by * x; }
#else
enum { DEEP = 2 };
typedef __m512bh lines;
typedef __m512bh factor;

static inline void take_lines(const number *panel, int64_t depth, lines *one, lines *two) {
    const number *at = panel + depth / STEP * PACKED + depth % STEP / 2 * STEP;
    _mm_prefetch((const char *)(at + 2 * PACKED), _MM_HINT_T1);
    _mm_prefetch((const char *)(at + 2 * PACKED + TILE * STEP), _MM_HINT_T1);
    *one = (lines)_mm512_loadu_si512(at), *two = (lines)_mm512_loadu_si512(at + TILE * STEP);
}

static inline factor factor_of(const number *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (factor)_mm512_set1_epi32(pair);
}

static inline vec add_lines(vec sum, lines by, factor x) { return (vec)_mm512_dpbf16_ps((__m512)sum, by, x); }
#endif

/* Sums of ROWS rows of x against a panel, to [ROWS, WIDE]. */
#define SUMS(ROWS)                                                                                                    \
    static void sums_##ROWS(const number *x, int64_t line, const number *panel, int64_t depth, float *to) {           \
        vec one[ROWS] = {{0}}, two[ROWS] = {{0}};                                                                     \
        for (int64_t d = 0; d < depth; d += DEEP) {                                                                   \
            lines a, b;                                                                                               \
            take_lines(panel, d, &a, &b);                                                                             \
            for (int r = 0; r < ROWS; r++) {                                                                          \
                const factor f = factor_of(x + r * line + d);                                                         \
                one[r] = add_lines(one[r], a, f), two[r] = add_lines(two[r], b, f);                                   \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < ROWS; r++) *(vec *)(to + r * WIDE) = one[r], *(vec *)(to + r * WIDE + LANES) = two[r];    \
    }
SUMS(1) SUMS(2) SUMS(3) SUMS(4) SUMS(5) SUMS(6)
#ifdef __AVX512F__
SUMS(7) SUMS(8) SUMS(9) SUMS(10) SUMS(11) SUMS(12)
#endif

typedef void (*sums_of)(const number *, int64_t, const number *, int64_t, float *);
static const sums_of SUMS_OF[] = { /* as many as there are registers for */
    sums_1, sums_2, sums_3, sums_4, sums_5, sums_6,
#ifdef __AVX512F__
    sums_7, sums_8, sums_9, sums_10, sums_11, sums_12,
#endif
};
enum { MOST = sizeof SUMS_OF / sizeof *SUMS_OF };

/* WIDE sums of a row to out, from column `j` of `columns` on, with its bias added unless NULL. */
static inline void put_row(float *sum, const number *bias, number *out, int64_t j, int64_t columns) {
    const int64_t wide = least(WIDE, columns - j);
    if (bias)
        for (int64_t c = 0; c < wide; c++) sum[c] += widen(bias[j + c]);
    if (wide == WIDE) store(out + j, *(vec *)sum), store(out + j + LANES, *(vec *)(sum + LANES));
    else
        for (int64_t c = 0; c < wide; c++) out[j + c] = narrow(sum[c]);
}

#ifdef BYTES_BY_DOTS
/* To each sum, four products of weights and inputs. */
static inline mask add_dots(mask sum, mask weights, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
#ifdef __AVX512F__
    return (mask)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#else
    return (mask)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(four));
#endif
}

/* A row of inputs in 2 * deep bytes, high and low, and what the weights are larger by times these; returns the scale. */
static float hold_row(const number *x, int64_t depth, int64_t deep, int8_t *held, uint32_t *shifts) {
    const float scale = split_row(x, depth, deep, held, held + deep);
    for (int64_t h = 0; h < 2; h++) {
        int32_t sum = 0;
        for (int64_t c = 0; c < deep; c++) sum += held[h * deep + c];
        shifts[h] = (uint32_t)SHIFT * (uint32_t)sum;
    }
    return scale;
}

/* Sums of ROWS rows of x, [high and low, depth] of bytes, against a panel, to [ROWS, WIDE], with the rows' `shifts` taken off; they may
 * have gone around the 32 bits, and come back. */
#define BYTE_SUMS(ROWS)                                                                                                      \
    static void byte_sums_##ROWS(                                                                                            \
        const int8_t *x, int64_t line, const int8_t *panel, int64_t depth, const uint32_t *shifts, float *to) {              \
        mask sums[ROWS][4] = {{{0}}};                                                                                        \
        for (int64_t d = 0; d < depth; d += 4) {                                                                             \
            __builtin_prefetch(panel + (d + LINE) * WIDE, 0, 2);                                                             \
            if (LANES == 16) __builtin_prefetch(panel + (d + LINE) * WIDE + LINE, 0, 2);                                     \
            const mask one = *(const mask *)(panel + d * WIDE), two = *(const mask *)(panel + d * WIDE + 4 * LANES);         \
            for (int r = 0; r < ROWS; r++) {                                                                                 \
                const int8_t *high = x + r * line + d, *low = high + line / 2;                                                \
                sums[r][0] = add_dots(sums[r][0], one, high), sums[r][1] = add_dots(sums[r][1], two, high);                  \
                sums[r][2] = add_dots(sums[r][2], one, low), sums[r][3] = add_dots(sums[r][3], two, low);                    \
            }                                                                                                                \
        }                                                                                                                    \
        for (int r = 0; r < ROWS; r++)                                                                                       \
            for (int h = 0; h < 2; h++) {                                                                                    \
                const bits high = (bits)sums[r][h] - shifts[2 * r], low = (bits)sums[r][2 + h] - shifts[2 * r + 1];          \
                *(vec *)(to + r * WIDE + h * LANES) =                                                                        \
                    __builtin_convertvector((mask)high, vec) * 256.0f + __builtin_convertvector((mask)low, vec);             \
            }                                                                                                                \
    }
BYTE_SUMS(1) BYTE_SUMS(2) BYTE_SUMS(3)
#ifdef __AVX512F__
BYTE_SUMS(4) BYTE_SUMS(5) BYTE_SUMS(6)
#endif
#endif

#ifdef BYTES_BY_PAIRS
enum { PART = 512 }; /* depths whose products, each at most 127 * 127 * 256, stay below 2^31 */

/* A row of inputs in 2 * deep bytes, as whole numbers of 16 bits; returns the scale. Nothing is shifted. */
static float hold_row(const number *x, int64_t depth, int64_t deep, int8_t *held, uint32_t *shifts) {
    int16_t *to = (int16_t *)held;
    const float most = largest_of(x, depth), inverse = most == 0 ? 0 : MOST_HIGH / most;
    for (int64_t i = 0; i < depth; i++) to[i] = (int16_t)(int32_t)rintf(widen(x[i]) * inverse);
    memset(to + depth, 0, (deep - depth) * sizeof *to);
    (void)shifts;
    return most / MOST_HIGH;
}

/* For each of LANES columns two weights times two inputs, and their sum. */
static inline mask of_pairs(const int8_t *weights, const int8_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
#ifdef __AVX512F__
    return (mask)_mm512_madd_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights)), _mm512_set1_epi32(two));
#else
    return (mask)_mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)weights)), _mm256_set1_epi32(two));
#endif
}

/* Sums of ROWS rows of x against a panel, to [ROWS, WIDE]: whole numbers for PART depths at a time, and floats over these. */
#define BYTE_SUMS(ROWS)                                                                                                      \
    static void byte_sums_##ROWS(                                                                                            \
        const int8_t *x, int64_t line, const int8_t *panel, int64_t depth, const uint32_t *shifts, float *to) {              \
        memset(to, 0, ROWS * WIDE * sizeof *to);                                                                             \
        for (int64_t start = 0; start < depth; start += PART) {                                                              \
            mask one[ROWS] = {{0}}, two[ROWS] = {{0}};                                                                       \
            for (int64_t d = start; d < least(start + PART, depth); d += 2) {                                                \
                const int8_t *weights = panel + d * WIDE;                                                                    \
                __builtin_prefetch(weights + LINE * WIDE, 0, 2);                                                             \
                for (int r = 0; r < ROWS; r++) {                                                                             \
                    const int8_t *of = x + r * line + 2 * d;                                                                 \
                    one[r] += of_pairs(weights, of), two[r] += of_pairs(weights + 2 * LANES, of);                            \
                }                                                                                                            \
            }                                                                                                                \
            for (int r = 0; r < ROWS; r++) {                                                                                 \
                *(vec *)(to + r * WIDE) += __builtin_convertvector(one[r], vec);                                             \
                *(vec *)(to + r * WIDE + LANES) += __builtin_convertvector(two[r], vec);                                     \
            }                                                                                                                \
        }                                                                                                                    \
        (void)shifts;                                                                                                        \
    }
BYTE_SUMS(1) BYTE_SUMS(2) BYTE_SUMS(3) BYTE_SUMS(4) BYTE_SUMS(5) BYTE_SUMS(6)
#ifdef __AVX512F__
BYTE_SUMS(7) BYTE_SUMS(8) BYTE_SUMS(9) BYTE_SUMS(10) BYTE_SUMS(11) BYTE_SUMS(12)
#endif
#endif

#if defined(BYTES_BY_DOTS) || defined(BYTES_BY_PAIRS)
typedef void (*byte_sums_of)(const int8_t *, int64_t, const int8_t *, int64_t, const uint32_t *, float *);
static const byte_sums_of BYTE_SUMS_OF[] = {
    byte_sums_1, byte_sums_2, byte_sums_3,
#if defined(__AVX512F__) || defined(BYTES_BY_PAIRS)
    byte_sums_4, byte_sums_5, byte_sums_6,
#endif
#if defined(__AVX512F__) && defined(BYTES_BY_PAIRS)
    byte_sums_7, byte_sums_8, byte_sums_9, byte_sums_10, byte_sums_11, byte_sums_12,
#endif
};
enum { MOST_BYTES = sizeof BYTE_SUMS_OF / sizeof *BYTE_SUMS_OF };

/* gw_multiply_packed with a weight of 8 bits. */
static void multiply_8bit(
    const number *x, const int8_t *packed, const float *scales, const number *bias, number *out, int64_t rows, int64_t columns,
    int64_t depth) {
    const int64_t deep = whole_lines(depth), line = 2 * deep, grain = grain_of(columns);
    int8_t *held = malloc(rows * line);
    float *row_scales = malloc(rows * sizeof(float));
    uint32_t *shifts = malloc(2 * rows * sizeof(uint32_t));
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) row_scales[i] = hold_row(x + i * depth, depth, deep, held + i * line, shifts + 2 * i);
        for (int64_t first = 0; first < rows; first += PANEL) { /* so many rows as stay in the cache */
            const int64_t count = least(PANEL, rows - first), blocks = (count + MOST_BYTES - 1) / MOST_BYTES;
            const int64_t high = (count + blocks - 1) / blocks;
#pragma omp for schedule(dynamic)
            for (int64_t at = 0; at < columns; at += grain)
                for (int64_t j = at; j < least(at + grain, columns); j += WIDE)
                    for (int64_t i = first; i < first + count; i += high) {
                        float sums[MOST_BYTES * WIDE];
                        const int64_t taken = least(high, first + count - i);
                        BYTE_SUMS_OF[taken - 1](held + i * line, line, packed + j * deep, depth, shifts + 2 * i, sums);
                        for (int64_t r = 0; r < taken; r++) {
                            float *sum = sums + r * WIDE;
                            for (int64_t c = 0; c < WIDE; c++) sum[c] *= row_scales[i + r] * scales[j + c];
                            put_row(sum, bias, out + (i + r) * columns, j, columns);
                        }
                    }
        }
    }
    free(held);
    free(row_scales);
    free(shifts);
}
#else
/* gw_multiply_packed with a weight of 8 bits, a panel of which is widened for all rows. */
static void multiply_8bit(
    const number *x, const int8_t *packed, const float *scales, const number *bias, number *out, int64_t rows, int64_t columns,
    int64_t depth) {
    const int64_t deep = whole_lines(depth), grain = grain_of(columns), blocks = (rows + MOST - 1) / MOST;
    const int64_t high = (rows + blocks - 1) / blocks;
#pragma omp parallel
    {
        number *panel = malloc(WIDE * deep * sizeof(number));
#pragma omp for schedule(dynamic)
        for (int64_t at = 0; at < columns; at += grain)
            for (int64_t j = at; j < least(at + grain, columns); j += WIDE) {
                for (int64_t i = 0; i < WIDE * deep; i += 4 * LANES) { /* four depths of LANES columns */
                    const int8_t *from = packed + j * deep + i;
                    __builtin_prefetch(from + 16 * LINE, 0, 2);
                    const bits four = *(const bits *)from;
                    for (int k = 0; k < 4; k++)
                        store(panel + i / (4 * WIDE) * 4 * WIDE + k * WIDE + i / 4 % WIDE,
                              __builtin_convertvector((mask)(four << (24 - 8 * k)) >> 24, vec));
                }
                for (int64_t i = 0; i < rows; i += high) {
                    float sums[MOST * WIDE];
                    const int64_t taken = least(high, rows - i);
                    SUMS_OF[taken - 1](x + i * depth, depth, panel, depth, sums);
                    for (int64_t r = 0; r < taken; r++) {
                        for (int64_t c = 0; c < WIDE; c++) sums[r * WIDE + c] *= scales[j + c];
                        put_row(sums + r * WIDE, bias, out + (i + r) * columns, j, columns);
                    }
                }
            }
        free(panel);
    }
}
#endif

/* gw_multiply_packed with a weight as it is. */
static void multiply_whole(
    const number *x, const number *packed, const number *bias, number *out, int64_t rows, int64_t columns, int64_t depth) {
    const int64_t deep = whole_steps(depth), grain = grain_of(columns);
    number *held = NULL;
    if (depth % DEEP) { /* with a 0 at each row's end */
        held = calloc(rows * deep, sizeof(number));
        for (int64_t i = 0; i < rows; i++) memcpy(held + i * deep, x + i * depth, depth * sizeof(number));
    }
    const number *from = held ? held : x;
    const int64_t line = held ? deep : depth;
    for (int64_t first = 0; first < rows; first += PANEL) { /* so many rows as stay in the cache */
        const int64_t count = least(PANEL, rows - first), blocks = (count + MOST - 1) / MOST, high = (count + blocks - 1) / blocks;
#pragma omp parallel for schedule(dynamic)
        for (int64_t at = 0; at < columns; at += grain)
            for (int64_t j = at; j < least(at + grain, columns); j += WIDE)
                for (int64_t i = first; i < first + count; i += high) {
                    float sums[MOST * WIDE];
                    const int64_t taken = least(high, first + count - i);
                    SUMS_OF[taken - 1](from + i * line, line, packed + j * deep, depth, sums);
                    for (int64_t r = 0; r < taken; r++) put_row(sums + r * WIDE, bias, out + (i + r) * columns, j, columns);
                }
    }
    free(held);
}
#endif

/* out [rows, columns] = x [rows, depth] times a packed weight, with bias [columns] added unless NULL: for few rows, whose time is that
 * of reading the weight. With `scales` it is of 8 bits. */
void gw_multiply_packed(
    const number *x, const void *weight, const float *scales, const number *bias, number *out, int64_t rows, int64_t columns,
    int64_t depth) {
    if (scales) multiply_8bit(x, weight, scales, bias, out, rows, columns, depth);
    else multiply_whole(x, weight, bias, out, rows, columns, depth);
}

/* A layer as models/layer.py has it, the weights of its products as gw_pack lays them out, or gw_pack_8bit, whose scales follow. What its
 * family does not have is NULL. */
typedef struct {
    const number *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *post_norm, *gate_up, *down, *attention_norm,
        *feed_forward_norm;
    const float *qkv_scales, *output_scales, *gate_up_scales, *down_scales;
} layer;

/* What a layer's attention reads and appends to, as gw_decode_attention takes it. */
typedef struct {
    number *own_keys, *own_values;
    const number *prompt_keys, *prompt_values, *cosine, *sine;
    int64_t window;
} layer_cache;

/* All layers of a decode step: x [B, D] becomes the residual stream before the last addition, and `added` [B, D] what is still to be added
 * to it. The numbers are those of the same kernels called one by one. scratch [B, D + (2H + 2K) E + 3F]. */
void gw_decode_layers(
    const layer *layers, const layer_cache *caches, number *x, number *added, number *scratch, const int64_t *own_lengths,
    const int64_t *group_of_row, const int64_t *prompt_lengths, int64_t count, int64_t rows, int64_t depth, int64_t heads,
    int64_t kv_heads, int64_t width, int64_t inner, int64_t own_room, int64_t prompt_room, float scale, float epsilon, float offset,
    int gelu) {
    const int64_t line = (heads + 2 * kv_heads) * width;
    number *normed = scratch, *qkv = normed + rows * depth, *attended = qkv + rows * line, *gate_up = attended + rows * heads * width;
    number *active = gate_up + rows * 2 * inner;
    for (const layer *l = layers; l < layers + count; l++, caches++) {
        gw_add_norm(x, l > layers ? added : NULL, l->input_norm, normed, rows, depth, epsilon, offset);
        gw_multiply_packed(normed, l->qkv, l->qkv_scales, l->qkv_bias, qkv, rows, line, depth);
        if (l->q_norm) gw_norm_heads(qkv, l->q_norm, l->k_norm, rows, heads, kv_heads, width, epsilon, offset);
        gw_decode_attention(
            qkv, caches->cosine, caches->sine, caches->own_keys, caches->own_values, caches->prompt_keys, caches->prompt_values,
            own_lengths, group_of_row, prompt_lengths, attended, rows, heads, kv_heads, width, own_room, prompt_room, caches->window,
            scale);
        gw_multiply_packed(attended, l->output, l->output_scales, l->output_bias, added, rows, depth, heads * width);
        if (l->attention_norm) gw_add_norm(added, NULL, l->attention_norm, added, rows, depth, epsilon, offset);
        gw_add_norm(x, added, l->post_norm, normed, rows, depth, epsilon, offset);
        gw_multiply_packed(normed, l->gate_up, l->gate_up_scales, NULL, gate_up, rows, 2 * inner, depth);
        gw_gated(gate_up, active, rows, inner, gelu);
        gw_multiply_packed(active, l->down, l->down_scales, NULL, added, rows, depth, inner);
        if (l->feed_forward_norm) gw_add_norm(added, NULL, l->feed_forward_norm, added, rows, depth, epsilon, offset);
    }
}
#endif
