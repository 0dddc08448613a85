#include "planner/classes_of_ranks.h"

#include "technique/planner/layouts.h"

/// One rank of a class stands for all of it.
namespace usp::test {
namespace {

TEST_CASE("all ranks of a class do the same up to their last gradients") {
  int64_t ranks = 0, classes = 0;
  for (const std::string& flags : random_layouts(kSanitized ? 2 : 40, 11 + turn())) {
    const TrainConfig config = layout_of_flags(flags);
    const RankClasses found = classes_of_ranks(config, /*ranks_per_node=*/4);
    std::vector<Program> programs = record_classes(config, found);
    for (int rank = 0; rank < std::ssize(found.of_rank); ++rank) {
      CAPTURE(flags, rank);
      CHECK(same_until_tail(programs[found.of_rank[rank]], record(config, rank)));
    }
    ranks += config.mesh().ranks();
    classes += std::ssize(programs);
  }
  CAPTURE(ranks, classes);
  if (!kSanitized) CHECK(classes < ranks);  // else too few layouts to expect it
}

TEST_CASE("what tells ranks apart makes classes") {
  const auto count = [](const std::string& flags, int64_t ranks_per_node) {
    return classes_of_ranks(layout_of_flags(instead(kSmall, flags)), ranks_per_node).ranks.size();
  };
  CHECK(count("--dp_size 4", 4) == 1);
  CHECK(count("--dp_size 4 --tp_size 2", 8) == 2);  // 31 words: 16 and 15
  CHECK(count("--dp_size 4 --tp_size 2 --vocab_size 32", 8) == 1);
  CHECK(count("--dp_size 4 --tp_size 2 --vocab_size 32 --ffn_hidden_size 13", 8) == 2);
  CHECK(count("--pp_size 4 --grad_acc_steps 4", 4) == 4);
  CHECK(count("--cp_size 4 --cp_layout contiguous", 4) == 4);
  // Of three pairs on nodes of three the second lies in two nodes.
  CHECK(count("--dp_size 3 --tp_size 2 --vocab_size 32", 4) == 1);
  CHECK(count("--dp_size 3 --tp_size 2 --vocab_size 32", 3) == 4);
}

}  // namespace
}  // namespace usp::test
