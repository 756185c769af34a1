// The C interface: a context with a team of threads, kernels bound to arguments, programs of launches, packed weights.
//
// Python (`library.py`) is its only caller. Nothing throws out of it: what fails returns null or a negative number, and
// `pd_error` says why. One thread at a time issues to a context; any may wait.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ops.h"
#include "pool.h"
#include "queue.h"

#if defined(_WIN32)
#define PD_EXPORT extern "C" __declspec(dllexport)
#else
#define PD_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace pd {
namespace {

constexpr int64_t ABI = 10;
constexpr int64_t PARTS = 2;  // a thread: a few more than one, so that a late thread leaves little undone
thread_local std::string error;

struct Context;

struct Op {
  Context* context;
  const Kernel* kernel;
  std::vector<int64_t> words;
  char* workspace;
};

struct Launch {
  const Op* op;
  int64_t n;
};
using Program = std::vector<Launch>;

void perform(void* context, const Command& command);

// When a launch or copy of a command ran, on the library's clock.
struct Span {
  int64_t number, rows, start_ns, end_ns;
  const char* name;
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A kernel that the caller brings; returns 0, or anything else where it failed.
using HostFunction = int64_t (*)(int64_t n);
struct HostKernel {
  std::string name;
  Kernel kernel;
};
struct HostCall { HostFunction function; Context* context; };

// A context with a queue has one guest in its team: who waits for the queue.
struct Context {
  const Table* table;
  Team team;
  std::vector<std::unique_ptr<HostKernel>> host_kernels;
  std::vector<std::unique_ptr<Op>> ops;
  bool failed = false;  // a kernel of the caller failed: nothing more is carried out; set by who carries out
  std::unique_ptr<Program> recording;
  bool timing = false;  // changed and read while nothing is outstanding, as `spans` is
  std::vector<Span> spans;
  Queue queue;  // ends first
  Context(const Table* t, int64_t threads, bool queued, bool pinned)
      : table(t), team(threads, queued && threads > 1, pinned), queue(perform, this, team, queued) {}
};

bool worth(const Launch& l) { return l.op->kernel->worth && l.op->kernel->worth(l.op->words.data(), l.n); }

void run_part(const void* job, int64_t part, int64_t parts, int64_t thread) {
  const Launch& l = *static_cast<const Launch*>(job);
  const Call call{l.n, part, parts, thread, l.op->workspace, &l.op->context->table->primitives};
  l.op->kernel->run(l.op->words.data(), call);
}

void call_host(const void* args, const Call& call) {
  const HostCall& host = record<HostCall>(args);
  if (host.function(call.n) != 0) host.context->failed = true;
}

// One launch after the other; those that are worth it are shared with the team.
void run(Context& context, const Launch* launches, int64_t count) {
  Team& team = context.team;
  const bool shared = team.usable() && std::any_of(launches, launches + count, worth);
  for (const Launch* l = launches; l != launches + count && !context.failed; l++) {
    const int64_t start = context.timing ? now_ns() : 0;
    if (shared && worth(*l)) {
      team.wake();
      team.run(run_part, l, team.size() * PARTS);
    } else {
      run_part(l, 0, 1, 0);
    }
    if (context.timing) context.spans.push_back({context.queue.current(), l->n, start, now_ns(), l->op->kernel->name});
  }
}

void copy_part(const void* job, int64_t number, int64_t parts, int64_t) {
  const Command& c = *static_cast<const Command*>(job);
  const int64_t first = c.n * number / parts, last = c.n * (number + 1) / parts;
  std::memcpy(static_cast<char*>(c.to) + first, static_cast<const char*>(c.what) + first, size_t(last - first));
}

void perform(void* context, const Command& c) {
  Context& own = *static_cast<Context*>(context);
  if (own.failed) return;
  const int64_t start = own.timing ? now_ns() : 0;
  if (c.kind == Command::COPY || (c.kind == Command::SHARED_COPY && !own.team.usable())) {
    copy_part(&c, 0, 1, 0);
  } else if (c.kind == Command::SHARED_COPY) {
    own.team.wake();
    own.team.run(copy_part, &c, own.team.size() * 8);
  } else if (c.kind == Command::REPLAY) {
    const Program& program = *static_cast<const Program*>(c.what);
    run(own, program.data(), int64_t(program.size()));
  } else {
    const Launch launch{static_cast<const Op*>(c.what), c.n};
    run(own, &launch, 1);
  }
  if (own.timing && c.kind >= Command::COPY) own.spans.push_back({own.queue.current(), c.n, start, now_ns(), "copy"});
}

const Kernel* find(const Kernel* kernels, int64_t count, const char* name, int act) {
  for (int64_t i = 0; i < count; i++)
    if (std::strcmp(kernels[i].name, name) == 0 && (kernels[i].act == act || kernels[i].act < 0)) return &kernels[i];
  return nullptr;
}

const Kernel* find(const Table& table, const char* name, int act) {
  for (const Table* t = &table; t; t = t->rest)
    if (const Kernel* k = find(t->kernels, t->count, name, act)) return k;
  if (const Kernel* k = find(state_kernels, num_state_kernels, name, act)) return k;
  if (const Kernel* k = find(sampling_kernels, num_sampling_kernels, name, act)) return k;
  return find(logprob_kernels, num_logprob_kernels, name, act);
}

#if defined(__x86_64__)
// CPUID leaf 7, subleaf 1, EAX bit 5: older compilers have no name for it.
bool has_bf16_products() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0;
}
#endif

// Levels of this processor, best last.
std::vector<const Table*> levels() {
  std::vector<const Table*> found{&portable_table};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.push_back(&avx2_table);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      found.push_back(&avx512_table);
      if (__builtin_cpu_supports("avx512vnni")) {
        found.push_back(&avx512vnni_table);
        if (avx512bf16_table.name && has_bf16_products()) found.push_back(&avx512bf16_table);
      }
    }
  }
