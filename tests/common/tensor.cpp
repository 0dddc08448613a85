#include "testing.h"

namespace usp::test {
namespace {

Shape shape_of(const std::vector<int64_t>& sizes) {
  switch (sizes.size()) {
    case 0:
      return {};
    case 1:
      return {sizes[0]};
    case 2:
      return {sizes[0], sizes[1]};
    case 3:
      return {sizes[0], sizes[1], sizes[2]};
    case 4:
      return {sizes[0], sizes[1], sizes[2], sizes[3]};
    default:
      return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]};
  }
}

std::vector<int64_t> random_sizes(Random& random) {
  std::vector<int64_t> sizes(random.integer(1, 4));
  for (int64_t& size : sizes) size = random.integer(1, 6);
  return sizes;
}

/// Random sizes with the same product: axes merged, axes split.
std::vector<int64_t> refactored(Random& random, std::vector<int64_t> sizes) {
  if (sizes.size() > 1 && random.integer(0, 1) == 0) {
    const int64_t axis = random.integer(0, std::ssize(sizes) - 2);
    sizes[axis] *= sizes[axis + 1];
    sizes.erase(sizes.begin() + axis + 1);
  }
  if (std::ssize(sizes) < kMaxRank) {
    const int64_t axis = random.integer(0, std::ssize(sizes) - 1);
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= sizes[axis]; ++d) {
      if (sizes[axis] % d == 0) divisors.push_back(d);
    }
    const int64_t divisor = divisors[random.integer(0, std::ssize(divisors) - 1)];
    sizes[axis] /= divisor;
    sizes.insert(sizes.begin() + axis + random.integer(0, 1), divisor);
  }
  return sizes;
}

/// Row-major coordinates of element i of a tensor of these sizes.
std::vector<int64_t> coordinates(int64_t i, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> result(sizes.size());
  for (size_t axis = sizes.size(); axis-- > 0; i /= sizes[axis]) result[axis] = i % sizes[axis];
  return result;
}

int64_t row_major(const std::vector<int64_t>& index, const std::vector<int64_t>& sizes) {
  int64_t i = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) i = i * sizes[axis] + index[axis];
  return i;
}

/// A view as a list: sizes, and for each element in row-major order its place in the storage.
struct ListView {
  std::vector<int64_t> sizes;
  Values places;

  template <class Source>
  ListView taken(std::vector<int64_t> new_sizes, const Source& source) const {
    ListView view{std::move(new_sizes), {}};
    const int64_t count = shape_of(view.sizes).numel();
    for (int64_t i = 0; i < count; ++i) {
      view.places.push_back(places[row_major(source(coordinates(i, view.sizes)), sizes)]);
    }
    return view;
  }

  /// Whether equal steps along each axis of `new_sizes` are equal steps in the storage.
  bool can_be_viewed_as(const std::vector<int64_t>& new_sizes) const {
    std::vector<double> steps(new_sizes.size());
    for (size_t axis = 0; axis < new_sizes.size(); ++axis) {
      std::vector<int64_t> unit(new_sizes.size());
      unit[axis] = 1;
      if (new_sizes[axis] > 1) steps[axis] = places[row_major(unit, new_sizes)] - places[0];
    }
    for (size_t i = 0; i < places.size(); ++i) {
      double place = places[0];
      const auto index = coordinates(static_cast<int64_t>(i), new_sizes);
      for (size_t axis = 0; axis < steps.size(); ++axis) place += steps[axis] * double(index[axis]);
      if (place != places[i]) return false;
    }
    return true;
  }
};

