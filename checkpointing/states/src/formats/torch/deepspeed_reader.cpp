// A universal checkpoint of DeepSpeed's, as its ds_to_universal writes it: zero/NAME/ has a
// parameter's f32 values, moments and steps, each a file of torch.save's, of stage 3 flat;
// zero/optimizer_state.pt has the optimizer's groups and the loss scale; a file of model states has
// the rest, the parameters' shapes, and which of them are in which group.
#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "cairn/core/error.h"
#include "formats/flat_state.h"
#include "formats/torch/archive.h"
#include "io/file_io.h"
#include "io/printable.h"

namespace cairn::checkpointing {

namespace {

namespace fs = std::filesystem;

constexpr double kNewestUniversal = 0.4;  // version of the layout
constexpr const char* kModelStates[] = {"mp_rank_00_model_states.pt",
                                        "zero_pp_rank_0_mp_rank_00_model_states.pt"};
constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq"};

template <class... Args>
[[noreturn]] void fail_universal(const Args&... args) {
  core::fail<core::DataError>("deepspeed", args...);
}

/// A file's values, in its order.
struct Values {
  std::string path;
  FlatState all;

  const StateDict::Value* find(std::string_view name) const {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == name; });
    return found == all.end() ? nullptr : &found->second;
  }
  std::optional<double> number(std::string_view name) const {
    const auto* value = find(name);
    if (value == nullptr) return {};
    if (const auto* integer = std::get_if<std::int64_t>(value))
      return static_cast<double>(*integer);
    if (const auto* real = std::get_if<double>(value)) return *real;
    fail_universal("expected a number '", name, "' in '", path, "', got another value");
  }
  std::int64_t count(std::string_view name, std::int64_t least) const {
    const auto* value = find(name);
    const auto* integer = value == nullptr ? nullptr : std::get_if<std::int64_t>(value);
    if (integer == nullptr || *integer < least)
      fail_universal("expected an integer of at least ", least, " as '", name, "' in '", path,
                     "', got ", integer == nullptr ? "none" : core::str(*integer));
    return *integer;
  }
};

struct Parameter {
  std::string name;
  Shape shape;
};

/// The folder that `latest_universal` names, or this one.
fs::path step_folder(const fs::path& folder) {
  if (exists((folder / kUniversalOptimizer).string())) return folder;
  const std::string path = (folder / kUniversalLatest).string();
  const MappedFile latest(path);
  std::string name(latest.bytes().substr(0, 1000));
  name.erase(name.find_last_not_of(" \r\n") + 1);
  if (name.empty() || name == ".." || name.find('/') != std::string::npos)
    fail_universal("expected the name of a folder beside it in '", path, "', got '",
                   printable(name), "'");
  return folder / name;
}

std::string model_states_in(const fs::path& folder) {
  for (const char* name : kModelStates) {
    std::string path = (folder / name).string();
    if (exists(path)) return path;
  }
  core::fail<core::IoError>("deepspeed", "expected '", kModelStates[0], "', or of stage 3 '",
                            kModelStates[1], "', in '", folder.string(), "', got neither; needed");
}

class UniversalCheckpoint {
 public:
  UniversalCheckpoint(const std::string& folder, const TorchReadOptions& options)
      : folder_(step_folder(folder)),
        options_(options),
        model_(values_of(model_states_in(folder_))),
        optimizer_(values_of((folder_ / kUniversalOptimizer).string())) {}

  StateDict read() {
    check_kind();
    find_shapes();
    find_module();
    add_model();
    add_optimizer();
    add_loss_scale();
    add_rest();
    return unflatten(std::move(flat_));
  }

 private:
  using Parameters = std::vector<Parameter>;

  Values values_of(const std::string& path) const {
    return {path, read_torch_values(path, options_)};
  }

