// How matrix products and convolutions are computed, where there are several ways ("routes") and
// the fastest depends on the processor.
//
// A shape class (dtypes, layout, sizes to the nearest power of two, threads) is timed once, at its
// first use, and the choice kept for all later runs on this kind of machine: in the folder named by
// CAIRN_CACHE, else in `cairn` under XDG_CACHE_HOME or ~/.cache. Routes round differently, so
// choices belong to a run's state: checkpointing::TrainingState saves them and a resumed run goes
// by them. CAIRN_LOG=debug says what was timed and chosen.
//
// CAIRN_PRODUCTS, or set_product_routes, sets
//
//   time          the above, where nothing is set
//   default       no timing: the dtype's own arithmetic where the processor has it, else f32
//   a route       for everything that it can do (docs/kernels.md lists them), `default` elsewhere
//   a path        of a file with what product_choices() gave (with a '/' or ending in .json); what
//                 it lacks is as its setting says
#pragma once

#include <cstdint>
#include <string>

namespace cairn::kernels {

/// The setting and the choices that this process went by so far, as JSON:
/// {"setting": "time", "cpu_products": {"matmul bf16 ...": "bf16_packed", ...}}.
std::string product_choices();

/// Goes by what product_choices() gave, here or in another run, from now on. Where CAIRN_PRODUCTS
/// is set it stands instead, with a warning where it says otherwise. Throws DataError for other
/// text.
void use_product_choices(const std::string& json);

/// What CAIRN_PRODUCTS says, said by the program. Throws InvalidArgument for anything else than the
/// above, IoError and DataError for a file.
void set_product_routes(const std::string& setting);

/// What products and convolutions of shapes seen for the first time have cost this process. It
/// counts up while a run meets new shapes, then stands still.
struct FirstUses {
  std::int64_t primitives = 0;     // compiled for a shape
  double primitive_seconds = 0.0;  // summed over threads
  std::int64_t timings = 0;        // shape classes whose routes were timed
  double timing_seconds = 0.0;     // primitives made for them included
};
FirstUses first_uses();

}  // namespace cairn::kernels