TEST_CASE("random chains of view, narrow and transposed address the elements they should") {
  const OnDevice cpu;
  Random random(1);
  int refused = 0, strided_views = 0;
  for (int chain = 0; chain < 400; ++chain) {
    ListView list{random_sizes(random), {}};
    const int64_t numel = shape_of(list.sizes).numel();
    for (int64_t i = 0; i < numel; ++i) list.places.push_back(double(i));
    Tensor tensor = Tensor::from_host(list.places, shape_of(list.sizes), DType::f64);
    for (int step = 0; step < 6; ++step) {
      const int64_t kind = random.integer(0, 2);
      if (kind == 0) {
        const int64_t axis = random.integer(0, std::ssize(list.sizes) - 1);
        const int64_t offset = random.integer(0, list.sizes[axis] - 1);
        const int64_t length = random.integer(1, list.sizes[axis] - offset);
        std::vector<int64_t> sizes = list.sizes;
        sizes[axis] = length;
        list = list.taken(sizes, [&](std::vector<int64_t> index) {
          index[axis] += offset;
          return index;
        });
        const bool from_the_end = random.integer(0, 1) == 1;
        const int64_t named = from_the_end ? axis - tensor.rank() : axis;
        tensor = tensor.narrow(static_cast<int>(named), offset, length);
      } else if (kind == 1 && list.sizes.size() >= 2) {
        std::vector<int64_t> sizes = list.sizes;
        std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
        list = list.taken(sizes, [&](std::vector<int64_t> index) {
          std::swap(index[index.size() - 1], index[index.size() - 2]);
          return index;
        });
        tensor = tensor.transposed();
      } else {
        const std::vector<int64_t> sizes = refactored(random, list.sizes);
        const Shape shape = shape_of(sizes);
        CAPTURE(tensor.shape().to_string(), shape.to_string());
        if (!list.can_be_viewed_as(sizes)) {
          ++refused;
          REQUIRE_THROWS_AS(tensor.view(shape), Error);
          continue;
        }
        strided_views += !tensor.contiguous();
        tensor = tensor.view(shape);
        list.sizes = sizes;
      }
      REQUIRE(tensor.shape() == shape_of(list.sizes));
      REQUIRE(tensor.items() == list.places);
      REQUIRE(tensor.item(tensor.numel() / 2) == list.places[list.places.size() / 2]);
      REQUIRE(tensor.to_contiguous().items() == list.places);
      REQUIRE(tensor.to_contiguous().contiguous());
    }
  }
  REQUIRE(refused > 10);  // both answers were asked for
  REQUIRE(strided_views > 10);
}

TEST_CASE("a view shares its elements with the tensor it was taken from") {
  const OnDevice cpu;
  Tensor x = Tensor::zeros({3, 4}, DType::f32);
  x.narrow(1, 1, 2).assign(Values{1, 2, 3, 4, 5, 6});
  REQUIRE(x.items() == Values{0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0});
  x.view({2, 2, 3}).narrow(0, 1, 1).assign(Values{-1, -2, -3, -4, -5, -6});
  REQUIRE(x.item(6) == -1);
  Tensor copy = x;
  copy.assign(Values(12, 9.0));
  REQUIRE(x.item(0) == 9);
}

TEST_CASE("a view that would change the number of elements or leave the tensor is refused") {
  const OnDevice cpu;
  const Tensor x = Tensor::zeros({4, 6}, DType::f64);
  check_throws<Error>([&] { x.view({5, 5}); }, {"[4, 6]", "[5, 5]"});
  check_throws<Error>([&] { x.narrow(0, 3, 2); }, {"narrow", "offset 3", "length 2", "[4, 6]"});
  check_throws<Error>([&] { x.narrow(2, 0, 1); }, {"axis 2"});
  check_throws<Error>([&] { x.narrow(0, -1, 1); }, {"offset -1"});
  check_throws<Error>([&] { x.narrow(1, 0, 3).view({12}); }, {"needs a copy"});
  check_throws<Error>([&] { x.view({24}).transposed(); }, {"transposed", "[24]"});
  check_throws<Error>([&] { x.data<float>(); }, {"f64", "f32"});
  check_throws<Error>([&] { Tensor(x).assign(Values(5)); }, {"5 values", "[4, 6]"});
  check_throws<Error>([&] { x.item(24); }, {"item(24)"});
}

TEST_CASE("an empty tensor has no elements, whatever its shape") {
  const OnDevice cpu;
  const Tensor x = Tensor::zeros({3, 0, 5}, DType::f32);
  REQUIRE(x.numel() == 0);
  REQUIRE(x.items().empty());
  REQUIRE(x.view({0, 7}).shape() == Shape{0, 7});
  REQUIRE(x.transposed().to_contiguous().shape() == Shape{3, 5, 0});
  REQUIRE(Tensor::zeros({0, 6}, DType::f32).view({0, 2, 3}).contiguous());
  REQUIRE(Tensor::zeros({4, 5}, DType::f32).narrow(0, 4, 0).items().empty());
}

