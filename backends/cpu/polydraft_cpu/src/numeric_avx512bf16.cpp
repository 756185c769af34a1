// Products of bfloat16 activations with bfloat16 weights by the processor's own pair products (AVX-512 BF16). Everything else is
// what `numeric_avx512.cpp` has.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>

#include "ops.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#endif
#define PD_LANES 16
#define PD_FMA512

namespace pd {
namespace {
#include "vec.h"

struct Shape {
  const Linear& a;
  const uint32_t* weights;
  int64_t whole, odd, stride;  // pairs of columns, a last single one, words of a panel
};

PD_INLINE __m512bh pairs_at(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
PD_INLINE __m512bh pair_of(const uint16_t* x) {
  uint32_t u;
  __builtin_memcpy(&u, x, sizeof u);
  return (__m512bh)_mm512_set1_epi32(int32_t(u));
}

// R rows times P panels: sums of pair products over the columns in order, in blocks, whatever R and P are.
template <int R, int P>
void tile(const Shape& s, int64_t row, int64_t panel) {
  constexpr int64_t BLOCK_PAIRS = 32;
  const Linear& a = s.a;
  const uint16_t* x[R];
  for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const uint16_t*>(a.x.p) + (row + r) * a.x.d[1];
  const uint32_t* base = s.weights + panel * s.stride;
  vf sums[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
  for (int64_t first = 0; first < s.whole; first += BLOCK_PAIRS) {
    const int64_t last = first + BLOCK_PAIRS < s.whole ? first + BLOCK_PAIRS : s.whole;
    __m512 acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) acc[r][p] = _mm512_setzero_ps();
    for (int64_t k = first; k < last; k++) {
      if constexpr (R >= 8) {  // fewer rows are bound by memory as it is
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) __builtin_prefetch(base + (P + p) * s.stride + k * PANEL, 0, 2);
      }
      __m512bh w[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) w[p] = pairs_at(base + p * s.stride + k * PANEL);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const __m512bh b = pair_of(x[r] + 2 * k);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], w[p], b);
        PD_IN_TURN;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sums[r][p] = sums[r][p] + (vf)acc[r][p];
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) {
      vf y = sums[r][p];
      if (s.odd) {
        const __m512bh b = (__m512bh)_mm512_set1_epi32(int32_t(x[r][2 * s.whole]));
        y = (vf)_mm512_dpbf16_ps((__m512)y, pairs_at(base + p * s.stride + s.whole * PANEL), b);
      }
      const int64_t o = (panel + p) * PANEL, count = a.weight->rows - o;
      if (a.bias) y = y + load(static_cast<const float*>(a.bias->data) + o, count);
      if (a.out.dtype == BF16) store(reinterpret_cast<bf16*>(a.out.p) + (row + r) * a.out.d[1] + o, y, count);
      else store(reinterpret_cast<float*>(a.out.p) + (row + r) * a.out.d[1] + o, y, count);
    }
}

template <int R, int P>
void panels(const Shape& s, int64_t row, int64_t first, int64_t last) {
  for (; first + P <= last && !(P == 3 && last - first == 4); first += P) tile<R, P>(s, row, first);  // 2 + 2, not 3 + 1
  if constexpr (P > 1) { if (first < last) panels<R, P == 3 ? 2 : P / 2>(s, row, first, last); }
}

void strip(const Shape& s, int64_t n, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + 8 <= n; row += 8) panels<8, 3>(s, row, first, last);
  for (; row + 4 <= n; row += 4) panels<4, 4>(s, row, first, last);
  for (; row + 2 <= n; row += 2) panels<2, 4>(s, row, first, last);
  for (; row < n; row++) panels<1, 8>(s, row, first, last);
}

const Kernel* general() {
  for (int64_t i = 0; i < avx512_table.count; i++)
    if (avx512_table.kernels[i].act == BF16 && __builtin_strcmp(avx512_table.kernels[i].name, "linear") == 0)
      return &avx512_table.kernels[i];
  return nullptr;
}

void linear(const void* args, const Call& c) {
  const auto& a = *static_cast<const Linear*>(args);
  const Weight& w = *a.weight;
  if (w.format != PANELS_BF16) {
    static const Kernel* const other = general();
    other->run(args, c);
    return;
  }
  constexpr int64_t STRIP_BYTES = 256 << 10;
  const Shape s{a, static_cast<const uint32_t*>(w.data), w.cols / 2, w.cols % 2, (w.cols + 1) / 2 * PANEL};
  int64_t first, last;
  share((w.rows + PANEL - 1) / PANEL, c, &first, &last);
  int64_t width = last - first;
  if (c.n > 8) {
    const int64_t fits = STRIP_BYTES / (s.stride * 4) / 12 * 12;
    width = fits < width ? fits : width;
    width = width < 3 ? 3 : width;
  }
  for (; first < last; first += width) strip(s, c.n, first, first + width < last ? first + width : last);
}
bool linear_worth(const void* args, int64_t n) {
  const Weight& w = *static_cast<const Linear*>(args)->weight;
  return n * w.rows * w.cols >= (1 << 16) && w.rows > PANEL;
}

const Kernel kernels[] = {{"linear", BF16, linear, linear_worth, sizeof(Linear) / 8}};
}  // namespace

extern const Table avx512bf16_table;
const Table avx512bf16_table = {"avx512bf16", kernels, 1, avx512_table.primitives, &avx512_table};
}  // namespace pd
#if defined(__clang__)
#pragma clang attribute pop
#endif
#elif defined(__x86_64__)
#include "ops.h"
namespace pd {
extern const Table avx512bf16_table;
const Table avx512bf16_table = {nullptr, nullptr, 0, {}, nullptr};  // this compiler does not know the instructions
}  // namespace pd
#endif
