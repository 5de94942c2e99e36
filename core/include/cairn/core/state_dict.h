// StateDict: an ordered tree of tensors, numbers and text, the one form in which everything in
// Cairn saves and restores its state.
//
// Keys keep their order. Nested dictionaries flatten to "a.b.c" in files. Stateful is what can be
// put into a training state. A Shard stands where a rank holds only its part of a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "cairn/core/tensor.h"

namespace cairn::core {

/// A rank's part of a tensor that the ranks of a job hold between them, of each element one copy
/// (the moments of a sharded optimizer). Either rows, [n, whole[1], ...] from row `begin` on, or
/// elements in row-major order, [n] from element `begin` on; n may be 0.
///
/// Each rank saves its own. A state that is loaded has, for each shard that state_dict() hands out,
/// one of the same place, whatever the cuts were when it was saved; where that cannot be, because
/// the stored tensor is of another shape, one of that shape that holds nothing ([0]).
///
/// `rounded` is for exact values of which every rank keeps all in a smaller dtype and its shard in
/// f32 (masters of half weights): the whole tensor in that dtype. It is not saved: a state that is
/// loaded has the whole exact value, a Tensor, in the shard's place.
struct Shard {
  Tensor tensor;
  Shape whole;
  std::int64_t begin = 0;
  Tensor rounded = {};
};

class StateDict {
 public:
  using Value = std::variant<Tensor, double, std::int64_t, std::string, StateDict, Shard>;
  using Entry = std::pair<std::string, Value>;

  /// Replaces a value that is there. Throws InvalidArgument for a key that is empty or contains
  /// '.', which separates the levels of nested dictionaries in files.
  void set(const std::string& key, Value value);
  /// The dictionary under `key`. Where there is none it is made, in place of any other value.
  StateDict& make_dict(const std::string& key);
  bool contains(const std::string& key) const { return find(key) != nullptr; }
  const Value* find(const std::string& key) const;  // nullptr where absent
  Value* find(const std::string& key);

  // Typed access. Each throws DataError "[state] expected <kind> 'key', got ..." where the key is
  // absent or its value is of another kind.
  const Tensor& tensor(const std::string& key) const;
  double number(const std::string& key) const;  // also from an integer
  std::int64_t integer(const std::string& key) const;
  const std::string& text(const std::string& key) const;
  const StateDict& dict(const std::string& key) const;
  const Shard& shard(const std::string& key) const;

  std::size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  std::vector<Entry>::const_iterator begin() const { return entries_.begin(); }
  std::vector<Entry>::const_iterator end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> places_;  // by key, where there are many
};

/// Anything with state to save. load_state_dict() names every entry that is missing, surplus or of
/// another shape in one DataError, which it throws before it changes anything.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual StateDict state_dict() const = 0;
  virtual void load_state_dict(const StateDict& state) = 0;
  /// What load_state_dict() takes to undo the load of another state: state_dict(), also where that
  /// refuses to give what should not be saved.
  virtual StateDict undo_state() const { return state_dict(); }
};

}  // namespace cairn::core

namespace cairn {
using core::Shard;
using core::StateDict;
using core::Stateful;
}  // namespace cairn
