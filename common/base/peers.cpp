#include "base/peers.h"

namespace usp {

const Peers& alone() {
  static const class : public Peers {
    int rank() const override { return 0; }
    int size() const override { return 1; }
    std::vector<std::string> all_gather_text(const std::string& text) const override {
      return {text};
    }
  } one;
  return one;
}

void refuse_together(const Peers& peers, const std::function<void()>& check) {
  std::string refusal;
  try {
    check();
  } catch (const UsageError& error) {
    refusal = error.what();
  }
  const std::vector<std::string> refusals = peers.all_gather_text(refusal);
  for (size_t rank = 0; rank < refusals.size(); ++rank) {
    const std::string& text = refusals[rank];
    if (!text.empty()) {
      throw RefusedTogether(rank == 0 ? text : fmt::format("rank {}: {}", rank, text));
    }
  }
}

}  // namespace usp
