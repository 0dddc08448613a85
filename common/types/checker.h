#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "tensor/recorder.h"
#include "train/checkpoint.h"
#include "types/log.h"

namespace usp::types {

/// A tensor is not of the type that an operation needs. The message names the operation, where it
/// runs, the axis of the mesh, and what wrote the tensor.
class TypeError : public Error {
 public:
  using Error::Error;
};

/// Whether the part begins in the other tensor.
bool is_inside(const Tensor& part, const Tensor& whole);

/// A rank of a mesh, and what its types begin from.
struct Setting {
  MeshSizes mesh;               ///< of all ranks
  int rank = 0;                 ///< of the world
  std::vector<Factor> factors;  ///< of the mesh
  Type batch{};                 ///< of tokens
  Type boundary{};              ///< of what one stage of the pipeline sends another
};

/// What a parameter is, by what the neighbors hold; see Checker::declare().
struct Declared {
  Type type{};                  ///< of its values
  bool is_first_holder = true;  ///< no stage before this one holds it as well
};

/// Follows the types of all tensors through a program on meta: hears of each op and message, and
/// throws TypeError at the first that does not fit. It has to be told of by Runtime::tell() before
/// the program makes its first tensor.
class Checker : public Recorder {
 public:
  explicit Checker(Setting setting) : setting_(std::move(setting)) {}  ///< of this rank

  /// The parameters of the program, and the type of each, by name. A program that follows another
  /// declares its own.
  void declare(const ParameterList& parameters, const std::map<std::string, Declared>& types);
  /// Looks at what has to hold after each training step: weights are whole, every gradient has been
  /// read, and every send in a ring has its receive.
  void end_step();
  /// From here on the program continues a text, which all ranks have whole: `batch` and `boundary`
  /// are no longer the setting's.
  void begin_decoding();
  /// A checkpoint of this state is written: each element once, from a rank where it has arrived and
  /// is up to date.
  void save(const TrainState& state);
  /// The checkpoint is read by a program with this state: a rank has its own shards then, and no
  /// others.
  void load(const TrainState& state);
  /// Is called after every operation that is typed.
  void on_typed(std::function<void(const TypedOp&)> listener) { log_.tell(std::move(listener)); }

  /// From now on keeps what each operation has read. The last link is that of the operation that a
  /// listener is told of.
  void keep_history() { log_.keep_history(); }
  const std::vector<Link>& history() const { return log_.history(); }  ///< as far as it is kept

  const Setting& setting() const { return setting_; }  ///< that its types begin from
  int64_t ops() const { return ops_; }                 ///< so far
  int64_t messages() const { return messages_; }       ///< so far
  /// Messages to and from other ranks of the world along pp, by peer.
  const std::map<int, int64_t>& sent() const { return sent_; }
  const std::map<int, int64_t>& received() const { return received_; }

  // As a Recorder.
  void op(std::string_view name, int64_t flops, int64_t bytes,
          std::span<const Tensor* const> operands, bool flag) override;
  int64_t post(const Posted& operation) override;
  void wait(int64_t posted) override;
  void begin_phase(std::string_view name, int64_t number, int64_t micro_batch) override;
  void end_phase() override;
  void* place(int64_t bytes) override { return regions_.place(bytes); }
  void made(const Tensor& tensor, Source source, std::string_view name,
            const Tensor* from) override;
  bool host_reads(const Tensor& tensor) override;

 protected:
  std::vector<Region> parts_of(const Tensor& tensor) { return regions_.of(tensor); }

 private:
  friend class Rules;
  friend class MessageRules;

  struct Phase {
    std::string name, pass;  ///< pass: "forward", "backward", "recompute" or ""
    int64_t micro_batch = -1;
  };
  struct UnderWay {
    Tensor input, output;
    bool keeps_input = false;  ///< which is a part of the output that stays as it is
  };
  using Factors = std::array<bool, kFactors>;  ///< along which a group's members differ
  struct OfParameter : Part {                  ///< where it lies in a tensor
    const Parameter* parameter;
  };

