// Products of bfloat16 activations by the processor's own pair products (AVX-512 BF16), with weights in bfloat16 and with packed
// ones, whose numbers bfloat16 has exactly. Everything else is what `numeric_avx512.cpp` has.
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
#include "products.h"

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

// -- packed weights ---------------------------------------------------------------------------------------------------
// How a format gives pairs of columns of one panel: STEP columns after the other, BYTES of memory, are STEP / 2 pairs.
PD_INLINE __m512bh joined(vf first, vf second) {  // numbers of bfloat16
  return (__m512bh)(((vu)first >> 16) | (vu)second);
}
struct PairsI8 {
  static constexpr int STEP = 2, BYTES = 32;
  static constexpr bool ZEROS = false;
  PD_MEMBER const int8_t* fetch(const char* p) { return reinterpret_cast<const int8_t*>(p); }
  PD_MEMBER __m512bh pair(const int8_t* p, int, __m512i) {
    return joined(__builtin_convertvector(widen(p), vf), __builtin_convertvector(widen(p + PANEL), vf));
  }
};
struct PairsF8 {
  static constexpr int STEP = 2, BYTES = 32;
  static constexpr bool ZEROS = false;
  PD_MEMBER const uint8_t* fetch(const char* p) { return reinterpret_cast<const uint8_t*>(p); }
  PD_MEMBER vf column(const uint8_t* p) {
    const vi high = (vi)(widen(p) << 24);
    return (vf)((high >> 4) & int32_t(0x87f00000)) * 1.329227995784916e36f;
  }
  PD_MEMBER __m512bh pair(const uint8_t* p, int, __m512i) { return joined(column(p), column(p + PANEL)); }
};
// A word of eight columns has columns j and j + 4 at the same place of its halves, so these are a pair.
alignas(64) constexpr uint16_t FOURS[32] = {  // -8 to 7, twice: the permutation reads five bits
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
alignas(64) constexpr uint16_t FIVES[32] = {  // 0 to 15, then -16 to -1
    0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000,
    0xbf80};
template <bool Z>
struct PairsI4 {
  static constexpr int STEP = 8, BYTES = 64;
  static constexpr bool ZEROS = Z;
  PD_MEMBER __m512i fetch(const char* p) { return _mm512_loadu_si512(p); }
  PD_MEMBER __m512bh pair(__m512i words, int i, __m512i zero) {
    __m512i low = (__m512i)((vu)words >> (4 * i));
    if (Z) low = _mm512_sub_epi16(_mm512_and_si512(low, _mm512_set1_epi32(0x000f000f)), zero);
    return (__m512bh)_mm512_permutexvar_epi16(low, _mm512_load_si512(Z ? FIVES : FOURS));
  }
};

// Rows in the order in which a format takes their columns, with 0 behind the last one.
template <class F>
PD_INLINE void lay_out(const Linear& a, int64_t row, int64_t count, uint16_t* space, int64_t stride, const uint16_t** x) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; i++) order[i] = uint16_t(F::STEP == 8 ? i / 8 * 8 + i % 8 / 2 + i % 2 * 4 : i);
  const __m512i by = _mm512_load_si512(order);
  for (int64_t r = 0; r < count; r++) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(a.x.p) + (row + r) * a.x.d[1];
    uint16_t* to = space + r * stride;
    for (int64_t i = 0; i < a.weight->cols; i += 32) {
      const int64_t left = a.weight->cols - i;
      const __mmask32 some = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(by, _mm512_maskz_loadu_epi16(some, from + i)));
    }
    x[r] = to;
  }
}

// R rows times P panels: sums of pair products over the columns in order, in blocks of one group each, times its scale, whatever R
// and P are.
template <class F, int R, int P>
void packed_tile(const Linear& a, const uint16_t* const* x, int64_t row, int64_t panel) {
  const Weight& w = *a.weight;
  const int64_t steps = (w.cols + F::STEP - 1) / F::STEP, stride = steps * F::BYTES;
  const int64_t size = w.group && w.group < BLOCK ? w.group : BLOCK, block = size / F::STEP;
  const int64_t groups = w.group ? (w.cols + w.group - 1) / w.group : 1;
  const char* base = static_cast<const char*>(w.data) + panel * stride;
  const uint16_t* in[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) in[r] = x[r];
  vf sums[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
  for (int64_t first = 0; first < steps; first += block) {
    const int64_t last = first + block < steps ? first + block : steps, group = w.group ? first * F::STEP / w.group : 0;
    __m512i zero[P];
    __m512 acc[R][P];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
      if constexpr (F::ZEROS) zero[p] = (__m512i)(widen(w.zeros + ((panel + p) * groups + group) * PANEL) * 0x10001u);
      else zero[p] = __m512i{};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) acc[r][p] = _mm512_setzero_ps();
    for (int64_t k = first; k < last; k++) {
      if constexpr (R > 1) {  // a single row is bound by memory as it is
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) __builtin_prefetch(base + (P + p) * stride + k * F::BYTES, 0, 2);
      }
      decltype(F::fetch(base)) raw[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) raw[p] = F::fetch(base + p * stride + k * F::BYTES);
#pragma GCC unroll 16
      for (int i = 0; i < F::STEP / 2; i++) {
        __m512bh pairs[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) pairs[p] = F::pair(raw[p], i, zero[p]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const __m512bh b = pair_of(in[r] + F::STEP * k + 2 * i);
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], pairs[p], b);
          PD_IN_TURN;
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      const int64_t place = ((panel + p) * groups + group) * PANEL;
      vf scale = splat(1.0f);
      if (w.groups && w.groups_bf16) scale = load(static_cast<const bf16*>(w.groups) + place);
      else if (w.groups) scale = load(static_cast<const float*>(w.groups) + place);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) sums[r][p] = sums[r][p] + (vf)acc[r][p] * scale;
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) finish_vector(a, row + r, (panel + p) * PANEL, sums[r][p]);
}

