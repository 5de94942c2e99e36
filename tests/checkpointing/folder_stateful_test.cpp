// Random sequences of what may befall a folder of checkpoints (saves, kills between any two system
// calls, full disks, losses of power, damage, resumes from anywhere, fresh starts, other world
// sizes and other cuts of what the ranks hold between them, reshards, prunes, rival writers)
// against a small model of what must be found afterwards. A sequence that fails is shrunk to a
// shortest one. CAIRN_STATEFUL_SEQUENCES says how many are tried.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "checkpointing/folder_commands.h"
#include "checkpointing/folder_jobs.h"
#include "checkpointing/simulated_disk.h"
#include "support/search.h"

namespace cairn::checkpointing::folder_stateful {
namespace {

constexpr const char* kFolder = "/runs/mnist";
constexpr const char* kResharded = "/runs/resharded";

std::uint64_t seed_of(int value, int rank) {
  return static_cast<std::uint64_t>(value * 10 + rank);
}

// A save that was tried: its value is its number, counted over the whole sequence.
struct Save {
  std::int64_t step = 0;
  int ranks = 1, keep = 1;
  std::vector<int> line;  // itself and the saves that it continues, newest first
};

constexpr int kBroken = -1;  // the value of a checkpoint that cannot be read

class Model {
 public:
  void run(const Command& command) {
    disk_.set_maps(command.maps);
    switch (command.kind) {
      case Kind::save:
        return save(command);
      case Kind::resume_latest:
        return resume_latest(command);
      case Kind::resume_from:
        return resume_from(command);
      case Kind::fresh_start:
        job_ = std::make_unique<Job>(command);
        return;
      case Kind::damage:
        return damage(command);
      case Kind::power_loss:
        return power_loss(command);
      case Kind::reshard:
        return reshard(command);
      case Kind::prune:
        return prune(command);
      case Kind::rival:
        return rival(command);
    }
  }

 private:
  using Folder = std::map<std::int64_t, int>;  // step -> value, or kBroken

  // What stands now, read by the reader of files rather than by a resume.
  Folder look(const char* folder = kFolder) const {
    Folder found;
    for (const std::string& path : list_checkpoints(folder)) {
      const int value = value_in(path);
      const std::int64_t step = value == kBroken ? step_of(path) : saves_.at(value).step;
      RC_ASSERT(step == step_of(path));
      found[step] = value;
    }
    return found;
  }
  // A later save has a higher number.
  static void check_numbers() {
    std::map<int, std::int64_t> numbers;  // by value
    for (const std::string& path : list_checkpoints(kFolder)) {
      const int value = value_in(path);
      if (value != kBroken) numbers[value] = summarize_checkpoint(path).save;
    }
    std::int64_t last = 0;
    for (const auto& [value, number] : numbers) RC_ASSERT(std::exchange(last, number) < number);
  }
  static int value_in(const std::string& path) {
    try {
      const StateDict contents = read_checkpoint(path), &shared_out = contents.dict("shared_out");
      const int value = static_cast<int>(contents.dict("first").tensor("weight").to_vector()[3]);
      RC_ASSERT(value == contents.dict("second").tensor("weight").to_vector()[0]);
      RC_ASSERT(shared_out.tensor("table").shape() ==
                Shape({SharedOut::kRows, SharedOut::kColumns}));
      RC_ASSERT(shared_out.tensor("list").shape() == Shape({SharedOut::kRows}));
      RC_ASSERT(SharedOut::is(shared_out.tensor("table"), value));
      RC_ASSERT(SharedOut::is(shared_out.tensor("list"), value));
      return value;
    } catch (const core::DataError&) {
    } catch (const core::IoError&) {
    }
    return kBroken;
  }
  static std::int64_t step_of(const std::string& path) {
    return std::stoll(path.substr(path.find("step-") + 5));
  }
  bool stands(const Folder& folder, int value) const {
    const auto found = folder.find(saves_.at(value).step);
    return found != folder.end() && found->second == value;
  }
  /// Those of the line that stood, damaged or not, newest first.
  std::vector<int> standing_line(const std::vector<int>& line) const {
    std::vector<int> found;
    for (const int value : line) {
      const auto there = stands_.find(saves_.at(value).step);
      if (there != stands_.end() && there->second == value) found.push_back(value);
    }
    return found;
  }
  /// What a folder of these saves must hold after a save that continues `line`: the newest `keep`
  /// of the line, then the newest of the others.
  std::vector<int> kept(const Save& save) const {
    std::vector<int> order = standing_line(save.line);
    for (auto it = saves_.rbegin(); it != saves_.rend(); ++it) {
      const bool on_line = std::find(order.begin(), order.end(), it->first) != order.end();
      if (!on_line && standing_line({it->first}).size() == 1) order.push_back(it->first);
    }
    if (order.size() > static_cast<std::size_t>(save.keep)) {
      order.resize(static_cast<std::size_t>(save.keep));
    }
    return order;
  }

