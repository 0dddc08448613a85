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
#include "types/regions.h"

namespace usp::types {

/// A tensor is not of the type that an operation needs. The message names the operation, where it
/// runs, the axis of the mesh, and what wrote the tensor.
class TypeError : public Error {
 public:
  using Error::Error;
};

/// Whether the part begins in the other tensor.
bool is_inside(const Tensor& part, const Tensor& whole);

/// What is wrong with a message on purpose, to see whether the types say so.
struct Mutation {
  /// What may happen to it.
  enum class What { none, left_out, twice };
  What what = What::none;  ///< what happens to it
  int64_t message = -1;    ///< the number of the message, from 0 on, among those of the rank
};

/// A rank of a mesh, and what its types begin from.
struct Setting {
  MeshSizes mesh;               ///< of all ranks
  int rank = 0;                 ///< of the world
  std::vector<Factor> factors;  ///< of the mesh
  Type batch{};                 ///< of tokens
  Type boundary{};              ///< of what one stage of the pipeline sends another
  Mutation mutation;            ///< none, but in tests
};

/// What a parameter is, by what the neighbors hold; see Checker::declare().
struct Declared {
  Type type{};                  ///< of its values
  bool is_first_holder = true;  ///< no stage before this one holds it as well
};

/// One operation as a table shows it: the type of each operand that has one, and where.
struct TypedOp {
  std::string name;            ///< such as "linear_forward", or "all_reduce over tp"
  std::string phase;           ///< "forward", "backward", "recompute" or ""
  int block = -1;              ///< of the model
  int64_t micro_batch = -1;    ///< of the step
  std::vector<Type> operands;  ///< outputs first, as before the operation, and then
  std::optional<Type> result;  ///< what it makes of the first
  bool is_mixed = false;       ///< other parts of the result are of other types
  std::string parameter;       ///< among the operands
  Shape shape;                 ///< on this rank, of what it makes
  Shape taken;                 ///< on this rank: of the parameter; of what a message sends
  int peer = -1;               ///< of a send or a receive: the other rank, within the group
};

/// One operation of a history, with the parts of tensors that it has read: each has the type that
/// it had then, and the link that wrote it.
struct Link {
  TypedOp op;              ///< without its result
  std::vector<Region> of;  ///< parts of tensors
};

/// Follows the types of all tensors through a program on meta: hears of each op and message, and
/// throws TypeError at the first that does not fit. It has to be told of by Runtime::tell() before
/// the program makes its first tensor.
class Checker : public Recorder {
 public:
  explicit Checker(Setting setting);  ///< of this rank

  /// The parameters of the program, and the type of each, by name. A program that follows another
  /// declares its own.
  void declare(ParameterList& parameters, const std::map<std::string, Declared>& types);
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
  void on_typed(std::function<void(const TypedOp&)> listener) { listener_ = std::move(listener); }

  /// From now on keeps what each operation has read. The last link is that of the operation that a
  /// listener is told of.
  void keep_history() { keeps_history_ = true; }
  const std::vector<Link>& history() const { return history_; }  ///< as far as it is kept

  const Setting& setting() const { return setting_; }  ///< that its types begin from
  int64_t ops() const { return ops_; }                 ///< so far
  int64_t messages() const { return messages_; }       ///< so far
  /// Name of the message that was mutated, such as "all_reduce over dp"; empty: it was not met.
  const std::string& mutated() const { return mutated_; }
  /// Whether it carried what types cannot tell apart: integers, which have none, or zeros, whose
  /// sum is the same however often it is taken.
  bool mutated_untyped() const { return mutated_untyped_; }
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
  struct OfParameter : Part {  ///< where it lies in a tensor
    const Parameter* parameter;
  };

