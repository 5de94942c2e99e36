#include "cairn/kernels/optimizer_update.h"

#include <utility>

#include "cairn/kernels/empty_with_layout_of.h"
#include "launch.h"
#include "list_check.h"
#include "math/lamb_step.h"
#include "pending_check.h"

namespace cairn::kernels {

namespace {

/// Equal strides wherever a dimension has more than one element.
bool fits(const TensorView& a, const TensorView& b) {
  return a.shape == b.shape && same_layout(a, b);
}

void check_partner(const char* op, const char* what, std::size_t i, const TensorView& v,
                   const TensorView& weight) {
  CAIRN_CHECK(v.device == weight.device, op, "expected the ", what, " of entry ", i, " on ",
              weight.device, ", the weight's device, got ", v.device);
  CAIRN_CHECK(fits(v, weight), op, "expected the ", what, " of entry ", i, " of shape ",
              weight.shape, " and strides ", weight.strides, " like its weight, got ", v.shape,
              " and ", v.strides);
}

void check_moment(const char* op, const char* what, std::size_t i, const TensorView& v,
                  const UpdateEntry& e) {
  CAIRN_CHECK(v.defined(), op, "expected a ", what, " in entry ", i, ", got none");
  CAIRN_CHECK(v.dtype == DType::f32 || v.dtype == DType::bf16, op, "expected the ", what,
              " of entry ", i, " of dtype f32 or bf16, got ", core::name(v.dtype));
  CAIRN_CHECK(v.dtype == e.moment1.dtype, op, "expected both moments of entry ", i,
              " of one dtype, got ", core::name(e.moment1.dtype), " and ", core::name(v.dtype));
  check_partner(op, what, i, v, e.weight);
}

void check_master(const char* op, std::size_t i, const UpdateEntry& e) {
  if (!e.master.defined()) return;
  if (e.master.dtype == DType::i16) {
    CAIRN_CHECK(e.weight.dtype == DType::bf16, op,
                "expected a bf16 weight beside the i16 remainder of entry ", i, ", got ",
                core::name(e.weight.dtype));
  } else {
    CAIRN_CHECK(e.master.dtype == DType::f32, op, "expected the master of entry ", i,
                " of dtype f32, or i16 beside a bf16 weight, got ", core::name(e.master.dtype));
  }
  check_partner(op, "master", i, e.master, e.weight);
}

void check_entry(const char* op, std::size_t i, const UpdateEntry& e, int moments) {
  CAIRN_CHECK(e.weight.defined() && e.gradient.defined(), op,
              "expected a weight and a gradient in entry ", i, ", got an undefined view");
  check_list_dtype(op, "weight", i, e.weight);
  check_list_dtype(op, "gradient", i, e.gradient);
  check_dense(op, "weight", i, e.weight);
  check_partner(op, "gradient", i, e.gradient, e.weight);
  check_master(op, i, e);
  if (moments > 0) check_moment(op, "moment1", i, e.moment1, e);
  if (moments > 1) check_moment(op, "moment2", i, e.moment2, e);
}

void check_entries(const char* op, const std::vector<UpdateEntry>& entries, int moments) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    check_entry(op, i, entries[i], moments);
    CAIRN_CHECK(entries[i].weight.device == entries[0].weight.device, op,
                "expected all weights on ", entries[0].weight.device, ", got entry ", i, " on ",
                entries[i].weight.device);
  }
}

UpdateItem item_of(const UpdateEntry& e, int moments) {
  return {.gradient = e.gradient.data,
          .weight = e.weight.data,
          .master = e.master.data,
          .moment1 = moments > 0 ? e.moment1.data : nullptr,
          .moment2 = moments > 1 ? e.moment2.data : nullptr,
          .count = e.weight.numel(),
          .gradient_factor = e.gradient_factor,
          .l2 = e.l2,
          .norm = e.norm,
          .gradient_dtype = e.gradient.dtype,
          .weight_dtype = e.weight.dtype,
          .master_dtype = e.master.dtype,
          .moment_dtype = moments > 0 ? e.moment1.dtype : DType::f32};
}

