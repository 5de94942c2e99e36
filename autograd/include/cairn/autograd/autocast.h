// What autocast does with which operation: the one table, overrides of it for a scope, and the
// registration of plain functions.
//
//   const autograd::AutocastGuard autocast(true, DType::bf16);
//   const autograd::CastPolicyGuard policies(
//       {{"softmax", autograd::CastPolicy::half}});            // here, and nowhere else
//   auto fused = autograd::half_function(my_fused_block);      // casts its arguments
//
// Nothing here is global: overrides belong to the thread's AutocastState, so ThreadState hands them
// over with it, and two trainings in one process do not see each other's.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cairn/autograd/thread_state.h"
#include "cairn/core/tensor.h"

namespace cairn::autograd {

// ---- The table

/// What Apex's O1 lists and torch.amp's CUDA lists say of an operation. unlisted: as its inputs
/// come.
enum class ListPolicy { unlisted, half, f32, promote, sequence, banned };

struct OpRow {
  std::string_view name;  // as users of PyTorch know it; several of one kind with ", " between
  ListPolicy apex, torch;
  std::string_view cairn;   // Cairn's operation (OpInfo::name); empty where it has none
  CastPolicy policy;        // of Cairn's operation
  std::string_view reason;  // why, in two or three words
  std::string_view note;    // where Cairn differs, and why; or what to use instead
};

/// Every operation of Cairn, of Apex's lists and of torch.amp's.
std::span<const OpRow> op_table();
/// The row of one of Cairn's operations; null for others (a user's own).
const OpRow* find_op(std::string_view cairn_name);
/// The table in Markdown, as docs/autocast.md shows it.
std::string op_table_markdown();

std::string_view name(CastPolicy policy);  // "half"
std::string_view name(ListPolicy policy);  // "half", "-" for unlisted

struct Operation {
  std::string name;
  CastPolicy policy;
};
/// The operations that this program contains, a user's own among them, sorted by name.
std::vector<Operation> operations();

// ---- Overrides

/// Policies of single operations, by OpInfo::name. Immutable once it is in an AutocastState.
class CastPolicies {
 public:
  std::optional<CastPolicy> find(std::string_view op) const;
  /// Throws core::InvalidArgument, with the names that are near, where there is no such operation.
  void set(std::string_view op, CastPolicy policy);

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, CastPolicy, Hash, std::equal_to<>> policies_;
};

/// Inside its scope, and in autocast regions only, the named operations follow these policies
/// instead of their own: run softmax in half, or lift a ban with f32. Scopes nest; the inner one
/// wins. For one model: `model.add_forward_wrapper(...)` with a guard in it; for a whole thread: a
/// guard at its start. An operation that promotes still brings its inputs to one dtype.
class [[nodiscard]] CastPolicyGuard {
 public:
  explicit CastPolicyGuard(
      std::initializer_list<std::pair<std::string_view, CastPolicy>> overrides);
  explicit CastPolicyGuard(const std::vector<std::pair<std::string, CastPolicy>>& overrides);
  ~CastPolicyGuard();
  CastPolicyGuard(const CastPolicyGuard&) = delete;
  CastPolicyGuard& operator=(const CastPolicyGuard&) = delete;

 private:
  template <class Overrides>
  void install(const Overrides& overrides);
  std::shared_ptr<const CastPolicies> previous_;
};

// ---- Plain functions

/// Casts the tensors as an operation of that policy would: floating ones, not f64. Through the cast
/// cache for half. No-op outside of an enabled autocast region.
void cast_arguments(CastPolicy policy, std::span<Tensor* const> tensors);

namespace detail {

// How an argument is held while it may be cast: tensors by handle, anything else as it came.
template <class A>
struct Held {
  using type = A&&;
};
template <class A>
requires std::is_same_v<std::remove_cvref_t<A>, Tensor> ||
    std::is_same_v<std::remove_cvref_t<A>, std::vector<Tensor>>
struct Held<A> {
  using type = std::remove_cvref_t<A>;
};

template <class A>
void collect(std::vector<Tensor*>& tensors, A& argument) {
  if constexpr (std::is_same_v<A, Tensor>) {
    tensors.push_back(&argument);
  } else if constexpr (std::is_same_v<A, std::vector<Tensor>>) {
    for (Tensor& tensor : argument) tensors.push_back(&tensor);
  }
}

template <class F>
class CastFunction {
 public:
  CastFunction(CastPolicy policy, F f) : policy_(policy), f_(std::move(f)) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    using Arguments = std::tuple<typename Held<Args>::type...>;
    Arguments arguments(std::forward<Args>(args)...);
    if (autocast_state().enabled) {
      std::vector<Tensor*> tensors;
      std::apply([&](auto&... argument) { (collect(tensors, argument), ...); }, arguments);
      cast_arguments(policy_, tensors);
    }
    const AutocastGuard inside(false, DType::f16, /*cache=*/false);
    return std::apply(f_, std::move(arguments));
  }

 private:
  CastPolicy policy_;
  F f_;
};

}  // namespace detail

/// A function that is one operation to autocast: in a region every floating argument (tensors, and
/// tensors in a std::vector; not f64) is cast to the region's half dtype, and the function runs
/// with autocast off, so operations inside take what they get. Outside of a region: f itself.
template <class F>
auto half_function(F f) {
  return detail::CastFunction<F>(CastPolicy::half, std::move(f));
}
/// The same with half arguments widened to f32.
template <class F>
auto float_function(F f) {
  return detail::CastFunction<F>(CastPolicy::f32, std::move(f));
}
/// The same with all floating arguments in the widest of their dtypes (f16 with bf16 gives f32).
template <class F>
auto promote_function(F f) {
  return detail::CastFunction<F>(CastPolicy::promote, std::move(f));
}

}  // namespace cairn::autograd
