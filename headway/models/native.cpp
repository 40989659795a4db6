// Element-wise parts, decode attention and sampling of the generation engine for one CPU core.
// Built and called by native.py; every function has a plain torch counterpart that the tests compare it with.
//
// T is float or bfloat16 (stored as 16 bits, computed in float). Rows are contiguous unless a stride is given;
// strides count elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

template <class T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
        float inverse = inverse_rms(x, width, epsilon);
        for (int64_t i = 0; i < width; ++i)
            store(out + i, rounded<T>(load(x + i) * inverse) * load(weight + i));
    }
}

// Query and key heads of each row in place: norm (where weights are given), then rotation of neighbouring pairs.
template <class T>
void norm_rotate(T* qkv, const T* q_norm, const T* k_norm, const float* cos, const float* sin, int64_t rows,
                 int64_t stride, int64_t turn_stride, int64_t heads, int64_t kv_heads, int64_t dim, float epsilon) {
    for (int64_t row = 0; row < rows; ++row, qkv += stride, cos += turn_stride, sin += turn_stride) {
        for (int64_t head = 0; head < heads + kv_heads; ++head) {
            T* x = qkv + head * dim;
            const T* weight = head < heads ? q_norm : k_norm;
            float inverse = weight ? inverse_rms(x, dim, epsilon) : 1.0f;
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

template <class T> void gated_silu(const T* gate_up, T* out, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row, gate_up += 2 * width, out += width) {
        for (int64_t i = 0; i < width; ++i) {
            float gate = load(gate_up + i);
            float small = exp_negative(-std::fabs(gate));
            float sigmoid = (gate < 0 ? small : 1.0f) / (1.0f + small);
            store(out + i, rounded<T>(gate * sigmoid) * load(gate_up + width + i));
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

// out[g] += sum over t of scores[g][t] * values[t], for 8 * B columns: the sums stay in registers.
template <class T, int G, int B>
void weigh(const T* values, T* out, int64_t length, int64_t dim, const float* scores, const float* inverse) {
    v8 sums[G][B] = {};
    for (int64_t t = 0; t < length; ++t) {
        v8 value[B];
        for (int b = 0; b < B; ++b) value[b] = load8(values + t * dim + 8 * b);
        for (int g = 0; g < G; ++g)
            for (int b = 0; b < B; ++b) sums[g][b] += value[b] * scores[g * length + t];
    }
    for (int g = 0; g < G; ++g)
        for (int b = 0; b < B; ++b)
            for (int j = 0; j < 8; ++j) store(out + g * dim + 8 * b + j, sums[g][b][j] * inverse[g]);
}

// Attention of G queries that share a KV head to `length` tokens of it.
template <class T, int G>
void attend(const T* q, const T* keys, const T* values, T* out, int64_t length, int64_t dim, float scale,
            float* scores) {
    float wide[G * 256];
    for (int64_t i = 0; i < G * dim; ++i) wide[i] = load(q + i) * scale;
    int64_t t = 0;
    for (; t + 8 <= length; t += 8) {
        for (int g = 0; g < G; ++g) {
            v8 dots[8] = {};
            for (int64_t i = 0; i < dim; i += 8) {
                v8 query = load8(wide + g * dim + i);
                for (int j = 0; j < 8; ++j) dots[j] += query * load8(keys + (t + j) * dim + i);
            }
            v8 eight = sums8(dots);
            std::memcpy(scores + g * length + t, &eight, sizeof(eight));
        }
    }
    for (; t < length; ++t) {
        for (int g = 0; g < G; ++g) {
            v8 dot = {};
            for (int64_t i = 0; i < dim; i += 8) dot += load8(wide + g * dim + i) * load8(keys + t * dim + i);
            scores[g * length + t] = sum8(dot);
        }
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
    int64_t i = 0;
    for (; i + 16 <= dim; i += 16) weigh<T, G, 2>(values + i, out + i, length, dim, scores, inverse);
    if (i < dim) weigh<T, G, 1>(values + i, out + i, length, dim, scores, inverse);
}

// Row r is the query at `position[r]` of slot `slot[r]` (slot r where `slot` is null): it attends to the last
// `window` positions up to position[r]. With `write`, its own key and value are put into the cache first.
// Caches: [slot, kv head, t, dim].
template <class T>
void attention(const T* q, const T* k, const T* v, T* keys, T* values, T* out, const int64_t* slot,
               const int64_t* position, int64_t rows, int64_t stride, int64_t kv_heads, int64_t group, int64_t dim,
               int64_t context, int64_t window, float scale, int64_t write) {
    static thread_local std::vector<float> scores;
    if (int64_t(scores.size()) < group * context) scores.resize(group * context);
    using Attend = void (*)(const T*, const T*, const T*, T*, int64_t, int64_t, float, float*);
    static const Attend attends[] = {attend<T, 1>, attend<T, 2>, attend<T, 3>, attend<T, 4>,
                                     attend<T, 5>, attend<T, 6>, attend<T, 7>, attend<T, 8>};
    for (int64_t row = 0; row < rows; ++row, q += stride, k += stride, v += stride, out += kv_heads * group * dim) {
        int64_t length = std::min(position[row] + 1, window);
        int64_t skipped = (position[row] + 1 - length) * dim;
        for (int64_t head = 0; head < kv_heads; ++head) {
            int64_t start = ((slot ? slot[row] : row) * kv_heads + head) * context * dim;
            if (write) {
                std::memcpy(keys + start + position[row] * dim, k + head * dim, dim * sizeof(T));
                std::memcpy(values + start + position[row] * dim, v + head * dim, dim * sizeof(T));
            }
            int64_t first = head * group * dim;
            attends[group - 1](q + first, keys + start + skipped, values + start + skipped, out + first, length, dim,
                               scale, scores.data());
        }
    }
}

// Inverse-CDF sampling: the first token whose cumulative mass exceeds uniform x total, and its log-softmax(z / T).
template <class T>
void sample(const T* logits, const float* temperature, const double* uniform, float* out, int64_t rows,
            int64_t vocabulary) {
    static thread_local std::vector<float> mass;
    const int64_t block = 256;
    int64_t blocks = (vocabulary + block - 1) / block;
    if (int64_t(mass.size()) < vocabulary + blocks) mass.resize(vocabulary + blocks);
    float* totals = mass.data() + vocabulary;
    for (int64_t row = 0; row < rows; ++row, logits += vocabulary) {
        float divisor = temperature ? temperature[row] : 1.0f;
        float largest = -INFINITY;
        for (int64_t i = 0; i < vocabulary; ++i) {
            float z = load(logits + i);
            largest = z > largest ? z : largest;
        }
        largest = largest / divisor;
        double total = 0;
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t end = std::min(vocabulary, (b + 1) * block);
            float sum = 0;
            for (int64_t i = b * block; i < end; ++i) {
                mass[i] = exp_negative(load(logits + i) / divisor - largest);
                sum += mass[i];
            }
            totals[b] = sum;
            total += double(sum);
        }
        double left = uniform[row] * total;
        int64_t b = 0, token = -1;
        while (b + 1 < blocks && left >= double(totals[b])) left -= double(totals[b++]);
        for (int64_t i = b * block; i < std::min(vocabulary, (b + 1) * block); ++i) {
            if (mass[i] > 0) token = i;  // rounding may leave something over: then it is the last one with mass
            left -= double(mass[i]);
            if (left < 0 && mass[i] > 0) break;
        }
        if (token < 0)  // the block's mass was all before the rounding: the last token with any
            for (int64_t i = 0; i < vocabulary; ++i)
                if (mass[i] > 0) token = i;
        token = token < 0 ? vocabulary - 1 : token;  // a row of NaN
        out[row] = float(token);
        out[rows + row] = float(double(load(logits + token) / divisor - largest) - std::log(total));
    }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) void
#define BOTH(NAME, PARAMETERS, ARGUMENTS)                        \
    EXPORT NAME##_float32 PARAMETERS(float) { NAME ARGUMENTS; }  \
    EXPORT NAME##_bfloat16 PARAMETERS(bf16) { NAME ARGUMENTS; }

#define RMS_NORM(T) (const T* x, const T* weight, T* out, int64_t rows, int64_t width, float epsilon)
#define NORM_ROTATE(T)                                                                                        \
    (T* qkv, const T* q_norm, const T* k_norm, const float* cos, const float* sin, int64_t rows, int64_t stride, \
     int64_t turn_stride, int64_t heads, int64_t kv_heads, int64_t dim, float epsilon)
#define GATED_SILU(T) (const T* gate_up, T* out, int64_t rows, int64_t width)
#define ATTENTION(T)                                                                                             \
    (const T* q, const T* k, const T* v, T* keys, T* values, T* out, const int64_t* slot, const int64_t* position, \
     int64_t rows, int64_t stride, int64_t kv_heads, int64_t group, int64_t dim, int64_t context, int64_t window, \
     float scale, int64_t write)
#define SAMPLE(T) \
    (const T* logits, const float* temperature, const double* uniform, float* out, int64_t rows, int64_t vocabulary)

BOTH(rms_norm, RMS_NORM, (x, weight, out, rows, width, epsilon))
BOTH(norm_rotate, NORM_ROTATE,
     (qkv, q_norm, k_norm, cos, sin, rows, stride, turn_stride, heads, kv_heads, dim, epsilon))
BOTH(gated_silu, GATED_SILU, (gate_up, out, rows, width))
BOTH(attention, ATTENTION,
     (q, k, v, keys, values, out, slot, position, rows, stride, kv_heads, group, dim, context, window, scale, write))
BOTH(sample, SAMPLE, (logits, temperature, uniform, out, rows, vocabulary))
