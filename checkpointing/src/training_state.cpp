#include "cairn/checkpointing/training_state.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <set>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "file_io.h"
#include "flat_state.h"
#include "manifest.h"
#include "state_copy.h"
#include "step_folder.h"
#include "stored_file.h"

namespace cairn::checkpointing {

namespace fs = std::filesystem;

namespace {

constexpr char kOk = '+', kFailed = '-';  // first byte of what ranks tell each other

// Removes what nobody needs any more; where that fails the next save tries again.
void try_to_remove(const std::string& path) {
  try {
    remove_everything(path);
  } catch (const core::IoError& e) {
    log::warn("{}", e.what());
  }
}

// What a killed run left half written.
void remove_leftovers(const std::string& dir) {
  for (const std::string& name : list_folder(dir)) {
    const bool temporary = name.size() > 5 && name[0] == '.' && name.ends_with(".tmp") &&
                           step_of_folder(name.substr(1, name.size() - 5)) >= 0;
    if (temporary) try_to_remove(dir + "/" + name);
  }
}

FlatState own_state() {
  FlatState entries;
  for (auto& [name, value] : Generator::current().state_dict()) {
    entries.emplace_back("generator." + name, value);
  }
  return entries;
}

// A rank that the saved run did not have continues another rank's draws under a seed of its own.
void restore_generator(const StateDict& contents, int rank, int saved_world_size) {
  const StateDict& own = contents.dict(rank_name(rank % saved_world_size));
  Generator& generator = Generator::current();
  generator.load_state_dict(own.dict("generator"));
  if (rank < saved_world_size) return;
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // spreads neighbouring ranks' seeds
  generator.set(generator.seed() + kGolden * static_cast<std::uint64_t>(rank), generator.offset());
}

bool has_manifest(const std::string& path) {
  try {
    summarize_checkpoint(path);
    return true;
  } catch (const core::Error&) {
    return false;
  }
}

void remove_checkpoint(const std::string& dir, const std::string& path) {
  const std::int64_t step = step_of_folder(fs::path(path).filename().string());
  const std::string hidden = dir + "/" + temporary_folder(step);
  try {
    rename_or_exchange(path, hidden);  // gone at once, whatever happens while its files are removed
    remove_everything(hidden);
  } catch (const core::IoError& e) {
    log::warn("cannot remove the old checkpoint '{}': {}", path, e.what());
  }
}

}  // namespace

TrainingState::TrainingState(std::initializer_list<Part> parts, World world,
                             const TrainingStateOptions& options)
    : parts_(parts), world_(std::move(world)), options_(options) {
  CAIRN_CHECK(options.keep >= 1, "training_state", "expected keep >= 1, got ", options.keep);
  std::set<std::string> names;
  for (const Part& part : parts_) {
    const bool usable = !part.name.empty() && part.name.find('.') == std::string::npos &&
                        part.name.rfind(kRankPrefix, 0) != 0;
    CAIRN_CHECK(usable && names.insert(part.name).second, "training_state",
                "expected distinct names of parts, without '.' and not starting with '",
                kRankPrefix, "', got '", part.name, "'");
  }
}

// Runs work on every rank; returns when all are done. Where it fails on one rank it fails on all:
// none goes on alone.
std::string TrainingState::together(const std::string& what,
                                    const std::function<std::string()>& work,
                                    std::vector<std::string>* answers) const {
  std::exception_ptr error;
  std::string mine;
  try {
    mine = core::str(kOk, work());
  } catch (const std::exception& e) {
    error = std::current_exception();
    mine = core::str(kFailed, e.what());
  }
  std::vector<std::string> all;
  try {
    all = world_.exchange(mine, what);
  } catch (const core::CommunicationError&) {
    if (!error) throw;  // else this rank's own error says more
  }
  if (error) std::rethrow_exception(error);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != kOk) {
      core::fail<core::IoError>(what, "expected every rank to succeed, got on rank ", rank, ": ",
                                all[rank].substr(std::min<std::size_t>(1, all[rank].size())));
    }
    all[rank].erase(0, 1);
  }
  const std::string first = all.front();
  if (answers != nullptr) *answers = std::move(all);
  return first;
}

std::string TrainingState::save(const std::string& dir, std::int64_t step) {
  CAIRN_CHECK(step >= 0, "save", "expected a step >= 0, got ", step);
  const std::string what = core::str("save of step ", step);
  const std::string folder = dir + "/" + step_folder(step);
  const std::string temporary = dir + "/" + temporary_folder(step);
  try {
    together(what, [&] {
      if (world_.rank == 0) remove_leftovers(dir);
      if (world_.rank == 0) make_folders(temporary);
      return "";
    });
    std::vector<std::string> files;
    together(
        what, [&] { return write_files(temporary); }, &files);
    together(what, [&] {
      if (world_.rank == 0) commit(dir, step, files);
      return "";
    });
  } catch (...) {
    if (world_.rank == 0) try_to_remove(temporary);
    throw;
  }
  step_ = step;
  return folder;
}

// Returns the manifest's part of the shared file (rank 0 only), a line feed, that of this rank's
// own.
std::string TrainingState::write_files(const std::string& folder) const {
  std::string shared;
  if (world_.rank == 0) {
    StateDict state;
    for (const Part& part : parts_) state.set(part.name, part.stateful->state_dict());
    shared = manifest_file_text(write_stored_file(folder, kStateFile, flatten(state)));
  }
  return shared + "\n" +
         manifest_file_text(write_stored_file(folder, rank_file(world_.rank), own_state()));
}

