#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "tensor/allocator.h"
#include "tensor/ledger.h"
#include "tensor/trace.h"

namespace usp {

class Backend;

/// Everything mutable that belongs to one rank: device, allocator, backend, trace, counters. A
/// rank's threads reach it through one thread-local pointer, so ranks may be processes or threads.
class Runtime {
 public:
  explicit Runtime(Device device, int rank = 0, int world_size = 1);
  ~Runtime();

  /// The runtime of this thread; throws Error where no Use is alive.
  static Runtime& current();

  /// Makes a runtime this thread's current one for the lifetime of the object.
  class Use {
   public:
    explicit Use(Runtime& runtime);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Runtime* previous_;
  };

  Device device() const { return allocator_->device(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  Allocator& allocator() { return *allocator_; }
  /// Shared with every tensor, so that a tensor may outlive the runtime.
  const std::shared_ptr<Allocator>& allocator_handle() const { return allocator_; }
  Backend& backend() { return *backend_; }
  Tracer& tracer() { return tracer_; }
  Ledger& ledger() { return ledger_; }

  Category category() const { return category_; }
  int block() const { return block_; }  ///< the model's block that is at work; -1: none
  bool host_reads_allowed() const { return host_reads_allowed_; }

  /// Floating-point operations of all matmuls and attentions executed so far. Of attention only the
  /// (query, key) pairs count that the causal mask lets through.
  double flops() const { return flops_; }
  /// The part of flops() that repeats what had been computed before and was not kept.
  double recomputed_flops() const { return recomputed_flops_; }
  /// Counts an op of `flops` operations. Of these `repeated` count as recomputed, or all of them
  /// while a RecomputeScope lives.
  void add_flops(double flops, double repeated = 0) {
    flops_ += flops;
    recomputed_flops_ += recomputing_ ? flops : repeated;
  }

 private:
  friend class CategoryScope;
  friend class BlockScope;
  friend class RecomputeScope;
  friend class NoHostReads;

  std::shared_ptr<Allocator> allocator_;
  std::unique_ptr<Backend> backend_;
  int rank_, world_size_;
  Tracer tracer_;
  Ledger ledger_;
  Category category_ = Category::activations;
  bool host_reads_allowed_ = true;
  int block_ = -1;
  bool recomputing_ = false;
  double flops_ = 0, recomputed_flops_ = 0;  // a step may have more than 2^63; exact up to 2^53
};

/// Whether this thread prints and writes files for the whole run: it does on rank 0, and where it
/// has no Runtime. Classes that print or write ask this function, so that programs need not.
bool speaks_for_all();

/// Gives a variable another value for its own lifetime.
template <class T>
class ScopedValue {
 public:
  ScopedValue(T& variable, T value)
      : variable_(variable), previous_(std::exchange(variable, value)) {}
  ~ScopedValue() { variable_ = previous_; }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

 private:
  T& variable_;
  T previous_;
};

/// Tensors made while it lives count under `category`.
class CategoryScope : ScopedValue<Category> {
 public:
  explicit CategoryScope(Category category) : ScopedValue(Runtime::current().category_, category) {}
};

/// Tensors made while it lives belong to a block of the model.
class BlockScope : ScopedValue<int> {
 public:
  explicit BlockScope(int64_t block)
      : ScopedValue(Runtime::current().block_, static_cast<int>(block)) {}
};

/// Tensors and spans of the trace belong to a block of the model while it lives.
struct BlockAtWork {
  explicit BlockAtWork(int64_t block) : memory(block), trace("block", {.number = block}) {}

  BlockScope memory;
  TraceScope trace;
};

/// Operations carried out while it lives repeat earlier ones, and count as recomputed.
class RecomputeScope : ScopedValue<bool> {
 public:
  RecomputeScope() : ScopedValue(Runtime::current().recomputing_, true) {}
};

/// While it lives, Tensor::item() throws. It spans the body of a training step.
class NoHostReads : ScopedValue<bool> {
 public:
  NoHostReads() : ScopedValue(Runtime::current().host_reads_allowed_, false) {}
};

}  // namespace usp
