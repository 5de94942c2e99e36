#include "cairn/nn/metrics.h"

#include <algorithm>

#include "cairn/autograd/ops.h"
#include "cairn/autograd/thread_state.h"
#include "cairn/core/error.h"
#include "cairn/core/packer.h"

namespace cairn::nn {

namespace {

constexpr const char* kMetrics = "metrics";

/// Of the samples that count.
struct Named {
  std::vector<std::int64_t> labels, highest;  // of each sample `top` classes
};

Named named(const Tensor& logits, const Tensor& labels, std::int64_t top, std::int64_t ignored) {
  const bool fits =
      logits.dims() == labels.dims() + 1 && labels.dtype() == DType::i64 &&
      std::equal(labels.shape().begin(), labels.shape().end(), logits.shape().begin());
  CAIRN_CHECK(fits, kMetrics, "expected logits [..., C] and labels [...] i64, got ", logits.shape(),
              " and ", labels.dtype(), labels.shape());
  const autograd::NoGradGuard no_grad;
  const std::int64_t classes = logits.size(-1);
  const std::vector<std::int64_t> all =
      top == 1 ? autograd::argmax(logits).to_vector<std::int64_t>()
               : autograd::topk(logits, top).index.to_vector<std::int64_t>();
  Named found;
  const std::vector<std::int64_t> wanted = labels.to_vector<std::int64_t>();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == ignored) continue;
    CAIRN_CHECK(wanted[i] >= 0 && wanted[i] < classes, kMetrics, "expected labels below ", classes,
                " (or ", ignored, ", which is ignored), got ", wanted[i]);
    found.labels.push_back(wanted[i]);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(i) * top;
    found.highest.insert(found.highest.end(), begin, begin + top);
  }
  return found;
}

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

std::vector<std::int64_t> sums(const World& world, const std::vector<std::int64_t>& own) {
  core::Packer packed;
  for (const std::int64_t value : own) packed.number(static_cast<std::uint64_t>(value));
  std::vector<std::int64_t> all(own.size(), 0);
  for (const std::string& text : world.exchange(packed.bytes(), kMetrics)) {
    core::Unpacker theirs(text);
    for (std::int64_t& value : all) value += static_cast<std::int64_t>(theirs.number());
  }
  return all;
}

}  // namespace

Accuracy::Accuracy(std::int64_t top, std::int64_t ignored) : top_(top), ignored_(ignored) {
  CAIRN_CHECK(top >= 1, kMetrics, "expected the highest 1 or more classes, got ", top);
}

void Accuracy::add(const Tensor& logits, const Tensor& labels) {
  const std::int64_t top = logits.dims() == 0 ? top_ : std::min(top_, logits.size(-1));
  const Named found = named(logits, labels, top, ignored_);
  for (std::size_t i = 0; i < found.labels.size(); ++i) {
    const auto begin = found.highest.begin() + static_cast<std::ptrdiff_t>(i) * top;
    right_ += std::find(begin, begin + top, found.labels[i]) != begin + top ? 1 : 0;
  }
  samples_ += static_cast<std::int64_t>(found.labels.size());
}

double Accuracy::over(const World& world) const {
  const std::vector<std::int64_t> all = sums(world, {right_, samples_});
  CAIRN_CHECK(all[1] > 0, kMetrics, "expected a sample on some rank, got none");
  return share(all[0], all[1]);
}

ConfusionMatrix::ConfusionMatrix(std::int64_t classes, std::int64_t ignored)
    : classes_(classes), ignored_(ignored) {
  CAIRN_CHECK(classes >= 1, kMetrics, "expected at least one class, got ", classes);
  counts_.assign(static_cast<std::size_t>(classes * classes), 0);
}

std::int64_t& ConfusionMatrix::at(std::int64_t label, std::int64_t prediction) {
  return counts_[static_cast<std::size_t>(label * classes_ + prediction)];
}

void ConfusionMatrix::add(const Tensor& logits, const Tensor& labels) {
  CAIRN_CHECK(logits.dims() > 0 && logits.size(-1) == classes_, kMetrics, "expected logits of ",
              classes_, " classes, got ", logits.shape());
  const Named found = named(logits, labels, 1, ignored_);
  for (std::size_t i = 0; i < found.labels.size(); ++i) ++at(found.labels[i], found.highest[i]);
}

ConfusionMatrix ConfusionMatrix::over(const World& world) const {
  ConfusionMatrix all(classes_, ignored_);
  all.counts_ = sums(world, counts_);
  return all;
}

std::int64_t ConfusionMatrix::count(std::int64_t label, std::int64_t prediction) const {
  for (const std::int64_t one : {label, prediction})
    CAIRN_CHECK(one >= 0 && one < classes_, kMetrics, "expected a class below ", classes_, ", got ",
                one);
  return counts_[static_cast<std::size_t>(label * classes_ + prediction)];
}

Tensor ConfusionMatrix::counts() const {
  const core::DefaultDeviceGuard on_host(Device{});
  return Tensor::from(counts_, {classes_, classes_}, DType::i64);
}

double ConfusionMatrix::accuracy() const {
  std::int64_t right = 0, all = 0;
  for (std::int64_t label = 0; label < classes_; ++label) right += count(label, label);
  for (const std::int64_t one : counts_) all += one;
  return share(right, all);
}

double ConfusionMatrix::recall(std::int64_t label) const {
  std::int64_t all = 0;
  for (std::int64_t other = 0; other < classes_; ++other) all += count(label, other);
  return share(count(label, label), all);
}

double ConfusionMatrix::precision(std::int64_t prediction) const {
  std::int64_t all = 0;
  for (std::int64_t other = 0; other < classes_; ++other) all += count(other, prediction);
  return share(count(prediction, prediction), all);
}

double ConfusionMatrix::f1(std::int64_t label) const {
  std::int64_t with = 0;  // of the class, and taken for it: the true ones twice
  for (std::int64_t other = 0; other < classes_; ++other)
    with += count(label, other) + count(other, label);
  return share(2 * count(label, label), with);
}

}  // namespace cairn::nn