// files: what write_files returned on each rank.
void TrainingState::commit(const std::string& dir, std::int64_t step,
                           const std::vector<std::string>& files) {
  const std::string folder = dir + "/" + step_folder(step);
  const std::string temporary = dir + "/" + temporary_folder(step);
  Manifest manifest;
  manifest.step = step;
  manifest.world_size = world_.size;
  for (const std::string& pair : files) {
    const std::size_t end = pair.find('\n');
    for (const std::string& text : {pair.substr(0, end), pair.substr(end + 1)}) {
      if (text.empty()) continue;
      manifest.files.push_back(parse_manifest_file(text, temporary));
      const std::string path = temporary + "/" + manifest.files.back().name;
      if (!exists(path)) {
        core::fail<core::IoError>("save", "expected every rank's file in '", temporary,
                                  "', got no ", manifest.files.back().name,
                                  " (is the folder shared between the machines?)");
      }
    }
  }
  WritableFile file(temporary + "/" + kManifestName);
  file.write(manifest_text(manifest));
  file.close();
  flush_folder(temporary);
  rename_or_exchange(temporary, folder);
  flush_folder(dir);
  try_to_remove(temporary);  // what stood there before, if anything
  std::erase(damaged_, folder);
  remove_old(dir, folder);
}

void TrainingState::remove_old(const std::string& dir, const std::string& newest) const {
  int good = 1;  // the newest
  for (const std::string& path : list_checkpoints(dir)) {
    if (path == newest) continue;
    const bool counts = std::find(damaged_.begin(), damaged_.end(), path) == damaged_.end();
    if (good >= options_.keep) {
      remove_checkpoint(dir, path);
    } else if (counts && has_manifest(path)) {
      ++good;
    }
  }
}

bool TrainingState::save_every(std::int64_t n, const std::string& dir) {
  CAIRN_CHECK(n >= 1, "save_every", "expected n >= 1, got ", n);
  ++step_;
  if (step_ % n != 0) return false;
  save(dir, step_);
  return true;
}

TrainingState::Loaded TrainingState::newest_good(const std::string& dir) {
  const std::vector<std::string> candidates = list_checkpoints(dir);
  std::string all_damage;
  for (const std::string& path : candidates) {
    try {
      return {path, read_checkpoint(path)};
    } catch (const core::DataError& e) {
      all_damage += core::str("\n  ", e.what());
      damaged_.push_back(path);
      log::warn("passing over the damaged checkpoint '{}': {}", path, e.what());
    } catch (const core::IoError& e) {
      all_damage += core::str("\n  ", e.what());
      damaged_.push_back(path);
      log::warn("passing over the unreadable checkpoint '{}': {}", path, e.what());
    }
  }
  if (!candidates.empty()) {
    core::fail<core::DataError>("resume", "expected a good checkpoint in '", dir, "', got ",
                                candidates.size(), " damaged:", all_damage);
  }
  return {};
}

std::optional<ResumeInfo> TrainingState::load(const std::string& what,
                                              const std::function<Loaded()>& choose) {
  Loaded loaded;
  const std::string path = together(what, [&] {  // rank 0's choice is everybody's
    if (world_.rank == 0) loaded = choose();
    return loaded.path;
  });
  if (path.empty()) return {};
  CheckpointSummary summary;
  together(what, [&] {
    if (world_.rank != 0) loaded = {path, read_checkpoint(path)};
    summary = summarize_checkpoint(path);
    return "";
  });
  together(what, [&] {
    apply(loaded, summary.world_size);
    return "";
  });
  step_ = summary.step;
  return ResumeInfo{path, summary.step, summary.world_size};
}

std::optional<ResumeInfo> TrainingState::resume_latest(const std::string& dir) {
  return load("resume", [&] { return newest_good(dir); });
}

ResumeInfo TrainingState::resume(const std::string& path) {
  return *load("resume", [&] { return Loaded{path, read_checkpoint(path)}; });
}

// Each part's load is all or nothing; where a later one refuses, those before it get their old
// state back.
void TrainingState::apply(const Loaded& loaded, int saved_world_size) {
  std::string problems;
  std::set<std::string> known;
  std::vector<std::pair<core::Stateful*, StateDict>> old_states;
  for (const Part& part : parts_) {
    known.insert(part.name);
    if (!loaded.contents.contains(part.name)) {
      problems += core::str("\n  missing: '", part.name, "'");
      continue;
    }
    try {
      StateDict old = deep_copy(part.stateful->state_dict());
      part.stateful->load_state_dict(loaded.contents.dict(part.name));
      old_states.emplace_back(part.stateful, std::move(old));
    } catch (const core::Error& e) {
      problems += core::str("\n  in '", part.name, "': ", e.what());
    }
  }
  for (const auto& [name, value] : loaded.contents) {
    const bool of_a_rank = name.rfind(kRankPrefix, 0) == 0;
    if (!of_a_rank && !known.contains(name)) problems += core::str("\n  surplus: '", name, "'");
  }
  if (!problems.empty()) {
    for (const auto& [stateful, state] : old_states) stateful->load_state_dict(state);
    core::fail<core::DataError>("resume", "expected '", loaded.path,
                                "' to fit this training, got:", problems);
  }
  restore_generator(loaded.contents, world_.rank, saved_world_size);
}

}  // namespace cairn::checkpointing
