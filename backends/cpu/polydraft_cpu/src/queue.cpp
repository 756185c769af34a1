#include "queue.h"

#include <chrono>
#include <system_error>

namespace pd {
namespace {

using clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds SPIN{300};  // the host's part of a step lies between two commands
constexpr std::chrono::microseconds GLANCE{20}; // for who cannot work along

}  // namespace

// Whether commands are carried out by who issues them.
bool Queue::alone() const {
  return !threaded_ || stopped_.load(std::memory_order_relaxed) || lost();
}

// Whether there is a thread now; else the system has none left for this process.
bool Queue::start() {
  process_ = process_id();
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

// Carry out what a parent process left, or what was issued just now.
void Queue::drain() {
  for (uint64_t head = head_.load(std::memory_order_relaxed); head != tail_.load(std::memory_order_relaxed);) {
    perform_(owner_, ring_[head % ROOM]);
    head_.store(++head, std::memory_order_release);
  }
}

int64_t Queue::add(const Command& command) {
  const uint64_t tail = tail_.load(std::memory_order_relaxed);
  const bool alone_here = alone() || (!thread_.joinable() && !start());
  if (tail - head_.load(std::memory_order_acquire) == ROOM) wait(int64_t(tail - ROOM / 2));
  ring_[tail % ROOM] = command;
  tail_.store(tail + 1, std::memory_order_seq_cst);
  if (alone_here) {
    drain();
  } else if (resting_.load(std::memory_order_seq_cst)) {
    std::lock_guard<std::mutex> hold(mutex_);
    more_.notify_one();
  }
  return int64_t(tail + 1);
}

void Queue::serve() {
  uint64_t head = head_.load(std::memory_order_relaxed);
  for (;;) {
    auto until = clock::now() + SPIN;
    for (int64_t looks = 1; tail_.load(std::memory_order_acquire) == head; looks++) {
      if (stopping_.load(std::memory_order_acquire)) {
        if (tail_.load(std::memory_order_acquire) == head) return;
        break;
      }
      relax();
      if (looks % 64 == 0 && clock::now() > until) rest();
    }
    if (tail_.load(std::memory_order_acquire) == head) continue;
    perform_(owner_, ring_[head % ROOM]);
    head_.store(++head, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) == 0) continue;
    team_.wake();
    std::lock_guard<std::mutex> hold(mutex_);
    done_.notify_all();
  }
}

// Sleep until there is a command.
void Queue::rest() {
  std::unique_lock<std::mutex> hold(mutex_);
  resting_.store(true, std::memory_order_seq_cst);
  more_.wait(hold, [this] {
    return tail_.load(std::memory_order_seq_cst) != head_.load(std::memory_order_relaxed) || stopping_.load(std::memory_order_seq_cst);
  });
  resting_.store(false, std::memory_order_seq_cst);
}

void Queue::wait(int64_t number) {
  if (reached(number)) return;
  if (alone()) {
    drain();
    return;
  }
  const bool helps = team_.size() > 1 && !helped_.exchange(true, std::memory_order_acquire);
  const auto patience = helps ? SPIN : GLANCE;
  auto until = clock::now() + patience;
  uint32_t seen = team_.calls();
  for (int64_t looks = 1; !reached(number); looks++) {
    if (helps && team_.claim(team_.size() - 1)) {
      until = clock::now() + patience;
      continue;
    }
    relax();
    if (looks % 64 != 0 || clock::now() < until) continue;
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    const auto over = [&] { return int64_t(head_.load(std::memory_order_seq_cst)) >= number; };
    if (helps) {  // until there is something to claim again, however long the parts of others take
      if (!over()) team_.sleep(seen);
      seen = team_.calls();
      until = clock::now() + patience;
    } else {
      std::unique_lock<std::mutex> hold(mutex_);
      done_.wait(hold, over);
    }
    waiting_.fetch_sub(1, std::memory_order_seq_cst);
  }
  if (helps) helped_.store(false, std::memory_order_release);
}

void Queue::stop() {
  if (stopped_.exchange(true)) return;
  if (!thread_.joinable() || lost()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  {
    std::lock_guard<std::mutex> hold(mutex_);
    more_.notify_all();
  }
  thread_.join();
}

}  // namespace pd
