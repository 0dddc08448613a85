#include "comm/mesh.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"

namespace usp {

namespace {

constexpr const char* kAxisNames[] = {"dp", "pp", "cp", "tp"};

/// As "dp_size=3", or "dp_size*tp_size = 2*2 = 4": of the flags a program may have, those that
/// say something.
std::string product_of(const MeshSizes& sizes) {
  std::vector<std::string> names, values;
  const auto add = [&](const char* axis, int64_t size) {
    names.push_back(fmt::format("{}_size", axis));
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

/// Refuses sizes that do not fill the world.
MeshSizes checked(const MeshSizes& sizes, int64_t world) {
  for (int64_t size : {sizes.dp, sizes.pp, sizes.cp, sizes.tp, sizes.ep}) {
    if (size < 1) usage_error("a parallel size of {} must be at least 1", size);
  }
  const int64_t others = sizes.pp * sizes.cp * sizes.tp;
  if (sizes.dp * others != world) {
    std::string remedy =
        fmt::format("start {} rank{}", sizes.dp * others, sizes.dp * others == 1 ? "" : "s");
    if (world % others == 0) remedy += fmt::format(", or use dp_size={}", world / others);
    usage_error("{} must equal the {} rank{} of the run; {}", product_of(sizes), world,
                world == 1 ? "" : "s", remedy);
  }
  if (sizes.expert_ranks() % sizes.ep != 0) {
    usage_error("ep_size={} must divide dp_size*cp_size{}={}; try {}", sizes.ep,
                sizes.ep_over_tp ? "*tp_size" : "", sizes.expert_ranks(),
                list_divisors(sizes.expert_ranks()));
  }
  if (sizes.tp_kv < 1 || sizes.tp % sizes.tp_kv != 0) {
    usage_error("{} ranks to a kv head must divide tp_size={}; try {}", sizes.tp_kv, sizes.tp,
                list_divisors(sizes.tp));
  }
  return sizes;
}

}  // namespace

Mesh::Mesh(const Communicator& world, const MeshSizes& sizes, const std::string& order)
    : world_(world),
      sizes_(checked(sizes, world.size())),
      order_(parse_order(order)),
      dp_(along(world, "dp", {kDp})),
      pp_(along(world, "pp", {kPp})),
      cp_(along(world, "cp", {kCp})),
      tp_(along(world, "tp", {kTp})),
      tp_kv_(tp_.split("tp_kv", [&](int r) { return r / static_cast<int>(sizes_.tp_kv); })),
      dp_cp_(along(world, "dp_cp", {kDp, kCp})),
      stage_(along(world, "stage", {kDp, kCp, kTp})),
      ep_((sizes_.ep_over_tp ? stage_ : dp_cp_)
              .split("ep", [&](int r) { return r / static_cast<int>(sizes_.ep); })),
      edp_((sizes_.ep_over_tp ? stage_ : dp_cp_)
               .split("edp", [&](int r) { return r % static_cast<int>(sizes_.ep); })),
      groups_{{"world", world_}, {"dp", dp_},       {"pp", pp_},        {"cp", cp_},
              {"tp", tp_},       {"tp_kv", tp_kv_}, {"dp_cp", dp_cp()}, {"stage", stage_},
              {"ep", ep_},       {"edp", edp_}} {
  const int last = static_cast<int>(sizes_.pp) - 1;
  if (last == 0) return;
  add_group("embedding", pp_.split("embedding", [=](int r) { return r == last ? 0 : r; }));
  add_group("mirror", pp_.split("mirror", [=](int r) { return std::min(r, last - r); }));
}

const Communicator& Mesh::group(const std::string& name) const {
  const auto found = groups_.find(name);
  USP_CHECK(found != groups_.end(), "the mesh has no group {}", name);
  return found->second;
}

void Mesh::add_group(const std::string& name, const Communicator& communicator) {
  USP_CHECK(groups_.emplace(name, communicator).second, "the mesh has a group {} already", name);
}

std::array<Mesh::Axis, 4> Mesh::parse_order(const std::string& order) {
  std::array<Axis, 4> axes{};
  std::stringstream stream(order);
  std::string word;
  int found = 0;
  bool valid = true;
  std::array<bool, 4> seen{};
  while (std::getline(stream, word, ',')) {
    const auto* at = std::find(std::begin(kAxisNames), std::end(kAxisNames), word);
    valid = valid && at != std::end(kAxisNames) && found < 4 && !seen[at - kAxisNames];
    if (!valid) break;
    seen[at - kAxisNames] = true;
    axes[found++] = static_cast<Axis>(at - kAxisNames);
  }
  if (!valid || found != 4) {
    usage_error("the mesh order '{}' must name dp, pp, cp and tp once each, such as pp,dp,cp,tp",
                order);
  }
  return axes;
}

int64_t Mesh::size(Axis axis) const {
  return std::array{sizes_.dp, sizes_.pp, sizes_.cp, sizes_.tp}[axis];
}

Mesh::Coordinates Mesh::coordinates(int64_t world_rank) const {
  Coordinates at{};
  for (auto axis = order_.rbegin(); axis != order_.rend(); ++axis) {
    at[*axis] = world_rank % size(*axis);
    world_rank /= size(*axis);
  }
  return at;
}

Communicator Mesh::along(const Communicator& world, const char* name,
                         std::vector<Axis> axes) const {
  return world.split(name, [&](int rank) {
    Coordinates at = coordinates(rank);
    for (Axis axis : axes) at[axis] = 0;
    int64_t colour = 0;
    for (Axis axis : order_) colour = colour * size(axis) + at[axis];
    return static_cast<int>(colour);
  });
}

}  // namespace usp
