// What a device that plays a chip's list of operations has seen, by the contract whose launch was running: the kernels that ran, and
// what made the host wait. It is kept once a list was given; before, noting costs one look at a flag. Nothing here knows Paddle.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace polyemu {

class Log {
 public:
  // From now on, with these operations as those that wait for the host on the chip.
  void keep(std::set<std::string> waiting) {
    waiting_ = std::move(waiting);
    kept_ = true;
  }
  bool makes_wait(const char* operation) const { return kept_ && waiting_.count(operation) > 0; }

  // The launch of a contract begins on this thread; one may run within another.
  void begin(const char* contract) { launches().push_back({contract, {}}); }
  // It ends; what made the host wait in it, in order, one a line.
  std::string end() {
    if (launches().empty()) return "";
    std::string waits = std::move(launches().back().waits);
    launches().pop_back();
    return waits;
  }

  void ran(const std::string& kernel) { note("kernel", kernel); }
  void waited(const std::string& what) {
    if (!kept_) return;
    note("wait", what);
    if (launches().empty()) return;
    auto& waits = launches().back().waits;
    waits += waits.empty() ? what : "\n" + what;
  }

  // One line each: "kernel" or "wait", the contract ("" outside launches), what it was, how often; between tabulators.
  std::string text() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string lines;
    for (const auto& [key, count] : counts_) {
      const auto& [kind, contract, what] = key;
      lines += kind + "\t" + contract + "\t" + what + "\t" + std::to_string(count) + "\n";
    }
    return lines;
  }

 private:
  struct Launch {
    std::string contract;
    std::string waits;
  };

  static std::vector<Launch>& launches() {
    static thread_local std::vector<Launch> running;
    return running;
  }

  void note(const char* kind, const std::string& what) {
    if (!kept_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[{kind, launches().empty() ? "" : launches().back().contract, what}];
  }

  std::set<std::string> waiting_;
  std::atomic<bool> kept_{false};
  std::mutex mutex_;
  std::map<std::tuple<std::string, std::string, std::string>, int64_t> counts_;
};

inline Log& log() {
  static auto* instance = new Log;  // outlives what is destroyed at the end of the process
  return *instance;
}

}  // namespace polyemu
