// Products of rows that are rounded to 8 bits beside weights of 8 and 4 bits, by the processor's own sums of four products of
// bytes (AVX-512 VNNI). Everything else is what `numeric_avx512.cpp` has.
//
// The instruction takes bytes without a sign from one side: numbers of weights are shifted to begin at 0, and what that adds to a
// sum, so many times the sum of the row's numbers, is taken off where the sum begins. Sums of a group, or of a whole row, are
// exact; they become float32 and are joined in the order of the groups, whatever else is computed beside them.
#if defined(__x86_64__)
#include <immintrin.h>

#include "ops.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the compiler's own header, where it leaves lanes undefined
#endif
#define PD_LANES 16
#define PD_FMA512

namespace pd {
namespace {
#include "vec.h"
#include "products.h"

constexpr int64_t MOST_COLUMNS = 1 << 16;  // whose products of bytes fit into 32 bits
constexpr int64_t ROWS = 4, WIDE = 3;      // rows and panels of a tile: registers have the sums of a group and those of all
constexpr int64_t FEW = 8;                 // rows beside which weights are not unpacked into memory
constexpr int64_t SHARED_ROWS = 32;        // at least, of a thread's share of rows
constexpr int64_t ROUNDED_ROWS = 128;      // that are kept rounded at a time
constexpr int64_t NEAR = 64 << 10;         // bytes of weights that lie in a cache until they are wanted

PD_INLINE int64_t up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }

// Rows in few bits, in a thread's part of the workspace: numbers, and of each group of columns the scale, and what the shift of
// the weights' numbers adds to a sum. Behind them is the room for unpacked weights.
struct Rows {
  int64_t stride, groups;
  int8_t* numbers;
  float* scales;
  int32_t* shifts;
  uint8_t* unpacked;
  Rows(const Linear& a, const Call& c) {
    const Weight& w = *a.weight;
    const int64_t rows = least(ROUNDED_ROWS, a.x.d[0]);
    stride = up(w.cols, 64);
    groups = w.group ? (w.cols + w.group - 1) / w.group : 1;
    char* space = c.workspace + c.thread * (up(rows * (stride + 8 * groups), 64) + WIDE * PANEL * stride);
    unpacked = reinterpret_cast<uint8_t*>(space);
    numbers = reinterpret_cast<int8_t*>(space + WIDE * PANEL * stride);
    scales = reinterpret_cast<float*>(numbers + rows * stride);
    shifts = reinterpret_cast<int32_t*>(scales + rows * groups);
  }
};

// How a format gives four columns of a panel: STEP columns after the other are FOURS vectors of bytes from 0 on, in which each
// lane has those of one output. A row of a panel is computed as WHOLE times so many columns, of which the last are 0.
struct FromI8 {
  static constexpr int STEP = 4, WHOLE = 4, FOURS = 1, MIDDLE = 128;
  static constexpr bool STORED = true;
  PD_MEMBER __m512i fetch(const uint8_t* p) { return arranged(_mm512_loadu_si512(p)); }
  PD_MEMBER __m512i last(const uint8_t* p) {  // two columns
    return arranged(_mm512_maskz_loadu_epi8(0xffffffff, p));
  }
  PD_MEMBER __m512i arranged(__m512i columns) {
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    return _mm512_xor_si512(_mm512_shuffle_epi8(_mm512_maskz_permutexvar_epi32(__mmask16(0xffff), lanes, columns), bytes), _mm512_set1_epi8(char(0x80)));
  }
  PD_MEMBER __m512i four(__m512i raw, int) { return raw; }
  PD_MEMBER __m128i order(__m128i numbers) { return numbers; }
  PD_MEMBER int64_t bytes(int64_t cols) { return up(cols, 2) * PANEL; }
};
// A word of eight columns has those with even numbers in the low halves of its bytes.
struct FromI4 {
  static constexpr int STEP = 8, WHOLE = 8, FOURS = 2, MIDDLE = 8;
  static constexpr bool STORED = true;
  PD_MEMBER __m512i fetch(const uint8_t* p) { return _mm512_loadu_si512(p); }
  PD_MEMBER __m512i last(const uint8_t* p) { return fetch(p); }
  PD_MEMBER __m512i four(__m512i raw, int i) {
    return _mm512_and_si512(i ? _mm512_srli_epi16(raw, 4) : raw, _mm512_set1_epi8(15));
  }
  PD_MEMBER __m128i order(__m128i numbers) {
    return _mm_shuffle_epi8(numbers, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  }
  PD_MEMBER int64_t bytes(int64_t cols) { return up(cols, 8) * PANEL / 2; }
};
// What was unpacked, in the order of the format that it was: the last columns may be anywhere in the last eight.
struct Unpacked {
  static constexpr int STEP = 4, WHOLE = 8, FOURS = 1;
  static constexpr bool STORED = false;
  PD_MEMBER __m512i fetch(const uint8_t* p) { return _mm512_loadu_si512(p); }
  PD_MEMBER __m512i four(__m512i raw, int) { return raw; }
};

// -- rows -------------------------------------------------------------------------------------------------------------
template <class T>
PD_INLINE __m512 some(const T* p, int64_t count) {
  const __mmask16 mask = count >= L ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(mask, p);
  else return (__m512)((vu)_mm512_maskz_cvtepu16_epi32(__mmask16(0xffff), _mm256_maskz_loadu_epi16(mask, p)) << 16);
}

// Columns of a row as the nearest numbers to their quotients by the scale that makes the largest 127, as the packing defines it.
template <class F, class T>
PD_INLINE void round_columns(const T* x, int64_t count, int8_t* numbers, float* scale, int32_t* shift) {
  __m512i most = _mm512_setzero_si512(), total = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += L)  // magnitudes ascend like their bits, infinity and NaN behind all others
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(some(x + i, count - i)), _mm512_set1_epi32(0x7fffffff)));
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  *scale = bits >= 0x7f800000u ? __builtin_nanf("") : largest / 127.0f < 0x1p-100f ? 0x1p-100f : largest / 127.0f;
  const __m512 by = _mm512_set1_ps(*scale);
  for (int64_t i = 0; i < count; i += L) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_div_ps(some(x + i, count - i), by));
    total = _mm512_add_epi32(total, q);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), F::order(_mm512_cvtepi32_epi8(q)));
  }
  *shift = int32_t(-uint32_t(F::MIDDLE) * uint32_t(_mm512_reduce_add_epi32(total)));  // of NaNs anything
}

