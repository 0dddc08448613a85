#include "files/data.h"

#include <charconv>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/sha256.h"

namespace usp {

namespace {

MappedFile map_tokens(const std::string& path) {
  try {
    return MappedFile(path);
  } catch (const Error& error) {
    usage_error("data={}; give a text file or a .bin of tokens", error.what());
  }
}

}  // namespace

TokenFile::TokenFile(const std::string& path, int token_bytes, int64_t vocab_size)
    : path_(path), token_bytes_(path.ends_with(".bin") ? token_bytes : 1), file_(map_tokens(path)) {
  const int64_t bytes = std::ssize(file_.bytes());
  size_ = bytes / token_bytes_;
  if (size_ == 0) usage_error("data={} is empty; give a text file or a .bin of tokens", path);
  if (bytes % token_bytes_ != 0) {
    usage_error("data={}: {} bytes are no whole number of {}-byte tokens; see --token_dtype", path,
                bytes, token_bytes_);
  }
  check_tokens(vocab_size);
}

int32_t TokenFile::operator[](int64_t index) const {
  uint32_t token = 0;
  std::memcpy(&token, file_.bytes().data() + index * token_bytes_, token_bytes_);  // little-endian
  return static_cast<int32_t>(token);
}

std::string TokenFile::sha256() const { return usp::sha256(file_.bytes()); }

void TokenFile::check_tokens(int64_t vocab_size) const {
  if (vocab_size >= int64_t{1} << (8 * token_bytes_)) return;
  for (int64_t i = 0; i < size_; ++i) {
    const auto token = static_cast<uint32_t>((*this)[i]);
    if (token >= vocab_size) {
      const char* remedy = is_text() ? "text needs vocab_size=256 or more"
                                     : "raise vocab_size, or check --token_dtype";
      usage_error("data={}: token {} at position {} is not below vocab_size={}; {}", path_, token,
                  i, vocab_size, remedy);
    }
  }
}

std::vector<int32_t> parse_token_ids(const char* flag, const std::string& text,
                                     int64_t vocab_size) {
  constexpr const char* kSeparators = " ,\t\n";
  std::vector<int32_t> tokens;
  for (size_t begin = text.find_first_not_of(kSeparators); begin != std::string::npos;) {
    const size_t end = std::min(text.find_first_of(kSeparators, begin), text.size());
    int32_t token = -1;
    const auto [stop, error] = std::from_chars(text.data() + begin, text.data() + end, token);
    if (error != std::errc{} || stop != text.data() + end || token < 0 || token >= vocab_size) {
      usage_error("{}: '{}' is no token id below vocab_size={}; try 0", flag,
                  text.substr(begin, end - begin), vocab_size);
    }
    tokens.push_back(token);
    begin = text.find_first_not_of(kSeparators, end);
  }
  if (tokens.empty()) usage_error("{}='{}' holds no token id; try '0'", flag, text);
  return tokens;
}

namespace {

/// The tokens of the training split; throws UsageError unless val_fraction lies in [0, 1).
int64_t count_train_tokens(const TokenFile& file, double val_fraction) {
  if (!(val_fraction >= 0 && val_fraction < 1)) {
    usage_error("val_fraction={} must lie in [0, 1); try 0.1", val_fraction);
  }
  return file.size() - static_cast<int64_t>(val_fraction * double(file.size()));
}

}  // namespace

Dataset::Dataset(const TokenFile& file, int64_t seq_len, double val_fraction, DataOrder order,
                 uint64_t seed)
    : file_(file),
      seq_len_(seq_len),
      train_tokens_(count_train_tokens(file, val_fraction)),
      order_(order),
      order_of_windows_(seed, "data.order", std::max<int64_t>(train_tokens_ / seq_len, 1)),
      offsets_(seed, "data.offset") {
  if (train_tokens_ < 2) {
    usage_error(
        "data={}: of {} tokens {} are for training, and a sample needs 2 or more: one to read, one "
        "to predict; {}",
        file.path(), file.size(), train_tokens_,
        file.size() < 2 ? "give a longer file" : "try val_fraction=0 and seq_len=1");
  }
  if (train_tokens_ < seq_len + 1) {
    usage_error("data={}: {} training tokens are fewer than seq_len+1={}; try seq_len={} or less",
                file.path(), train_tokens_, seq_len + 1, train_tokens_ - 1);
  }
}

void Dataset::train_sample(int64_t sample, std::span<int32_t> inputs,
                           std::span<int32_t> targets) const {
  int64_t position = train_start(sample);
  int32_t token = file_[position];
  for (int64_t i = 0; i < seq_len_; ++i) {
    inputs[i] = token;
    if (++position == train_tokens_) position = 0;
    token = file_[position];
    targets[i] = token;
  }
}

void Dataset::val_sample(int64_t sample, std::span<int32_t> inputs,
                         std::span<int32_t> targets) const {
  const int64_t start = train_tokens_ + sample * seq_len_;
  for (int64_t i = 0; i < seq_len_; ++i) {
    inputs[i] = file_[start + i];
    targets[i] = file_[start + i + 1];
  }
}

void Dataset::read(Split split, int64_t first_sample, std::span<int32_t> inputs,
                   std::span<int32_t> targets) const {
  for (int64_t at = 0, sample = first_sample; at < std::ssize(inputs); at += seq_len_, ++sample) {
    const auto sample_inputs = inputs.subspan(at, seq_len_);
    const auto sample_targets = targets.subspan(at, seq_len_);
    if (split == Split::train) {
      train_sample(sample, sample_inputs, sample_targets);
    } else {
      val_sample(sample, sample_inputs, sample_targets);
    }
  }
}

int64_t Dataset::val_samples() const { return std::max<int64_t>(val_tokens() - 1, 0) / seq_len_; }

double Dataset::unigram_entropy(int64_t vocab_size) const {
  std::vector<int64_t> counts(vocab_size);
  for (int64_t i = 0; i < train_tokens_; ++i) ++counts[file_[i]];
  double entropy = 0;
  for (int64_t count : counts) {
    const double frequency = double(count) / double(train_tokens_);
    if (count > 0) entropy -= frequency * std::log(frequency);
  }
  return entropy;
}

int64_t Dataset::train_start(int64_t sample) const {
  if (order_ == DataOrder::sequential) return sample % train_tokens_ * seq_len_ % train_tokens_;
  const int64_t windows = train_tokens_ / seq_len_;
  const uint64_t epoch = sample / windows;
  const int64_t window = order_of_windows_(epoch, sample % windows);
  const int64_t offset = offsets_.bits(epoch).a % train_tokens_;
  return (window * seq_len_ + offset) % train_tokens_;
}

}  // namespace usp
