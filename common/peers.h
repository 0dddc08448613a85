#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace usp {

/// The ranks that do something together, as code sees them that also runs without ranks: a
/// Communicator is one.
class Peers {
 public:
  virtual ~Peers() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Every rank's text, by rank. All of them call it, and wait in it for the last.
  virtual std::vector<std::string> all_gather_text(const std::string& text) const = 0;
};

/// A rank without others.
const Peers& alone();

/// Another rank failed, and this one with it. Whoever prints errors leaves this one to that rank.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

}  // namespace usp
