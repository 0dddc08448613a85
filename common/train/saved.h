#pragma once

#include <memory>
#include <typeindex>
#include <utility>
#include <vector>

#include "base/check.h"

namespace usp {

/// What the backward pass through a block needs from its forward pass, for one micro-batch. It
/// belongs to the micro-batch, never to the layer: several may be in flight, and running forward
/// again recomputes it.
///
/// Every segment of the block keeps one struct, of a type of its own. A later segment that names
/// the type may read the struct: whoever combines the experts' outputs reads where tokens went.
class BlockSaved {
 public:
  BlockSaved() = default;
  BlockSaved(BlockSaved&&) = default;
  BlockSaved& operator=(BlockSaved&&) = default;

  // [saved]
  /// An empty T to fill. Throws Error if there is one.
  template <class T>
  T& emplace() {
    USP_CHECK(find<T>() == entries_.end(), "two segments of a block keep the same type");
    auto entry = std::make_shared<T>();
    entries_.emplace_back(typeid(T), entry);
    return *entry;
  }
  /// What forward kept, taken out: its memory goes with the returned object.
  template <class T>
  T take() {
    T content = std::move(get<T>());
    entries_.erase(find<T>());
    return content;
  }
  // [saved]
  template <class T>
  bool has() {
    return find<T>() != entries_.end();
  }
  /// The same, left there; throws Error unless there is a T.
  template <class T>
  T& get() {
    const auto entry = find<T>();
    USP_CHECK(entry != entries_.end(),
              "backward finds nothing saved by the same segment's forward");
    return *static_cast<T*>(entry->second.get());
  }

 private:
  using Entry = std::pair<std::type_index, std::shared_ptr<void>>;

  template <class T>
  std::vector<Entry>::iterator find() {
    auto entry = entries_.begin();
    while (entry != entries_.end() && entry->first != typeid(T)) ++entry;
    return entry;
  }

  std::vector<Entry> entries_;
};

}  // namespace usp
