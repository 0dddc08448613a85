#include "data.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "check.h"

namespace usp {

TokenFile::TokenFile(const std::string& path, int token_bytes, int64_t vocab_size)
    : path_(path), token_bytes_(path.ends_with(".bin") ? token_bytes : 1) {
  const int descriptor =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would block
  if (descriptor < 0) {
    usage_error("data={}: cannot open the file: {}", path, std::strerror(errno));
  }
  struct stat status {};
  fstat(descriptor, &status);
  bytes_ = status.st_size;
  size_ = bytes_ / token_bytes_;
  const bool regular = S_ISREG(status.st_mode);
  if (regular && size_ > 0) {
    void* address = mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (address != MAP_FAILED) data_ = static_cast<const unsigned char*>(address);
  }
  close(descriptor);
  if (!regular) usage_error("data={} is not a regular file; give a text file or a .bin", path);
  if (size_ == 0) usage_error("data={} is empty; give a text file or a .bin of tokens", path);
  if (data_ == nullptr) fail("cannot map {} into memory: {}", path, std::strerror(errno));
  if (bytes_ % token_bytes_ != 0) {
    usage_error("data={}: {} bytes are no whole number of {}-byte tokens; see --token_dtype", path,
                bytes_, token_bytes_);
  }
  check_tokens(vocab_size);
}

TokenFile::~TokenFile() {
  if (data_ != nullptr) munmap(const_cast<unsigned char*>(data_), bytes_);
}

int32_t TokenFile::operator[](int64_t index) const {
  uint32_t token = 0;
  std::memcpy(&token, data_ + index * token_bytes_, token_bytes_);  // little-endian
  return static_cast<int32_t>(token);
}

std::string TokenFile::sha256() const {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (EVP_Digest(data_, bytes_, digest, &length, EVP_sha256(), nullptr) != 1) {
    fail("SHA-256 of {} failed", path_);
  }
  return fmt::format("{:02x}", fmt::join(digest, digest + length, ""));
}

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
  if (train_tokens_ < seq_len + 1) {
    usage_error("data={}: {} training tokens are fewer than seq_len+1={}; try seq_len={} or less",
                file.path(), train_tokens_, seq_len + 1, std::max<int64_t>(train_tokens_ - 1, 1));
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
