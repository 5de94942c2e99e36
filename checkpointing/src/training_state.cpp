#include "cairn/checkpointing/training_state.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <set>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/kernels/product_choices.h"
#include "file_io.h"
#include "flat_state.h"
#include "lineage.h"
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

// What a killed run left: a checkpoint whose heir did not come gets its name back, the rest goes.
// Nothing is removed before the names that make it needless are flushed.
void clear_leftovers(const std::string& dir) {
  std::vector<std::string> needless;
  for (const std::string& name : list_folder(dir)) {
    const std::string path = core::str(dir, "/", name);
    const std::int64_t replaced = step_of_hidden(name, kReplaced);
    const std::string place = core::str(dir, "/", step_folder(std::max<std::int64_t>(0, replaced)));
    if (replaced >= 0 && !exists(place)) {
      rename(path, place);
    } else if (replaced >= 0 || step_of_hidden(name, kTemporary) >= 0) {
      needless.push_back(path);
    }
  }
  if (needless.empty()) return;
  flush_folder(dir);
  for (const std::string& path : needless) try_to_remove(path);
}

constexpr const char* kProducts = "products";

FlatState own_state() {
  FlatState entries;
  for (auto& [name, value] : Generator::current().state_dict()) {
    entries.emplace_back("generator." + name, value);
  }
  entries.emplace_back(kProducts, kernels::product_choices());
  return entries;
}

// Bits go by how products are computed, which on another machine, or timed anew, may be chosen
// otherwise. Checkpoints of older versions do not say.
void restore_products(const StateDict& contents, int rank, int saved_world_size) {
  const StateDict& own = contents.dict(rank_name(rank % saved_world_size));
  if (own.contains(kProducts)) kernels::use_product_choices(own.text(kProducts));
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

void check_written(const std::string& folder, const ManifestFile& file) {
  const std::string path = folder + "/" + file.name;
  const bool there = exists(path);
  if (there && file_bytes(path) == file.bytes) return;
  core::fail<core::IoError>("save", "expected every rank's file in '", folder, "', got ",
                            there ? "another " : "no ", file.name,
                            " (is the folder shared between the machines?)");
}

// All lose their names at once and for good before the first loses a file: none is ever seen
// without one. One beside which its predecessor still stands aside, because that could not be
// removed, stays until the next save: without it the predecessor would be found in its place.
void remove_checkpoints(const std::string& dir, const std::vector<std::string>& paths) {
  if (paths.empty()) return;
  std::vector<std::string> hidden;
  try {
    for (const std::string& path : paths) {
      const std::string name = fs::path(path).filename().string();
      const std::int64_t step = std::max(step_of_folder(name), step_of_hidden(name, kReplaced));
      const std::string aside = dir + "/" + hidden_folder(step, kReplaced);
      if (aside != path && exists(aside)) continue;
      hidden.push_back(dir + "/" + hidden_folder(step, kTemporary));
      rename(path, hidden.back());
    }
    flush_folder(dir);
  } catch (const core::IoError& e) {
    log::warn("cannot remove old checkpoints: {}", e.what());
    return;  // the next save clears what has lost its name
  }
  for (const std::string& path : hidden) try_to_remove(path);
}

// Gives `from` the name `to`. No call can do that where `to` stands, not on every file system: it
// steps aside first, under a name by which readers know it until the new one is there.
void replace_folder(const std::string& from, const std::string& to, const std::string& aside) {
  const bool replaces = exists(to);
  if (replaces) rename(to, aside);
  try {
    rename(from, to);
  } catch (const core::IoError&) {
    if (replaces) rename(aside, to);
    throw;
  }
}

// The checkpoint of that path, or the one that stepped aside from it when a save was killed.
std::string standing_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const fs::path folder = path;
  const std::int64_t step = step_of_folder(folder.filename().string());
  if (step < 0 || exists(path)) return path;
  const std::string aside = (folder.parent_path() / hidden_folder(step, kReplaced)).string();
  return exists(aside) ? aside : path;
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
  std::string first = all.front();
  if (answers != nullptr) *answers = std::move(all);
  return first;
}

