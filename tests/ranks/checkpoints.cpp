#include <sys/resource.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "base/sha256.h"
#include "comm/launch.h"
#include "files/safetensors.h"
#include "testing.h"
#include "train/checkpoint.h"

/// Checkpoints of several ranks: what any layout has written, any other reads; what goes wrong on
/// one rank is told once, and the checkpoint before stays.
namespace usp::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

const RunIdentity kIdentity{R"({"lr": 0.01})", 6, "c0ffee", {}};

/// What a rank holds of a parameter.
struct Part {
  std::vector<Slice> slices;
  double begin = 0, end = 1;  ///< of the local elements, as fractions
  bool counted = true;
};

/// How so many ranks shard every parameter.
struct Layout {
  std::string name;
  int ranks;
  std::function<Part(int rank, const Shape& shape)> part;
  std::vector<std::string> files;
};

const char* kOne = "state.safetensors";

std::vector<std::string> numbered(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    names.push_back(fmt::format("state-{:05}-of-{:05}.safetensors", i, count));
  }
  return names;
}

/// Rows, or columns, of a matrix; of a vector the whole, which the first rank counts.
Part cut(const Shape& shape, int axis, int rank, int ranks) {
  if (shape.rank() < 2) return {{}, 0, 1, rank == 0};
  const int64_t begin = shape[axis] * rank / ranks, end = shape[axis] * (rank + 1) / ranks;
  return {{{axis, begin, end - begin}}};
}

const std::vector<Layout> kLayouts = {
    {"one rank", 1, [](int, const Shape&) { return Part{}; }, {kOne}},
    {"copies",
     2,
     [](int rank, const Shape&) {
       return Part{{}, 0, 1, rank == 1};
     },
     {kOne}},
    {"halves", 2,
     [](int rank, const Shape&) {
       return Part{{}, 0.5 * rank, 0.5 * (rank + 1)};
     },
     numbered(2)},
    {"uneven", 3,
     [](int rank, const Shape&) {
       const double cuts[] = {0, 0.15, 0.7, 1};
       return Part{{}, cuts[rank], cuts[rank + 1]};
     },
     numbered(3)},
    {"nothing for two of four", 4,
     [](int rank, const Shape&) {
       const double cuts[] = {0, 0, 0.4, 0.4, 1};
       return Part{{}, cuts[rank], cuts[rank + 1]};
     },
     numbered(2)},
    {"shards of vectors, whole matrices elsewhere", 3,
     [](int rank, const Shape& shape) {
       if (shape.rank() == 1) return Part{{}, rank / 3.0, (rank + 1) / 3.0};
       return rank == 2 ? Part{} : Part{{}, 1, 1};
     },
     numbered(3)},
    {"two replicas of two shards", 4,
     [](int rank, const Shape&) {
       return Part{{}, 0.3 * (rank / 2), rank / 2 == 0 ? 0.3 : 1, rank % 2 == 1};
     },
     numbered(2)},
    {"rows", 3, [](int rank, const Shape& shape) { return cut(shape, 0, rank, 3); }, numbered(3)},
    {"columns", 2, [](int rank, const Shape& shape) { return cut(shape, 1, rank, 2); },
     numbered(2)},
    {"columns and shards", 4,
     [](int rank, const Shape& shape) {
       Part part = cut(shape, 1, rank / 2, 2);
       part.begin = rank % 2 == 0 ? 0 : 0.45;
       part.end = rank % 2 == 0 ? 0.45 : 1;
       return part;
     },
     numbered(4)}};

