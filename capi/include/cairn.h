/* Cairn in C99, for trainers with arrays of their own in any language: optimizers, loss scaling,
 * process groups, gradient reduction, training states. docs/capi.md has the table and programs.
 *
 *   cairn_optimizer* adam = NULL;
 *   cairn_step_result result;
 *   if (cairn_optimizer_create("adamw", "lr=1e-3", weights, gradients, count, &adam) != CAIRN_OK)
 *     fprintf(stderr, "%s\n", cairn_last_error());
 *   cairn_optimizer_step(adam, "max_gradient_norm=1", &result);
 *
 * Errors. Every function but cairn_version, cairn_last_error and cairn_status_name returns a
 * status; no C++ exception leaves the library. A call that fails has written none of its results;
 * what it says of its objects is what the C++ function says (docs/errors.md). NULL, freed handles,
 * handles of another kind and unknown options, dtypes and sizes are CAIRN_INVALID_ARGUMENT.
 *
 * Ownership. *_create and cairn_group_from_environment hand out a handle, which cairn_free ends.
 * Handles may be freed in any order: what is built on another keeps it. Arrays stay the caller's.
 * They must not move, nor be freed, while a handle that was given them lives, or one that was built
 * on it. Descriptors (cairn_tensor), names, shapes and options are copied and may go at once.
 *
 * Aliasing. Arrays of one call do not overlap, unless the function says so.
 *
 * Threads. A handle, and those built on it, is used by one thread at a time. Errors and
 * cairn_set_stream belong to the calling thread.
 *
 * Streams. Work on the CPU is done when a function returns. Work on a GPU is queued on its current
 * stream: the default one, or that of cairn_set_stream.
 *
 * Options are text, "name=value name=value", or NULL for none: numbers in C's notation ("inf" too),
 * truth values as 0 and 1. Names and defaults are those of the C++ struct that is named.
 */
#ifndef CAIRN_H
#define CAIRN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The typed errors of docs/errors.md. */
typedef enum cairn_status {
  CAIRN_OK = 0,
  CAIRN_ERROR = 1,               /* core::Error: a call in an order that would train wrong */
  CAIRN_INVALID_ARGUMENT = 2,    /* core::InvalidArgument */
  CAIRN_UNSUPPORTED = 3,         /* core::Unsupported */
  CAIRN_OUT_OF_MEMORY = 4,       /* core::OutOfMemory, std::bad_alloc */
  CAIRN_IO_ERROR = 5,            /* core::IoError */
  CAIRN_DATA_ERROR = 6,          /* core::DataError */
  CAIRN_DEVICE_ERROR = 7,        /* core::DeviceError */
  CAIRN_COMMUNICATION_ERROR = 8, /* core::CommunicationError */
  CAIRN_GRADIENT_COLLAPSE = 9,   /* optim::GradientCollapse */
  CAIRN_UNEXPECTED = 10          /* any other exception */
} cairn_status;

/* 0 is none of them, so that a dtype that was forgotten is an error. */
typedef enum cairn_dtype {
  CAIRN_F16 = 1,
  CAIRN_BF16 = 2,
  CAIRN_F32 = 3,
  CAIRN_F64 = 4,
  CAIRN_I16 = 5,
  CAIRN_I32 = 6,
  CAIRN_I64 = 7,
  CAIRN_U8 = 8,
  CAIRN_BOOL = 9
} cairn_dtype;

typedef enum cairn_device_type { CAIRN_CPU = 0, CAIRN_CUDA = 1 } cairn_device_type;

typedef enum cairn_reduce_op {
  CAIRN_SUM = 0,
  CAIRN_MEAN = 1,
  CAIRN_MAX = 2,
  CAIRN_MIN = 3,
  CAIRN_PRODUCT = 4
} cairn_reduce_op;

