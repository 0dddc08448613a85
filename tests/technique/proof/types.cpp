#include "proof/types.h"

#include <map>
#include <set>
#include <sstream>

#include "comm/mesh.h"
#include "proof/compositions.h"
#include "technique/case_cover.h"
#include "technique/layout_of_flags.h"
#include "technique/proof/type_values.h"
#include "tensor/ops.h"
#include "testing.h"
#include "types/rules.h"

namespace usp::test::of_types {
namespace {

using types::kRefused;

// ---- the schemas, beside numbers on two ranks

/// A matrix as rows.
using Matrix = std::vector<Values>;

Matrix random_matrix(Random& random, int64_t rows, int64_t columns) {
  Matrix m;
  for (int64_t i = 0; i < rows; ++i) m.push_back(random.normals(columns));
  return m;
}

/// Nothing where their sizes differ.
Matrix zip(const Matrix& a, const Matrix& b, const std::function<double(double, double)>& f) {
  if (a.size() != b.size() || a[0].size() != b[0].size()) return {};
  Matrix c = a;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) c[i][j] = f(a[i][j], b[i][j]);
  }
  return c;
}

Matrix transposed(const Matrix& a) {
  Matrix t(a[0].size(), Values(a.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) t[j][i] = a[i][j];
  }
  return t;
}

/// a [N, K] times b [M, K] transposed; nothing where their sizes differ.
Matrix product(const Matrix& a, const Matrix& b) {
  if (a[0].size() != b[0].size()) return {};
  Matrix c(a.size(), Values(b.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < b.size(); ++j) {
      for (size_t k = 0; k < b[j].size(); ++k) c[i][j] += a[i][k] * b[j][k];
    }
  }
  return c;
}

Matrix half_of_rows(const Matrix& a, size_t rank) {
  const auto half = std::ssize(a) / 2;
  return {a.begin() + half * rank, a.begin() + half * (rank + 1)};
}

/// What two ranks have of a matrix that is of this kind.
std::array<Matrix, 2> shared(Random& random, const Matrix& whole, Kind kind) {
  switch (kind) {
    case partial: {
      const Matrix first = random_matrix(random, std::ssize(whole), std::ssize(whole[0]));
      return {first, zip(whole, first, [](double w, double f) { return w - f; })};
    }
    case rows:
    case outputs:
      return {half_of_rows(whole, 0), half_of_rows(whole, 1)};
    case columns:
    case inputs: {
      const Matrix t = transposed(whole);
      return {transposed(half_of_rows(t, 0)), transposed(half_of_rows(t, 1))};
    }
    default:
      return {whole, whole};
  }
}

bool is_close(const Matrix& a, const Matrix& b) {
  bool close = a.size() == b.size() && a[0].size() == b[0].size();
  for (size_t i = 0; close && i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) close = close && std::abs(a[i][j] - b[i][j]) < 1e-12;
  }
  return close;
}

/// Whether what two ranks have is the whole matrix, read as this kind.
bool is_of_kind(const std::array<Matrix, 2>& parts, const Matrix& whole, Kind kind) {
  const auto& [first, second] = parts;
  if (kind == partial) {
    return first.size() == second.size() && first[0].size() == second[0].size() &&
           is_close(zip(first, second, std::plus()), whole);
  }
  if (kind == replicated) return is_close(first, whole) && is_close(second, whole);
  Random unused(1);
  const std::array<Matrix, 2> expected = shared(unused, whole, kind);
  return is_close(first, expected[0]) && is_close(second, expected[1]);
}

/// The kinds that activations and weights have in one layer.
const std::vector<Kind> kOfRows = {replicated, partial, rows, columns};
const std::vector<Kind> kOfWeights = {replicated, outputs, inputs};

using Schema = Kind (*)(Kind, Kind);
using Function = std::function<Matrix(const Matrix&, const Matrix&)>;

/// A schema, and what it is about in numbers.
struct InNumbers {
  Schema schema;
  std::vector<Kind> of_second, results;
  Function function;
  Matrix x, y;
  std::vector<std::string> refused_though_true;  ///< as "RP=P": operands that no program has
};

/// Whether operands of these kinds on two ranks make what is of that kind.
bool is_true(const InNumbers& of, Kind of_x, Kind of_y, Kind result) {
  Random random(7);
  const auto xs = shared(random, of.x, of_x), ys = shared(random, of.y, of_y);
  const Matrix first = of.function(xs[0], ys[0]), second = of.function(xs[1], ys[1]);
  return !first.empty() && is_of_kind({first, second}, of.function(of.x, of.y), result);
}

/// The schemas of two operands, and that of one, which leaves out the second.
std::vector<InNumbers> schemas_in_numbers() {
  constexpr int64_t T = 6, I = 4, O = 8;
  Random random(3);
  const Matrix x = random_matrix(random, T, I), dy = random_matrix(random, T, O);
  const Matrix weight = random_matrix(random, O, I), more = random_matrix(random, T, I);
  const std::vector<Kind> of_gradient = {replicated, partial, outputs, inputs};
  const auto transposed_times = [](const Matrix& d, const Matrix& w) {
    return product(d, transposed(w));
  };
  const auto over_rows = [](const Matrix& d, const Matrix& a) {
    return product(transposed(d), transposed(a));
  };
  const auto sum = [](const Matrix& a, const Matrix& b) { return zip(a, b, std::plus()); };
  const auto each = [](const Matrix& a, const Matrix& b) { return zip(a, b, std::multiplies()); };
  const auto square = [](const Matrix& a, const Matrix&) { return zip(a, a, std::multiplies()); };
  const Schema nonlinear = [](Kind a, Kind) { return types::nonlinear(a); };
  return {{types::times, kOfWeights, kOfRows, product, x, weight, {}},
          {types::times_transposed, kOfWeights, kOfRows, transposed_times, dy, weight, {}},
          {types::over_rows, kOfRows, of_gradient, over_rows, dy, x, {"RP=P"}},
          {types::same, kOfRows, kOfRows, sum, x, more, {}},
          {types::linear_in, kOfRows, kOfRows, each, x, more, {"RP=P"}},
          {nonlinear, {replicated}, kOfRows, square, x, x, {}}};
}

