#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace usp {

/// How many ranks each kind of parallelism uses. The product of dp, pp, cp and tp is the size of
/// the world.
struct MeshSizes {
  int64_t dp = 1;  ///< data
  int64_t pp = 1;  ///< pipeline
  int64_t cp = 1;  ///< context
  int64_t tp = 1;  ///< tensor
  int64_t ep = 1;  ///< expert: divides dp * cp and takes its ranks from them
  /// Whether ep takes its ranks from tp, too, and divides dp * cp * tp: whole experts lie on each.
  bool ep_over_tp = false;
  /// Ranks of tp that hold the same kv heads, and so sum the gradients of these: divides tp.
  int64_t tp_kv = 1;

  /// Ranks that hold the same dense weights.
  int64_t dp_cp() const { return dp * cp; }
  /// Ranks among which a layer's experts lie, once or several times.
  int64_t expert_ranks() const { return ep_over_tp ? dp_cp() * tp : dp_cp(); }
  /// Ranks over which gradients are summed whose group has this name: "edp", or "dp_cp".
  int64_t ranks_of(std::string_view group) const {
    return group == "edp" ? expert_ranks() / ep : dp_cp();
  }
  /// Ranks on which one copy of the model lies.
  int64_t ranks_of_a_copy() const { return std::max<int64_t>(1, pp * cp * tp); }
};

/// The ranks of a run as a grid of pp x dp x cp x tp, and a communicator along each of its axes.
///
/// Neighbouring world ranks are neighbours along the fastest axis, which belongs to the kind of
/// parallelism that communicates most: tp, so that its groups lie within a node.
class Mesh {
 public:
  /// `order` names the axes from the slowest to the fastest. Collective over the world. Throws
  /// UsageError where the sizes do not multiply to the world's, with sizes that do.
  Mesh(const Communicator& world, const MeshSizes& sizes, const std::string& order = "pp,dp,cp,tp");

  const Communicator& world() const { return world_; }
  const Communicator& dp() const { return dp_; }
  const Communicator& pp() const { return pp_; }
  const Communicator& cp() const { return cp_; }
  const Communicator& tp() const { return tp_; }
  const Communicator& tp_kv() const { return tp_kv_; }  ///< ranks of tp that hold the same kv heads
  /// Ranks that hold the same dense weights. Where cp is 1 this is dp, and the ledger calls it dp.
  const Communicator& dp_cp() const { return sizes_.cp == 1 ? dp_ : dp_cp_; }
  const Communicator& ep() const { return ep_; }        ///< ranks that share out the experts
  const Communicator& edp() const { return edp_; }      ///< ranks that hold the same experts
  const Communicator& stage() const { return stage_; }  ///< ranks that work on the same layers

  /// The communicator of this name: that of a function above, or one given to add_group(). With
  /// several pipeline stages there are two more: "embedding", the first and the last of them, and
  /// "mirror", two that lie as far from the two ends. Throws Error if there is none.
  const Communicator& group(const std::string& name) const;
  /// Names a part of an axis, such as the tensor-parallel ranks that share a kv head.
  void add_group(const std::string& name, const Communicator& communicator);

  const MeshSizes& sizes() const { return sizes_; }

 private:
  enum Axis { kDp, kPp, kCp, kTp };
  using Coordinates = std::array<int64_t, 4>;  ///< by Axis

  static std::array<Axis, 4> parse_order(const std::string& order);
  int64_t size(Axis axis) const;
  Coordinates coordinates(int64_t world_rank) const;
  int64_t dp_cp_index(const Coordinates& at) const { return at[kDp] * sizes_.cp + at[kCp]; }
  /// The communicator of ranks that differ in no axis but these.
  Communicator along(const Communicator& world, const char* name, std::vector<Axis> axes) const;

  Communicator world_;
  MeshSizes sizes_;
  std::array<Axis, 4> order_;  ///< slowest first
  Communicator dp_, pp_, cp_, tp_, tp_kv_, dp_cp_, stage_, ep_, edp_;
  std::map<std::string, Communicator> groups_;  ///< by name
};

/// One rank's view of a mesh of any size, of which it is the only rank: nothing is sent.
struct DryMesh {
  /// Of the first rank of a pipeline stage, with the memory that the engine `plays` takes.
  explicit DryMesh(const MeshSizes& sizes, EngineKind plays = EngineKind::host, int stage_rank = 0)
      : engine(stage_rank * static_cast<int>(sizes.dp_cp() * sizes.tp),
               static_cast<int>(sizes.pp * sizes.dp_cp() * sizes.tp), plays),
        mesh(Communicator::world(engine), sizes) {}

  DryEngine engine;
  Mesh mesh;
};

}  // namespace usp
