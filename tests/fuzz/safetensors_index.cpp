#include "files/safetensors.h"
#include "fuzz.h"

/// An index of a sharded model: no name leads out of its directory.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace usp;
  return refuses_or([&] {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    for (const auto& [tensor, file] : parse_safetensors_index(text, "index")) {
      require(!file.empty() && file[0] != '.', "no directory");
      require(file.find('/') == std::string::npos && file.find('\0') == std::string::npos,
              "one name");
    }
  });
}
