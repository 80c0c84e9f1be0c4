//! Guarantees of kernels: they move what they say, over the links that a real GPU would use.
#![allow(clippy::unwrap_used)]

mod common;
use common::{PTX, alone, at, cu};
use std::ffi::{CString, c_char};

const PAGE: usize = 4096;
const PAGES: usize = 64;

#[test]
fn gather_and_scatter_are_each_others_opposite() {
    alone("gather_and_scatter_are_each_others_opposite", &[], |cuda| {
        cuda.start(1);
        let stream = cuda.stream();
        let (paged, lot) = (cuda.alloc(2 * PAGES * PAGE), cuda.alloc(PAGES * PAGE));
        let (host, back) = (cuda.pinned(PAGES * PAGE), cuda.pinned(PAGES * PAGE));
        host.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / PAGE + index) as u8);
        // A page of the host's or of the lot, and its place among the pages.
        let pages = (0..PAGES).map(|page| (page * PAGE, (page * 37 % PAGES * 2 + 1) * PAGE));
        let pages: Vec<[u64; 2]> = pages.map(|(at, place)| [at as u64, paged + place as u64]).collect();
        let scatter: Vec<_> =
            pages.iter().map(|[page, place]| [at(host) + page, *place, PAGE as u64]).collect();
        let gather: Vec<_> = pages.iter().map(|[page, place]| [*place, lot + page, PAGE as u64]).collect();
        assert_eq!(cuda.copy_pieces(stream, &scatter), 0);
        assert_eq!(cuda.copy_pieces(stream, &gather), 0);
        assert_eq!(cuda.copy(at(back), lot, PAGES * PAGE, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!(host, back);
        assert_eq!(cuda.report(), "");
        assert_eq!(cuda.stat("bytes.h2d.0"), (PAGES * PAGE) as u64);
        assert_eq!(cuda.stat("bytes.d2d.0"), (PAGES * PAGE) as u64);
    });
}

#[test]
fn a_relay_moves_bytes_over_the_peers_link_and_nvlink() {
    alone("a_relay_moves_bytes_over_the_peers_link_and_nvlink", &[], |cuda| {
        let contexts = cuda.start(2);
        let bytes = 1 << 20;
        let (target, host, back) = (cuda.alloc(bytes), cuda.pinned(bytes), cuda.pinned(bytes));
        host.fill(3);
        cuda.enter(contexts[1]);
        cuda.peer(contexts[0]);
        let stream = cuda.stream();
        assert_eq!(cuda.copy_pieces(stream, &[[at(host), target, bytes as u64]]), 0);
        assert_eq!(cuda.copy_pieces(stream, &[[target, at(back), bytes as u64]]), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!(host, back);
        let moved = ["h2d.1", "p2p.1.0", "p2p.0.1", "d2h.1"].map(|way| cuda.stat(&format!("bytes.{way}")));
        assert_eq!(moved, [bytes as u64; 4]);
        assert_eq!(cuda.stat("bytes.h2d.0") + cuda.stat("bytes.d2h.0"), 0);
        assert_eq!(cuda.report(), "");
    });
}

#[test]
fn pieces_are_read_when_the_kernel_runs() {
    alone("pieces_are_read_when_the_kernel_runs", &[], |cuda| {
        cuda.start(1);
        let (stream, device, host) = (cuda.stream(), cuda.alloc(300), cuda.pinned(300));
        host.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8);
        let table = cuda.pinned(2 * size_of::<[u64; 3]>());
        cuda.control("freeze compute.0");
        assert_eq!(cuda.launch(cuda.kernel("forebay_pieces"), stream, &[at(table), 2]), 0);
        let pieces =
            [(0, 100, 50), (200, 7, 90)].map(|(from, to, bytes)| [at(host) + from, device + to, bytes]);
        let words: Vec<u8> = pieces.concat().iter().flat_map(|word: &u64| word.to_le_bytes()).collect();
        table.copy_from_slice(&words);
        cuda.control("release compute.0");
        let back = cuda.pinned(300);
        assert_eq!(cuda.copy(at(back), device, 300, stream), 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!((&back[100..150], &back[7..97]), (&host[0..50], &host[200..290]));
    });
}

#[test]
fn a_function_is_found_only_where_its_name_is_and_its_effect_is_known() {
    alone("a_function_is_found_only_where_its_name_is_and_its_effect_is_known", &[], |cuda| {
        cuda.start(1);
        let load = |ptx: &str| {
            let (ptx, mut module) = (CString::new(ptx).unwrap(), 0usize);
            (cu!(cuda, cuModuleLoadData(&mut module => *mut usize, ptx.as_ptr() => *const c_char)), module)
        };
        assert_eq!(load("int main() {}").0, 218);
        let (code, module) = load(PTX);
        assert_eq!(code, 0);
        let find = |name: &str| {
            let (name, mut function) = (CString::new(name).unwrap(), 0usize);
            cu!(cuda, cuModuleGetFunction(&mut function => *mut usize, module => usize, name.as_ptr() => *const c_char))
        };
        assert_eq!(["forebay_pieces", "somebody_elses", "forebay"].map(find), [0, 500, 500]);
        assert_eq!(cu!(cuda, cuModuleUnload(module => usize)), 0);
        assert_eq!((find("forebay_pieces"), cuda.stat("live.modules")), (400, 0));
    });
}

#[test]
fn batches_of_both_abis_copy_all_their_pages() {
    alone("batches_of_both_abis_copy_all_their_pages", &[], |cuda| {
        cuda.start(1);
        let stream = cuda.stream();
        let (device, host, back) =
            (cuda.alloc(PAGES * PAGE), cuda.pinned(PAGES * PAGE), cuda.pinned(PAGES * PAGE));
        host.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 97) as u8);
        let pages = |base: u64| {
            (0..PAGES as u64).map(|page| base + (page * 5 % PAGES as u64) * PAGE as u64).collect::<Vec<u64>>()
        };
        let (on_host, on_device, on_back) = (pages(at(host)), pages(device), pages(at(back)));
        let (sizes, attrs, starts) = (vec![PAGE; PAGES], [1u32, 0, 0, 0, 0, 0], [0usize]);
        let mut fail = 0usize;
        let batch = |to: &[u64], from: &[u64], stream: usize, fail: &mut usize| {
            cu!(cuda, cuMemcpyBatchAsync(to.as_ptr() => *const u64, from.as_ptr() => *const u64, sizes.as_ptr() => *const usize,
                PAGES => usize, attrs.as_ptr() => *const u32, starts.as_ptr() => *const usize, 1 => usize,
                fail => *mut usize, stream => usize))
        };
        assert_eq!(batch(&on_device, &on_host, 0, &mut fail), 1, "not in the legacy stream");
        assert_eq!(batch(&on_device, &on_host, stream, &mut fail), 0);
        let mut wrong = on_device.clone();
        wrong[3] = device + (PAGES * PAGE) as u64 - 1;
        assert_eq!((batch(&wrong, &on_host, stream, &mut fail), fail), (1, 3));
        let code = cu!(cuda, cuMemcpyBatchAsync_v2(on_back.as_ptr() => *const u64, on_device.as_ptr() => *const u64,
            sizes.as_ptr() => *const usize, PAGES => usize, attrs.as_ptr() => *const u32,
            starts.as_ptr() => *const usize, 1 => usize, stream => usize));
        assert_eq!(code, 0);
        assert_eq!(cuda.sync(stream), 0);
        assert_eq!(host, back);
    });
}
