#include "composition/copies.h"

#include <algorithm>
#include <bit>
#include <mutex>

#include "comm/launch.h"
#include "composition/layout.h"
#include "technique/case_cover.h"
#include "technique/expert_parallel/expert_parity.h"
#include "technique/layout_of_flags.h"

namespace usp::test {
namespace {

/// Copies of every kind: over dp, of norms under tp, of kv heads inside tp, of tied ends, of
/// mirrored stages, of experts, of biases.
std::vector<ExpertCase> copied() {
  const auto with = [](auto change) {
    ExpertCase c = plain_experts(/*dp=*/2, /*ep=*/1);
    change(c);
    return c;
  };
  return {
      with([](ExpertCase& c) { c.balance = "bias"; }),
      with([](ExpertCase& c) { c.tp = 4, c.sequence = "again", c.zero_stage = 1; }),
      with([](ExpertCase& c) { c.pp = 2, c.tied = true, c.zero_stage = 3, c.dp = 1; }),
      with([](ExpertCase& c) { c.pp = 2, c.schedule = "dualpipe", c.grad_acc_steps = 4; }),
      with([](ExpertCase& c) { c.tp = c.cp = c.ep = 2, c.sequence = "kept", c.zero_stage = 2; }),
      with([](ExpertCase& c) { c.dp = 4, c.zero_stage = 2, c.shard_size = 2; }),
  };
}

TrainConfig checked_config(const ExpertCase& c) {
  TrainConfig config = expert_config(c);
  config.composition.check_copies = 1;
  return config;
}

TEST_CASE("copies of a weight stay equal to the bit, wherever they lie") {
  const Text text;
  for (const ExpertCase& c : copied()) {
    INFO(c.name());
    run_threads(int(c.ranks()), [&](const Communicator& world) {
      const TrainConfig config = checked_config(c);
      const Mesh mesh(world, config.mesh());
      Trainer trainer(config, {&text.dataset, mesh});
      for (int64_t step = 0; step < 2; ++step) {
        trainer.train_step(step);
        trainer.report(step, 0);
      }
    });
  }
}

/// Changes the last bit of one of the elements that this rank updates of a parameter.
void flip(const Tensor& values, int64_t element) {
  std::vector<double> items = values.items();
  items[element] = std::bit_cast<double>(std::bit_cast<uint64_t>(items[element]) ^ 1);
  Tensor(values).assign(items);
}

/// What rank 0 says where the copies of one parameter differ on this rank, in the weight or in a
/// moment; empty where nobody finds anything.
std::string found_with(const ExpertCase& c, int rank, const std::string& name, bool in_moments,
                       const Dataset& dataset) {
  std::mutex mutex;
  std::string found;
  run_threads(int(c.ranks()), [&](const Communicator& world) {
    const TrainConfig config = checked_config(c);
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    trainer.train_step(0);
    const auto buffers = trainer.expert_load().buffers();
    const auto buffer = std::ranges::find(buffers, name, &Parameter::name);
    if (world.rank() == rank && buffer != buffers.end()) {  // which has no moments
      flip((*buffer)->shard.value, (*buffer)->shard.numel() - 1);
    } else if (world.rank() == rank) {
      int64_t begin = 0;  // of the parameter in the moments
      for (size_t i = 0; trainer.parameters()[i].name != name; ++i) {
        begin += trainer.parameters()[i].shard.numel();
      }
      const Shard& shard = trainer.parameters().find(name).shard;
      flip(in_moments ? trainer.optimizer().second_moments().narrow(0, begin, shard.numel())
                      : shard.value,
           shard.numel() - 1);
    }
    try {
      trainer.report(0, 0);
    } catch (const PeerFailed&) {
      USP_CHECK(world.rank() != 0, "rank 0 speaks");
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      found = error.what();
    }
  });
  return found;
}

/// Name of each weight that several ranks update the same elements of, such as of a layer's norm,
/// and the last of these ranks beside the others.
std::map<std::string, std::vector<int>> copies_by_kind(const ExpertCase& c) {
  std::map<std::string, std::pair<std::string, std::vector<int>>> of_kind;
  for (const PlacedPart& part : place_parameters(expert_config(c))) {
    std::map<std::pair<int64_t, int64_t>, std::vector<int>> ranks;
    for (const auto& owner : part.owners) {
      if (owner.begin < owner.end) ranks[{owner.begin, owner.end}].push_back(owner.rank);
    }
    const std::string kind = part.name.substr(part.name.find_last_of("0123456789") + 1);
    for (const auto& [range, holders] : ranks) {
      if (holders.size() > 1) of_kind[kind] = {part.name, holders};
    }
  }
  std::map<std::string, std::vector<int>> copies;
  for (const auto& [kind, found] : of_kind) copies.insert(found);
  return copies;
}

TEST_CASE("a copy that differs in one bit is named, with its ranks and the step") {
  const Text text;
  size_t tried = 0;
  for (const ExpertCase& c : copied()) {
    for (const auto& [name, ranks] : copies_by_kind(c)) {
      if (tried++ % 4 != turn() % 4 && !is_full()) continue;
      const std::vector<int> others(ranks.begin(), ranks.end() - 1);
      const std::string expected =
          fmt::format("after step 1, {}: ranks {} hold other values than ranks {} of the same ",
                      name, ranks.back(), fmt::join(others, ", "));
      for (const bool in_moments : {false, true}) {
        const std::string found = found_with(c, ranks.back(), name, in_moments, text.dataset);
        INFO(c.name() << ": " << found);
        REQUIRE(found.find(expected) == 0);
      }
    }
  }
  REQUIRE(tried > 40);
}

TEST_CASE("nothing is compared between the steps that the flag names") {
  const Text text;
  run_threads(2, [&](const Communicator& world) {
    TrainConfig config = checked_config(copied()[0]);
    config.composition.check_copies = 2;
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&text.dataset, mesh});
    trainer.train_step(0);
    if (world.rank() == 1) flip(trainer.parameters()[0].shard.value, 0);
    trainer.report(0, 0);
    trainer.train_step(1);
    bool found = false;
    try {
      trainer.report(1, 0);
    } catch (const Error&) {
      found = true;
    }
    USP_CHECK(found, "step 2");
  });
}

