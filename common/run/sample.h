#pragma once

#include <functional>
#include <vector>

#include "run/run_config.h"
#include "train/pass.h"

namespace usp {

/// What the next tokens are drawn from: decoding passes in, logits [B, V] out.
using Logits = std::function<Tensor(const Pass&)>;

/// Continues `prompt` by config.sample_tokens tokens, each drawn from softmax(logits / temperature)
/// among the top_k likeliest. `seed` fixes the draw; `stop` is asked before each token.
///
/// The model sees the last `seq_len` tokens of the prompt and what follows. When these outgrow
/// seq_len it forgets the older half, and what is left runs once more from position 0: a cached key
/// has been rotated by its position, and above the first layer it has seen what is to be forgotten.
std::vector<int32_t> sample_tokens(const Logits& logits, const SampleConfig& config,
                                   int64_t seq_len, std::vector<int32_t> prompt, uint64_t seed,
                                   const std::function<bool()>& stop);

/// Tokens as text that a terminal can be shown: valid UTF-8 as it is, with newlines and tabs; other
/// control characters and other bytes as `\xNN`; U+FFFD for a token that is no byte. With
/// `as_bytes` false, the ids.
std::string tokens_to_text(const std::vector<int32_t>& tokens, bool as_bytes);

}  // namespace usp