std::string TrainingState::save(const std::string& dir, std::int64_t step) {
  CAIRN_CHECK(step >= 0, "save", "expected a step >= 0, got ", step);
  const std::string what = core::str("save of step ", step);
  const std::string temporary = dir + "/" + hidden_folder(step, kTemporary);
  Manifest manifest;
  manifest.world_size = world_.size;
  manifest.lineage = {.step = step, .continues = line_};
  try {
    together(what, [&] {
      if (world_.rank != 0) return "";
      make_folders(dir);
      clear_leftovers(dir);
      manifest.lineage.save = next_save(standing_in(dir));
      make_folders(temporary);
      return "";
    });
    std::vector<std::string> files;
    together(
        what, [&] { return write_files(temporary, lineage_text(manifest.lineage)); }, &files);
    together(what, [&] {
      if (world_.rank == 0) commit(dir, manifest, files);
      return "";
    });
  } catch (...) {
    if (world_.rank == 0) try_to_remove(temporary);
    throw;
  }
  step_ = step;
  return dir + "/" + step_folder(step);
}

// Returns the manifest's part of the shared file (rank 0 only), a line feed, that of this rank's
// own.
std::string TrainingState::write_files(const std::string& folder,
                                       const std::string& lineage) const {
  std::string shared;
  if (world_.rank == 0) {
    StateDict state;
    for (const Part& part : parts_) state.set(part.name, part.stateful->state_dict());
    shared = manifest_file_text(
        write_stored_file(folder, kStateFile, flatten(state), {{kLineageKey, lineage}}));
  }
  return shared + "\n" +
         manifest_file_text(write_stored_file(folder, rank_file(world_.rank), own_state()));
}

// files: what write_files returned on each rank.
void TrainingState::commit(const std::string& dir, Manifest& manifest,
                           const std::vector<std::string>& files) {
  const std::int64_t step = manifest.lineage.step;
  const std::string folder = dir + "/" + step_folder(step);
  const std::string temporary = dir + "/" + hidden_folder(step, kTemporary);
  const std::string aside = dir + "/" + hidden_folder(step, kReplaced);
  for (const std::string& pair : files) {
    const std::size_t end = pair.find('\n');
    for (const std::string& text : {pair.substr(0, end), pair.substr(end + 1)}) {
      if (!text.empty()) manifest.files.push_back(parse_manifest_file(text, temporary));
    }
  }
  for (const ManifestFile& file : manifest.files) check_written(temporary, file);
  const std::string text = manifest_text(manifest);
  const std::uint64_t id = parse_manifest(text, temporary).checksum;  // so it can be read back
  WritableFile file(temporary + "/" + kManifestName);
  file.write(text);
  file.close();
  flush_folder(temporary);
  replace_folder(temporary, folder, aside);
  flush_folder(dir);
  flush_parents(dir);
  try_to_remove(aside);
  std::erase(damaged_, folder);
  line_.insert(line_.begin(), id);
  line_.resize(std::min(line_.size(), kLongestLine));
  remove_old(dir);
}

// What `keep` does not cover: the newest good ones of this line come first, those of lines left
// behind fill up. A damaged one does not count, and goes when enough good ones stand before it.
void TrainingState::remove_old(const std::string& dir) const {
  const std::vector<Standing> standing = standing_in(dir);
  std::vector<Standing> order = newest_line(standing);
  for (const Standing& one : standing) {
    const bool on_line = std::any_of(order.begin(), order.end(),
                                     [&](const Standing& other) { return other.path == one.path; });
    if (!on_line) order.push_back(one);
  }
  int good = 0;
  std::vector<std::string> needless;
  for (const Standing& one : order) {
    const bool known = std::find(damaged_.begin(), damaged_.end(), one.path) != damaged_.end();
    if (good >= options_.keep) {
      needless.push_back(one.path);
    } else if (one.id != 0 && !known) {
      ++good;
    }
  }
  remove_checkpoints(dir, needless);
}

bool TrainingState::save_every(std::int64_t n, const std::string& dir) {
  CAIRN_CHECK(n >= 1, "save_every", "expected n >= 1, got ", n);
  ++step_;
  if (step_ % n != 0) return false;
  save(dir, step_);
  return true;
}