  int count() const { return static_cast<int>(setting_.factors.size()); }
  bool is_pp(int factor) const { return setting_.factors[factor].axis == MeshAxis::pp; }
  /// Whether stages differ in it by layers that no other stage has.
  bool is_of_own_layers(int factor) const { return is_pp(factor) && !all_have_stage_copies_; }
  /// Whether this rank is the first along a factor; of copies on stages, the first that holds them.
  bool is_first(int factor, const Parameter* parameter) const;
  [[noreturn]] void refuse(std::string_view operation, int factor, const std::string& what) const;
  /// A tensor as errors have it: its name, its kind along the factor, and what wrote it.
  static std::string told(const Region& x, int factor);
  /// No message still brings the region that an operation "reads" or "sends".
  void check_arrived(std::string_view operation, std::string_view verb, const Region& region) const;
  /// All of what it reads or sends has been written, and is up to date.
  void check_there(std::string_view operation, std::string_view verb, const Tensor& x,
                   const std::vector<Region>& all);
  /// Covers the part, or all of it that there is.
  void check_covered(std::string_view operation, std::string_view verb, const Tensor& x, Part part,
                     const std::vector<Region>& all);
  /// No gradient that an operation writes over waits to be read.
  void check_read(std::string_view operation, const std::vector<Region>& all) const;
  void write(const Tensor& tensor, Part part, const Type& type, std::string_view origin,
             const Parameter* parameter = nullptr);
  void copy(const Tensor& to, const Tensor& from);
  /// Parts that an operation reads together.
  Region as_one(std::string_view operation, const std::vector<Region>& all) const;
  /// Type of the positions that this rank keeps, of what all ranks of cp have.
  Type own_part_of(Type type) const;
  /// As an op reads them: a rank's own part of what was gathered over cp stands for its place
  /// there.
  std::vector<Region> as_read(const Tensor& tensor);
  /// So many messages more read and write these.
  void set_under_way(const UnderWay& message, int change);
  void note_read(const Tensor& tensor, const std::vector<Region>& all);
  /// An operation with operands that the listener is told of, and its place in the history: until
  /// end() it is what writes.
  TypedOp begin(std::string_view name, std::span<const Tensor* const> operands);
  void end(TypedOp typed, const Tensor& made);
  void note_parameter(TypedOp& typed, const Tensor& x);
  bool is_zero(const Tensor& tensor);  ///< along every factor
  void add_to_link(const Region& read);
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
  std::string where() const;
  std::string_view lasting(const std::string& text) { return *texts_.insert(text).first; }

  Setting setting_;
  std::vector<bool> is_first_;  ///< this rank, along each factor
  Regions regions_;
  ParameterList* parameters_ = nullptr;
  std::unordered_map<const Parameter*, Declared> declared_;
  std::vector<int64_t> versions_;
  bool has_stage_copies_ = false, all_have_stage_copies_ = false, is_updating_ = false;
  bool is_decoding_ = false;
  std::set<const void*> in_norm_;            ///< where the gradients begin that this update's has
  std::set<const Parameter*> without_rows_;  ///< experts whose gradients are 0
  Type scores_ = all_of(Kind::replicated);   ///< the last router's
  struct PassedOn {
    int64_t columns = 0;  ///< of a row, where regions are columns
    std::vector<Region> regions;
  };
  std::map<int64_t, PassedOn> passed_on_;                ///< last sent in a ring, by group
  std::map<int64_t, std::array<bool, kFactors>> along_;  ///< the factors of groups met, by id
  std::vector<UnderWay> under_way_;
  std::map<int64_t, int64_t> in_ring_;   ///< sends without their receives, by group
  std::map<std::string, Type> in_file_;  ///< the last checkpoint's, by name of the part
  std::map<int, int64_t> sent_, received_;
  std::vector<Phase> phases_[kTurns];
  std::set<std::string> texts_;
  std::function<void(const TypedOp&)> listener_;
  bool keeps_history_ = false;
  std::vector<Link> history_;
  int64_t link_ = -1;  ///< of what is written now
  int64_t ops_ = 0, messages_ = 0;
  std::string mutated_;
  bool mutated_untyped_ = false;
};

}  // namespace usp::types
