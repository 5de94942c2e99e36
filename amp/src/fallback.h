// Layers that keep overflowing run in f32 from then on (Options::fallback_after): with f32 weights,
// in an autocast region in which the operations that are half elsewhere are f32 inside these
// layers. The region casts for whoever else uses these weights or takes these layers' output.
//
// A layer is a module with parameters of its own. After an overflow, the next forwards look at each
// layer's output: the first that is not finite is the culprit, and no loss scale will mend it.
// Where all outputs are finite, the gradients overflowed: a dynamic scale mends that, so it counts
// only once the scale is at its minimum, against the layer nearest to the loss.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cairn/amp/options.h"
#include "cairn/amp/overflow.h"
#include "cairn/nn/module.h"

namespace cairn::amp {

class Fallback {
 public:
  Fallback(const std::vector<nn::Module*>& models, const Options& options);

  /// The layer whose output was not finite since the last step; empty: none, or not looked for.
  std::string culprit() const;
  /// After a step in which this loss overflowed: the culprit that the ranks agree on ("" for none)
  /// and the parameters. Returns the layer that has fallen back now, or "".
  std::string overflowed(int loss_id, const std::string& layer,
                         const std::vector<Culprit>& culprits, bool scale_at_minimum);
  void stepped(int loss_id);  // after a step in which it did not

  void reset();  // forgets overflows; layers that fell back stay so

  bool fall_back(const std::string& layer);  // false: there is none of that name
  std::vector<std::string> layers() const;   // that fell back
  /// Tells at any time whether there are some.
  std::function<bool()> any() const;

 private:
  struct Layer;
  struct Watch;
  std::shared_ptr<Layer> named(const std::string& layer) const;
  std::shared_ptr<Layer> owner_of(const std::string& parameter) const;

  int after_ = 0;
  struct Row {
    std::shared_ptr<Layer> culprit;  // null: nobody knows
    int overflows = 0;               // in a row of this one
  };
  std::map<int, Row> rows_;  // of the losses whose last step overflowed
  std::shared_ptr<Watch> watch_;
  std::vector<std::shared_ptr<Layer>> layers_;  // in registration order
};

/// Layers of this model no longer fall back.
void release_layers(nn::Module& model);

}  // namespace cairn::amp
