// What kernels, thread pool and C interface share: argument records, weights, caches, and the table of kernels.
//
// An argument record is the contract's record word for word: fields in the same order, a buffer as five words (address, three
// sizes, dtype), a weight or cache as the address of its struct, a parameter as one word. `pd_bind` checks the total.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pd {

enum DType : int64_t { F32 = 0, BF16 = 1, I32 = 2, U32 = 3, U8 = 4, F16 = 5 };

template <class T>
struct Tensor {
  T* p;
  int64_t d[3];
  int64_t dtype;
  T& operator[](int64_t i) const { return p[i]; }
  T* row(int64_t i) const { return p + i * d[1]; }
};
using Ints = Tensor<int32_t>;
using Words = Tensor<uint32_t>;
using Floats = Tensor<float>;
using Any = Tensor<char>;  // activation dtype, or either float

// -- weights and caches -----------------------------------------------------------------------------------------------
constexpr int64_t PANEL = 16;  // outputs that lie side by side in a packed matrix, on every processor

enum Format : int64_t {
  VECTOR_F32 = 0, ROWS_F32 = 1, ROWS_BF16 = 2, PANELS_F32 = 3, PANELS_BF16 = 4, PANELS_I8 = 5, PANELS_F8 = 6, PANELS_I4 = 7
};
constexpr int64_t BLOCK = 64;  // columns of one block of a sum, at most

// A stack of matrices is one behind the other; rows, cols and scales are those of one.
// A matrix [rows, cols] in panels: [rows / 16][cols / 2][16][2], both rounded up, so that a pair of columns of one output is
// one 32-bit word in bf16. float32, int8 and fp8 (E4M3) keep [rows / 16][cols][16], int4 [rows / 16][cols / 8][16] 32-bit words,
// the first of eight columns in the lowest four bits.
struct Weight {
  void* data;
  int64_t format, rows, cols;
  const float* scale;     // [rows] of packed weights that have a scale an output, else null
  const void* groups;     // [rows / 16][groups][16] of those that have more, else null
  int64_t groups_bf16;    // whether those are bfloat16, else float32
  const uint8_t* zeros;   // [rows / 16][groups][16] of int4 with zero points, else null
  int64_t group;          // columns of a scale in `groups` and of a zero point; 0: all
  int64_t rounding;       // what rows are rounded to: 0 nothing, or a format
  int64_t rounding_cols;  // columns that are rounded with one scale
};

// Keys [block][head][dim][padded], so that a vector holds one element of many keys; values [block][head][block_size][wide].
// padded and wide are block_size and dim rounded up to 16.
struct Cache {
  void *k, *v;
  int64_t num_blocks, block_size, heads, dim, padded, wide;
};

// -- launches ---------------------------------------------------------------------------------------------------------
struct Primitives;

struct Call {
  int64_t n;
  int64_t part, parts;  // which share of the launch this call is
  int64_t thread;       // whose part of the workspace it may use
  char* workspace;
  const Primitives* primitives;
};

using Run = void (*)(const void* args, const Call& call);
using Worth = bool (*)(const void* args, int64_t n);

struct Kernel {
  const char* name;
  int act;       // dtype of activations, or -1: takes none
  Run run;       // one part of a launch, or all of it
  Worth worth;   // whether parts on several threads pay for n; null: never
  int64_t words; // size of the argument record
};

// Row primitives that differ by processor and that sampling is made of.
struct Primitives {
  int32_t (*best)(const float* row, int64_t n);                               // argmax, -1 for NaN, +inf, all -inf
  int32_t (*best_sum)(const float* a, float scale, const float* b, int64_t n);  // argmax of a / scale + b
  void (*shares)(const float* z, float scale, float top, float* out, int64_t n);  // exp(z / scale - top)
  void (*gumbel)(uint32_t k0, uint32_t k1, uint32_t position, uint32_t draw, float* out, int64_t n);
};

struct Table {
  const char* name;
  const Kernel* kernels;
  int64_t count;
  Primitives primitives;
  const Table* rest;  // where the kernels are that this table does not have; null: it has all
};

