#include "files/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <tuple>

#include "base/check.h"

namespace usp {

namespace {

/// A process as a lock names it: `PID HOST MACHINE`. Containers of one machine have host names of
/// their own and share its kernel, whose locks hold among them.
struct Holder {
  pid_t pid = 0;
  std::string host, machine;

  static Holder self() {
    Holder self;
    self.pid = getpid();
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    self.host = name;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> self.machine;
    return self;
  }
  static Holder of(int descriptor) {
    char text[512] = {};
    std::ignore = pread(descriptor, text, sizeof(text) - 1, 0);  // what cannot be read is nobody's
    Holder holder;
    std::istringstream(text) >> holder.pid >> holder.host >> holder.machine;
    return holder;
  }
  bool on_machine_of(const Holder& other) const {
    return host.empty() || host == other.host || machine == other.machine;
  }
};

[[noreturn]] void refuse(const std::string& run_dir, const std::string& path,
                         const Holder& holder) {
  const std::string who = holder.pid == 0
                              ? "another process"
                              : fmt::format("process {} on {}", holder.pid, holder.host);
  const std::string remedy =
      holder.on_machine_of(Holder::self())
          ? "wait for its end"
          : fmt::format("wait for its end; where it is dead, remove {}", path);
  usage_error("run_dir={} is in use by {}; give another directory, or {}", run_dir, who, remedy);
}

}  // namespace

RunLock::RunLock(const std::string& run_dir)
    : run_dir_(run_dir), path_((std::filesystem::path(run_dir) / "lock").string()) {
  while (!open_file()) {
  }
  const Holder self = Holder::self();
  const std::string text = fmt::format("{} {} {}\n", self.pid, self.host, self.machine);
  if (ftruncate(descriptor_, 0) == 0 &&
      pwrite(descriptor_, text.data(), text.size(), 0) == std::ssize(text)) {
    return;
  }
  const int error = errno;
  close(descriptor_);
  usage_error("run_dir={} cannot be written to: {}", run_dir_, std::strerror(error));
}

RunLock::~RunLock() {
  unlink(path_.c_str());  // while it is still locked: nobody else's
  close(descriptor_);
}

/// Returns false where the file's last owner has removed it in the meantime.
bool RunLock::open_file() {
  descriptor_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
  if (descriptor_ < 0) {
    usage_error("run_dir={} cannot be written to: {}", run_dir_, std::strerror(errno));
  }
  struct stat status {};
  if (fstat(descriptor_, &status) == 0 && !S_ISREG(status.st_mode)) {  // a pipe would block
    close(descriptor_);
    usage_error("run_dir={}: what is called lock there is not a file; remove {}", run_dir_, path_);
  }
  const bool locked = flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
  const bool by_another = !locked && errno == EWOULDBLOCK;
  const Holder holder = Holder::of(descriptor_);
  // Not every network's file system has locks; there, a process that lives keeps its right.
  const bool alive = !locked && holder.pid > 0 && kill(holder.pid, 0) == 0;
  if (by_another || alive || !holder.on_machine_of(Holder::self())) {
    close(descriptor_);
    refuse(run_dir_, path_, holder);
  }
  if (fstat(descriptor_, &status) == 0 && status.st_nlink > 0) return true;
  close(descriptor_);
  return false;
}

}  // namespace usp
