// Convolutions on oneDNN: images channels-last on both sides, which its fast kernels take as they
// are, or, on packed routes, reordered to the blocks that the primitive picks; weights, which are
// small, are reordered always. Images stored otherwise are brought to channels-last first.
#include <algorithm>
#include <functional>

#include "cpu/channels_last.h"
#include "cpu/cpu_backend.h"
#include "cpu/dnnl_operation.h"
#include "cpu/routes.h"
#include "temporary.h"

namespace cairn::kernels {

namespace {

using onednn::Desc;
using onednn::Dims;

// One channel, or 16, lies the same in oneDNN's blocked layouts for AVX-512 as channels-last; told
// so, it takes its kernels for first layers, which are twice as fast from one channel to 16. (It
// has none for the gradient of such an x.)
bool is_first_layer(const TensorView& x, const TensorView& y) {
  return x.size(1) == 1 && y.size(1) == 16 && onednn::has_isa(dnnl::cpu_isa::avx512_core);
}

using Tag = dnnl::memory::format_tag;

Desc image_desc(const Shape& shape, DType dtype, Tag tag = Tag::nhwc) {
  return Desc(Dims(shape.begin(), shape.end()), onednn::data_type(dtype), tag);
}

struct ConvShapes {
  Shape x, weight, y;
  Route route;
  Conv2dOptions options;
  bool first_layer = false;

