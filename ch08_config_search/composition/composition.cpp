#include "composition/composition.h"

#include "base/rules.h"
#include "comm/mesh.h"
#include "config.h"

namespace usp {

void CompositionConfig::bind(Args& args) {
  args.group("Composition");
  args.bind("mesh_order", mesh_order,
            "dp, pp, cp and tp from the slowest to the fastest: neighboring ranks differ in the "
            "last of them")
      .may_differ_on_resume();
  args.bind("mesh_show", mesh_show, {"", "table", "json", "flags", "types", "shapes"},
            "print who holds what, what every flag comes to, or of which types or shapes a layer's "
            "tensors are, and end")
      .is_question();
  args.bind("mesh_why", mesh_why,
            "with --mesh_show types: words of a row, such as \"linear_forward o_proj\": print the "
            "operations that gave its result its type")
      .may_differ_on_resume();
  args.bind(
          "mesh_left_out", mesh_left_out,
          "with --mesh_show types: leave out the message of this number, of those that the layer's "
          "rows show, and print what no longer fits; 0: none")
      .may_differ_on_resume();
  args.bind("check_copies", check_copies,
            "steps after which ranks that hold the same elements compare them; 0: never")
      .may_differ_on_resume();
  args.bind("prove", prove,
            "train twins of this layout, of at most this many ranks, beside one process, and end")
      .is_question([this] { return prove > 0 && mesh_show != "types"; });
  args.bind("prove_dtype", prove_dtype, {"f64", "bf16"},
            "f64: twins have to agree with one process; bf16: to be no further from it than it is "
            "from itself in other orders of addition")
      .may_differ_on_resume();
  args.bind(
          "fuzz", fuzz,
          "minutes in which to train layouts drawn at random beside one process, and end; --seed: "
          "the first one's number")
      .is_question();
}

void CompositionConfig::validate(const Args&) const {
  MeshOrder{mesh_order};
  if (!mesh_why.empty() && mesh_show != "types") {
    usage_error("mesh_why={} needs mesh_show=types, whose rows it explains; try --mesh_show types",
                mesh_why);
  }
  check_range("mesh_left_out", double(mesh_left_out), 0, 1 << 30);
  if (mesh_left_out > 0 && mesh_show != "types") {
    usage_error(
        "mesh_left_out={} needs mesh_show=types, whose messages it counts; try --mesh_show types",
        mesh_left_out);
  }
  check_range("check_copies", double(check_copies), 0, 1 << 30);
  check_range("prove", double(prove), 0, kMostRanksOfTwins);
  check_range("fuzz", fuzz, 0, 1e6);
  if (prove_dtype != "f64" && prove == 0) {
    usage_error("prove_dtype={} is the dtype of a proof's twins; try it with --prove 16",
                prove_dtype);
  }
}

namespace {

/// Whether two ranks update the same elements: replicas, norms under tp, tied ends of a pipeline,
/// mirrored stages, or buffers of experts, which every rank of a stage holds.
bool updates_copies(const TrainConfig& run) {
  const MeshSizes mesh = run.mesh();
  const DataParallelConfig& data = run.data_parallel;
  const ExpertConfig& experts = run.expert_parallel;
  const bool whole_copies =
      data.zero_stage == 0 || (data.shard_size > 0 && data.shard_size < mesh.dp_cp());
  const bool buffers =
      run.model.experts.num_experts > 0 && (experts.has_bias() || experts.balance == "batch");
  return (whole_copies && mesh.dp_cp() > 1) || mesh.tp > 1 || (buffers && mesh.ranks() > mesh.pp) ||
         run.pipeline.mirrors(run.grad_acc_steps) ||
         (run.model.tie_word_embeddings && blocks_of_rank(run, 0).ends_apart);
}

}  // namespace

void CompositionConfig::check(const TrainConfig& run) const {
  if (check_copies > run.steps) {
    refuse_silent("copies_within_steps", values_of("check_copies", {run.steps}),
                  "check_copies={} must be at most steps={}", check_copies, run.steps);
  }
  if (check_copies > 0 && !updates_copies(run)) {
    refuse_silent("copies_to_compare", {"leave out --check_copies"},
                  "check_copies={} needs copies to compare, and no element is on two ranks",
                  check_copies);
  }
}

}  // namespace usp