extern const Table portable_table;
#if defined(__x86_64__)
extern const Table avx2_table, avx512_table, avx512vnni_table, avx512bf16_table;
#endif
extern const Kernel state_kernels[];
extern const int64_t num_state_kernels;
extern const Kernel sampling_kernels[];
extern const int64_t num_sampling_kernels;
extern const Kernel logprob_kernels[];
extern const int64_t num_logprob_kernels;

// A kernel of a level, or of those that have the rest; null: none has it. Only where both are known to this processor.
static inline const Kernel* kernel_of(const Table* table, const char* name, int64_t act) {
  for (; table; table = table->rest)
    for (int64_t i = 0; i < table->count; i++)
      if (table->kernels[i].act == act && __builtin_strcmp(table->kernels[i].name, name) == 0) return &table->kernels[i];
  return nullptr;
}

inline void share(int64_t total, const Call& c, int64_t* first, int64_t* last) {
  *first = total * c.part / c.parts;
  *last = total * (c.part + 1) / c.parts;
}

template <class R>
const R& record(const void* args) { return *static_cast<const R*>(args); }

// A thread's part of the workspace: three rows of floats and one of ids.
struct Scratch {
  float *first, *second, *noise;
  int32_t* ids;
  Scratch(const Call& c, int64_t vocab) {
    const int64_t row = (vocab + 15) / 16 * 16;
    first = reinterpret_cast<float*>(c.workspace) + c.thread * 4 * row;
    second = first + row;
    noise = second + row;
    ids = reinterpret_cast<int32_t*>(noise + row);
  }
};

constexpr int32_t PAD_SLOT = -1, NO_TOKEN = -1, NO_BLOCK = -1, NO_ROW = -1;
enum Phase : int32_t { IDLE = 0, PREFILL = 1, DECODE = 2, PAUSED = 3, FINISHED = 4 };
enum Finish : int32_t { NONE = 0, STOP = 1, LENGTH = 2, ABORT = 3, ERROR = 4 };

// -- argument records of the numeric contracts ------------------------------------------------------------------------
struct Embed { Ints ids; const Weight* weight; Any out; };
struct RmsNorm { Any x; const Weight* weight; Any out; double eps; int64_t plus_one; };
struct ResidualAdd { Any x, y; };
struct AddNorm { ResidualAdd add; RmsNorm norm; };
struct Linear { Any x; const Weight* weight; const Weight* bias; Any out; };
struct RopeKvWrite {
  Any qkv; Ints row_slot, positions, block_table; Cache* cache; void* meta; const Weight *q_norm, *k_norm; Any q_out;
  int64_t num_heads, num_kv_heads, head_dim, pairs; double attention_factor; int64_t style, block_size; double eps;
  const float* table;  // [positions][2][pairs]: cosines, sines, times the factor
};
struct PagedAttention {
  Any q; Ints row_slot, positions, block_table; const Cache* cache; void* meta; Any out;
  int64_t num_heads, num_kv_heads, head_dim, block_size; double softmax_scale; int64_t sliding_window;
};
struct Swiglu { Any gate_up, out; };
struct RouteExperts {
  Floats logits; const Weight* bias; Ints row_slot, expert_ids; Floats expert_weights;
  int64_t scoring, num_groups, top_groups, renormalize; double floor, scale;
};
struct ExpertMlp {
  Any x; Ints expert_ids; Floats expert_weights; const Weight *gate_up, *down; Any shared; Floats shared_gate; Any out;
  int64_t* claims;  // [2] zeros: experts (or blocks of rows) that were claimed, parts that have ended
};
struct ExpertLeaves {
  Any x; Ints expert_ids; Floats expert_weights; const Weight *gate_up, *down; Any shared; Floats shared_gate;
  int64_t leaves, split; Any out;
  int64_t* claims;  // as above
  int64_t run;      // experts of a leaf; 0 where leaves have stretches of features
};
struct LinearLeaves { Any x; const Weight *weight, *bias; int64_t leaves; Any out; };
struct SumLeaves { Floats x; int64_t leaves; Any out; };
struct GatherRows { Any x; Ints index; Any out; };
struct SelectLastRows { Any hidden; Ints positions, seq_start, draft_slot, draft_position; Any out; };
struct CombineDraftInputs {
  Any embedding, hidden; const Weight *emb_norm, *hid_norm; Ints positions; Any out;
  double eps; int64_t plus_one, embedding_first, mask_first_position;
};

}  // namespace pd