TrainingState::Loaded TrainingState::newest_good(const std::string& dir) {
  const std::vector<Standing> standing = standing_in(dir);
  const std::vector<Standing> line = newest_line(standing);
  std::string all_damage;
  for (const Standing& one : line) {
    std::string damage;
    try {
      return {one.path, read_checkpoint(one.path)};
    } catch (const core::DataError& e) {
      damage = e.what();
    } catch (const core::IoError& e) {
      damage = e.what();
    }
    all_damage += "\n  " + damage;
    damaged_.push_back(one.path);
    log::warn("passing over the damaged checkpoint '{}': {}", one.path, damage);
  }
  if (standing.empty()) return {};
  const std::string others =
      standing.size() == line.size()
          ? ""
          : core::str("\n  (", standing.size() - line.size(),
                      " more are of runs that were left behind: resume one by its path, or start "
                      "in another folder)");
  core::fail<core::DataError>("resume", "expected a good checkpoint in '", dir, "', got ",
                              line.size(), " damaged:", all_damage, others);
}

std::optional<ResumeInfo> TrainingState::load(const std::string& what,
                                              const std::function<Loaded()>& choose) {
  Loaded loaded;
  const std::string path = together(what, [&] {  // rank 0's choice is everybody's
    if (world_.rank == 0) loaded = choose();
    return loaded.path;
  });
  if (path.empty()) {
    line_.clear();
    return {};
  }
  CheckpointSummary summary;
  std::vector<std::uint64_t> line;
  together(what, [&] {
    if (world_.rank != 0) loaded = {path, read_checkpoint(path)};
    summary = summarize_checkpoint(path);
    line = line_of(path);
    return "";
  });
  Undo undo;
  try {
    together(what, [&] {
      apply(loaded, summary.world_size, undo);
      return "";
    });
  } catch (...) {  // here or on another rank
    for (const auto& give_back : undo) give_back();
    throw;
  }
  step_ = summary.step;
  line_ = std::move(line);
  return ResumeInfo{path, summary.step, summary.world_size};
}

std::optional<ResumeInfo> TrainingState::resume_latest(const std::string& dir) {
  return load("resume", [&] { return newest_good(dir); });
}

ResumeInfo TrainingState::resume(const std::string& path) {
  return *load("resume", [&] {
    const std::string standing = standing_path(path);
    return Loaded{standing, read_checkpoint(standing)};
  });
}

// Each part's load is all or nothing; `undo` gives those that have loaded, and the generator, their
// old state back.
void TrainingState::apply(const Loaded& loaded, int saved_world_size, Undo& undo) {
  std::string problems;
  std::set<std::string> known;
  std::vector<StateDict> before;  // of every part, ahead of the first load: they may share tensors
  for (const Part& part : parts_) before.push_back(deep_copy(part.stateful->state_dict()));
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    known.insert(part.name);
    if (!loaded.contents.contains(part.name)) {
      problems += core::str("\n  missing: '", part.name, "'");
      continue;
    }
    try {
      part.stateful->load_state_dict(loaded.contents.dict(part.name));
      undo.push_back([part, old = std::move(before[i])] { part.stateful->load_state_dict(old); });
    } catch (const core::Error& e) {
      problems += core::str("\n  in '", part.name, "': ", e.what());
    }
  }
  for (const auto& [name, value] : loaded.contents) {
    const bool of_a_rank = name.rfind(kRankPrefix, 0) == 0;
    if (!of_a_rank && !known.contains(name)) problems += core::str("\n  surplus: '", name, "'");
  }
  if (!problems.empty()) {
    core::fail<core::DataError>("resume", "expected '", loaded.path,
                                "' to fit this training, got:", problems);
  }
  Generator& generator = Generator::current();
  undo.push_back([&generator, seed = generator.seed(), offset = generator.offset()] {
    generator.set(seed, offset);
  });
  restore_generator(loaded.contents, world_.rank, saved_world_size);
  undo.push_back([before = kernels::product_choices()] { kernels::use_product_choices(before); });
  restore_products(loaded.contents, world_.rank, saved_world_size);
}

}  // namespace cairn::checkpointing
