#include <unistd.h>

#include <array>
#include <filesystem>

#include "base/file_writer.h"
#include "files/data.h"
#include "fuzz.h"

/// A file of text or tokens. The input's first two bytes choose how it is called and read; 32 of
/// the first makes it Megatron's index of 20 tokens of 16 bits, 16 lines of JSON or an array of
/// NumPy's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace usp;
  if (size < 2) return 0;
  static const std::string stem =
      (std::filesystem::temp_directory_path() / fmt::format("usp_fuzz_{}", getpid())).string();
  const bool is_index = data[0] & 32;
  const std::string path = stem + (is_index       ? ".idx"
                                   : data[0] & 16 ? (data[0] & 1 ? ".npy" : ".jsonl")
                                   : data[0] & 1  ? ".bin"
                                                  : ".txt");
  return refuses_or([&] {
    {
      FileWriter file(path);
      file.write({reinterpret_cast<const std::byte*>(data) + 2, size - 2});
      file.close();
    }
    struct Removal {
      std::string path;
      ~Removal() { unlink(path.c_str()); }
    } removal{path}, removal_of_tokens{is_index ? stem + ".bin" : ""};
    if (is_index) {
      FileWriter file(stem + ".bin");
      const std::array<uint16_t, 20> ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
      file.write(std::as_bytes(std::span(ids)));
      file.close();
    }
    const int64_t vocab_size = data[0] & 4 ? INT32_MAX : 256, seq_len = 1 + data[1] % 16;
    const TokenFile tokens(path, data[0] & 2 ? 2 : 4, vocab_size, data[0] & 64);
    const Dataset dataset(tokens, seq_len, double(data[1] >> 4) / 16,
                          data[0] & 8 ? DataOrder::shuffled : DataOrder::sequential, data[0]);
    std::vector<int32_t> inputs(seq_len), targets(seq_len);
    const auto check = [&] {
      for (int32_t token : targets) require(token >= 0 && token < vocab_size, "a known token");
    };
    for (int64_t i : {0, 1, 1000}) {
      dataset.train_sample(i, inputs, targets);
      check();
      const std::vector<int32_t> begins = dataset.document_begins(Split::train, i, 1);
      require(begins.empty() || std::ssize(begins) == seq_len, "a document for each token");
      for (int64_t at = 0; at < std::ssize(begins); ++at) {
        require(begins[at] >= 0 && begins[at] <= at, "documents that begin at or before a token");
      }
    }
    if (dataset.val_samples() > 0) {
      dataset.val_sample(dataset.val_samples() - 1, inputs, targets);
      check();
    }
  });
}
