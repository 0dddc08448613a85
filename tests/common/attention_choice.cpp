#include "run/attention_choice.h"

#include "testing.h"

/// By what attention a GPU computes where no flag says it.
namespace usp::test {
namespace {

/// A layer of `1B` with a sample of 4,096 tokens: 32 heads of 64 channels, of which four share a kv
/// head.
AttentionShape billion(DType dtype = DType::bf16) {
  return {.scores = 32 * 4096.0 * 4096.0, .head_dim = 64, .batches = 4, .dtype = dtype};
}

TEST_CASE("a layer of 1B takes on paper what the list of predictions says") {
  constexpr double kLayers = 16;
  // Of a step of 195 ms with naive attention and 448 ms with blockwise, what attention takes.
  const double naive = 1e3 * kLayers * naive_attention_seconds(billion());
  const double blockwise = 1e3 * kLayers * blockwise_attention_seconds(billion());
  CAPTURE(naive, blockwise);
  REQUIRE(naive > 85);
  REQUIRE(naive < 110);
  REQUIRE(blockwise > 345);
  REQUIRE(blockwise < 365);
}

TEST_CASE("a GPU takes the faster attention up to the last byte that naive attention needs") {
  const AttentionChoice fits = choose_attention(billion(), 20e9, 20e9);
  REQUIRE(fits.attention == "naive");
  REQUIRE(fits.why == "estimated to be 3.6 times as fast as blockwise at this shape");
  const AttentionChoice lacks = choose_attention(billion(), 20e9, 20e9 - 1);
  REQUIRE(lacks.attention == "blockwise");
  REQUIRE(lacks.why ==
          "naive is estimated to be 3.6 times as fast at this shape, but needs 18.6 GiB of memory, "
          "and 18.6 GiB are available");
}

TEST_CASE("which attention is faster depends on the width of heads, the dtype and the size") {
  const auto chosen = [](const AttentionShape& shape) {
    return choose_attention(shape, /*bytes_of_naive=*/1, /*available_bytes=*/1).attention;
  };
  // Narrow heads have fewer operations for each score, which naive attention writes all the same.
  AttentionShape narrow = billion();
  narrow.head_dim = 16;
  REQUIRE(chosen(narrow) == "blockwise");
  // Twice the bytes, and products without tensor cores.
  narrow.head_dim = 32;
  REQUIRE(chosen(narrow) == "naive");
  narrow.dtype = DType::f32;
  REQUIRE(chosen(narrow) == "blockwise");
  for (DType dtype : {DType::f32, DType::f64}) REQUIRE(chosen(billion(dtype)) == "naive");
  // Naive attention starts a product for each sample.
  AttentionShape small = billion();
  small.scores = 8 * 4 * 128.0 * 128.0;
  small.batches = 8 * 4;
  REQUIRE(chosen(small) == "blockwise");
}

TEST_CASE("fused kernels are taken whatever the estimate says of those without tensor cores") {
  AttentionShape shape = billion();
  REQUIRE(choose_attention(shape, 1, 1).attention == "naive");
  shape.fused = true;
  const AttentionChoice fused = choose_attention(shape, 1, 1);
  REQUIRE(fused.attention == "blockwise");
  REQUIRE(fused.why == "this GPU has fused kernels for it, on tensor cores");
}

}  // namespace
}  // namespace usp::test
