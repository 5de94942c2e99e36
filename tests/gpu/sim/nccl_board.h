// What the ranks of an NCCL communicator share, be they threads or processes: a folder in /dev/shm,
// named after the communicator's id. Ranks post messages there, which are files that appear whole.
//
// A rank that leaves takes its messages along, and the last one that lives takes the folder.
// Folders of ranks that are all dead are removed when the next communicator begins.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace cairn::gpusim {

class Board {
 public:
  /// A name that no other communicator of the machine has.
  static std::string new_name();
  static bool is_name(const std::string& text);

  /// `ids` stands for all names that the rank was given.
  Board(const std::string& name, int ranks, int rank, std::uint64_t ids);

  /// Takes the rank's place; what is wrong with that: empty, or "rank 1 is taken" and the like.
  std::string join(int device);
  bool all_joined() const;
  /// What is wrong with the ranks that have joined: empty, or two on one device, or of two sizes,
  /// or with other ids.
  std::string conflict() const;
  /// How many devices have joined both.
  int shared_with(const Board& other) const;
  void leave();

  void post(const std::string& key, const std::string& message);
  void remove(const std::string& key);  // this rank's
  std::optional<std::string> message(const std::string& key, int rank) const;
  bool posted(const std::string& key, int rank) const;
  bool posted_by_all(const std::string& key) const;
  /// Every rank's, in order; unset until all have come.
  std::optional<std::vector<std::string>> messages(const std::string& key) const;
  std::string take(const std::string& key, int rank);  // another's, which is gone then
  /// True for the first who asks.
  bool first(const std::string& key) const;

  const std::string& name() const { return name_; }
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  std::filesystem::path file(const std::string& key, int rank) const;
  bool lives(int rank) const;

  std::string name_;
  std::filesystem::path folder_;
  int ranks_;
  int rank_;
  std::uint64_t ids_;
  bool joined_ = false;
};

}  // namespace cairn::gpusim
