/* Trains the net of net.h through Cairn's C interface: bf16 weights with f32 masters, a dynamic
 * loss scale, any number of processes, and states that a killed run continues from.
 *
 *   cairn-run --nproc-per-node 2 capi_trainer runs/capi [STEPS] */
#include <cairn.h>
#include <stdio.h>
#include <stdlib.h>

#include "net.h"

enum { ROWS = 32, PARAMETERS = 3 };
static cairn_group* group;

static void check(cairn_status status) {
  if (status == CAIRN_OK) return;
  fprintf(stderr, "capi_trainer: %s: %s\n", cairn_status_name(status), cairn_last_error());
  if (status != CAIRN_COMMUNICATION_ERROR) cairn_group_abort(group, cairn_last_error());
  exit(1);
}

static cairn_tensor part(const char* name, uint16_t* data, const int64_t* shape, int32_t dims) {
  cairn_tensor tensor = {0};
  tensor.name = name;
  tensor.data = data;
  tensor.shape = shape;
  tensor.dims = dims;
  tensor.dtype = CAIRN_BF16;
  return tensor;
}

static void describe(uint16_t* all, cairn_tensor* tensors) {
  static const int64_t matrix[] = {HIDDEN, INPUTS}, vector[] = {HIDDEN};
  tensors[0] = part("w", all, matrix, 2);
  tensors[1] = part("b", all + HIDDEN * INPUTS, vector, 1);
  tensors[2] = part("v", all + HIDDEN * INPUTS + HIDDEN, vector, 1);
}

int main(int argc, char** argv) {
  static net model;
  cairn_tensor weights[PARAMETERS], gradients[PARAMETERS];
  cairn_optimizer* optimizer;
  cairn_reducer* reducer;
  cairn_scaled_step* scaled;
  cairn_state* state;
  cairn_step_result result;
  int32_t rank, ranks;
  int64_t step;
  double scale, loss;
  const int64_t steps = argc > 2 ? atoi(argv[2]) : 300;
  const char* const folder = argc > 1 ? argv[1] : ""; /* none: nothing is saved */

  net_begin(&model);
  describe(model.weights, weights);
  describe(model.gradients, gradients);
  check(cairn_group_from_environment(&group));
  check(cairn_group_ranks(group, &rank, &ranks, NULL, NULL));
  check(cairn_reducer_create(group, NULL, gradients, NULL, PARAMETERS, &reducer));
  check(cairn_optimizer_create("adamw", "lr=0.02 weight_decay=0.01", weights, gradients, PARAMETERS,
                               &optimizer));
  check(cairn_scaled_step_create(optimizer, "init_scale=1024", reducer, &scaled));
  check(cairn_state_create(NULL, reducer, &state));
  check(cairn_state_add_weights(state, "model", optimizer));
  check(cairn_state_add(state, "optimizer", optimizer));
  check(cairn_state_add(state, "amp", scaled));
  check(cairn_state_add(state, "reducer", reducer));
  for (check(cairn_state_resume(state, folder, &step)); step < steps;) {
    check(cairn_scaled_step_scale(scaled, &scale));
    loss = net_backward(&model, step, rank * (ROWS / ranks), ROWS / ranks, (float)scale);
    for (size_t i = PARAMETERS; i-- > 0;) check(cairn_reducer_mark_ready(reducer, i));
    check(cairn_reducer_wait(reducer));
    check(cairn_scaled_step_run(scaled, "max_gradient_norm=1", &result));
    if (!result.applied && rank == 0) fprintf(stderr, "%s\n", result.reason);
    check(cairn_state_save_every(state, 20, folder, &step));
    check(cairn_group_sum(group, &loss, "loss"));
    if (rank == 0) printf("step %d loss %.6f\n", (int)step, loss / ranks);
  }
  check(cairn_free(state)), check(cairn_free(scaled)), check(cairn_free(optimizer));
  check(cairn_free(reducer)), check(cairn_free(group));
  return 0;
}
