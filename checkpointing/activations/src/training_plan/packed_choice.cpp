#include "training_plan/packed_choice.h"

#include <memory>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "cairn/core/packer.h"

namespace cairn::checkpointing {

namespace {

using core::Packer;
using core::Unpacker;

/// Every number of a choice, to be written or read: f(value).
template <class Choice, class F>
void for_each_number(Choice& choice, const F& f) {
  f(choice.precision.half);
  f(choice.precision.autocast);
  f(choice.precision.half_weights);
  f(choice.micro_batch);
  f(choice.dimension);
  f(choice.micro_batches);
  f(choice.compact_state);
  f(choice.splits_batch_norms);
  f(choice.rounds_moments);
  f(choice.fused_loss);
  f(choice.balanced_loss);
  f(choice.recomputes);
  f(choice.offloads);
  f(choice.sharding);
  f(choice.shard_within);
  f(choice.states_in_files);
  f(choice.states_on_host);
  f(choice.fits);
  f(choice.peak_bytes);
  f(choice.beside);
  f(choice.weights);
  f(choice.gradients);
  f(choice.optimizer_state);
  f(choice.other);
  f(choice.activations);
  f(choice.in_files);
  f(choice.on_host);
}
template <class Choice, class F>
void for_each_time(Choice& choice, const F& f) {
  f(choice.seconds);
  f(choice.update_seconds);
  f(choice.exchange_seconds);
}

void write(Packer& packer, const Schedule& schedule) {
  packer.number(schedule.size());
  for (const SchedulePart& part : schedule) {
    packer.number(part.begin).number(part.end).number(part.offloaded ? 1 : 0);
    packer.number(part.results ? 1 : 0);
    if (part.results) {
      packer.number(part.results->size());
      for (const SegmentOperation& one : *part.results)
        packer.text(one.name).number(static_cast<std::uint64_t>(one.occurrence));
    }
    write(packer, part.inner);
  }
}

/// Of an operation, for as long as the program runs.
std::string_view lasting(const std::string& name) {
  static std::mutex mutex;
  static auto* const names = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return *names->insert(name).first;
}

Schedule read_schedule(Unpacker& unpacker) {
  Schedule schedule;
  for (std::uint64_t left = unpacker.count(40); left > 0; --left) {
    SchedulePart& part = schedule.emplace_back();
    part.begin = unpacker.number();
    part.end = unpacker.number();
    part.offloaded = unpacker.number() != 0;
    if (unpacker.number() != 0) {
      std::vector<SegmentOperation> results(unpacker.count(16));
      for (SegmentOperation& one : results) {
        one.name = lasting(unpacker.text());
        one.occurrence = static_cast<decltype(one.occurrence)>(unpacker.number());
      }
      part.results = std::make_shared<const std::vector<SegmentOperation>>(std::move(results));
    }
    part.inner = read_schedule(unpacker);
  }
  return schedule;
}

}  // namespace

std::string pack(const TrainingChoice& choice) {
  Packer packer;
  packer.text(choice.precision.name);
  for_each_number(choice,
                  [&](const auto& value) { packer.number(static_cast<std::uint64_t>(value)); });
  for_each_time(choice, [&](double seconds) { packer.real(seconds); });
  write(packer, choice.schedule);
  return packer.bytes();
}

TrainingChoice unpack(std::string_view bytes) {
  Unpacker unpacker(bytes);
  TrainingChoice choice;
  choice.precision.name = unpacker.text();
  for_each_number(choice, [&](auto& value) {
    value = static_cast<std::remove_reference_t<decltype(value)>>(unpacker.number());
  });
  for_each_time(choice, [&](double& seconds) { seconds = unpacker.real(); });
  choice.schedule = read_schedule(unpacker);
  return choice;
}

}  // namespace cairn::checkpointing
