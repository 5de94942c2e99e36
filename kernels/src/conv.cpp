#include "cairn/kernels/conv.h"

#include "check.h"
#include "launch.h"

namespace cairn::kernels {

namespace {

void check_options(const char* op, const Conv2dOptions& options) {
  for (std::size_t i = 0; i < 2; ++i) {
    CAIRN_CHECK(options.stride[i] >= 1, op, "expected stride >= 1, got ", options.stride[i]);
    CAIRN_CHECK(options.padding[i] >= 0, op, "expected padding >= 0, got ", options.padding[i]);
    CAIRN_CHECK(options.dilation[i] >= 1, op, "expected dilation >= 1, got ", options.dilation[i]);
  }
  CAIRN_CHECK(options.groups >= 1, op, "expected groups >= 1, got ", options.groups);
}

std::int64_t output_size(const char* op, std::int64_t size, std::int64_t kernel, int axis,
                         const Conv2dOptions& options) {
  const auto i = static_cast<std::size_t>(axis);
  const std::int64_t reach = options.dilation[i] * (kernel - 1) + 1;
  const std::int64_t padded = size + 2 * options.padding[i];
  CAIRN_CHECK(padded >= reach, op, "expected an image no smaller than the kernel, got ", padded,
              " (with padding) for ", reach, " (with dilation) along ", axis == 0 ? "H" : "W");
  return (padded - reach) / options.stride[i] + 1;
}

Shape checked_shape(const char* op, const Shape& x, const Shape& weight,
                    const Conv2dOptions& options) {
  check_options(op, options);
  CAIRN_CHECK(x.dims() == 4, op, "expected an image [N, C, H, W], got ", x);
  CAIRN_CHECK(weight.dims() == 4, op, "expected weight [O, C / groups, kH, kW], got ", weight);
  CAIRN_CHECK(weight.numel() > 0, op, "expected a weight with elements, got ", weight);
  CAIRN_CHECK(x[1] == weight[1] * options.groups, op, "expected an image of ",
              weight[1] * options.groups, " channels for weight ", weight, " and groups ",
              options.groups, ", got ", x);
  CAIRN_CHECK(weight[0] % options.groups == 0, op,
              "expected a multiple of groups output channels, got ", weight[0], " for groups ",
              options.groups);
  return {x[0], weight[0], output_size(op, x[2], weight[2], 0, options),
          output_size(op, x[3], weight[3], 1, options)};
}

void check_image_dtype(const char* op, const Named& v) {
  const DType dtype = v.view.dtype;
  CAIRN_CHECK(core::is_half(dtype) || dtype == DType::f32, op, "expected ", v.name,
              " of dtype f16, bf16 or f32, got ", core::name(dtype));
}

// Of the image's dtype, or f32 beside half images.
void check_dtype_or_f32(const char* op, const Named& v, const Named& image) {
  const DType dtype = v.view.dtype;
  CAIRN_CHECK(dtype == image.view.dtype || dtype == DType::f32, op, "expected ", v.name,
              " of dtype ", core::name(image.view.dtype), " or f32, got ", core::name(dtype));
}

void check_channels(const char* op, const Named& v, std::int64_t channels, const Named& image) {
  if (!v.view.defined()) return;
  check_device(op, {image, v});
  check_shape(op, v, {channels});
  check_dtype_or_f32(op, v, image);
}

}  // namespace

Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2dOptions& options) {
  return checked_shape("conv2d", x, weight, options);
}

void conv2d(const TensorView& x, const TensorView& weight, const TensorView& bias,
            const TensorView& y, const Conv2dOptions& options) {
  constexpr const char* op = "conv2d";
  check_device(op, {{"x", x}, {"weight", weight}, {"y", y}});
  check_image_dtype(op, {"x", x});
  check_same_dtype(op, {{"x", x}, {"weight", weight}, {"y", y}});
  check_shape(op, {"y", y}, checked_shape(op, x.shape, weight.shape, options));
  check_channels(op, {"bias", bias}, weight.size(0), {"x", x});
  if (y.numel() == 0) return;
  wrote(y);
  launch(y.device, [=](const Backend& backend) { backend.conv2d(x, weight, bias, y, options); });
}

void conv2d_backward_data(const TensorView& dy, const TensorView& weight, const TensorView& bias,
                          const TensorView& dx, const Conv2dOptions& options) {
  constexpr const char* op = "conv2d_backward_data";
  check_device(op, {{"dy", dy}, {"weight", weight}, {"dx", dx}});
  check_image_dtype(op, {"dy", dy});
  check_same_dtype(op, {{"dy", dy}, {"weight", weight}, {"dx", dx}});
  check_shape(op, {"dy", dy}, checked_shape(op, dx.shape, weight.shape, options));
  check_channels(op, {"bias", bias}, dx.size(1), {"dy", dy});
  if (dx.numel() == 0) return;
  wrote(dx);
  launch(dx.device, [=](const Backend& backend) {
    backend.conv2d_backward_data(dy, weight, bias, dx, options);
  });
}

void conv2d_backward_weight(const TensorView& x, const TensorView& dy, const TensorView& dweight,
                            const TensorView& dbias, const Conv2dOptions& options,
                            bool accumulate) {
  constexpr const char* op = "conv2d_backward_weight";
  check_device(op, {{"x", x}, {"dy", dy}, {"dweight", dweight}});
  check_image_dtype(op, {"x", x});
  check_same_dtype(op, {{"x", x}, {"dy", dy}});
  check_dtype_or_f32(op, {"dweight", dweight}, {"x", x});
  check_shape(op, {"dy", dy}, checked_shape(op, x.shape, dweight.shape, options));
  check_channels(op, {"dbias", dbias}, dweight.size(0), {"x", x});
  const bool nothing = dy.numel() == 0;
  if (nothing && accumulate) return;
  wrote(dweight, dbias);
  launch(dweight.device, [=](const Backend& backend) {
    if (!nothing) {
      backend.conv2d_backward_weight(x, dy, dweight, dbias, options, accumulate);
      return;
    }
    backend.fill(dweight, 0.0);
    if (dbias.defined()) backend.fill(dbias, 0.0);
  });
}

}  // namespace cairn::kernels