/* An array of the caller's, row-major without gaps. */
typedef struct cairn_tensor {
  const char* name;     /* in messages and state files */
  void* data;           /* may be NULL where there are no elements */
  const int64_t* shape; /* `dims` sizes; not read where dims is 0 */
  int32_t dims;         /* 0 to 8 */
  int32_t dtype;        /* cairn_dtype */
  int32_t device_type;  /* cairn_device_type */
  int32_t device_index;
} cairn_tensor;

typedef struct cairn_step_result {
  int32_t applied;         /* 0: skipped, and `reason` says why */
  double gradient_norm;    /* of the unscaled gradients, before clipping; NaN: nobody measured */
  double clip_coefficient; /* 1: not clipped */
  const char* reason;      /* never NULL; both texts live until the handle's next step or its end */
  const char* culprit;     /* the first parameter whose gradient was not finite; "": none */
} cairn_step_result;

typedef struct cairn_group cairn_group;
typedef struct cairn_optimizer cairn_optimizer;
typedef struct cairn_scaler cairn_scaler;
typedef struct cairn_scaled_step cairn_scaled_step;
typedef struct cairn_reducer cairn_reducer;
typedef struct cairn_state cairn_state;

struct DLManagedTensor;

/* ---- General */

/* "0.1.0", of the library that runs. */
const char* cairn_version(void);
/* What the last call of this thread that failed said; "" before any. Lives until the next one. */
const char* cairn_last_error(void);
/* "InvalidArgument" ...; "unknown" for what is no status. */
const char* cairn_status_name(int32_t status);
/* Ends a handle of any kind; NULL: nothing. A group that ends waits for its collectives, a state
 * for a save in the background. */
cairn_status cairn_free(void* handle);
/* From now on this thread's work on CUDA device `device_index` is queued on this cudaStream_t,
 * which must live; NULL: on default streams again. One stream a thread. */
cairn_status cairn_set_stream(int32_t device_index, void* stream);

/* ---- Arrays. Lists are f16, bf16 or f32, in any mix, on one device. */

/* Describes memory that DLPack hands over, without taking it over: `managed` stays the caller's and
 * must live as long as the array is used. The name is NULL. Row-major memory without gaps alone. */
cairn_status cairn_tensor_from_dlpack(struct DLManagedTensor* managed, cairn_tensor* tensor);
/* The p-norm (p >= 1, or infinity) of the finite elements of all arrays together, and how many are
 * inf or NaN (may be NULL). Waits for the device. */
cairn_status cairn_tensors_norm(const cairn_tensor* tensors, size_t count, double p, double* norm,
                                int64_t* nonfinite);
/* to[i] = from[i] * factor, computed in f32 and rounded once; to[i] has the shape of from[i] and a
 * dtype of its own, and may be from[i]. Factor 1 converts. */
cairn_status cairn_tensors_scale(const cairn_tensor* from, const cairn_tensor* to, size_t count,
                                 double factor);
/* Scales all arrays by max_norm / (norm + 1e-6) where their p-norm is larger than max_norm (> 0),
 * as torch's clip_grad_norm_; `norm` (may be NULL) is that before. CAIRN_ERROR, and nothing is
 * written, where an element is not finite. */
cairn_status cairn_tensors_clip(const cairn_tensor* tensors, size_t count, double max_norm,
                                double p, double* norm);

/* ---- Groups: the processes of a job. Every rank calls the same functions in the same order. */

/* The job that cairn-run, torchrun, mpirun or srun started this process in; else a group of one.
 * Returns when every rank has come. */
cairn_status cairn_group_from_environment(cairn_group** group);
/* Each may be NULL. */
cairn_status cairn_group_ranks(cairn_group* group, int32_t* rank, int32_t* world_size,
                               int32_t* local_rank, int32_t* local_world_size);
