// For one CPU core: decode attention and sampling of the generation engine, all layers of its decode step, and the
// decoder's element-wise parts, with gradients for the trainer.
// Built and called by native.py; every function has a plain torch counterpart that the tests compare it with.
//
// T is float or bfloat16 (stored as 16 bits, computed in float). Rows are contiguous unless a stride is given;
// strides count elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "native_products.h"

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

namespace {

typedef int32_t i8 __attribute__((vector_size(32)));
typedef float v8 __attribute__((vector_size(32)));
typedef float loose8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2)));

struct bf16 {
    uint16_t bits;
};

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
    uint32_t wide = uint32_t(p->bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
inline void store(float* p, float x) { *p = x; }
inline void store(bf16* p, float x) {  // to nearest even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    uint32_t rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
    p->bits = (wide & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : uint16_t(rounded);
}
template <class T> inline float rounded(float x) {
    T out;
    store(&out, x);
    return load(&out);
}

inline v8 load8(const float* p) { return *reinterpret_cast<const loose8*>(p); }
inline v8 load8(const bf16* p) {
    u8 wide = __builtin_convertvector(*reinterpret_cast<const h8*>(p), u8) << 16;
    return reinterpret_cast<v8>(wide);
}
inline float sum8(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// e^x to about 2 ulp for x <= 0 (0 below -87); NaN gives NaN. Cephes' polynomial; plain arithmetic, so loops vectorise.
inline float exp_negative(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t exponent = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

template <class T> float inverse_rms(const T* x, int64_t width, float epsilon) {
    float total = 0;
    for (int64_t i = 0; i < width; ++i) total += load(x + i) * load(x + i);
    return 1.0f / std::sqrt(total / float(width) + epsilon);
}

// `inverses`: 1 / rms of each row, for the gradient (null: not wanted).
template <class T>
void rms_norm(const T* x, const T* weight, T* out, float* inverses, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
        float inverse = inverse_rms(x, width, epsilon);
        if (inverses) inverses[row] = inverse;
        for (int64_t i = 0; i < width; ++i)
            store(out + i, rounded<T>(load(x + i) * inverse) * load(weight + i));
    }
}

// Gradients of a weight are summed over so many rows in float, then in double.
const int64_t SUMMED_ROWS = 256;

// grad and out may be the same row. total += grad * x / rms(x).
inline void norm_row_backward(const float* grad, const float* x, const float* weight, float inverse, float* out,
                              float* total, int64_t width) {
    float along = 0;
    for (int64_t i = 0; i < width; ++i) along += grad[i] * weight[i] * x[i];
    along *= inverse * inverse / float(width);
#pragma GCC ivdep
    for (int64_t i = 0; i < width; ++i) {
        total[i] += grad[i] * x[i] * inverse;
        out[i] = (grad[i] * weight[i] - x[i] * along) * inverse;
    }
}

void add_up(std::vector<float>& block, std::vector<double>& total) {
    for (size_t i = 0; i < block.size(); ++i) total[i] += double(block[i]);
    std::fill(block.begin(), block.end(), 0.0f);
}

void rms_norm_backward(const float* grad, const float* x, const float* weight, const float* inverses, float* grad_x,
                       float* grad_weight, int64_t rows, int64_t width) {
    std::vector<float> block(width);
    std::vector<double> total(width);
    for (int64_t row = 0; row < rows; ++row, grad += width, x += width, grad_x += width) {
        norm_row_backward(grad, x, weight, inverses[row], grad_x, block.data(), width);
        if ((row + 1) % SUMMED_ROWS == 0 || row + 1 == rows) add_up(block, total);
    }
    std::copy(total.begin(), total.end(), grad_weight);
}

// Query and key heads of each row in place: norm (where weights are given), then rotation of neighbouring pairs.
// `inverses` [rows, heads + kv_heads]: what the gradient needs of the norm, 1 / rms (null: not wanted).
template <class T>
void norm_rotate(T* qkv, const T* q_norm, const T* k_norm, const float* cos, const float* sin, float* inverses, int64_t rows, int64_t stride, int64_t turn_stride, int64_t heads, int64_t kv_heads,
                 int64_t dim, float epsilon) {
    int64_t turned = heads + kv_heads;
    for (int64_t row = 0; row < rows; ++row, qkv += stride, cos += turn_stride, sin += turn_stride) {
        for (int64_t head = 0; head < turned; ++head) {
            T* x = qkv + head * dim;
            const T* weight = head < heads ? q_norm : k_norm;
            float inverse = weight ? inverse_rms(x, dim, epsilon) : 1.0f;
            if (inverses) inverses[row * turned + head] = inverse;
            for (int64_t i = 0; i < dim / 2; ++i) {
                float a = load(x + 2 * i), b = load(x + 2 * i + 1);
                if (weight) {
                    a = a * inverse * load(weight + 2 * i);
                    b = b * inverse * load(weight + 2 * i + 1);
                }
                store(x + 2 * i, a * cos[i] - b * sin[i]);
                store(x + 2 * i + 1, a * sin[i] + b * cos[i]);
            }
        }
    }
}

// In place on the gradient [rows, stride] of what norm_rotate gave for `before` [rows, stride]; without weights,
// rotation alone.
void norm_rotate_backward(float* grad, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
                          const float* before, const float* inverses, float* grad_q_norm, float* grad_k_norm,
                          int64_t rows, int64_t stride, int64_t turn_stride, int64_t heads, int64_t kv_heads,
                          int64_t dim) {
    int64_t turned = heads + kv_heads;
    std::vector<float> blocks[2] = {std::vector<float>(dim), std::vector<float>(dim)};
    std::vector<double> totals[2] = {std::vector<double>(dim), std::vector<double>(dim)};
    for (int64_t row = 0; row < rows; ++row, grad += stride, cos += turn_stride, sin += turn_stride) {
        const float* before_row = q_norm ? before + row * stride : nullptr;
        for (int64_t head = 0; head < turned; ++head) {
            float* g = grad + head * dim;
            for (int64_t i = 0; i < dim / 2; ++i) {
                float a = g[2 * i], b = g[2 * i + 1];
                g[2 * i] = a * cos[i] + b * sin[i];
                g[2 * i + 1] = b * cos[i] - a * sin[i];
            }
            if (!q_norm) continue;
            bool key = head >= heads;
            norm_row_backward(g, before_row + head * dim, key ? k_norm : q_norm, inverses[row * turned + head], g,
                              blocks[key].data(), dim);
        }
        if ((row + 1) % SUMMED_ROWS == 0 || row + 1 == rows)
            for (int i = 0; i < 2; ++i) add_up(blocks[i], totals[i]);
    }
    if (!q_norm) return;
    std::copy(totals[0].begin(), totals[0].end(), grad_q_norm);
    std::copy(totals[1].begin(), totals[1].end(), grad_k_norm);
}

inline float sigmoid(float x) {
    float small = exp_negative(-std::fabs(x));
    return (x < 0 ? small : 1.0f) / (1.0f + small);
}

template <class T> void gated_silu(const T* gate_up, T* out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row, gate_up += 2 * width, out += width) {
        for (int64_t i = 0; i < width; ++i) {
            float gate = load(gate_up + i);
            store(out + i, rounded<T>(gate * sigmoid(gate)) * load(gate_up + width + i));
        }
    }
}

void gated_silu_backward(const float* grad, const float* gate_up, float* out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row, grad += width, gate_up += 2 * width, out += 2 * width) {
        for (int64_t i = 0; i < width; ++i) {
            float gate = gate_up[i], share = sigmoid(gate);
            out[i] = grad[i] * gate_up[width + i] * share * (1.0f + gate * (1.0f - share));
            out[width + i] = grad[i] * gate * share;
        }
    }
}

// The sums of eight vectors' elements, as one vector.
inline v8 sums8(const v8* x) {
    v8 pairs[4], fours[2];
    for (int i = 0; i < 4; ++i)
        pairs[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                   SHUFFLE(x[2 * i], x[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; ++i)
        fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// A row's part of a paged cache: position t of a KV head is at table[t / tokens] * stride + (t % tokens) * dim.
struct Pages {
    const int32_t* table;
    int64_t tokens, stride, dim;
    // The offset of position t, and in `count` how many positions follow one another there, up to `end`.
    int64_t run(int64_t t, int64_t end, int64_t& count) const {
        count = std::min(end - t, tokens - t % tokens);
        return table[t / tokens] * stride + t % tokens * dim;
    }
};

// out[g] += sum over t of scores[g][t] * values[t], for 8 * B columns: the sums stay in registers.
template <class T, int G, int B>
void weigh(const T* values, T* out, const Pages& pages, int64_t first, int64_t length, const float* scores,
           const float* inverse) {
    v8 sums[G][B] = {};
    for (int64_t t = 0, count; t < length; t += count) {
        const T* rows = values + pages.run(first + t, first + length, count);
        for (int64_t i = 0; i < count; ++i) {
            v8 value[B];
            for (int b = 0; b < B; ++b) value[b] = load8(rows + i * pages.dim + 8 * b);
            for (int g = 0; g < G; ++g)
                for (int b = 0; b < B; ++b) sums[g][b] += value[b] * scores[g * length + t + i];
        }
    }
    for (int g = 0; g < G; ++g)
        for (int b = 0; b < B; ++b)
            for (int j = 0; j < 8; ++j) store(out + g * pages.dim + 8 * b + j, sums[g][b][j] * inverse[g]);
}

// The scores of `count` keys that follow one another, for G queries: of query g from scores[g * length] on.
template <class T, int G>
void dot_keys(const float* wide, const T* keys, int64_t count, int64_t dim, int64_t length, float* scores) {
    const int Q = G % 2 ? 1 : 2, K = 8 / Q;  // queries that share the loads of K keys: eight sums in registers
    int64_t t = 0;
    for (; t + K <= count; t += K) {
        for (int g = 0; g < G; g += Q) {
            v8 dots[8] = {};
            for (int64_t i = 0; i < dim; i += 8) {
                v8 query[Q];
                for (int q = 0; q < Q; ++q) query[q] = load8(wide + (g + q) * dim + i);
                for (int j = 0; j < K; ++j) {
                    v8 key = load8(keys + (t + j) * dim + i);
                    for (int q = 0; q < Q; ++q) dots[q * K + j] += query[q] * key;
                }
            }
            v8 eight = sums8(dots);
            for (int q = 0; q < Q; ++q)
                std::memcpy(scores + (g + q) * length + t, reinterpret_cast<float*>(&eight) + q * K, K * sizeof(float));
        }
    }
    for (; t < count; ++t) {
        for (int g = 0; g < G; ++g) {
            v8 dot = {};
            for (int64_t i = 0; i < dim; i += 8) dot += load8(wide + g * dim + i) * load8(keys + t * dim + i);
            scores[g * length + t] = sum8(dot);
        }
    }
}

// Attention of G queries that share a KV head to its `length` positions from `first` on.
template <class T, int G>
void attend(const T* q, const T* keys, const T* values, T* out, const Pages& pages, int64_t first, int64_t length,
            float scale, float* scores) {
    float wide[G * 256];
    int64_t dim = pages.dim;
    for (int64_t i = 0; i < G * dim; ++i) wide[i] = load(q + i) * scale;
    for (int64_t t = 0, count; t < length; t += count) {
        const T* rows = keys + pages.run(first + t, first + length, count);
        dot_keys<T, G>(wide, rows, count, dim, length, scores + t);
    }
    float inverse[G];
    for (int g = 0; g < G; ++g) {
        float* row = scores + g * length;
        float largest = -INFINITY, total = 0;
        for (int64_t i = 0; i < length; ++i) largest = row[i] > largest ? row[i] : largest;
        for (int64_t i = 0; i < length; ++i) {
            row[i] = exp_negative(row[i] - largest);
            total += row[i];
        }
        inverse[g] = 1.0f / total;
    }
    const int B = G <= 2 ? 4 : 2;
    int64_t i = 0;
    for (; i + 8 * B <= dim; i += 8 * B) weigh<T, G, B>(values + i, out + i, pages, first, length, scores, inverse);
    for (; i < dim; i += 8) weigh<T, G, 1>(values + i, out + i, pages, first, length, scores, inverse);
}

// Row r is the query at `position[r]` of row slot[r] (row r where `slot` is null) of `table`, which has `width` blocks a
// row: it attends to the last `window` positions up to position[r]. With `write`, its own key and value are put into the
// cache first. Caches: [block, kv head, token, dim].
template <class T>
void attention(const T* q, const T* k, const T* v, T* keys, T* values, T* out, const int32_t* table,
               const int64_t* slot, const int64_t* position, int64_t rows, int64_t stride, int64_t kv_heads,
               int64_t group, int64_t dim, int64_t width, int64_t tokens, int64_t window, float scale, int64_t write) {
    static thread_local std::vector<float> scores;
    if (int64_t(scores.size()) < group * width * tokens) scores.resize(group * width * tokens);
    using Attend = void (*)(const T*, const T*, const T*, T*, const Pages&, int64_t, int64_t, float, float*);
    static const Attend attends[] = {attend<T, 1>, attend<T, 2>, attend<T, 3>, attend<T, 4>,
                                     attend<T, 5>, attend<T, 6>, attend<T, 7>, attend<T, 8>};
    Pages pages = {nullptr, tokens, kv_heads * tokens * dim, dim};
    for (int64_t row = 0; row < rows; ++row, q += stride, k += stride, v += stride, out += kv_heads * group * dim) {
        pages.table = table + (slot ? slot[row] : row) * width;
        int64_t end = position[row] + 1, length = std::min(end, window), count;
        int64_t written = pages.run(position[row], end, count);
        for (int64_t head = 0; head < kv_heads; ++head) {
            T *head_keys = keys + head * tokens * dim, *head_values = values + head * tokens * dim;
            if (write) {
                std::memcpy(head_keys + written, k + head * dim, dim * sizeof(T));
                std::memcpy(head_values + written, v + head * dim, dim * sizeof(T));
            }
            int64_t heads = head * group * dim;
            attends[group - 1](q + heads, head_keys, head_values, out + heads, pages, end - length, length, scale,
                               scores.data());
        }
    }
}

// One block of the decoder, as decoder.py's DecoderLayer: matrices as panels; null: none there.
struct Layer {
    const float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *post_norm, *gate_up,
        *gate_up_bias, *down, *down_bias;
    float *keys, *values;
    int64_t window;  // positions seen
    double scale;
};
struct Sizes {
    int64_t width, heads, kv_heads, dim, intermediate, blocks, tokens;  // blocks of a row, tokens of a block
    double epsilon;
};

// All layers for decode rows: row r is at position[r] of row slot[r] (row r where `slot` is null) of the block table. The
// residual stream x is overwritten. `groups`: the rows that have an adapter; `most_rank`: of any of their products.
void decode(float* x, const Layer* layers, int64_t count, const float* cos, const float* sin, const int32_t* table,
            const int64_t* slot, const int64_t* position, int64_t rows, const Sizes* sizes, const Group* groups, int64_t group_count,
            int64_t most_rank) {
    const Sizes& s = *sizes;
    int64_t queries = s.heads * s.dim, projected = queries + 2 * s.kv_heads * s.dim;
    static thread_local std::vector<float> scratch[5];
    for (auto [which, columns] : {std::pair<int, int64_t>{0, std::max(s.width, queries)},
                                  {1, projected}, {2, 2 * s.intermediate}, {3, s.intermediate}, {4, most_rank}})
        if (int64_t(scratch[which].size()) < rows * columns) scratch[which].resize(rows * columns);
    float *inner = scratch[0].data(), *qkv = scratch[1].data(), *gate_up = scratch[2].data(), *gated = scratch[3].data();
    float epsilon = float(s.epsilon);
    Beside beside{groups, group_count, 0, scratch[4].data(), most_rank};
    auto product = [&](const float* in, const float* panels, const float* bias, const float* add, float* out,
                       int64_t columns, int64_t depth) {
        for (const Group* g = groups; g < groups + group_count; ++g)
            if (const LowRank& low = g->products[beside.product]; low.a)
                linear(in + g->first * depth, low.a, nullptr, nullptr, scratch[4].data() + g->first * most_rank, g->rows,
                       low.rank, depth);
        linear_beside(in, panels, bias, add, out, rows, columns, depth, group_count ? &beside : nullptr);
        ++beside.product;
    };
    for (const Layer* l = layers; l < layers + count; ++l) {
        rms_norm(x, l->input_norm, inner, nullptr, rows, s.width, epsilon);
        product(inner, l->qkv, l->qkv_bias, nullptr, qkv, projected, s.width);
        norm_rotate(qkv, l->q_norm, l->k_norm, cos, sin, static_cast<float*>(nullptr), rows, projected,
                    s.dim / 2, s.heads, s.kv_heads, s.dim, epsilon);
        const float* keys = qkv + queries;
        attention(qkv, keys, keys + s.kv_heads * s.dim, l->keys, l->values, inner, table, slot, position, rows,
                  projected, s.kv_heads, s.heads / s.kv_heads, s.dim, s.blocks, s.tokens, l->window, float(l->scale), 1);
        product(inner, l->output, l->output_bias, x, x, s.width, queries);
        rms_norm(x, l->post_norm, inner, nullptr, rows, s.width, epsilon);
        product(inner, l->gate_up, l->gate_up_bias, nullptr, gate_up, 2 * s.intermediate, s.width);
        gated_silu(gate_up, gated, rows, s.intermediate);
        product(gated, l->down, l->down_bias, x, x, s.width, s.intermediate);
    }
}

// The first token whose cumulative mass exceeds `left`; `totals`: the masses' sums in blocks of BLOCK.
constexpr int64_t BLOCK = 256;
int64_t invert(const float* mass, const float* totals, int64_t vocabulary, double left) {
    int64_t b = 0, token = -1, blocks = (vocabulary + BLOCK - 1) / BLOCK;
    while (b + 1 < blocks && left >= double(totals[b])) left -= double(totals[b++]);
    for (int64_t i = b * BLOCK; i < std::min(vocabulary, (b + 1) * BLOCK); ++i) {
        if (mass[i] > 0) token = i;  // rounding may leave something over: then it is the last one with mass
        left -= double(mass[i]);
        if (left < 0 && mass[i] > 0) break;
    }
    if (token < 0)  // the block's mass was all before the rounding: the last token with any
        for (int64_t i = 0; i < vocabulary; ++i)
            if (mass[i] > 0) token = i;
    return token < 0 ? vocabulary - 1 : token;  // a row of NaN
}

// The masses of logits relative to the largest, their sums in blocks, and the sum of all. `mass` may be `z`.
template <class T>
inline double weigh(const T* z, int64_t count, float divisor, float largest, float* mass, float* totals) {
    double total = 0;
    for (int64_t b = 0; b * BLOCK < count; ++b) {
        int64_t end = std::min(count, (b + 1) * BLOCK);
        float sum = 0;
        for (int64_t i = b * BLOCK; i < end; ++i) {
            mass[i] = exp_negative(load(z + i) / divisor - largest);
            sum += mass[i];
        }
        totals[b] = sum;
        total += double(sum);
    }
    return total;
}

template <class T> inline float largest_of(const T* z, int64_t count) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < count; ++i) {
        float value = load(z + i);
        largest = value > largest ? value : largest;
    }
    return largest;
}

// Inverse-CDF sampling: the first token whose cumulative mass exceeds uniform x total, and its log-softmax(z / T).
template <class T>
void sample(const T* logits, const float* temperature, const double* uniform, float* out, int64_t rows,
            int64_t vocabulary) {
    static thread_local std::vector<float> mass;
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    if (int64_t(mass.size()) < vocabulary + blocks) mass.resize(vocabulary + blocks);
    float* totals = mass.data() + vocabulary;
    for (int64_t row = 0; row < rows; ++row, logits += vocabulary) {
        float divisor = temperature ? temperature[row] : 1.0f;
        float largest = largest_of(logits, vocabulary) / divisor;
        double total = weigh(logits, vocabulary, divisor, largest, mass.data(), totals);
        int64_t token = invert(mass.data(), totals, vocabulary, uniform[row] * total);
        out[row] = float(token);
        out[rows + row] = float(double(load(logits + token) / divisor - largest) - std::log(total));
    }
}

// The most likely tokens, of equal ones the first: those of a mass above `least`, and of this mass up to the id `last`.
struct Kept {
    float least;
    int64_t last, count;
    double mass;
};

// The heaviest tokens of a row, found by buckets of like mass: 16 an octave, the heaviest in the first; what is below 2^-16
// shares the last one.
struct Heaviest {
    static constexpr int BUCKETS = 256;
    std::vector<float> mass;  // of the candidates
    std::vector<int32_t> id, bucket;
    std::vector<std::pair<float, int64_t>> edge;  // minus the mass, and the id
    double sums[BUCKETS];
    int32_t counts[BUCKETS];
    int64_t size = 0;

    // Take the tokens of a mass above `floor` as candidates.
    void take(const float* masses, int64_t vocabulary, float floor) {
        mass.resize(vocabulary + 1);
        id.resize(vocabulary + 1);
        bucket.resize(vocabulary + 1);
        size = 0;
        for (int64_t i = 0; i < vocabulary; ++i) {
            mass[size] = masses[i];
            id[size] = int32_t(i);
            size += masses[i] > floor;
        }
        std::fill(sums, sums + BUCKETS, 0.0);
        std::fill(counts, counts + BUCKETS, 0);
        for (int64_t i = 0; i < size; ++i) {
            int32_t bits;
            std::memcpy(&bits, &mass[i], 4);
            bucket[i] = std::min(BUCKETS - 1, std::max(0, 0x3F800000 - bits) >> 19);
        }
        for (int64_t i = 0; i < size; ++i) {
            sums[bucket[i]] += double(mass[i]);
            ++counts[bucket[i]];
        }
    }

    // Those that are kept from the heaviest on, while they are fewer than `most` and their mass less than `goal`.
    Kept cut(int64_t most, double goal) {
        Kept kept = {0, -1, 0, 0};
        for (int b = 0; b < BUCKETS; ++b) {
            if (kept.count + counts[b] < most && kept.mass + sums[b] < goal) {
                kept.count += counts[b];
                kept.mass += sums[b];
                continue;
            }
            edge.clear();
            for (int64_t i = 0; i < size; ++i)
                if (bucket[i] == b) edge.emplace_back(-mass[i], id[i]);
            std::sort(edge.begin(), edge.end());
            for (auto& one : edge) {
                if (kept.count >= most || kept.mass >= goal) break;
                kept = {-one.first, one.second, kept.count + 1, kept.mass + double(-one.first)};
            }
            break;
        }
        return kept;
    }

    // Drop all but these; returns their mass.
    double keep(const Kept& kept) {
        int64_t all = size;
        double total = 0;
        size = 0;
        for (int64_t i = 0; i < all; ++i) {
            float m = mass[i];
            int32_t token = id[i];
            bool in = m > kept.least || (m == kept.least && token <= kept.last);
            mass[size] = m;
            id[size] = token;
            total += in ? double(m) : 0.0;
            size += in;
        }
        return total;
    }
};

// Sampling of the `count` rows `which` among a part of the vocabulary: what the grammar's mask has (words of row i; null:
// all), of these the top_k most likely (0: all), and of these the fewest most likely ones whose mass is top_p of theirs. A
// greedy row takes the most likely. With `most` > 0 the log-probability is over this part, and a truncated row's ids are
// appended to `sets` if they are no more; `sizes`: how many they are, -1: not truncated.
template <class T>
void sample_kept(const T* logits, const float* temperature, const double* uniform, float* out, int64_t rows,
                 int64_t vocabulary, const int64_t* which, int64_t count, const uint32_t* masks, const uint8_t* greedy,
                 const double* top_p, const int64_t* top_k, const int64_t* most, int32_t* sets, int64_t* sizes) {
    static thread_local std::vector<float> mass;
    static thread_local std::vector<int32_t> allowed;
    static thread_local Heaviest heaviest;
    int64_t words = (vocabulary + 31) / 32, blocks = (vocabulary + BLOCK - 1) / BLOCK;
    mass.resize(vocabulary + blocks);
    allowed.resize(vocabulary);
    float* totals = mass.data() + vocabulary;
    for (int64_t n = 0; n < count; ++n) {
        int64_t row = which[n], held = 0, at = -1;  // ... of the tokens that are allowed: often few
        const T* z = logits + row * vocabulary;
        for (int64_t w = 0; masks && w < words; ++w)
            for (uint32_t bits = masks[n * words + w]; bits; bits &= bits - 1) {
                int64_t token = w * 32 + __builtin_ctz(bits);
                if (token >= vocabulary) break;
                mass[held] = load(z + token);
                allowed[held++] = int32_t(token);
            }
        for (int64_t i = 0; !masks && i < vocabulary; ++i) mass[i] = load(z + i);
        held = masks ? held : vocabulary;
        float divisor = temperature ? temperature[row] : 1.0f, largest = largest_of(mass.data(), held);
        for (int64_t i = 0; greedy[n] && at < 0 && i < held; ++i)
            if (mass[i] == largest) at = i;
        largest = largest / divisor;
        double total = weigh(mass.data(), held, divisor, largest, mass.data(), totals), everything = total;
        sizes[n] = -1;
        if (!greedy[n] && total == total && (top_p[n] < 1 || top_k[n] < vocabulary)) {  // with a NaN all of it is NaN
            // Without top_k, what is lighter than this is none of the heaviest of mass top_p: all such together aren't
            // the rest of the mass.
            bool any_number = top_k[n] >= vocabulary;
            heaviest.take(mass.data(), held, any_number ? float(0.99 * (1 - top_p[n]) * total / double(held)) : 0.0f);
            Kept kept = {0, held, 0, total};
            if (!any_number) kept = heaviest.cut(top_k[n], INFINITY);
            if (top_p[n] < 1) kept = heaviest.cut(top_k[n], top_p[n] * kept.mass);
            total = heaviest.keep(kept);
            double left = uniform[row] * total;
            for (int64_t i = 0; i < heaviest.size; ++i) {
                at = heaviest.id[i];
                if ((left -= double(heaviest.mass[i])) < 0) break;
            }
            sizes[n] = heaviest.size;
            for (int64_t i = 0; sizes[n] <= most[n] && i < sizes[n]; ++i)
                *sets++ = masks ? allowed[heaviest.id[i]] : heaviest.id[i];
        }
        at = at < 0 && held ? invert(mass.data(), totals, held, uniform[row] * total) : at;
        int64_t token = at < 0 ? 0 : masks ? allowed[at] : at;
        if (masks && !most[n]) {
            largest = largest_of(z, vocabulary) / divisor;
            everything = weigh(z, vocabulary, divisor, largest, mass.data(), totals);
        }
        total = most[n] ? total : everything;
        out[row] = float(token);
        out[rows + row] = float(double(load(z + token) / divisor - largest) - std::log(total));
    }
}

struct Export {
    const char* name;
    void* function;
};
#define FLOAT32(NAME) {#NAME "_float32", reinterpret_cast<void*>(NAME)}
#define BOTH(NAME) \
    {#NAME "_float32", reinterpret_cast<void*>(NAME<float>)}, {#NAME "_bfloat16", reinterpret_cast<void*>(NAME<bf16>)}
const Export exports[] = {
    BOTH(rms_norm), BOTH(norm_rotate), BOTH(gated_silu), BOTH(attention), BOTH(sample), BOTH(sample_kept),
    FLOAT32(pack), FLOAT32(linear), FLOAT32(decode),
    FLOAT32(rms_norm_backward), FLOAT32(norm_rotate_backward), FLOAT32(gated_silu_backward),
};

}  // namespace

// The function of this name; null: there is none.
extern "C" __attribute__((visibility("default"))) void* function(const char* name) {
    for (const Export& one : exports)
        if (!std::strcmp(one.name, name)) return one.function;
    return nullptr;
}
extern "C" __attribute__((visibility("default"))) int64_t panel_columns() { return PANEL; }
