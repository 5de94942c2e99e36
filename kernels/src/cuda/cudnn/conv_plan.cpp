#include "cuda/cudnn/conv_plan.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "cuda/bounded_cache.h"
#include "product_setting.h"

namespace cairn::kernels::cuda {
namespace {

constexpr std::size_t kKeptConvolutions = 1024;
constexpr std::int64_t kMostElements = std::numeric_limits<std::int32_t>::max();

void describe_sizes(std::ostream& text, const char* name, const auto& sizes) {
  text << ' ' << name;
  for (const std::int64_t size : sizes) text << ' ' << size;
}

/// All of a shape but the device's number.
std::string name_of(const ConvShape& shape) {
  constexpr const char* kPasses[] = {"forward", "backward data", "backward weight"};
  std::ostringstream text;
  text << kPasses[static_cast<int>(shape.pass)] << ' ' << core::name(shape.dtype)
       << (shape.storage == StorageOrder::channels_last ? " channels-last" : " row-major");
  describe_sizes(text, "x", shape.x);
  describe_sizes(text, "weight", shape.weight);
  describe_sizes(text, "y", shape.y);
  describe_sizes(text, "stride", shape.stride);
  describe_sizes(text, "padding", shape.padding);
  describe_sizes(text, "dilation", shape.dilation);
  text << (shape.tf32 ? " tf32" : "");
  return text.str();
}

PlannedGraph planned(const ConvShape& shape) {
  return {
      .kind = "cudnn_convolutions",
      .name = name_of(shape),
      .describe = [shape](const Queue& queue,
                          const CudnnHandle& handle) { return conv_graph(queue, handle, shape); },
      .tensor_cores = shape.dtype != DType::f32 || shape.tf32};
}

}  // namespace

std::shared_ptr<Plans> conv_plans_for(const ConvShape& shape) {
  using Key = std::pair<std::uint64_t, ConvShape>;  // a setting that changed asks anew
  static auto& known = *new BoundedCache<Key, std::shared_ptr<Plans>>(kKeptConvolutions);
  return known.get({product_setting_epoch(), shape},
                   [&] { return std::make_shared<Plans>(planned(shape)); });
}

std::int64_t images_at_once(const char* op, const Shape& x, const Shape& weight, const Shape& y) {
  const std::int64_t image = std::max(x.numel() / x[0], y.numel() / y[0]);
  if (image > kMostElements || weight.numel() > kMostElements) {
    core::fail<core::Unsupported>(op, "expected images and a weight of at most ", kMostElements,
                                  " elements each, which is cuDNN's limit, got x ", x, ", weight ",
                                  weight, " and y ", y);
  }
  return kMostElements / image;
}

}  // namespace cairn::kernels::cuda
