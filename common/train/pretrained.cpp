#include "train/pretrained.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "base/json_reader.h"
#include "base/sha256.h"
#include "files/safetensors.h"

namespace usp {

namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr int64_t kChunk = int64_t{1} << 20;  // elements

/// Parts of names by which a kind of model differs from LlamaForCausalLM and, where these have
/// experts, from DeepseekV3ForCausalLM: these two have the names of parameters here.
struct OtherName {
  std::string_view model_type, here, there;
};

constexpr OtherName kOtherNames[] = {
    {"mixtral", ".mlp.", ".block_sparse_moe."},
    {"mixtral", ".gate_proj.", ".w1."},
    {"mixtral", ".down_proj.", ".w2."},
    {"mixtral", ".up_proj.", ".w3."},
};

/// Calls add(name, shape) for the weights of a layer's experts, with a bias of the choice that ends
/// the name itself.
void add_experts(const HfConfig& config,
                 const std::function<void(const std::string&, const Shape&)>& add) {
  const HfExperts& experts = config.experts;
  const int64_t H = config.hidden_size, E = experts.num_experts;
  const auto add_expert = [&](const std::string& name, int64_t width) {
    add(name + ".gate_proj.weight", {width, H});
    add(name + ".up_proj.weight", {width, H});
    add(name + ".down_proj.weight", {H, width});
  };
  add("mlp.gate.weight", {E, H});
  if (experts.choice_bias) add("mlp.gate.e_score_correction_bias", {E});
  for (int64_t expert = 0; expert < E; ++expert) {
    add_expert(fmt::format("mlp.experts.{}", expert), experts.moe_ffn_hidden_size);
  }
  const int64_t shared = experts.num_shared_experts * experts.moe_ffn_hidden_size;
  if (shared > 0) add_expert("mlp.shared_experts", shared);
}

/// Calls add(name, shape) for the weights of a layer's attention.
void add_attention(const HfConfig& config,
                   const std::function<void(const std::string&, const Shape&)>& add) {
  const HfLatentAttention& latent = config.latent;
  const int64_t H = config.hidden_size, N = config.num_heads, C = latent.kv_lora_rank;
  if (C == 0) {
    add("self_attn.q_proj.weight", {config.q_size(), H});
    add("self_attn.k_proj.weight", {config.kv_size(), H});
    add("self_attn.v_proj.weight", {config.kv_size(), H});
    add("self_attn.o_proj.weight", {H, config.q_size()});
    return;
  }
  if (const int64_t Q = latent.q_lora_rank; Q > 0) {
    add("self_attn.q_a_proj.weight", {Q, H});
    add("self_attn.q_a_layernorm.weight", {Q});
    add("self_attn.q_b_proj.weight", {config.q_size(), Q});
  } else {
    add("self_attn.q_proj.weight", {config.q_size(), H});
  }
  add("self_attn.kv_a_proj_with_mqa.weight", {C + latent.qk_rope_head_dim, H});
  add("self_attn.kv_a_layernorm.weight", {C});
  add("self_attn.kv_b_proj.weight", {N * (latent.qk_nope_head_dim + latent.v_head_dim), C});
  add("self_attn.o_proj.weight", {H, N * latent.v_head_dim});
}

/// Names and shapes of a model's weights, as its directory calls them.
std::map<std::string, Shape> expected_weights(const HfConfig& config) {
  const int64_t H = config.hidden_size, F = config.ffn_hidden_size, V = config.vocab_size;
  std::map<std::string, Shape> weights{{kEmbedding, {V, H}}, {"model.norm.weight", {H}}};
  if (!config.tie_word_embeddings) weights[kHead] = {V, H};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const auto add = [&](const std::string& name, const Shape& shape) {
      const std::string whole = fmt::format("model.layers.{}.{}", layer, name);
      weights[stored_name(config.model_type, whole)] = shape;
    };
    add("input_layernorm.weight", {H});
    add_attention(config, add);
    add("post_attention_layernorm.weight", {H});
    if (config.experts.num_experts > 0 && layer >= config.experts.first_dense_layers) {
      add_experts(config, add);
      continue;
    }
    add("mlp.gate_proj.weight", {F, H});
    add("mlp.up_proj.weight", {F, H});
    add("mlp.down_proj.weight", {H, F});
  }
  return weights;
}

/// Throws unless the elements are what weights are: whole numbers and truth values belong to
/// packed, quantized or unrelated tensors, whatever their names.
void check_is_weight(const StoredTensor& tensor) {
  for (ElementType type :
       {ElementType::F64, ElementType::F32, ElementType::F16, ElementType::BF16}) {
    if (tensor.type == type) return;
  }
  fail(
      "{}: tensor {} is {}, and weights must be F32, BF16, F16 or F64; convert the model to one of "
      "them first",
      tensor.file, in_quotes(tensor.name), name(tensor.type));
}