TEST_CASE("the schemas of types say what numbers on two ranks do, and nothing else is true") {
  for (const InNumbers& of : schemas_in_numbers()) {
    std::vector<std::string> refused_though_true;
    for (Kind of_x : kOfRows) {
      for (Kind of_y : of.of_second) {
        const Kind answer = of.schema(of_x, of_y);
        for (Kind result : of.results) {
          const std::string text = fmt::format("{}{}={}", types::letter(of_x), types::letter(of_y),
                                               types::letter(result));
          INFO(text << ", and the schema says "
                    << (answer == kRefused ? '!' : types::letter(answer)));
          const bool is = is_true(of, of_x, of_y, result);
          if (is && answer == kRefused) {
            refused_though_true.push_back(text);
          } else {
            REQUIRE(is == (result == answer));
          }
        }
      }
    }
    REQUIRE(refused_though_true == of.refused_though_true);
  }
}

/// A row for each kind of the first operand, a column for each of the second; '.': refused.
std::string all_answers(Schema schema) {
  std::string text;
  for (int x = 1; x < types::kKinds; ++x) {
    for (int y = 1; y < types::kKinds; ++y) {
      const Kind answer = schema(Kind(x), Kind(y));
      text += answer == kRefused ? '.' : types::letter(answer);
    }
    text += x + 1 < types::kKinds ? " " : "";
  }
  return text;
}

TEST_CASE("the schemas of types have these answers, also for kinds that no numbers are held to") {
  // Columns: 0RPMQTFOIEDL?, as rows.
  CHECK(all_answers(types::same) ==
        "0RPMQTFOIEDL? RR..........? P.P........P? M..M........? "
        "Q...Q.......? T....T......? F.....F.....? O......O....? "
        "I.......I...? E........E..? D.........D.? L.P........L? "
        "?????????????");
  CHECK(all_answers(types::linear_in) ==
        "0R...TFOIEDL? RR..........? PP.........PP M...........? "
        "Q...........? T....T......? F.....F.....? O......O....? "
        "I.......I...? E........E..? D.........D.? L..........L? "
        "??...????????");
  CHECK(all_answers(types::times) ==
        "00.....FPD.L? RR.....F...L? PP.........L? ............? "
        "............? TT.........L? ........P..L? OO.........L? "
        "II.........L? EE.........L? DD.......D.L? LL.........L? "
        "?????????????");
  CHECK(all_answers(types::times_transposed) ==
        "00.....PFD.L? RR......F..L? PP.........L? ............? "
        "............? TT.........L? .......P...L? OO.........L? "
        "II.........L? EE.........L? DD.......D.L? LL.........L? "
        "?????????????");
  CHECK(all_answers(types::over_rows) ==
        "000000000000? .R....I.....? .P..........? ............? "
        "............? P....P......? .O..........? ............? "
        "............? ............? ..........E.? ...........L? "
        "?????????????");
  CHECK(all_answers([](Kind x, Kind) { return types::nonlinear(x); }) ==
        "0000000000000 RRRRRRRRRRRRR ............. ............. "
        "............. TTTTTTTTTTTTT FFFFFFFFFFFFF OOOOOOOOOOOOO "
        "IIIIIIIIIIIII EEEEEEEEEEEEE DDDDDDDDDDDDD LLLLLLLLLLLLL "
        "?????????????");
}

TEST_CASE("a number that all ranks know enters a sum once") {
  Random random(5);
  const Matrix x = random_matrix(random, 6, 4);
  const auto total = [](const Matrix& a) {
    double sum = 0;
    for (const Values& row : a) {
      for (double value : row) sum += value;
    }
    return sum;
  };
  for (Kind kind : {replicated, rows, columns}) {
    INFO(types::letter(kind));
    const auto parts = shared(random, x, kind);
    double sum = 0;
    for (int rank : {0, 1}) {
      if (types::term(kind, rank == 0) == partial) sum += total(parts[rank]);
    }
    REQUIRE(std::abs(sum - total(x)) < 1e-12);
  }
  REQUIRE(types::term(partial, true) == kRefused);  // a square of a term is no term
}

// ---- layouts

constexpr const char* kModel =
    "--hidden_size 32 --num_heads 4 --num_kv_heads 4 --ffn_hidden_size 48 --vocab_size 40 "
    "--num_layers 4 --seq_len 16 --micro_batch_size 2 --grad_acc_steps 2 ";

/// Each technique, by the flags that bring it.
const std::vector<std::string> kLayouts = {
    "--dp_size 4",
    "--dp_size 2 --grad_sync bucketed --tie_word_embeddings",
    "--dp_size 4 --zero_stage 1",
    "--dp_size 4 --zero_stage 2 --shard_size 2",
    "--dp_size 4 --zero_stage 3 --recompute full",
    "--tp_size 2",
    "--tp_size 4 --sequence_parallel --num_kv_heads 2",
    "--tp_size 2 --num_kv_heads 1",
    "--tp_size 2 --sequence_parallel --tp_overlap chunks --recompute full",
    "--tp_size 2 --tp_overlap batch_halves",
    "--cp_size 4",
    "--cp_size 2 --cp_method all_gather",
    "--cp_size 4 --cp_method ring_ulysses --ulysses_size 2",
    "--pp_size 4 --grad_acc_steps 8 --tie_word_embeddings",
    "--pp_size 2 --dp_size 2 --zero_stage 1 --tie_word_embeddings",
    "--pp_size 2 --pp_schedule dualpipe --grad_acc_steps 4 --dp_size 2",
    "--dp_size 4 --num_experts 8 --ep_size 4 --balance bias",
    "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 4 --balance bias",
    "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 8 --ep_size 4 --zero_stage 1",
    "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 4 --ep_size 2 --expert_tp "
    "--balance sample --router_z_loss_coef 0.01",
    "--tp_size 2 --cp_size 2 --pp_size 2 --sequence_parallel --no_kv_cache",
    "--dp_size 2 --cp_size 2 --num_experts 8 --ep_size 4",
    "--dp_size 4 --num_experts 8 --ep_size 4 --dispatch by_node --node_size 2",
    "--tp_size 2 --cp_size 2 --attention_kind mla --q_lora_rank 6 --kv_lora_rank 8 "
    "--qk_nope_head_dim 4 --qk_rope_head_dim 4 --v_head_dim 4",
};