  void save(const Command& command) {
    if (!job_) job_ = std::make_unique<Job>(command);
    const int value = ++last_value_;
    Save attempt{job_->step + command.steps, static_cast<int>(job_->ranks.size()), job_->keep,
                 job_->line};
    attempt.line.insert(attempt.line.begin(), value);
    saves_[value] = attempt;
    // A rank's main thread survives its writer's: killed means all.
    const bool one = command.fault == Fault::kill_one && command.asynchronous;
    disk_.plan(one ? Fault::kill_all : command.fault, command.calls);
    const Outcome outcome = everywhere(*job_, [&](int r, Job::Rank& rank) {
      rank.first.set_value(value);
      rank.second.set_value(value);
      rank.shared_out->set_value(value);
      manual_seed(seed_of(value, r));
      if (!command.asynchronous) rank.state->save(kFolder, attempt.step);
      if (command.asynchronous) {
        rank.state->save_async(kFolder, attempt.step);
        rank.first.set_value(kBroken);  // the copy counts
        rank.second.set_value(kBroken);
        rank.shared_out->set_value(kBroken);
        job_->world.of(r).barrier("begun");  // a rank that waits for its writer keeps its turn
        rank.state->finish();
      }
    });
    const bool faulty = disk_.fault_happened();
    disk_.restart();
    RC_ASSERT(outcome == Outcome::done || faulty);
    // A rank that lives gives up; what `keep` does not cover goes then.
    const bool gave_up = outcome == Outcome::error || command.fault == Fault::kill_one;
    after_save(attempt, value, outcome, faulty, gave_up);
    if (outcome == Outcome::killed) {
      job_.reset();
    } else if (outcome == Outcome::done) {
      job_->line = attempt.line;
      job_->step = attempt.step;
    }
  }

  void after_save(const Save& attempt, int value, Outcome outcome, bool faulty, bool gave_up) {
    const Folder before = stands_, found = look();
    check_numbers();
    const bool there = stands(found, value);
    RC_ASSERT(there || outcome != Outcome::done);
    if (there) {
      stands_[attempt.step] = value;
      damaged_.erase(attempt.step);
    }
    // What `keep` covers must be there; after a kill without the new one, everything before.
    std::vector<int> required;
    if (there || gave_up) required = kept(attempt);
    for (const auto& [step, old] : before) {
      if (!there && !gave_up && old != kBroken) required.push_back(old);
    }
    for (const int must : required) {
      const std::int64_t step = saves_.at(must).step;
      RC_ASSERT(damaged_.contains(step) || stands(found, must));
    }
    const bool exact = outcome == Outcome::done && !faulty && damaged_.empty();
    if (exact) RC_ASSERT(found.size() == required.size());
    adopt(found);
    const bool removed = std::any_of(before.begin(), before.end(),
                                     [&](const auto& old) { return !found.contains(old.first); });
    if (outcome == Outcome::done || removed)
      durable_ = stands_;  // none goes before its heir is safe
  }

  // Everything found must be known, and whole unless something explains why not.
  void adopt(const Folder& found) {
    for (const auto& [step, value] : found) {
      const auto known = stands_.find(step);
      if (value == kBroken) RC_ASSERT(damaged_.contains(step));
      if (value != kBroken && known != stands_.end()) RC_ASSERT(known->second == value);
      RC_ASSERT(value == kBroken || known != stands_.end());
    }
    std::erase_if(stands_, [&](const auto& entry) { return !found.contains(entry.first); });
    std::erase_if(damaged_, [&](std::int64_t step) { return !found.contains(step); });
  }

