#include "base/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace usp {

namespace {

std::atomic<void (*)()> stop_run = nullptr;
std::atomic<bool> is_lost = false;
std::atomic<int> lost_by = 0;  // errno's number, 0 where it is not known

/// What is still written there goes nowhere. Only what a signal handler may call.
bool point_nowhere(int descriptor) {
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  const bool done = nowhere >= 0 && dup2(nowhere, descriptor) >= 0;
  if (nowhere >= 0) close(nowhere);
  return done;
}

void ask_to_stop() {
  if (stop_run != nullptr) stop_run.load()();
}

/// Whether the other end of a pipe, or the terminal, has been closed.
bool has_no_reader(int descriptor) {
  pollfd output{descriptor, POLLOUT, 0};
  return poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP)) != 0;
}

/// Closes for good those of standard output and standard error whose reader has gone.
extern "C" void on_closed_pipe(int signal) {
  bool found = false;
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    found |= has_no_reader(descriptor) && point_nowhere(descriptor);
  }
  if (found) return ask_to_stop();
  std::signal(signal, SIG_DFL);  // another pipe
  std::raise(signal);
}

/// A text has not arrived. Where its reader has gone, that is no failure.
void lose_output(int number) {
  const bool reader_has_gone =
      number == EPIPE || number == EIO || has_no_reader(STDOUT_FILENO);  // EIO: of a terminal
  if (!reader_has_gone && !is_lost.exchange(true)) lost_by = number;
  point_nowhere(STDOUT_FILENO);
  std::clearerr(stdout);
  std::fflush(stdout);
  ask_to_stop();
}

}  // namespace

void write_output(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) lose_output(errno);
}

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) lose_output(errno);
}

void finish_output() {
  flush_output();
  if (!is_lost) return;
  throw Error(fmt::format("standard output could not be written: {}",
                          lost_by != 0 ? std::strerror(lost_by) : "is its disk full?"));
}

bool output_is_lost() { return is_lost; }

void print_error(std::string_view message) {
  std::signal(SIGPIPE, SIG_IGN);  // as nothing follows but the end
  const std::string line = fmt::format("error: {}\n", message);
  for (size_t done = 0; done < line.size();) {
    const ssize_t written = write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    done += size_t(written);
  }
}

std::string shell_quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char character : word) {
    quoted += character == '\'' ? std::string("'\"'\"'") : std::string(1, character);
  }
  return quoted + "'";
}

void outlive_output(void (*request_stop)()) {
  stop_run = request_stop;
  std::signal(SIGPIPE, on_closed_pipe);
}

}  // namespace usp
