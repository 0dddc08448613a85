#pragma once

#include <fmt/format.h>

#include <map>
#include <string>
#include <vector>

#include "tensor/allocator.h"
#include "testing.h"
#include "train/footprint.h"

namespace usp::test {

/// "lse 16, qkv 96": by name, of parts some of which may cancel each other.
inline std::string by_name(const std::vector<NamedBytes>& parts) {
  std::map<std::string, int64_t> sums;
  for (const NamedBytes& part : parts) sums[std::string(part.name)] += part.bytes;
  std::string text;
  for (const auto& [name, bytes] : sums) {
    if (bytes != 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, bytes);
  }
  return text;
}

/// Activations that were made and not let go of since recording began.
inline std::string live_by_name(const Allocator& allocator) {
  std::vector<NamedBytes> parts;
  for (const Allocator::Event& event : allocator.events()) {
    if (event.tag.category == Category::activations) parts.push_back({event.tag.name, event.bytes});
  }
  return by_name(parts);
}

/// What segments say that they keep, with their outputs.
inline std::string kept_by_name(const std::vector<Footprint>& segments) {
  std::vector<NamedBytes> parts;
  for (const Footprint& segment : segments) {
    parts.insert(parts.end(), segment.kept.begin(), segment.kept.end());
    parts.push_back(segment.output);
  }
  return by_name(parts);
}

}  // namespace usp::test
