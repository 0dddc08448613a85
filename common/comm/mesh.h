#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace usp {

/// An axis of the grid that the ranks of a run are.
enum class MeshAxis { dp, pp, cp, tp };
/// As flags and records name them.
inline constexpr std::array<std::string_view, 4> kMeshAxes = {"dp", "pp", "cp", "tp"};
/// Where a rank lies on each axis, by MeshAxis.
using MeshCoordinates = std::array<int64_t, 4>;

/// The axes from the slowest to the fastest. Neighboring ranks of the world, which a node has, are
/// neighbors along the fastest one: it belongs to the kind of parallelism that communicates most.
class MeshOrder {
 public:
  MeshOrder() = default;  ///< pp,dp,cp,tp
  /// From words with commas between them. Throws UsageError unless each axis is among them once.
  explicit MeshOrder(const std::string& text);

  auto begin() const { return axes_.begin(); }
  auto end() const { return axes_.end(); }
  std::string text() const;  ///< as the flag has it

 private:
  std::array<MeshAxis, 4> axes_ = {MeshAxis::pp, MeshAxis::dp, MeshAxis::cp, MeshAxis::tp};
};

/// Which of a mesh's ranks one is, along each axis.
struct MeshPlace {
  int64_t dp = 0, pp = 0, cp = 0, tp = 0, ep = 0;
  int64_t dp_cp = 0, edp = 0;  ///< among those that hold the same dense weights, the same experts
};

/// How many ranks each kind of parallelism uses, and which of them are neighbors. The product of
/// dp, pp, cp and tp is the size of the world.
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
  MeshOrder order = {};

  /// Ranks that hold the same dense weights.
  int64_t dp_cp() const { return dp * cp; }
  /// Ranks among which a layer's experts lie, once or several times.
  int64_t expert_ranks() const { return ep_over_tp ? dp_cp() * tp : dp_cp(); }
  /// All ranks of the run.
  int64_t ranks() const { return pp * dp_cp() * tp; }
  /// Ranks along an axis.
  int64_t size(MeshAxis axis) const { return std::array{dp, pp, cp, tp}[size_t(axis)]; }
  MeshCoordinates coordinates(int64_t world_rank) const;  ///< where the rank lies
  /// The rank of the world that lies there.
  int rank_at(const MeshCoordinates& at) const;
  /// The same, and which it is of the ranks of larger groups.
  MeshPlace place_of(int64_t world_rank) const;
  /// The first rank of the world that works on the layers of this rank of the pipeline.
  int first_of_stage(int stage_rank) const { return rank_at({0, stage_rank, 0, 0}); }
  /// Which group of this name a rank of the world lies in: ranks with the same number share one.
  /// The names are those of Mesh::group(). Throws Error if there is none.
  int64_t colour(std::string_view group, int64_t world_rank) const;
  /// The ranks of the world in this rank's group of that name, in their order.
  std::vector<int> members(std::string_view group, int64_t world_rank) const;
  /// Ranks on which one copy of the model lies.
  int64_t ranks_of_a_copy() const { return std::max<int64_t>(1, pp * cp * tp); }
};

/// Throws UsageError, with sizes that do, where they do not fill a world of this many ranks.
void check_mesh(const MeshSizes& sizes, int64_t world);

/// As "dp 8 x tp 8": all that are above 1; "dp 1" where none is.
std::string describe(const MeshSizes& sizes);

/// The ranks of a run as a grid of pp x dp x cp x tp, and a communicator along each of its axes.
class Mesh {
 public:
  /// Collective over the world. Throws UsageError where the sizes do not multiply to the world's,
  /// with sizes that do.
  Mesh(const Communicator& world, const MeshSizes& sizes);

  const Communicator& world() const { return world_; }
  const Communicator& dp() const { return dp_; }
  const Communicator& pp() const { return pp_; }
  const Communicator& cp() const { return cp_; }
  const Communicator& tp() const { return tp_; }
  const Communicator& tp_kv() const { return tp_kv_; }  ///< ranks of tp that hold the same kv heads
  /// Ranks that hold the same dense weights. Where cp is 1 this is dp, and the ledger calls it dp.
  const Communicator& dp_cp() const { return sizes_.cp == 1 ? dp_ : dp_cp_; }
  const Communicator& ep() const { return ep_; }        ///< ranks that shard the experts
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
  Communicator group_of(const char* name) const;
  void connect() const;

  Communicator world_;
  MeshSizes sizes_;
  Communicator dp_, pp_, cp_, tp_, tp_kv_, dp_cp_, stage_, ep_, edp_;
  std::map<std::string, Communicator> groups_;  ///< by name
};

/// One rank's view of a mesh of any size, of which it is the only rank: nothing is sent.
struct DryMesh {
  /// The view of this rank of the world, with the memory that the engine `plays` takes, and so many
  /// ranks in a node; 0: all of them.
  explicit DryMesh(const MeshSizes& sizes, EngineKind plays = EngineKind::host, int world_rank = 0,
                   int64_t node_size = 0)
      : engine(world_rank, static_cast<int>(sizes.ranks()), plays),
        mesh(Communicator::world(engine), sizes) {
    engine.set_node_size(node_size);
  }

  DryEngine engine;
  Mesh mesh;
};

}  // namespace usp