  void check_kind() const {
    const double version =
        model_.number("universal_checkpoint_info.universal_checkpoint_version").value_or(0);
    if (version > kNewestUniversal)
      fail_universal("expected a universal checkpoint of version ", kNewestUniversal,
                     " or older in '", model_.path, "', got ", version);
    const auto* shuffled = model_.find("ds_config.zero_optimization.round_robin_gradients");
    const auto* flag = shuffled == nullptr ? nullptr : std::get_if<std::int64_t>(shuffled);
    if (flag != nullptr && *flag != 0)
      fail_universal("expected a training without round_robin_gradients in '", model_.path,
                     "', got one with (ds_to_universal gives a parameter the values of others "
                     "then: train a step without, save and convert again)");
    const double ranks = model_.number("mp_world_size").value_or(1);
    if (ranks != 1)
      fail_universal("expected a training without tensor or pipeline parallelism in '", model_.path,
                     "', got mp_world_size = ", ranks,
                     " (read the model alone in Python, and export it as safetensors)");
  }

  // ---- parameters

  /// "param_shapes.GROUP.NAME.DIMENSION" and "frozen_param_shapes.NAME.DIMENSION".
  void find_shapes() {
    constexpr std::string_view kShapes = "param_shapes.", kFrozen = "frozen_param_shapes.";
    Parameters frozen;
    std::string group;
    for (const auto& [path, value] : model_.all) {
      if (path.starts_with(kFrozen)) add_shape(frozen, path.substr(kFrozen.size()), value);
      if (!path.starts_with(kShapes)) continue;
      const std::size_t dot = path.find('.', kShapes.size());
      const std::string number = path.substr(kShapes.size(), dot - kShapes.size());
      if (groups_.empty() || number != group) groups_.emplace_back();
      group = number;
      if (dot != std::string::npos) add_shape(groups_.back(), path.substr(dot + 1), value);
    }
    for (const Parameter& parameter : frozen) frozen_[parameter.name] = parameter.shape;
    if (groups_.empty())
      fail_universal("expected 'param_shapes' in '", model_.path,
                     "', got none (written by ZeRO, of a newer or older DeepSpeed?); needed");
  }

  void add_shape(Parameters& to, const std::string& path, const StateDict::Value& value) const {
    const bool scalar = std::holds_alternative<StateDict>(value);  // without dimensions
    const auto* size = std::get_if<std::int64_t>(&value);
    const std::size_t dot = path.rfind('.');
    const std::string name = scalar ? path : path.substr(0, dot);
    const bool known = !to.empty() && to.back().name == name;
    const bool sized = size != nullptr && *size >= 0 && dot != std::string::npos &&
                       !(known && to.back().shape.dims() == core::kMaxDims);
    if ((!scalar && !sized) || name.find('/') != std::string::npos)
      fail_universal("expected shapes of parameters by their names in '", model_.path, "', got '",
                     printable(path), "'");
    if (!known) to.push_back({name, {}});
    if (!scalar) to.back().shape.push_back(*size);
  }

  void find_module() {
    constexpr std::string_view kModule = "module.", kShared = "shared_params.";
    for (const auto& [path, value] : model_.all) {
      const auto* tensor = std::get_if<Tensor>(&value);
      const auto* text = std::get_if<std::string>(&value);
      if (tensor != nullptr && path.starts_with(kModule))
        module_.emplace_back(path.substr(kModule.size()), *tensor);
      if (text != nullptr && path.starts_with(kShared))
        shared_[path.substr(kShared.size())] = *text;
    }
    std::set<std::string> names;
    for (const auto& [name, tensor] : module_) names.insert(name);
    for (const Parameters& group : groups_) {
      for (const Parameter& parameter : group) {
        if (!names.contains(parameter.name))
          fail_universal("expected '", printable(parameter.name), "' in 'module' in '", model_.path,
                         "', got none");
        if (!trained_.emplace(parameter.name, &parameter).second)
          fail_universal("expected each parameter once in '", model_.path, "', got '",
                         printable(parameter.name), "' twice");
      }
    }
  }

