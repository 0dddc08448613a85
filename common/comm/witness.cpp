#include "comm/witness.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>

namespace usp {

namespace {

// What a rank tells the witness: one of these letters, and what follows it.
constexpr char kGoodbye = '.', kIdentity = 'i', kPath = 'p';
/// A process closes its highest descriptors first. mpiexec's own connection has a low one.
constexpr int kHighDescriptor = 500;
/// A rank that aborts waits so long first. MPI's shared memory makes it abort when it reads from a
/// rank that has gone, which it may find out before the witness does: a dying process gives back
/// its memory first, closes its connections after, and may have to wait for a core in between.
constexpr timespec kBeforeAbort{0, 200'000'000};

extern "C" void wait_before_abort(int /*signal*/) { nanosleep(&kBeforeAbort, nullptr); }

/// The address of the witness that process `parent` has made: a name that no file bears.
socklen_t address_of(pid_t parent, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("usp-witness-{}", parent);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

/// The life of the witness.
class WitnessProcess {
 public:
  explicit WitnessProcess(int listener) : listener_(listener), epoll_(epoll_create1(0)) {
    add(listener_);
  }

  [[noreturn]] void run() {
    while (true) {
      // What happened while this process was not running comes in the order in which it happened.
      epoll_event events[64];
      const int count = epoll_wait(epoll_, events, 64, -1);
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        fd == listener_ ? welcome() : hear(fd);
      }
    }
  }

 private:
  void add(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }

  void welcome() {
    const int fd = accept(listener_, nullptr, nullptr);
    if (fd < 0) return;
    ranks_[fd] = "";
    add(fd);
    prctl(PR_SET_PDEATHSIG, 0);  // from here on it lives until the last rank is gone
  }

  void hear(int fd) {
    char message[8192];
    const ssize_t length = recv(fd, message, sizeof(message), 0);
    const std::string text(message, length > 0 ? static_cast<size_t>(length) : 0);
    if (text.starts_with(kIdentity)) {
      ranks_[fd] = text.substr(1);
    } else if (text.starts_with(kPath)) {
      path_ = text.substr(1);
    } else {
      if (text.empty()) write_down(ranks_[fd]);
      close(fd);
      ranks_.erase(fd);
      if (ranks_.empty()) _exit(0);
    }
  }

  void write_down(const std::string& identity) const {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const std::string line = fmt::format("{{{}, \"time\": {:.6f}}}\n", identity,
                                         std::chrono::duration<double>(now).count());
    const int file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (file >= 0 && write(file, line.data(), line.size()) < 0) _exit(1);
    close(file);
  }

  int listener_, epoll_;
  std::map<int, std::string> ranks_;  ///< connected, and who they are
  std::string path_;
};

}  // namespace

Witness::Witness() {
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const socklen_t length = address_of(getpid(), address);
  const bool bound = bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                     listen(listener, 1024) == 0;
  const pid_t parent = getpid();
  child_ = bound ? fork() : -1;  // no witness, and a run that can do without
  if (child_ == 0) {
    // Nobody may take the witness for the rank: not the terminal, which signals its process group,
    // and not mpiexec, which reads what the rank prints and waits for its connections to close.
    prctl(PR_SET_PDEATHSIG, SIGKILL);   // until the first rank connects
    if (getppid() != parent) _exit(0);  // which has gone already
    setsid();
    dup2(listener, 0);
    close_range(1, ~0U, 0);
    WitnessProcess(0).run();
  }
  close(listener);
}

Witness::~Witness() {
  tell(std::string(1, kGoodbye));
  close(connection_);
}

void Witness::join(pid_t parent, int rank) {
  if (parent != getpid() && child_ > 0) {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  const int low = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const socklen_t length = address_of(parent, address);
  if (connect(low, reinterpret_cast<const sockaddr*>(&address), length) == 0) {
    connection_ = fcntl(low, F_DUPFD_CLOEXEC, kHighDescriptor);
  }
  close(low);
  signal(SIGABRT, wait_before_abort);  // abort() ends the process when the handler is done
  tell(fmt::format("{}\"rank\": {}, \"pid\": {}", kIdentity, rank, getpid()));
}

void Witness::testify(const std::string& path) { tell(kPath + path); }

void Witness::tell(const std::string& message) {
  if (connection_ >= 0) send(connection_, message.data(), message.size(), MSG_NOSIGNAL);
}

}  // namespace usp
