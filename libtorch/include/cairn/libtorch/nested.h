// A function over all tensors of a value: a tensor, or any nesting of optionals, pairs, tuples,
// arrays, vectors and maps of them. Everything else passes as it is.
#pragma once

#include <torch/types.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cairn::libtorch {

namespace detail {

template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

template <class T>
struct IsList : std::false_type {};
template <class T, class A>
struct IsList<std::vector<T, A>> : std::true_type {};
template <class T, std::size_t N>
struct IsList<std::array<T, N>> : std::true_type {};

template <class T>
struct IsMap : std::false_type {};
template <class K, class T, class... Rest>
struct IsMap<std::map<K, T, Rest...>> : std::true_type {};
template <class K, class T, class... Rest>
struct IsMap<std::unordered_map<K, T, Rest...>> : std::true_type {};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <class T>
inline constexpr bool kNests = std::is_same_v<T, torch::Tensor> || IsOptional<T>::value ||
                               IsTuple<T>::value || IsList<T>::value || IsMap<T>::value;

}  // namespace detail

/// Calls visit(tensor) with each, by reference.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Value, torch::Tensor>) {
    visit(value);
  } else if constexpr (detail::IsOptional<Value>::value) {
    if (value) for_each_tensor(*value, visit);
  } else if constexpr (detail::IsTuple<Value>::value) {
    std::apply([&](auto&... parts) { (for_each_tensor(parts, visit), ...); }, value);
  } else if constexpr (detail::IsList<Value>::value) {
    for (auto&& part : value) for_each_tensor(part, visit);
  } else if constexpr (detail::IsMap<Value>::value) {
    for (auto& [key, part] : value) for_each_tensor(part, visit);
  }
}

/// A copy of the value with each tensor replaced by map(tensor).
template <class T, class Map>
T map_tensors(T value, const Map& map) {
  for_each_tensor(value, [&](torch::Tensor& x) { x = map(x); });
  return value;
}

}  // namespace cairn::libtorch