std::string with_model(const std::string& own) {
  std::istringstream stream(kModel);
  std::string flags, flag, value;
  while (stream >> flag >> value) {
    const bool is_given = own.find(flag + " ") != std::string::npos;
    if (!is_given && !(flag == "--num_kv_heads" && own.find("mla") != std::string::npos)) {
      flags += flag + " " + value + " ";
    }
  }
  return flags + own;
}

TEST_CASE("every technique's tensors have types that fit") {
  for (const std::string& own : kLayouts) {
    INFO(own);
    const TypeCheck found = check_types(layout_of_flags(with_model(own)));
    REQUIRE(found.error == "");
    REQUIRE(found.messages > 0);
    REQUIRE(found.ops > 100);
  }
}

TEST_CASE("no layout drawn at random has a false alarm") {
  const uint64_t count = kSanitized ? 2 : is_full() ? 532 : 40;
  const uint64_t begin = 1 + (is_full() ? 0 : turn() * count);
  int64_t typed = 0, untyped = 0;
  for (uint64_t number = begin; number < begin + count; ++number) {
    const Composition of = CompositionDraw(number, /*most_ranks=*/16).draw();
    INFO("composition " << number << "\n" << of.first.flags);
    try {
      const TypeCheck found = check_types(of.first.config);
      REQUIRE(found.error == "");
      ++typed;
    } catch (const UsageError&) {  // sizes of which neither divides the other
      ++untyped;
    }
  }
  INFO(typed << " typed, " << untyped << " not");
  REQUIRE(untyped * 10 <= int64_t(count));
}

// ---- the reduced layout

/// A layout drawn at random that is larger than those that train here: more stages, layers and
/// micro-batches. Nothing where its rules refuse it, or its groups have no types.
std::optional<TrainConfig> enlarged(uint64_t number) {
  TrainConfig config = CompositionDraw(number, /*most_ranks=*/8).draw().first.config;
  PipelineConfig& pipeline = config.pipeline;
  if (pipeline.pp_size > 1) pipeline.pp_size += int64_t(4 + number % 3);
  config.communication->node_size = 0;
  config.expert_parallel.dispatch = "direct";
  pipeline.pp_layers.clear();
  config.grad_acc_steps = 2 * pipeline.pp_size + 4;
  try {
    const int64_t stages = pipeline.schedule(config.grad_acc_steps).stages.count();
    config.model.num_layers = 5 * stages + int64_t(number % 3);
    config.each_part([&](const auto& part) { part.check(config); });
    reduced_for_types(config);
    return config;
  } catch (const UsageError&) {
    return {};
  }
}

std::string without_digits(std::string text) {
  std::erase_if(text, [](char c) { return c >= '0' && c <= '9'; });
  return text;
}

/// An operation as a row of the table, with its block's kind for its number. Of a flat buffer the
/// row has the first parameter's type, and which that is depends on sizes: so it is left out there.
std::string row_of(const TrainConfig& config, const types::TypedOp& op) {
  const int64_t head = config.model.num_layers + 1;
  const auto letters = [](const types::Type& type) {
    std::string text;
    for (Kind kind : type) text += types::letter(kind);
    return text;
  };
  const bool is_layers = op.name.find("linear") != std::string::npos || op.name.starts_with("rms");
  std::string text = fmt::format("{} {} {} {}", op.phase, op.name,
                                 op.block == 0      ? "embedding"
                                 : op.block == head ? "head"
                                                    : "layer",
                                 is_layers ? without_digits(op.parameter) : "");
  if (!is_layers && !op.parameter.empty()) return text;
  std::vector<std::string> operands;
  for (const types::Type& type : op.operands) operands.push_back(letters(type));
  if (op.name == "sum_squares") {  // of all gradients, so as many as the layers have
    const std::set<std::string> each(operands.begin(), operands.end());
    operands.assign(each.begin(), each.end());
  }
  for (const std::string& operand : operands) text += " " + operand;
  return text + (op.result ? " = " + letters(*op.result) : "");
}

struct TypedLayout {
  std::set<std::string> rows;               ///< of all stages and both places
  std::vector<std::string> first;           ///< of the first layer, in the first micro-batch
  std::map<std::string, int64_t> messages;  ///< of the first rank: their numbers, by place
};

TypedLayout typed_layout(const TrainConfig& config) {
  TypedLayout found;
  for (TypedPlace place : {TypedPlace::first, TypedPlace::second}) {
    for (int64_t stage = 0; stage < config.pipeline.pp_size; ++stage) {
      TypedRank of{place, stage, {}, {}};
      of.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
        const std::string row = row_of(config, op);
        found.rows.insert(row);
        if (place == TypedPlace::second || stage > 0 || op.micro_batch != 0) return;
        if (op.block == 1) found.first.push_back(row);
        if (op.block > 1 || op.name.find(" over ") == std::string::npos) return;
        found.messages.emplace(fmt::format("{} in block {}", row, op.block),
                               checker.messages() - 1);
      };
      REQUIRE(check_types_of(config, of).error == "");
    }
  }
  return found;
}

