#include "plan/schedule_run.h"

#include <algorithm>
#include <sstream>

#include "cairn/core/error.h"
#include "cairn/nn/sequential.h"
#include "plan/block_meter.h"

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
    if (part.results) {
      x = run_selective(all->blocks[part.begin], x, part.results);
    } else if (part.offloaded) {
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

class ScheduleText {
 public:
  explicit ScheduleText(const Schedule& schedule) {
    write(schedule);
    for (std::size_t i = 0; i < sets_.size(); ++i) {
      out_ << (i == 0 ? " (" : "; ") << letter(i) << ":";
      for (std::size_t k = 0; k < sets_[i]->size(); ++k) {
        const SegmentOperation& operation = (*sets_[i])[k];
        out_ << (k == 0 ? " " : ", ") << operation.name << ' ' << operation.occurrence;
      }
    }
    if (!sets_.empty()) out_ << ')';
  }
  std::string str() const { return out_.str(); }

 private:
  void write(const Schedule& schedule) {
    for (std::size_t i = 0; i < schedule.size(); ++i) {
      if (i > 0) out_ << ' ';
      write(schedule[i]);
    }
  }

  void write(const SchedulePart& part) {
    if (part.results) {
      out_ << '[' << part.begin << ']';
      if (!part.results->empty()) out_ << letter(number_of(part.results));
    } else if (part.offloaded) {
      out_ << '(' << part.begin << ')';
    } else if (part.inner.empty()) {
      out_ << part.begin;
    } else {
      out_ << '[';
      write(part.inner);
      out_ << ']';
    }
  }

  std::size_t number_of(const KeptResults& results) {
    const auto known = std::find_if(sets_.begin(), sets_.end(),
                                    [&](const KeptResults& set) { return *set == *results; });
    const auto number = static_cast<std::size_t>(known - sets_.begin());
    if (known == sets_.end()) sets_.push_back(results);
    return number;
  }

  static std::string letter(std::size_t number) {
    return static_cast<char>('a' + number % 26) + (number < 26 ? "" : std::to_string(number / 26));
  }

  std::ostringstream out_;
  std::vector<KeptResults> sets_;  // in order of their first use
};

}  // namespace

Tensor run_schedule(const std::vector<Segment>& blocks, const Schedule& schedule,
                    const std::shared_ptr<Offload>& offload, const Tensor& x) {
  const auto all =
      std::make_shared<const ScheduledBlocks>(ScheduledBlocks{blocks, schedule, offload});
  return run_parts(all, all->schedule, x);
}

std::string schedule_text(const Schedule& schedule) {
  return ScheduleText(schedule).str();
}

std::vector<Segment> modules_of(nn::Sequential& model) {
  std::vector<Segment> blocks;
  for (std::size_t i = 0; i < model.size(); ++i) {
    blocks.push_back([&module = model.at(i)](const Tensor& x) { return module(x); });
  }
  return blocks;
}

}  // namespace cairn::checkpointing
