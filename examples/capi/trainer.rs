// Fits a line through Cairn's C interface: f32 arrays, SGD, a state that a killed run continues from.
//
//     rustc -O trainer.rs -L FOLDER_OF_LIBCAIRN_C && ./trainer runs/rust [STEPS]
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_void};

#[repr(C)]
struct Tensor {
    name: *const c_char,
    data: *mut c_void,
    shape: *const i64,
    dims: i32,
    dtype: i32,
    device_type: i32,
    device_index: i32,
}

#[repr(C)]
struct StepResult {
    applied: i32,
    gradient_norm: f64,
    clip_coefficient: f64,
    reason: *const c_char,
    culprit: *const c_char,
}

type Handle = *mut c_void;

#[link(name = "cairn_c")]
extern "C" {
    fn cairn_last_error() -> *const c_char;
    fn cairn_free(handle: Handle) -> i32;
    fn cairn_optimizer_create(kind: *const c_char, options: *const c_char, weights: *const Tensor,
                              gradients: *const Tensor, count: usize, optimizer: *mut Handle) -> i32;
    fn cairn_optimizer_step(optimizer: Handle, options: *const c_char, result: *mut StepResult) -> i32;
    fn cairn_state_create(options: *const c_char, world: Handle, state: *mut Handle) -> i32;
    fn cairn_state_add(state: Handle, name: *const c_char, part: Handle) -> i32;
    fn cairn_state_add_weights(state: Handle, name: *const c_char, optimizer: Handle) -> i32;
    fn cairn_state_resume(state: Handle, folder: *const c_char, step: *mut i64) -> i32;
    fn cairn_state_save_every(state: Handle, n: i64, folder: *const c_char, step: *mut i64) -> i32;
}

fn check(status: i32) {
    if status != 0 {
        panic!("{}", unsafe { CStr::from_ptr(cairn_last_error()) }.to_string_lossy());
    }
}

fn main() {
    let text = |words: &str| CString::new(words).unwrap();
    let arguments: Vec<String> = std::env::args().collect();
    let folder = text(arguments.get(1).map_or("", |word| word));
    let steps: i64 = arguments.get(2).map_or(200, |word| word.parse().unwrap());
    let (mut weights, mut gradients, shape) = ([0.0f32; 2], [0.0f32; 2], [2i64]);
    let (name, kind, options) = (text("line"), text("sgd"), text("lr=0.1 momentum=0.8"));
    let (mut sgd, mut state, mut step) = (std::ptr::null_mut(), std::ptr::null_mut(), 0i64);
    let describe = |data: *mut f32| Tensor {
        name: name.as_ptr(), data: data as *mut c_void, shape: shape.as_ptr(), dims: 1, dtype: 3, // f32
        device_type: 0, device_index: 0,
    };
    let (w, g) = (weights.as_mut_ptr(), gradients.as_mut_ptr()); // the arrays stay where they are
    unsafe {
        check(cairn_optimizer_create(kind.as_ptr(), options.as_ptr(), &describe(w), &describe(g), 1, &mut sgd));
        check(cairn_state_create(std::ptr::null(), std::ptr::null_mut(), &mut state));
        check(cairn_state_add_weights(state, text("model").as_ptr(), sgd));
        check(cairn_state_add(state, text("optimizer").as_ptr(), sgd));
        check(cairn_state_resume(state, folder.as_ptr(), &mut step));
        while step < steps {
            let x = ((step * 7) % 11) as f32 / 5.0 - 1.0; // points of y = 3 x - 2
            let error = *w * x + *w.add(1) - (3.0 * x - 2.0);
            (*g, *g.add(1)) = (error * x, error);
            let mut result: StepResult = std::mem::zeroed();
            check(cairn_optimizer_step(sgd, std::ptr::null(), &mut result));
            check(cairn_state_save_every(state, 20, folder.as_ptr(), &mut step));
            println!("step {} y = {:.6} x + {:.6}, norm {:.6}", step, *w, *w.add(1), result.gradient_norm);
        }
        check(cairn_free(state));
        check(cairn_free(sgd));
    }
}
