#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace usp {

/// Writes a file from its beginning to its end. Every error (a full disk above all) is an Error
/// with the file's name and the byte where it happened.
class FileWriter {
 public:
  /// Creates the file, or empties the one that is there.
  explicit FileWriter(const std::string& path);
  /// Closes a file that was not finished, as it is.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  /// Brings the bytes to the disk (fsync) and closes the file.
  void finish();
  /// Closes the file, whose bytes reach the disk when the system likes.
  void close();

  int64_t size() const { return size_; }  ///< bytes written
  const std::string& path() const { return path_; }

 private:
  void flush();

  std::string path_;
  int descriptor_;
  int64_t size_ = 0;
  std::vector<std::byte> buffer_;
};

/// Brings to the disk which names a directory holds: a file that was just created, or renamed, is
/// there after a power failure only once this was done. Throws Error.
void sync_directory(const std::string& path);

}  // namespace usp
