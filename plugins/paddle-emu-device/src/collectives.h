// Where the emulated devices of several processes meet: collectives over a file that all of them map, each in its place of a stream.
//
// A collective is a piece of work like any other: on the stream's thread it lays down what its rank brings, waits until all ranks
// have, and reads what the others brought, stretch by stretch. Ranks compare what they came for each time. One that differs, or does
// not come in time, makes the others give up: from then on their collectives do nothing, and whoever waits for the device asks why
// (`gave_up`). What a rank brings stays until it comes to the next meeting but one. Nothing here knows Paddle.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <string>
#include <thread>

namespace polyemu {

// What the program says of a collective that it launches next, for others to compare and for people: which one, its place among
// those that were bound, where the number of the step lies on the device, rows and bytes.
struct Expected {
  int64_t kind = 0, launch = 0;
  const int32_t* step = nullptr;
  int64_t rows = 0, bytes = 0;
};

// What a rank came for: the collective of the interface with its element type, root and count, then what `Expected` says.
using Note = std::array<int64_t, 9>;

class Communicator {
 public:
  static constexpr size_t kPath = 64;  // bytes of an id, which is the name of the file
  static constexpr auto kStarting = std::chrono::seconds(60);

  // A new file; empty where there can be none.
  static std::string make_file() {
    const bool shared = access("/dev/shm", W_OK) == 0;
    std::string path = std::string(shared ? "/dev/shm" : "/tmp") + "/polyemu-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) return "";
    close(file);
    return path;
  }

  // Map the file, and wait until all ranks have; null where that fails. Then the file has no name any more. `patience_ms`: how long
  // a collective waits for others; for ever where it is negative.
  static Communicator* join(const std::string& path, size_t rank, size_t ranks, int64_t patience_ms) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    const size_t bytes = kLine * (1 + ranks) + ranks * 2 * kStretch;
    void* memory = MAP_FAILED;
    if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    auto* made = new Communicator(static_cast<char*>(memory), rank, ranks, patience_ms);
    auto& joined = *reinterpret_cast<std::atomic<int64_t>*>(memory);
    joined.fetch_add(1);
    const bool all = until([&] { return joined.load() == static_cast<int64_t>(ranks); }, Clock::now() + kStarting);
    if (rank == 0) unlink(path.c_str());
    if (all) return made;
    delete made;
    return nullptr;
  }

  ~Communicator() { munmap(memory_, kLine * (1 + ranks_) + ranks_ * 2 * kStretch); }

  // Bring `bytes` at `mine` (null: nothing but itself), and have `take(begin, size)` read each stretch when all have come.
  template <typename Take>
  void meet(const Note& note, const void* mine, size_t bytes, Take take) {
    for (size_t begin = 0; begin < bytes; begin += kStretch) {
      const size_t size = std::min(bytes - begin, kStretch);
      if (!come(note, mine == nullptr ? nullptr : static_cast<const char*>(mine) + begin, size)) return;
      take(begin, size);
    }
  }

  // What a rank has brought to the stretch at hand.
  const char* brought(size_t rank) const { return stretch(rank, count_); }

  size_t rank() const { return rank_; }
  size_t ranks() const { return ranks_; }

  // Wait for nobody any more.
  void abandon() { abandoned_ = true; }
  // Whether this rank has given up, in which collective, and the rank that it waited for or that came for something else.
  bool gave_up(Note* note, int64_t* other) const {
    if (!given_up_.load(std::memory_order_acquire)) return false;
    *note = last_;
    *other = other_;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kLine = 4096, kStretch = size_t{1} << 18;

  struct Place {
    std::atomic<int64_t> arrived;
    std::array<Note, 2> notes;
  };
  static_assert(sizeof(Place) <= kLine && std::atomic<int64_t>::is_always_lock_free, "it lies in memory of several processes");

  Communicator(char* memory, size_t rank, size_t ranks, int64_t patience_ms)
      : memory_(memory), rank_(rank), ranks_(ranks), patience_ms_(patience_ms) {}

  Place& place(size_t rank) const { return *reinterpret_cast<Place*>(memory_ + kLine * (1 + rank)); }
  char* stretch(size_t rank, int64_t count) const {
    return memory_ + kLine * (1 + ranks_) + (rank * 2 + static_cast<size_t>(count % 2)) * kStretch;
  }

  bool come(const Note& note, const char* mine, size_t size) {
    if (given_up_) return false;
    const int64_t count = ++count_;
    if (mine != nullptr) std::memcpy(stretch(rank_, count), mine, size);
    place(rank_).notes[count % 2] = note;
    place(rank_).arrived.store(count, std::memory_order_release);  // last: who sees it sees the rest
    const auto overdue = patience_ms_ < 0 ? Clock::time_point::max() : Clock::now() + std::chrono::milliseconds(patience_ms_);
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const auto has_come = [&] { return place(rank).arrived.load(std::memory_order_acquire) >= count; };
      if (!until([&] { return has_come() || abandoned_; }, overdue) || !has_come()) return give_up(note, rank);
    }
    for (size_t rank = 1; rank < ranks_; ++rank) {
      if (place(rank).notes[count % 2] != place(0).notes[count % 2]) return give_up(note, rank);
    }
    return true;
  }

  template <typename Condition>
  static bool until(Condition holds, Clock::time_point overdue) {
    for (int looks = 0; !holds(); ++looks) {
      if (Clock::now() > overdue) return false;
      if (looks < 200) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
    return true;
  }

  bool give_up(const Note& note, size_t other) {
    last_ = note;
    other_ = static_cast<int64_t>(other);
    given_up_.store(true, std::memory_order_release);
    return false;
  }

  char* memory_;
  size_t rank_, ranks_;
  int64_t patience_ms_, count_ = 0;
  std::atomic<bool> abandoned_{false}, given_up_{false};
  Note last_{};
  int64_t other_ = 0;
};

}  // namespace polyemu