template <class F, int R, int P>
void packed_panels(const Linear& a, const uint16_t* const* x, int64_t row, int64_t first, int64_t last) {
  for (; first + P <= last && !(P == 3 && last - first == 4); first += P) packed_tile<F, R, P>(a, x, row, first);
  if constexpr (P > 1) { if (first < last) packed_panels<F, R, P == 3 ? 2 : P / 2>(a, x, row, first, last); }
}

template <class F, int R, int P>
int64_t packed_rows(const Linear& a, int64_t row, int64_t n, int64_t first, int64_t last, uint16_t* space) {
  const int64_t stride = (a.weight->cols + 31) / 32 * 32;
  const uint16_t* x[R];
  for (; row + R <= n; row += R) {
    lay_out<F>(a, row, R, space, stride, x);
    packed_panels<F, R, P>(a, x, row, first, last);
  }
  return row;
}

template <class F>
void packed(const Linear& a, const Call& c, int64_t first, int64_t last, uint16_t* space) {
  int64_t row = packed_rows<F, 8, 3>(a, 0, c.n, first, last, space);
  row = packed_rows<F, 4, 4>(a, row, c.n, first, last, space);
  row = packed_rows<F, 2, 4>(a, row, c.n, first, last, space);
  packed_rows<F, 1, 8>(a, row, c.n, first, last, space);
}

void linear(const void* args, const Call& c) {
  const auto& a = *static_cast<const Linear*>(args);
  const Weight& w = *a.weight;
  const bool bytes = w.format == PANELS_I8 || w.format == PANELS_F8, whole = w.format == PANELS_BF16;
  if (w.rounding || !(bytes || whole || w.format == PANELS_I4)) {
    static const Kernel* const other = kernel_of(&avx512vnni_table, "linear", BF16);
    other->run(args, c);
    return;
  }
  constexpr int64_t STRIP_BYTES = 256 << 10;
  const Shape s{a, static_cast<const uint32_t*>(w.data), w.cols / 2, w.cols % 2, (w.cols + 1) / 2 * PANEL};
  const int64_t each = whole ? s.stride * 4 : bytes ? (w.cols + 1) / 2 * 32 : (w.cols + 7) / 8 * 64;
  int64_t first, last;
  share((w.rows + PANEL - 1) / PANEL, c, &first, &last);
  int64_t width = last - first;
  if (c.n > 8) {
    const int64_t fits = STRIP_BYTES / each / 12 * 12;
    width = fits < width ? fits : width;
    width = width < 3 ? 3 : width;
  }
  uint16_t* space = reinterpret_cast<uint16_t*>(c.workspace + c.thread * 8 * 4 * (w.cols + 32));
  for (; first < last; first += width) {
    const int64_t end = first + width < last ? first + width : last;
    if (whole) strip(s, c.n, first, end);
    else if (w.format == PANELS_I8) packed<PairsI8>(a, c, first, end, space);
    else if (w.format == PANELS_F8) packed<PairsF8>(a, c, first, end, space);
    else if (w.zeros) packed<PairsI4<true>>(a, c, first, end, space);
    else packed<PairsI4<false>>(a, c, first, end, space);
  }
}
bool linear_worth(const void* args, int64_t n) {
  const Weight& w = *static_cast<const Linear*>(args)->weight;
  return n * w.rows * w.cols >= (1 << 16) && w.rows > PANEL;
}

const Kernel kernels[] = {{"linear", BF16, linear, linear_worth, sizeof(Linear) / 8}};
}  // namespace

extern const Table avx512bf16_table;
const Table avx512bf16_table = {"avx512bf16", kernels, 1, avx512_table.primitives, &avx512vnni_table};
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
