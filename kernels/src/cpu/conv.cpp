// Convolutions on oneDNN: images channels-last on both sides, which its fast kernels take as they
// are; weights, which are small, are reordered to the layout the primitive picks. Images stored
// otherwise are brought to channels-last first.
#include "cairn/core/parallel_for.h"
#include "cpu/channels_last.h"
#include "cpu/cpu_backend.h"
#include "cpu/dnnl_operation.h"
#include "cpu/temporary.h"

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

Desc image_desc(const Shape& shape, DType dtype, bool first_layer) {
  using Tag = dnnl::memory::format_tag;
  const Tag tag = !first_layer ? Tag::nhwc : shape[1] == 1 ? Tag::nchw : Tag::nChw16c;
  return Desc(Dims(shape.begin(), shape.end()), onednn::data_type(dtype), tag);
}

struct ConvShapes {
  Shape x, weight, y;
  DType dtype;  // computed in
  Conv2dOptions options;
  bool first_layer = false;

  Desc x_desc() const { return image_desc(x, dtype, first_layer); }
  Desc y_desc() const { return image_desc(y, dtype, first_layer); }
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
  return onednn::conv_forward_desc(s.x_desc(), any_weight_desc(s, s.dtype), bias, s.y_desc(),
                                   geometry(s), onednn::attributes(), onednn::engine());
}

onednn::Operation make_forward(const ConvShapes& s, bool has_bias) {
  const Desc bias = channels_desc(s.weight[0], DType::f32);
  const auto pd = forward_desc(s, has_bias ? &bias : nullptr);
  return {dnnl::convolution_forward(pd),
          {{DNNL_ARG_SRC, pd.src_desc()},
           {DNNL_ARG_WEIGHTS, pd.weights_desc()},
           {DNNL_ARG_BIAS, bias},
           {DNNL_ARG_DST, pd.dst_desc()}},
          pd.scratchpad_desc()};
}

onednn::Operation make_backward_data(const ConvShapes& s) {
  const auto pd = onednn::conv_backward_data_desc(s.x_desc(), any_weight_desc(s, s.dtype),
                                                  s.y_desc(), geometry(s), onednn::attributes(),
                                                  onednn::engine(), forward_desc(s, nullptr));
  return {dnnl::convolution_backward_data(pd),
          {{DNNL_ARG_DIFF_SRC, pd.diff_src_desc()},
           {DNNL_ARG_WEIGHTS, pd.weights_desc()},
           {DNNL_ARG_DIFF_DST, pd.diff_dst_desc()}},
          pd.scratchpad_desc()};
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
          pd.scratchpad_desc()};
}

onednn::Key key_of(const char* kind, const ConvShapes& s) {
  const Conv2dOptions& o = s.options;
  onednn::Key key(kind, onednn::threads_for(s.y.numel() * s.weight.numel() / s.weight[0]));
  key.add(static_cast<std::int64_t>(s.dtype)).add(s.x).add(s.weight).add(s.y).add(o.groups);
  for (std::size_t i = 0; i < 2; ++i) key.add(o.stride[i]).add(o.padding[i]).add(o.dilation[i]);
  return key;
}

// Copies weights between the caller's layout and a primitive's, converting f32 and bf16; accumulate
// adds to what is there.
void reorder(const char* op, const Desc& from, void* source, const Desc& to, void* target,
             const onednn::Key& key, Device device, bool accumulate) {
  const auto operation = onednn::cached(key, [&] {
    dnnl::primitive_attr attr = onednn::attributes();
    if (accumulate) {
      dnnl::post_ops ops;
      ops.append_sum(1.0f);
      attr.set_post_ops(ops);
    }
    const dnnl::reorder::primitive_desc pd(onednn::engine(), from, onednn::engine(), to, attr);
    return onednn::Operation{
        dnnl::reorder(pd), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, pd.scratchpad_desc()};
  });
  onednn::execute(op, *operation, device, {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, target}});
}

Temporary bytes(std::size_t count, Device device) {
  return temporary({static_cast<std::int64_t>(count)}, DType::u8, device);
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
                       const ConvShapes& s, const Desc& wanted, onednn::Key key) {
  const Temporary plain = converted(backend, weight, s.dtype);
  const Desc given = onednn::desc(grouped(plain.view, s.options.groups));
  if (given == wanted) return plain;
  Temporary blocked = bytes(wanted.get_size(), weight.device);
  reorder(op, given, plain.view.data, wanted, blocked.view.data, key.add(std::int64_t{1}),
          weight.device, false);
  return blocked;
}

}  // namespace