template <class F, class T>
void round_rows(const Linear& a, int64_t first, int64_t count, const Rows& to) {
  const Weight& w = *a.weight;
  const int64_t size = w.group ? w.group : w.cols;
  for (int64_t r = 0; r < count; r++) {
    const T* x = reinterpret_cast<const T*>(a.x.p) + (first + r) * a.x.d[1];
    int8_t* numbers = to.numbers + r * to.stride;
    __builtin_memset(numbers + to.stride - 64, 0, 64);  // columns that there are not
    for (int64_t g = 0; g < to.groups; g++)
      round_columns<F>(x + g * size, least(size, w.cols - g * size), numbers + g * size, to.scales + r * to.groups + g,
                       to.shifts + r * to.groups + g);
  }
}

// -- products ---------------------------------------------------------------------------------------------------------
// Four products of a lane's bytes, added to its sum. Compilers that are told so by the intrinsic keep copies of sums in memory.
PD_INLINE void add_products(__m512i& sum, __m512i weights, __m512i numbers) {
  asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(numbers));
}

// One step of columns, added to the sums of R rows and P panels.
template <class F, int R, int P>
PD_INLINE void add_step(const __m512i* raw, const int8_t* x, int64_t stride, __m512i (*acc)[P]) {
#pragma GCC unroll 2
  for (int i = 0; i < F::FOURS; i++) {
    __m512i four[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) four[p] = F::four(raw[p], i);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int32_t word;
      __builtin_memcpy(&word, x + r * stride + 4 * i, 4);
      const __m512i b = _mm512_set1_epi32(word);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) add_products(acc[r][p], four[p], b);
    }
  }
}