/// What is to be saved and loaded on one rank of a layout.
class RankState {
 public:
  RankState(const Layout& layout, int rank, DType dtype,
            const std::vector<std::pair<std::string, Shape>>& shapes = kShapes) {
    int64_t numel = 0;
    for (const auto& [name, shape] : shapes) {
      parameters.add(name, shape, 0.02, layout.part(rank, shape).slices);
    }
    parameters.allocate(dtype, 1);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Part part = layout.part(rank, shapes[i].second);
      Shard& shard = parameters[i].shard;
      const double length = static_cast<double>(shard.numel());
      const auto begin = static_cast<int64_t>(part.begin * length);
      const auto end = static_cast<int64_t>(part.end * length);
      const auto own = [&](const Tensor& all) { return all.narrow(0, begin, end - begin); };
      shard = {begin, end, own(shard.value), own(shard.master), own(shard.grad)};
      parameters[i].counted = part.counted;
      numel += end - begin;
    }
    for (Tensor& moment : moments) moment = Tensor::zeros({numel}, accumulate_dtype(dtype));
  }

  TrainState state() {
    return {parameters, {{"first_moment", moments[0]}, {"second_moment", moments[1]}}, tokens};
  }

  /// Calls visit(tensor, what it holds once it was trained) for everything. Numbers that bf16
  /// holds exactly, another one for every element of the whole model and each of its tensors.
  template <class Visit>
  void each(Visit visit) {
    int64_t offset = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& parameter = parameters[i];
      const Shard& shard = parameter.shard;
      const double first = 64.0 * double(i);
      visit(shard.value, numbers(parameter, first));
      const bool own_master = shard.master.dtype() != shard.value.dtype();
      if (own_master) {
        visit(shard.master, numbers(parameter, first + 0.25));
      }
      for (size_t m = 0; m < 2; ++m) {
        visit(moments[m].narrow(0, offset, shard.numel()),
              numbers(parameter, first + 1000.0 * double(m + 1)));
      }
      offset += shard.numel();
    }
  }

  void train() {
    each([](Tensor tensor, const Values& values) { tensor.assign(values); });
    tokens = 77;
  }

  /// Throws Error unless it is what train() makes of it.
  void check(const std::string& what) {
    each([&](const Tensor& tensor, const Values& values) {
      USP_CHECK(tensor.items() == values, "{}: {} instead of {}", what,
                fmt::join(tensor.items(), " "), fmt::join(values, " "));
    });
    USP_CHECK(tokens == 77, "{}: {} tokens", what, tokens);
  }

  inline static const std::vector<std::pair<std::string, Shape>> kShapes = {
      {"w", {6, 5}}, {"norm", {7}}, {"experts", {2, 3, 4}}};

  ParameterList parameters;
  Tensor moments[2];
  int64_t tokens = 0;

 private:
  static Values numbers(const Parameter& parameter, double first) {
    Values values;
    for (int64_t i = parameter.shard.begin; i < parameter.shard.end; ++i) {
      values.push_back(first + double(parameter.global_index(i, parameter.local_shape())));
    }
    return values;
  }
};

void save(const Layout& layout, DType dtype, const std::string& run_dir, int64_t step) {
  run_threads(layout.ranks, [&](const Communicator& world) {
    RankState rank(layout, world.rank(), dtype);
    rank.train();
    write_checkpoint(run_dir, step, rank.state(), kIdentity, world);
  });
}

void load(const Layout& layout, DType dtype, const std::string& run_dir, const std::string& what) {
  run_threads(layout.ranks, [&](const Communicator& world) {
    RankState rank(layout, world.rank(), dtype);
    const int64_t step =
        load_checkpoint(newest_checkpoint(run_dir), rank.state(), kIdentity, world);
    USP_CHECK(step == 4, "step {}", step);
    rank.check(fmt::format("{}, rank {}", what, world.rank()));
    for (size_t i = 0; i < rank.parameters.size(); ++i) {
      USP_CHECK(rank.parameters[i].version == 1, "{}: version", what);
    }
  });
}

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

/// checkpoint.json after a change, sealed again.
void change_record(const std::string& directory, const std::function<void(Json&)>& change) {
  const std::string path = directory + "/checkpoint.json";
  Json record = Json::parse(read_file(path));
  record.erase("sha256");
  change(record);
  std::string text = record.dump(2);
  text.resize(text.size() - 2);
  const std::string digest = sha256(std::as_bytes(std::span(text)));
  std::ofstream(path, std::ios::binary) << text << ",\n  \"sha256\": \"" << digest << "\"\n}\n";
}

