#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace usp {

/// A file's bytes, mapped into memory and read-only. If another process shortens the file
/// meanwhile, this one ends with a line that says so, and exit code 1.
class MappedFile {
 public:
  /// Throws Error unless `path` is a regular file that can be read. It may be empty.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const;  ///< the same bytes

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace usp
