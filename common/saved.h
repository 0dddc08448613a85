#pragma once

#include <any>

#include "check.h"

namespace usp {

/// What one segment's backward needs from its forward, for one micro-batch. It belongs to the
/// micro-batch, never to the layer: several may be in flight, and running forward again recomputes
/// it. Only the segment that filled it knows what is inside.
class Saved {
 public:
  /// Replaces whatever was kept by an empty T.
  template <class T>
  T& emplace() {
    return content_.emplace<T>();
  }
  /// What forward kept; throws Error unless that is a T.
  template <class T>
  T& get() {
    T* content = std::any_cast<T>(&content_);
    USP_CHECK(content != nullptr, "backward finds nothing saved by the same segment's forward");
    return *content;
  }

 private:
  std::any content_;
};

}  // namespace usp