/// Fails the test unless body() fails on every rank, on rank 0 alone with an error of its own,
/// whose message holds every one of `parts`; before a run's first step (`by_all`) all ranks have
/// it.
void check_told_once(int ranks, const std::function<void(const Communicator&)>& body,
                     const std::vector<std::string>& parts, bool by_all = false) {
  std::vector<std::string> told(ranks);
  const auto watched = [&](const Communicator& world) {
    std::string& own = told[world.rank()];
    try {
      body(world);
      own = "nothing";
    } catch (const PeerFailed&) {
      own = "a peer's failure";
      throw;
    } catch (const Error&) {
      own = "an error";
      throw;
    }
  };
  check_throws<Error>([&] { run_threads(ranks, watched); }, parts);
  std::vector<std::string> expected(ranks, by_all ? "an error" : "a peer's failure");
  expected[0] = "an error";
  REQUIRE(told == expected);
}

TEST_CASE("what any layout has saved, any other resumes, element by element") {
  for (const DType dtype : {DType::f64, DType::bf16}) {
    for (const Layout& saved : kLayouts) {
      const TempDir dir;
      save(saved, dtype, dir.file(""), 4);
      std::vector<std::string> expected = saved.files;
      expected.insert(expected.begin(), "checkpoint.json");
      REQUIRE(files_in(newest_checkpoint(dir.file(""))) == expected);
      for (const Layout& loaded : kLayouts) {
        load(loaded, dtype, dir.file(""),
             fmt::format("{} from {} to {}", name(dtype), saved.name, loaded.name));
      }
    }
  }
}

/// What every rank holds whole beside its parameters, in the dtype of sums.
class Buffered : public RankState {
 public:
  Buffered(const Layout& layout, int rank, DType dtype, bool counted)
      : RankState(layout, rank, dtype) {
    buffer.name = "bias";
    buffer.global_shape = {4};
    buffer.value = Tensor::zeros({4}, accumulate_dtype(dtype));
    buffer.shard = {0, 4, buffer.value, buffer.value, {}};
    buffer.counted = counted;
  }

  TrainState state() {
    TrainState state = RankState::state();
    state.buffers = {&buffer};
    return state;
  }

  Parameter buffer;
};

const Values kBias = {0.25, -3, 7, 1e-3 / 1024};

/// Saves a checkpoint of the layout in `run_dir`, with a buffer that rank `counting`
/// counts; -1: all do.
void save_buffered(const Layout& layout, DType dtype, const std::string& run_dir, int counting) {
  run_threads(layout.ranks, [&](const Communicator& world) {
    Buffered rank(layout, world.rank(), dtype, counting < 0 || world.rank() == counting);
    rank.train();
    rank.buffer.value.assign(kBias);
    write_checkpoint(run_dir, 4, rank.state(), kIdentity, world);
  });
}

TEST_CASE("a buffer is saved by the rank that counts it, and resumed by all") {
  for (const DType dtype : {DType::f64, DType::bf16}) {
    for (const Layout& saved : kLayouts) {
      const TempDir dir;
      save_buffered(saved, dtype, dir.file(""), saved.ranks - 1);
      for (const Layout& loaded : kLayouts) {
        run_threads(loaded.ranks, [&](const Communicator& world) {
          Buffered rank(loaded, world.rank(), dtype, false);
          load_checkpoint(newest_checkpoint(dir.file("")), rank.state(), kIdentity, world);
          const std::string what = fmt::format("from {} to {}", saved.name, loaded.name);
          rank.check(what);
          const Tensor expected = Tensor::from_host(kBias, {4}, accumulate_dtype(dtype));
          USP_CHECK(same_bits(rank.buffer.value, expected), "{}: bias {}", what,
                    fmt::join(rank.buffer.value.items(), " "));
          USP_CHECK(rank.buffer.version == 1, "{}: version {}", what, rank.buffer.version);
        });
      }
    }
  }
}

