// Random sequences of what may befall a folder of checkpoints (saves, kills between any two system
// calls, full disks, losses of power, damage, resumes from anywhere, fresh starts, other world
// sizes) against a small model of what must be found afterwards. A sequence that fails is shrunk to
// a shortest one. CAIRN_STATEFUL_SEQUENCES says how many are tried.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/checkpointing/training_state.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "checkpointing/simulated_disk.h"
#include "checkpointing/turns_world.h"

namespace cairn::checkpointing {
namespace {

constexpr const char* kFolder = "/runs/mnist";

enum class Kind { save, resume_latest, resume_from, fresh_start, damage, power_loss };
using Fault = SimulatedDisk::Fault;

struct Command {
  Kind kind = Kind::save;
  int steps = 1;              // of a save: after the last one
  Fault fault = Fault::none;  // of a save
  int calls = 1;              // into it
  bool asynchronous = false;
  int ranks = 1, keep = 1;     // of a new job
  int refusing = -1;           // of a resume: the rank whose part refuses the state
  int pick = 0;                // which checkpoint (resume_from, damage) and which of its files
  int harm = 0, position = 0;  // of damage: flip a byte, truncate, delete; where
};

void showValue(const Command& c, std::ostream& out) {
  static constexpr const char* kFaults[] = {"", " killed", " one rank killed", " failing", " full"};
  static constexpr const char* kHarms[] = {"flip a byte", "truncate", "delete a file"};
  switch (c.kind) {
    case Kind::save:
      out << (c.asynchronous ? "asynchronous " : "") << "save " << c.steps << " on"
          << kFaults[static_cast<int>(c.fault)];
      if (c.fault != Fault::none) out << " at call " << c.calls;
      break;
    case Kind::resume_latest:
    case Kind::resume_from:
      out << (c.kind == Kind::resume_latest ? "resume latest" : "resume pick ");
      if (c.kind == Kind::resume_from) out << c.pick;
      if (c.refusing >= 0) out << ", rank " << c.refusing << " refuses";
      break;
    case Kind::fresh_start:
      out << "fresh start";
      break;
    case Kind::damage:
      out << kHarms[c.harm] << " of pick " << c.pick << " at " << c.position;
      return;
    case Kind::power_loss:
      out << "power loss " << c.pick;
      return;
  }
  out << ", " << (c.kind == Kind::save ? "a new job: " : "") << c.ranks << " rank(s), keep "
      << c.keep;
}

rc::Gen<Command> any_command() {
  using rc::gen::inRange;
  using rc::gen::set;
  using rc::gen::weightedElement;
  // At full size: RapidCheck draws the ranges of small ones from their beginnings only.
  return rc::gen::resize(
      rc::kNominalSize,
      rc::gen::build<Command>(
          set(&Command::kind, weightedElement<Kind>({{12, Kind::save},
                                                     {4, Kind::resume_latest},
                                                     {3, Kind::resume_from},
                                                     {2, Kind::fresh_start},
                                                     {3, Kind::damage},
                                                     {2, Kind::power_loss}})),
          set(&Command::steps, weightedElement<int>({{3, 1}, {1, 0}, {1, 2}})),
          set(&Command::fault, weightedElement<Fault>({{6, Fault::none},
                                                       {4, Fault::kill_all},
                                                       {1, Fault::kill_one},
                                                       {1, Fault::fail},
                                                       {1, Fault::full}})),
          set(&Command::calls, inRange(1, 60)),
          set(&Command::asynchronous, weightedElement<bool>({{3, false}, {1, true}})),
          set(&Command::ranks, inRange(1, 4)), set(&Command::keep, inRange(1, 4)),
          set(&Command::refusing, weightedElement<int>({{8, -1}, {1, 0}, {1, 1}})),
          set(&Command::pick, inRange(0, 12)), set(&Command::harm, inRange(0, 3)),
          set(&Command::position, inRange(0, 10000))));
}

// What a job trains: the value says which save it is of.
struct Part : core::Stateful {
  Tensor weight = Tensor::zeros({4});
  bool refuses = false;

