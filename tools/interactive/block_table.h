#pragma once

#include "config.h"
#include "formula.h"

namespace usp {

/// A model of one layer with the sizes b, s/cp/tp, h, a, a_kv, h/a, h_ff, v and tp of a rank: what
/// a layer more adds is what this one has.
TrainConfig config_of(const Sizes& sizes, const char* dtype);

/// What the blocks of a model say of themselves, as formulas of the sizes of a rank and of the
/// bytes of attention's core: {modes: [name], attends: [name of Probabilities, of each mode],
///  batch: [{name, bytes}],                       of no block
///  saved: [{block, name, bytes, modes}],         what forward leaves for backward
///  segments: [{dtype, part, largest_of, modes}]}
/// A part is a block, the number of its segment, and a field of Footprint. Modes are meant by their
/// numbers.
Json block_table();

/// {"untied": {"embedding": formula, ...}, "tied": ...}: elements, whatever the batch.
Json parameter_table();

/// Throws Error unless this table and core_table() together say what the model does: nothing but
/// the core knows by which exchange a query meets all keys.
void check_exchanges();

}  // namespace usp
