#include "judge/todo.h"

namespace usp {

/// Which element of a matrix of `rows` x `columns`, stored row by row, a thread of the grid takes
/// in its step: its place, from 0 on; -1: none. The grid ends with a step in which no thread takes
/// any. Each 32 of its `threads` threads, numbered from 0, are a warp, whose lanes ask at the same
/// time.
int64_t element(int64_t thread, int64_t step, int64_t threads, int64_t rows, int64_t columns) {
  // TODO (about 2 lines): in a step the whole grid takes neighbors
  USP_TODO("ch09.ex7");
}

}  // namespace usp
