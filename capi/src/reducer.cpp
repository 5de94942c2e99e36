#include "reducer.h"

#include "cairn/core/sharding.h"
#include "guard.h"
#include "options.h"
#include "tensors.h"

namespace cairn::capi {

namespace {

parallel::ReducerOptions reducer_options(const char* text, const char* function) {
  Options options(function, text);
  parallel::ReducerOptions own;
  options.read("first_bucket_bytes", own.first_bucket_bytes);
  options.read("bucket_bytes", own.bucket_bytes);
  options.read("delay_allreduce", own.delay_allreduce);
  options.read("allreduce_always_fp32", own.allreduce_always_fp32);
  options.read("average", own.average);
  options.read("gradient_predivide_factor", own.gradient_predivide_factor);
  options.read("num_allreduce_streams", own.num_allreduce_streams);
  options.read("check_local_gradients", own.check_local_gradients);
  options.read("shard", own.shard);
  options.read("shard_within", own.shard_within);
  options.end();
  return own;
}

/// Parts have the sizes and dtypes that the reducer hands out.
void check_parts(const Reducer& reducer, const parallel::ReducerOptions& options,
                 const std::vector<TensorView>& gradients, const std::vector<std::string>& names,
                 const char* function) {
  const parallel::ProcessGroup& group = reducer.group->group;
  const int ranks = options.shard_within > 0 ? options.shard_within : group.world_size();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const TensorView &gradient = gradients[i], &part = reducer.parts[i];
    const auto expected = core::even_part(gradient.numel(), group.rank() % ranks, ranks).size();
    CAIRN_CHECK(
        part.numel() == expected && part.dtype == gradient.dtype && part.device == gradient.device,
        function, "expected a part of ", expected, " elements of ", gradient.dtype, " on ",
        gradient.device, " for '", names[i], "', got ", part.shape, " of ", part.dtype, " on ",
        part.device, " (cairn_even_part tells sizes)");
  }
}

std::shared_ptr<Reducer> make_reducer(cairn_group* group, const char* text,
                                      const cairn_tensor* gradients, const cairn_tensor* parts,
                                      std::size_t count, const char* function) {
  const parallel::ReducerOptions options = reducer_options(text, function);
  CAIRN_CHECK(options.shard == (parts != nullptr), function,
              "expected parts with shard=1, and NULL without");
  const std::vector<TensorView> views = views_of(gradients, count, function);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.push_back(name_of(gradients[i], function));
  auto own = std::make_shared<Reducer>(group_of(group, function), options);
  if (options.shard) {
    own->parts = views_of(parts, count, function);
    check_parts(*own, options, views, names, function);
    own->reducer.on_part([target = own.get()](std::size_t gradient, const Tensor& part) {
      if (part.numel() == 0) return;
      const TensorView& where = target->parts[gradient];
      core::copy_bytes(part, where.reshape({where.numel()}));
    });
  }
  own->reducer.register_gradients(names, views);
  return own;
}

std::shared_ptr<Reducer> reducer_of(const void* handle, const char* function) {
  return object_of<Reducer>(handle, function, "a reducer");
}

}  // namespace

extern "C" {

cairn_status cairn_reducer_create(cairn_group* group, const char* options,
                                  const cairn_tensor* gradients, const cairn_tensor* parts,
                                  size_t count, cairn_reducer** reducer) {
  return guard(__func__, [&](const char* function) {
    check_given(reducer, function, "where the reducer goes");
    *reducer = static_cast<cairn_reducer*>(
        add_object(make_reducer(group, options, gradients, parts, count, function)));
  });
}

cairn_status cairn_reducer_mark_ready(cairn_reducer* reducer, size_t index) {
  return guard(__func__, [&](const char* function) {
    reducer_of(reducer, function)->reducer.mark_ready(index);
  });
}

cairn_status cairn_reducer_mark_unused(cairn_reducer* reducer, size_t index) {
  return guard(__func__, [&](const char* function) {
    reducer_of(reducer, function)->reducer.mark_unused(index);
  });
}

cairn_status cairn_reducer_wait(cairn_reducer* reducer) {
  return guard(__func__,
               [&](const char* function) { reducer_of(reducer, function)->reducer.wait(); });
}

cairn_status cairn_reducer_abandon(cairn_reducer* reducer) {
  return guard(__func__,
               [&](const char* function) { reducer_of(reducer, function)->reducer.abandon(); });
}

cairn_status cairn_even_part(int64_t elements, int32_t rank, int32_t world_size, int64_t* begin,
                             int64_t* size) {
  return guard(__func__, [&](const char* function) {
    CAIRN_CHECK(elements >= 0 && rank >= 0 && rank < world_size, function,
                "expected elements >= 0 and a rank below the world size, got ", elements, ", rank ",
                rank, " of ", world_size);
    check_given(begin, function, "where the begin goes");
    check_given(size, function, "where the size goes");
    const core::ElementRange part = core::even_part(elements, rank, world_size);
    *begin = part.begin;
    *size = part.size();
  });
}

}  // extern "C"

}  // namespace cairn::capi
