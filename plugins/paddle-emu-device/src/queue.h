// Streams, events and graphs of the emulated device: what a chip's driver would give.
//
// A stream is a queue with one worker thread; an event is a flag that a stream sets when it reaches it; a graph is a list of the
// work that was queued while a stream was capturing. Nothing here knows Paddle.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace polyemu {

using Work = std::function<void()>;

struct Graph {
  std::vector<Work> work;
};

// Set once; who waits for it sleeps.
class Flag {
 public:
  void set() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  bool is_set() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

// An event is recorded again and again: each record gives it a new flag, and who waits holds on to the flag of that moment.
class Event {
 public:
  void move_to(std::shared_ptr<Flag> flag) {
    std::lock_guard<std::mutex> lock(mutex_);
    flag_ = std::move(flag);
  }
  std::shared_ptr<Flag> flag() {
    std::lock_guard<std::mutex> lock(mutex_);
    return flag_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Flag> flag_;
};

// What the device does otherwise than by itself: microseconds that every queued piece of work takes at least, a count of copies after
// which one fails, bytes of memory, a device that answers nothing; and, as a chip does: factors of products in TF32, the last of equal
// maxima, no graphs.
struct Knobs {
  std::atomic<int64_t> latency_us{0};
  std::atomic<int64_t> copies_until_failure{-1};
  std::atomic<int64_t> bytes_limit{int64_t{4} << 30};
  std::atomic<int64_t> lost{0};
  std::atomic<int64_t> tf32{0};
  std::atomic<int64_t> last_maximum{0};
  std::atomic<int64_t> no_graphs{0};
};

struct Counters {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> copies{0};
  std::atomic<int64_t> synchronous_copies{0};
  std::atomic<int64_t> pageable_copies{0};
  std::atomic<int64_t> graph_launches{0};
  std::atomic<int64_t> collectives{0};
  std::atomic<int64_t> bytes_in_use{0};
  std::atomic<int64_t> peak_bytes{0};
  std::atomic<int64_t> graph_bytes{0};
};

inline Knobs& knobs() {
  static Knobs instance;
  return instance;
}

inline Counters& counters() {
  static Counters instance;
  return instance;
}

class Stream {
 public:
  Stream() : worker_([this] { run(); }) {}

  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }

  void submit(Work work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (capture_ != nullptr) {
        capture_->work.push_back(std::move(work));
        return;
      }
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !busy_;
  }

  bool capturing() {
    std::lock_guard<std::mutex> lock(mutex_);
    return capture_ != nullptr;
  }

  void begin_capture() {
    std::lock_guard<std::mutex> lock(mutex_);
    capture_ = std::make_unique<Graph>();
  }

  std::unique_ptr<Graph> end_capture() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(capture_);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Work work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      const int64_t latency = knobs().latency_us.load();
      if (latency > 0) std::this_thread::sleep_for(std::chrono::microseconds(latency));
      work();
      work = nullptr;  // what it holds on to is freed before the stream counts as idle
      lock.lock();
      busy_ = false;
      if (queue_.empty()) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  std::deque<Work> queue_;
  std::unique_ptr<Graph> capture_;
  bool closing_ = false;
  bool busy_ = false;
  std::thread worker_;  // last, so that everything it uses exists before it starts
};

}  // namespace polyemu