TEST_CASE("the reduced layout has the types of the whole one, and the same errors") {
  const uint64_t count = kSanitized ? 1 : is_full() ? 50 : 6;
  uint64_t number = 2'000'000 + (is_full() ? 0 : turn() * count * 3);
  int64_t mutated = 0, named = 0;
  for (uint64_t compared = 0; compared < count; ++number) {
    const std::optional<TrainConfig> whole = enlarged(number);
    if (!whole) continue;
    ++compared;
    const TrainConfig reduced = reduced_for_types(*whole);
    INFO("composition " << number << "\n"
                        << CompositionDraw(number, /*most_ranks=*/8).draw().first.flags);
    REQUIRE(reduced.pipeline.pp_size <= 6);
    REQUIRE(reduced.grad_acc_steps < whole->grad_acc_steps);
    REQUIRE(reduced.model.num_layers < whole->model.num_layers);
    const TypedLayout all = typed_layout(*whole), less = typed_layout(reduced);
    for (const std::string& row : all.rows) {
      INFO("only in the whole layout: " << row);
      REQUIRE(less.rows.contains(row));
    }
    REQUIRE(less.rows.size() == all.rows.size());
    REQUIRE(less.first == all.first);
    int64_t turns = 0;
    for (const auto& [place, message] : less.messages) {
      INFO(place);
      REQUIRE(all.messages.contains(place));
      if (++turns % 3 != 0) continue;
      const auto without = [&](const TrainConfig& of, int64_t left_out) {
        TypedRank rank;
        rank.mutation = {types::Mutation::What::left_out, left_out};
        return without_digits(check_types_of(of, rank).error);
      };
      const std::string error = without(reduced, message);
      REQUIRE(error == without(*whole, all.messages.at(place)));
      ++mutated;
      named += !error.empty();
    }
  }
  if (!kSanitized) REQUIRE(named * 2 > mutated);
}

TEST_CASE("a published layout is reduced to four stages of two layers") {
  const TrainConfig whole = layout_of_flags(
      "--model 405B --tp_size 8 --sequence_parallel --pp_size 16 --zero_stage 2 --dp_size 128 "
      "--pp_layers 7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7 --micro_batch_size 1 --grad_acc_steps 16 "
      "--dtype bf16 --seq_len 8192");
  const TrainConfig reduced = reduced_for_types(whole);
  REQUIRE(reduced.pipeline.pp_size == 4);
  REQUIRE(reduced.pipeline.pp_layers == "2,2,2,2");
  REQUIRE(reduced.grad_acc_steps == 3);
  REQUIRE(check_types_reduced(whole).error == "");
}

TEST_CASE("an error of the reduced layout is told of the whole one") {
  const TrainConfig whole = layout_of_flags(with_model("--tp_size 2 --num_layers 9"));
  const TypeCheck found = check_types_reduced(whole, {types::Mutation::What::left_out, 1});
  REQUIRE(found.error == check_types(whole, {types::Mutation::What::left_out, 1}).error);
  REQUIRE(found.error != "");
}

// ---- values

TEST_CASE("what types say of results is true of their values on all ranks", "[not_sanitized]") {
  const uint64_t count = is_full() ? 100 : 8;
  const uint64_t begin = 3'000'000 + (is_full() ? 0 : turn() * count);
  std::map<char, int64_t> seen;
  for (uint64_t number = begin; number < begin + count; ++number) {
    const Composition of = CompositionDraw(number, /*most_ranks=*/16).draw();
    INFO("composition " << number << "\n" << of.first.flags);
    try {
      factors_of(of.first.config);
    } catch (const UsageError&) {  // sizes of which neither divides the other
      continue;
    }
    Comparison comparison(of.first, number);
    comparison.compare();
    for (const std::string& wrong : comparison.wrong()) FAIL_CHECK(wrong);
    for (const auto& [letter, times] : comparison.seen()) seen[letter] += times;
  }
  std::string text;
  for (const auto& [letter, times] : seen) text += fmt::format("{}: {}  ", letter, times);
  INFO(text);
  for (char letter : std::string(is_full() ? "RPMTFOIED" : "RPTFO")) REQUIRE(seen[letter] > 0);
}

// ---- mutations

struct Share {
  int64_t named = 0, all = 0;
};

/// Mutates about `count` messages of the first rank from `begin` on, each in a run of its own.
void mutate(const TrainConfig& config, types::Mutation::What what, int64_t begin, int64_t count,
            std::map<std::string, Share>& shares) {
  const int64_t messages = check_types_of(config, {}).messages;
  const int64_t apart = std::max<int64_t>(1, (messages - begin) / count);
  for (int64_t number = begin; number < messages; number += apart) {
    const TypeCheck found = check_types(config, {what, number});
    if (found.mutated.empty()) continue;
    const std::string kind = found.mutated.substr(0, found.mutated.find(' '));
    if (what == types::Mutation::What::twice && kind != "all_reduce") continue;
    Share& share = shares[found.mutated_untyped ? "untyped" : kind];
    ++share.all;
    share.named += !found.error.empty();
  }
}

TEST_CASE("types name a message that is left out, and an all_reduce that is done twice",
          "[not_sanitized]") {
  std::map<std::string, Share> left_out, twice;
  for (const std::string& own : kLayouts) {
    const TrainConfig config = layout_of_flags(with_model(own));
    const int64_t count = is_full() ? 40 : 8;
    mutate(config, types::Mutation::What::left_out, 0, count, left_out);
    mutate(config, types::Mutation::What::twice, 0, count, twice);
  }
  Share all_twice, all_left_out;
  for (const auto& [kind, share] : twice) {
    if (kind == "untyped") continue;
    all_twice.named += share.named, all_twice.all += share.all;
  }
  std::string text;
  for (const auto& [kind, share] : left_out) {
    text += fmt::format("{}: {} of {}\n", kind, share.named, share.all);
    if (kind == "untyped") continue;
    all_left_out.named += share.named, all_left_out.all += share.all;
  }
  INFO("left out\n" << text);
  REQUIRE(all_twice.all > 20);
  REQUIRE(all_twice.named == all_twice.all);
  REQUIRE(double(all_left_out.named) >= 0.95 * double(all_left_out.all));
}

