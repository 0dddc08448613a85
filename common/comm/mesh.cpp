#include "comm/mesh.h"

#include <algorithm>

#include "base/check.h"
#include "base/rules.h"

namespace usp {

namespace {

/// The flag that says how many ranks an axis has.
std::string size_of(const char* axis) { return fmt::format("{}_size", axis); }

/// As "dp_size=3", or "dp_size*tp_size = 2*2 = 4": of the flags a program may have, those that
/// say something.
std::string product_of(const MeshSizes& sizes) {
  std::vector<std::string> names, values;
  const auto add = [&](const char* axis, int64_t size) {
    names.push_back(size_of(axis));
    values.push_back(fmt::format("{}", size));
  };
  add("dp", sizes.dp);
  if (sizes.pp > 1) add("pp", sizes.pp);
  if (sizes.cp > 1) add("cp", sizes.cp);
  if (sizes.tp > 1) add("tp", sizes.tp);
  if (names.size() == 1) return names[0] + "=" + values[0];
  return fmt::format("{} = {} = {}", fmt::join(names, "*"), fmt::join(values, "*"),
                     sizes.dp * sizes.pp * sizes.cp * sizes.tp);
}

}  // namespace

MeshOrder::MeshOrder(const std::string& text) {
  if (text == "pp,dp,cp,tp") return;  // which a search says of every layout
  std::array<MeshAxis, 4> named;
  size_t count = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const auto word = std::string_view(text).substr(begin, end - begin);
    const auto axis = MeshAxis(std::ranges::find(kMeshAxes, word) - kMeshAxes.begin());
    if (count < named.size()) named[count] = axis;
    ++count;
    begin = end + 1;
  }
  if (count != named.size() || !std::ranges::is_permutation(named, axes_)) {
    usage_error("the mesh order '{}' must name dp, pp, cp and tp once each, such as {}", text,
                this->text());
  }
  std::ranges::copy(named, axes_.begin());
}

std::string MeshOrder::text() const {
  std::vector<std::string_view> names;
  for (MeshAxis axis : axes_) names.push_back(kMeshAxes[size_t(axis)]);
  return fmt::format("{}", fmt::join(names, ","));
}

MeshCoordinates MeshSizes::coordinates(int64_t world_rank) const {
  MeshCoordinates at{};
  auto rest = static_cast<uint32_t>(world_rank);  // divides sooner: a mesh asks this of every rank
  for (auto axis = order.end(); axis-- != order.begin();) {
    const auto ranks = static_cast<uint32_t>(size(*axis));
    if (ranks == 1) continue;
    at[size_t(*axis)] = rest % ranks;
    rest /= ranks;
  }
  return at;
}

int MeshSizes::rank_at(const MeshCoordinates& at) const {
  int64_t rank = 0;
  for (MeshAxis axis : order) rank = rank * size(axis) + at[size_t(axis)];
  return static_cast<int>(rank);
}