#endif
  return found;
}

uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace

PD_EXPORT int64_t pd_abi() { return ABI; }
PD_EXPORT const char* pd_error() { return error.c_str(); }

// Names of the levels that this processor has, best last, separated by spaces.
PD_EXPORT const char* pd_levels() {
  static const std::string names = [] {
    std::string text;
    for (const Table* table : levels()) text += (text.empty() ? "" : " ") + std::string(table->name);
    return text;
  }();
  return names.c_str();
}

PD_EXPORT Context* pd_open(const char* level, int64_t threads, int64_t queued, int64_t pinned) {
  for (const Table* table : levels())
    if (std::strcmp(table->name, level) == 0)
      return new (std::nothrow) Context(table, threads < 1 ? 1 : threads, queued != 0, pinned != 0);
  error = std::string("this processor has no ") + level + "; it has " + pd_levels();
  return nullptr;
}

// Carry out what was issued and end the threads; launches still work, on the caller's thread alone.
PD_EXPORT void pd_stop(Context* context) {
  context->queue.stop();
  context->team.stop();
}
// A forked child keeps what it got: it cannot end threads that it does not have.
PD_EXPORT void pd_close(Context* context) {
  if (!context->queue.lost() && !context->team.lost()) delete context;
}

// Contracts and composites that have a kernel on every processor, a line each.
PD_EXPORT const char* pd_kernels() {
  static const std::string names = [] {
    std::string lines;
    auto add = [&](const Kernel* kernels, int64_t count) {
      for (int64_t i = 0; i < count; i++) lines += std::string(kernels[i].name) + "\n";
    };
    for (const Table* t = levels().front(); t; t = t->rest) add(t->kernels, t->count);
    add(state_kernels, num_state_kernels);
    add(sampling_kernels, num_sampling_kernels);
    add(logprob_kernels, num_logprob_kernels);
    return lines;
  }();
  return names.c_str();
}

// The size of a kernel's argument record in words; -1 for a kernel that does not exist.
PD_EXPORT int64_t pd_words(Context* context, const char* name, int64_t act) {
  const Kernel* kernel = find(*context->table, name, int(act));
  return kernel ? kernel->words : -1;
}

PD_EXPORT const Op* pd_bind(Context* context, const char* name, int64_t act, const int64_t* words, int64_t count, void* workspace) {
  const Kernel* kernel = find(*context->table, name, int(act));
  if (!kernel) {
    error = std::string("no kernel ") + name + " for this dtype";
    return nullptr;
  }
  if (kernel->words != count) {
    error = std::string(name) + " takes " + std::to_string(kernel->words) + " words, got " + std::to_string(count);
    return nullptr;
  }
  context->ops.push_back(std::make_unique<Op>(Op{context, kernel, std::vector<int64_t>(words, words + count),
                                                 static_cast<char*>(workspace)}));
  return context->ops.back().get();
}

// A launch calls `function(n)`, in its place among the others, on the thread that carries them out.
PD_EXPORT const Op* pd_bind_host(Context* context, const char* name, HostFunction function) {
  auto host = std::make_unique<HostKernel>(HostKernel{name, {nullptr, -1, call_host, nullptr, 2}});
  host->kernel.name = host->name.c_str();
  context->host_kernels.push_back(std::move(host));
  const std::vector<int64_t> words{reinterpret_cast<int64_t>(function), reinterpret_cast<int64_t>(context)};
  context->ops.push_back(std::make_unique<Op>(Op{context, &context->host_kernels.back()->kernel, words, nullptr}));
  return context->ops.back().get();
}
// Carry out commands again after a failure. Called while nothing is outstanding.
PD_EXPORT void pd_mend(Context* context) { context->failed = false; }

