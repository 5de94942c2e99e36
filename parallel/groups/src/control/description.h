// What a rank calls, as the ranks compare it and errors print it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cairn/core/tensor_view.h"

namespace cairn::parallel {

/// What a rank gives to a collective and has of it, for the flight recorder.
struct MovedSizes {
  DType dtype = DType::u8;
  bool on_gpu = false;
  bool uneven = false;  // parts of different sizes: in and out are those of all parts together
  Shape in{}, out{};    // without dimensions where there is none
};
/// `own` is what every rank gives: `in` or `out` may be one's alone.
MovedSizes moved_sizes(const TensorView& own, const TensorView& in, const TensorView& out);

/// "all_reduce sum f32[3, 4] 'fc.weight'". Every collective has one and few are ever read, so the
/// text is made where it is; the hash is there at once.
class Description {
 public:
  Description() = default;
  /// As it is.  NOLINTNEXTLINE(google-explicit-constructor)
  Description(std::string text, std::int64_t bytes = 0);
  Description(const char* text) : Description(std::string(text)) {}  // NOLINT
  /// Of a tensor's collective; `operation` and `detail` are literals, `root` follows `detail` where
  /// it is not negative.
  Description(const char* operation, std::string_view detail, int root, const TensorView& x,
              std::string_view name);

  Description& moving(MovedSizes sizes) {
    moved_ = sizes;
    return *this;
  }
  /// Unless moving() said more, the tensor goes in and comes out.
  MovedSizes moved() const;

  std::string text() const;
  /// As much of the text as there is room for, without allocating; its bytes.
  std::size_t write(std::span<char> out) const;
  std::int64_t bytes() const { return bytes_; }
  /// The same on all ranks that call the same.
  std::uint64_t hash() const { return hash_; }

 private:
  template <class Text>
  void spell(Text& text) const;

  const char* operation_ = nullptr;  // none: name_ is the text
  std::string_view detail_;
  int root_ = -1;
  DType dtype_ = DType::u8;
  bool on_gpu_ = false;
  Shape shape_;
  std::string name_;
  std::int64_t bytes_ = 0;
  std::uint64_t hash_ = 0;
  std::optional<MovedSizes> moved_;
};

/// Of a collective's number and description: data of different ones never meets.
std::uint64_t fingerprint(const Description& description, std::uint64_t sequence);

}  // namespace cairn::parallel