  Desc x_desc() const { return desc(x); }
  Desc y_desc() const { return desc(y); }
  Desc desc(const Shape& image) const {
    if (route.packed) return image_desc(image, route.compute, Tag::any);
    if (!first_layer) return image_desc(image, route.compute);
    return image_desc(image, route.compute, image[1] == 1 ? Tag::nchw : Tag::nChw16c);
  }
};

// [O, I / groups, kH, kW] as oneDNN sees it: with groups, [groups, O / groups, I / groups, kH, kW].
TensorView grouped(const TensorView& weight, std::int64_t groups) {
  if (groups == 1) return weight;
  TensorView view = weight;
  view.shape = {groups, weight.size(0) / groups, weight.size(1), weight.size(2), weight.size(3)};
  view.strides = {weight.strides[0] * view.shape[1], weight.strides[0], weight.strides[1],
                  weight.strides[2], weight.strides[3]};
  return view;
}

Desc any_weight_desc(const ConvShapes& s, DType dtype) {
  const std::int64_t groups = s.options.groups;
  const TensorView view = grouped(TensorView(nullptr, s.weight, dtype), groups);
  return Desc(Dims(view.shape.begin(), view.shape.end()), onednn::data_type(dtype),
              dnnl::memory::format_tag::any);
}

onednn::ConvGeometry geometry(const ConvShapes& s) {
  const Conv2dOptions& o = s.options;
  return {{o.stride[0], o.stride[1]},
          {o.dilation[0] - 1, o.dilation[1] - 1},
          {o.padding[0], o.padding[1]}};
}

Desc channels_desc(std::int64_t channels, DType dtype) {
  return Desc({channels}, onednn::data_type(dtype), dnnl::memory::format_tag::a);
}

dnnl::convolution_forward::primitive_desc forward_desc(const ConvShapes& s, const Desc* bias) {
  return onednn::conv_forward_desc(s.x_desc(), any_weight_desc(s, s.route.compute), bias,
                                   s.y_desc(), geometry(s), onednn::attributes(), onednn::engine());
}

onednn::Operation make_forward(const ConvShapes& s, bool has_bias) {
  const Desc bias = channels_desc(s.weight[0], DType::f32);
  const auto pd = forward_desc(s, has_bias ? &bias : nullptr);
  return {dnnl::convolution_forward(pd),
          {{DNNL_ARG_SRC, pd.src_desc()},
           {DNNL_ARG_WEIGHTS, pd.weights_desc()},
           {DNNL_ARG_BIAS, bias},
           {DNNL_ARG_DST, pd.dst_desc()}},
          pd.scratchpad_desc(),
          onednn::is_reference(pd)};
}

onednn::Operation make_backward_data(const ConvShapes& s) {
  const auto pd = onednn::conv_backward_data_desc(s.x_desc(), any_weight_desc(s, s.route.compute),
                                                  s.y_desc(), geometry(s), onednn::attributes(),
                                                  onednn::engine(), forward_desc(s, nullptr));
  return {dnnl::convolution_backward_data(pd),
          {{DNNL_ARG_DIFF_SRC, pd.diff_src_desc()},
           {DNNL_ARG_WEIGHTS, pd.weights_desc()},
           {DNNL_ARG_DIFF_DST, pd.diff_dst_desc()}},
          pd.scratchpad_desc(),
          onednn::is_reference(pd)};
}

onednn::Operation make_backward_weight(const ConvShapes& s, bool has_bias) {
  const Desc dbias = channels_desc(s.weight[0], DType::f32);
  const auto pd = onednn::conv_backward_weights_desc(
      s.x_desc(), any_weight_desc(s, DType::f32), has_bias ? &dbias : nullptr, s.y_desc(),
      geometry(s), onednn::attributes(), onednn::engine(),
      forward_desc(s, has_bias ? &dbias : nullptr));
  return {dnnl::convolution_backward_weights(pd),
          {{DNNL_ARG_SRC, pd.src_desc()},
           {DNNL_ARG_DIFF_WEIGHTS, pd.diff_weights_desc()},
           {DNNL_ARG_DIFF_BIAS, dbias},
           {DNNL_ARG_DIFF_DST, pd.diff_dst_desc()}},
          pd.scratchpad_desc(),
          onednn::is_reference(pd)};
}

std::int64_t multiplications(const ConvShapes& s) {
  return s.y.numel() * (s.weight.numel() / std::max<std::int64_t>(s.weight[0], 1));
}

onednn::Key key_of(const char* kind, const ConvShapes& s) {
  const Conv2dOptions& o = s.options;
  onednn::Key key(kind, onednn::threads_for(multiplications(s)));
  key.add(static_cast<std::int64_t>(s.route.compute)).add(std::int64_t{s.route.packed});
  key.add(s.x).add(s.weight).add(s.y).add(o.groups);
  for (std::size_t i = 0; i < 2; ++i) key.add(o.stride[i]).add(o.padding[i]).add(o.dilation[i]);
  return key;
}

void deliver(const Backend& backend, const TensorView& sum, const TensorView& target,
             bool accumulate) {
  if (accumulate) {
    backend.axpby(1.0, sum, 1.0, target);
  } else {
    backend.copy(sum, target);
  }
}

Temporary converted(const Backend& backend, const TensorView& view, DType dtype) {
  if (!view.defined() || (view.dtype == dtype && view.is_contiguous())) return {Tensor(), view};
  Temporary copy = temporary(view.shape, dtype, view.device);
  backend.copy(view, copy.view);
  return copy;
}

// Weights in the layout of a primitive.
Temporary weight_input(const Backend& backend, const char* op, const TensorView& weight,
                       const ConvShapes& s, const Desc& wanted) {
  const bool readable = onednn::reads(weight.dtype) && weight.is_contiguous();
  const Temporary plain =
      readable ? Temporary{Tensor(), weight} : converted(backend, weight, s.route.compute);
  return onednn::reordered(op, plain, onednn::desc(grouped(plain.view, s.options.groups)), wanted);
}

bool is_readable(const TensorView& image) {
  return onednn::reads(image.dtype) && image.is_channels_last();
}

// An image to read, in the layout of a primitive.
Temporary read_image(const Backend& backend, const char* op, const TensorView& image,
                     const ConvShapes& s, const Desc& wanted) {
  if (!s.route.packed) return image_input(backend, image, s.route.compute);
  const Temporary given = is_readable(image) ? Temporary{Tensor(), image}
                                             : image_input(backend, image, s.route.compute);
  return onednn::reordered(op, given, image_desc(image.shape, given.view.dtype), wanted);
}

// Where a primitive writes an image.
class WrittenImage {
 public:
  WrittenImage(const char* op, const TensorView& image, const ConvShapes& s, const Desc& wanted)
      : op_(op), image_(image), wanted_(wanted), compute_(s.route.compute) {
    blocked_ = s.route.packed && wanted != image_desc(image.shape, compute_);
    room_ = blocked_ ? onednn::workspace(wanted, image.device) : image_output(image, compute_);
  }
  void* data() const { return room_.view.data; }
  void finish(const Backend& backend) const {
    if (!blocked_) return finish_output(backend, room_, image_);
    const Temporary plain =
        is_readable(image_) ? Temporary{Tensor(), image_} : image_output(image_, compute_);
    onednn::reorder(op_, wanted_, room_.view.data, image_desc(image_.shape, plain.view.dtype),
                    plain.view.data, image_.device);
    finish_output(backend, plain, image_);
  }

