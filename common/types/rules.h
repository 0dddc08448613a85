#pragma once

#include <span>
#include <string_view>

#include "types/checker.h"

namespace usp::types {

/// Gives the outputs of an op their types. Throws TypeError where operands do not fit, and where
/// there is no rule for an op of this name.
void apply_rule(Checker& checker, std::string_view op, std::span<const Tensor* const> operands,
                bool flag);

/// The names of all ops that have a rule.
std::vector<std::string_view> ops_with_rules();

/// The same for a message that begins; `origin`: such as "all_reduce over dp".
void apply_message_rule(Checker& checker, const Recorder::Posted& message, std::string_view origin);

}  // namespace usp::types
