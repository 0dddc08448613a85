#include "tensor/work_timer.h"

#include "tensor/device.h"
#include "tensor/runtime.h"

namespace usp {

WorkTimer::WorkTimer() {
  Accelerator* accelerator = Runtime::current().accelerator();
  if (accelerator == nullptr) return;
  marks_ = accelerator->make_marks();
  marks_->begin();
}

void WorkTimer::read() {
  if (unread_.empty()) return;
  marks_->read();
  for (const Piece& piece : std::exchange(unread_, {})) {
    piece.use(double(marks_->time_of(piece.end) - marks_->time_of(piece.begin)) * 1e-9);
  }
  marks_->forget();
}

}  // namespace usp
