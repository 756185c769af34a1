#include "pool.h"

#include <chrono>
#include <system_error>
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pd {
namespace {

constexpr std::chrono::microseconds SPIN{300};  // the host's part of a step lies between two jobs
constexpr int64_t PATIENCE = 2000;              // looks at the last part before the processor is offered to others

// Keep a worker on one processor: the thread-th of those that this process may use.
void pin(int64_t thread) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  int64_t count = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || count++ != thread) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
    return;
  }
#else
  (void)thread;
#endif
}

}  // namespace

int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
  return getpid();
#else
  return 0;
#endif
}

bool Team::usable() const {
  return threads_ > 1 && !stopping_.load(std::memory_order_relaxed) && !lost();
}

void Team::start() {
  process_ = process_id();
  try {
    for (int64_t t = 1; t <= helpers_wanted_; t++) helpers_.emplace_back([this, t] { help(t); });
  } catch (const std::system_error&) {  // no more threads for this process: whoever there is claims all parts
    helpers_wanted_ = int64_t(helpers_.size());
  }
}

void Team::wake() {
  if (helpers_.empty() && helpers_wanted_ > 0) start();
  calls_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  std::lock_guard<std::mutex> hold(mutex_);
  wake_.notify_all();
}

void Team::run(Part part, const void* job, int64_t parts) {
  part_ = part;
  job_ = job;
  done_.store(0, std::memory_order_relaxed);
  number_++;
  state_.store(uint64_t(number_) << 32 | uint64_t(parts) << 16, std::memory_order_release);
  while (claim(0)) {
  }
  for (int64_t spins = 0; done_.load(std::memory_order_acquire) != parts; spins++) {
    if (spins < PATIENCE) relax();
    else std::this_thread::yield();  // a helper was taken off its processor in the middle of a part
  }
}

bool Team::claim(int64_t thread) {
  uint64_t state = state_.load(std::memory_order_acquire);
  for (;;) {
    const int64_t parts = int64_t(state >> 16 & 0xffff), next = int64_t(state & 0xffff);
    if (next >= parts) return false;
    if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    part_(job_, next, parts, thread);  // neither changes before every claimed part is done
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }
}

void Team::help(int64_t thread) {
  using clock = std::chrono::steady_clock;
  if (pinned_) pin(thread);
  while (!stopping_.load(std::memory_order_acquire)) {
    const uint32_t seen = calls();
    for (auto until = clock::now() + SPIN; clock::now() < until;) {
      for (int i = 0; i < 64; i++) {
        if (claim(thread)) until = clock::now() + SPIN;
        else relax();
      }
    }
    sleep(seen);
  }
}

void Team::sleep(uint32_t seen) {
  std::unique_lock<std::mutex> hold(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(hold, [&] { return calls() != seen || stopping_.load(std::memory_order_seq_cst); });
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Team::stop() {
  if (stopping_.exchange(true)) return;
  if (helpers_.empty() || lost()) return;
  wake();
  for (auto& helper : helpers_) helper.join();
}

}  // namespace pd
