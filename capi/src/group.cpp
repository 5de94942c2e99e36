#include "group.h"

#include <span>

#include "guard.h"
#include "tensors.h"

namespace cairn::capi {

namespace {

parallel::ReduceOp op_of(int32_t code, const char* function) {
  CAIRN_CHECK(code >= CAIRN_SUM && code <= CAIRN_PRODUCT, function,
              "expected an operation from 0 (CAIRN_SUM) to 4 (CAIRN_PRODUCT), got ", code);
  return static_cast<parallel::ReduceOp>(code);
}
static_assert(static_cast<int>(parallel::ReduceOp::product) == CAIRN_PRODUCT);

void give(int32_t* where, int value) {
  if (where != nullptr) *where = value;
}

}  // namespace

extern "C" {

cairn_status cairn_group_from_environment(cairn_group** group) {
  return guard(__func__, [&](const char* function) {
    check_given(group, function, "where the group goes");
    *group = static_cast<cairn_group*>(
        add_object(std::make_shared<Group>(parallel::ProcessGroup::from_environment())));
  });
}

cairn_status cairn_group_ranks(cairn_group* group, int32_t* rank, int32_t* world_size,
                               int32_t* local_rank, int32_t* local_world_size) {
  return guard(__func__, [&](const char* function) {
    const auto own = group_of(group, function);
    give(rank, own->group.rank());
    give(world_size, own->group.world_size());
    give(local_rank, own->group.local_rank());
    give(local_world_size, own->group.local_world_size());
  });
}

cairn_status cairn_group_barrier(cairn_group* group, const char* name) {
  return guard(__func__, [&](const char* function) {
    group_of(group, function)->group.barrier(text_of(name));
  });
}

cairn_status cairn_group_all_reduce(cairn_group* group, const cairn_tensor* x, int32_t op) {
  return guard(__func__, [&](const char* function) {
    const auto own = group_of(group, function);
    const TensorView view = view_of(x, function);
    own->group.all_reduce(view, op_of(op, function), text_of(x->name));
  });
}

cairn_status cairn_group_broadcast(cairn_group* group, const cairn_tensor* x, int32_t root) {
  return guard(__func__, [&](const char* function) {
    const auto own = group_of(group, function);
    const TensorView view = view_of(x, function);
    own->group.broadcast(view, root, text_of(x->name));
  });
}

cairn_status cairn_group_all_gather(cairn_group* group, const cairn_tensor* x,
                                    const cairn_tensor* y, const int64_t* counts) {
  return guard(__func__, [&](const char* function) {
    const auto own = group_of(group, function);
    const TensorView from = view_of(x, function), to = view_of(y, function);
    const std::string name = text_of(x->name);
    if (counts == nullptr) return own->group.all_gather(from, to, name);
    const auto size = static_cast<std::size_t>(own->group.world_size());
    own->group.all_gather(from, to, std::span<const std::int64_t>(counts, size), name);
  });
}

cairn_status cairn_group_sum(cairn_group* group, double* value, const char* name) {
  return guard(__func__, [&](const char* function) {
    const auto own = group_of(group, function);
    check_given(value, function, "a value");
    *value = own->group.all_reduce_sum(*value, text_of(name));
  });
}

cairn_status cairn_group_wait(cairn_group* group) {
  return guard(__func__, [&](const char* function) { group_of(group, function)->group.wait(); });
}

cairn_status cairn_group_abort(cairn_group* group, const char* reason) {
  return guard(__func__, [&](const char* function) {
    group_of(group, function)->group.abort(text_of(reason));
  });
}

}  // extern "C"

}  // namespace cairn::capi
