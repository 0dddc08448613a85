#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace usp {

/// Writes a file from its beginning to its end. Whatever fails, such as a write to a full disk,
/// throws an Error that names the file and the byte.
class FileWriter {
 public:
  /// Creates the file, or empties the one that is there.
  explicit FileWriter(const std::string& path);
  /// Closes the file. Without finish() or close(), the last bytes are missing in it.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  /// Appends bytes. They may reach the file later, at the latest in finish() or close().
  void write(std::span<const std::byte> bytes);
  /// Appends a text, likewise.
  void write(std::string_view text);
  /// Brings the bytes to the disk (fsync) and closes the file.
  void finish();
  /// Closes the file; the system brings its bytes to the disk later.
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

/// Writes a whole file: beside the one that is there, which stays as it is until the new one can
/// take its place. What is no regular file, such as a pipe, takes the text itself. Throws Error.
void write_file(const std::string& path, std::string_view text);

/// Brings a directory's list of names to the disk. Only after that does a file that was just
/// created or renamed survive a power failure. Throws Error.
void sync_directory(const std::string& path);

}  // namespace usp
