// A vector of PD_LANES floats in the compiler's own vector types, and the few operations kernels are written in.
//
// Included once a processor level, inside its namespace, with the instructions switched on. Products are contracted only
// where `fma` says so (the sources are compiled with -ffp-contract=off), so that a row's bits never depend on a tile's shape.

constexpr int64_t L = PD_LANES;
typedef float vf __attribute__((vector_size(4 * PD_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * PD_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * PD_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * PD_LANES)));
typedef int8_t vs __attribute__((vector_size(PD_LANES)));
typedef uint8_t vby __attribute__((vector_size(PD_LANES)));
struct bf16 { uint16_t bits; };

#define PD_INLINE static inline __attribute__((always_inline, unused))
#define PD_MEMBER static inline __attribute__((always_inline))

// Keep the compiler from moving loads across: with as many sums as there are registers, a load made early costs a spill.
#define PD_IN_TURN asm volatile("" ::: "memory")

PD_INLINE vf splat(float x) { return x - vf{}; }
PD_INLINE vi splat_i(int32_t x) { return x + vi{}; }
PD_INLINE vu splat_u(uint32_t x) { return x + vu{}; }

PD_INLINE vf fma(vf a, vf b, vf c) {
#if defined(PD_FMA512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PD_FMA256)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Bytes as whole numbers of 32 bits; the compilers' own conversion of so many lanes goes by halves.
PD_INLINE vi widen(const int8_t* p) {
#if defined(PD_FMA512)
  return (vi)_mm512_maskz_cvtepi8_epi32(__mmask16(0xffff), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(PD_FMA256)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vs b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vi);
#endif
}
PD_INLINE vu widen(const uint8_t* p) {
#if defined(PD_FMA512)
  return (vu)_mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(PD_FMA256)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vby b;
  __builtin_memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vu);
#endif
}

PD_INLINE vf to_float(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
// Round to nearest even; a NaN stays one.
PD_INLINE vh to_bf16(vf v) {
  vu u = (vu)v;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu quiet = (u >> 16) | 0x40u;
  vi nan = v != v;
  return __builtin_convertvector(((vu)nan & quiet) | (~(vu)nan & rounded), vh);
}

PD_INLINE vf load(const float* p) { vf v; __builtin_memcpy(&v, p, sizeof v); return v; }
PD_INLINE vf load(const bf16* p) { vh v; __builtin_memcpy(&v, p, sizeof v); return to_float(v); }
PD_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
PD_INLINE void store(bf16* p, vf v) { vh h = to_bf16(v); __builtin_memcpy(p, &h, sizeof h); }

// The first c of L lanes; the others are `fill`. The rare ragged ends are kept out of line.
template <class T>
__attribute__((noinline)) vf load_part(const T* p, int64_t c, float fill) {
  float part[PD_LANES];
  for (int64_t i = 0; i < L; i++) part[i] = fill;
  for (int64_t i = 0; i < c; i++) {
    if constexpr (sizeof(T) == 4) part[i] = reinterpret_cast<const float*>(p)[i];
    else { uint32_t u = uint32_t(reinterpret_cast<const uint16_t*>(p)[i]) << 16; __builtin_memcpy(&part[i], &u, 4); }
  }
  return load(part);
}
template <class T>
__attribute__((noinline)) void store_part(T* p, vf v, int64_t c) {
  T part[PD_LANES];
  store(part, v);
  for (int64_t i = 0; i < c; i++) p[i] = part[i];
}
template <class T>
PD_INLINE vf load(const T* p, int64_t c, float fill = 0.0f) { return c >= L ? load(p) : load_part(p, c, fill); }
template <class T>
PD_INLINE void store(T* p, vf v, int64_t c) {
  if (c >= L) store(p, v);
  else store_part(p, v, c);
}

// Lanes are combined pairwise, always in the same order.
__attribute__((noinline, unused)) static float sum(vf v) {
  float lane[PD_LANES];
  store(lane, v);
  for (int64_t width = L / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}
__attribute__((noinline, unused)) static float largest(vf v) {
  float lane[PD_LANES];
  store(lane, v);
  float m = lane[0];
  for (int64_t i = 1; i < L; i++) m = lane[i] > m ? lane[i] : m;
  return m;
}
PD_INLINE vi select_i(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
PD_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

// exp to within about one unit in the last place: x = k ln 2 + r, a polynomial of degree 6 in r (as in Cephes' expf).
PD_INLINE vf exp_of(vf x) {
  vf clamped = select(x > 88.3762626647949f, splat(88.3762626647949f), x);
  clamped = select(clamped < -87.3365478515625f, splat(-87.3365478515625f), clamped);
  const vf magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to a whole number
  vf k = fma(clamped, splat(1.44269504088896341f), magic) - magic;
  vf r = fma(k, splat(-0.693359375f), clamped);
  r = fma(k, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  vi e = (__builtin_convertvector(select(k == k, k, splat(0.0f)), vi) + 127) << 23;
  vf result = p * (vf)e;
  return select(x < -87.3365478515625f, splat(0.0f), result);
}

// log of positive normal numbers to within about one unit in the last place (Cephes' logf).
PD_INLINE vf log_of(vf x) {
  vi bits = (vi)x;
  vi e = ((bits >> 23) & 0xff) - 126;
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  vi low = m < 0.707106781186547524f;
  e = e + low;  // true is -1
  m = select(low, m + m, m) - 1.0f;
  vf fe = __builtin_convertvector(e, vf);
  vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vf y = p * m * z;
  y = fma(fe, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  vf r = m + y;
  return fma(fe, splat(0.693359375f), r);
}
