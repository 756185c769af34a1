// Eight lanes for x86 processors with AVX2 and FMA.
#if defined(__x86_64__)
#include <immintrin.h>
#include "ops.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define PD_LANES 8
#define PD_FMA256
#define PD_TABLE avx2_table
#define PD_NAME "avx2"
#include "numeric.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
