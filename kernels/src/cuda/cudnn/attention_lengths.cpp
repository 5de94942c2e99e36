#include "cuda/cudnn/attention_lengths.h"

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "choices.h"
#include "cuda/bounded_cache.h"
#include "cuda/cudnn/attention_plan.h"
#include "cuda/shape_class.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kOwnLengths = 8;  // of a kind
constexpr std::size_t kKeptKinds = 256;
constexpr std::int64_t kLeastClass = 64;  // a tile's rows

std::string text_of(const SdpaKind& kind) {
  std::ostringstream text;
  text << (kind.backward ? "backward " : "forward ") << core::name(kind.dtype)
       << (kind.causal ? " causal" : "") << " H " << kind.heads << " G " << kind.key_heads << " D "
       << kind.columns;
  return text.str();
}

bool is_whole(const SdpaLengths& lengths) {
  return class_of(lengths.queries, kLeastClass) == lengths.queries &&
         class_of(lengths.keys, kLeastClass) == lengths.keys;
}

/// Those whose plans this run has chosen, or the one that it resumes had.
std::set<SdpaLengths> lengths_in_choices(const Queue& queue, const SdpaKind& kind) {
  std::set<SdpaLengths> found;
  const std::string start = text_of(kind) + " T ";
  for (const auto& [name, way] : plan_choices(queue, kAttentionPlans).used()) {
    if (!name.starts_with(start)) continue;
    SdpaLengths lengths;
    std::string keys;
    std::istringstream text(name.substr(start.size()));
    if (text >> lengths.queries >> keys >> lengths.keys && !is_whole(lengths))
      found.insert(lengths);
  }
  return found;
}

class OwnLengths {
 public:
  explicit OwnLengths(std::set<SdpaLengths> lengths) : lengths_(std::move(lengths)) {}

  /// Whether they are among them, or there is room.
  bool admit(const SdpaLengths& lengths) {
    const std::lock_guard lock(mutex_);
    if (lengths_.size() < kOwnLengths) lengths_.insert(lengths);
    return lengths_.contains(lengths);
  }

 private:
  std::mutex mutex_;
  std::set<SdpaLengths> lengths_;
};

std::shared_ptr<OwnLengths> own_lengths_of(const Queue& queue, const SdpaKind& kind) {
  using Key = std::pair<std::uint64_t, SdpaKind>;  // a setting that changed begins anew
  static auto& known = *new BoundedCache<Key, std::shared_ptr<OwnLengths>>(kKeptKinds);
  return known.get({product_setting_epoch(), kind},
                   [&] { return std::make_shared<OwnLengths>(lengths_in_choices(queue, kind)); });
}

}  // namespace

std::string sdpa_name(const SdpaKind& kind, const SdpaLengths& lengths) {
  return core::str(text_of(kind), " T ", lengths.queries, " S ", lengths.keys);
}

std::optional<std::int64_t> rows_of_zeros(const Queue& queue, const SdpaKind& kind,
                                          const SdpaLengths& lengths) {
  if (is_whole(lengths) || own_lengths_of(queue, kind)->admit(lengths)) return 0;
  if (!kind.causal || lengths.queries != lengths.keys) return {};
  return class_of(lengths.queries, kLeastClass) - lengths.queries;
}

}  // namespace cairn::kernels::cuda
