// A checkpoint written once more for another world size.
#include <filesystem>
#include <memory>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/lineage.h"
#include "checkpoint/reader.h"
#include "checkpoint/shards.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/writer.h"
#include "io/file_io.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;

// The folder of checkpoints that `to` names, itself or as that of a step.
std::string folder_for(const std::string& to, std::int64_t step) {
  fs::path path = fs::absolute(to);
  if (!path.has_filename()) path = path.parent_path();
  const std::int64_t named = step_of_folder(path.filename().string());
  CAIRN_CHECK(named < 0 || named == step, "reshard", "expected a path ending in ",
              step_folder(step), ", got '", to, "'");
  return (named < 0 ? path : path.parent_path()).string();
}

class Resharding {
 public:
  Resharding(const std::string& from, const Manifest& manifest, int world_size)
      : manifest_(manifest),
        world_size_(world_size),
        contents_(read_files(from, manifest, ReadBy::map, [](const std::string&) { return true; })),
        tensors_(sharded_tensors(manifest)),
        read_(piece_reader(from)) {}

  RankContents of_rank(int rank) const {
    RankContents contents{.has_shared = rank == 0, .shared = {}, .own = own_of(rank)};
    if (contents.has_shared) contents.shared = shared();
    for (const ShardedTensor& tensor : tensors_) {
      if (world_size_ == 1) contents.shared.emplace_back(tensor.name, read_whole(tensor, read_));
      if (world_size_ > 1) {
        contents.own.emplace_back(kShardPrefix + tensor.name,
                                  even_shard(tensor, rank, world_size_, read_));
      }
    }
    return contents;
  }

 private:
  FlatState shared() const {
    StateDict parts;
    for (const auto& [name, value] : contents_) {
      if (!name.starts_with(kRankPrefix)) parts.set(name, value);
    }
    return flatten(parts);
  }

  FlatState own_of(int rank) const {
    FlatState own;
    for (auto& [name, value] : flatten(contents_.dict(rank_name(rank % manifest_.world_size)))) {
      if (name.starts_with(kShardPrefix)) continue;
      if (name == "generator.seed" && rank >= manifest_.world_size) {
        const auto seed = static_cast<std::uint64_t>(std::get<std::int64_t>(value));
        value = static_cast<std::int64_t>(seed_of_new_rank(seed, rank));
      }
      own.emplace_back(name, std::move(value));
    }
    return own;
  }

  const Manifest& manifest_;
  int world_size_;
  StateDict contents_;
  std::vector<ShardedTensor> tensors_;
  PieceReader read_;
};

}  // namespace

std::string reshard_checkpoint(const std::string& from, const std::string& to, int world_size) {
  CAIRN_CHECK(world_size >= 1, "reshard", "expected a world of at least 1, got ", world_size);
  const Manifest source = read_manifest(from);
  SavePlan plan{.dir = folder_for(to, source.lineage.step), .options = {.keep = 1'000'000}};
  plan.manifest.lineage = {.step = source.lineage.step, .continues = line_of(from, source)};
  plan.manifest.world_size = world_size;
  plan.manifest.metric = source.metric;
  plan.manifest.libraries = source.libraries;
  const Resharding contents(from, source, world_size);
  make_folders(plan.dir);
  flush_parents(plan.dir);
  const SaveTurn turn(FolderLock::take(plan.dir));
  if (exists(plan.folder())) {
    core::fail<core::IoError>("reshard", "expected a new checkpoint to write, got '", plan.folder(),
                              "', which exists");
  }
  try {
    prepare(plan);
    std::vector<std::string> files;
    for (plan.rank = 0; plan.rank < world_size; ++plan.rank) {
      files.push_back(write_rank_files(plan, contents.of_rank(plan.rank)));
    }
    commit(plan, files);
  } catch (...) {
    give_up(plan);
    throw;
  }
  return plan.folder();
}

}  // namespace cairn::checkpointing
