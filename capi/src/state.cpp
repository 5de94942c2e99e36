#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cairn/checkpointing/parts.h"
#include "cairn/checkpointing/training_state.h"
#include "guard.h"
#include "reducer.h"
#include "scaling.h"
#include "tensors.h"

namespace cairn::capi {

namespace {

/// Collects its parts until the first call that needs them.
struct State final : Object {
  std::shared_ptr<Ranks> ranks;
  checkpointing::TrainingStateOptions options;
  std::vector<checkpointing::TrainingState::Part> parts;
  std::vector<std::shared_ptr<void>> kept;  // what the parts refer to
  std::optional<checkpointing::TrainingState> state;

  checkpointing::TrainingState& get() {
    if (!state) state.emplace(parts, world_of(ranks), options);
    return *state;
  }
  template <class T>
  void add(const char* name, core::Stateful& part, std::shared_ptr<T> owner, const char* function) {
    if (state)
      core::fail<core::Error>(function, "expected parts before the first save or resume, got '",
                              text_of(name), "' after it");
    parts.emplace_back(text_of(name), part);
    kept.push_back(std::move(owner));
  }
};

std::shared_ptr<State> state_of(const void* handle, const char* function) {
  return object_of<State>(handle, function, "a state");
}

checkpointing::TrainingStateOptions state_options(const char* text, const char* function) {
  Options options(function, text);
  checkpointing::TrainingStateOptions own;
  options.read("keep", own.keep);
  options.read("keep_every", own.keep_every);
  options.read("asynchronous", own.asynchronous);
  options.read("read_only", own.read_only);
  options.end();
  return own;
}

/// Of parts of gradients each rank has others: a state that all ranks share would keep the first's.
void check_whole(const State& state, const Optimizer& optimizer, const char* function) {
  if (world_of(state.ranks).size == 1) return;
  for_each_object([&](Object& object) {
    const auto* reducer = dynamic_cast<Reducer*>(&object);
    if (reducer == nullptr) return;
    for_each_parameter(*optimizer.optimizer, [&](const NamedTensor& parameter) {
      const void* const gradient = parameter.tensor.gradient_slot().memory().raw_data();
      for (const TensorView& part : reducer->parts) {
        if (part.data == gradient)
          core::fail<core::Unsupported>(
              function, "expected an optimizer of whole weights in a state of several ranks, got ",
              "one whose gradient of '", parameter.name, "' is a part (save it in a state of ",
              "each rank's own, without world)");
      }
    });
  });
}

/// A half weight of an optimizer's that lives has its exact value there.
void check_no_weights(const NamedTensors& tensors, const char* function) {
  for_each_object([&](Object& object) {
    const auto* own = dynamic_cast<Optimizer*>(&object);
    if (own == nullptr) return;
    for_each_parameter(*own->optimizer, [&](const NamedTensor& weight) {
      if (!core::is_half(weight.tensor.dtype())) return;
      for (const NamedTensor& tensor : tensors) {
        CAIRN_CHECK(
            tensor.tensor.numel() == 0 || tensor.tensor.raw_data() != weight.tensor.raw_data(),
            function, "expected arrays that no optimizer has masters of, got '", tensor.name,
            "' (cairn_state_add_weights saves exact values)");
      }
    });
  });
}

void add_part(State& state, const char* name, void* handle, const char* function) {
  const auto object = object_of<Object>(handle, function, "an optimizer, a scaler or a reducer");
  if (auto one = std::dynamic_pointer_cast<Optimizer>(object)) {
    check_whole(state, *one, function);
    return state.add(name, *one->optimizer, one, function);
  }
  if (auto one = std::dynamic_pointer_cast<Scaler>(object))
    return state.add(name, one->scaler, one, function);
  if (auto one = std::dynamic_pointer_cast<ScaledStep>(object))
    return state.add(name, one->scaled, one, function);
  if (auto one = std::dynamic_pointer_cast<Reducer>(object))
    return state.add(name, one->reducer, one, function);
  core::fail(function, "expected an optimizer, a scaler, a scaled step or a reducer as '",
             text_of(name), "', got a handle of another kind");
}

void add_weights(State& state, const char* name, const std::shared_ptr<Optimizer>& optimizer,
                 const char* function) {
  check_whole(state, *optimizer, function);
  NamedTensors weights;
  for_each_parameter(*optimizer->optimizer,
                     [&](const NamedTensor& parameter) { weights.push_back(parameter); });
  auto part = std::make_shared<checkpointing::Tensors>(weights);
  state.add(name, *part, part, function);
}

void add_tensors(State& state, const char* name, const cairn_tensor* tensors, std::size_t count,
                 const char* function) {
  const std::vector<TensorView> views = views_of(tensors, count, function);
  NamedTensors named;
  for (std::size_t i = 0; i < count; ++i)
    named.push_back({name_of(tensors[i], function), Tensor::wrap(views[i])});
  check_no_weights(named, function);
  auto part = std::make_shared<checkpointing::Tensors>(named);
  state.add(name, *part, part, function);
}

}  // namespace

extern "C" {

cairn_status cairn_state_create(const char* options, void* world, cairn_state** state) {
  return guard(__func__, [&](const char* function) {
    check_given(state, function, "where the state goes");
    auto own = std::make_shared<State>();
    own->ranks = ranks_of(world, function);
    own->options = state_options(options, function);
    *state = static_cast<cairn_state*>(add_object(std::move(own)));
  });
}

cairn_status cairn_state_add(cairn_state* state, const char* name, void* part) {
  return guard(__func__, [&](const char* function) {
    add_part(*state_of(state, function), name, part, function);
  });
}

cairn_status cairn_state_add_weights(cairn_state* state, const char* name,
                                     cairn_optimizer* optimizer) {
  return guard(__func__, [&](const char* function) {
    add_weights(*state_of(state, function), name, optimizer_of(optimizer, function), function);
  });
}

cairn_status cairn_state_add_tensors(cairn_state* state, const char* name,
                                     const cairn_tensor* tensors, size_t count) {
  return guard(__func__, [&](const char* function) {
    add_tensors(*state_of(state, function), name, tensors, count, function);
  });
}

cairn_status cairn_state_resume(cairn_state* state, const char* folder, int64_t* step) {
  return guard(__func__, [&](const char* function) {
    const auto own = state_of(state, function);
    check_given(folder, function, "a folder");
    check_given(step, function, "where the step goes");
    const auto found = own->get().resume_latest(folder);
    *step = found ? found->step : 0;
  });
}

cairn_status cairn_state_save(cairn_state* state, const char* folder, int64_t step) {
  return guard(__func__, [&](const char* function) {
    const auto own = state_of(state, function);
    check_given(folder, function, "a folder");
    own->get().save(folder, step);
  });
}

cairn_status cairn_state_save_every(cairn_state* state, int64_t n, const char* folder,
                                    int64_t* step) {
  return guard(__func__, [&](const char* function) {
    const auto own = state_of(state, function);
    check_given(folder, function, "a folder");
    own->get().save_every(n, folder);
    if (step != nullptr) *step = own->get().step();
  });
}

cairn_status cairn_state_save_on_signal(cairn_state* state, int32_t signal, const char* folder) {
  return guard(__func__, [&](const char* function) {
    const auto own = state_of(state, function);
    check_given(folder, function, "a folder");
    own->get().save_on_signal(signal, folder);
  });
}

cairn_status cairn_state_finish(cairn_state* state) {
  return guard(__func__, [&](const char* function) { state_of(state, function)->get().finish(); });
}

}  // extern "C"

}  // namespace cairn::capi
