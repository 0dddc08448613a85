#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "types/regions.h"

namespace usp::types {

/// One operation as a table shows it: the type of each operand that has one, and where.
struct TypedOp {
  std::string name;            ///< such as "linear_forward", or "all_reduce over tp"
  std::string phase;           ///< "forward", "backward", "recompute" or ""
  int block = -1;              ///< of the model
  int64_t micro_batch = -1;    ///< of the step
  std::vector<Type> operands;  ///< outputs first, as before the operation, and then
  std::optional<Type> result;  ///< what it makes of the first
  bool is_mixed = false;       ///< other parts of the result are of other types
  std::string parameter;       ///< among the operands
  Shape shape;                 ///< on this rank, of what it makes
  Shape taken;                 ///< on this rank: of the parameter; of what a message sends
  int peer = -1;               ///< of a send or a receive: the other rank, within the group
};

/// One operation of a history, with the parts of tensors that it has read: each has the type that
/// it had then, and the link that wrote it.
struct Link {
  TypedOp op;              ///< without its result
  std::vector<Region> of;  ///< parts of tensors
};

/// Tells a listener of each operation and its types, and keeps what each has read. It is for who
/// shows them: no rule asks it.
class Log {
 public:
  explicit Log(Regions& regions) : regions_(regions) {}

  void tell(std::function<void(const TypedOp&)> listener) { listener_ = std::move(listener); }
  void keep_history() { keeps_history_ = true; }
  const std::vector<Link>& history() const { return history_; }

  /// An operation with these operands, and its place in the history: until end() it is what writes.
  TypedOp begin(std::string_view name, std::string_view phase, int64_t micro_batch,
                std::span<const Tensor* const> operands);
  /// Adds the name of the parameter that x belongs to, if it belongs to one.
  void note_parameter(TypedOp& typed, const Tensor& x);
  void note_read(const Region& read) {
    if (link_ >= 0 && read.is_written()) history_[link_].of.push_back(read);
  }
  void end() { link_ = -1; }                    ///< the listener is not told
  void end(TypedOp typed, const Tensor& made);  ///< tells the listener what it has made
  int64_t link() const { return link_; }        ///< of what is written now; -1: none is kept

 private:
  Regions& regions_;
  std::function<void(const TypedOp&)> listener_;
  bool keeps_history_ = false;
  std::vector<Link> history_;
  int64_t link_ = -1;
};

}  // namespace usp::types