/// The entries as a backend gets them, which is about to write them.
UpdateList listed(const std::vector<UpdateEntry>& entries, int moments) {
  UpdateList list{entries[0].weight.device, {}};
  list.items.reserve(entries.size());
  for (const UpdateEntry& e : entries) {
    list.items.push_back(item_of(e, moments));
    wrote(e.weight, e.master);
    if (moments > 0) wrote(e.moment1);
    if (moments > 1) wrote(e.moment2);
  }
  return list;
}

void check_device_number(const char* op, const char* what, const TensorView& v, DType dtype,
                         Device device) {
  CAIRN_CHECK(v.defined(), op, "expected a ", what, " in device memory, got none");
  CAIRN_CHECK(v.dtype == dtype && v.numel() == 1 && v.device == device, op, "expected a ", what,
              " of one ", core::name(dtype), " on ", device, ", got shape ", v.shape, " of ",
              core::name(v.dtype), " on ", v.device);
}

void check_optional_number(const char* op, const char* what, const TensorView& v, DType dtype,
                           Device device) {
  if (v.defined()) check_device_number(op, what, v, dtype, device);
}

void check_device_step(const char* op, const std::vector<UpdateEntry>& entries,
                       const DeviceStep& d) {
  const Device device = entries[0].weight.device;
  check_device_number(op, "lr", d.lr, DType::f64, device);
  check_device_number(op, "step", d.step, DType::i32, device);
  check_optional_number(op, "loss_scale", d.loss_scale, DType::f32, device);
  check_optional_number(op, "found_inf", d.found_inf, DType::f32, device);
  check_optional_number(op, "clip", d.clip, DType::f64, device);
  for (std::size_t i = 1; i < entries.size(); ++i) {
    CAIRN_CHECK(
        entries[i].gradient_factor == entries[0].gradient_factor && entries[i].l2 == entries[0].l2,
        op, "expected one gradient_factor and l2 for all entries of a device step, got ",
        entries[i].gradient_factor, " and ", entries[i].l2, " in entry ", i);
  }
}

void check_found(const char* op, std::size_t tensors, const FoundNonfinite& found) {
  const Device device = found.found_inf.device;
  check_device_number(op, "found_inf", found.found_inf, DType::f32, device);
  check_optional_number(op, "clip", found.clip, DType::f64, device);
  check_optional_number(op, "loss_scale", found.loss_scale, DType::f32, device);
  CAIRN_CHECK(!found.clip.defined() || found.max_norm > 0.0, op,
              "expected a max_norm > 0 to clip by, got ", found.max_norm);
  if (!found.each.defined()) return;
  CAIRN_CHECK(found.each.dtype == DType::f32 && found.each.is_contiguous() &&
                  found.each.numel() == static_cast<std::int64_t>(tensors) &&
                  found.each.device == device,
              op, "expected each of ", tensors, " f32 on ", device, ", got shape ",
              found.each.shape, " of ", core::name(found.each.dtype), " on ", found.each.device);
}

void check_like_weight(const char* op, const Named& v, const TensorView& weight) {
  CAIRN_CHECK(fits(v.view, weight), op, "expected ", v.name, " of shape ", weight.shape,
              " and strides ", weight.strides, " like the weight, got ", v.view.shape, " and ",
              v.view.strides);
}

void check_split(const char* op, const Named& truth, const Named& weight, const Named& remainder) {
  check_device(op, {weight, remainder, truth});
  check_dtype(op, truth, DType::f32);
  check_dtype(op, weight, DType::bf16);
  check_dtype(op, remainder, DType::i16);
  check_dense(op, "weight", 0, weight.view);
  for (const Named& v : {remainder, truth}) check_like_weight(op, v, weight.view);
}

}  // namespace

void advance_step(const TensorView& step, const TensorView& found_inf) {
  constexpr auto op = "advance_step";
  check_device_number(op, "step", step, DType::i32, step.device);
  check_optional_number(op, "found_inf", found_inf, DType::f32, step.device);
  wrote(step);
  launch(step.device, [=](const Backend& backend) { backend.advance_step(step, found_inf); });
}

void find_nonfinite(const std::vector<TensorView>& tensors, const FoundNonfinite& found) {
  constexpr auto op = "find_nonfinite";
  check_found(op, tensors.size(), found);
  const Device device = found.found_inf.device;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CAIRN_CHECK(tensors[i].defined() && tensors[i].device == device, op, "expected tensor ", i,
                " on ", device, ", the device of found_inf, got ", tensors[i].device);
    check_list_dtype(op, "tensor", i, tensors[i]);
    check_dense(op, "tensor", i, tensors[i]);
  }
  wrote(found.found_inf, found.each, found.clip);
  launch(device, [=](const Backend& backend) { backend.find_nonfinite(tensors, found); });
}

