#pragma once

#include <span>
#include <string_view>

#include "types/checker.h"

namespace usp::types {

/// An op whose operands' types are known.
struct OpInTypes {
  Checker& checker;
  std::string_view name;
  std::span<const Tensor* const> operands;
  bool flag;
};

/// Gives the outputs of the op their types. Throws TypeError where operands do not fit, and where
/// there is no rule for an op of this name.
void apply_rule(const OpInTypes& op);

/// Type of what goes to the host, in the place of operands: it has arrived and is up to date.
Type type_for_host(const OpInTypes& op, const Tensor& tensor);

/// The names of all ops that have a rule.
std::vector<std::string_view> ops_with_rules();

/// An operation of a Communicator that begins.
struct MessageInTypes {
  Checker& checker;
  const Recorder::Posted& operation;
  std::string_view origin;  ///< such as "all_reduce over dp"
};

/// The same for messages.
void apply_message_rule(const MessageInTypes& message);

}  // namespace usp::types
