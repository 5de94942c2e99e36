#include "cairn/checkpointing/training_state.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "cairn/checkpointing/checkpoint_folder.h"
#include "cairn/core/error.h"
#include "cairn/core/generator.h"
#include "cairn/core/log.h"
#include "cairn/core/packer.h"
#include "cairn/kernels/product_choices.h"
#include "cairn/kernels/versions.h"
#include "checkpoint/folder_lock.h"
#include "checkpoint/lineage.h"
#include "checkpoint/reader.h"
#include "checkpoint/shards.h"
#include "checkpoint/step_folder.h"
#include "checkpoint/writer.h"
#include "formats/flat_state.h"
#include "io/file_io.h"
#include "training/background_save.h"
#include "training/partial_load.h"
#include "training/signal_watch.h"
#include "training/snapshot.h"

namespace cairn::checkpointing {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
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

void restore_generator(const StateDict& contents, int rank, int saved_world_size) {
  const StateDict& own = contents.dict(rank_name(rank % saved_world_size));
  Generator& generator = Generator::current();
  generator.load_state_dict(own.dict("generator"));
  if (rank < saved_world_size) return;
  generator.set(seed_of_new_rank(generator.seed(), rank), generator.offset());
}

LibraryVersions all_libraries(const World& world) {
  LibraryVersions all = {{"cairn", CAIRN_VERSION}};
  for (const LibraryVersions& some :
       {core::library_versions(), kernels::library_versions(), world.libraries()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
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

struct TrainingState::Loaded {
  std::string path;  // empty: there was none
  StateDict contents;
  Manifest manifest;
  std::vector<std::uint64_t> line;
};

struct TrainingState::Impl {
  std::string opened;  // the folder that was found fit to save in
  std::string locked;  // rank 0: the folder of the lock
  std::shared_ptr<FolderLock> lock;
  std::string last_dir;  // of the last save that was begun
  std::int64_t last_step = -1;
  std::string flushed;  // the folder whose own name and parents' are on the disk
  std::unique_ptr<SignalWatch> watch;
  std::string signal_dir;
  SaveReport report;                           // of the save in the background
  std::unique_ptr<BackgroundSave> background;  // last: it ends before the lock

  // A loss of power takes no checkpoint with the folder that it lies in.
  void make_folder(const std::string& dir) {
    if (flushed == dir && exists(dir)) return;
    make_folders(dir);
    flush_parents(dir);
    flushed = dir;
  }
  void lock_folder(const std::string& dir) {
    if (locked == dir) return;
    lock.reset();
    lock = FolderLock::take(dir);
    locked = dir;
  }
};

TrainingState::TrainingState(std::vector<Part> parts, World world,
                             const TrainingStateOptions& options)
    : parts_(std::move(parts)),
      world_(std::move(world)),
      options_(options),
      impl_(std::make_unique<Impl>()) {
  check_rules({options.keep, options.keep_every, options.keep_best, options.best},
              "training_state");
  std::set<std::string> names;
  for (const Part& part : parts_) {
    const bool usable = !part.name.empty() && part.name.find('.') == std::string::npos &&
                        part.name.rfind(kRankPrefix, 0) != 0;
    CAIRN_CHECK(usable && names.insert(part.name).second, "training_state",
                "expected distinct names of parts, without '.' and not starting with '",
                kRankPrefix, "', got '", part.name, "'");
  }
}

TrainingState::~TrainingState() = default;
TrainingState::TrainingState(TrainingState&&) noexcept = default;

// Before the first step, rather than at the first save: whether files can be written there, by
// every rank, and whether nobody else saves there.
void TrainingState::open(const std::string& dir) {
  if (impl_->opened == dir) return;
  const std::string what = core::str("open the folder '", dir, "'");
  const std::string probe = core::str(".probe-", rank_name(world_.rank));
  world_.all_or_throw<core::IoError>(what, [&] {
    if (world_.rank != 0) return "";
    make_folders(dir);
    impl_->lock_folder(dir);
    const SaveTurn turn(impl_->lock);
    clear_leftovers(dir);  // of a killed save: it may have filled the disk
    try {
      check_writable(dir, probe);
    } catch (const DiskFull&) {  // the killed save may have left one checkpoint too many
      remove_needless(dir, options_, line_);
    }
    return "";
  });
  world_.all_or_throw<core::IoError>(what, [&] {
    check_writable(dir, probe);
    return "";
  });
  impl_->opened = dir;
}

void TrainingState::check_save(const std::string& dir, std::int64_t step) const {
  CAIRN_CHECK(step >= 0, "save", "expected a step >= 0, got ", step);
  CAIRN_CHECK(!dir.empty(), "save", "expected a folder, got ''");
  CAIRN_CHECK(!options_.read_only, "save", "expected a training state that is not read_only");
}

std::string TrainingState::save(const std::string& dir, std::int64_t step,
                                std::optional<double> metric) {
  start_save(dir, step, metric, /*asynchronous=*/false);
  return last_save_->path;
}

void TrainingState::save_async(const std::string& dir, std::int64_t step,
                               std::optional<double> metric) {
  start_save(dir, step, metric, /*asynchronous=*/true);
}

void TrainingState::start_save(const std::string& dir, std::int64_t step,
                               std::optional<double> metric, bool asynchronous) {
  check_save(dir, step);
  const Clock::time_point start = Clock::now();
  finish();
  const std::string what = core::str("save of step ", step);
  SavePlan plan{.dir = dir, .rank = world_.rank, .options = options_, .damaged = damaged_};
  plan.manifest.world_size = world_.size;
  plan.manifest.lineage = {.step = step, .save = last_number_ + 1, .continues = line_};
  if (metric && std::isfinite(*metric)) plan.manifest.metric = metric;
  plan.manifest.libraries = all_libraries(world_);
  std::unique_ptr<SaveTurn> turn;
  RankContents contents;
  std::optional<RankContents> copy;
  std::string written;
  SaveReport report{.path = plan.folder(), .step = step};
  Committed committed;
  try {
    const auto shards = world_.all_or_throw<core::IoError>(what, [&] {
      contents = contents_of_rank();
      if (world_.rank != 0) return describe_shards(contents.own);
      impl_->make_folder(dir);
      impl_->lock_folder(dir);
      turn = std::make_unique<SaveTurn>(impl_->lock);
      prepare(plan);
      return describe_shards(contents.own);
    });
    leave_out_copies(contents.own, shards, world_.rank);
    const auto files = world_.all_or_throw<core::IoError>(what, [&] {
      const RankContents own = std::move(contents);
      const std::uint64_t bytes = bytes_of(own.shared) + bytes_of(own.own);
      if (asynchronous && bytes <= options_.snapshot_bytes) {
        copy = {own.has_shared, snapshot_of(own.shared), snapshot_of(own.own)};
        report.snapshot_bytes = bytes;
      } else {
        written = write_rank_files(plan, own);
      }
      return written;
    });
    if (!asynchronous) {
      const auto bytes = world_.all_or_throw<core::IoError>(what, [&] {
        if (world_.rank == 0) committed = commit(plan, files);
        return core::Packer().number(committed.bytes).bytes();
      });
      report.bytes = core::Unpacker(bytes.front()).number();
    }
  } catch (...) {
    if (world_.rank == 0 && turn) give_up(plan);
    throw;
  }
  step_ = step;
  impl_->last_dir = dir;
  impl_->last_step = step;
  report.blocked_seconds = report.seconds = seconds_since(start);
  if (!asynchronous) return saved(report, committed, plan.damaged);
  impl_->report = report;
  impl_->background = std::make_unique<BackgroundSave>(std::move(plan), std::move(copy),
                                                       std::move(written), std::move(turn));
}

RankContents TrainingState::contents_of_rank() const {
  RankContents contents{.has_shared = world_.rank == 0, .shared = {}, .own = own_state()};
  StateDict state;
  for (const Part& part : parts_) state.set(part.name, part.stateful->state_dict());
  for (auto& [name, value] : flatten(state)) {
    if (auto* shard = std::get_if<Shard>(&value)) {
      shard->rounded = {};  // is not saved
      contents.own.emplace_back(kShardPrefix + name, std::move(value));
    } else if (contents.has_shared) {
      contents.shared.emplace_back(name, std::move(value));
    }
  }
  return contents;
}

void TrainingState::saved(const SaveReport& report, const Committed& committed,
                          const std::vector<std::string>& damaged) {
  last_save_ = report;
  if (world_.rank != 0) return;
  damaged_ = damaged;
  last_number_ = committed.save;
  line_.insert(line_.begin(), committed.id);
  line_.resize(std::min(line_.size(), kLongestLine));
}

void TrainingState::finish() {
  if (!impl_->background) return;
  const std::unique_ptr<BackgroundSave> background = std::move(impl_->background);
  SaveReport report = impl_->report;
  Committed committed;
  const std::string what = core::str("save of step ", report.step, " in the background");
  const auto answers = world_.all_or_throw<core::IoError>(what, [&] {
    committed = background->wait();
    return core::Packer().number(committed.bytes).real(background->seconds()).bytes();
  });
  core::Unpacker of_first(answers.front());
  report.bytes = of_first.number();
  report.seconds = of_first.real() + report.blocked_seconds;
  saved(report, committed, background->plan().damaged);
}

bool TrainingState::save_every(std::int64_t n, const std::string& dir) {
  CAIRN_CHECK(n >= 1, "save_every", "expected n >= 1, got ", n);
  if (!dir.empty()) {
    check_save(dir, step_ + 1);
    open(dir);
  }
  ++step_;
  const bool due = step_ % n == 0 && !dir.empty();
  if (due) start_save(dir, step_, {}, options_.asynchronous);
  end_on_signal(step_);
  return due;
}

void TrainingState::save_on_signal(int signal, const std::string& dir) {
  check_save(dir, 0);
  impl_->watch.reset();
  impl_->watch = std::make_unique<SignalWatch>(signal);
  impl_->signal_dir = dir;
}

// The same answer on every rank.
bool TrainingState::signal_came() const {
  return world_.sum(impl_->watch->came() ? 1 : 0, "signals") > 0;
}

void TrainingState::end_on_signal(std::int64_t step) {
  if (!impl_->watch || !signal_came()) return;
  const SignalWatch spared(SIGTERM);  // this ends the process as soon as it can without loss
  const bool there = impl_->last_step == step && impl_->last_dir == impl_->signal_dir;
  if (!there) save(impl_->signal_dir, step);
  finish();
  if (world_.rank == 0) {
    log::warn("a signal has come: saved '{}', ending with status {}", last_save_->path,
              kSavedOnSignal);
  }
  world_.barrier("end on a signal");  // none is seen to be gone before all have saved
  std::exit(kSavedOnSignal);
}

// This rank's share of the files, verified.
TrainingState::Loaded TrainingState::read(const std::string& path) const {
  Loaded loaded{.path = path, .contents = {}, .manifest = read_manifest(path), .line = {}};
  const int saved_world = loaded.manifest.world_size, own = world_.rank % saved_world;
  loaded.contents = read_files(path, loaded.manifest, ReadBy::map, [&](const std::string& file) {
    return file == rank_file(own) || falls_to(file, world_.rank, world_.size);
  });
  loaded.line = line_of(path, loaded.manifest);
  return loaded;
}

// Tries this checkpoint on all ranks. Returns what is wrong with it on one of them, "" where it is
// whole; the same on every rank.
std::string TrainingState::try_to_read(const std::string& path, Loaded& loaded) const {
  const auto answers = world_.all_or_throw<core::IoError>("resume", [&] {
    core::Packer told;
    try {
      loaded = read(path);
      told.text("").number(loaded.manifest.checksum);
    } catch (const core::DataError& e) {
      told.text(e.what()).number(0);
    } catch (const NoSuchFile& e) {
      told.text(e.what()).number(0);
    } catch (const core::IoError& e) {
      core::fail<core::IoError>("resume", "expected to read '", path, "', got: ", e.what(),
                                " (which is no damage: try again, or resume another by its path)");
    }
    return told.bytes();
  });
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    const std::string where = rank == 0 ? "" : core::str("on rank ", rank, ": ");
    const std::string damage = core::Unpacker(answers[rank]).text();
    if (!damage.empty()) return where + damage;
    if (answers[rank] != answers[0]) return where + "it has another manifest there";
  }
  return "";
}

// Rank 0 says what there is, in which order; the first that is whole on all ranks is taken.
TrainingState::Loaded TrainingState::newest_good(const std::string& dir) {
  const auto told = world_.all_or_throw<core::IoError>("resume", [&] {
    core::Packer known;
    if (world_.rank != 0) return known.bytes();
    const std::vector<CheckpointInfo> checkpoints = checkpoints_in(dir),
                                      line = newest_line(checkpoints);
    known.number(checkpoints.size() - line.size()).number(line.size());
    for (const CheckpointInfo& one : line) known.text(one.path);
    return known.bytes();
  });
  core::Unpacker known(told.front());
  const std::uint64_t left_behind = known.number();
  std::vector<std::string> paths(known.count(8));
  for (std::string& path : paths) path = known.text();
  if (paths.empty()) return {};
  std::string all_damage;
  for (const std::string& path : paths) {
    Loaded loaded;
    const std::string damage = try_to_read(path, loaded);
    if (damage.empty()) return loaded;
    all_damage += "\n  " + damage;
    damaged_.push_back(path);
    if (world_.rank == 0) log::warn("passing over the damaged checkpoint '{}': {}", path, damage);
  }
  const std::string others =
      left_behind == 0 ? ""
                       : core::str("\n  (", left_behind,
                                   " more are of runs that were left behind: resume one by its "
                                   "path, or start in another folder)");
  core::fail<core::DataError>("resume", "expected a good checkpoint in '", dir, "', got ",
                              paths.size(), " damaged:", all_damage, others);
}

ResumeInfo TrainingState::load(Loaded loaded, const ResumeOptions& how) {
  ResumeInfo info{.path = loaded.path,
                  .step = loaded.manifest.lineage.step,
                  .world_size = loaded.manifest.world_size};
  Undo undo;
  try {
    world_.all_or_throw<core::IoError>("resume", [&] {
      apply(loaded, how, undo, info);
      return "";
    });
  } catch (...) {          // here or on another rank
    loaded.contents = {};  // its memory is the old state's
    for (const auto& give_back : undo) give_back();
    throw;
  }
  step_ = info.step;
  line_ = std::move(loaded.line);
  last_number_ = loaded.manifest.lineage.save;
  if (info.world_size != world_.size && world_.rank == 0)
    log::warn(
        "'{}' was saved by a world of {} and goes on in one of {}: the same batch on each rank is "
        "another global batch now",
        info.path, info.world_size, world_.size);
  return info;
}

std::optional<ResumeInfo> TrainingState::resume_latest(const std::string& dir,
                                                       const ResumeOptions& how) {
  finish();
  Loaded loaded;
  if (!dir.empty()) {
    if (!options_.read_only) open(dir);
    loaded = newest_good(dir);
  }
  if (!loaded.path.empty()) return load(std::move(loaded), how);
  line_.clear();
  last_number_ = 0;
  return {};
}

ResumeInfo TrainingState::resume(const std::string& path, const ResumeOptions& how) {
  finish();
  const std::string standing =
      world_.all_or_throw<core::IoError>("resume", [&] { return standing_path(path); }).front();
  Loaded loaded;
  const auto ids = world_.all_or_throw<core::IoError>("resume", [&] {
    loaded = read(standing);
    return std::to_string(loaded.manifest.checksum);
  });
  if (std::count(ids.begin(), ids.end(), ids.front()) != static_cast<std::ptrdiff_t>(ids.size())) {
    core::fail<core::DataError>("resume", "expected the same checkpoint in '", standing,
                                "' on all ranks, got different ones");
  }
  return load(std::move(loaded), how);
}

// Loads one part; where the options allow it and the state does not fit as it is, what of it fits.
void TrainingState::load_part(const Part& part, const StateDict& loaded, const StateDict& before,
                              const ResumeOptions& how, ResumeInfo& info) {
  if (how.strict) return part.stateful->load_state_dict(loaded);
  if (of_different_optimizers(before, loaded)) {
    info.kept.push_back(part.name);
    info.ignored.push_back(part.name);
    return;
  }
  std::vector<std::string> kept, ignored;
  const StateDict fitting = merged(before, loaded, part.name + ".", kept, ignored);
  try {
    return part.stateful->load_state_dict(loaded);
  } catch (const core::DataError&) {
    if (kept.empty() && ignored.empty()) throw;
  }
  part.stateful->load_state_dict(fitting);
  info.kept.insert(info.kept.end(), kept.begin(), kept.end());
  info.ignored.insert(info.ignored.end(), ignored.begin(), ignored.end());
}

// What was saved, under its new names, in shards where the parts here have them.
StateDict TrainingState::in_form_of(const StateDict& wanted, const Loaded& loaded,
                                    const ResumeOptions& how) {
  std::vector<ShardedTensor> sharded = sharded_tensors(loaded.manifest);
  for (ShardedTensor& tensor : sharded) tensor.name = new_name(tensor.name, how.rename);
  const FlatState form = flatten(wanted);
  StateDict stored = renamed(loaded.contents, how.rename);
  const auto is_shard = [](const auto& one) { return std::holds_alternative<Shard>(one.second); };
  if (sharded.empty() && std::none_of(form.begin(), form.end(), is_shard)) return stored;
  return unflatten(in_wanted_form(flatten(stored), sharded, form, piece_reader(loaded.path)));
}

// Each part's load is all or nothing; `undo` gives those that have loaded, and the generator, their
// old state back.
void TrainingState::apply(const Loaded& loaded, const ResumeOptions& how, Undo& undo,
                          ResumeInfo& info) {
  const int saved_world_size = loaded.manifest.world_size;
  std::string problems;
  std::set<std::string> known;
  std::vector<StateDict> before;  // of every part, ahead of the first load: they may share tensors
  StateDict wanted;
  for (const Part& part : parts_) {
    wanted.set(part.name, part.stateful->undo_state());
    before.push_back(unflatten(snapshot_of(flatten(wanted.dict(part.name)))));
  }
  const StateDict contents = in_form_of(wanted, loaded, how);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    known.insert(part.name);
    if (!contents.contains(part.name)) {
      if (how.strict) problems += core::str("\n  missing: '", part.name, "'");
      if (!how.strict) info.kept.push_back(part.name);
      continue;
    }
    try {
      load_part(part, contents.dict(part.name), before[i], how, info);
      undo.push_back([part, old = std::move(before[i])] { part.stateful->load_state_dict(old); });
    } catch (const core::OutOfMemory&) {  // the machine's, like the next two: it says nothing of
      throw;                              // the state
    } catch (const core::DeviceError&) {
      throw;
    } catch (const core::IoError&) {
      throw;
    } catch (const core::Error& e) {
      problems += core::str("\n  in '", part.name, "': ", e.what());
    }
  }
  for (const auto& [name, value] : contents) {
    if (name.rfind(kRankPrefix, 0) == 0 || known.contains(name)) continue;
    if (how.strict) problems += core::str("\n  surplus: '", name, "'");
    if (!how.strict) info.ignored.push_back(name);
  }
  if (!problems.empty()) {
    core::fail<core::DataError>("resume", "expected '", loaded.path,
                                "' to fit this training, got:", problems);
  }
  Generator& generator = Generator::current();
  undo.push_back([&generator, seed = generator.seed(), offset = generator.offset()] {
    generator.set(seed, offset);
  });
  restore_generator(contents, world_.rank, saved_world_size);
  undo.push_back([before = kernels::product_choices()] { kernels::use_product_choices(before); });
  restore_products(contents, world_.rank, saved_world_size);
}

}  // namespace cairn::checkpointing
