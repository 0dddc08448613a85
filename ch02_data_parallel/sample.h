#pragma once

#include <vector>

#include "model.h"

namespace usp {

/// Continues `prompt` by config.sample_tokens tokens, each drawn from softmax(logits / temperature)
/// among the top_k likeliest. The model sees the last `seq_len` tokens; `seed` fixes the draw.
/// `stop` is asked before each token.
std::vector<int32_t> sample_tokens(Model& model, const SampleConfig& config, int64_t seq_len,
                                   std::vector<int32_t> prompt, uint64_t seed, bool (*stop)());

/// Tokens as text: bytes where they are valid UTF-8, U+FFFD where they are not; with
/// `as_bytes` false, the ids.
std::string tokens_to_text(const std::vector<int32_t>& tokens, bool as_bytes);

}  // namespace usp