  // A run that begins on a full disk may remove what its `keep` does not cover.
  void made_room(int keep) {
    const Folder before = stands_, found = look();
    for (const int must : kept({.keep = keep}))
      RC_ASSERT(damaged_.contains(saves_.at(must).step) || stands(found, must));
    adopt(found);
    if (stands_.size() < before.size()) durable_ = stands_;  // none goes before its heir is safe
  }

  // A new job whose every rank calls `resume`, which must find `expected`: a value, nothing (0) or
  // an error (kBroken). saved_ranks: whose files it finds.
  void resume(const Command& command, int expected, int saved_ranks,
              const std::function<std::optional<ResumeInfo>(TrainingState&)>& resume) {
    auto job = std::make_unique<Job>(command);
    const bool refused = expected > 0 && command.refusing >= 0 && command.refusing < command.ranks;
    if (refused) job->ranks[static_cast<std::size_t>(command.refusing)].second.refuses = true;
    std::vector<std::optional<ResumeInfo>> infos(job->ranks.size());
    std::vector<std::uint64_t> seeds(job->ranks.size());
    if (is_error(command.fault)) disk_.plan(command.fault, command.calls);
    const Outcome outcome = everywhere(*job, [&](int r, Job::Rank& rank) {
      manual_seed(7);
      const auto at = static_cast<std::size_t>(r);
      try {
        infos[at] = resume(*rank.state);
      } catch (...) {
        seeds[at] = Generator::current().seed();
        throw;
      }
      seeds[at] = Generator::current().seed();
    });
    job_.reset();
    const bool faulty = disk_.fault_happened();
    disk_.plan(Fault::none, 0);
    RC_ASSERT((outcome == Outcome::error) == (expected == kBroken || refused) || faulty);
    for (std::size_t r = 0; r < job->ranks.size(); ++r) {
      const Job::Rank& rank = job->ranks[r];
      if (outcome == Outcome::done && expected > 0) {
        const Save& save = saves_.at(expected);
        RC_ASSERT(infos[r].has_value());
        RC_ASSERT(infos[r]->step == save.step);
        RC_ASSERT(infos[r]->world_size == saved_ranks);
        RC_ASSERT(rank.first.value() == expected);
        RC_ASSERT(rank.second.value() == expected);
        RC_ASSERT(rank.shared_out->has_value(expected));
        RC_ASSERT(rank.state->step() == save.step);
        const bool had_it = static_cast<int>(r) < std::min(save.ranks, saved_ranks);
        if (had_it) RC_ASSERT(seeds[r] == seed_of(expected, static_cast<int>(r)));
      } else {  // nothing has changed
        RC_ASSERT(!infos[r].has_value());
        RC_ASSERT(rank.first.value() == 0);
        RC_ASSERT(rank.second.value() == 0);
        RC_ASSERT(rank.shared_out->has_value(0));
        RC_ASSERT(rank.state->step() == 0);
        RC_ASSERT(seeds[r] == 7u);
      }
    }
    if (faulty && command.fault == Fault::full) made_room(command.keep);
    if (outcome == Outcome::error) return;
    if (expected > 0) job->line = saves_.at(expected).line, job->step = saves_.at(expected).step;
    job_ = std::move(job);
  }

  // The newest save's line, newest first: the first whole one.
  int expected_latest() const {
    const Folder found = look();
    int newest = 0;
    for (const auto& [step, value] : stands_) newest = std::max(newest, value);
    if (newest == 0) return found.empty() ? 0 : kBroken;
    for (const int value : standing_line(saves_.at(newest).line)) {
      if (stands(found, value)) return value;
    }
    return kBroken;
  }
  int ranks_of(int value) const { return value > 0 ? saves_.at(value).ranks : 0; }

  void resume_latest(const Command& command) {
    const int expected = expected_latest();
    resume(command, expected, ranks_of(expected),
           [](TrainingState& state) { return state.resume_latest(kFolder); });
  }
  void resume_from(const Command& command) {
    std::vector<std::string> paths = list_checkpoints(kFolder);
    const std::size_t own = paths.size();
    for (const auto& [step, made] : resharded_) paths.push_back(made.path);
    if (paths.empty()) return;
    const std::size_t at = static_cast<std::size_t>(command.pick) % paths.size();
    const std::string& path = paths[at];
    const int expected = at < own ? look().at(step_of(path)) : resharded_.at(step_of(path)).value;
    const int ranks = at < own ? ranks_of(expected) : resharded_.at(step_of(path)).ranks;
    resume(command, expected, ranks,
           [&](TrainingState& state) { return std::optional(state.resume(path)); });
  }

