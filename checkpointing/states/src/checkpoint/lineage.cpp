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
void read_lineage_of_file(Standing& standing) {
  try {
    const SafetensorsReader file(standing.path + "/" + kStateFile);
    for (const auto& [key, text] : file.metadata()) {
      if (key != kLineageKey) continue;
      standing.lineage = parse_lineage(text, file.path());
      standing.known = standing.lineage.step == standing.step;
    }
  } catch (const core::DataError&) {  // neither tells: unknown
  } catch (const NoSuchFile&) {
  }
}

// Throws IoError where the disk does not answer: that says nothing of the checkpoint.
void read_lineage(Standing& standing) {
  try {
    const Manifest manifest = read_manifest_head(standing.path);
    standing.id = manifest.checksum;
    standing.lineage = manifest.lineage;
    standing.metric = manifest.metric;
    standing.known = true;
  } catch (const core::DataError&) {
    read_lineage_of_file(standing);
  } catch (const NoSuchFile&) {
    read_lineage_of_file(standing);
  }
}

// Checkpoints from before saves were counted are one line, in the order of their steps.
void continue_by_step(std::vector<Standing>& standing) {
  for (Standing& later : standing) {
    if (later.id == 0 || later.lineage.save != 0) continue;
    for (const Standing& earlier : standing) {
      const bool before = earlier.lineage.save == 0 && earlier.step < later.step;
      if (before && earlier.id != 0) later.lineage.continues.push_back(earlier.id);
    }
  }
}

}  // namespace

std::vector<Standing> standing_in(const std::string& dir) {
  std::vector<Standing> found;
  const std::vector<std::string> names = list_folder(dir);
  const std::set<std::string> there(names.begin(), names.end());
  for (const std::string& name : names) {
    const std::int64_t replaced = step_of_hidden(name, kReplaced);
    const bool stands_in = replaced >= 0 && !there.contains(step_folder(replaced));
    const std::int64_t step = stands_in ? replaced : step_of_folder(name);
    if (step >= 0) found.push_back({.path = core::str(dir, "/", name), .step = step});
  }
  for (Standing& standing : found) read_lineage(standing);
  std::sort(found.begin(), found.end(), [](const Standing& a, const Standing& b) {
    return std::tuple(!a.known, a.lineage.save, a.step) >
           std::tuple(!b.known, b.lineage.save, b.step);
  });
  continue_by_step(found);
  return found;
}

std::vector<Standing> newest_line(const std::vector<Standing>& standing) {
  const auto newest =
      std::find_if(standing.begin(), standing.end(), [](const Standing& one) { return one.known; });
  std::vector<Standing> line(standing.begin(), newest);
  if (newest == standing.end()) return line;
  line.push_back(*newest);
  for (const std::uint64_t id : newest->lineage.continues) {
    const auto found = std::find_if(standing.begin(), standing.end(),
                                    [&](const Standing& one) { return one.id == id; });
    if (id != 0 && found != standing.end()) line.push_back(*found);
  }
  return line;
}

std::int64_t next_save(const std::vector<Standing>& standing) {
  std::int64_t last = 0;
  for (const Standing& one : standing) last = std::max(last, one.lineage.save);
  return last + 1;
}

std::vector<std::uint64_t> line_of(const std::string& path, const Manifest& manifest) {
  std::vector<std::uint64_t> line = {manifest.checksum};
  Lineage lineage = manifest.lineage;
  if (lineage.save == 0) {  // its neighbours tell
    for (Standing& one : standing_in(std::filesystem::absolute(path).parent_path().string())) {
      if (one.id == manifest.checksum) lineage = std::move(one.lineage);
    }
  }
  line.insert(line.end(), lineage.continues.begin(), lineage.continues.end());
  if (line.size() > kLongestLine) line.erase(line.begin() + kLongestLine, line.end());
  return line;
}

}  // namespace cairn::checkpointing
