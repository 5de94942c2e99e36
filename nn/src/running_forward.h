// Which model's forward runs in this thread: layers inside of it must be its children.
#pragma once

namespace cairn::nn {

class Module;

struct RunningForward {
  const Module* outermost = nullptr;
  bool all_are_shown = false;  // summary() runs it: every layer must have its row
};
RunningForward& running_forward();

}  // namespace cairn::nn
