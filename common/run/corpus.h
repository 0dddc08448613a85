#pragma once

namespace usp {

/// The text that is trained on where --data names none.
const char* corpus_path();

}  // namespace usp
