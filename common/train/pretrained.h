#pragma once

#include <string>
#include <vector>

#include "files/hf_config.h"
#include "train/parameter.h"

namespace usp {

/// What a model directory of this kind calls the parameter or buffer of this name.
std::string stored_name(std::string_view model_type, const std::string& name);

/// Compares the names and shapes of a model directory's weights (model.safetensors, or
/// model.safetensors.index.json and the files it names) with what a model of this config has,
/// before anything is allocated. Throws UsageError that lists the names that are missing or too
/// many, or gives both shapes, or says where a stored lm_head.weight differs from the embedding
/// although config.json ties the two. Older models' `rotary_emb.inv_freq`, which RoPE's settings
/// replace, a DeepSeek-V3's layers for multi-token prediction, and tensors without elements are
/// passed over.
void check_pretrained(const std::string& directory, const HfConfig& config);

/// A digest that two directories with other weights do not share in practice: of each tensor's
/// name, dtype and shape, and of some bytes from its beginning, middle and end.
std::string digest_of_pretrained(const std::string& directory);

/// Overwrites the parameters' values, and their master weights, with the weights of a model
/// directory, converted to the run's dtype. A rank reads its own slices alone, and rows for RoPE's
/// channels from where the directory has them. On meta it only compares names and shapes. Of
/// `buffers`, those that the directory has. Throws Error for a weight that is missing, has another
/// shape, or holds a value that is not finite in the run's dtype; the message names the element.
void load_pretrained(ParameterList& parameters, const std::string& directory,
                     const std::vector<Parameter*>& buffers = {});

}  // namespace usp
