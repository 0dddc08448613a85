#include "files/safetensors.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "fuzz.h"

namespace usp {
namespace {

/// Whatever the header says, the tensors lie inside the file and can be read.
void read_all(std::span<const std::byte> bytes) {
  const SafetensorsFile file("file", bytes);
  for (const StoredTensor& tensor : file.tensors()) {
    require(&file.get(tensor.name) == &tensor, "a name finds its own tensor");
    require(tensor.file_offset + std::ssize(tensor.bytes) <= std::ssize(bytes), "inside the file");
    refuses_or([&] {
      std::vector<double> values(tensor.numel());
      tensor.read(0, values);
      tensor.check_finite();
    });
  }
}

}  // namespace
}  // namespace usp

/// The input as a file; and once more with a header length that fits, which few inputs have.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace usp;
  std::vector<uint8_t> bytes(data, data + size);
  refuses_or([&] { read_all(std::as_bytes(std::span(bytes))); });
  if (size < 8) return 0;
  const auto header_end = std::find(bytes.rbegin(), bytes.rend() - 8, '}').base();
  const uint64_t length = header_end - bytes.begin() - 8;
  std::memcpy(bytes.data(), &length, sizeof(length));
  return refuses_or([&] { read_all(std::as_bytes(std::span(bytes))); });
}
