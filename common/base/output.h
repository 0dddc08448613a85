#pragma once

#include <string>

namespace usp {

/// Writes what was printed to standard output and is still in its buffer. Throws Error if that, or
/// anything printed before, did not arrive: the disk may be full.
void finish_output();
/// What to say of it; `number` is errno's, 0 where that is not known.
std::string output_error(int number);

/// What happens when standard output is a pipe whose reader has gone, as in `program | head`: the
/// process gets SIGTERM, and what it still prints goes nowhere. Without it, it would be killed.
void outlive_reader();

}  // namespace usp