/// How many messages the first rank has sent or received when its last update begins.
int64_t messages_of_steps(const TrainConfig& config) {
  int64_t messages = 0;
  TypedRank first;
  first.listener = [&](const types::Checker& checker, const types::TypedOp& op) {
    if (op.name == "adamw") messages = checker.messages();
  };
  check_types_of(config, first);
  return messages;
}

TEST_CASE("types name a message of an evaluation or of decoding, left out or twice",
          "[not_sanitized]") {
  Share sums, left_out;
  for (const std::string& own : kLayouts) {
    const TrainConfig config = layout_of_flags(with_model(own));
    const int64_t begin = messages_of_steps(config), count = is_full() ? 60 : 6;
    std::map<std::string, Share> once, twice;
    mutate(config, types::Mutation::What::left_out, begin, count, once);
    mutate(config, types::Mutation::What::twice, begin, count, twice);
    for (const auto& [kind, share] : once) {
      if (kind == "untyped") continue;
      UNSCOPED_INFO(own << ", " << kind << ": " << share.named << " of " << share.all);
      left_out.named += share.named, left_out.all += share.all;
    }
    sums.named += twice["all_reduce"].named, sums.all += twice["all_reduce"].all;
  }
  REQUIRE(sums.all > 20);
  REQUIRE(sums.named == sums.all);
  REQUIRE(left_out.all > 20);
  REQUIRE(double(left_out.named) >= 0.95 * double(left_out.all));
}

TEST_CASE("an error names the operation, the place, the axis and what wrote the tensor") {
  const TrainConfig config = layout_of_flags(with_model("--tp_size 2"));
  const TypeCheck found = check_types(config, {types::Mutation::What::left_out, 1});
  INFO(found.error);
  for (const char* part : {"rank 0: ", "add in forward of micro-batch 0, block 1, over tp: ",
                           "a term of a sum (from linear_forward in block 1)"}) {
    REQUIRE(found.error.find(part) != std::string::npos);
  }
}

/// The letters at the beginnings of a chain's lines, along the axis of this name.
std::string letters_along(const std::string& why, const std::string& axis) {
  std::istringstream stream(why.substr(why.find("along " + axis + "\n")));
  std::string line, letters;
  std::getline(stream, line);
  while (std::getline(stream, line) && !line.empty()) letters += line.at(2);
  return letters;
}

TEST_CASE("the operations that gave a tensor its type lead back to the batch") {
  const TrainConfig config =
      layout_of_flags(with_model("--dp_size 2 --tp_size 2 --sequence_parallel"));
  const std::string why = why_typed(config, "linear_forward o_proj");
  INFO(why);
  REQUIRE(why.starts_with("linear_forward self_attn.o_proj: tp:P dp:T\n"));
  REQUIRE(letters_along(why, "tp") == "PFFRTTPR");
  REQUIRE(letters_along(why, "dp") == "TT");
  std::vector<std::string> lines;
  std::istringstream stream(why);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  const auto says = [&](const std::vector<std::string>& parts) {
    return std::ranges::any_of(lines, [&](const std::string& line) {
      return std::ranges::all_of(
          parts, [&](const std::string& part) { return line.find(part) != std::string::npos; });
    });
  };
  REQUIRE(
      says({"  P  linear_forward", "o_proj", "forward of micro-batch 0, block 1", "of F and I"}));
  REQUIRE(says({"  F  kept by attention_forward, rope"}));
  REQUIRE(says({"  R  all_gather over tp", "forward of micro-batch 0, block 1", "of T"}));
  REQUIRE(says({"  P  embedding_forward", "model.embed_tokens", "block 0", "of R and O"}));
  REQUIRE(says({"  R  the batch"}));
}

TEST_CASE("a message of the layer's rows is left out, by its place among them") {
  const TrainConfig config = layout_of_flags(with_model("--tp_size 2"));
  const TypeCheck found =
      check_types(config, {types::Mutation::What::left_out, message_of_row(config, 1)});
  REQUIRE(found.mutated == "all_reduce over tp");
  INFO(found.error);
  REQUIRE(found.error.find("add in forward of micro-batch 0, block 1, over tp") !=
          std::string::npos);
  REQUIRE(found.error.find("from all_reduce over tp in block 0") != std::string::npos);
  REQUIRE(message_of_row(config, 2) > message_of_row(config, 1));
  // Its number is that of the reduced layout, whose backward begins sooner.
  TrainConfig longer = layout_of_flags(with_model("--tp_size 2 --num_layers 9"));
  longer.composition.mesh_show = "types";
  longer.composition.mesh_left_out = 4;
  REQUIRE(show_types(longer) == 1);
  check_throws<UsageError>([&] { message_of_row(config, 99); },
                           {"mesh_left_out=99", "has 4 messages"});
  check_throws<UsageError>([&] { layout_of_flags(with_model("--tp_size 2 --mesh_left_out 1")); },
                           {"mesh_left_out=1", "--mesh_show types"});
}

TEST_CASE("every row of a layer has its reason, also where a flat buffer and a ring are in it") {
  for (const char* own :
       {"--dp_size 2 --zero_stage 3 --recompute full", "--cp_size 4",
        "--dp_size 2 --tp_size 2 --sequence_parallel --num_experts 8 --ep_size 4"}) {
    INFO(own);
    const TrainConfig config = layout_of_flags(with_model(own));
    for (const char* row :
         {"linear_backward_weight q_proj", "attention_forward", "backward o_proj"}) {
      const std::string why = why_typed(config, row);
      INFO(why);
      REQUIRE(why.find("\nalong ") != std::string::npos);
      REQUIRE(
          (why.ends_with("the batch\n") || why.find("the initial values") != std::string::npos));
    }
  }
}

