#include "run/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"

namespace usp {

namespace {

/// The token that `uniform` in [0, 1) picks from softmax(logits / temperature), top_k kept.
int32_t draw(std::vector<double> logits, const SampleConfig& config, double uniform) {
  for (double& logit : logits) {
    if (std::isnan(logit)) logit = -HUGE_VAL;  // of a model that has diverged; NaN has no order
  }
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto is_likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  if (config.temperature == 0) return *std::ranges::min_element(order, is_likelier);
  std::ranges::sort(order, is_likelier);
  if (config.top_k > 0 && config.top_k < std::ssize(order)) order.resize(config.top_k);
  std::vector<double> cumulative;
  double total = 0;
  for (int32_t token : order) {
    total += std::exp((logits[token] - logits[order[0]]) / config.temperature);
    cumulative.push_back(total);
  }
  const auto chosen = std::ranges::upper_bound(cumulative, uniform * total);
  return order[std::min<size_t>(chosen - cumulative.begin(), order.size() - 1)];
}

/// Whether a terminal may obey it: C0 but newline and tab, DEL, and C1, of two bytes in UTF-8.
bool is_control(std::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 2) return first == 0xC2 && static_cast<uint8_t>(character[1]) < 0xA0;
  return character.size() == 1 && (first < 0x20 || first == 0x7F) && first != '\n' && first != '\t';
}

/// Length of the valid UTF-8 sequence that begins at `bytes[i]`; 0 if there is none.
size_t utf8_length(const std::string& bytes, size_t i) {
  const auto at = [&](size_t k) { return k < bytes.size() ? uint8_t(bytes[k]) : 0; };
  const uint8_t lead = at(i);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xC2 && lead < 0xE0 ? 2
                        : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  for (size_t k = 1; k < length; ++k) {
    if ((at(i + k) & 0xC0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xE0 && at(i + 1) < 0xA0) || (lead == 0xF0 && at(i + 1) < 0x90);
  const bool surrogate_or_beyond =
      (lead == 0xED && at(i + 1) >= 0xA0) || (lead == 0xF4 && at(i + 1) >= 0x90);
  return overlong || surrogate_or_beyond ? 0 : length;
}

/// Bytes as text that can be shown: those of control characters and those that are no UTF-8 as
/// \xNN.
std::string printable(const std::string& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size();) {
    const size_t length = utf8_length(bytes, i);
    const std::string character = bytes.substr(i, std::max<size_t>(length, 1));
    i += character.size();
    if (length > 0 && !is_control(character)) {
      text += character;
      continue;
    }
    for (char byte : character) text += fmt::format("\\x{:02X}", static_cast<uint8_t>(byte));
  }
  return text;
}

}  // namespace

// [sample_tokens]
std::vector<int32_t> sample_tokens(const Logits& logits, const SampleConfig& config,
                                   int64_t seq_len, std::vector<int32_t> prompt, uint64_t seed,
                                   const std::function<bool()>& stop) {
  const RandomStream stream(seed, "sample");
  std::vector<int32_t> tokens = std::move(prompt);
  KvCache cache(seq_len);
  int64_t cached = 0;  // tokens, of those in the window
  int64_t window = std::min<int64_t>(seq_len, std::ssize(tokens));  // the last tokens: all it sees
  for (int64_t i = 0; i < config.sample_tokens && !stop(); ++i) {
    Pass pass;
    pass.mode = Pass::Mode::decode;
    pass.num_samples = 1;
    pass.positions = Positions(cached, window - cached);
    pass.tokens =
        Tensor::from_host(std::span(tokens).last(window - cached), {window - cached}, "tokens");
    if (!config.no_kv_cache) pass.kv_cache = &cache;
    tokens.push_back(draw(logits(pass).items(), config, stream.uniform(i)));
    if (!config.no_kv_cache) cached = window;
    if (++window > seq_len) {
      window = (seq_len + 1) / 2;
      cached = 0;
    }
  }
  return tokens;
}
// [sample_tokens]

std::string tokens_to_text(const std::vector<int32_t>& tokens, bool as_bytes) {
  if (!as_bytes) return fmt::format("{}", fmt::join(tokens, " "));
  std::string text, bytes;
  const auto flush = [&] {
    text += printable(bytes);
    bytes.clear();
  };
  for (int32_t token : tokens) {
    if (token < 256) {
      bytes += static_cast<char>(token);
    } else {
      flush();
      text += "\uFFFD";
    }
  }
  flush();
  return text;
}

}  // namespace usp