/// "a, b, c and 12 more"
std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::vector<std::string> shown;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) shown.push_back(in_quotes(names[i]));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

/// "[3, 5]" of a row-major index.
std::string position(const StoredTensor& tensor, int64_t index) {
  std::vector<int64_t> position(tensor.shape.size());
  for (size_t axis = position.size(); axis-- > 0;) {
    position[axis] = index % tensor.shape[axis];
    index /= tensor.shape[axis];
  }
  return fmt::format("[{}]", fmt::join(position, ", "));
}

/// Throws unless a head that is stored beside the embedding it is tied to says the same.
void check_tied(const StoredTensor& embedding, const StoredTensor& head) {
  std::vector<double> a, b;
  for (int64_t begin = 0; begin < embedding.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, embedding.numel() - begin);
    a.resize(count);
    b.resize(count);
    embedding.read(begin, a);
    head.read(begin, b);
    const auto [x, y] = std::ranges::mismatch(a, b);
    if (x == a.end()) continue;
    usage_error(
        "{}: {} differs from {} at {} ({} and {}), but config.json says "
        "tie_word_embeddings=true; remove one, or say false",
        head.file, kHead, kEmbedding, position(head, begin + (x - a.begin())), *y, *x);
  }
}

/// Whether the run's dtype holds the value as a finite number.
bool representable(double value, DType dtype) {
  const double largest = dtype == DType::f64   ? std::numeric_limits<double>::max()
                         : dtype == DType::f32 ? std::numeric_limits<float>::max()
                                               : 0x1.FEp127;
  return std::abs(value) <= largest;  // false for NaN
}

/// In which row of a directory's weight a row of ours lies. Rotated channels come last, in a head
/// of q_proj or q_b_proj and behind the latent in kv_a_proj_with_mqa; there pairs may be
/// neighbors.
struct StoredRows {
  int64_t period = 1;   ///< rows of a head, or of all
  int64_t rotated = 0;  ///< of these, those that lie elsewhere; the last
  StoredRows() = default;
  StoredRows(const HfConfig& config, const std::string& name) {
    const HfLatentAttention& latent = config.latent;
    if (!latent.rope_interleave) return;
    const bool keys = name.ends_with("self_attn.kv_a_proj_with_mqa.weight");
    const bool queries =
        name.ends_with("self_attn.q_proj.weight") || name.ends_with("self_attn.q_b_proj.weight");
    if (!keys && !queries) return;
    rotated = latent.qk_rope_head_dim;
    period = rotated + (keys ? latent.kv_lora_rank : latent.qk_nope_head_dim);
  }

  int64_t operator()(int64_t row) const {
    const int64_t channel = row % period - (period - rotated), half = rotated / 2;
    if (channel < 0 || rotated == 0) return row;
    const int64_t stored = channel < half ? 2 * channel : 2 * (channel - half) + 1;
    return row - channel + stored;
  }
};

/// A parameter's local part, as runs of elements that lie side by side in the whole weight.
class LocalPart {
 public:
  LocalPart(const Parameter& parameter, const StoredRows& rows)
      : parameter_(parameter), shape_(parameter.local_shape()), rows_(rows) {
    const int last_cut = rows.rotated > 0 ? 1 : 0;  // rows that lie elsewhere end a run
    for (int axis = shape_.rank() - 1; axis >= last_cut; --axis) {
      run_ *= shape_[axis];
      if (shape_[axis] != parameter.global_shape[axis]) break;
    }
  }

  /// Elements [begin, begin + values.size()) of the flattened part.
  void read(const StoredTensor& tensor, int64_t begin, std::span<double> values,
            DType dtype) const {
    while (!values.empty()) {
      const int64_t count = std::min<int64_t>(std::ssize(values), run_ - begin % run_);
      const int64_t index = stored_index(parameter_.global_index(begin, shape_));
      tensor.read(index, values.first(count));
      for (int64_t i = 0; i < count; ++i) {
        if (representable(values[i], dtype)) continue;
        fail("{}: tensor {}: element {} at {} is {}, which is no finite number in {}", tensor.file,
             in_quotes(tensor.name), index + i, position(tensor, index + i), values[i],
             name(dtype));
      }
      begin += count;
      values = values.subspan(count);
    }
  }

 private:
  /// In the directory's weight, of an element of the whole weight.
  int64_t stored_index(int64_t index) const {
    if (rows_.rotated == 0) return index;
    const int64_t width = parameter_.global_shape[1];
    return rows_(index / width) * width + index % width;
  }

  const Parameter& parameter_;
  Shape shape_;
  StoredRows rows_;
  int64_t run_ = 1;
};