  std::string path_of(const Parameter& parameter, const char* what) const {
    return (folder_ / "zero" / parameter.name / (std::string(what) + ".pt")).string();
  }

  Tensor read_part(const Parameter& parameter, const char* what) const {
    const Values values = values_of(path_of(parameter, what));
    const StateDict::Value* value = values.find("param");
    if (value == nullptr) value = values.find(kOnlyValue);
    const auto* tensor = value == nullptr ? nullptr : std::get_if<Tensor>(value);
    if (tensor != nullptr && tensor->shape() == parameter.shape) return *tensor;
    if (tensor != nullptr && is_flat(*tensor, parameter.shape))
      return tensor->alias(tensor->view().reshape(parameter.shape));
    fail_universal("expected a tensor ", parameter.shape, " of '", printable(parameter.name),
                   "' in '", values.path, "', got ",
                   tensor == nullptr ? "none" : core::str(tensor->shape()));
  }

  static bool is_flat(const Tensor& tensor, const Shape& shape) {
    std::int64_t numel = 1;
    for (const std::int64_t extent : shape) {
      if (__builtin_mul_overflow(numel, extent, &numel)) return false;
    }
    return tensor.dims() == 1 && tensor.numel() == numel && tensor.is_contiguous();
  }

  // ---- what is handed out

  void add_model() {
    std::map<std::string, Tensor> known;
    for (const auto& [name, tensor] : module_) {
      const auto tied = shared_.find(name);
      const auto source = tied != shared_.end() ? known.find(tied->second) : known.end();
      const Tensor whole = source != known.end() ? source->second : weight_or_buffer(name, tensor);
      known[name] = whole;
      flat_.emplace_back("model." + name, whole);
    }
  }

  Tensor weight_or_buffer(const std::string& name, const Tensor& tensor) const {
    const auto trained = trained_.find(name);
    if (trained != trained_.end()) return read_part(*trained->second, "fp32");
    const auto frozen = frozen_.find(name);
    const bool whole = frozen == frozen_.end() ? tensor.shape() != Shape{0}  // a placeholder's
                                               : tensor.shape() == frozen->second;
    if (!whole)
      fail_universal("expected '", printable(name), "' whole in '", model_.path, "', got ",
                     tensor.shape(),
                     " (ds_to_universal leaves frozen parameters of stage 3 in "
                     "pieces)");
    return tensor;
  }

  void add_optimizer() {
    constexpr std::string_view kGroups = "param_groups.";
    std::map<std::string, std::vector<std::size_t>> buckets;  // by group
    for (const auto& [path, value] : optimizer_.all) {
      if (!path.starts_with(kGroups)) continue;
      const std::size_t dot = path.find('.', kGroups.size());
      const std::string group = path.substr(0, dot);
      if (path.compare(group.size(), 8, ".params.") == 0) {
        buckets[group].push_back(bucket_of(path, value));
      } else {
        flat_.emplace_back("optimizer." + path, value);
      }
    }
    for (const auto& [group, indices] : buckets) add_group(group, indices);
  }

  std::size_t bucket_of(const std::string& path, const StateDict::Value& value) {
    const auto* index = std::get_if<std::int64_t>(&value);
    const bool known =
        index != nullptr && *index >= 0 && *index < static_cast<std::int64_t>(groups_.size());
    if (!known || !dealt_.insert(static_cast<std::size_t>(*index)).second)
      fail_universal("expected each of the ", groups_.size(),
                     " groups of 'param_shapes' once, in '", optimizer_.path, "', got '",
                     printable(path), "'",
                     index == nullptr ? std::string() : core::str(" = ", *index));
    return static_cast<std::size_t>(*index);
  }

  void add_group(const std::string& group, const std::vector<std::size_t>& indices) {
    std::size_t place = 0;
    for (const std::size_t index : indices) {
      for (const Parameter& parameter : groups_[index]) {
        flat_.emplace_back("optimizer." + group + ".params." + std::to_string(place++),
                           parameter.name);
        add_moments(parameter, group, index);
      }
    }
  }

