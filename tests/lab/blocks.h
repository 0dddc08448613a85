#pragma once

#include "lab/attention_case.h"

/// What the size of a block's tile of queries is worth, on the emulated GPU.
namespace usp::lab {

/// Bytes that a rung asks for. Options::counters has to be set.
template <class T>
int64_t bytes_asked(const Rung<T>& rung, const Shape& shape) {
  const Attended<T> x(rung, shape);
  rung.run(nullptr, x.problem);
  const emulator::Counters counted = emulator::take_report().total;
  return counted.sector_bytes() + counted.box_bytes;
}

/// Bytes of keys and values, by counting: what twice the keys ask for beyond, since queries,
/// outputs and lse stay.
template <class T>
int64_t bytes_of_keys(const Rung<T>& rung, const Shape& shape) {
  Shape twice = shape;
  twice.keys *= 2;
  return bytes_asked(rung, twice) - bytes_asked(rung, shape);
}

/// The same by the formula 2 S^2 d^2 / M for each head, where a block keeps M = r d numbers of its
/// r queries, and all see all keys.
template <class T>
int64_t bytes_of_keys_by_formula(const Rung<T>& rung, const Shape& x) {
  const int64_t d = x.width, kept = rung.queries * d;
  return x.samples * x.heads * (2 * x.queries * x.keys * d * d / kept) * int64_t{sizeof(T)};
}

}  // namespace usp::lab
