// The thread pool: a team whose caller does a job in parts and whose other threads help where they happen to run.
//
// Parts are claimed one by one. A helper that the system has not scheduled claims none, so nobody waits for it: on a busy
// machine the caller simply does more itself. An idle helper spins for a bounded time and then sleeps. Threads start with the
// first job that is worth them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace pd {

int64_t process_id();
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  // One part of a job; `thread` tells whose scratch memory it may use.
  using Part = void (*)(const void* job, int64_t part, int64_t parts, int64_t thread);

  // `guests` of the threads are not the team's own: they come and claim parts as they like.
  Team(int64_t threads, int64_t guests, bool pinned) : threads_(threads), helpers_wanted_(threads - 1 - guests), pinned_(pinned) {}
  ~Team() { stop(); }
  int64_t size() const { return threads_; }
  // Whether there are helpers: not after `stop`, and not in a forked child, which has none of its parent's threads.
  bool usable() const;
  // Call who helps: parts will come soon.
  void wake();
  // How often that was done, and sleep until it is done again: for guests, as for helpers.
  uint32_t calls() const { return calls_.load(std::memory_order_seq_cst); }
  void sleep(uint32_t seen);
  // Run a job; returns when all its parts have ended. `parts` is at most 65535.
  void run(Part part, const void* job, int64_t parts);
  // Do one part of the job in progress; whether there was one.
  bool claim(int64_t thread);
  void stop();
  // Whether the helpers are those of the parent process.
  bool lost() const { return !helpers_.empty() && process_ != process_id(); }

 private:
  void start();
  void help(int64_t thread);

  const int64_t threads_;
  int64_t helpers_wanted_;  // fewer, once the system has refused some
  const bool pinned_;
  std::vector<std::thread> helpers_;
  int64_t process_ = 0;

  // Number of the job (32 bits), its parts (16), the next part to claim (16): a part is claimed by one exchange of the whole.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  // Written by the caller before a job's state, read by who has claimed a part of it.
  Part part_ = nullptr;
  const void* job_ = nullptr;
  uint32_t number_ = 0;

  alignas(64) std::atomic<uint32_t> calls_{0};
  std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace pd