TEST_CASE("the reason of a type is refused where no row has the words, and without types") {
  const TrainConfig config = layout_of_flags(with_model("--tp_size 2"));
  check_throws<UsageError>([&] { why_typed(config, "linear_forward router"); },
                           {"mesh_why=linear_forward router", "\"linear_forward o_proj\""});
  check_throws<UsageError>([&] { layout_of_flags(with_model("--tp_size 2 --mesh_why add")); },
                           {"mesh_why=add", "--mesh_show types"});
}

/// A rank of two along tp, whose program is checked.
struct TypedProgram {
  explicit TypedProgram(int rank) {
    sizes.tp = 2;
    types::Setting setting;
    setting.mesh = sizes;
    setting.rank = rank;
    setting.factors = {{MeshAxis::tp, 1, 2}};
    checker.emplace(setting);
    meta.runtime.tell(&*checker);
    dry.emplace(sizes, EngineKind::host, rank);
  }
  /// What the ranks have the same.
  static Tensor same_on_all(const Shape& shape) {
    const Tensor x = Tensor::empty(shape, DType::f64);
    ops::fill(x, 1);
    return x;
  }
  void begin() { checker->declare(none, {}); }

  OnDevice meta{Device::meta};
  MeshSizes sizes;
  std::optional<types::Checker> checker;
  std::optional<DryMesh> dry;
  ParameterList none;
};

// ---- the schemas, on every op that they serve

/// An op, how many operands it has, and which of them its schema is about.
struct Served {
  const char* op;
  int operands;
  std::vector<int> reads;
  int output = 0;
};

/// What the op makes of operands that are of these kinds along tp, on this rank; kRefused: an
/// error.
Kind made_by(const Served& served, int rank, const std::vector<Kind>& kinds) {
  TypedProgram program(rank);
  ParameterList list;
  std::map<std::string, types::Declared> declared;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const std::string name = fmt::format("operand {}", i);
    list.add(name, {4, 4}, 1);
    declared[name].type = types::all_of(kinds[i]);
  }
  list.allocate(DType::f64, /*seed=*/1);
  program.checker->declare(list, declared);
  std::vector<Tensor> operands(served.operands);
  std::vector<const Tensor*> pointers;
  for (Tensor& operand : operands) {
    operand = Tensor::zeros({4, 4}, DType::f64);
    pointers.push_back(&operand);
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    operands[served.reads[i]] = list.find(fmt::format("operand {}", i)).value;
  }
  try {
    program.checker->op(served.op, 0, 0, pointers, false);
  } catch (const types::TypeError&) {
    return kRefused;
  }
  Kind made = unknown;
  program.checker->on_typed([&](const types::TypedOp& op) { made = (*op.result)[0]; });
  ops::copy(Tensor::empty({4, 4}, DType::f64), operands[served.output]);
  return made;
}

/// The kinds that an operand may have when an op reads it.
std::vector<Kind> written_kinds() {
  std::vector<Kind> kinds;
  for (int kind = 0; kind < types::kKinds; ++kind) {
    if (Kind(kind) != unwritten && Kind(kind) != unknown) kinds.push_back(Kind(kind));
  }
  return kinds;
}

using SchemaOfKinds = std::function<Kind(const std::vector<Kind>&, int rank)>;

/// The schemas, and the ops that each of them serves alone.
std::vector<std::pair<SchemaOfKinds, std::vector<Served>>> schemas() {
  const auto of_two = [](Schema schema) {
    return [=](const std::vector<Kind>& kinds, int) { return schema(kinds[0], kinds[1]); };
  };
  return {
      {of_two(types::same),
       {{"add", 3, {1, 2}}, {"accumulate", 3, {1, 2}}, {"attention_merge", 6, {1, 2}}}},
      {[](const std::vector<Kind>& kinds, int) { return types::nonlinear(kinds[0]); },
       {{"swiglu_forward", 2, {1}},
        {"router_scores", 2, {1}},
        {"choose_experts", 3, {1}},
        {"gates_forward", 3, {1}}}},
      {of_two(types::linear_in),
       {{"swiglu_backward", 3, {1, 2}},
        {"attention_delta", 3, {1, 2}},
        {"router_scores_backward", 3, {1, 2}},
        {"gates_backward", 5, {1, 2}}}},
      {of_two(types::times),
       {{"matmul", 3, {1, 2}},
        {"linear_forward", 3, {1, 2}},
        {"grouped_linear_forward", 3, {1, 2}}}},
      {of_two(types::times_transposed),
       {{"linear_backward_input", 3, {1, 2}}, {"grouped_linear_backward_input", 3, {1, 2}}}},
      {of_two(types::over_rows),
       {{"linear_backward_weight", 3, {1, 2}},
        {"rmsnorm_backward_weight", 3, {1, 2}},
        {"grouped_linear_backward_weight", 3, {1, 2}}}},
      {[](const std::vector<Kind>& kinds, int rank) { return types::term(kinds[0], rank == 0); },
       {{"sum_squares", 2, {0}, 1},
        {"balance_loss_forward", 3, {1}},
        {"z_loss_forward", 2, {1}},
        {"router_entropy", 2, {1}}}},
      {[](const std::vector<Kind>& kinds, int) { return kinds[0]; },  // rows that are moved
       {{"drop_elements", 2, {1}},
        {"count_choices", 2, {1}},
        {"drop_choices", 2, {1}},
        {"assign_slots", 2, {1}},
        {"permute", 3, {1}},
        {"unpermute", 4, {1}}}},
  };
}

