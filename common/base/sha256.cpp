#include "base/sha256.h"

#include <openssl/evp.h>

#include "base/check.h"

namespace usp {

std::string sha256(std::span<const std::byte> bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest, &length, EVP_sha256(), nullptr) != 1) {
    fail("SHA-256 of {} bytes failed", bytes.size());
  }
  return fmt::format("{:02x}", fmt::join(digest, digest + length, ""));
}

}  // namespace usp
