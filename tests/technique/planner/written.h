#pragma once

#include "technique/planner/layouts.h"

/// Programs written by hand.
namespace usp::test {

/// A program of a rank: kernels of so many microseconds on a round cluster.
class Written {
 public:
  Written(int rank, std::vector<int> members) {
    program_.rank = rank;
    program_.groups.push_back({"dp", 0, rank, std::make_shared<const std::vector<int>>(members)});
    program_.segments = {{.work = 'B', .micro_batch = 3}};
  }
  /// Another communicator of the same ranks.
  Written& group(const char* name) {
    program_.groups.push_back({name, 0, program_.groups[0].rank, program_.groups[0].members});
    return *this;
  }
  /// What follows is another block's, in the same pass.
  Written& next_block() {
    ++block_;
    return *this;
  }
  /// What follows is another pass.
  Written& next_pass() {
    program_.segments.push_back({.work = 'B', .micro_batch = std::ssize(program_.segments)});
    return *this;
  }
  Written& compute(int64_t us) {
    program_.kernels.push_back({.op = "copy", .bytes = us * 1000});
    return add(Event::compute, program_.kernels.size() - 1);
  }
  Written& post(CommKind kind, int64_t us, int peer = -1, int group = 0) {
    program_.exchanges.push_back(
        {.group = group, .kind = kind, .peer = peer, .payload_bytes = us * 1000});
    ++program_.posts;
    return add(Event::post, program_.exchanges.size() - 1);
  }
  Written& wait(int64_t posted) { return add(Event::wait, posted); }
  Written& wait_last(int64_t posted) { return add(Event::wait_last, posted); }
  Program take() {
    program_.tail = std::ssize(program_.events);
    return program_;
  }

 private:
  Written& add(Event::Kind kind, size_t what) {
    const auto segment = static_cast<int32_t>(program_.segments.size() - 1);
    program_.events.push_back({kind, static_cast<int32_t>(what), segment, block_});
    return *this;
  }
  Program program_;
  int32_t block_ = 5;
};

/// So many ranks, each a class of its own.
inline RankClasses so_many(int ranks) {
  RankClasses classes;
  for (int rank = 0; rank < ranks; ++rank) {
    classes.of_rank.push_back(rank);
    classes.representative.push_back(rank);
    classes.ranks.push_back(1);
  }
  return classes;
}

/// Nodes of so many ranks, and numbers of which none is a round one.
inline Cluster uneven_cluster(int64_t ranks_per_node, bool host_computes) {
  Cluster cluster = round_cluster(ranks_per_node);
  cluster.host_computes = host_computes;
  cluster.launch_us.value = 0.37;
  cluster.half_width.value = 7;
  cluster.half_depth.value = 11;
  cluster.node.gbs.value = 3.3;
  cluster.net.latency_us.value = 4.7;
  cluster.net.gbs.value = 1.9;
  return cluster;
}

}  // namespace usp::test
