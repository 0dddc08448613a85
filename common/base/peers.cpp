#include "base/peers.h"

#include <new>

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
  } catch (const PeerFailed&) {
    throw;  // which has said why
  } catch (const std::bad_alloc&) {
    refusal = "there is not enough memory; try a smaller model or --micro_batch_size";
  } catch (const std::exception& error) {
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
