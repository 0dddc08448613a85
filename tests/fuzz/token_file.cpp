#include <unistd.h>

#include <filesystem>

#include "base/file_writer.h"
#include "files/data.h"
#include "fuzz.h"

/// A text or .bin file of tokens. The input's first two bytes choose how it is read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace usp;
  if (size < 2) return 0;
  static const std::string stem =
      (std::filesystem::temp_directory_path() / fmt::format("usp_fuzz_{}", getpid())).string();
  const std::string path = stem + (data[0] & 1 ? ".bin" : ".txt");
  return refuses_or([&] {
    {
      FileWriter file(path);
      file.write({reinterpret_cast<const std::byte*>(data) + 2, size - 2});
      file.close();
    }
    struct Removal {
      std::string path;
      ~Removal() { unlink(path.c_str()); }
    } removal{path};
    const int64_t vocab_size = data[0] & 4 ? INT32_MAX : 256, seq_len = 1 + data[1] % 16;
    const TokenFile tokens(path, data[0] & 2 ? 2 : 4, vocab_size);
    const Dataset dataset(tokens, seq_len, double(data[1] >> 4) / 16,
                          data[0] & 8 ? DataOrder::shuffled : DataOrder::sequential, data[0]);
    std::vector<int32_t> inputs(seq_len), targets(seq_len);
    const auto check = [&] {
      for (int32_t token : targets) require(token >= 0 && token < vocab_size, "a known token");
    };
    for (int64_t i : {0, 1, 1000}) {
      dataset.train_sample(i, inputs, targets);
      check();
    }
    if (dataset.val_samples() > 0) {
      dataset.val_sample(dataset.val_samples() - 1, inputs, targets);
      check();
    }
  });
}
