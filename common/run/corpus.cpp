#include "run/corpus.h"

namespace usp {

// In a file of its own, because the path is another one in each checkout.
const char* corpus_path() { return USP_CORPUS; }

}  // namespace usp