// R rows times P panels, whose weights lie at `base`, `stride` bytes one behind the other. `at`: the first row among the rounded.
template <class F, int R, int P>
void tile(const Linear& a, const Rows& rows, const uint8_t* base, int64_t stride, int64_t at, int64_t row, int64_t panel) {
  const Weight& w = *a.weight;
  const int64_t steps = up(w.cols, F::WHOLE) / F::STEP, size = w.group ? w.group / F::STEP : steps;
  const int64_t groups = rows.groups, wide = rows.stride;
  const int8_t* x = rows.numbers + at * wide;
  const float* scales = rows.scales + at * groups;
  const int32_t* shifts = rows.shifts + at * groups;
  [[maybe_unused]] const bool ahead = at == 0 && P * stride <= NEAR;
  vf sums[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sums[r][p] = splat(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    __m512i acc[R][P];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) acc[r][p] = _mm512_set1_epi32(shifts[r * groups + g]);
    const int64_t last = least((g + 1) * size, steps);
    __m512i raw[P];
    for (int64_t k = g * size; k < last; k++) {
      if constexpr (P > 1 && F::STORED)  // the tile behind; where each panel is a tile, the processor fetches by itself
        for (int p = 0; ahead && p < P; p++) __builtin_prefetch(base + (P + p) * stride + k * 64, 0, 2);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) raw[p] = F::fetch(base + p * stride + k * 64);
      add_step<F, R, P>(raw, x + k * F::STEP, wide, acc);
    }
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      const int64_t place = ((panel + p) * groups + g) * PANEL;
      vf scale = splat(1.0f);
      if (w.groups && w.groups_bf16) scale = (vf)some(static_cast<const uint16_t*>(w.groups) + place, L);
      else if (w.groups) scale = load(static_cast<const float*>(w.groups) + place);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const vf exact = __builtin_convertvector((vi)acc[r][p], vf), by = scale * splat(scales[r * groups + g]);
        sums[r][p] = fma(exact, by, sums[r][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) finish_vector(a, row + r, (panel + p) * PANEL, sums[r][p]);
}

// `count` of the rounded rows times P panels.
template <class F, int P>
void tiles(const Linear& a, const Rows& rows, const uint8_t* base, int64_t stride, int64_t count, int64_t row, int64_t panel) {
  int64_t at = 0;
  for (; at + ROWS <= count; at += ROWS) tile<F, ROWS, P>(a, rows, base, stride, at, row + at, panel);
  switch (count - at) {
    case 3: return tile<F, 3, P>(a, rows, base, stride, at, row + at, panel);
    case 2: return tile<F, 2, P>(a, rows, base, stride, at, row + at, panel);
    case 1: return tile<F, 1, P>(a, rows, base, stride, at, row + at, panel);
    default: return;
  }
}

template <class F>
void unpack(const Weight& w, int64_t panel, uint8_t* to) {
  const uint8_t* from = static_cast<const uint8_t*>(w.data) + panel * F::bytes(w.cols);
  const int64_t whole = w.cols / F::STEP, left = w.cols - whole * F::STEP;
  const auto put = [&](int64_t k, __m512i raw) {
#pragma GCC unroll 2
    for (int i = 0; i < F::FOURS; i++) _mm512_storeu_si512(to + (k * F::FOURS + i) * 64, F::four(raw, i));
  };
  for (int64_t k = 0; k < whole; k++) put(k, F::fetch(from + k * 64));
  if (left > 0) put(whole, left > 2 ? F::fetch(from + whole * 64) : F::last(from + whole * 64));
}

template <class F>
void multiply(const Linear& a, const Rows& rows, int64_t row, int64_t count, int64_t first, int64_t last) {
  const Weight& w = *a.weight;
  if (a.x.dtype == BF16) round_rows<F, uint16_t>(a, row, count, rows);
  else round_rows<F, float>(a, row, count, rows);
  const int64_t stride = F::bytes(w.cols);
  const bool half = F::STEP == 4 && w.cols % 4 && w.cols % 4 < 3;  // the last step has two columns: nothing behind it may be read
  if (count <= FEW && !half) {
    const uint8_t* base = static_cast<const uint8_t*>(w.data) + first * stride;
    for (; count > 1 && first + WIDE <= last; first += WIDE, base += WIDE * stride)
      tiles<F, WIDE>(a, rows, base, stride, count, row, first);
    for (; first < last; first++, base += stride) tiles<F, 1>(a, rows, base, stride, count, row, first);
    return;
  }
  const int64_t wide = PANEL * rows.stride;
  for (; first < last; first += WIDE) {
    const int64_t panels = least(WIDE, last - first);
    for (int64_t p = 0; p < panels; p++) unpack<F>(w, first + p, rows.unpacked + p * wide);
    if (panels == 3) tiles<Unpacked, 3>(a, rows, rows.unpacked, wide, count, row, first);
    else if (panels == 2) tiles<Unpacked, 2>(a, rows, rows.unpacked, wide, count, row, first);
    else tiles<Unpacked, 1>(a, rows, rows.unpacked, wide, count, row, first);
  }
}

template <int ACT>
void linear(const void* args, const Call& c) {
  const auto& a = *static_cast<const Linear*>(args);
  const Weight& w = *a.weight;
  if (w.rounding != PANELS_I8 || w.cols > MOST_COLUMNS) {
    static const Kernel* const other = kernel_of(&avx512_table, "linear", ACT);
    return other->run(args, c);
  }
  // Shares of rows where there are enough, since each share rounds its own, and of panels among those that have the same rows.
  const int64_t most = least(c.parts, c.n < SHARED_ROWS ? 1 : c.n / SHARED_ROWS), across = (c.parts + most - 1) / most;
  const int64_t part = c.part / across, parts = c.parts / across;
  if (part >= parts) return;
  const int64_t row_tiles = (c.n + ROWS - 1) / ROWS, panels = (w.rows + PANEL - 1) / PANEL, place = c.part % across;
  int64_t row = row_tiles * part / parts * ROWS;
  const int64_t end = least(row_tiles * (part + 1) / parts * ROWS, c.n);
  const int64_t first = panels * place / across, last = panels * (place + 1) / across;
  const Rows rows(a, c);
  for (; row < end; row += ROUNDED_ROWS) {
    const int64_t count = least(ROUNDED_ROWS, end - row);
    if (w.format == PANELS_I4) multiply<FromI4>(a, rows, row, count, first, last);
    else multiply<FromI8>(a, rows, row, count, first, last);
  }
}
bool linear_worth(const void* args, int64_t n) {
  const Weight& w = *static_cast<const Linear*>(args)->weight;
  return n * w.rows * w.cols >= (1 << 16) && w.rows > PANEL;
}

const Kernel kernels[] = {
    {"linear", F32, linear<F32>, linear_worth, sizeof(Linear) / 8},
    {"linear", BF16, linear<BF16>, linear_worth, sizeof(Linear) / 8},
};
}  // namespace

extern const Table avx512vnni_table;
const Table avx512vnni_table = {"avx512vnni", kernels, 2, avx512_table.primitives, &avx512_table};
}  // namespace pd
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