// Issuing: each returns the number of the command issued last, to be waited for.
PD_EXPORT int64_t pd_launch(const Op* op, int64_t n) {
  Context& context = *op->context;
  if (context.recording) context.recording->push_back(Launch{op, n});
  else if (n > 0 || op->kernel->act < 0) context.queue.add({Command::LAUNCH, op, nullptr, n});  // some state kernels write tails
  return context.queue.issued();
}
PD_EXPORT int64_t pd_replay(Context* context, const Program* program) {
  return context->queue.add({Command::REPLAY, program, nullptr, 0});
}
PD_EXPORT int64_t pd_move(Context* context, void* to, const void* from, int64_t bytes) {
  return context->queue.add({Command::COPY, from, to, bytes});
}
PD_EXPORT int64_t pd_reached(Context* context, int64_t number) { return context->queue.reached(number); }
PD_EXPORT void pd_wait(Context* context, int64_t number) { context->queue.wait(number); }

PD_EXPORT void pd_record(Context* context) { context->recording = std::make_unique<Program>(); }

// End a recording; null where there was none.
PD_EXPORT Program* pd_recorded(Context* context) { return context->recording.release(); }
PD_EXPORT int64_t pd_program_bytes(const Program* program) { return int64_t(program->capacity() * sizeof(Launch)); }
PD_EXPORT void pd_forget(Program* program) { delete program; }

// Begin or end noting when commands run; returns the library's clock. Called while nothing is outstanding.
PD_EXPORT int64_t pd_time(Context* context, int64_t on) {
  context->spans.clear();
  context->timing = on != 0;
  return now_ns();
}
PD_EXPORT int64_t pd_num_spans(Context* context) { return int64_t(context->spans.size()); }
// All of them, five words each, in the order of issue.
PD_EXPORT void pd_spans(Context* context, void* out) {
  std::memcpy(out, context->spans.data(), context->spans.size() * sizeof(Span));
}

// -- weights ----------------------------------------------------------------------------------------------------------
// Whether every value is one of bfloat16: rounding would change nothing.
PD_EXPORT int64_t pd_is_bf16(const float* values, int64_t count) {
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(values);
  uint32_t low = 0;
  for (int64_t i = 0; i < count; i++) low |= bits[i] & 0xffffu;
  return low == 0;
}

PD_EXPORT void pd_pack_rows_bf16(const float* values, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = to_bf16(values[i]);
}

// Panels as `Weight` describes them; `out` is zeroed by the caller.
PD_EXPORT void pd_pack_panels(const float* values, int64_t rows, int64_t cols, int64_t format, void* out, float* scale) {
  const int64_t pairs = (cols + 1) / 2;
  for (int64_t r = 0; r < rows; r++) {
    const float* row = values + r * cols;
    const int64_t first = (r / PANEL) * pairs * PANEL * 2, lane = r % PANEL;
    if (format == PANELS_F32) {
      for (int64_t i = 0; i < cols; i++) static_cast<float*>(out)[first + i * PANEL + lane] = row[i];
    } else if (format == PANELS_BF16) {
      for (int64_t i = 0; i < cols; i++)
        static_cast<uint16_t*>(out)[first + (i / 2) * PANEL * 2 + lane * 2 + i % 2] = to_bf16(row[i]);
    } else {
      float most = 0;
      for (int64_t i = 0; i < cols; i++) most = std::max(most, row[i] < 0 ? -row[i] : row[i]);
      scale[r] = most > 0 ? most / 127.0f : 1.0f;
      for (int64_t i = 0; i < cols; i++) {
        const float x = row[i] / scale[r];
        const float nearest = x < 0 ? x - 0.5f : x + 0.5f;
        static_cast<int8_t*>(out)[first + i * PANEL + lane] = int8_t(std::min(std::max(nearest, -127.0f), 127.0f));
      }
    }
  }
}

// Keys or values of a cache in canonical order [block][offset][head][dim], float32: `back` reads, else writes.
PD_EXPORT void pd_cache_logical(const Cache* c, int64_t act, float* k, float* v, int64_t back) {
  auto copy = [&](void* stored, int64_t place, float* value) {
    if (act == BF16) {
      uint16_t* at = static_cast<uint16_t*>(stored) + place;
      if (!back) { *at = to_bf16(*value); return; }
      const uint32_t u = uint32_t(*at) << 16;
      std::memcpy(value, &u, 4);
    } else {
      float* at = static_cast<float*>(stored) + place;
      if (back) *value = *at;
      else *at = *value;
    }
  };
  for (int64_t b = 0; b < c->num_blocks; b++)
    for (int64_t j = 0; j < c->block_size; j++)
      for (int64_t g = 0; g < c->heads; g++)
        for (int64_t i = 0; i < c->dim; i++, k++, v++) {
          copy(c->k, ((b * c->heads + g) * c->dim + i) * c->padded + j, k);
          copy(c->v, ((b * c->heads + g) * c->block_size + j) * c->wide + i, v);
        }
}

// Copy `bytes` with every thread, behind everything that was issued, to know what the machine's memory allows.
PD_EXPORT void pd_copy(Context* context, void* to, const void* from, int64_t bytes) {
  context->queue.wait(context->queue.add({Command::SHARED_COPY, from, to, bytes}));
}

}  // namespace pd
