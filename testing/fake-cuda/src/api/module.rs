//! Modules, functions and launches.

use crate::abi::{Code, Outcome};
use crate::caller::{get, get_all, put, text};
use crate::driver::{Function, Module};
use crate::entry::{Call, entries};
use crate::kernels::{entries as names, kernel};
use crate::op::What;
use std::ffi::{c_char, c_void};

/// Threads of a block at most, and blocks of a grid's second and third dimension.
const BLOCK_MAX: u64 = 1024;
const GRID_MAX: u32 = 65_535;

impl Call {
    fn load(&mut self, module: *mut usize, image: *const c_void) -> Outcome {
        let gpu = self.current()?;
        // PTX is text; what is not text would be a cubin of some real GPU.
        let ptx = text(image as *const c_char).map_err(|_| Code::INVALID_IMAGE)?;
        if !ptx.contains(".version") || !ptx.contains(".target") {
            return Err(Code::INVALID_PTX);
        }
        let names = names(ptx);
        let handle = self.new_handle();
        self.modules.insert(handle, Module { gpu, names });
        put(module, handle)
    }

    fn launch(
        &mut self,
        function: usize,
        dims: [u32; 6],
        stream: usize,
        params: *const *const c_void,
    ) -> Outcome {
        let stream = self.stream(stream)?;
        let Some(&Function { kernel, .. }) = self.functions.get(&function) else {
            self.misused("a function that does not exist");
            return Err(Code::INVALID_HANDLE);
        };
        let of_stream = self.streams.get(&stream).map(|stream| stream.gpu).ok_or(Code::INVALID_HANDLE)?;
        let gpu = self.current()?;
        if of_stream != gpu {
            self.misused(format_args!("in a stream of GPU {of_stream} with a context of GPU {gpu}"));
            return Err(Code::INVALID_HANDLE);
        }
        let threads: u64 = dims[3..].iter().map(|&threads| u64::from(threads)).product();
        if dims.contains(&0) || threads > BLOCK_MAX || dims[1] > GRID_MAX || dims[2] > GRID_MAX {
            return Err(Code::INVALID_VALUE);
        }
        let pointers = get_all(params, kernel.params.len())?;
        let args = kernel.params.iter().zip(pointers).map(|(bytes, at)| match bytes {
            4 => get(at as *const u32).map(u64::from),
            _ => get(at as *const u64),
        });
        let args: Outcome<Vec<u64>> = args.collect();
        let op = What::Kernel { kernel, args: args?.into() };
        self.stats.called(kernel.name);
        self.enqueue(stream, kernel.name, op).map(drop)
    }
}

entries! {
    cuModuleLoadData = "cuModuleLoadData" @ 2000 (module: *mut usize, image: *const c_void) |call| {
        call.load(module, image)
    }
    cuModuleUnload = "cuModuleUnload" @ 2000 (module: usize) |call| {
        call.current()?;
        call.unsafe_in_capture()?;
        if call.modules.remove(&module).is_none() {
            call.misused("a module that does not exist");
            return Err(Code::INVALID_HANDLE);
        }
        Ok(())
    }
    cuModuleGetFunction = "cuModuleGetFunction" @ 2000 (function: *mut usize, module: usize, name: *const c_char) |call| {
        call.current()?;
        let name = text(name)?;
        let has = call.modules.get(&module).ok_or(Code::INVALID_HANDLE)?.names.iter().any(|entry| entry == name);
        let found = kernel(name).filter(|_| has).ok_or(Code::NOT_FOUND)?;
        let handle = call.new_handle();
        call.functions.insert(handle, Function { module, kernel: found });
        put(function, handle)
    }
    cuLaunchKernel | cuLaunchKernel_ptsz @ 7000 = "cuLaunchKernel" @ 4000
    (function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, _shared: u32,
     stream: usize, params: *const *const c_void, extra: *const *const c_void) |call| {
        if !extra.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        call.launch(function, [grid_x, grid_y, grid_z, block_x, block_y, block_z], stream, params)
    }
}