  /// One that never had a gradient has none.
  void add_moments(const Parameter& parameter, const std::string& group, std::size_t index) {
    const bool any = std::any_of(std::begin(kMoments), std::end(kMoments), [&](const char* moment) {
      return exists(path_of(parameter, moment));
    });
    if (!any) return;
    const std::string entry = "optimizer.state." + parameter.name + ".";
    flat_.emplace_back(entry + "step", steps_of(parameter, group, index));
    for (const char* moment : kMoments)
      flat_.emplace_back(entry + moment, read_part(parameter, moment));
  }

  StateDict::Value steps_of(const Parameter& parameter, const std::string& group,
                            std::size_t index) const {
    const std::string path = path_of(parameter, "step");
    if (exists(path)) {
      const Values own = values_of(path);
      if (const auto* steps = own.find(kOnlyValue)) return *steps;
    }
    const std::string state = "optimizer_state_dict.state." + std::to_string(index) + ".step";
    for (const std::string& name : {state, group + ".step"}) {  // stage 3, FusedAdam
      if (const auto* steps = optimizer_.find(name)) return *steps;
    }
    fail_universal("expected the steps of '", printable(parameter.name), "' in '", path,
                   "', or as 'step' in '", optimizer_.path, "', got neither");
  }

  /// As apex.amp has it. DeepSpeed doubles where as many clean steps as the window lie behind the
  /// last overflow before a step, Apex after it.
  void add_loss_scale() {
    const auto dynamic = optimizer_.number("loss_scaler.dynamic");
    if (dynamic.value_or(0) == 0) return;
    const auto scale = optimizer_.number("loss_scaler.cur_scale");
    if (!scale) fail_universal("expected 'loss_scaler.cur_scale' in '", optimizer_.path, "'");
    const std::int64_t window = optimizer_.count("loss_scaler.scale_window", 1);
    const std::int64_t clean = optimizer_.count("loss_scaler.cur_iter", 0) -
                               (optimizer_.count("loss_scaler.last_overflow_iter", -1) + 1);
    flat_.emplace_back("amp.loss_scaler0.loss_scale", *scale);
    flat_.emplace_back("amp.loss_scaler0.unskipped", clean > 0 ? (clean - 1) % window : 0);
    flat_.emplace_back("amp.loss_scaler0.overflows_left",
                       optimizer_.count("loss_scaler.cur_hysteresis", 1));
  }

  /// The counts of steps and what the program gave to save_checkpoint; nothing of how the ranks
  /// were.
  void add_rest() {
    static const std::set<std::string, std::less<>> kOwn = {
        "module",        "buffer_names",
        "optimizer",     "param_shapes",
        "shared_params", "frozen_param_shapes",
        "data_sampler",  "frozen_param_fragments",
        "random_ltd",    "checkpoint_parallel_dimensions",
        "ds_config",     "ds_version",
        "dp_world_size", "mp_world_size",
        "num_experts",   "ds_autoep_layers",
        "autoep_layers", "universal_checkpoint_info",
        "folding",       "sparse_tensor_module_names"};
    for (const auto& [path, value] : model_.all) {
      if (!kOwn.contains(std::string_view(path).substr(0, path.find('.'))))
        flat_.emplace_back(path, value);
    }
  }

  fs::path folder_;
  TorchReadOptions options_;
  Values model_, optimizer_;
  std::vector<Parameters> groups_;  // by the index that the optimizer has of them
  std::map<std::string, Shape> frozen_;
  std::map<std::string, std::string> shared_;
  std::vector<std::pair<std::string, Tensor>> module_;
  std::map<std::string, const Parameter*> trained_;
  std::set<std::size_t> dealt_;  // of groups_
  FlatState flat_;
};

}  // namespace

StateDict read_deepspeed_universal(const std::string& folder, const TorchReadOptions& options) {
  return UniversalCheckpoint(folder, options).read();
}

}  // namespace cairn::checkpointing
