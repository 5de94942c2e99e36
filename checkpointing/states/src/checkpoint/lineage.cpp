#include "checkpoint/lineage.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <tuple>

#include "cairn/checkpointing/safetensors.h"
#include "cairn/core/error.h"
#include "checkpoint/step_folder.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace {

// The metadata of the file of the parts repeats the lineage: a damaged manifest does not send a run
// back to a line that was left behind.
void read_lineage_of_file(CheckpointInfo& info) {
  try {
    const SafetensorsReader file(info.path + "/" + kStateFile);
    for (const auto& [key, text] : file.metadata()) {
      if (key != kLineageKey) continue;
      info.lineage = parse_lineage(text, file.path());
      info.known = info.lineage.step == info.step;
    }
  } catch (const core::DataError&) {  // neither tells: unknown
  } catch (const NoSuchFile&) {
  }
}

// Throws IoError where the disk does not answer: that says nothing of the checkpoint.
void read_lineage(CheckpointInfo& info) {
  try {
    const Manifest manifest = read_manifest_head(info.path);
    info.id = manifest.checksum;
    info.lineage = manifest.lineage;
    info.metric = manifest.metric;
    info.known = true;
  } catch (const core::DataError&) {
    read_lineage_of_file(info);
  } catch (const NoSuchFile&) {
    read_lineage_of_file(info);
  }
}

// Checkpoints from before saves were counted are one line, in the order of their steps.
void continue_by_step(std::vector<CheckpointInfo>& checkpoints) {
  for (CheckpointInfo& later : checkpoints) {
    if (later.id == 0 || later.lineage.save != 0) continue;
    for (const CheckpointInfo& earlier : checkpoints) {
      const bool before = earlier.lineage.save == 0 && earlier.step < later.step;
      if (before && earlier.id != 0) later.lineage.continues.push_back(earlier.id);
    }
  }
}

}  // namespace

std::vector<CheckpointInfo> checkpoints_in(const std::string& dir) {
  std::vector<CheckpointInfo> found;
  const std::vector<std::string> names = list_folder(dir);
  const std::set<std::string> there(names.begin(), names.end());
  for (const std::string& name : names) {
    const std::int64_t replaced = step_of_hidden(name, kReplaced);
    const bool stands_in = replaced >= 0 && !there.contains(step_folder(replaced));
    const std::int64_t step = stands_in ? replaced : step_of_folder(name);
    if (step >= 0) found.push_back({.path = core::str(dir, "/", name), .step = step});
  }
  for (CheckpointInfo& info : found) read_lineage(info);
  std::sort(found.begin(), found.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    return std::tuple(!a.known, a.lineage.save, a.step) >
           std::tuple(!b.known, b.lineage.save, b.step);
  });
  continue_by_step(found);
  return found;
}

std::vector<CheckpointInfo> newest_line(const std::vector<CheckpointInfo>& checkpoints) {
  const auto newest = std::find_if(checkpoints.begin(), checkpoints.end(),
                                   [](const CheckpointInfo& one) { return one.known; });
  std::vector<CheckpointInfo> line(checkpoints.begin(), newest);
  if (newest == checkpoints.end()) return line;
  line.push_back(*newest);
  for (const std::uint64_t id : newest->lineage.continues) {
    const auto found = std::find_if(checkpoints.begin(), checkpoints.end(),
                                    [&](const CheckpointInfo& one) { return one.id == id; });
    if (id != 0 && found != checkpoints.end()) line.push_back(*found);
  }
  return line;
}

std::int64_t next_save(const std::vector<CheckpointInfo>& checkpoints) {
  std::int64_t last = 0;
  for (const CheckpointInfo& one : checkpoints) last = std::max(last, one.lineage.save);
  return last + 1;
}

std::vector<std::uint64_t> line_of(const std::string& path, const Manifest& manifest) {
  std::vector<std::uint64_t> line = {manifest.checksum};
  Lineage lineage = manifest.lineage;
  if (lineage.save == 0) {  // its neighbours tell
    for (CheckpointInfo& one :
         checkpoints_in(std::filesystem::absolute(path).parent_path().string())) {
      if (one.id == manifest.checksum) lineage = std::move(one.lineage);
    }
  }
  line.insert(line.end(), lineage.continues.begin(), lineage.continues.end());
  if (line.size() > kLongestLine) line.erase(line.begin() + kLongestLine, line.end());
  return line;
}

}  // namespace cairn::checkpointing