TEST_CASE("a rank may write a file for a buffer alone") {
  const TempDir dir;
  const Layout& layout = kLayouts[4];  // nothing for ranks 0 and 2
  save_buffered(layout, DType::f64, dir.file(""), 2);
  REQUIRE(files_in(newest_checkpoint(dir.file(""))).size() == 1 + 3);
  const SafetensorsFile file(newest_checkpoint(dir.file("")) + "/state-00001-of-00003.safetensors");
  REQUIRE(file.tensors().size() == 1);
  file.get("bias").check_shape({4});
}

TEST_CASE(
    "a buffer that no rank counts, or each, makes no checkpoint; one that is none's is told") {
  const TempDir dir;
  const OnDevice cpu;
  const Layout& two = kLayouts[2];
  check_throws<Error>([&] { save_buffered(two, DType::f64, dir.file(""), 7); },
                      {"every element of bias is to be counted by one rank; 4 by none"});
  check_throws<Error>([&] { save_buffered(two, DType::f64, dir.file(""), -1); },
                      {"of bias is to be counted by one rank; 4 by too many"});
  save(two, DType::f64, dir.file(""), 4);
  const std::string path = newest_checkpoint(dir.file(""));
  run_threads(1, [&](const Communicator& world) {
    Buffered rank(kLayouts[0], 0, DType::f64, true);
    check_throws<Error>([&] { load_checkpoint(path, rank.state(), kIdentity, world); },
                        {path, "elements 0 to 3 of bias [4] are in none of its files"});
  });
}

TEST_CASE("a file says which part of a weight it holds") {
  const TempDir dir;
  save(kLayouts.back(), DType::f64, dir.file(""), 4);
  const SafetensorsFile file(newest_checkpoint(dir.file("")) + "/state-00003-of-00004.safetensors");
  REQUIRE(file.get("w").shape == std::vector<int64_t>{10});
  const Json layouts = Json::parse(file.metadata().at("parameters"));
  REQUIRE(layouts.at("w") ==
          Json::parse(R"({"global_shape": [6, 5], "slices": [[1, 2, 3]], "range": [8, 18]})"));
  REQUIRE(!layouts.contains("norm"));  // the first two ranks'
}

TEST_CASE("format 1, with its single file, is read by any number of ranks") {
  const TempDir dir;
  save(kLayouts[0], DType::bf16, dir.file(""), 4);
  const std::string path = newest_checkpoint(dir.file(""));
  change_record(path, [](Json& record) { record["format"] = 1; });
  for (const Layout& layout : kLayouts) load(layout, DType::bf16, dir.file(""), layout.name);
  change_record(path, [](Json& record) { record["format"] = 3; });
  check_throws<Error>([&] { load(kLayouts[0], DType::bf16, dir.file(""), ""); },
                      {"checkpoint.json: format 3 is unknown", "formats 1 to 2"});
}

/// A weight of 12 MB with its moments, in three parts of different size.
const std::vector<std::pair<std::string, Shape>> kLarge = {{"w", {500, 1000}}};

