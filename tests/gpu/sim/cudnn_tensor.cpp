#include "gpu/sim/cudnn_tensor.h"

#include "gpu/sim/machine.h"

namespace cairn::gpusim {
namespace {

/// Elements that are neighbours in memory: those along a dimension, or single ones.
struct Line {
  std::size_t axis = 3, length = 1;
};

Line longest_line(const CudnnTensor& tensor) {
  Line line;
  for (std::size_t d = 0; d < 4; ++d) {
    const auto length = static_cast<std::size_t>(tensor.sizes[d]);
    if (tensor.strides[d] == 1 && length > line.length) line = {d, length};
  }
  return line;
}

/// Calls each(row-major index, place in memory) for the first element of every line.
template <class Each>
void for_lines(const CudnnTensor& tensor, const Line& line, Each each) {
  std::array<std::int64_t, 4> packed{}, ends = tensor.sizes, at{};
  std::int64_t next = 1;
  for (std::size_t d = 4; d-- > 0; next *= tensor.sizes[d]) packed[d] = next;
  if (line.length > 1) ends[line.axis] = 1;
  const auto dot = [&](const std::array<std::int64_t, 4>& by) {
    return static_cast<std::size_t>(at[0] * by[0] + at[1] * by[1] + at[2] * by[2] + at[3] * by[3]);
  };
  for (at[0] = 0; at[0] < ends[0]; ++at[0]) {
    for (at[1] = 0; at[1] < ends[1]; ++at[1]) {
      for (at[2] = 0; at[2] < ends[2]; ++at[2]) {
        for (at[3] = 0; at[3] < ends[3]; ++at[3]) each(dot(packed), dot(tensor.strides));
      }
    }
  }
}

/// Between the indices of a line's elements.
std::size_t step_of(const CudnnTensor& tensor, const Line& line) {
  std::int64_t step = 1;
  for (std::size_t d = line.axis + 1; d < 4; ++d) step *= tensor.sizes[d];
  return static_cast<std::size_t>(step);
}

}  // namespace

bool CudnnTensor::is_packed(bool channels_last) const {
  const auto [n, c, h, w] = sizes;
  if (channels_last) return strides == std::array{c * h * w, std::int64_t{1}, w * c, c};
  return strides == std::array{c * h * w, h * w, w, std::int64_t{1}};
}

Element CudnnTensor::element() const {
  if (type == CUDNN_DATA_HALF) return Element::f16;
  return type == CUDNN_DATA_BFLOAT16 ? Element::bf16 : Element::f32;
}

std::size_t CudnnTensor::count() const {
  return static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
}

CudnnValues load_tensor(const CudnnTensor& tensor, const void* data) {
  const std::size_t size = size_of(tensor.element());
  const Line line = longest_line(tensor);
  const std::size_t step = step_of(tensor, line);
  CudnnValues values(tensor.count());
  for_lines(tensor, line, [&](std::size_t index, std::size_t place) {
    const void* const from = static_cast<const char*>(data) + place * size;
    const auto* bytes = static_cast<const char*>(read(from, line.length * size));
    for (std::size_t i = 0; i < line.length; ++i)
      values[index + i * step] = load(tensor.element(), bytes + i * size);
  });
  return values;
}

void store_tensor(const CudnnTensor& tensor, void* data, const CudnnValues& values) {
  const std::size_t size = size_of(tensor.element());
  const Line line = longest_line(tensor);
  const std::size_t step = step_of(tensor, line);
  for_lines(tensor, line, [&](std::size_t index, std::size_t place) {
    auto* bytes =
        static_cast<char*>(write(static_cast<char*>(data) + place * size, line.length * size));
    for (std::size_t i = 0; i < line.length; ++i)
      store(tensor.element(), bytes + i * size, values[index + i * step]);
  });
}

}  // namespace cairn::gpusim
