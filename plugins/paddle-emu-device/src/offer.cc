// Narrows the device to a list of kernels: takes every other one out of Paddle's table, for good. What Paddle then does without them
// is its own doing: it refuses, or takes the CPU's kernel where that is allowed.
//
// Views stay whatever the list says. Paddle takes a view's kernel before it asks any list, on a chip as here.

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "log.h"
#include "paddle/phi/backends/device_manager.h"
#include "paddle/phi/core/kernel_factory.h"

namespace {

// Lines of `text`, each "NAME DTYPE DTYPE...", as "NAME DTYPE".
std::set<std::string> pairs_of(const char* text) {
  std::set<std::string> pairs;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, dtype;
    for (words >> name; words >> dtype;) pairs.insert(name + " " + dtype);
  }
  return pairs;
}

std::set<std::string> words_of(const char* text) {
  std::istringstream words(text);
  std::set<std::string> found;
  for (std::string word; words >> word;) found.insert(word);
  return found;
}

}  // namespace

// Keep the kernels of `offered` alone (lines of a name and Paddle's dtypes), and begin the log. `waiting`: names of operations that
// wait for the host on the chip. `common`: what Paddle registers for every custom device stays. How many kernels were taken out.
extern "C" int64_t polyemu_offer(const char* offered, const char* waiting, int common) {
  const auto pairs = pairs_of(offered);
  const auto mine = phi::TransToPhiBackend(phi::CustomPlace(PADDLE_DEVICE_TYPE, 0));
  int64_t taken = 0;
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels()) {
    std::vector<phi::KernelKey> outside;
    for (const auto& [key, kernel] : kernels) {
      const bool here = key.backend() == mine || (common == 0 && key.backend() == phi::Backend::CUSTOM);
      const bool view = key.layout() == phi::DataLayout::STRIDED;
      if (here && !view && pairs.count(name + " " + phi::DataTypeToString(key.dtype())) == 0) outside.push_back(key);
    }
    for (const auto& key : outside) kernels.erase(key);
    taken += static_cast<int64_t>(outside.size());
  }
  polyemu::log().keep(words_of(waiting));
  return taken;
}