TEST_CASE(
    "damage to one of several files is told once, by file and byte; no rank changes anything") {
  const OnDevice cpu;
  const TempDir dir;
  const Layout& three = kLayouts[3];
  run_threads(3, [&](const Communicator& world) {
    RankState rank(three, world.rank(), DType::f64, kLarge);
    write_checkpoint(dir.file(""), 4, rank.state(), kIdentity, world);
  });
  const std::string path = newest_checkpoint(dir.file(""));
  const auto refused = [&](int count, const std::vector<std::string>& parts) {
    std::vector<std::unique_ptr<RankState>> ranks(count);
    const auto load = [&](const Communicator& world) {
      auto& rank = ranks[world.rank()];
      rank = std::make_unique<RankState>(kLayouts[count == 1 ? 0 : count], world.rank(), DType::f64,
                                         kLarge);
      Tensor(rank->parameters.flat_values()).assign(Values(500'000, 3));
      load_checkpoint(path, rank->state(), kIdentity, world);
    };
    check_told_once(count, load, parts, /*by_all=*/true);
    for (const auto& rank : ranks) {
      REQUIRE(rank->parameters.flat_values().items() == Values(500'000, 3));
      REQUIRE(rank->parameters[0].version == 0);
      REQUIRE(rank->tokens == 0);
    }
  };
  const std::string file = path + "/state-00001-of-00003.safetensors";
  const int64_t size = fs::file_size(file);
  for (const int64_t at : {int64_t{3}, int64_t{2'500'000}, size - 1}) {
    flip_byte(file, at);
    const int64_t begin = at >> 20 << 20, end = std::min(begin + (1 << 20), size) - 1;
    for (const int count : kSanitized ? std::vector{3} : std::vector{1, 2, 3}) {
      refused(count, {fmt::format("{}: bytes {} to {} are not as they were", file, begin, end)});
    }
    flip_byte(file, at);
  }
  fs::rename(file, file + ".bak");
  refused(3, {file, "No such file"});
  refused(1, {file, "No such file"});
  fs::copy(path + "/state-00000-of-00003.safetensors", file);
  refused(2, {file, "ends at byte"});
}

TEST_CASE("a file that the record does not name is not read") {
  const TempDir dir;
  save(kLayouts[3], DType::f64, dir.file(""), 4);
  const std::string path = newest_checkpoint(dir.file(""));
  const Layout& one = kLayouts[0];
  run_threads(1, [&](const Communicator& world) {
    RankState other(one, 0, DType::f64);
    write_checkpoint(dir.file("other"), 4, other.state(), kIdentity, world);
  });
  fs::copy(newest_checkpoint(dir.file("other")) + "/state.safetensors", path);
  for (const Layout& layout : kLayouts) load(layout, DType::f64, dir.file(""), layout.name);
}

TEST_CASE("elements that no file holds are named, with the files") {
  const TempDir dir;
  save(kLayouts[3], DType::f64, dir.file(""), 4);
  const std::string path = newest_checkpoint(dir.file(""));
  change_record(path,
                [](Json& record) { record["files"].erase("state-00001-of-00003.safetensors"); });
  for (const size_t layout : {0, 1, 2, 3}) {
    check_throws<Error>([&] { load(kLayouts[layout], DType::f64, dir.file(""), ""); },
                        {path, "elements 4 to ",
                         "of w [6, 5] are in none of its files: state-00000-of-00003."
                         "safetensors, state-00002-of-00003.safetensors"});
  }
  // Only the second of these ranks misses any; the others change nothing either.
  std::vector<std::unique_ptr<RankState>> ranks(3);
  const auto load_in = [&](const Communicator& world) {
    auto& rank = ranks[world.rank()];
    rank = std::make_unique<RankState>(kLayouts[3], world.rank(), DType::f64);
    Tensor(rank->parameters.flat_values()).assign(Values(61, 3));
    load_checkpoint(path, rank->state(), kIdentity, world);
  };
  check_told_once(3, load_in, {"elements 4 to 20 of w", "(on rank 1)"}, /*by_all=*/true);
  const OnDevice cpu;
  for (const auto& rank : ranks) {
    REQUIRE(rank->parameters.flat_values().items() == Values(61, 3));
  }
}

TEST_CASE("another shape or dtype than the files' is refused with both") {
  const TempDir dir;
  save(kLayouts[2], DType::f64, dir.file(""), 4);
  check_throws<Error>([&] { load(kLayouts[3], DType::f32, dir.file(""), ""); },
                      {"state-00000-of-00002.safetensors: tensor w is F64", "as F32"});
  run_threads(1, [&](const Communicator& world) {
    RankState rank(kLayouts[0], 0, DType::f64, {{"w", {5, 6}}});
    check_throws<Error>(
        [&] { load_checkpoint(newest_checkpoint(dir.file("")), rank.state(), kIdentity, world); },
        {"w is part of [6,5], needed is one of [5, 6]"});
  });
}

/// A limit on the size of every file this process writes: stands in for a disk that is full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

/// Fails while it writes step 8; then the checkpoint of step 4 is all that there is, and whole.
/// `disk`: bytes that a file may have meanwhile.
void check_kept(const Layout& layout, const std::vector<std::string>& parts,
                rlim_t disk = RLIM_INFINITY) {
  const TempDir dir;
  save(kLayouts[3], DType::f64, dir.file(""), 4);
  const FileSizeLimit limit(disk);
  check_told_once(
      layout.ranks,
      [&](const Communicator& world) {
        RankState rank(layout, world.rank(), DType::f64);
        write_checkpoint(dir.file(""), 8, rank.state(), kIdentity, world);
        world.barrier();
      },
      parts);
  REQUIRE(files_in(dir.file("checkpoints")) == std::vector<std::string>{"step-00000004"});
  load(kLayouts[3], DType::f64, dir.file(""), "the one before");
}

TEST_CASE("an element that no rank counts, or two, makes no checkpoint") {
  Layout layout = kLayouts[2];
  layout.part = [](int rank, const Shape& shape) {
    return Part{{}, 0.5 * rank, 0.5 * (rank + 1), shape.rank() != 3 || rank == 1};
  };
  check_kept(layout, {"every element of experts is to be counted by one rank; 12 by none"});
  layout.part = [](int rank, const Shape& shape) {
    return Part{{}, 0.5 * rank, 0.5 * (rank + 1), shape.rank() != 1};
  };
  check_kept(layout, {"every element of norm is to be counted by one rank; 7 by none"});
  layout.part = [](int, const Shape&) { return Part{}; };
  check_kept(layout, {"of experts is to be counted by one rank; 24 by too many"});
}

TEST_CASE("a disk that is full for one rank is told once, and the checkpoint before stays") {
  const TempDir dir;
  save(kLayouts[3], DType::f64, dir.file(""), 4);
  std::vector<uintmax_t> sizes;
  for (const std::string& name : numbered(3)) {
    sizes.push_back(fs::file_size(newest_checkpoint(dir.file("")) + "/" + name));
  }
  REQUIRE(sizes[1] > std::max(sizes[0], sizes[2]) + 100);  // the middle rank has the largest part
  check_kept(kLayouts[3],
             {"step-00000008.tmp/state-00001-of-00003.safetensors failed at byte",
              "File too large (on rank 1)"},
             sizes[1] - 50);
}

TEST_CASE("a damaged checkpoint of several ranks names the older one that is whole, once") {
  const TempDir dir;
  dir.write("run.json", "{}");
  const RunDir run_dir(dir.file(""), /*overwrite=*/false, /*resume=*/true);
  const auto make = [&](const Communicator& world) {
    return Checkpoints(run_dir, {/*checkpoint_interval=*/3, /*keep_checkpoints=*/2}, kIdentity,
                       world);
  };
  run_threads(3, [&](const Communicator& world) {
    RankState rank(kLayouts[3], world.rank(), DType::f64);
    Checkpoints checkpoints = make(world);
    rank.train();
    for (int64_t step = 1; step <= 10; ++step) checkpoints.after_step(step, rank.state());
    checkpoints.at_end(10, rank.state());
  });
  REQUIRE(files_in(dir.file("checkpoints")) ==
          std::vector<std::string>{"step-00000009", "step-00000010"});
  const auto resume = [&](const Communicator& world) {
    RankState rank(kLayouts[3], world.rank(), DType::f64);
    const int64_t step = make(world).resume(rank.state(), 20);
    USP_CHECK(step == 10, "step {}", step);
    rank.check("resumed");
  };
  run_threads(3, resume);
  flip_byte(dir.file("checkpoints/step-00000010/state-00002-of-00003.safetensors"), 20);
  check_throws<RefusedTogether>([&] { run_threads(3, resume); },
                                {"step-00000010/state-00002-of-00003.safetensors: bytes 0 to",
                                 "step-00000009 is whole, remove step-00000010"});
}

}  // namespace
}  // namespace usp::test