  int count() const { return static_cast<int>(setting_.factors.size()); }
  MeshAxis axis(int factor) const { return setting_.factors[factor].axis; }
  bool is_pp(int factor) const { return axis(factor) == MeshAxis::pp; }
  /// Whether stages differ in it by layers that no other stage has.
  bool is_of_own_layers(int factor) const { return is_pp(factor) && !all_have_stage_copies_; }
  /// Whether this rank is the first along a factor; of copies on stages, the first that holds them.
  bool is_first(int factor, const Parameter* parameter) const;
  [[noreturn]] void refuse(std::string_view operation, int factor, const std::string& what) const;
  /// A tensor as errors have it: its name, its kind along the factor, and what wrote it.
  static std::string told(const Region& x, int factor);
  /// Refuses a tensor that has a kind of which `fits(kind)` is not so.
  void need(std::string_view operation, const char* what, const Region& x,
            bool (*fits)(Kind)) const;
  /// What an operation "reads" or "sends" has been written, and is up to date.
  void check_written(std::string_view operation, const char* verb, const Region& x) const;
  /// Parts of a tensor that an operation reads or sends: they have arrived, too. Integers that
  /// nothing has written are the host's.
  std::vector<Region> taken(std::string_view operation, const char* verb, const Tensor& x,
                            std::vector<Region> all);
  /// All of a tensor, which has to be of one type; without elements, of none.
  Region read(std::string_view operation, const Tensor& x) {
    return as_one(operation, taken(operation, "reads", x, as_read(x)));
  }
  /// A weight is what it was declared to be, or zeros.
  void check_declared(std::string_view operation, const Parameter& parameter,
                      const Region& region) const;
  /// No gradient that an operation writes over waits to be read.
  void check_read(std::string_view operation, const std::vector<Region>& all) const;
  void write(const Tensor& tensor, Part part, const Type& type, std::string_view origin,
             const Parameter* parameter = nullptr);
  void copy(const Tensor& to, const Tensor& from, std::vector<Region> all);
  /// Parts that an operation reads together.
  Region as_one(std::string_view operation, const std::vector<Region>& all) const;
  /// As an op reads them: a rank's own part of what was gathered over cp stands for its place
  /// there.
  std::vector<Region> as_read(const Tensor& tensor);
  /// So many messages more read and write these.
  void set_under_way(const UnderWay& message, int change);
  void set_unread(const Tensor& tensor, Part part, bool is_unread);
  std::vector<OfParameter> parameters_in(const Tensor& tensor, Tensor Parameter::*member) const;
  /// Names the weights in a gradient. That of a weight that other stages hold too is a term of a
  /// sum.
  void own_stage_enters(const Tensor& gradient);
  /// The norm has every gradient that no rank before this one has, too.
  void check_norm();
  /// What was updated elsewhere is out of date here.
  void note_updates();
  void set_out_of_date(const Parameter& parameter, std::string_view origin);
  /// Whether it is a part of a parameter's state that says which rank has which elements: weights
  /// are gathered, but what the optimizer keeps is not.
  bool is_of_optimizer(const Parameter& parameter, const Tensor& part) const;
  /// What a rank's rows of tokens are, and those of the ranks beside it.
  Kind kind_of_tokens() const { return is_decoding_ ? Kind::replicated : Kind::rows; }
  const Phase& phase() const { return phases_[thread_turn()].back(); }
  /// Whether this runs in a phase of that name.
  bool is_in(std::string_view name) const {
    return std::ranges::count(phases_[thread_turn()], name, &Phase::name) > 0;
  }

  Setting setting_;
  Regions regions_;
  Log log_{regions_};
  std::vector<const Parameter*> parameters_;
  std::unordered_map<const Parameter*, Declared> declared_;
  std::vector<int64_t> versions_;
  bool has_stage_copies_ = false, all_have_stage_copies_ = false, is_updating_ = false;
  bool is_decoding_ = false;
  std::set<const void*> in_norm_;            ///< where the gradients begin that this update's has
  std::set<const Parameter*> without_rows_;  ///< experts whose gradients are 0
  Type scores_ = all_of(Kind::replicated);   ///< the last router's
  /// What was last sent in a ring, by group; first the columns of a row, where regions are columns.
  std::map<int64_t, std::pair<int64_t, std::vector<Region>>> passed_on_;
  std::map<int64_t, Factors> along_;  ///< of groups met, by id
  std::vector<UnderWay> under_way_;
  std::map<int64_t, int64_t> in_ring_;   ///< sends without their receives, by group
  std::map<std::string, Type> in_file_;  ///< the last checkpoint's, by name of the part
  std::map<int, int64_t> sent_, received_;
  std::vector<Phase> phases_[kTurns] = {{Phase{}}, {Phase{}}};
  std::set<std::string> origins_;  ///< such as "all_reduce over dp", which regions refer to
  int64_t ops_ = 0, messages_ = 0;
};

}  // namespace usp::types
