// The stream of a context: commands in the order in which they were issued, and the thread that carries them out.
//
// Issuing returns at once. Whoever waits for a command works along meanwhile as the last thread of the team, so that on two
// processors both compute, and the host's own work costs only the processor that it runs on. Without a thread of its own (not
// wanted, stopped, or lost in a forked child) a queue carries out each command when it is issued.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "pool.h"

namespace pd {

struct Command {
  enum Kind : int64_t { LAUNCH, REPLAY, COPY, SHARED_COPY } kind;
  const void* what;
  void* to;
  int64_t n;
};

class Queue {
 public:
  using Perform = void (*)(void* owner, const Command& command);

  Queue(Perform perform, void* owner, Team& team, bool threaded)
      : perform_(perform), owner_(owner), team_(team), threaded_(threaded) {}
  ~Queue() { stop(); }
  // Issue a command; returns its number, which counts from 1.
  int64_t add(const Command& command);
  // The number of the command issued last.
  int64_t issued() const { return int64_t(tail_.load(std::memory_order_relaxed)); }
  // The number of the command that is being carried out; for who carries it out.
  int64_t current() const { return int64_t(head_.load(std::memory_order_relaxed)) + 1; }
  bool reached(int64_t number) const { return int64_t(head_.load(std::memory_order_acquire)) >= number; }
  // Return once the command of this number, and all before it, have been carried out.
  void wait(int64_t number);
  // Carry out what is left, and end the thread.
  void stop();
  // Whether the thread is one of the parent process: then nothing here can be torn down.
  bool lost() const { return thread_.joinable() && process_ != process_id(); }

 private:
  static constexpr uint64_t ROOM = 1024;  // commands that can be outstanding; a step issues a dozen

  bool alone() const;
  void drain();
  bool start();
  void serve();
  void rest();

  const Perform perform_;
  void* const owner_;
  Team& team_;
  const bool threaded_;
  std::thread thread_;
  int64_t process_ = 0;

  Command ring_[ROOM];
  alignas(64) std::atomic<uint64_t> tail_{0};  // commands issued
  alignas(64) std::atomic<uint64_t> head_{0};  // commands carried out
  alignas(64) std::atomic<bool> helped_{false};  // whether somebody who waits works along
  std::atomic<bool> resting_{false}, stopping_{false}, stopped_{false};
  std::atomic<int32_t> waiting_{0};
  std::mutex mutex_;
  std::condition_variable more_, done_;
};

}  // namespace pd