  int value() const { return static_cast<int>(weight.to_vector()[3]); }
  void set_value(int value) { weight = Tensor::full({4}, value); }
  StateDict state_dict() const override {
    StateDict state;
    state.set("weight", weight);
    return state;
  }
  void load_state_dict(const StateDict& state) override {
    if (refuses) core::fail<core::DataError>("part", "expected another state");
    core::copy_bytes(state.tensor("weight"), weight);
  }
};

// The processes of one job.
struct Job {
  struct Rank {
    Part first, second;
    std::unique_ptr<TrainingState> state;
  };
  explicit Job(const Command& command)
      : keep(command.keep), world(command.ranks), ranks(static_cast<std::size_t>(command.ranks)) {
    for (int r = 0; r < command.ranks; ++r) {
      Rank& rank = ranks[static_cast<std::size_t>(r)];
      rank.state = std::make_unique<TrainingState>(
          std::initializer_list<TrainingState::Part>{{"first", rank.first},
                                                     {"second", rank.second}},
          world.of(r), TrainingStateOptions{.keep = keep, .patience = std::chrono::seconds(2)});
    }
  }
  int keep;
  TurnsWorld world;
  std::vector<Rank> ranks;
  std::vector<int> line;  // the saves that this job continues, newest first
  std::int64_t step = 0;
};

enum class Outcome { done, error, killed };

// Calls f(rank) in each process of the job; the outcome of the worst one.
Outcome everywhere(Job& job, const std::function<void(int, Job::Rank&)>& f) {
  std::vector<Outcome> outcomes(job.ranks.size(), Outcome::done);
  job.world.run([&](int r) {
    const auto at = static_cast<std::size_t>(r);
    try {
      f(r, job.ranks[at]);
    } catch (const core::Error&) {
      outcomes[at] = Outcome::error;
    } catch (const SimulatedDisk::Killed&) {
      outcomes[at] = Outcome::killed;
    }
  });
  const Outcome worst = *std::max_element(outcomes.begin(), outcomes.end());
  if (worst == Outcome::error) {  // of one is an error of all
    RC_ASSERT(std::count(outcomes.begin(), outcomes.end(), worst) ==
              static_cast<std::ptrdiff_t>(outcomes.size()));
  }
  return worst;
}

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
    }
  }

 private:
  using Folder = std::map<std::int64_t, int>;  // step -> value, or kBroken

  // What stands now, read by the reader of files rather than by a resume.
  Folder look() const {
    Folder found;
    for (const std::string& path : list_checkpoints(kFolder)) {
      int value = kBroken;
      try {
        const StateDict contents = read_checkpoint(path);
        value = static_cast<int>(contents.dict("first").tensor("weight").to_vector()[3]);
        RC_ASSERT(value == contents.dict("second").tensor("weight").to_vector()[0]);
      } catch (const core::DataError&) {
      } catch (const core::IoError&) {
      }
      const std::int64_t step = value == kBroken ? step_of(path) : saves_.at(value).step;
      RC_ASSERT(step == step_of(path));
      found[step] = value;
    }
    return found;
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
      manual_seed(seed_of(value, r));
      if (!command.asynchronous) rank.state->save(kFolder, attempt.step);
      if (command.asynchronous) {
        rank.state->save_async(kFolder, attempt.step);
        rank.first.set_value(kBroken);  // the copy counts
        rank.second.set_value(kBroken);
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

  // A new job whose every rank calls `resume`, which must find `expected`: a value, nothing (0) or
  // an error (kBroken).
  void resume(const Command& command, int expected,
              const std::function<std::optional<ResumeInfo>(TrainingState&)>& resume) {
    auto job = std::make_unique<Job>(command);
    const bool refused = expected > 0 && command.refusing >= 0 && command.refusing < command.ranks;
    if (refused) job->ranks[static_cast<std::size_t>(command.refusing)].second.refuses = true;
    std::vector<std::optional<ResumeInfo>> infos(job->ranks.size());
    std::vector<std::uint64_t> seeds(job->ranks.size());
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
    RC_ASSERT((outcome == Outcome::error) == (expected == kBroken || refused));
    for (std::size_t r = 0; r < job->ranks.size(); ++r) {
      const Job::Rank& rank = job->ranks[r];
      if (outcome == Outcome::done && expected > 0) {
        const Save& save = saves_.at(expected);
        RC_ASSERT(infos[r].has_value());
        RC_ASSERT(infos[r]->step == save.step);
        RC_ASSERT(infos[r]->world_size == save.ranks);
        RC_ASSERT(rank.first.value() == expected);
        RC_ASSERT(rank.second.value() == expected);
        RC_ASSERT(rank.state->step() == save.step);
        const bool had_it = static_cast<int>(r) < save.ranks;
        if (had_it) RC_ASSERT(seeds[r] == seed_of(expected, static_cast<int>(r)));
      } else {  // nothing has changed
        RC_ASSERT(!infos[r].has_value());
        RC_ASSERT(rank.first.value() == 0);
        RC_ASSERT(rank.second.value() == 0);
        RC_ASSERT(rank.state->step() == 0);
        RC_ASSERT(seeds[r] == 7u);
      }
    }
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
  void resume_latest(const Command& command) {
    resume(command, expected_latest(),
           [](TrainingState& state) { return state.resume_latest(kFolder); });
  }
  void resume_from(const Command& command) {
    const std::vector<std::string> paths = list_checkpoints(kFolder);
    if (paths.empty()) return;
    const std::string path = paths[static_cast<std::size_t>(command.pick) % paths.size()];
    resume(command, look().at(step_of(path)),
           [&](TrainingState& state) { return std::optional(state.resume(path)); });
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
};

// The sequences are the same in every run, unless a number or RapidCheck's own variable is given.
rc::detail::TestParams params() {
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  const char* sequences = std::getenv("CAIRN_STATEFUL_SEQUENCES");
  if (sequences == nullptr && std::getenv("RC_PARAMS") == nullptr) params.seed = 1;
  params.maxSuccess = sequences == nullptr ? 2000 : std::atoi(sequences);
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
}  // namespace cairn::checkpointing