void load(Parameter& parameter, const StoredTensor& tensor, const StoredRows& rows) {
  const LocalPart part(parameter, rows);
  const Shard& shard = parameter.shard;
  const auto fill = [&](Tensor target, int64_t first) {
    std::vector<double> values;
    for (int64_t begin = 0; begin < target.numel(); begin += kChunk) {
      values.resize(std::min(kChunk, target.numel() - begin));
      part.read(tensor, first + begin, values, shard.value.dtype());
      target.narrow(0, begin, std::ssize(values)).assign(values);
    }
  };
  if (parameter.value.defined()) {
    fill(parameter.value.view({parameter.value.numel()}), 0);
  } else {
    fill(shard.value, shard.begin);
  }
  // Masters keep the digits that bf16 drops.
  if (shard.value.dtype() != shard.master.dtype()) fill(shard.master, shard.begin);
  ++parameter.version;
}

}  // namespace

namespace {

/// Whether `name` is of a layer behind the model's own, which predicts the token after the next.
bool in_predicting_layer(const HfConfig& config, const std::string& name) {
  for (int64_t i = 0; i < config.predicting_layers; ++i) {
    if (name.starts_with(fmt::format("model.layers.{}.", config.num_layers + i))) return true;
  }
  return false;
}

void compare_weights(const std::string& directory, const HfConfig& config) {
  const TensorCollection weights(directory);
  const std::map<std::string, Shape> expected = expected_weights(config);
  std::vector<std::string> missing, surplus;
  for (const auto& [name, shape] : expected) {
    if (weights.find(name) == nullptr) missing.push_back(name);
  }
  const bool both = config.tie_word_embeddings && weights.find(kHead) != nullptr;
  for (const auto& [name, tensor] : weights.tensors()) {
    const bool known = expected.contains(name) || name.ends_with("rotary_emb.inv_freq") ||
                       in_predicting_layer(config, name) || tensor->numel() == 0;
    if (!known && !(both && name == kHead)) surplus.push_back(name);
  }
  if (!missing.empty()) {
    usage_error("{}: {} of the {} weights that config.json asks for are missing: {}",
                weights.path(), missing.size(), expected.size(), list_names(missing));
  }
  if (!surplus.empty()) {
    usage_error("{}: {} tensors have no place in the model of config.json: {}", weights.path(),
                surplus.size(), list_names(surplus));
  }
  for (const auto& [name, shape] : expected) {
    check_is_weight(weights.get(name));
    weights.get(name).check_shape(shape);
  }
  if (both) {
    check_is_weight(weights.get(kHead));
    weights.get(kHead).check_shape(expected.at(kEmbedding));
    check_tied(weights.get(kEmbedding), weights.get(kHead));
  }
}

}  // namespace

std::string stored_name(std::string_view model_type, const std::string& name) {
  std::string stored = name;
  for (const OtherName& other : kOtherNames) {
    const size_t at = stored.find(other.here);
    if (other.model_type != model_type || at == std::string::npos) continue;
    stored.replace(at, other.here.size(), other.there);
  }
  return stored;
}

void check_pretrained(const std::string& directory, const HfConfig& config) {
  try {
    compare_weights(directory, config);
  } catch (const Error& error) {  // of the files: another model has to be given
    usage_error("model={}: {}", directory, error.what());
  }
}

std::string digest_of_pretrained(const std::string& directory) {
  constexpr size_t kSample = 4096;  // bytes
  const TensorCollection weights(directory);
  std::string all;
  for (const auto& [tensor_name, tensor] : weights.tensors()) {
    const std::span<const std::byte> bytes = tensor->bytes;
    const size_t size = std::min(kSample, bytes.size());
    all += fmt::format("{} {} {}\n", tensor_name, name(tensor->type), tensor->shape_text());
    for (const size_t begin : {size_t{0}, (bytes.size() - size) / 2, bytes.size() - size}) {
      all.append(reinterpret_cast<const char*>(bytes.data()) + begin, size);
    }
  }
  return sha256(std::as_bytes(std::span(all)));
}

void load_pretrained(ParameterList& parameters, const std::string& directory,
                     const std::vector<Parameter*>& buffers) {
  const HfConfig config = read_hf_config(directory);
  const TensorCollection weights(directory);
  const auto read = [&](Parameter& parameter, const StoredTensor& tensor) {
    tensor.check_shape(parameter.global_shape);
    if (parameter.shard.value.device() == Device::meta) return;
    load(parameter, tensor, StoredRows(config, parameter.name));
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    read(parameters[i], weights.get(stored_name(config.model_type, parameters[i].name)));
  }
  for (Parameter* buffer : buffers) {
    const StoredTensor* tensor = weights.find(stored_name(config.model_type, buffer->name));
    if (tensor != nullptr) read(*buffer, *tensor);
  }
}

}  // namespace usp
