#include "cairn/kernels/pool.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

Shape checked_shape(const char* op, const Shape& x, const Pool2dOptions& options) {
  CAIRN_CHECK(x.dims() == 4, op, "expected an image [N, C, H, W], got ", x);
  if (options.output) {
    const auto [height, width] = *options.output;
    CAIRN_CHECK(height >= 1 && width >= 1 && x[2] >= 1 && x[3] >= 1, op,
                "expected an image and an output of at least one pixel, got ", x, " and ", height,
                " x ", width);
    return {x[0], x[1], height, width};
  }
  Shape y{x[0], x[1], 0, 0};
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int64_t kernel = options.kernel[i], stride = options.stride[i];
    const std::int64_t padding = options.padding[i], size = x[static_cast<int>(i) + 2];
    CAIRN_CHECK(kernel >= 1, op, "expected kernel >= 1, got ", kernel);
    CAIRN_CHECK(stride >= 1, op, "expected stride >= 1, got ", stride);
    CAIRN_CHECK(padding >= 0 && 2 * padding <= kernel, op,
                "expected padding of 0 to half the kernel, got ", padding, " for kernel ", kernel);
    CAIRN_CHECK(size + 2 * padding >= kernel, op,
                "expected an image no smaller than the kernel, got ", size, " (padding ", padding,
                ") for ", kernel, " along ", i == 0 ? "H" : "W");
    y[static_cast<int>(i) + 2] = (size + 2 * padding - kernel) / stride + 1;
  }
  return y;
}

// An image, its pooled form, and what else has the pooled shape.
void check_images(const char* op, const Named& image, const Named& pooled,
                  const Pool2dOptions& options) {
  check_device(op, {image, pooled});
  check_floating(op, {image});
  check_same_dtype(op, {image, pooled});
  check_shape(op, pooled, checked_shape(op, image.view.shape, options));
}

void check_fixed(const char* op, const Pool2dOptions& options) {
  CAIRN_CHECK(!options.output, op,
              "expected a kernel and a stride, got an output size (resample2d "
              "has the means of such windows)");
}

void check_index(const char* op, const Named& index, const Named& pooled, const Shape& image) {
  check_device(op, {pooled, index});
  check_dtype(op, index, DType::i32);
  check_same_shape(op, {pooled, index});
  constexpr std::int64_t kLargest = 2147483647;
  CAIRN_CHECK(image[2] * image[3] <= kLargest, op, "expected H * W <= ", kLargest,
              " for 32-bit indices, got ", image);
}

}  // namespace

Shape pool2d_shape(const Shape& x, const Pool2dOptions& options) {
  return checked_shape("pool2d", x, options);
}

void max_pool2d(const TensorView& x, const TensorView& y, const TensorView& index,
                const Pool2dOptions& options) {
  check_images("max_pool2d", {"x", x}, {"y", y}, options);
  check_index("max_pool2d", {"index", index}, {"y", y}, x.shape);
  if (y.numel() == 0) return;
  wrote(y, index);
  launch(y.device, [=](const Backend& backend) { backend.max_pool2d(x, y, index, options); });
}

void max_pool2d_backward(const TensorView& dy, const TensorView& index, const TensorView& dx,
                         const Pool2dOptions& options) {
  check_images("max_pool2d_backward", {"dx", dx}, {"dy", dy}, options);
  check_index("max_pool2d_backward", {"index", index}, {"dy", dy}, dx.shape);
  if (dx.numel() == 0) return;
  wrote(dx);
  launch(dx.device,
         [=](const Backend& backend) { backend.max_pool2d_backward(dy, index, dx, options); });
}

void avg_pool2d(const TensorView& x, const TensorView& y, const Pool2dOptions& options) {
  check_fixed("avg_pool2d", options);
  check_images("avg_pool2d", {"x", x}, {"y", y}, options);
  if (y.numel() == 0) return;
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.avg_pool2d(x, y, options); });
}

void avg_pool2d_backward(const TensorView& dy, const TensorView& dx, const Pool2dOptions& options) {
  check_fixed("avg_pool2d_backward", options);
  check_images("avg_pool2d_backward", {"dx", dx}, {"dy", dy}, options);
  if (dx.numel() == 0) return;
  wrote(dx);
  launch(dx.device, [=](const Backend& backend) { backend.avg_pool2d_backward(dy, dx, options); });
}

}  // namespace cairn::kernels
