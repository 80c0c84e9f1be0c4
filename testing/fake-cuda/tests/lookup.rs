//! Guarantees of looking entry points up, and of the runtime that does so.
#![allow(clippy::unwrap_used)]

mod common;
use common::{Cuda, alone, at, cu};
use std::ffi::{CString, c_char, c_void};

/// (return code, status, address)
fn find(cuda: &Cuda, name: &str, version: i32, flags: u64) -> (i32, u32, usize) {
    let (name, mut address, mut status) = (CString::new(name).unwrap(), 0usize, 9u32);
    let code = cu!(cuda, cuGetProcAddress_v2(name.as_ptr() => *const c_char, &mut address => *mut usize, version => i32,
        flags => u64, &mut status => *mut u32));
    (code, status, address)
}

#[test]
fn the_version_and_the_flags_choose_the_entry_point() {
    alone(
        "the_version_and_the_flags_choose_the_entry_point",
        &[("FAKE_CUDA_FAULTS", "missing cuMemAlloc")],
        |cuda| {
            let symbol = |name: &str| (0, 0, cuda.symbol(name) as usize);
            assert_eq!(find(cuda, "cuMemcpyBatchAsync", 12080, 0), symbol("cuMemcpyBatchAsync"));
            assert_eq!(find(cuda, "cuMemcpyBatchAsync", 13000, 0), symbol("cuMemcpyBatchAsync_v2"));
            assert_eq!(find(cuda, "cuMemcpyBatchAsync", 13000, 2), symbol("cuMemcpyBatchAsync_v2_ptsz"));
            assert_eq!(find(cuda, "cuMemcpyBatchAsync", 12040, 0), (0, 2, 0), "too new for who asks");
            assert_eq!(find(cuda, "cuMemcpyHtoDAsync", 7000, 2), symbol("cuMemcpyHtoDAsync_v2_ptsz"));
            assert_eq!(find(cuda, "cuMemcpyHtoDAsync", 3020, 0), symbol("cuMemcpyHtoDAsync_v2"));
            // The same name with other arguments: who asks for the newest must call the newest.
            assert_eq!(find(cuda, "cuCtxSynchronize", 13000, 0), symbol("cuCtxSynchronize_v2"));
            assert_eq!(find(cuda, "cuMemcpyHtoDAsync_v2", 13000, 0), (0, 1, 0), "names have no suffix");
            assert_eq!(find(cuda, "cuMemAlloc", 13000, 0), (0, 1, 0), "missing on request");
            assert_eq!(find(cuda, "cuGetProcAddress", 13000, 0), symbol("cuGetProcAddress_v2"));
            cuda.control("version 12080");
            assert_eq!(
                find(cuda, "cuMemcpyBatchAsync", 13000, 0).0,
                1,
                "a version that the driver does not have"
            );
            assert_eq!(find(cuda, "cuMemcpyBatchAsync", 12080, 0), symbol("cuMemcpyBatchAsync"));
        },
    );
}

#[test]
fn nothing_goes_before_cuinit_or_in_a_forked_child() {
    alone("nothing_goes_before_cuinit_or_in_a_forked_child", &[], |cuda| {
        let mut count = 0i32;
        assert_eq!(cu!(cuda, cuDeviceGetCount(&mut count => *mut i32)), 3);
        cuda.start(1);
        assert_eq!(cu!(cuda, cuDeviceGetCount(&mut count => *mut i32)), 0);
        assert_eq!(count, 4);
        // SAFETY: the child makes one call and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = cu!(cuda, cuDeviceGetCount(&mut count => *mut i32));
            // SAFETY: nothing of the parent's is cleaned up.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: the child is this process's own.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 3);
    });
}

#[test]
fn the_runtime_copies_by_way_of_what_it_looked_up() {
    let folder = fake_cuda_install::installed().folder.to_str().unwrap();
    alone("the_runtime_copies_by_way_of_what_it_looked_up", &[("LD_LIBRARY_PATH", folder)], |cuda| {
        // SAFETY: the fake runtime runs nothing when it is loaded.
        let runtime = unsafe { libc::dlopen(c"libcudart.so.13".as_ptr(), libc::RTLD_NOW) };
        assert!(!runtime.is_null());
        macro_rules! rt {
            ($symbol:ident($($arg:expr => $kind:ty),* $(,)?)) => {
                // SAFETY: the symbol has this signature.
                unsafe {
                    let name = CString::new(stringify!($symbol)).unwrap();
                    let address = libc::dlsym(runtime, name.as_ptr());
                    assert!(!address.is_null());
                    let entry: unsafe extern "C" fn($($kind),*) -> i32 = std::mem::transmute(address);
                    entry($($arg),*)
                }
            };
        }
        let (mut device, mut stream) = (std::ptr::null_mut::<c_void>(), 0usize);
        let (source, mut back) = (vec![4u8; 5000], vec![0u8; 5000]);
        assert_eq!(rt!(cudaSetDevice(1 => i32)), 0);
        assert_eq!(rt!(cudaMalloc(&mut device => *mut *mut c_void, 5000 => usize)), 0);
        assert_eq!(rt!(cudaStreamCreate(&mut stream => *mut usize)), 0);
        let code = rt!(cudaMemcpyAsync(device => *mut c_void, source.as_ptr() => *const u8, 5000 => usize, 1 => i32, stream => usize));
        assert_eq!(code, 0);
        assert_eq!(rt!(cudaStreamSynchronize(stream => usize)), 0);
        let code = rt!(cudaMemcpy_ptds(back.as_mut_ptr() => *mut u8, device => *mut c_void, 5000 => usize, 4 => i32));
        assert_eq!((code, &back), (0, &source));
        assert_eq!(cuda.stat("cuMemcpyHtoDAsync_v2"), 1, "asked for by name and kind");
        assert_eq!(cuda.stat("cuMemcpy_ptds"), 1);
        assert_eq!(cuda.stat("bytes.h2d.1"), 5000);
        assert_eq!(rt!(cudaFree(device => *mut c_void)), 0);
        assert_eq!((at(&source) != 0, cuda.report().as_str()), (true, ""));
    });
}
