// Products for native.cpp, which says what is common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// Products of few rows: out = x * weight^T (+ bias) (+ add), in float.
//
// A library that is handed plain matrices copies them into an order its inner loop can stream, at every call; with few
// rows that costs as much as the product. Here the weights are kept in that order: panels of PANEL output columns
// [k][PANEL], the last one filled up with zeros. A tile of `R` rows times one panel is summed in registers; every
// element is summed in the order of k, whatever R is, so a row doesn't depend on how many there are.
#ifdef __AVX512F__
const int LANES = 16, TILE = 12;
#else
const int LANES = 8, TILE = 6;
#endif
const int PANEL = 2 * LANES;
const int64_t DEPTH = 512;  // of k at a time: a panel's part stays in the first-level cache
const int64_t ROWS = 96;    // at a time: theirs stays in the second
typedef float vw __attribute__((vector_size(4 * LANES)));
typedef float loose_vw __attribute__((vector_size(4 * LANES), aligned(4)));

inline vw load_vw(const float* p) { return *reinterpret_cast<const loose_vw*>(p); }
inline void store_vw(float* p, vw x) { *reinterpret_cast<loose_vw*>(p) = x; }
// Stores an aligned vector past the caches, whose lines needn't be read then.
#if defined(__AVX512F__)
inline void stream_vw(float* p, vw x) { _mm512_stream_ps(p, reinterpret_cast<__m512&>(x)); }
#elif defined(__AVX__)
inline void stream_vw(float* p, vw x) { _mm256_stream_ps(p, reinterpret_cast<__m256&>(x)); }
#else
inline void stream_vw(float* p, vw x) { store_vw(p, x); }
#endif

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
// Of two vectors, what is S lanes off the diagonal of every 2S x 2S block changes places.
template <int S, int... K> inline void exchange(vw& upper, vw& lower, std::integer_sequence<int, K...>) {
    vw left = __builtin_shufflevector(upper, lower, ((K & S) ? LANES + K - S : K)...);
    lower = __builtin_shufflevector(upper, lower, ((K & S) ? LANES + K : K + S)...);
    upper = left;
}

template <int S> inline void transpose(vw* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
        if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, LANES>());
    if constexpr (S > 1) transpose<S / 2>(rows);
}
#endif
#endif

void pack(const float* weight, float* panels, int64_t columns, int64_t depth) {
    for (int64_t first = 0; first < columns; first += PANEL, weight += PANEL * depth) {
        int64_t there = std::min<int64_t>(PANEL, columns - first), i = 0;
#ifdef SHUFFLES
        for (; there == PANEL && i + LANES <= depth; i += LANES, panels += LANES * PANEL)
            for (int half = 0; half < PANEL; half += LANES) {
                vw rows[LANES];
#pragma GCC unroll 16
                for (int j = 0; j < LANES; ++j) rows[j] = load_vw(weight + (half + j) * depth + i);
                transpose<LANES / 2>(rows);
#pragma GCC unroll 16
                for (int j = 0; j < LANES; ++j) stream_vw(panels + j * PANEL + half, rows[j]);
            }
#endif
        for (; i < depth; ++i, panels += PANEL)
            for (int64_t j = 0; j < PANEL; ++j) panels[j] = j < there ? weight[j * depth + i] : 0.0f;
    }
#ifdef __AVX__
    _mm_sfence();  // streamed stores are in order with later ones only behind it
#endif
}

// sums = R rows times `depth` of one panel, added to what is there where `more`.
template <int R>
void multiply_tile(const float* x, const float* panel, float* sums, int64_t depth, int64_t stride, bool more) {
    vw tile[R][2] = {};
    for (int64_t i = 0; i < depth; ++i, panel += PANEL) {
        vw left = load_vw(panel), right = load_vw(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            float factor = x[r * stride + i];
            tile[r][0] += left * factor;
            tile[r][1] += right * factor;
        }
    }
#pragma GCC unroll 12  // or the sums would be put on the stack to be indexed
    for (int r = 0; r < R; ++r, sums += PANEL) {
        store_vw(sums, more ? load_vw(sums) + tile[r][0] : tile[r][0]);
        store_vw(sums + LANES, more ? load_vw(sums + LANES) + tile[r][1] : tile[r][1]);
    }
}

