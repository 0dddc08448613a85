#pragma once

#include <string>
#include <string_view>

namespace usp {

/// Prints to standard output. Never throws, and never ends the program: where a text does not
/// arrive, what follows goes nowhere, finish_output() tells of it, and a run that cares is asked to
/// stop; see outlive_output().
void write_output(std::string_view text);
/// Brings what was printed so far to its reader.
void flush_output();
/// Writes what was printed to standard output and is still in its buffer. Throws Error if that, or
/// anything printed before, did not arrive: the disk may be full. A reader who has gone has seen
/// what he wanted; that is no error.
void finish_output();
/// Whether finish_output() would throw for what was printed so far.
bool output_is_lost();

/// Prints `error: ...` to standard error. Never throws, whatever becomes of the line: an error that
/// nobody can read must not hide the exit code.
void print_error(std::string_view message);

/// A word of a command line as a shell wants it, so that what is printed can be pasted.
std::string shell_quoted(const std::string& word);

/// What happens from here on when output is lost: the disk is full, the terminal has been closed,
/// or it is a pipe whose reader has gone, as in `program | head`. The process lives on, what it
/// still prints goes nowhere, and request_stop() is called, perhaps by a signal handler. Without
/// this, a pipe without a reader would kill the process.
void outlive_output(void (*request_stop)());

}  // namespace usp
