#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "tensor/dtype.h"
#include "tensor/ledger.h"

namespace usp {

/// What limits an op: products, those of attention, or the memory that it reads and writes.
enum class KernelKind : uint8_t { matmul, attention, memory };

/// A shape of an op. Every op of a program that has it costs the same.
struct Kernel {
  std::string op;
  KernelKind kind = KernelKind::memory;
  DType dtype = DType::f32;  ///< of the narrowest operand
  /// Sizes of a product: `groups` times [m, k] by [k, n].
  int64_t groups = 1, m = 0, n = 0, k = 0;
  int64_t flops = 0, bytes = 0;

  auto operator<=>(const Kernel&) const = default;
};

/// A communicator, as a rank sees it.
struct ProgramGroup {
  std::string name;
  int64_t number = 0;  ///< tells those of one name and the same members apart
  int rank = 0;        ///< this one, within the group
  std::shared_ptr<const std::vector<int>> members;  ///< rank of the world of each
};

/// A shape of an operation of a communicator.
struct Exchange {
  int group = 0;  ///< of the program
  CommKind kind = CommKind::barrier;
  int peer = -1;                                             ///< send, recv: rank within the group
  int64_t payload_bytes = 0, wire_bytes = 0, net_bytes = 0;  ///< as the ledger has them

  auto operator<=>(const Exchange&) const = default;
};

/// Where a program is at work: F, B, W in a chunk, or U, the update. '-': between two of them.
struct ProgramSegment {
  char work = '-';
  int64_t stage = 0, chunk = 0, micro_batch = -1;

  auto operator<=>(const ProgramSegment&) const = default;
};

/// What a rank does next. Its place in the list is its time: there is no clock.
struct Event {
  /// What an event is.
  enum Kind : uint8_t {
    compute,    ///< a kernel
    post,       ///< an exchange begins: the next of this step
    wait,       ///< for the exchange that was posted as that number of this step
    wait_last,  ///< for that of the step before
  };
  Kind kind;
  int32_t what;     ///< index of the kernel or exchange; of a wait the number that was posted
  int32_t segment;  ///< index
  int32_t block;    ///< of the model; -1: none

  bool operator==(const Event&) const = default;
};

/// Bytes that are alive in a stretch of a program: when it begins, and at a time, at most.
struct ProgramMemory {
  int64_t event = 0;  ///< the first of the stretch, which ends with the next one's
  int64_t begin = 0, peak = 0;

  bool operator==(const ProgramMemory&) const = default;
};

// [program]
/// A step of training as one rank does it: what a dry run has told, in its order.
struct Program {
  int rank = 0;
  std::vector<Kernel> kernels;
  std::vector<ProgramGroup> groups;
  std::vector<Exchange> exchanges;
  std::vector<ProgramSegment> segments;
  std::vector<Event> events;
  int64_t tail = 0;   ///< the first event behind the last gradient
  int64_t posts = 0;  ///< exchanges of a step
  int64_t peak = 0;   ///< bytes that are alive at a time, at most
  /// Memory of the step's begin, of each action from its first event on, and of the tail.
  std::vector<ProgramMemory> memory;

  double flops() const;                     ///< of all kernels
  Ledger ledger() const;                    ///< what is sent, as a run counts it
  std::string site(const Event& at) const;  ///< "B of micro-batch 3, chunk 0, block 5"
};

/// The steady step of a rank of the world, from two steps on meta.
Program record(const TrainConfig& config, int rank);
// [program]

/// Whether two ranks do the same up to their last gradients, with groups of the same sizes.
bool same_until_tail(const Program& a, const Program& b);

}  // namespace usp
