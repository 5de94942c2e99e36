// What is drawn: numbers shrink to 0, so the first of a list is the simplest.
#pragma once

#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <rapidcheck.h>

#include "case.h"
#include "commands.h"

namespace cairn::stateful {

template <class T>
rc::Gen<T> choice(std::initializer_list<std::pair<int, T>> weighted) {
  std::vector<T> table;
  for (const auto& [weight, value] : weighted) {
    for (int k = 0; k < weight; ++k) table.push_back(value);
  }
  const auto size = static_cast<int>(table.size());
  return rc::gen::map(rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, size)),
                      [table](int index) { return table[at(index)]; });
}

rc::Gen<bool> seldom();
rc::Gen<bool> mostly();
rc::Gen<int> one_of(int count);

template <class C, class... Arguments>
rc::Gen<CommandPtr> make(rc::Gen<Arguments>... arguments) {
  return rc::gen::map(rc::gen::tuple(std::move(arguments)...), [](const auto& drawn) {
    return std::apply(
        [](const auto&... values) -> CommandPtr { return std::make_shared<const C>(values...); },
        drawn);
  });
}

rc::Gen<Precision> precisions();
rc::Gen<std::optional<Precision>> maybe_precision();
rc::Gen<Order> orders();
rc::Gen<unsigned> frozen_masks();
rc::Gen<Wiring> wirings();
rc::Gen<Loss> losses();
/// Odd ranks reach another part of the model than the others.
rc::Gen<Loss> losses_of_ranks();
rc::Gen<Step> steps();
rc::Gen<Setup> setups(int ranks);

const char* order_name(Order order);
std::ostream& operator<<(std::ostream& out, const Precision& precision);
std::ostream& operator<<(std::ostream& out, const Setup& setup);

}  // namespace cairn::stateful
