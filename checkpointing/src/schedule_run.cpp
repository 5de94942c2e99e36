#include "schedule_run.h"

#include <sstream>

#include "block_meter.h"
#include "cairn/core/error.h"
#include "cairn/nn/sequential.h"

namespace cairn::checkpointing {

namespace {

struct ScheduledBlocks {
  std::vector<Segment> blocks;
  Schedule schedule;
  std::shared_ptr<Offload> offload;
};

Tensor run_parts(const std::shared_ptr<const ScheduledBlocks>& all, const Schedule& schedule,
                 Tensor x) {
  for (const SchedulePart& part : schedule) {
    if (part.offloaded) {
      x = run_offloaded(all->blocks[part.begin], x, *all->offload);
    } else if (part.inner.empty()) {
      x = all->blocks[part.begin](x);
    } else {
      x = checkpoint(
          [all, inner = &part.inner](const Tensor& y) { return run_parts(all, *inner, y); }, x);
    }
  }
  return x;
}

void write_parts(std::ostream& out, const Schedule& schedule) {
  for (std::size_t i = 0; i < schedule.size(); ++i) {
    if (i > 0) out << ' ';
    if (schedule[i].offloaded) {
      out << '(' << schedule[i].begin << ')';
    } else if (schedule[i].inner.empty()) {
      out << schedule[i].begin;
    } else {
      out << '[';
      write_parts(out, schedule[i].inner);
      out << ']';
    }
  }
}

}  // namespace

Tensor run_schedule(const std::vector<Segment>& blocks, const Schedule& schedule,
                    const std::shared_ptr<Offload>& offload, const Tensor& x) {
  const auto all =
      std::make_shared<const ScheduledBlocks>(ScheduledBlocks{blocks, schedule, offload});
  return run_parts(all, all->schedule, x);
}

std::string schedule_text(const Schedule& schedule) {
  std::ostringstream out;
  write_parts(out, schedule);
  return out.str();
}

std::vector<Segment> modules_of(nn::Sequential& model) {
  std::vector<Segment> blocks;
  for (std::size_t i = 0; i < model.size(); ++i) {
    blocks.push_back([&module = model.at(i)](const Tensor& x) { return module(x); });
  }
  return blocks;
}

}  // namespace cairn::checkpointing
