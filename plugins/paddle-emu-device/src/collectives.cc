// The collective entries of Paddle's C interface, which `paddle.distributed` makes a process group of: what Paddle asks of a device's
// library of collectives, and what of that polydraft launches.
//
// Each call queues its work on the stream that it is given, so it is captured and launched with a graph like any other. Ranks are
// processes with a device each. Sums are of float32, rank after rank, on every rank for itself. What is not here (`xccl_reduce`, for
// one) Paddle refuses by name.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "collectives.h"
#include "paddle_device/table.h"
#include "queue.h"

namespace {

using polyemu::Communicator;
using polyemu::Expected;
using polyemu::Note;

enum Kind : int64_t { kAllReduce, kBroadcast, kAllGather };

thread_local Expected expected;
std::atomic<Communicator*> newest{nullptr};
std::atomic<int64_t> patience_ms{-1};

Communicator* of(C_CCLComm comm) { return reinterpret_cast<Communicator*>(comm); }

size_t size_of(C_DataType type) {  // 0: of no type that travels here
  switch (type) {
    case BOOL:
    case UINT8:
    case INT8:
      return 1;
    case UINT16:
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case UINT32:
    case INT32:
    case FLOAT32:
      return 4;
    case UINT64:
    case INT64:
    case FLOAT64:
      return 8;
    default:
      return 0;
  }
}

// Queue a collective: `work(communicator, note, bytes)` when its turn comes, `bytes` being what a rank brings.
template <typename Work>
C_Status queue(Kind kind, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream, Work work) {
  const size_t bytes = count * size_of(type);
  if (bytes == 0 && count != 0) return C_ERROR;
  const Expected said = expected;
  expected = {};
  ++polyemu::counters().collectives;
  reinterpret_cast<polyemu::Stream*>(stream)->submit([=] {
    const int64_t step = said.step == nullptr ? 0 : *said.step;
    const auto elements = static_cast<int64_t>(count), from = static_cast<int64_t>(root);
    const Note note{kind, type, from, elements, said.kind, said.launch, step, said.rows, said.bytes};
    work(*of(comm), note, bytes);
  });
  return C_SUCCESS;
}

struct Collectives {
  static C_Status comm_name(C_CCLComm, char* name) {
    std::strcpy(name, PADDLE_DEVICE_TYPE);  // NOLINT: Paddle has room for 128
    return C_SUCCESS;
  }

  static C_Status unique_id_size(size_t* size) {
    *size = Communicator::kPath;
    return C_SUCCESS;
  }

  static C_Status unique_id(C_CCLRootId* id) {
    const std::string path = Communicator::make_file();
    if (path.empty() || path.size() >= id->sz) return C_FAILED;
    std::memset(id->data, 0, id->sz);
    std::memcpy(id->data, path.data(), path.size());
    return C_SUCCESS;
  }

  static C_Status init_rank(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
    auto* made = Communicator::join(static_cast<const char*>(id->data), rank, ranks, patience_ms);
    if (made == nullptr) return C_FAILED;
    newest = made;
    *comm = reinterpret_cast<C_CCLComm>(made);
    return C_SUCCESS;
  }

  // It lives on: work that waits in it may still be queued.
  static C_Status destroy(C_CCLComm comm) {
    of(comm)->abandon();
    return C_SUCCESS;
  }

  static C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
    if (type != FLOAT32 || op != SUM) return C_ERROR;
    return queue(kAllReduce, count, type, 0, comm, stream, [=](Communicator& here, const Note& note, size_t bytes) {
      here.meet(note, from, bytes, [&](size_t begin, size_t size) {
        auto* sum = reinterpret_cast<float*>(static_cast<char*>(to) + begin);
        std::memcpy(sum, here.brought(0), size);
        for (size_t rank = 1; rank < here.ranks(); ++rank) {
          const auto* terms = reinterpret_cast<const float*>(here.brought(rank));
          for (size_t i = 0; i < size / sizeof(float); ++i) sum[i] += terms[i];
        }
      });
    });
  }

  static C_Status broadcast(void* data, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
    return queue(kBroadcast, count, type, root, comm, stream, [=](Communicator& here, const Note& note, size_t bytes) {
      here.meet(note, here.rank() == root ? data : nullptr, bytes, [&](size_t begin, size_t size) {
        std::memcpy(static_cast<char*>(data) + begin, here.brought(root), size);
      });
    });
  }

  static C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
    return queue(kAllGather, count, type, 0, comm, stream, [=](Communicator& here, const Note& note, size_t bytes) {
      here.meet(note, from, bytes, [&](size_t begin, size_t size) {
        for (size_t rank = 0; rank < here.ranks(); ++rank) {
          std::memcpy(static_cast<char*>(to) + rank * bytes + begin, here.brought(rank), size);
        }
      });
    });
  }

  static C_Status nothing() { return C_SUCCESS; }  // calls of a group are queued one after the other all the same
};

}  // namespace

namespace polyemu {
void fill_collectives(C_DeviceInterface& table);
}

void polyemu::fill_collectives(C_DeviceInterface& table) {
  table.xccl_get_comm_name = Collectives::comm_name;
  table.xccl_get_unique_id_size = Collectives::unique_id_size;
  table.xccl_get_unique_id = Collectives::unique_id;
  table.xccl_comm_init_rank = Collectives::init_rank;
  table.xccl_destroy_comm = Collectives::destroy;
  table.xccl_all_reduce = Collectives::all_reduce;
  table.xccl_broadcast = Collectives::broadcast;
  table.xccl_all_gather = Collectives::all_gather;
  table.xccl_group_start = Collectives::nothing;
  table.xccl_group_end = Collectives::nothing;
}

// For the Python side of this package, which Paddle tells nothing of communicators: the one that this process has joined last.
extern "C" void* polyemu_communicator() { return newest.load(); }
extern "C" void polyemu_abandon(void* here) { static_cast<Communicator*>(here)->abandon(); }

// How long collectives of communicators to come wait for other ranks; for ever where it is negative.
extern "C" void polyemu_be_patient(int64_t milliseconds) { patience_ms = milliseconds; }

// What the next collective of this thread is, for others to compare.
extern "C" void polyemu_expect(int64_t kind, int64_t launch, const int32_t* step, int64_t rows, int64_t bytes) {
  expected = {kind, launch, step, rows, bytes};
}

// Whether collectives have given up: what this rank came for as `polyemu_expect` had it, with the step, and the other rank.
extern "C" int polyemu_gave_up(void* here, int64_t* found) {
  Note note;
  int64_t other = 0;
  if (!static_cast<Communicator*>(here)->gave_up(&note, &other)) return 0;
  std::copy(note.begin() + 4, note.end(), found);
  found[5] = other;
  return 1;
}