TEST_CASE("comparing is refused where no element is on two ranks, by a run and by its estimate") {
  const std::string moe = "--num_experts 4 --num_heads 4 --num_kv_heads 4 --hidden_size 16 ";
  for (const char* layout :
       {"", "--dp_size 2", "--dp_size 2 --zero_stage 1", "--cp_size 2 --zero_stage 3",
        "--dp_size 4 --zero_stage 1 --shard_size 2", "--dp_size 4 --zero_stage 2 --shard_size 4",
        "--tp_size 2 --sequence_parallel",
        "--dp_size 2 --tp_size 2 --sequence_parallel --zero_stage 1", "--pp_size 2",
        "--pp_size 2 --tie_word_embeddings",
        "--pp_size 2 --tie_word_embeddings --zero_stage 1 "
        "--dp_size 2",
        "--pp_size 2 --dp_size 2 --zero_stage 1",
        "--pp_size 2 --pp_schedule zb_v --tie_word_embeddings --grad_acc_steps 4",
        "--pp_size 2 --pp_schedule dualpipe --grad_acc_steps 4",
        "--dp_size 2 --ep_size 2 --zero_stage 1", "--dp_size 2 --zero_stage 1 --balance bias",
        "--dp_size 2 --ep_size 2 --zero_stage 1 --balance batch", "--pp_size 2 --balance bias",
        "--dp_size 2 --zero_stage 1 --balance sample"}) {
    const std::string flags = moe + layout + " --num_layers 4";
    INFO(flags);
    const bool copies = has_copies(place_parameters(layout_of_flags(flags)));
    for (const char* asked : {"", " --estimate"}) {
      const std::string compared = flags + " --check_copies 1" + asked;
      if (copies) {
        REQUIRE_NOTHROW(layout_of_flags(compared));
      } else {
        check_throws<UsageError>([&] { layout_of_flags(compared); },
                                 {"check_copies=1 needs copies to compare", "leave it out"});
      }
    }
  }
}

TEST_CASE("a digest shows every bit of every element, and where it stands") {
  const OnDevice cpu(Device::cpu);
  for (const DType dtype : kFloatDTypes) {
    const Values values = {1, 2, 3, 4, 5};
    const Tensor tensor = Tensor::from_host(values, {5}, dtype);
    std::set<uint64_t> digests = {digest_of(tensor), digest_of(tensor, 1)};
    const int64_t bits = 8 * tensor.bytes();
    for (int64_t bit = 0; bit < bits; ++bit) {
      std::vector<char> bytes = bits_of(tensor);
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
      Tensor changed = Tensor::empty({5}, dtype);
      changed.assign_bytes(std::as_bytes(std::span(bytes)));
      digests.insert(digest_of(changed));
    }
    digests.insert(digest_of(Tensor::from_host(Values{2, 1, 3, 4, 5}, {5}, dtype)));
    REQUIRE(std::ssize(digests) == bits + 3);
    REQUIRE(digest_of(clone(tensor)) == digest_of(tensor));
  }
}

}  // namespace
}  // namespace usp::test
