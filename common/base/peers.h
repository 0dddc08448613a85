#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/check.h"

namespace usp {

/// The ranks that carry out a task together. Code that also runs in programs without ranks takes
/// this interface; a Communicator implements it.
class Peers {
 public:
  virtual ~Peers() = default;

  virtual int rank() const = 0;  ///< this rank's number, from 0
  virtual int size() const = 0;  ///< how many they are
  /// Every rank's text, by rank. All ranks call this function; it returns when the last one has.
  virtual std::vector<std::string> all_gather_text(const std::string& text) const = 0;
};

/// The peers of a rank that is alone: none but itself.
const Peers& alone();

/// This rank fails because another one has. Nobody prints this error: the rank that failed first
/// prints its own.
class PeerFailed : public Error {
 public:
  using Error::Error;
};

/// A usage error that every rank throws at the same time: rank 0 alone prints it.
class RefusedTogether : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Runs check() on every rank, before the first step: whatever is wrong by then is a usage error.
/// Where it throws on any rank, all throw what the lowest such rank has to say, as RefusedTogether:
/// a rank that is refused leaves none behind. Where that is not rank 0, the message begins with its
/// number. All ranks call it.
void refuse_together(const Peers& peers, const std::function<void()>& check);

}  // namespace usp
