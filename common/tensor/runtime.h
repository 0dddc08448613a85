#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "tensor/allocator.h"
#include "tensor/ledger.h"
#include "tensor/trace.h"

namespace usp {

class Backend;
class Recorder;

/// Everything mutable that belongs to one rank: device, allocator, backend, trace, counters. A
/// rank's threads reach it through one thread-local pointer, so ranks may be processes or threads.
class Runtime {
 public:
  explicit Runtime(Device device, int rank = 0, int world_size = 1);
  ~Runtime();

  /// The runtime of this thread; throws Error where no Use is alive.
  static Runtime& current();
  /// The same; nullptr where no Use is alive.
  static Runtime* find();

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

  /// From here on new tensors lie on `device`, which ops and traces refer to as well. Throws
  /// UsageError where there is none.
  void move_to(Device device);

  Device device() const { return allocator_->device(); }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// Allocator of the device.
  Allocator& allocator() { return *allocator_; }
  /// Allocator of new tensors: the device's, or in a HostScope the host's. Shared with every
  /// tensor, so that a tensor may outlive the runtime.
  const std::shared_ptr<Allocator>& allocator_in_force() const {
    return scopes_.on_host ? host_allocator_ : allocator_;
  }
  Backend& backend() { return *backend_; }
  /// The kernels for tensors there: on the device, or on the host.
  Backend& backend(Device device) { return device == this->device() ? *backend_ : host_backend(); }
  /// nullptr where the device has no queue of its own.
  Accelerator* accelerator() const { return allocator_->accelerator(); }
  /// Returns when the device has done all that it was given.
  void wait();
  Tracer& tracer() { return tracer_; }
  Ledger& ledger() { return ledger_; }
  /// Who is told what this rank's program does; nullptr: nobody, which costs a branch an op.
  Recorder* recorder() const { return recorder_; }
  /// It has to outlive the runtime, or be taken back.
  void tell(Recorder* recorder) { recorder_ = recorder; }

  /// What the scopes below have set.
  struct Scopes {
    Category category = Category::activations;
    int block = -1;  ///< the model's block that is at work; -1: none
    bool recomputing = false;
    bool host_reads_allowed = true;
    bool on_host = false;
  };
  Category category() const { return scopes_.category; }
  int block() const { return scopes_.block; }
  bool host_reads_allowed() const { return scopes_.host_reads_allowed; }
  /// For who changes between two strands of a program, each of which is in scopes of its own.
  const Scopes& scopes() const { return scopes_; }
  void set_scopes(const Scopes& scopes) { scopes_ = scopes; }

  /// Floating-point operations of all matmuls and attentions executed so far. Of attention only the
  /// (query, key) pairs count that the causal mask lets through.
  double flops() const { return flops_; }
  /// The part of flops() that repeats what had been computed before and was not kept.
  double recomputed_flops() const { return recomputed_flops_; }
  /// Counts an op of `flops` operations. Of these `repeated` count as recomputed, or all of them
  /// while a RecomputeScope lives.
  void add_flops(double flops, double repeated = 0) {
    flops_ += flops;
    recomputed_flops_ += scopes_.recomputing ? flops : repeated;
  }

 private:
  friend class CategoryScope;
  friend class BlockScope;
  friend class RecomputeScope;
  friend class NoHostReads;
  friend class HostScope;

  Backend& host_backend();

  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<Allocator> host_allocator_;  ///< the same one where the device is the host's
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Backend> host_backend_;  ///< beside an accelerator's, made when asked for
  int rank_, world_size_;
  Tracer tracer_;
  Ledger ledger_;
  Recorder* recorder_ = nullptr;
  Scopes scopes_;
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
  explicit CategoryScope(Category category)
      : ScopedValue(Runtime::current().scopes_.category, category) {}
};

/// Tensors made while it lives belong to a block of the model.
class BlockScope : ScopedValue<int> {
 public:
  explicit BlockScope(int64_t block)
      : ScopedValue(Runtime::current().scopes_.block, static_cast<int>(block)) {}
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
  RecomputeScope() : ScopedValue(Runtime::current().scopes_.recomputing, true) {}
};

/// While it lives, Tensor::item() throws. It spans the body of a training step.
class NoHostReads : ScopedValue<bool> {
 public:
  NoHostReads() : ScopedValue(Runtime::current().scopes_.host_reads_allowed, false) {}
};

/// Tensors made while it lives lie in memory of the host, whatever the device: for what ranks tell
/// each other about themselves. On the CPU, and on meta, it changes nothing.
class HostScope : ScopedValue<bool> {
 public:
  explicit HostScope(bool on_host = true)
      : ScopedValue(Runtime::current().scopes_.on_host, on_host) {}
};

}  // namespace usp
