#include "base/file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/check.h"

namespace usp {

namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

}  // namespace

FileWriter::FileWriter(const std::string& path)
    : path_(path), descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail("cannot create {}: {}", path, std::strerror(errno));
  buffer_.reserve(kBufferBytes);
}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t part = std::min(bytes.size(), kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.begin() + part);
    bytes = bytes.subspan(part);
    size_ += int64_t(part);
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void FileWriter::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

void FileWriter::flush() {
  const std::byte* at = buffer_.data();
  size_t left = buffer_.size();
  while (left > 0) {
    const ssize_t written = ::write(descriptor_, at, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      fail("writing {} failed at byte {}: {}", path_, size_ - int64_t(left), std::strerror(errno));
    }
    at += written;
    left -= written;
  }
  buffer_.clear();
}

void FileWriter::finish() {
  flush();
  if (fsync(descriptor_) != 0) {
    fail("writing {} to the disk failed: {}", path_, std::strerror(errno));
  }
  close();
}

void FileWriter::close() {
  flush();
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) fail("closing {} failed: {}", path_, std::strerror(errno));
}

void write_file(const std::string& path, std::string_view text) {
  namespace fs = std::filesystem;
  std::error_code error;
  const bool exists = fs::exists(path, error);
  if (exists && !fs::is_regular_file(path, error)) {
    FileWriter stream(path);
    stream.write(text);
    return stream.close();
  }
  const fs::path target = exists ? fs::canonical(path, error) : fs::path(path);  // behind a link
  const std::string beside = target.string() + ".tmp";
  try {
    FileWriter file(beside);
    file.write(text);
    file.finish();
    if (exists) fs::permissions(beside, fs::status(target).permissions());
    fs::rename(beside, target);
  } catch (const fs::filesystem_error& failure) {
    fs::remove(beside, error);
    fail("cannot replace {}: {}", path, failure.code().message());
  } catch (const Error&) {
    fs::remove(beside, error);
    throw;
  }
}

void sync_directory(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open the directory {}: {}", path, std::strerror(errno));
  const int result = fsync(descriptor);
  const int error = errno;
  close(descriptor);
  // Some file systems, network ones above all, cannot do this to a directory.
  if (result != 0 && error != EINVAL) {
    fail("writing the directory {} to the disk failed: {}", path, std::strerror(error));
  }
}

}  // namespace usp