cairn_status cairn_group_barrier(cairn_group* group, const char* name);
/* x = op (cairn_reduce_op) over all ranks' x, in place. x->name, for errors, may be NULL. */
cairn_status cairn_group_all_reduce(cairn_group* group, const cairn_tensor* x, int32_t op);
cairn_status cairn_group_broadcast(cairn_group* group, const cairn_tensor* x, int32_t root);
/* y = all ranks' x in rank order. `counts`: the elements of each rank's x, the same list on all
 * ranks; NULL: all have as many. x may be its place in y. */
cairn_status cairn_group_all_gather(cairn_group* group, const cairn_tensor* x,
                                    const cairn_tensor* y, const int64_t* counts);
/* value = the sum of all ranks' values. */
cairn_status cairn_group_sum(cairn_group* group, double* value, const char* name);
/* Waits for the collectives on a GPU so far, and tells whether they arrived. */
cairn_status cairn_group_wait(cairn_group* group);
/* This rank cannot go on: the others get CAIRN_COMMUNICATION_ERROR with this reason. */
cairn_status cairn_group_abort(cairn_group* group, const char* reason);

/* ---- Optimizers. weights[i] and gradients[i] (f16, bf16 or f32 each) have one shape and device;
 * weights need names. Gradients are read as they lie at each step: the caller writes them before.
 * A half weight has an f32 master from the first step on; who writes such a weight between steps
 * calls cairn_optimizer_weights_written before. */

/* kind and options: "adam" (L2) and "adamw" (optim::AdamOptions, without adamw), "sgd"
 * (SgdOptions), "adagrad" (AdagradOptions), "rmsprop" (RmsPropOptions), "lamb" (LambOptions),
 * "novograd" (NovoGradOptions). */
cairn_status cairn_optimizer_create(const char* kind, const char* options,
                                    const cairn_tensor* weights, const cairn_tensor* gradients,
                                    size_t count, cairn_optimizer** optimizer);
/* A further group. Options: lr, weight_decay, beta1, beta2, eps, momentum; without lr and
 * weight_decay those of the first group. */
cairn_status cairn_optimizer_add_group(cairn_optimizer* optimizer, const char* options,
                                       const cairn_tensor* weights, const cairn_tensor* gradients,
                                       size_t count);
/* The same options of a group that is there, from the next step on; group -1: of all. */
cairn_status cairn_optimizer_set(cairn_optimizer* optimizer, int32_t group, const char* options);
/* How state is kept (optim::StateOptions): moments=f32|bf16 masters=f32|remainder|none on_host=0|1;
 * `folder`: in files there; NULL: in memory. What is not named is as by default. */
cairn_status cairn_optimizer_keep_state(cairn_optimizer* optimizer, const char* options,
                                        const char* folder);
/* Checks, clips and updates, or skips. Options: optim::StepOptions, without keep_gradients. */
cairn_status cairn_optimizer_step(cairn_optimizer* optimizer, const char* options,
                                  cairn_step_result* result);
/* Steps that were applied. */
cairn_status cairn_optimizer_steps(cairn_optimizer* optimizer, int64_t* steps);
/* The caller is about to write half weights: the next step goes on from what it writes. */
cairn_status cairn_optimizer_weights_written(cairn_optimizer* optimizer);

/* ---- Loss scaling. `world`: the ranks over which gradients are averaged, a cairn_reducer (which
 * also knows whose own gradients overflowed) or a cairn_group; NULL: this process alone. */

/* The rule of the scale alone. Options: amp::LossScalerOptions. */
cairn_status cairn_scaler_create(const char* options, cairn_scaler** scaler);
cairn_status cairn_scaler_scale(cairn_scaler* scaler, double* scale);
/* After each step: overflow is 0 or 1. */
cairn_status cairn_scaler_update(cairn_scaler* scaler, int32_t overflow);

/* Scale, check, agreement of all ranks, update and attribution. Options: amp::LossScalerOptions. */
cairn_status cairn_scaled_step_create(cairn_optimizer* optimizer, const char* options, void* world,
                                      cairn_scaled_step** scaled);
