#include "cairn/autograd/autocast.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "cairn/autograd/function.h"
#include "cast.h"
#include "local.h"

namespace cairn::autograd {

// ---- What operations there are

namespace {

struct Registry {
  std::mutex mutex;  // a library may be loaded while others run
  std::map<std::string, CastPolicy> operations;
};

Registry& registry() {
  static Registry operations;
  return operations;
}

}  // namespace

bool detail::register_operation(const OpInfo& info) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.operations.emplace(info.name, info.policy).second;
}

std::vector<Operation> operations() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<Operation> list;
  for (const auto& [name, policy] : all.operations) list.push_back({name, policy});
  return list;
}

// ---- Overrides

namespace {

// How many letters to insert, delete or change to get from one word to the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, changed});
    }
  }
  return row.back();
}

bool near(std::string_view typed, std::string_view known) {
  const bool within =
      typed.size() >= 3 && (known.find(typed) != known.npos || typed.find(known) != typed.npos);
  return within || edit_distance(typed, known) <= std::max<std::size_t>(1, typed.size() / 3);
}

std::vector<std::string> known_names() {
  std::vector<std::string> names;
  for (const Operation& operation : operations()) names.push_back(operation.name);
  for (const OpRow& row : op_table()) {
    if (!row.cairn.empty()) names.emplace_back(row.cairn);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

void check_known(std::string_view op) {
  const std::vector<std::string> names = known_names();
  if (std::find(names.begin(), names.end(), op) != names.end()) return;
  std::string hint;
  for (const std::string& name : names) {
    if (near(op, name)) hint += (hint.empty() ? "did you mean '" : "' or '") + name;
  }
  hint += hint.empty() ? "docs/autocast.md lists them; wrap functions of your own with "
                         "half_function, float_function or promote_function"
                       : "'?";
  core::fail("cast_policies", "expected the name of an operation, got '", op, "' (", hint, ")");
}

}  // namespace

std::optional<CastPolicy> CastPolicies::find(std::string_view op) const {
  const auto found = policies_.find(op);
  return found == policies_.end() ? std::nullopt : std::optional(found->second);
}

void CastPolicies::set(std::string_view op, CastPolicy policy) {
  check_known(op);
  CAIRN_CHECK(op != "cast", "cast_policies",
              "expected an operation with a policy, got 'cast', which is the conversion itself");
  policies_.insert_or_assign(std::string(op), policy);
}

template <class Overrides>
void CastPolicyGuard::install(const Overrides& overrides) {
  auto policies =
      previous_ ? std::make_shared<CastPolicies>(*previous_) : std::make_shared<CastPolicies>();
  for (const auto& [op, policy] : overrides) policies->set(op, policy);
  local().autocast.policies = std::move(policies);
}

CastPolicyGuard::CastPolicyGuard(
    std::initializer_list<std::pair<std::string_view, CastPolicy>> overrides)
    : previous_(local().autocast.policies) {
  install(overrides);
}

CastPolicyGuard::CastPolicyGuard(const std::vector<std::pair<std::string, CastPolicy>>& overrides)
    : previous_(local().autocast.policies) {
  install(overrides);
}

CastPolicyGuard::~CastPolicyGuard() {
  local().autocast.policies = std::move(previous_);
}

// ---- Plain functions

namespace {

// The dtype for all of them; unset where there is nothing to cast.
std::optional<DType> target_of(CastPolicy policy, std::span<Tensor* const> tensors) {
  if (policy == CastPolicy::half) return local().autocast.dtype;
  if (policy == CastPolicy::f32) return DType::f32;
  std::optional<DType> widest;
  for (const Tensor* x : tensors) {
    if (!x->defined() || !core::is_floating(x->dtype())) continue;
    widest = widest ? core::promote(*widest, x->dtype()) : x->dtype();
  }
  return widest;
}

}  // namespace

void cast_arguments(CastPolicy policy, std::span<Tensor* const> tensors) {
  if (!local().autocast.enabled || policy == CastPolicy::keep) return;
  CAIRN_CHECK(policy != CastPolicy::banned, "cast_arguments",
              "expected half, f32, promote or keep, got banned");
  const std::optional<DType> dtype = target_of(policy, tensors);
  for (Tensor* x : tensors) {
    if (!dtype || !x->defined() || !core::is_floating(x->dtype())) continue;
    const bool widens = policy == CastPolicy::promote;
    if (x->dtype() == DType::f64 && !widens) continue;
    *x = core::is_half(*dtype) ? cached_cast(*x, *dtype) : cast(*x, *dtype);
  }
}

}  // namespace cairn::autograd
