#include "checkpoint/writer.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "cairn/core/error.h"
#include "cairn/core/log.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/lineage.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/stored_file.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace fs = std::filesystem;

namespace {

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
// Returns those that went.
std::vector<std::string> remove_checkpoints(const std::string& dir,
                                            const std::vector<std::string>& paths) {
  std::vector<std::string> gone, hidden;
  try {
    for (const std::string& path : paths) {
      const std::string name = fs::path(path).filename().string();
      const std::int64_t step = std::max(step_of_folder(name), step_of_hidden(name, kReplaced));
      const std::string aside = dir + "/" + hidden_folder(step, kReplaced);
      if (aside != path && exists(aside)) continue;
      const std::string nameless = dir + "/" + hidden_folder(step, kTemporary);
      rename(path, nameless);
      gone.push_back(path);
      hidden.push_back(nameless);
    }
    if (!gone.empty()) flush_folder(dir);
  } catch (const core::IoError& e) {
    log::warn("cannot remove old checkpoints: {}", e.what());
    return gone;  // the next save clears what has lost its name
  }
  for (const std::string& path : hidden) try_to_remove(path);
  return gone;
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

// The paths of the `keep_best` whole ones with the best metrics; of equal ones the newer.
std::set<std::string> best_of(std::vector<CheckpointInfo> checkpoints,
                              const RetentionPolicy& rules) {
  std::erase_if(checkpoints, [](const CheckpointInfo& one) { return !one.metric; });
  std::stable_sort(checkpoints.begin(), checkpoints.end(),
                   [&](const CheckpointInfo& a, const CheckpointInfo& b) {
                     return rules.best == Best::lowest ? *a.metric < *b.metric
                                                       : *a.metric > *b.metric;
                   });
  const auto count = std::min(checkpoints.size(), static_cast<std::size_t>(rules.keep_best));
  std::set<std::string> paths;
  for (std::size_t i = 0; i < count; ++i) paths.insert(checkpoints[i].path);
  return paths;
}

// The line of these ids first, the others behind it.
std::vector<CheckpointInfo> in_order(const std::vector<CheckpointInfo>& checkpoints,
                                     const std::vector<std::uint64_t>& line) {
  const auto place = [&](const CheckpointInfo& one) {
    return std::find(line.begin(), line.end(), one.id) - line.begin();
  };
  std::vector<CheckpointInfo> order = checkpoints;
  std::stable_sort(
      order.begin(), order.end(),
      [&](const CheckpointInfo& a, const CheckpointInfo& b) { return place(a) < place(b); });
  return order;
}

// What the rules do not keep: of this order the first good ones stay. A damaged one does not count,
// and goes when enough good ones stand before it.
std::vector<std::string> needless_in(const std::vector<CheckpointInfo>& order,
                                     const RetentionPolicy& rules,
                                     const std::vector<std::string>& damaged) {
  const auto is_whole = [&](const CheckpointInfo& one) {
    return one.id != 0 && std::find(damaged.begin(), damaged.end(), one.path) == damaged.end();
  };
  std::vector<CheckpointInfo> whole;
  std::copy_if(order.begin(), order.end(), std::back_inserter(whole), is_whole);
  const std::set<std::string> best = best_of(whole, rules);
  int good = 0;
  std::vector<std::string> needless;
  for (const CheckpointInfo& one : order) {
    const bool counts = is_whole(one);
    const bool every = rules.keep_every > 0 && one.step % rules.keep_every == 0;
    const bool stays = counts && (every || best.contains(one.path));
    if (good < rules.keep) {
      good += counts ? 1 : 0;
    } else if (!stays) {
      needless.push_back(one.path);
    }
  }
  return needless;
}

RetentionPolicy rules_of(const TrainingStateOptions& options) {
  return {options.keep, options.keep_every, options.keep_best, options.best};
}

// The newest good ones of this line come first, those of lines left behind fill up. Where one
// cannot be read all stay until the next save.
void remove_old(const SavePlan& plan, const std::vector<std::uint64_t>& line) {
  try {
    const std::vector<CheckpointInfo> order = in_order(checkpoints_in(plan.dir), line);
    remove_checkpoints(plan.dir, needless_in(order, rules_of(plan.options), plan.damaged));
  } catch (const core::IoError& e) {
    log::warn("old checkpoints stay: {}", e.what());
  }
}

}  // namespace

std::string SavePlan::folder() const {
  return core::str(dir, "/", step_folder(manifest.lineage.step));
}

std::string SavePlan::temporary() const {
  return core::str(dir, "/", hidden_folder(manifest.lineage.step, kTemporary));
}

void try_to_remove(const std::string& path) {
  try {
    remove_everything(path);
  } catch (const core::IoError& e) {
    log::warn("{}", e.what());
  }
}

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

void prepare(SavePlan& plan) {
  clear_leftovers(plan.dir);
  std::int64_t& number = plan.manifest.lineage.save;
  number = std::max(number, next_save(checkpoints_in(plan.dir)));
  make_folders(plan.temporary());
}

std::string write_rank_files(const SavePlan& plan, const RankContents& contents) {
  const std::string folder = plan.temporary();
  std::string shared;
  if (contents.has_shared) {
    shared = manifest_file_text(write_stored_file(
        folder, kStateFile, contents.shared, {{kLineageKey, lineage_text(plan.manifest.lineage)}}));
  }
  return shared + "\n" +
         manifest_file_text(write_stored_file(folder, rank_file(plan.rank), contents.own));
}

Committed commit(SavePlan& plan, const std::vector<std::string>& files) {
  Manifest& manifest = plan.manifest;
  const std::string folder = plan.folder(), temporary = plan.temporary();
  const std::string aside =
      core::str(plan.dir, "/", hidden_folder(manifest.lineage.step, kReplaced));
  for (const std::string& pair : files) {
    const std::size_t end = pair.find('\n');
    for (const std::string& text : {pair.substr(0, end), pair.substr(end + 1)}) {
      if (!text.empty()) manifest.files.push_back(parse_manifest_file(text, temporary));
    }
  }
  Committed done{.save = manifest.lineage.save};
  for (const ManifestFile& file : manifest.files) {
    check_written(temporary, file);
    done.bytes += file.bytes;
  }
  const ManifestText written = manifest_text(manifest, temporary);
  done.id = written.checksum;
  WritableFile file(temporary + "/" + kManifestName);
  file.write(written.text);
  file.close();
  flush_folder(temporary);
  replace_folder(temporary, folder, aside);
  flush_folder(plan.dir);
  try_to_remove(aside);
  std::erase(plan.damaged, folder);
  std::vector<std::uint64_t> line = manifest.lineage.continues;
  line.insert(line.begin(), done.id);
  remove_old(plan, line);
  return done;
}

void check_rules(const RetentionPolicy& rules, const char* where) {
  CAIRN_CHECK(rules.keep >= 1 && rules.keep_every >= 0 && rules.keep_best >= 0, where,
              "expected keep >= 1, keep_every >= 0 and keep_best >= 0, got ", rules.keep, ", ",
              rules.keep_every, " and ", rules.keep_best);
  CAIRN_CHECK(rules.keep_best == 0 || rules.best, where,
              "expected with keep_best which metric is the best, got keep_best ", rules.keep_best,
              " alone (best = Best::lowest for a loss, Best::highest for an accuracy)");
}

namespace {

// Of all that are there, each verified; an empty line stands for the newest.
std::vector<std::string> needless_of(const std::string& dir, const RetentionPolicy& rules,
                                     std::vector<std::uint64_t> line) {
  const std::vector<CheckpointInfo> checkpoints = checkpoints_in(dir);
  if (line.empty()) {
    for (const CheckpointInfo& one : newest_line(checkpoints)) line.push_back(one.id);
  }
  std::vector<std::string> damaged;
  for (const CheckpointInfo& one : checkpoints) {
    if (!find_damage(one.path).empty()) damaged.push_back(one.path);
  }
  return needless_in(in_order(checkpoints, line), rules, damaged);
}

}  // namespace

void remove_needless(const std::string& dir, const TrainingStateOptions& options,
                     const std::vector<std::uint64_t>& line) {
  remove_checkpoints(dir, needless_of(dir, rules_of(options), line));
}

std::vector<std::string> prune_checkpoints(const std::string& dir, const RetentionPolicy& rules,
                                           bool dry_run) {
  check_rules(rules, "prune");
  std::unique_ptr<SaveTurn> turn;
  if (!dry_run) {
    turn = std::make_unique<SaveTurn>(FolderLock::take(dir));
    clear_leftovers(dir);
  }
  std::vector<std::string> needless = needless_of(dir, rules, {});
  return dry_run ? needless : remove_checkpoints(dir, needless);
}

void give_up(const SavePlan& plan) {
  try_to_remove(plan.temporary());
  remove_old(plan, plan.manifest.lineage.continues);
}

}  // namespace cairn::checkpointing
