// A profile that `cairn-run profile` asked for, from its last step on. The training waits for no
// other rank: each lays what it has into its folder, and one of them makes the file of all. Ranks
// of one machine have one clock, and its nanoseconds when somebody asked are the traces' zero.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "cairn/core/status.h"
#include "cairn/core/world.h"
#include "files.h"
#include "trace.h"

namespace cairn::observe {

/// "steps 20 to 25"
std::string text_of(ProfiledSteps steps);

/// By the writer's thread.
class AskedProfile {
 public:
  struct HandedIn {
    core::ProfileRequest request;
    ProfiledSteps steps;
    TracePart part;
  };
  /// `folder`: of this rank.
  AskedProfile(const World& world, std::string folder, Failures& failures);

  void begin(HandedIn own);
  /// Takes what other ranks have; makes the file once all have come, or after some seconds. Where
  /// the run ends it waits a second for them.
  void turn(bool last);
  /// Makes the file of what has come, if one is waited for.
  void join();

 private:
  void take_parts();
  std::string folder_of(int rank) const;
  RankTrace trace_of(int rank, const TracePart& part) const;
  void answer(const std::string& file, const std::string& more = "");

  const World& world_;
  std::string folder_;
  Failures& failures_;
  std::optional<HandedIn> own_;     // while others are waited for
  std::map<int, TracePart> parts_;  // by rank
  double until_ = 0;
};

}  // namespace cairn::observe