 private:
  const char* op_;
  TensorView image_;
  Desc wanted_;
  DType compute_;
  bool blocked_;
  Temporary room_;
};

void forward(const Backend& backend, const TensorView& x, const TensorView& weight,
             const TensorView& bias, const TensorView& y, const ConvShapes& s) {
  constexpr const char* op = "conv2d";
  const onednn::Key key = key_of(op, s).add(std::int64_t{bias.defined()});
  const auto operation = onednn::cached(key, [&] { return make_forward(s, bias.defined()); });
  const Temporary input = read_image(backend, op, x, s, operation->argument(DNNL_ARG_SRC));
  const WrittenImage output(op, y, s, operation->argument(DNNL_ARG_DST));
  const Temporary weights =
      weight_input(backend, op, weight, s, operation->argument(DNNL_ARG_WEIGHTS));
  const Temporary biases = converted(backend, bias, DType::f32);
  onednn::execute(op, *operation, y.device,
                  {{DNNL_ARG_SRC, input.view.data},
                   {DNNL_ARG_WEIGHTS, weights.view.data},
                   {DNNL_ARG_BIAS, biases.view.data},
                   {DNNL_ARG_DST, output.data()}});
  output.finish(backend);
}

void backward_data(const Backend& backend, const TensorView& dy, const TensorView& weight,
                   const TensorView& dx, const ConvShapes& s) {
  constexpr const char* op = "conv2d_backward_data";
  const auto operation = onednn::cached(key_of(op, s), [&] { return make_backward_data(s); });
  const Temporary input = read_image(backend, op, dy, s, operation->argument(DNNL_ARG_DIFF_DST));
  const WrittenImage output(op, dx, s, operation->argument(DNNL_ARG_DIFF_SRC));
  const Temporary weights =
      weight_input(backend, op, weight, s, operation->argument(DNNL_ARG_WEIGHTS));
  onednn::execute(op, *operation, dx.device,
                  {{DNNL_ARG_DIFF_SRC, output.data()},
                   {DNNL_ARG_WEIGHTS, weights.view.data},
                   {DNNL_ARG_DIFF_DST, input.view.data}});
  output.finish(backend);
}

void backward_weight(const Backend& backend, const TensorView& x, const TensorView& dy,
                     const TensorView& dweight, const TensorView& dbias, const ConvShapes& s,
                     bool accumulate) {
  constexpr const char* op = "conv2d_backward_weight";
  const onednn::Key key = key_of(op, s).add(std::int64_t{dbias.defined()});
  const auto operation =
      onednn::cached(key, [&] { return make_backward_weight(s, dbias.defined()); });
  const Temporary input = read_image(backend, op, x, s, operation->argument(DNNL_ARG_SRC));
  const Temporary gradient = read_image(backend, op, dy, s, operation->argument(DNNL_ARG_DIFF_DST));
  const Desc& made = operation->argument(DNNL_ARG_DIFF_WEIGHTS);
  const Temporary sums = onednn::workspace(made, x.device);
  Temporary bias_sums;
  if (dbias.defined()) bias_sums = temporary(dbias.shape, DType::f32, x.device);
  onednn::execute(op, *operation, x.device,
                  {{DNNL_ARG_SRC, input.view.data},
                   {DNNL_ARG_DIFF_DST, gradient.view.data},
                   {DNNL_ARG_DIFF_WEIGHTS, sums.view.data},
                   {DNNL_ARG_DIFF_BIAS, bias_sums.view.data}});
  // What oneDNN does not write takes the f32 gradient and rounds it.
  const bool direct = onednn::reads(dweight.dtype) && dweight.is_dense();
  const Temporary plain =
      direct ? Temporary{Tensor(), dweight} : temporary(dweight.shape, DType::f32, x.device);
  onednn::reorder(op, made, sums.view.data, onednn::desc(grouped(plain.view, s.options.groups)),
                  plain.view.data, x.device, direct && accumulate);
  if (!direct) deliver(backend, plain.view, dweight, accumulate);
  if (dbias.defined()) deliver(backend, bias_sums.view, dbias, accumulate);
}

std::string class_name(const char* op, const ConvShapes& s, DType dtype) {
  const Conv2dOptions& o = s.options;
  return core::str(op, " ", core::name(dtype), " ", rounded(s.x[0]), "x", rounded(s.x[1]), "x",
                   rounded(s.x[2]), "x", rounded(s.x[3]), " to ", rounded(s.y[1]), ", kernel ",
                   s.weight[2], "x", s.weight[3], ", stride ", o.stride[0], "x", o.stride[1],
                   ", dilation ", o.dilation[0], "x", o.dilation[1], ", groups ", rounded(o.groups),
                   ", ", onednn::threads_for(multiplications(s)), " threads");
}

std::vector<Route> routes_for(DType dtype) {
  const DType own = onednn::compute_dtype(dtype);
  std::vector<Route> routes{{own, false}};
  if (own != DType::f32) routes.push_back({DType::f32, false});
  routes.push_back({DType::f32, true});
  return routes;
}

// So many of the images that a timing takes some milliseconds.
std::int64_t images_to_time(const ConvShapes& s) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // multiplications
  const std::int64_t images = s.y[0], of_each = multiplications(s) / images;
  return std::clamp<std::int64_t>(kMost / std::max<std::int64_t>(of_each, 1), 1, images);
}

// The shapes by the route chosen for them. run(images, shapes) works on the first images.
ConvShapes on_route(const char* op, const ConvShapes& s, DType dtype,
                    const std::function<void(std::int64_t, const ConvShapes&)>& run) {
  const auto on = [&s](const Route& route) {
    ConvShapes shapes = s;
    shapes.route = route;
    shapes.first_layer = s.first_layer && !route.packed;
    return shapes;
  };
  const auto time = [&](const Route& route) {
    ConvShapes part = on(route);
    part.x[0] = part.y[0] = images_to_time(s);
    run(part.x[0], part);
  };
  return on(choose({.key = key_of(op, s).add(static_cast<std::int64_t>(dtype)),
                    .multiplications = multiplications(s),
                    .name = [&] { return class_name(op, s, dtype); },
                    .routes = routes_for(dtype),
                    .run = time}));
}

}  // namespace