void update(const std::vector<UpdateEntry>& entries, const UpdateRule& rule,
            const DeviceStep& device) {
  if (entries.empty()) return;
  const char* op = std::visit([](const auto& options) { return options.kName; }, rule);
  const int moments = std::visit([](const auto& options) { return options.moments(); }, rule);
  if (device.defined()) {
    check_device_step(op, entries, device);
    if (std::holds_alternative<NovoGradOptions>(rule)) {
      core::fail<core::Unsupported>(op,
                                    "expected a step from the host, got one on the device (the "
                                    "running norms of NovoGrad are the caller's)");
    }
  }
  check_entries(op, entries, moments);
  launch(entries[0].weight.device,
         [list = listed(entries, moments), rule, device](const Backend& backend) {
           backend.update(list, rule, device);
         });
}

PendingCheck begin_lamb_update(const std::vector<UpdateEntry>& pieces, const LambOptions& options) {
  if (pieces.empty()) return {};
  check_entries(LambOptions::kName, pieces, options.moments());
  return pending_check(pieces[0].weight.device, 2 * pieces.size(),
                       [list = listed(pieces, options.moments()), options](const Backend& backend,
                                                                           TensorCheck* checks) {
                         backend.lamb_moments(list, options, checks);
                       });
}

void end_lamb_update(const std::vector<UpdateEntry>& entries, const std::vector<LambNorms>& norms,
                     const LambOptions& options) {
  constexpr auto op = LambOptions::kName;
  CAIRN_CHECK(norms.size() == entries.size(), op, "expected norms of ", entries.size(),
              " entries, got ", norms.size());
  if (entries.empty()) return;
  check_entries(op, entries, options.moments());
  UpdateList list = listed(entries, options.moments());
  for (std::size_t i = 0; i < norms.size(); ++i) {
    list.items[i].norm = lamb_step(options.lr, is_adaptive(options), norms[i]);
  }
  const Device device = list.device;
  launch(device, [list = std::move(list), options](const Backend& backend) {
    backend.lamb_weights(list, options);
  });
}

void join_master(const TensorView& weight, const TensorView& remainder, const TensorView& out) {
  check_split("join_master", {"out", out}, {"weight", weight}, {"remainder", remainder});
  wrote(out);
  launch(out.device, [=](const Backend& backend) { backend.join_master(weight, remainder, out); });
}

void split_master(const TensorView& in, const TensorView& weight, const TensorView& remainder) {
  check_split("split_master", {"in", in}, {"weight", weight}, {"remainder", remainder});
  wrote(weight, remainder);
  launch(in.device, [=](const Backend& backend) { backend.split_master(in, weight, remainder); });
}

void reconcile_master(const TensorView& weight, const TensorView& master) {
  constexpr auto op = "reconcile_master";
  check_device(op, {{"weight", weight}, {"master", master}});
  CAIRN_CHECK(core::is_half(weight.dtype), op, "expected weight of dtype f16 or bf16, got ",
              core::name(weight.dtype));
  check_dtype(op, {"master", master}, DType::f32);
  check_dense(op, "weight", 0, weight);
  check_like_weight(op, {"master", master}, weight);
  wrote(master);
  launch(weight.device, [=](const Backend& backend) { backend.reconcile_master(weight, master); });
}

void reconcile_remainder(const TensorView& weight, const TensorView& former,
                         const TensorView& remainder) {
  constexpr auto op = "reconcile_remainder";
  check_device(op, {{"weight", weight}, {"former", former}, {"remainder", remainder}});
  check_dtype(op, {"weight", weight}, DType::bf16);
  check_dtype(op, {"former", former}, DType::bf16);
  check_dtype(op, {"remainder", remainder}, DType::i16);
  check_dense(op, "weight", 0, weight);
  for (const Named& v : {Named{"former", former}, Named{"remainder", remainder}})
    check_like_weight(op, v, weight);
  wrote(remainder);
  launch(weight.device,
         [=](const Backend& backend) { backend.reconcile_remainder(weight, former, remainder); });
}

}  // namespace cairn::kernels