using MultiplyTile = void (*)(const float*, const float*, float*, int64_t, int64_t, bool);
template <int... R> MultiplyTile tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static const MultiplyTile tiles[] = {multiply_tile<R + 1>...};
    return tiles[rows - 1];
}

// Calls `work(row, multiply)` for tiles of about equal height: a low one waits for its own sums.
template <class Work> void each_tile(int64_t rows, Work work) {
    int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        int64_t height = rows / tiles + (i < rows % tiles);
        work(row, tile_of(height, std::make_integer_sequence<int, TILE>()));
        row += height;
    }
}

// A product of low rank, B A x, beside another of the same input: of an adapter.
struct LowRank {
    const float *a, *b;    // panels of A [rank, depth] and B [columns, rank]; null: none here
    const int64_t* spans;  // [panels of B, 2]: first and end of the ranks that a panel has anything of
    int64_t rank;
};
// Neighbouring rows with one adapter, and its products: four for each layer.
struct Group {
    int64_t first, rows;
    const LowRank* products;
};
struct Beside {
    const Group* groups;
    int64_t count, product;
    const float* inner;  // A x of the rows of a group, [rows, rank], at `stride` x its first row
    int64_t stride;
};

// Adds B's part to the sums of a panel for rows [top, top + high).
void add_low_rank(const Beside& beside, float* sums, int64_t top, int64_t high, int64_t panel) {
    for (const Group* g = beside.groups; g < beside.groups + beside.count; ++g) {
        const LowRank& low = g->products[beside.product];
        int64_t first = std::max(g->first, top), end = std::min(g->first + g->rows, top + high);
        if (!low.b || first >= end) continue;
        int64_t k = low.spans[2 * panel], depth = low.spans[2 * panel + 1] - k;
        const float* inner = beside.inner + g->first * beside.stride + (first - g->first) * low.rank + k;
        const float* b = low.b + (panel * low.rank + k) * PANEL;
        each_tile(depth > 0 ? end - first : 0, [&](int64_t row, MultiplyTile multiply) {
            multiply(inner + row * low.rank, b, sums + (first - top + row) * PANEL, depth, low.rank, true);
        });
    }
}

// `add` may be `out`.
void linear_beside(const float* x, const float* panels, const float* bias, const float* add, float* out, int64_t rows,
                   int64_t columns, int64_t depth, const Beside* beside) {
    float sums[ROWS * PANEL];
    for (int64_t top = 0; top < rows; top += ROWS, x += ROWS * depth) {
        int64_t high = std::min(ROWS, rows - top);
        for (int64_t first = 0; first < columns; first += PANEL) {
            for (int64_t k = 0; k < depth; k += DEPTH)
                each_tile(high, [&](int64_t row, MultiplyTile multiply) {
                    multiply(x + row * depth + k, panels + first * depth + k * PANEL, sums + row * PANEL,
                             std::min(DEPTH, depth - k), depth, k > 0);
                });
            if (beside) add_low_rank(*beside, sums, top, high, first / PANEL);
            int64_t there = std::min<int64_t>(PANEL, columns - first);
            for (int64_t row = 0; row < high; ++row) {
                int64_t at = (top + row) * columns + first;
                for (int64_t j = 0; j < there; ++j)
                    out[at + j] = sums[row * PANEL + j] + (bias ? bias[first + j] : 0.0f) + (add ? add[at + j] : 0.0f);
            }
        }
    }
}

void linear(const float* x, const float* panels, const float* bias, const float* add, float* out, int64_t rows,
            int64_t columns, int64_t depth) {
    linear_beside(x, panels, bias, add, out, rows, columns, depth, nullptr);
}

}  // namespace
