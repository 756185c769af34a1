// Four lanes in whatever vectors the compiler has for this processor: SSE2, NEON, or plain floats.
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "ops.h"
#define PD_LANES 4
#define PD_TABLE portable_table
#if defined(__aarch64__)
#define PD_NAME "neon"
#else
#define PD_NAME "portable"
#endif
#include "numeric.inc"
