#include "tensor/allocator.h"

#include "testing.h"

namespace usp::test {
namespace {

constexpr int64_t kKiB = 1024;

TEST_CASE("the allocator counts live and peak bytes by category, as requested") {
  Allocator allocator(Device::cpu);
  void* weights = allocator.allocate(1000, Category::weights);
  void* first = allocator.allocate(300, Category::activations);
  void* second = allocator.allocate(50, Category::activations);
  REQUIRE(allocator.live_bytes(Category::weights) == 1000);
  REQUIRE(allocator.live_bytes(Category::activations) == 350);
  REQUIRE(allocator.live_bytes(Category::optimizer) == 0);
  REQUIRE(allocator.live_bytes() == 1350);
  allocator.release(first, 300, Category::activations);
  allocator.release(weights, 1000, Category::weights);
  void* third = allocator.allocate(100, Category::activations);
  REQUIRE(allocator.live_bytes() == 150);
  REQUIRE(allocator.peak_bytes(Category::activations) == 350);
  REQUIRE(allocator.peak_bytes(Category::weights) == 1000);
  REQUIRE(allocator.peak_bytes() == 1350);
  allocator.reset_peaks();
  REQUIRE(allocator.peak_bytes(Category::weights) == 0);
  REQUIRE(allocator.peak_bytes(Category::activations) == 150);
  REQUIRE(allocator.peak_bytes() == 150);
  allocator.release(second, 50, Category::activations);
  allocator.release(third, 100, Category::activations);
  REQUIRE(allocator.live_bytes() == 0);
  REQUIRE(allocator.peak_bytes() == 150);
}

TEST_CASE("the total is of every category, live and at its peak") {
  Allocator allocator(Device::meta);
  const std::vector<std::pair<Category, int64_t>> all = {{Category::weights, 1},
                                                         {Category::gradients, 10},
                                                         {Category::optimizer, 100},
                                                         {Category::activations, 1000},
                                                         {Category::communication, 10'000},
                                                         {Category::workspace, 100'000}};
  REQUIRE(all.size() == kNumCategories);
  for (const auto& [category, bytes] : all) allocator.allocate(bytes, category);
  REQUIRE(allocator.live_bytes() == 111'111);
  REQUIRE(allocator.peak_bytes() == 111'111);
  for (const auto& [category, bytes] : all) {
    allocator.release(nullptr, bytes, category);
    REQUIRE(allocator.live_bytes() == 111'111 / (10 * bytes) * (10 * bytes));
  }
  REQUIRE(allocator.peak_bytes() == 111'111);
}

TEST_CASE("the peak of the sum is not the sum of the peaks") {
  Allocator allocator(Device::meta);
  allocator.allocate(100, Category::gradients);
  allocator.release(nullptr, 100, Category::gradients);
  allocator.allocate(80, Category::activations);
  REQUIRE(allocator.peak_bytes() == 100);
}

TEST_CASE("memory is aligned to a cache line; nothing is allocated for 0 bytes") {
  Allocator allocator(Device::cpu);
  for (int64_t bytes : {int64_t{1}, int64_t{63}, 100 * kKiB, 5000 * kKiB}) {
    void* pointer = allocator.allocate(bytes, Category::workspace);
    REQUIRE(reinterpret_cast<uintptr_t>(pointer) % 64 == 0);
    std::memset(pointer, 1, bytes);  // all of it is there
    allocator.release(pointer, bytes, Category::workspace);
  }
  const int64_t allocations = allocator.system_allocations();
  REQUIRE(allocator.allocate(0, Category::workspace) == nullptr);
  allocator.release(nullptr, 0, Category::workspace);
  REQUIRE(allocator.system_allocations() == allocations);
}

TEST_CASE("requests round up to eight size classes a doubling, and at most an eighth is wasted") {
  for (int64_t bytes :
       {1, 63, 64, 65, 511, 513, 4096, 4097, 5000, 9 * 1024, 1'000'000, 3'000'001}) {
    Allocator allocator(Device::cpu);
    void* block = allocator.allocate(bytes, Category::weights);
    const int64_t reserved = allocator.reserved_bytes();
    REQUIRE(reserved >= bytes);
    REQUIRE(reserved <= std::max<int64_t>(bytes + bytes / 8, bytes + 63));
    REQUIRE(reserved % 64 == 0);
    allocator.release(block, bytes, Category::weights);
    // Everything up to the size class finds that block; one byte more is another class.
    REQUIRE(allocator.allocate(reserved, Category::weights) == block);
    allocator.release(block, reserved, Category::weights);
    void* other = allocator.allocate(reserved + 1, Category::weights);
    REQUIRE(other != block);
    REQUIRE(allocator.system_allocations() == 2);
    allocator.release(other, reserved + 1, Category::weights);
  }
}

TEST_CASE("of the freed blocks of a size class the one at the lowest address is taken") {
  Allocator allocator(Device::cpu);
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(allocator.allocate(70 * kKiB, Category::weights));
  for (int i : {2, 0, 3, 1}) allocator.release(blocks[i], 70 * kKiB, Category::weights);
  std::sort(blocks.begin(), blocks.end());
  for (void* block : blocks) REQUIRE(allocator.allocate(70 * kKiB, Category::weights) == block);
  REQUIRE(allocator.system_allocations() == 4);
  for (void* block : blocks) allocator.release(block, 70 * kKiB, Category::weights);
}

TEST_CASE("the same requests in the same order get the same pointers") {
  OnDevice cpu;
  const auto step = [] {
    std::vector<void*> pointers;
    Random random(1);
    std::vector<Tensor> alive;
    for (int i = 0; i < 200; ++i) {
      alive.push_back(Tensor::empty({random.integer(1, 50'000)}, DType::f32));
      pointers.push_back(alive.back().address());
      if (random.integer(0, 2) == 0) alive.erase(alive.begin());
    }
    return pointers;
  };
  step();
  const std::vector<void*> second = step();
  const int64_t allocations = cpu.allocator().system_allocations();
  const int64_t reserved = cpu.allocator().reserved_bytes();
  for (int i = 0; i < 3; ++i) REQUIRE(step() == second);
  REQUIRE(cpu.allocator().system_allocations() == allocations);
  REQUIRE(cpu.allocator().reserved_bytes() == reserved);
  REQUIRE(cpu.allocator().live_bytes() == 0);
}

TEST_CASE("a tensor's bytes count under the category in force when it was made") {
  OnDevice cpu;
  Allocator& allocator = cpu.allocator();
  Tensor view;
  {
    const CategoryScope optimizer(Category::optimizer);
    const Tensor state = Tensor::empty({100}, DType::f64);
    {
      const CategoryScope gradients(Category::gradients);
      const Tensor gradient = Tensor::empty({100}, DType::bf16);
      REQUIRE(allocator.live_bytes(Category::gradients) == 200);
      view = gradient.narrow(0, 10, 5);
    }
    REQUIRE(cpu.runtime.category() == Category::optimizer);
    REQUIRE(allocator.live_bytes(Category::optimizer) == 800);
    REQUIRE(allocator.live_bytes(Category::gradients) == 200);  // the view keeps it all alive
  }
  REQUIRE(allocator.live_bytes(Category::optimizer) == 0);
  const Tensor activation = Tensor::empty({3}, DType::i32);
  REQUIRE(allocator.live_bytes(Category::activations) == 12);
  view = {};
  REQUIRE(allocator.live_bytes() == 12);
}

TEST_CASE("recorded events are the allocations and releases, in order") {
  Allocator allocator(Device::meta);
  allocator.allocate(5, Category::weights);
  allocator.record_events(true);
  allocator.allocate(7, Category::gradients);
  allocator.allocate(0, Category::gradients);
  allocator.release(nullptr, 5, Category::weights);
  allocator.record_events(false);
  allocator.allocate(9, Category::gradients);
  const auto& events = allocator.events();
  REQUIRE(events.size() == 2);
  REQUIRE(events[0].bytes == 7);
  REQUIRE(events[0].tag.category == Category::gradients);
  REQUIRE(events[1].bytes == -5);
  REQUIRE(events[1].tag.category == Category::weights);
  REQUIRE(events[0].nanoseconds <= events[1].nanoseconds);
}

TEST_CASE("on meta bytes are counted and none are taken") {
  OnDevice meta(Device::meta);
  const Tensor huge = Tensor::zeros({1 << 20, 1 << 20, 1 << 10}, DType::bf16);
  REQUIRE(huge.device() == Device::meta);
  REQUIRE(meta.allocator().live_bytes(Category::activations) == int64_t{1} << 51);
  REQUIRE(meta.allocator().reserved_bytes() == int64_t{1} << 51);  // would be
  REQUIRE(meta.allocator().system_allocations() == 0);
}

TEST_CASE("on meta blocks are reserved and reused as on the CPU") {
  Allocator cpu(Device::cpu), meta(Device::meta);
  std::mt19937_64 random(1);
  struct Live {
    void *on_cpu, *on_meta;
    int64_t bytes;
    Category category;
  };
  std::vector<Live> live;
  for (int i = 0; i < 3000; ++i) {
    if (live.size() > 20 || (!live.empty() && random() % 3 == 0)) {
      std::swap(live[random() % live.size()], live.back());
      const Live last = live.back();
      cpu.release(last.on_cpu, last.bytes, last.category);
      meta.release(last.on_meta, last.bytes, last.category);
      live.pop_back();
    } else {
      const auto bytes = static_cast<int64_t>(random() % 5000);
      const auto category = static_cast<Category>(random() % kNumCategories);
      live.push_back(
          {cpu.allocate(bytes, category), meta.allocate(bytes, category), bytes, category});
    }
    REQUIRE(meta.reserved_bytes() == cpu.reserved_bytes());
    REQUIRE(meta.reserved_workspace_bytes() == cpu.reserved_workspace_bytes());
  }
  REQUIRE(meta.reserved_bytes() > 0);
  for (const Live& block : live) cpu.release(block.on_cpu, block.bytes, block.category);
}

TEST_CASE("workspace takes no blocks of other categories, and gives them none") {
  Allocator allocator(Device::cpu);
  void* weights = allocator.allocate(kKiB, Category::weights);
  allocator.release(weights, kKiB, Category::weights);
  void* workspace = allocator.allocate(kKiB, Category::workspace);
  REQUIRE(workspace != weights);
  REQUIRE(allocator.allocate(kKiB, Category::optimizer) == weights);
  REQUIRE(allocator.reserved_bytes() == 2 * kKiB);
  REQUIRE(allocator.reserved_workspace_bytes() == kKiB);
  allocator.release(weights, kKiB, Category::optimizer);
  allocator.release(workspace, kKiB, Category::workspace);
}

#ifndef __SANITIZE_ADDRESS__  // which ends the process where the system has no memory left
TEST_CASE("where memory runs out, freed blocks are given back before an error says what is live") {
  Allocator allocator(Device::cpu);
  allocator.release(allocator.allocate(kKiB, Category::weights), kKiB, Category::weights);
  REQUIRE(allocator.reserved_bytes() == kKiB);
  check_throws<Error>([&] { allocator.allocate(int64_t{1} << 60, Category::weights); },
                      {"out of memory", std::to_string(int64_t{1} << 60), "live"});
  REQUIRE(allocator.reserved_bytes() == 0);
}
#endif

}  // namespace
}  // namespace usp::test
