// Ways of doing some work that were timed on this machine, kept in memory and in a file, so that
// each is timed once a machine and not once a run.
//
//   Choices choices("cpu_products", "AMD EPYC 9575F, avx512_core_bf16, oneDNN 2.6.3");
//   std::optional<std::string> way = choices.find(work);
//   if (!way) way = choices.keep(work, timed(work));  // another process's, where it was faster
//
// Works and ways are texts that only their user understands. A file `<kind>.json` holds the choices
// of all machines that share the folder:
//
//   {"format": 1, "machines": {"AMD EPYC 9575F ...": {"matmul bf16 ...": "packed", ...}, ...}}
//
// One that was timed beside other load stands for a day ("packed until 1764633600", in seconds
// since 1970): runs of that day have the same bits, and a later one times it again.
//
// Several processes may use it at once: what was written first stands, and the others adopt it. It
// is replaced as a whole, under a lock. A file that is damaged, foreign or cannot be written is
// left alone: a warning says so once, and choices go on in memory.
#pragma once

#include <ctime>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace cairn::kernels {

/// The folder of CAIRN_CACHE ("off": none), else cairn in XDG_CACHE_HOME or ~/.cache. Empty where
/// there is none: choices stay in memory.
std::string choices_folder();

/// Any thread may call anything.
class Choices {
 public:
  using Ways = std::map<std::string, std::string>;  // by work

  /// `machine`: all that a timing depends on and `work` does not say.
  Choices(std::string kind, std::string machine, const std::string& folder = choices_folder());

  /// The way that stands for `work`, and from now on counts as used.
  std::optional<std::string> find(const std::string& work);
  /// Keeps `way` for `work`, unless there is one by now, maybe another process's: returns the one
  /// that stands, which counts as used. `until`, in seconds since 1970: processes that begin later
  /// have none; 0: it stands for good.
  std::string keep(const std::string& work, const std::string& way, std::time_t until = 0);

  /// These stand before all others from now on, in memory alone, in place of any preferred before.
  void prefer(Ways ways);
  /// What was used so far, and what is preferred.
  Ways used() const;

 private:
  std::optional<std::string> standing(const std::string& work) const;
  void load_once();
  void give_up_file(const char* problem);

  mutable std::mutex mutex_;
  std::string kind_, machine_;
  std::string file_;  // empty: memory alone
  bool loaded_ = false;
  Ways kept_;  // as in the file
  Ways preferred_, used_;
};

/// The one of this process, made at its first use. product_choices.h saves and restores those of
/// all kinds.
Choices& shared_choices(const std::string& kind, const std::string& machine);

}  // namespace cairn::kernels
