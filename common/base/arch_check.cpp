// Built for the baseline instruction set, unlike the rest: it must run on every CPU.

#include <unistd.h>

#include <cstdio>

namespace {

/// Runs before any other code of the program. Without it a binary built on a newer CPU would die of
/// an illegal instruction and say nothing.
__attribute__((constructor(101))) void check_instruction_sets() {
#if defined(__x86_64__)
  const char* missing = nullptr;
#define USP_NEED(set) \
  if (!__builtin_cpu_supports(#set)) missing = #set;
  __builtin_cpu_init();
  USP_NEEDED_INSTRUCTION_SETS
#undef USP_NEED
  if (missing == nullptr) return;
  std::fprintf(stderr,
               "error: this program was built for a CPU with %s, which this one lacks; build it "
               "here, or with -DUSP_ARCH=x86-64-v3 for any CPU since about 2013\n",
               missing);
  _exit(1);
#endif
}

}  // namespace
