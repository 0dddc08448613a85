#include "comm/witness.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

namespace usp {

namespace {

/// What the rank tells its witness: "RANK PATH", or nothing more to say.
constexpr char kGoodbye = '.';

/// The witness's whole life; it never returns.
[[noreturn]] void bear_witness(int socket, pid_t rank_pid) {
  // Nobody may take the witness for the rank: not the terminal, which signals its process group,
  // and not mpiexec, which reads what the rank prints and waits for its connections to close.
  setsid();
  dup2(socket, 0);
  close_range(1, ~0U, 0);
  std::string rank = "-1", path;
  char message[4096];
  ssize_t length = 0;
  while ((length = recv(0, message, sizeof(message), 0)) > 0) {
    if (message[0] == kGoodbye) _exit(0);
    const std::string text(message, static_cast<size_t>(length));
    rank = text.substr(0, text.find(' '));
    path = text.substr(text.find(' ') + 1);
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string line = fmt::format("{{\"rank\": {}, \"pid\": {}, \"time\": {:.6f}}}\n", rank,
                                       rank_pid, std::chrono::duration<double>(now).count());
  const int file = path.empty() ? -1 : open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (file >= 0 && write(file, line.data(), line.size()) < 0) _exit(1);
  _exit(0);
}

}  // namespace

Witness::Witness() {
  int sockets[2];
  const pid_t rank_pid = getpid();
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) return;
  const pid_t child = fork();
  if (child == 0) {
    close(sockets[0]);
    bear_witness(sockets[1], rank_pid);
  }
  close(sockets[1]);
  if (child > 0) {
    socket_ = sockets[0];
  } else {
    close(sockets[0]);  // no witness, and a run that can do without
  }
}

Witness::~Witness() {
  if (socket_ < 0) return;
  send(socket_, &kGoodbye, 1, MSG_NOSIGNAL);
  close(socket_);
}

void Witness::testify(int rank, const std::string& path) {
  if (socket_ < 0) return;
  const std::string message = fmt::format("{} {}", rank, path);
  send(socket_, message.data(), message.size(), MSG_NOSIGNAL);
}

}  // namespace usp
