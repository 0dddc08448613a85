#include "base/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace usp {

namespace {

volatile std::sig_atomic_t reader_has_gone = 0;

/// Only what a signal handler may call.
extern "C" void on_closed_pipe(int signal) {
  pollfd output{STDOUT_FILENO, POLLOUT, 0};
  const bool closed = poll(&output, 1, 0) == 1 && (output.revents & POLLERR) != 0;
  const int nowhere = closed ? open("/dev/null", O_WRONLY | O_CLOEXEC) : -1;
  if (nowhere < 0 || dup2(nowhere, STDOUT_FILENO) < 0) {  // another pipe
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  close(nowhere);
  reader_has_gone = 1;
  kill(getpid(), SIGTERM);  // to whichever thread takes it
}

}  // namespace

void finish_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  const int number = errno;
  if (reader_has_gone == 0) throw Error(output_error(number));
}

std::string output_error(int number) {
  return fmt::format("standard output could not be written: {}",
                     number != 0 ? std::strerror(number) : "is its disk full?");
}

void outlive_reader() { std::signal(SIGPIPE, on_closed_pipe); }

}  // namespace usp
