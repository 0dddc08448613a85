#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

/// A file that is mapped, and what is said where it has become shorter meanwhile: its last pages
/// are gone then, and whoever reads them gets the signal SIGBUS.
struct Mapping {
  std::atomic<const std::byte*> begin = nullptr;
  size_t size = 0;
  std::string line;
};
std::array<Mapping, 256> mappings;  // what is beyond dies of the signal
std::mutex changes;

extern "C" void on_bus_error(int number, siginfo_t* info, void*) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  for (const Mapping& mapping : mappings) {
    const std::byte* begin = mapping.begin;
    if (info->si_code != BUS_ADRERR || begin == nullptr || at < begin || at >= begin + mapping.size)
      continue;
    std::ignore = write(STDERR_FILENO, mapping.line.data(), mapping.line.size());
    _exit(1);
  }
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void note(const std::string& path, std::span<const std::byte> bytes) {
  const std::lock_guard lock(changes);
  static std::once_flag listens;
  std::call_once(listens, [] {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
  });
  const auto free = std::ranges::find_if(
      mappings, [](const Mapping& mapping) { return mapping.begin == nullptr; });
  if (free == mappings.end()) return;
  free->line = fmt::format(
      "error: {} cannot be read any more: it has become shorter, or its disk fails; start again "
      "when "
      "it is whole\n",
      path);
  free->size = bytes.size();
  free->begin = bytes.data();
}

void forget(const std::byte* begin) {
  const std::lock_guard lock(changes);
  for (Mapping& mapping : mappings) {
    if (mapping.begin == begin) mapping.begin = nullptr;
  }
}

}  // namespace

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
  if (!bytes_.empty()) note(path, bytes_);
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  forget(bytes_.data());
  munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

std::string_view MappedFile::text() const {
  return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
}

}  // namespace usp
