#include "base/machine.h"
#include "comm/launch.h"

namespace usp {

int run_alone_main(int (*body)(const Communicator&, int, char**), int argc, char** argv) {
  return run_guarded(
      [&] {
        settle_threads(/*ranks=*/1, /*speak=*/true);
        DryEngine engine(/*rank=*/0, /*size=*/1);
        return body(Communicator::world(engine), argc, argv);
      },
      /*speak=*/true);
}

}  // namespace usp