void CpuBackend::conv2d(View x, View weight, View bias, View y,
                        const Conv2dOptions& options) const {
  const ConvShapes shapes{x.shape, weight.shape, y.shape, {}, options, is_first_layer(x, y)};
  const auto run = [&](std::int64_t n, const ConvShapes& s) {
    forward(*this, x.slice(0, 0, n), weight, bias, y.slice(0, 0, n), s);
  };
  run(x.size(0), on_route("conv2d", shapes, x.dtype, run));
}

void CpuBackend::conv2d_backward_data(View dy, View weight, View bias, View dx,
                                      const Conv2dOptions& options) const {
  const ConvShapes shapes{dx.shape, weight.shape, dy.shape, {}, options};
  const auto run = [&](std::int64_t n, const ConvShapes& s) {
    backward_data(*this, dy.slice(0, 0, n), weight, dx.slice(0, 0, n), s);
  };
  run(dy.size(0), on_route("conv2d_backward_data", shapes, dy.dtype, run));
  if (bias.defined()) axpby(1.0, bias.reshape({1, bias.size(0), 1, 1}).expand(dx.shape), 1.0, dx);
}

void CpuBackend::conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                                        const Conv2dOptions& options, bool accumulate) const {
  const ConvShapes shapes{x.shape, dweight.shape, dy.shape, {}, options, is_first_layer(x, dy)};
  // Timed on a result of its own: dweight may be what is added to.
  const auto time = [&](std::int64_t n, const ConvShapes& s) {
    const Temporary sums = temporary(dweight.shape, DType::f32, x.device);
    backward_weight(*this, x.slice(0, 0, n), dy.slice(0, 0, n), sums.view, {}, s, false);
  };
  const ConvShapes s = on_route("conv2d_backward_weight", shapes, x.dtype, time);
  backward_weight(*this, x, dy, dweight, dbias, s, accumulate);
}

}  // namespace cairn::kernels
