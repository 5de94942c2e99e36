#include "cairn/kernels/optimizer_update.h"

#include "launch.h"
#include "list_check.h"

namespace cairn::kernels {

namespace {

/// Equal strides wherever a dimension has more than one element.
bool same_layout(const TensorView& a, const TensorView& b) {
  if (a.shape != b.shape) return false;
  for (int d = 0; d < a.dims(); ++d) {
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

void check_partner(const char* op, const char* what, std::size_t i, const TensorView& v,
                   const TensorView& weight) {
  CAIRN_CHECK(v.device == weight.device, op, "expected the ", what, " of entry ", i, " on ",
              weight.device, ", the weight's device, got ", v.device);
  CAIRN_CHECK(same_layout(v, weight), op, "expected the ", what, " of entry ", i, " of shape ",
              weight.shape, " and strides ", weight.strides, " like its weight, got ", v.shape,
              " and ", v.strides);
}

void check_state(const char* op, const char* what, std::size_t i, const TensorView& v,
                 const TensorView& weight, bool needed) {
  CAIRN_CHECK(v.defined() || !needed, op, "expected a ", what, " in entry ", i, ", got none");
  if (!v.defined()) return;
  CAIRN_CHECK(v.dtype == DType::f32, op, "expected the ", what, " of entry ", i,
              " of dtype f32, got ", core::name(v.dtype));
  check_partner(op, what, i, v, weight);
}

void check_entries(const char* op, const std::vector<UpdateEntry>& entries, bool moment1,
                   bool moment2) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const UpdateEntry& e = entries[i];
    CAIRN_CHECK(e.weight.defined() && e.gradient.defined(), op,
                "expected a weight and a gradient in entry ", i, ", got an undefined view");
    CAIRN_CHECK(e.weight.device == entries[0].weight.device, op, "expected all weights on ",
                entries[0].weight.device, ", got entry ", i, " on ", e.weight.device);
    check_list_dtype(op, "weight", i, e.weight);
    check_list_dtype(op, "gradient", i, e.gradient);
    check_dense(op, "weight", i, e.weight);
    check_partner(op, "gradient", i, e.gradient, e.weight);
    check_state(op, "master", i, e.master, e.weight, false);
    check_state(op, "moment1", i, e.moment1, e.weight, moment1);
    check_state(op, "moment2", i, e.moment2, e.weight, moment2);
  }
}

}  // namespace

void adam_update(const std::vector<UpdateEntry>& entries, const AdamOptions& options) {
  check_entries("adam_update", entries, true, true);
  if (entries.empty()) return;
  launch(entries[0].weight.device,
         [=](const Backend& backend) { backend.adam_update(entries, options); });
}

void sgd_update(const std::vector<UpdateEntry>& entries, const SgdOptions& options) {
  check_entries("sgd_update", entries, options.momentum != 0.0, false);
  if (entries.empty()) return;
  launch(entries[0].weight.device,
         [=](const Backend& backend) { backend.sgd_update(entries, options); });
}

}  // namespace cairn::kernels