  // Work of one process outside of a job, with the fault that is planned.
  Outcome alone(const Command& command, const std::function<void()>& work) {
    // Its only thread is the one that a fault kills.
    disk_.plan(command.fault, command.calls);
    Outcome outcome = Outcome::done;
    try {
      work();
    } catch (const core::Error&) {
      outcome = Outcome::error;
    } catch (const SimulatedDisk::Killed&) {
      outcome = Outcome::killed;
    }
    return outcome;
  }

  // A checkpoint, written for another world size into a folder of its own.
  void reshard(const Command& command) {
    const std::vector<std::string> paths = list_checkpoints(kFolder);
    if (paths.empty()) return;
    const std::string path = paths[static_cast<std::size_t>(command.pick) % paths.size()];
    const std::int64_t step = step_of(path);
    const Folder before = look();
    const int value = before.at(step);
    const bool refused = value == kBroken || resharded_.contains(step);
    std::string made;
    const Outcome outcome =
        alone(command, [&] { made = reshard_checkpoint(path, kResharded, command.ranks); });
    RC_ASSERT(outcome != Outcome::done || !refused);
    RC_ASSERT(outcome == Outcome::done || refused || disk_.fault_happened());
    disk_.restart();
    RC_ASSERT(look() == before);
    const Folder now = look(kResharded);
    if (now.contains(step) && !resharded_.contains(step)) {
      RC_ASSERT(now.at(step) == value);
      const std::string whole = list_checkpoints(kResharded).front();
      resharded_[step] = {whole, value, command.ranks, outcome == Outcome::done};
      RC_ASSERT(summarize_checkpoint(whole).world_size == command.ranks);
    }
    if (outcome == Outcome::done) RC_ASSERT(made == resharded_.at(step).path);
    check_resharded(now);
  }
  void check_resharded(const Folder& found) const {
    RC_ASSERT(found.size() == resharded_.size());
    for (const auto& [step, made] : resharded_) RC_ASSERT(found.at(step) == made.value);
  }

  // What the rules keep stays, and everything else goes; nothing of it in part.
  void prune(const Command& command) {
    if (list_checkpoints(kFolder).empty()) return;
    const bool dry_run = command.pick % 4 == 0;
    const Folder before = look();
    std::vector<std::string> gone;
    const Outcome outcome =
        alone(command, [&] { gone = prune_checkpoints(kFolder, {.keep = command.keep}, dry_run); });
    RC_ASSERT(outcome == Outcome::done || disk_.fault_happened());
    const bool faulty = disk_.fault_happened();
    disk_.restart();
    const Folder found = look();
    const std::vector<int> required = kept_by_prune(before, command.keep);
    for (const int must : required) RC_ASSERT(stands(found, must));
    if (dry_run) RC_ASSERT(found == before);
    if (outcome == Outcome::done && !faulty) {
      const std::size_t left = dry_run ? before.size() - gone.size() : found.size();
      RC_ASSERT(left + gone.size() == before.size());
      if (damaged_.empty()) RC_ASSERT(left == required.size());
    }
    adopt(found);
    std::erase_if(durable_, [&](const auto& entry) { return !found.contains(entry.first); });
  }
  // The newest good ones of the newest line, then the newest of the others. Where one is damaged
  // its line may be unknown: nothing is said then.
  std::vector<int> kept_by_prune(const Folder& before, int keep) const {
    if (!damaged_.empty()) return {};
    int newest = 0;
    for (const auto& [step, value] : before) newest = std::max(newest, value);
    return kept({.keep = keep, .line = saves_.at(newest).line});
  }

  // Another process has the folder: nobody else gets in, and nothing changes.
  void rival(const Command& command) {
    job_.reset();
    const std::string lock = std::string(kFolder) + "/.lock";
    if (disk_.bytes_of(lock) == nullptr) return;
    const Folder before = look();
    disk_.lock_from_elsewhere(lock);
    Job late(command);
    const Outcome outcome = everywhere(late, [&](int, Job::Rank& rank) {
      if (command.pick % 2 == 0) rank.state->save(kFolder, 1000);
      if (command.pick % 2 == 1) rank.state->resume_latest(kFolder);
    });
    RC_ASSERT(outcome == Outcome::error);
    RC_ASSERT(alone({}, [] { prune_checkpoints(kFolder, {.keep = 1}); }) == Outcome::error);
    disk_.restart();
    RC_ASSERT(look() == before);
  }

