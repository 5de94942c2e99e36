#include "operation_watch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

namespace cairn::libtorch {

namespace {

struct Watching {
  std::vector<OperationWatch*> watches;
  at::CallbackHandle callback = 0;
  int depth = 0;  // of operations within operations
};

Watching& watching() {
  thread_local Watching here;
  return here;
}

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && value.toTensor().has_storage()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toListRef()) each_tensor(part, visit);
  }
}

/// By position. Schemas do not say that batch norms write their statistics.
std::vector<bool> find_written_arguments(const char* name, const char* overload) {
  const auto operation = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!operation) return {};
  std::vector<bool> written;
  for (const c10::Argument& argument : operation->schema().arguments()) {
    const bool is_statistic = argument.name() == "running_mean" || argument.name() == "running_var";
    written.push_back(is_statistic || (argument.alias_info() && argument.alias_info()->isWrite()));
  }
  return written;
}

const std::vector<bool>& written_arguments(const at::RecordFunction& operation) {
  thread_local std::map<std::pair<const char*, const char*>, std::vector<bool>> known;
  const std::pair key(operation.name(), operation.overload_name());
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = find_written_arguments(key.first, key.second);
}

}  // namespace

struct OperationWatch::Callbacks {
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& operation) {
    if (watching().depth++ > 0) return nullptr;
    const std::vector<bool>& written = written_arguments(operation);
    const auto arguments = operation.inputs();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const bool writes = i < written.size() && written[i];
      each_tensor(arguments[i], [&](const at::Tensor& x) {
        for (OperationWatch* watch : watching().watches) watch->begins(x, writes);
      });
    }
    return nullptr;
  }

  static void ends(const at::RecordFunction& operation, at::ObserverContext*) {
    if (--watching().depth > 0) return;
    for (const c10::IValue& output : operation.outputs()) {
      each_tensor(output, [](const at::Tensor& x) {
        for (OperationWatch* watch : watching().watches) watch->made(x);
      });
    }
  }
};

OperationWatch::OperationWatch() {
  Watching& here = watching();
  if (here.watches.empty()) {
    here.depth = 0;
    here.callback =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&Callbacks::begins, &Callbacks::ends)
                                       .needsInputs(true)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
  here.watches.push_back(this);
}

OperationWatch::~OperationWatch() {
  Watching& here = watching();
  here.watches.erase(std::find(here.watches.begin(), here.watches.end(), this));
  if (here.watches.empty()) at::removeCallback(here.callback);
}

bool OperationWatch::existed(const at::Tensor& x) const {
  return x.has_storage() && existed_.contains(x.storage().unsafeGetStorageImpl());
}

void OperationWatch::begins(const at::Tensor& argument, bool writes) {
  const void* storage = argument.storage().unsafeGetStorageImpl();
  if (made_.contains(storage)) return;
  existed_.insert(storage);
  if (!writes || argument.requires_grad()) return;
  const bool noted = std::any_of(written_.begin(), written_.end(), [&](const at::Tensor& x) {
    return x.data_ptr() == argument.data_ptr() && x.sizes() == argument.sizes();
  });
  if (!noted) written_.push_back(argument.variable_data());
}

void OperationWatch::made(const at::Tensor& result) {
  const void* storage = result.storage().unsafeGetStorageImpl();
  if (!existed_.contains(storage)) made_.insert(storage);
}

}  // namespace cairn::libtorch
