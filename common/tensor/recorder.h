#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/ledger.h"
#include "tensor/runtime.h"

namespace usp {

class Tensor;

/// Is told what a rank's program does, in the order in which it does it: ops, and operations of a
/// Communicator when they begin and where they are waited for. It sees shapes and no clock, so that
/// a program on meta tells it what a run would. See Runtime::tell().
class Recorder {
 public:
  virtual ~Recorder() = default;

  /// An operation that begins, as this rank sees it.
  struct Posted {
    std::string_view group;                           ///< its communicator's name
    int64_t group_id;                                 ///< tells it from others of that name
    int rank;                                         ///< this one, within the group
    std::shared_ptr<const std::vector<int>> members;  ///< rank of the world of each
    CommKind kind;
    int peer;                                      ///< send, recv: rank within the group; else -1
    int64_t payload_bytes, wire_bytes, net_bytes;  ///< as the ledger has them
    const Tensor* input;   ///< what is read; undefined where this rank only receives
    const Tensor* output;  ///< what is overwritten, perhaps `input`; undefined where it only sends
    bool takes_maximum;    ///< of a reduction: instead of the sum
  };

  /// Where values come from that no op writes.
  enum class Source { zeros, host, copy };

  /// `operands`: outputs first, as the op's function has them; some may be undefined. `flag`: that
  /// the op adds to what its output holds; of fill, that it writes 0.
  virtual void op(std::string_view name, int64_t flops, int64_t bytes,
                  std::span<const Tensor* const> operands, bool flag) = 0;
  /// Returns the number, 0 or higher, that its wait() will be told.
  virtual int64_t post(const Posted& operation) = 0;
  /// The rank waits for the operation of that number.
  virtual void wait(int64_t posted) = 0;
  /// A phase of the trace; see TraceScope::Label.
  virtual void begin_phase(std::string_view name, int64_t number, int64_t micro_batch) = 0;
  virtual void end_phase() = 0;  ///< the innermost one

  /// The address that a storage of so many bytes shall have on meta, where it has none, for who
  /// wants to know which elements an operand is. It is never read from.
  virtual void* place(int64_t) { return nullptr; }
  /// A tensor is made with values: 0, the host's, or those of `from`. `name`: Tensor::empty()'s.
  virtual void made(const Tensor&, Source, std::string_view /*name*/, const Tensor* /*from*/) {}
  /// The host asks for the values of a tensor on meta, which has none. Returns whether it gets 0
  /// for each; otherwise that is an error.
  virtual bool host_reads(const Tensor&) { return false; }
};

/// A phase that the Recorder alone is told of, not the trace.
class RecordedPhase {
 public:
  explicit RecordedPhase(std::string_view name) : recorder_(Runtime::current().recorder()) {
    if (recorder_ != nullptr) recorder_->begin_phase(name, -1, -1);
  }
  ~RecordedPhase() {
    if (recorder_ != nullptr) recorder_->end_phase();
  }
  RecordedPhase(const RecordedPhase&) = delete;
  RecordedPhase& operator=(const RecordedPhase&) = delete;

 private:
  Recorder* recorder_;
};

}  // namespace usp