  // One file of a checkpoint whose files are all in order.
  void damage(const Command& command) {
    const std::vector<std::string> paths = list_checkpoints(kFolder);
    if (paths.empty()) return;
    const std::string path = paths[static_cast<std::size_t>(command.pick) % paths.size()];
    if (!damaged_.insert(step_of(path)).second) return;
    harmed_.insert(stands_.at(step_of(path)));
    const std::vector<std::string> names = disk_.names(path);
    const std::string file =
        path + "/" + names[static_cast<std::size_t>(command.pick) % names.size()];
    std::string bytes = *disk_.bytes_of(file);
    const std::size_t at = static_cast<std::size_t>(command.position) % bytes.size();
    if (command.harm == 0) bytes[at] = static_cast<char>(bytes[at] ^ (1 << command.pick % 8));
    if (command.harm == 1) bytes.resize(at);
    if (command.harm == 2) return disk_.erase(file);
    disk_.set_bytes(file, bytes);
  }

  // What a reshard that returned wrote is there; of one that was killed it may be.
  void check_power_loss_of_resharded() {
    const Folder found = look(kResharded);
    std::erase_if(resharded_, [&](const auto& entry) {
      return !entry.second.durable && !found.contains(entry.first);
    });
    for (auto& [step, made] : resharded_) made.durable = true;
    check_resharded(found);
  }

  // What a save that returned wrote is there, unless a later one took its place. What was removed
  // may be back, but whole.
  void power_loss(const Command& command) {
    job_.reset();
    disk_.lose_power(static_cast<unsigned>(command.pick));
    const Folder found = look();
    for (const auto& [step, value] : durable_) {
      if (damaged_.contains(step) || harmed_.contains(value)) continue;
      const auto later = stands_.find(step);
      RC_ASSERT(stands(found, value) || (later != stands_.end() && stands(found, later->second)));
    }
    check_power_loss_of_resharded();
    std::erase_if(damaged_, [&](std::int64_t step) { return !found.contains(step); });
    Folder now;
    for (const auto& [step, value] : found) {
      if (value != kBroken) {
        now[step] = value;
        continue;
      }
      const bool harmed = std::any_of(harmed_.begin(), harmed_.end(), [&, at = step](int one) {
        return saves_.at(one).step == at;
      });
      RC_ASSERT(harmed);  // nothing is seen without its files, not even when removed
      const Folder& last = damaged_.contains(step) ? stands_ : durable_;
      if (last.contains(step)) now[step] = last.at(step);
      damaged_.insert(step);
    }
    stands_ = durable_ = now;
  }

  SimulatedDisk disk_;
  SystemCallsGuard guard_{disk_};
  std::unique_ptr<Job> job_;
  std::map<int, Save> saves_;  // every one tried
  int last_value_ = 0;
  Folder stands_, durable_;         // values; also of damaged ones
  std::set<std::int64_t> damaged_;  // steps of those that stand
  std::set<int> harmed_;            // every value that was ever damaged
  struct Resharded {
    std::string path;
    int value = 0, ranks = 1;
    bool durable = false;
  };
  std::map<std::int64_t, Resharded> resharded_;  // by step
};

rc::detail::TestParams params() {
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  params.maxSuccess = test::number_in("CAIRN_STATEFUL_SEQUENCES", 2000);
  params.maxSize = 30;  // commands in a sequence
  return params;
}

TEST(FolderStateful, AnySequenceLeavesWhatTheModelSays) {
  log::set_level(log::Level::off);
  const auto result = rc::detail::checkTestable(
      [] {
        const auto commands = *rc::gen::container<std::vector<Command>>(any_command());
        Model model;
        for (const Command& command : commands) model.run(command);
      },
      rc::detail::TestMetadata{}, params());
  log::set_level(log::Level::info);
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>()) << message.str();
  std::cout << message.str() << std::endl;
}

}  // namespace
}  // namespace cairn::checkpointing::folder_stateful