TEST_CASE("adjacent joins parts that lie side by side and refuses all others") {
  const OnDevice cpu;
  Random random(2);
  const Tensor whole = random.tensor({10, 3});
  const Tensor parts[] = {whole.narrow(0, 1, 2), whole.narrow(0, 3, 4), whole.narrow(0, 7, 1)};
  const Tensor joined = adjacent(parts);
  REQUIRE(same_bits(joined, whole.narrow(0, 1, 7)));
  REQUIRE(joined.address() == parts[0].address());

  const auto refused = [](const Tensor& a, const Tensor& b) {
    const Tensor pair[] = {a, b};
    REQUIRE_THROWS_AS(adjacent(pair), Error);
  };
  refused(parts[0], parts[2]);                            // a gap
  refused(parts[1], parts[0]);                            // the wrong order
  refused(parts[0], random.tensor({2, 3}));               // another storage
  refused(parts[0], whole.narrow(0, 3, 4).view({12}));    // another rank
  refused(parts[0], whole.narrow(0, 3, 4).view({6, 2}));  // other columns
  refused(whole.narrow(0, 0, 2).narrow(1, 0, 2), whole.narrow(0, 2, 2).narrow(1, 0, 2));
  check_throws<Error>([] { adjacent({}); }, {"no tensors"});
}

TEST_CASE("values come from the host rounded to the tensor's dtype and go back unchanged") {
  const OnDevice cpu;
  const Values values = {0.1, -1e-3, 3e5, 1.0 / 3};
  REQUIRE(Tensor::from_host(values, {2, 2}, DType::f64).items() == values);
  const Values f32 = Tensor::from_host(values, {4}, DType::f32).items();
  for (int i = 0; i < 4; ++i) REQUIRE(f32[i] == double(float(values[i])));
  const std::vector<int32_t> tokens = {7, -1, 2'000'000'000};
  REQUIRE(Tensor::from_host(tokens, {3}).items() == Values{7, -1, 2e9});
  check_throws<Error>([&] { Tensor::from_host(tokens, {2}); }, {"3 values", "[2]"});
  check_throws<Error>([&] { Tensor::from_host(values, {5}, DType::f32); }, {"4 values", "[5]"});
}

TEST_CASE("item reads neither from meta nor inside a training step") {
  {
    const OnDevice cpu;
    const Tensor x = Tensor::zeros({2}, DType::f32);
    REQUIRE(x.item(1) == 0);
    {
      const NoHostReads step;
      check_throws<Error>([&] { x.item(); }, {"inside a training step"});
      check_throws<Error>([&] { x.items(); }, {"inside a training step"});
      { const NoHostReads nested; }
      REQUIRE_THROWS_AS(x.item(), Error);
    }
    REQUIRE(x.item() == 0);
  }
  const OnDevice meta(Device::meta);
  const Tensor x = Tensor::zeros({2}, DType::f32);
  REQUIRE(x.address() == nullptr);
  check_throws<Error>([&] { x.item(); }, {"meta"});
  check_throws<Error>([&] { x.items(); }, {"meta"});
  check_throws<Error>([&] { Tensor(x).assign(Values{1, 2}); }, {"meta"});
}

TEST_CASE("making a tensor needs a runtime; a tensor outlives it") {
  check_throws<Error>([] { Tensor::zeros({1}, DType::f32); }, {"no Runtime"});
  Tensor survivor;
  {
    const OnDevice cpu;
    survivor = Tensor::from_host(Values{4, 5, 6}, {3}, DType::f64).narrow(0, 1, 2);
  }
  REQUIRE(survivor.data<double>()[0] == 5);
  REQUIRE(survivor.device() == Device::cpu);
}

TEST_CASE("a shape has at most five axes, none of them negative") {
  REQUIRE(Shape{}.numel() == 1);
  REQUIRE(Shape{2, 3, 4}.numel() == 24);
  REQUIRE(Shape{2, 0}.numel() == 0);
  REQUIRE(Shape{2, 3}.to_string() == "[2, 3]");
  REQUIRE(Shape{2, 3} == Shape{2, 3});
  REQUIRE(!(Shape{2, 3} == Shape{2, 3, 1}));
  REQUIRE(!(Shape{2, 3} == Shape{3, 2}));
  check_throws<Error>([] { (void)Shape{1, 2, 3, 4, 5, 6}; }, {"at most 5", "6"});
  check_throws<Error>([] { (void)Shape{2, -1}; }, {"negative", "[2, -1]"});
}

TEST_CASE("counts are the one thing that a training step may read") {
  {
    const OnDevice cpu;
    const Tensor counts = Tensor::from_host(std::vector<int32_t>{4, 0, 7}, {3});
    const NoHostReads step;
    REQUIRE(counts.counts() == std::vector<int64_t>{4, 0, 7});
    check_throws<Error>([&] { counts.items(); }, {"training step"});
    check_throws<Error>([&] { Tensor::zeros({2}, DType::f32).counts(); }, {"f32"});
  }
  const OnDevice meta(Device::meta);
  check_throws<Error>([&] { Tensor::zeros({2}, DType::i32).counts(); }, {"meta"});
}

}  // namespace
}  // namespace usp::test
