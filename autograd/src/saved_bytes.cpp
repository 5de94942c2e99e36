#include "cairn/autograd/saved_bytes.h"

#include <any>
#include <memory>
#include <unordered_set>
#include <vector>

#include "cairn/autograd/observer.h"
#include "cairn/autograd/saved_tensor.h"
#include "cairn/autograd/saved_tensor_hooks.h"

namespace cairn::autograd {

namespace {

class SavedBytesCounter : public ScopedObserver {
 public:
  SavedTensorHooks hooks() {
    return {
        [this](const Tensor& x) -> std::any {
          if (!is_parameter(x)) count(x);
          return std::make_shared<SavedTensor>(x);
        },
        [](const std::any& kept) {
          return std::any_cast<const std::shared_ptr<SavedTensor>&>(kept)->unpack("saved_bytes");
        }};
  }
  const SavedBytes& result() const { return result_; }

 private:
  void on_begin(const OpEvent& event) override {
    running_.emplace_back(event.name);
    if (event.parameters.empty()) return;
    const std::string& name = event.parameters.front().name();
    const std::size_t dot = name.rfind('.');
    module_ = dot == std::string::npos ? "" : name.substr(0, dot);
  }
  void on_end(const OpEvent&) override { running_.pop_back(); }

  void count(const Tensor& x) {
    if (!seen_.insert(x.storage().get()).second) return;
    const auto bytes = static_cast<std::int64_t>(x.storage()->bytes());
    result_.total += bytes;
    result_.by_operation[running_.empty() ? "" : running_.back()] += bytes;
    result_.by_module[module_] += bytes;
  }

  SavedBytes result_;
  std::vector<std::string> running_;
  std::string module_;
  std::unordered_set<const core::Storage*> seen_;  // they live as long as the graph
};

}  // namespace

SavedBytes saved_bytes(const std::function<Tensor()>& forward) {
  SavedBytesCounter counter;
  const SavedTensorHooksGuard hooks(counter.hooks());
  const Tensor result = forward();  // keeps the graph until all is counted
  return counter.result();
}

}  // namespace cairn::autograd
