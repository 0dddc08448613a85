#include "train/saved.h"

#include "testing.h"

namespace usp::test {
namespace {

struct A {
  std::shared_ptr<int> memory;
};
struct B {
  std::unique_ptr<int> only;  // cannot be copied
};

TEST_CASE("every segment of a block keeps one struct, which others may read") {
  BlockSaved saved;
  saved.emplace<A>().memory = std::make_shared<int>(5);
  saved.emplace<B>().only = std::make_unique<int>(7);
  REQUIRE(*saved.get<A>().memory == 5);
  REQUIRE(*saved.get<B>().only == 7);
  const std::weak_ptr<int> memory = saved.get<A>().memory;
  {
    const B b = saved.take<B>();
    const A a = saved.take<A>();
    REQUIRE(*b.only == 7);
    REQUIRE(!memory.expired());
  }
  REQUIRE(memory.expired());
  saved.emplace<A>();
}

TEST_CASE("a block has no two segments of one type, and none that reads what nobody kept") {
  BlockSaved saved;
  check_throws<Error>([&] { saved.get<A>(); }, {"nothing saved"});
  saved.emplace<A>();
  check_throws<Error>([&] { saved.emplace<A>(); }, {"same type"});
  check_throws<Error>([&] { saved.take<B>(); }, {"nothing saved"});
  saved.take<A>();
  check_throws<Error>([&] { saved.take<A>(); }, {"nothing saved"});
}

}  // namespace
}  // namespace usp::test