void CpuBackend::conv2d(View x, View weight, View bias, View y,
                        const Conv2dOptions& options) const {
  const DType dtype = onednn::compute_dtype(x.dtype);
  const ConvShapes s{x.shape, weight.shape, y.shape, dtype, options, is_first_layer(x, y)};
  const onednn::Key key = key_of("conv2d", s).add(std::int64_t{bias.defined()});
  const auto operation = onednn::cached(key, [&] { return make_forward(s, bias.defined()); });
  const Temporary input = image_input(*this, x, dtype), output = image_output(y, dtype);
  const Temporary weights =
      weight_input(*this, "conv2d", weight, s, operation->argument(DNNL_ARG_WEIGHTS), key);
  const Temporary biases = converted(*this, bias, DType::f32);
  onednn::execute("conv2d", *operation, y.device,
                  {{DNNL_ARG_SRC, input.view.data},
                   {DNNL_ARG_WEIGHTS, weights.view.data},
                   {DNNL_ARG_BIAS, biases.view.data},
                   {DNNL_ARG_DST, output.view.data}});
  finish_output(*this, output, y);
}

void CpuBackend::conv2d_backward_data(View dy, View weight, View bias, View dx,
                                      const Conv2dOptions& options) const {
  constexpr const char* op = "conv2d_backward_data";
  const DType dtype = onednn::compute_dtype(dy.dtype);
  const ConvShapes s{dx.shape, weight.shape, dy.shape, dtype, options};
  const onednn::Key key = key_of(op, s);
  const auto operation = onednn::cached(key, [&] { return make_backward_data(s); });
  const Temporary input = image_input(*this, dy, dtype), output = image_output(dx, dtype);
  const Temporary weights =
      weight_input(*this, op, weight, s, operation->argument(DNNL_ARG_WEIGHTS), key);
  onednn::execute(op, *operation, dx.device,
                  {{DNNL_ARG_DIFF_SRC, output.view.data},
                   {DNNL_ARG_WEIGHTS, weights.view.data},
                   {DNNL_ARG_DIFF_DST, input.view.data}});
  finish_output(*this, output, dx);
  if (bias.defined()) axpby(1.0, bias.reshape({1, bias.size(0), 1, 1}).expand(dx.shape), 1.0, dx);
}

void CpuBackend::conv2d_backward_weight(View x, View dy, View dweight, View dbias,
                                        const Conv2dOptions& options, bool accumulate) const {
  constexpr const char* op = "conv2d_backward_weight";
  const DType dtype = onednn::compute_dtype(x.dtype);
  const ConvShapes s{x.shape, dweight.shape, dy.shape, dtype, options, is_first_layer(x, dy)};
  const onednn::Key key = key_of(op, s).add(std::int64_t{dbias.defined()});
  const auto operation =
      onednn::cached(key, [&] { return make_backward_weight(s, dbias.defined()); });
  const Temporary input = image_input(*this, x, dtype), gradient = image_input(*this, dy, dtype);
  const Desc& made = operation->argument(DNNL_ARG_DIFF_WEIGHTS);
  const Temporary sums = bytes(made.get_size(), x.device);
  Temporary bias_sums;
  if (dbias.defined()) bias_sums = temporary(dbias.shape, DType::f32, x.device);
  onednn::execute(op, *operation, x.device,
                  {{DNNL_ARG_SRC, input.view.data},
                   {DNNL_ARG_DIFF_DST, gradient.view.data},
                   {DNNL_ARG_DIFF_WEIGHTS, sums.view.data},
                   {DNNL_ARG_DIFF_BIAS, bias_sums.view.data}});
  // oneDNN writes f32 and bf16; f16 takes the f32 gradient and rounds it.
  const bool direct = dweight.dtype != DType::f16 && dweight.is_dense();
  const Temporary plain =
      direct ? Temporary{Tensor(), dweight} : temporary(dweight.shape, DType::f32, x.device);
  const bool add = direct && accumulate;
  onednn::Key reorder_key = key;
  reorder_key.add(plain.view).add(std::int64_t{add});
  reorder(op, made, sums.view.data, onednn::desc(grouped(plain.view, options.groups)),
          plain.view.data, reorder_key, x.device, add);
  if (!direct) deliver(*this, plain.view, dweight, accumulate);
  if (dbias.defined()) deliver(*this, bias_sums.view, dbias, accumulate);
}

}  // namespace cairn::kernels