TEST_CASE("every op that a schema serves makes what the schema says, of all kinds") {
  const std::vector<Kind> all = written_kinds();
  for (const auto& [schema, ops] : schemas()) {
    for (const Served& served : ops) {
      for (int rank : {0, 1}) {
        for (Kind x : all) {
          for (Kind y : served.reads.size() == 1 ? std::vector{x} : all) {
            std::vector<Kind> kinds = {x, y};
            kinds.resize(served.reads.size());
            INFO(served.op << " of " << types::letter(x) << " and " << types::letter(y) << ", rank "
                           << rank);
            const Kind expected = schema(kinds, rank), made = made_by(served, rank, kinds);
            INFO((made == kRefused ? '!' : types::letter(made)) << " is not what the schema says");
            REQUIRE(made == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("a product onto a residual is what adding the two would be") {
  const std::vector<Kind> all = written_kinds();
  const Served served{"linear_forward_add", 4, {1, 2, 3}};
  for (Kind x : all) {
    for (Kind w : all) {
      for (Kind residual : all) {
        const Kind product = types::times(x, w);
        const Kind expected = product == kRefused ? product : types::same(residual, product);
        INFO(types::letter(residual) << " + " << types::letter(x) << " times " << types::letter(w));
        REQUIRE(made_by(served, 0, {x, w, residual}) == expected);
      }
    }
  }
}

TEST_CASE("outputs of experts onto a residual are what adding the two would be") {
  const std::vector<Kind> all = written_kinds();
  const Served served{"unpermute_add", 5, {1, 2}};
  for (Kind residual : all) {
    for (Kind x : all) {
      INFO(types::letter(residual) << " + rows of " << types::letter(x));
      REQUIRE(made_by(served, 0, {residual, x}) == types::same(residual, x));
    }
  }
}

TEST_CASE("every op has a schema, or is listed among those with rules of their own") {
  std::set<std::string_view> known = {"fill",
                                      "copy",
                                      "rope",
                                      "embedding_forward",
                                      "embedding_backward",
                                      "rmsnorm_forward",
                                      "rmsnorm_backward_input",
                                      "attention_forward",
                                      "attention_rescale",
                                      "attention_backward",
                                      "cross_entropy_forward",
                                      "cross_entropy_rescale",
                                      "cross_entropy_loss",
                                      "cross_entropy_backward",
                                      "clip_coefficient",
                                      "adamw",
                                      "unpermute_backward",
                                      "balance_loss_backward",
                                      "z_loss_backward",
                                      "balance_bias",
                                      "linear_forward_add",
                                      "unpermute_add"};
  REQUIRE(known.size() == 22);
  for (const auto& [schema, ops] : schemas()) {
    for (const Served& served : ops) known.insert(served.op);
  }
  REQUIRE(schemas().back().second.size() == 6);
  for (std::string_view op : types::ops_with_rules()) {
    INFO(op);
    REQUIRE(known.contains(op));
  }
  REQUIRE(known.size() == types::ops_with_rules().size());
}

TEST_CASE("a loss that every rank knows and enters is seen on the second rank") {
  for (int rank : {0, 1}) {
    TypedProgram program(rank);
    const Tensor loss = Tensor::zeros({1}, DType::f64), lse = Tensor::empty({4}, DType::f64);
    program.begin();
    const Tensor row = TypedProgram::same_on_all({4});
    ops::cross_entropy_loss(loss, lse, row, row, row, 1);
    const auto report = [&] {
      program.dry->mesh.tp().all_reduce(loss);
      REQUIRE(loss.item() == 0);
    };
    if (rank == 0) {
      report();
      continue;
    }
    check_throws<types::TypeError>(report, {"all_reduce over tp, over tp", "no term of a sum",
                                            "the same on every rank (from cross_entropy_loss)"});
  }
}

TEST_CASE("a norm that leaves out a gradient is refused on the first rank that has it") {
  for (bool is_counted : {true, false}) {
    for (int rank : {0, 1}) {
      INFO("rank " << rank << ", counted " << is_counted);
      TypedProgram program(rank);
      ParameterList list;
      list.add("weight", {4, 2}, 1);
      list.allocate(DType::f64, /*seed=*/1);
      program.checker->declare(list, {{"weight", {types::all_of(replicated), true}}});
      const Tensor sums = Tensor::zeros({1}, DType::f64), one = Tensor::empty({1}, DType::f64);
      ops::linear_backward_weight(list[0].grad, TypedProgram::same_on_all({3, 4}),
                                  TypedProgram::same_on_all({3, 2}), /*accumulate=*/false);
      if (is_counted && rank == 0) ops::sum_squares(sums, list[0].shard.grad, /*accumulate=*/true);
      if (is_counted && rank == 0) program.dry->mesh.tp().all_reduce(sums);
      const auto clip = [&] { ops::clip_coefficient(one, one, sums, 1); };
      if (is_counted || rank == 1) {
        clip();
      } else {
        check_throws<types::TypeError>(clip, {"the gradient norm", "leaves out weight"});
      }
    }
  }
}

TEST_CASE("an update reads a clipping factor that has been written") {
  for (bool is_written : {true, false}) {
    TypedProgram program(0);
    program.begin();
    const auto some = [] { return TypedProgram::same_on_all({4}); };
    const Tensor factor = Tensor::zeros({1}, DType::f64);
    if (is_written) ops::fill(factor, 1);
    const auto update = [&] { ops::adamw(some(), some(), some(), some(), some(), factor, {}); };
    if (is_written) {
      update();
    } else {
      check_throws<types::TypeError>(update, {"adamw, over tp", "scales by a tensor, zero"});
    }
  }
}

TEST_CASE("the host may read what is the same on all ranks, and no term of a sum") {
  for (bool is_summed : {true, false}) {
    TypedProgram program(0);
    const Tensor sum = Tensor::zeros({1}, DType::f64);
    program.begin();
    ops::sum_squares(sum, TypedProgram::same_on_all({4}), /*accumulate=*/true);
    if (is_summed) program.dry->mesh.tp().all_reduce(sum);
    if (is_summed) {
      REQUIRE(sum.item() == 0);
    } else {
      check_throws<types::TypeError>([&] { sum.item(); }, {"the host, over tp", "a term of a sum"});
    }
    const NoHostReads in_a_step;
    check_throws<Error>([&] { sum.item(); }, {"has no values to read"});
  }
}

TEST_CASE("a checkpoint has what all ranks hold from one of them") {
  for (int rank : {0, 1}) {
    for (bool is_counted : {true, false}) {
      INFO("rank " << rank << ", counted " << is_counted);
      TypedProgram program(rank);
      ParameterList list;
      list.add("weight", {4, 2}, 1).counted = is_counted;
      list.allocate(DType::f64, /*seed=*/1);
      program.checker->declare(list, {{"weight", {types::all_of(replicated), true}}});
      int64_t tokens = 0;
      const OptimizerState moment{"moment", TypedProgram::same_on_all({8})};
      const auto save = [&] { program.checker->save({list, {moment}, tokens}); };
      if (is_counted == (rank == 0)) {
        save();
      } else {
        check_throws<types::TypeError>(
            save, {"the checkpoint", is_counted ? "from this rank and from others" : "leaves out",
                   "weight"});
      }
    }
  }
}

TEST_CASE("a checkpoint is neither written of what is under way nor read into it") {
  for (bool reads : {false, true}) {
    for (bool waits : {false, true}) {
      TypedProgram program(0);
      ParameterList list;
      list.add("weight", {4, 2}, 1);
      list.allocate(DType::f64, /*seed=*/1);
      program.checker->declare(list, {{"weight", {types::all_of(replicated), true}}});
      int64_t tokens = 0;
      const OptimizerState moment{"moment", TypedProgram::same_on_all({8})};
      const TrainState state{list, {moment}, tokens};
      program.checker->save(state);
      const Communicator ring = program.dry->mesh.tp().split("ring", [](int) { return 0; });
      const SendRecv both[] = {{SendRecv::send, TypedProgram::same_on_all({8}), 1},
                               {SendRecv::recv, list[0].shard.value, 1}};
      Handle message = ring.send_recv_async(both);
      if (waits) message.wait();
      const auto store = [&] {
        reads ? program.checker->load(state) : program.checker->save(state);
      };
      if (waits) {
        store();
      } else {
        check_throws<types::TypeError>(
            store, {reads ? "a checkpoint: writes into what a message" : "the checkpoint: takes",
                    "recv over ring"});
      }
    }
  }
}

TEST_CASE("a rank's own part of what it gathers stays as it is, and the others have to arrive") {
  TypedProgram program(0);
  program.begin();
  const Tensor whole = Tensor::zeros({16}, DType::f64);
  const auto read = [](const Tensor& x) { ops::copy(Tensor::empty({8}, DType::f64), x); };
  Handle message = program.dry->mesh.tp().all_gather_async(whole, whole.narrow(0, 0, 8));
  read(whole.narrow(0, 0, 8));
  check_throws<types::TypeError>([&] { read(whole.narrow(0, 8, 8)); }, {"a wait is missing"});
  check_throws<types::TypeError>([&] { ops::fill(whole.narrow(0, 0, 8), 0); },
                                 {"a message that is under way still reads"});
  message.wait();
  read(whole.narrow(0, 8, 8));
}

TEST_CASE("what is under way is neither read nor written over before it is waited for") {
  const auto with_message = [](const std::function<void(const Tensor&, Handle&)>& body) {
    TypedProgram program(0);
    const Tensor x = TypedProgram::same_on_all({4, 6});
    const Tensor y = Tensor::empty({8, 6}, DType::f64);
    program.begin();
    Handle message = program.dry->mesh.tp().all_gather_async(y, x);
    body(y, message);
  };
  const auto as_rows = [](const std::function<void(const Tensor&, Handle&)>& body) {
    TypedProgram program(0);
    const Tensor y = Tensor::empty({8, 6}, DType::f64), x = Tensor::zeros({4, 6}, DType::f64);
    program.begin();
    Handle message = program.dry->mesh.tp().all_gather_async(y, x);
    body(y, message);
  };
  check_throws<types::TypeError>([&] { with_message([](const Tensor&, Handle&) {}); },
                                 {"all_gather over tp", "gathers", "the same on every rank"});
  const auto read = [](const Tensor& y) { ops::copy(Tensor::empty(y.shape(), y.dtype()), y); };
  check_throws<types::TypeError>([&] { as_rows([&](const Tensor& y, Handle&) { read(y); }); },
                                 {"copy", "a wait is missing"});
  check_throws<types::TypeError>(
      [&] { as_rows([](const Tensor& y, Handle&) { ops::fill(y, 0); }); },
      {"fill", "a message that is under way"});
  as_rows([&](const Tensor& y, Handle& message) {
    message.wait();
    read(y);
  });
}

TEST_CASE("a gradient that comes around a ring is lost where nothing reads it") {
  for (const char* name : {"ring", "ring_gradients"}) {
    for (bool is_read : {true, false}) {
      INFO(name << ", read " << is_read);
      TypedProgram program(0);
      const Tensor x = TypedProgram::same_on_all({4}), y = Tensor::empty({4}, DType::f64);
      program.begin();
      const Communicator ring = program.dry->mesh.tp().split(name, [](int) { return 0; });
      const SendRecv both[] = {{SendRecv::send, x, 1}, {SendRecv::recv, y, 1}};
      ring.send_recv_async(both).wait();
      if (is_read) ops::add(x, x, y);
      if (is_read || name == std::string("ring")) {
        program.checker->end_step();
      } else {
        check_throws<types::TypeError>(
            [&] { program.checker->end_step(); },
            {"nothing has read the gradient", "recv over ring_gradients"});
      }
    }
  }
}

TEST_CASE("an op without a rule is an error") {
  OnDevice meta(Device::meta);
  types::Checker checker({});
  check_throws<types::TypeError>([&] { checker.op("no_such_op", 0, 0, {}, false); },
                                 {"no_such_op", "no rule"});
  REQUIRE(types::ops_with_rules().size() == 51);
}

TEST_CASE("groups that take no factor of an axis are refused in one line") {
  check_throws<UsageError>(
      [&] {
        check_types(
            layout_of_flags(with_model("--dp_size 3 --cp_size 2 --num_experts 3 --ep_size 3")));
      },
      {"a group of 3 ranks", "neither all of the 2 ranks of cp"});
}

}  // namespace
}  // namespace usp::test::of_types