/* What the next loss is multiplied by. */
cairn_status cairn_scaled_step_scale(cairn_scaled_step* scaled, double* scale);
/* cairn_optimizer_step of gradients at that scale. Then the scale moves. A collective. */
cairn_status cairn_scaled_step_run(cairn_scaled_step* scaled, const char* options,
                                   cairn_step_result* result);

/* ---- Reducers: gradients averaged over the ranks while more are being made. */

/* Every rank: the same list, in the order in which parameters are used. Options:
 * parallel::ReducerOptions, without trigger_parameters, retain_allreduce_buffers and hook.
 * `parts`: NULL; with shard=1 where this rank's part of each average goes, [n] of the gradient's
 * dtype, with n of cairn_even_part over shard_within, or all, ranks. */
cairn_status cairn_reducer_create(cairn_group* group, const char* options,
                                  const cairn_tensor* gradients, const cairn_tensor* parts,
                                  size_t count, cairn_reducer** reducer);
/* Gradient `index` is complete, or there is none; then it is left alone until the wait. */
cairn_status cairn_reducer_mark_ready(cairn_reducer* reducer, size_t index);
cairn_status cairn_reducer_mark_unused(cairn_reducer* reducer, size_t index);
/* All are marked; averages (or parts) are there when later work begins. */
cairn_status cairn_reducer_wait(cairn_reducer* reducer);
/* Gives a pass up, on every rank. */
cairn_status cairn_reducer_abandon(cairn_reducer* reducer);
/* Elements [begin, begin + size) of an array are this rank's. size may be 0. */
cairn_status cairn_even_part(int64_t elements, int32_t rank, int32_t world_size, int64_t* begin,
                             int64_t* size);

/* ---- Training states: checkpoints in a folder, atomic and verified. `world` as above: each call
 * from resume on is a collective, in a folder that all ranks see. */

/* Options: keep, keep_every, asynchronous, read_only of checkpointing::TrainingStateOptions. */
cairn_status cairn_state_create(const char* options, void* world, cairn_state** state);
/* An optimizer's moments and steps, a scaler, a scaled step or a reducer. Parts are added before
 * the first save or resume; their names have no '.'. With several ranks, an optimizer of a sharding
 * reducer's parts is CAIRN_UNSUPPORTED: each rank saves it in a state of its own, without world. */
cairn_status cairn_state_add(cairn_state* state, const char* name, void* part);
/* The exact values of an optimizer's weights: those of the masters, where there are some. */
cairn_status cairn_state_add_weights(cairn_state* state, const char* name,
                                     cairn_optimizer* optimizer);
/* Any other arrays, of any dtype; the same on every rank. An optimizer's half weights are
 * CAIRN_INVALID_ARGUMENT: their masters would be lost. */
cairn_status cairn_state_add_tensors(cairn_state* state, const char* name,
                                     const cairn_tensor* tensors, size_t count);
/* Loads the newest good checkpoint, into the arrays too; step: its number, 0 where there is none.
 * On an error nothing has changed. */
cairn_status cairn_state_resume(cairn_state* state, const char* folder, int64_t* step);
/* Returns once folder/step-N would outlive a loss of power; a crash leaves those before it. */
cairn_status cairn_state_save(cairn_state* state, const char* folder, int64_t step);
/* Counts a step and saves each n-th; step (may be NULL): the steps so far. */
cairn_status cairn_state_save_every(cairn_state* state, int64_t n, const char* folder,
                                    int64_t* step);
/* Once this signal has come to any rank, the next cairn_state_save_every saves and ends the process
 * with status 75. */
cairn_status cairn_state_save_on_signal(cairn_state* state, int32_t signal, const char* folder);
/* Waits for a save in the background (asynchronous=1) and tells what went wrong with it. */
cairn_status cairn_state_finish(cairn_state* state);

#ifdef __cplusplus
}
#endif

#endif