namespace {

/// The axes along which the ranks of a group lie: whether they do along each MeshAxis.
using Axes = std::array<bool, 4>;

constexpr Axes kOfDp = {true, false, false, false}, kOfPp = {false, true, false, false},
               kOfCp = {false, false, true, false}, kOfTp = {false, false, false, true},
               kOfDpCp = {true, false, true, false}, kOfStage = {true, false, true, true},
               kOfWorld = {true, true, true, true};

/// Axes of the ranks among which a layer's experts lie.
const Axes& axes_of_experts(const MeshSizes& sizes) {
  return sizes.ep_over_tp ? kOfStage : kOfDpCp;
}

Axes axes_of(const MeshSizes& sizes, std::string_view group) {
  if (group == "ep" || group == "edp") return axes_of_experts(sizes);
  if (group == "dp") return kOfDp;
  if (group == "pp" || group == "embedding" || group == "mirror") return kOfPp;
  if (group == "cp") return kOfCp;
  if (group == "tp" || group == "tp_kv") return kOfTp;
  if (group == "dp_cp") return kOfDpCp;
  if (group == "stage") return kOfStage;
  USP_CHECK(group == "world", "the mesh has no group {}", group);
  return kOfWorld;
}

/// Where a rank lies, seen along some axes; in world order, as the ranks of a communicator are.
struct Along {
  int64_t number = 0;  ///< of its group, among the groups along these axes
  int64_t index = 0;   ///< of the rank in this group
  int64_t ranks = 1;   ///< of each group
};

Along along(const MeshSizes& sizes, const Axes& axes, int64_t world_rank) {
  const MeshCoordinates at = sizes.coordinates(world_rank);
  Along place;
  // [along]
  for (MeshAxis axis : sizes.order) {
    const bool is_along = axes[size_t(axis)];
    int64_t& digits = is_along ? place.index : place.number;
    digits = digits * sizes.size(axis) + at[size_t(axis)];
    if (is_along) place.ranks *= sizes.size(axis);
  }
  // [along]
  return place;
}

/// Whether a group has but a part of the ranks along its axes.
bool is_cut(std::string_view group) {
  constexpr std::array<std::string_view, 5> kCut = {"tp_kv", "ep", "edp", "embedding", "mirror"};
  return std::ranges::find(kCut, group) != kCut.end();
}

/// MeshSizes::colour() of a rank that lies there along the axes of a group.
int64_t colour_at(const MeshSizes& sizes, std::string_view group, const Along& place) {
  const int64_t pp = sizes.pp;
  // [colour]
  const auto [number, index, ranks] = place;
  const int64_t first = number * ranks;  // of the parts into which a group is cut
  if (group == "tp_kv") return first + index / sizes.tp_kv;
  if (group == "ep") return first + index / sizes.ep;
  if (group == "edp") return first + index % sizes.ep;
  if (group == "embedding") return first + (index == pp - 1 ? 0 : index);
  if (group == "mirror") return first + std::min(index, pp - 1 - index);
  return number;
  // [colour]
}

}  // namespace

MeshPlace MeshSizes::place_of(int64_t world_rank) const {
  const auto [dp_at, pp_at, cp_at, tp_at] = coordinates(world_rank);
  const int64_t of_experts = along(*this, axes_of_experts(*this), world_rank).index;
  return {.dp = dp_at,
          .pp = pp_at,
          .cp = cp_at,
          .tp = tp_at,
          .ep = of_experts % ep,
          .dp_cp = along(*this, kOfDpCp, world_rank).index,
          .edp = of_experts / ep};
}

int64_t MeshSizes::colour(std::string_view group, int64_t world_rank) const {
  return colour_at(*this, group, along(*this, axes_of(*this, group), world_rank));
}

std::vector<int> MeshSizes::members(std::string_view group, int64_t world_rank) const {
  const Axes axes = axes_of(*this, group);
  const MeshCoordinates at = coordinates(world_rank);
  std::vector<int> members = {0};  // along the axes, in world order
  for (MeshAxis axis : order) {
    const auto n = static_cast<int>(size(axis)), own = static_cast<int>(at[size_t(axis)]);
    std::vector<int> longer;
    const bool is_along = axes[size_t(axis)];
    longer.reserve(members.size() * size_t(is_along ? n : 1));
    for (int rank : members) {
      for (int i = is_along ? 0 : own; i < (is_along ? n : own + 1); ++i) {
        longer.push_back(rank * n + i);
      }
    }
    members = std::move(longer);
  }
  if (!is_cut(group)) return members;
  Along place = along(*this, axes, world_rank);
  const int64_t own = colour_at(*this, group, place);
  place.index = -1;  // of the member before: they lie in the order of their indices
  std::erase_if(members, [&](int) {
    ++place.index;
    return colour_at(*this, group, place) != own;
  });
  return members;
}

void check_mesh(const MeshSizes& sizes, int64_t world) {
  for (int64_t size : {sizes.dp, sizes.pp, sizes.cp, sizes.tp, sizes.ep}) {
    if (size < 1) usage_error("a parallel size of {} must be at least 1", size);
  }
  const int64_t others = sizes.pp * sizes.cp * sizes.tp;
  if (sizes.dp * others != world) {
    Remedies remedies = {
        fmt::format("start {} rank{}", sizes.dp * others, sizes.dp * others == 1 ? "" : "s")};
    if (world % others == 0) {
      remedies.push_back(fmt::format("--{} {}", size_of("dp"), world / others));
    }
    refuse("mesh_of_all_ranks", remedies, "{} must equal the {} rank{} of the run",
           product_of(sizes), world, world == 1 ? "" : "s");
  }
  if (sizes.expert_ranks() % sizes.ep != 0) {
    refuse("experts_on_all_ranks", divisors_of(size_of("ep"), sizes.expert_ranks()),
           "ep_size={} must divide dp_size*cp_size{}={}", sizes.ep,
           sizes.ep_over_tp ? "*tp_size" : "", sizes.expert_ranks());
  }
  if (sizes.tp_kv < 1 || sizes.tp % sizes.tp_kv != 0) {
    usage_error("{} ranks to a kv head must divide tp_size={}; try {}", sizes.tp_kv, sizes.tp,
                list_divisors(sizes.tp));
  }
}

