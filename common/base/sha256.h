#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace usp {

/// The SHA-256 of these bytes, in hexadecimal.
std::string sha256(std::span<const std::byte> bytes);

}  // namespace usp
