#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace usp {

MappedFile::MappedFile(const std::string& path) {
  const int descriptor =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would block
  if (descriptor < 0) fail("{}: cannot open the file: {}", path, std::strerror(errno));
  struct stat status {};
  const bool regular = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = static_cast<size_t>(status.st_size);
  void* address = nullptr;
  if (regular && size > 0) {
    address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  }
  const int error = errno;
  close(descriptor);
  if (!regular) fail("{} is not a regular file", path);
  if (address == MAP_FAILED) fail("cannot map {} into memory: {}", path, std::strerror(error));
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

std::string_view MappedFile::text() const {
  return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
}

}  // namespace usp
