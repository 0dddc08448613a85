#pragma once

#include <cstdint>
#include <memory>

#include "allocator.h"
#include "comm/ledger.h"
#include "trace.h"

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
  bool host_reads_allowed() const { return host_reads_allowed_; }

  /// Floating-point operations of all matmuls and attentions executed so far; for attention only
  /// the (query, key) pairs that the causal mask lets through.
  int64_t flops() const { return flops_; }
  void add_flops(int64_t flops) { flops_ += flops; }

 private:
  friend class CategoryScope;
  friend class NoHostReads;

  std::shared_ptr<Allocator> allocator_;
  std::unique_ptr<Backend> backend_;
  int rank_, world_size_;
  Tracer tracer_;
  Ledger ledger_;
  Category category_ = Category::activations;
  bool host_reads_allowed_ = true;
  int64_t flops_ = 0;
};

/// Whether this thread prints and writes files for the whole run: rank 0 does, and a thread without
/// a Runtime. The classes that print or write ask for it, so that a program need not.
bool speaks_for_all();

/// Tensors made while it lives count under `category`.
class CategoryScope {
 public:
  explicit CategoryScope(Category category)
      : runtime_(Runtime::current()), previous_(runtime_.category_) {
    runtime_.category_ = category;
  }
  ~CategoryScope() { runtime_.category_ = previous_; }
  CategoryScope(const CategoryScope&) = delete;
  CategoryScope& operator=(const CategoryScope&) = delete;

 private:
  Runtime& runtime_;
  Category previous_;
};

/// Tensor::item() throws while it lives: the body of a training step.
class NoHostReads {
 public:
  NoHostReads() : runtime_(Runtime::current()), previous_(runtime_.host_reads_allowed_) {
    runtime_.host_reads_allowed_ = false;
  }
  ~NoHostReads() { runtime_.host_reads_allowed_ = previous_; }
  NoHostReads(const NoHostReads&) = delete;
  NoHostReads& operator=(const NoHostReads&) = delete;

 private:
  Runtime& runtime_;
  bool previous_;
};

}  // namespace usp