std::string describe(const MeshSizes& sizes) {
  std::vector<std::string> axes;
  for (const auto& [axis, size] :
       {std::pair{"dp", sizes.dp}, {"pp", sizes.pp}, {"cp", sizes.cp}, {"tp", sizes.tp}}) {
    if (size > 1) axes.push_back(fmt::format("{} {}", axis, size));
  }
  if (axes.empty()) return "dp 1";
  std::string text = fmt::format("{}", fmt::join(axes, " x "));
  if (sizes.ep > 1) text += fmt::format(", ep {}", sizes.ep);
  return text;
}

namespace {

MeshSizes checked(const MeshSizes& sizes, int64_t world) {
  check_mesh(sizes, world);
  return sizes;
}

}  // namespace

Mesh::Mesh(const Communicator& world, const MeshSizes& sizes)
    : world_(world),
      sizes_(checked(sizes, world.size())),
      dp_(group_of("dp")),
      pp_(group_of("pp")),
      cp_(group_of("cp")),
      tp_(group_of("tp")),
      tp_kv_(group_of("tp_kv")),
      dp_cp_(group_of("dp_cp")),
      stage_(group_of("stage")),
      ep_(group_of("ep")),
      edp_(group_of("edp")),
      groups_{{"world", world_}, {"dp", dp_},       {"pp", pp_},        {"cp", cp_},
              {"tp", tp_},       {"tp_kv", tp_kv_}, {"dp_cp", dp_cp()}, {"stage", stage_},
              {"ep", ep_},       {"edp", edp_}} {
  if (sizes_.pp > 1) {
    for (const char* name : {"embedding", "mirror"}) add_group(name, group_of(name));
  }
  connect();
}

Communicator Mesh::group_of(const char* name) const {
  const std::string_view group = name;
  if (world_.engine().dry()) {  // nobody compares how ranks split the world
    std::vector<int> colours(world_.size(), 1);
    for (int rank : sizes_.members(group, world_.rank())) colours[rank] = 0;
    return world_.split(name, [&](int rank) { return colours[rank]; });
  }
  const Axes axes = axes_of(sizes_, group);
  if (along(sizes_, axes, 0).ranks == 1) {  // each rank is alone
    return world_.split(name, [](int rank) { return rank; });
  }
  return world_.split(name, [&](int rank) {
    return static_cast<int>(colour_at(sizes_, group, along(sizes_, axes, rank)));
  });
}

/// Connects the groups that sum in a step, while ranks have other operations under way. For an axis
/// that has but the ranks of another, and for what only speaks between steps, first use will do.
void Mesh::connect() const {
  std::vector<std::pair<const char*, bool>> used = {{"dp_cp", true},
                                                    {"tp", true},
                                                    {"cp", sizes_.dp > 1},
                                                    {"tp_kv", sizes_.tp_kv < sizes_.tp},
                                                    {"ep", sizes_.ep > 1},
                                                    {"edp", sizes_.ep > 1},
                                                    {"embedding", sizes_.pp > 1},
                                                    {"mirror", sizes_.pp > 2}};
  for (const auto& [name, is_used] : used) {
    if (is_used) group(name).connect();
  }
}

const Communicator& Mesh::group(const std::string& name) const {
  const auto found = groups_.find(name);
  USP_CHECK(found != groups_.end(), "the mesh has no group {}", name);
  return found->second;
}

void Mesh::add_group(const std::string& name, const Communicator& communicator) {
  USP_CHECK(groups_.emplace(name, communicator).second, "the mesh has a group {} already", name);
}

}  // namespace usp
