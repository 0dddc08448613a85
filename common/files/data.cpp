#include "files/data.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/output.h"
#include "base/rules.h"
#include "base/sha256.h"
#include "files/file_kind.h"

namespace usp {

TokenFile::TokenFile(const std::string& path, int token_bytes, int64_t vocab_size, bool given)
    : TokenFile(path, read_token_format(path, token_bytes, given), vocab_size) {}

TokenFile::TokenFile(const std::string& path, TokenFormat format, int64_t vocab_size)
    : path_(path), format_(std::move(format)) {
  size_ = std::ssize(format_.tokens) / format_.width;
  if (size_ == 0) usage_error("data={} holds no token; give a longer file", path);
  check_width();
  check_tokens(vocab_size);
}

int32_t TokenFile::operator[](int64_t index) const {
  uint64_t token = 0;  // little-endian
  std::memcpy(&token, format_.tokens.data() + index * format_.width, format_.width);
  return static_cast<int32_t>(token);
}

bool TokenFile::begins_document(int64_t index) const {
  return std::ranges::binary_search(format_.document_starts, index);
}

std::string TokenFile::sha256() const {
  const std::string digest = usp::sha256(format_.file->bytes());
  if (!format_.index) return digest;
  const std::string both = digest + usp::sha256(format_.index->bytes());
  return usp::sha256(std::as_bytes(std::span(both)));
}

/// Ids of another width than they are read with show: of every two numbers one is then the upper
/// half of an id, and next to nothing.
void TokenFile::check_width() const {
  constexpr int64_t kEnough = 16, kMost = 1 << 20, kUpper = 7;
  const int64_t count = std::min(size_, kMost) / 2;
  if (!format_.is_raw || 2 * count < kEnough) return;
  int64_t upper[2] = {}, of_eight = 0, swapped = 0, zeros = 0;
  for (int64_t i = 0; i < 2 * count; ++i) {
    const auto token = static_cast<uint32_t>((*this)[i]);
    upper[i % 2] += token <= kUpper;
    of_eight += i % 4 >= 2 && token == 0;
    swapped += token % 256 == 0;
    zeros += token == 0;
  }
  const std::string file = shell_quoted(path_);
  const auto refuse = [&](const std::string& what, const std::string& remedy) {
    usage_error("data={}: {}; {}", path_, what, remedy);
  };
  const auto convert = [&](const char* dtype) {
    return fmt::format(
        "write ids of 32 bits with `python3 -c \"import numpy, sys; numpy.fromfile(sys.argv[1], "
        "'{}').astype('<u4').tofile(sys.argv[2])\" {} ids.bin` and give --data ids.bin "
        "--token_dtype "
        "uint32",
        dtype, file);
  };
  const std::string every = fmt::format("every second number of {} bits is {}", 8 * format_.width,
                                        format_.width == 2 ? "at most 7" : "0");
  if (zeros == 2 * count) {
    refuse("its ids are all 0, as in a file of which nothing has arrived", "get the file again");
  }
  if (format_.width == 2 && !format_.width_is_given && halves_are_alike()) {
    refuse(
        "both bytes of its 16-bit numbers are distributed alike, so probably its ids have 8 bits",
        convert("u1") + ", or give --token_dtype uint16 if they have 16");
  }
  if (upper[1] == count && 4 * upper[0] < 3 * count) {
    if (format_.width == 4 || of_eight >= count - 1) {
      refuse(every + ", so its ids have 64 bits", convert("<i8"));
    }
    refuse(every + ", so its ids have 32 bits", "give --token_dtype uint32");
  }
  if (upper[0] == count && 4 * upper[1] < 3 * count) {
    refuse(every + ", so its ids are in big-endian order",
           convert(format_.width == 2 ? ">u4" : ">i8"));
  }
  if (swapped == 2 * count && 2 * zeros < count) {
    refuse("every number is a multiple of 256, so its ids are in big-endian order",
           convert(format_.width == 2 ? ">u2" : ">u4"));
  }
  if (format_.width == 2 && !format_.width_is_given && upper_halves_vary_more()) {
    refuse("the upper bytes of its ids vary more than the lower ones, as in big-endian order",
           convert(">u2") + ", or give --token_dtype uint16 if they are in little-endian order");
  }
}

/// Whether lower bytes of two 16-bit ids agree more often than upper ones, by a factor that chance
/// does not reach. In right ids it is the other way round, as frequent tokens have low numbers.
bool TokenFile::upper_halves_vary_more() const {
  constexpr int64_t kEnough = 192, kMost = 1 << 20;
  const int64_t count = std::min(size_, kMost);
  if (count < kEnough) return false;
  std::array<std::array<double, 256>, 2> histogram{};
  for (int64_t i = 0; i < 2 * count; ++i) {
    ++histogram[i % 2][std::to_integer<int>(format_.tokens[i])];
  }
  double agree[2] = {};  // of the lower bytes, of the upper ones
  for (int half = 0; half < 2; ++half) {
    for (const double found : histogram[half]) agree[half] += found * found;
  }
  return agree[0] > 2 * agree[1];
}

/// Whether in ids of 16 bits the lower bytes have the values of the upper ones, equally often.
/// Those of tokens differ: frequent tokens have low numbers.
bool TokenFile::halves_are_alike() const {
  constexpr int64_t kEnough = 192, kMost = 1 << 20;
  const int64_t count = std::min(size_, kMost);
  if (count < kEnough) return false;
  const auto chi_squared = [&](int shift, double most) {
    std::array<std::array<double, 256>, 2> histogram{};
    for (int64_t i = 0; i < 2 * count; ++i) {
      ++histogram[i % 2][std::to_integer<int>(format_.tokens[i]) >> shift];
    }
    double sum = 0, found = 0;
    for (int value = 0; value < 256; ++value) {
      const double lower = histogram[0][value], upper = histogram[1][value];
      if (lower + upper == 0) continue;
      sum += (lower - upper) * (lower - upper) / (lower + upper);
      ++found;
    }
    // Neighbors go together, so that many ids differ by more than chance alone would have it.
    return sum < std::max(1.5 * found + most, 0.02 * double(count));
  };
  return chi_squared(0, 20) && chi_squared(4, 16);
}

namespace {

/// Whether all ids are of the vocabulary when their bytes are swapped, of ids enough to tell.
bool is_swapped(const TokenFile& file, int width, int64_t vocab_size) {
  constexpr int64_t kEnough = 64;
  for (int64_t i = 0; i < file.size(); ++i) {
    const uint32_t token = __builtin_bswap32(static_cast<uint32_t>(file[i])) >> (32 - 8 * width);
    if (token >= vocab_size) return false;
  }
  return file.size() >= kEnough;
}

}  // namespace

void TokenFile::check_tokens(int64_t vocab_size) const {
  const int bits = 8 * format_.width;
  if (!format_.is_signed && bits < 32 && vocab_size >= int64_t{1} << bits) return;
  for (int64_t i = 0; i < size_; ++i) {
    uint64_t token = 0;
    std::memcpy(&token, format_.tokens.data() + i * format_.width, format_.width);
    if (token < static_cast<uint64_t>(vocab_size) &&
        !(format_.is_signed && bits < 64 && token >> (bits - 1) != 0)) {
      continue;
    }
    const bool negative = format_.is_signed && token >> (bits - 1) != 0;
    const std::string shown =
        negative ? fmt::format("-{}", (bits == 64 ? ~token : (uint64_t{1} << bits) - 1 - token) + 1)
                 : fmt::format("{}", token);
    if (negative) {
      usage_error("data={}: token {} at position {} must be at least 0; give ids below {}", path_,
                  shown, i, vocab_size);
    }
    if (format_.is_raw && is_swapped(*this, format_.width, vocab_size)) {
      usage_error(
          "data={}: token {} at position {} is not below vocab_size={}, and all are when their "
          "bytes are swapped, so its ids are in big-endian order; write them with `python3 -c "
          "\"import numpy, sys; numpy.fromfile(sys.argv[1], '>u{}').astype('<u4')"
          ".tofile(sys.argv[2])\" {} ids.bin` and give --data ids.bin --token_dtype uint32",
          path_, shown, i, vocab_size, format_.width, shell_quoted(path_));
    }
    refuse("tokens_of_vocabulary", other_vocabularies(),
           "data={}: token {} at position {} must be below vocab_size={}", path_, shown, i,
           vocab_size);
  }
}

/// Flags by which all tokens may be of the vocabulary.
Remedies TokenFile::other_vocabularies() const {
  if (is_text()) return {"--vocab_size 256"};
  Remedies remedies;
  if (format_.is_raw) {
    remedies.push_back(fmt::format("--token_dtype {}", format_.width == 4 ? "uint16" : "uint32"));
  }
  uint64_t most = 0;
  for (int64_t i = 0; i < size_; ++i) {
    uint64_t token = 0;
    std::memcpy(&token, format_.tokens.data() + i * format_.width, format_.width);
    most = std::max(most, token);
  }
  if (most < INT32_MAX) remedies.push_back(fmt::format("--vocab_size {}", most + 1));
  return remedies;
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
    const std::string all = "--val_fraction 0";  // for training
    const std::string shorter = fmt::format("{} --seq_len {}", all, file.size() - 1);
    refuse("training_tokens",
           file.size() < 2 ? Remedies{} : Remedies{file.size() > seq_len ? all : shorter},
           "data={}: of {} tokens {} are for training, and a sample needs 2 or more: one to read, "
           "one to predict",
           file.path(), file.size(), train_tokens_);
  }
  if (train_tokens_ < seq_len + 1) {
    refuse("tokens_of_sample", values_of("seq_len", {train_tokens_ - 1}),
           "data={}: {} training tokens are fewer than seq_len+1={}", file.path(), train_tokens_,
           seq_len + 1);
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

std::vector<int32_t> Dataset::document_begins(Split split, int64_t first_sample,
                                              int64_t num_samples) const {
  std::vector<int32_t> begins;
  if (!file_.has_documents()) return begins;
  for (int64_t sample = first_sample; sample < first_sample + num_samples; ++sample) {
    const bool train = split == Split::train;
    int64_t at = train ? train_start(sample) : train_tokens_ + sample * seq_len_;
    for (int64_t i = 0; i < seq_len_; ++i, ++at) {
      if (train && at == train_tokens_) at = 0;
      const bool begins_here = i == 0 || at == 0 || file_.begins_document(at);
      begins.push_back(begins_here ? static_cast<int32_t>(i) : begins.back());
    }
  }
  return begins;
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
