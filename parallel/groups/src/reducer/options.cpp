#include "reducer/options.h"

#include <cmath>
#include <sstream>

#include "cairn/core/error.h"

namespace cairn::parallel {
namespace {

constexpr int kMostStreams = 64;

void check_division(const ReducerOptions& options) {
  const double f = options.gradient_predivide_factor;
  CAIRN_CHECK(std::isfinite(f) && f > 0, "ddp",
              "expected gradient_predivide_factor to be a finite number above 0, got ", f);
  CAIRN_CHECK(options.average || f == 1.0, "ddp", "expected gradient_predivide_factor ", f,
              " with average, got it with sums (leave it at 1)");
  if (!options.hook) return;
  CAIRN_CHECK(
      options.average && f == 1.0, "ddp", "expected a hook to divide by itself, got one with ",
      options.average ? "a gradient_predivide_factor" : "average = false", " (divide in the hook)");
  CAIRN_CHECK(!options.shard, "ddp",
              "expected no hook where each rank gets its part of the averages ",
              "alone, got one (ReducerOptions::shard, ZeroStage::gradients)");
  CAIRN_CHECK(!options.allreduce_always_fp32, "ddp", "expected a hook to choose the dtype that ",
              "travels, got one with allreduce_always_fp32 (convert in the hook)");
}

void check_schedule(const ReducerOptions& options) {
  const int streams = options.num_allreduce_streams;
  CAIRN_CHECK(streams >= 1 && streams <= kMostStreams, "ddp",
              "expected num_allreduce_streams from 1 to ", kMostStreams, ", got ", streams);
  CAIRN_CHECK(!options.delay_allreduce || streams == 1, "ddp", "expected one stream with ",
              "delay_allreduce, got num_allreduce_streams ", streams,
              " (nothing overlaps when everything is reduced at the end)");
  CAIRN_CHECK(!options.delay_allreduce || options.trigger_parameters.empty(), "ddp",
              "expected no trigger_parameters with delay_allreduce, got '",
              options.trigger_parameters.empty() ? "" : options.trigger_parameters[0],
              "' (nothing is reduced before the end)");
}

}  // namespace

void check_sizes(std::int64_t first_bucket_bytes, std::int64_t bucket_bytes) {
  CAIRN_CHECK(first_bucket_bytes > 0 && bucket_bytes > 0, "ddp",
              "expected bucket sizes above 0, got ", first_bucket_bytes, " and ", bucket_bytes,
              " bytes");
}

void check_options(const ReducerOptions& options) {
  CAIRN_CHECK(options.shard || options.shard_within == 0, "reducer",
              "expected shard_within with shard alone, got ", options.shard_within, " without");
  check_sizes(options.first_bucket_bytes, options.bucket_bytes);
  check_division(options);
  check_schedule(options);
}

std::string list_options(const ReducerOptions& options) {
  std::ostringstream out;
  out << std::boolalpha;
  out << "first_bucket_bytes " << options.first_bucket_bytes << "\nbucket_bytes "
      << options.bucket_bytes << "\ndelay_allreduce " << options.delay_allreduce
      << "\nallreduce_always_fp32 " << options.allreduce_always_fp32 << "\naverage "
      << options.average << "\ngradient_predivide_factor " << options.gradient_predivide_factor
      << "\ntrigger_parameters";
  for (const std::string& trigger : options.trigger_parameters) out << " '" << trigger << "'";
  out << "\nnum_allreduce_streams " << options.num_allreduce_streams << "\nshard " << options.shard
      << "\nshard_within " << options.shard_within << "\nhook "
      << (options.hook ? options.hook->describe() : "none") << "\n";
  return out.str();
}

}  // namespace cairn::parallel
