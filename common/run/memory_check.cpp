#include "run/memory_check.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "base/machine.h"
#include "tensor/runtime.h"
#include "tensor/side_copies.h"

namespace usp {

namespace {

/// How many ranks share the memory of this rank: those on its GPU, or on its machine.
int64_t ranks_here(const Peers& peers) {
  std::string memory;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> memory;
  const Runtime* runtime = Runtime::find();
  const auto* device =
      runtime == nullptr ? nullptr : dynamic_cast<const SideCopies*>(runtime->accelerator());
  if (device != nullptr) memory += " " + device->address();
  return std::ranges::count(peers.all_gather_text(memory), memory);
}

/// What comes into a GPU's memory besides tensors once a run has begun: kernels of libraries,
/// NCCL's buffers, the rest of pages of 2 MiB. Estimated: see docs/gpu_first_contact.md.
constexpr int64_t kBesideTensors = int64_t{1} << 29;

int64_t available_here() {
  const char* given = std::getenv("USP_AVAILABLE_MEMORY");
  if (given != nullptr) return std::atoll(given);
  Accelerator* accelerator = Runtime::current().accelerator();
  if (accelerator == nullptr) return available_memory();
  return std::max<int64_t>(0, accelerator->available_memory() - kBesideTensors);
}

/// Bytes that a rank needs at most. Workspace of kernels and the cache of a sample are small beside
/// it.
double needed_bytes(const RunConfig& config, const Predict& predict) {
  // Before the first step, the rotary embedding's table is made in f64.
  const double table = double(config.seq_len) * double(config.model.head_dim()) * sizeof(double);
  return std::max(double(predict().needed()), table);
}

/// Finds flags that fit into this many bytes a rank, the least change first. It tries them on the
/// run's own configuration and puts that back.
class Remedy {
 public:
  Remedy(RunConfig& config, const Predict& predict, double bytes)
      : config_(config), predict_(predict), bytes_(bytes) {}

  std::string find() {
    for (const auto& attempt :
         {&Remedy::smaller_micro_batch, &Remedy::shorter_samples, &Remedy::smallest_model}) {
      if (const std::optional<std::string> flags = (this->*attempt)()) return *flags;
    }
    return "a machine with more memory";
  }

 private:
  bool fits() const { return needed_bytes(config_, predict_) <= bytes_; }

  /// The same batch in more micro-batches.
  std::optional<std::string> smaller_micro_batch() {
    const ScopedValue samples(config_.micro_batch_size, config_.micro_batch_size);
    const ScopedValue steps(config_.grad_acc_steps, config_.grad_acc_steps);
    const int64_t all = config_.micro_batch_size * config_.grad_acc_steps;
    while (config_.micro_batch_size > 1) {
      config_.micro_batch_size /= 2;
      if (all % config_.micro_batch_size != 0) continue;
      config_.grad_acc_steps = all / config_.micro_batch_size;
      if (!fits()) continue;
      return fmt::format("--micro_batch_size {} --grad_acc_steps {}", config_.micro_batch_size,
                         config_.grad_acc_steps);
    }
    return std::nullopt;
  }

  std::optional<std::string> shorter_samples() {
    const ScopedValue samples(config_.micro_batch_size, int64_t{1});
    const ScopedValue length(config_.seq_len, config_.seq_len);
    // Ranks of cp may share a sample in pieces, two each.
    const int64_t cp = config_.mesh().cp, pieces = cp > 1 ? 2 * cp : 1;
    while (config_.seq_len > 1) {
      config_.seq_len /= 2;
      if (config_.seq_len % pieces != 0) break;
      if (fits()) return fmt::format("--micro_batch_size 1 --seq_len {}", config_.seq_len);
    }
    return std::nullopt;
  }

  std::optional<std::string> smallest_model() {
    if (config_.model.pretrained) return std::nullopt;
    const ScopedValue model(config_.model, ModelConfig());
    const ScopedValue samples(config_.micro_batch_size, int64_t{1});
    const ScopedValue length(config_.seq_len, std::min<int64_t>(config_.seq_len, 256));
    if (!fits()) return std::nullopt;
    return fmt::format("--model tiny --micro_batch_size 1 --seq_len {}, without flags of its shape",
                       config_.seq_len);
  }

  RunConfig& config_;
  const Predict& predict_;
  double bytes_;
};

}  // namespace

std::string in_units(double bytes) {
  constexpr double kMiB = 1 << 20, kGiB = 1 << 30;
  return bytes < kGiB ? fmt::format("{:.1f} MiB", bytes / kMiB)
                      : fmt::format("{:.1f} GiB", bytes / kGiB);
}

SharedMemory shared_memory(const RunConfig& config, const Predict& predict, const Peers& peers) {
  return {ranks_here(peers), needed_bytes(config, predict), double(available_here())};
}

void check_memory(RunConfig& config, const Predict& predict, const Peers& peers) {
  if (config.allow_oversize) return;
  const int64_t ranks = ranks_here(peers);
  refuse_together(peers, [&] {
    const SharedMemory memory{ranks, needed_bytes(config, predict), double(available_here())};
    if (memory.needed() <= memory.available) return;
    const std::string of_all =
        ranks == 1 ? "" : fmt::format(" ({} on each of {} ranks)", in_units(memory.of_each), ranks);
    usage_error(
        "the run needs {} of memory here{}, and {} are available; try {}, or --allow_oversize to "
        "start it all the same",
        in_units(memory.needed()), of_all, in_units(memory.available),
        Remedy(config, predict, memory.available / double(ranks)).find());
  });
}

}  // namespace usp
