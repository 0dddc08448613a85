#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/check.h"

/// What libFuzzer calls, and what replays a corpus: one input, which is used or refused.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace usp {

/// Runs body(). To throw what a bad input deserves is fine; any other exception is a finding.
template <class Body>
int refuses_or(Body&& body) {
  try {
    body();
  } catch (const Error&) {
  } catch (const UsageError&) {
  }
  return 0;
}

/// What must hold of an input that was not refused.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

}  // namespace usp
