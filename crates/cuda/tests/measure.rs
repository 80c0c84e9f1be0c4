//! Measuring, on the fake driver with links of known rates: figures are those of the links, and
//! what is kept is used.
#![allow(clippy::unwrap_used)]

use cuda_testkit::{Fake, alone};
use forebay_cuda::device::{Device, DeviceMemory, HostMemory};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::measure::measure;
use forebay_cuda::preflight::{Severity, findings, worst};
use forebay_cuda::profile::{BothWays, Profile, Relayed, RelayedBothWays};
use forebay_cuda::rates::{Rates, Relaying};
use forebay_cuda::topology::Topology;
use forebay_cuda::{Copier, CopierOptions, Relay};
use libc::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A busy machine moves less than a link would, and for a moment more, since pretended links catch
/// up on what they missed.
fn is_about(measured: f64, gb_per_s: f64) -> bool {
    (0.3 * gb_per_s..1.5 * gb_per_s).contains(&(measured / 1e9))
}

fn measured(fake: &Fake) -> Profile {
    let profile = measure(fake.driver, &Topology::read(fake.driver).unwrap()).unwrap();
    assert_nothing_is_left(fake);
    profile
}

fn assert_nothing_is_left(fake: &Fake) {
    for what in ["live.streams", "live.events", "live.modules", "live.allocations", "live.host"] {
        assert_eq!(fake.stat(what), 0, "{what}");
    }
}

/// What a profile says that links of these rates do not do, if anything.
fn what_is_wrong(profile: &Profile) -> Option<String> {
    let BothWays { h2d_bytes_per_s, d2h_bytes_per_s } = profile.together;
    let both = [profile.alone(0).unwrap(), profile.alone(1).unwrap()];
    let right = [
        both.iter().zip([0.12, 0.06]).all(|(rates, gb_per_s)| {
            is_about(rates.h2d_bytes_per_s, gb_per_s) && is_about(rates.d2h_bytes_per_s, gb_per_s)
        }),
        both[1].h2d_bytes_per_s < 0.8 * both[0].h2d_bytes_per_s,
        is_about(h2d_bytes_per_s, 0.15) && is_about(d2h_bytes_per_s, 0.18),
        profile.pairs.len() == 2 && profile.pairs.iter().all(|pair| is_about(pair.bytes_per_s, 0.3)),
        profile.relayed.is_some(),
    ];
    right.contains(&false).then(|| format!("{right:?} {profile:?}"))
}

#[test]
fn links_are_measured_as_they_are_and_a_slow_link_shows() {
    let rates = "h2d=0.12,d2h=0.12,h2d.1=0.06,d2h.1=0.06,host_h2d=0.15,p2p=0.3";
    let env = [("FAKE_CUDA_GPUS", "2"), ("FAKE_CUDA_RATES", rates)];
    alone("links_are_measured_as_they_are_and_a_slow_link_shows", &env, |fake| {
        // A busy machine disturbs a measurement now and then, but not each of them.
        let found: Vec<_> = (0..3).map_while(|_| what_is_wrong(&measured(fake))).collect();
        assert!(found.len() < 3, "{found:#?}");
    });
}

#[test]
fn measuring_ends_in_time_however_slow_links_are() {
    let env = [("FAKE_CUDA_GPUS", "3"), ("FAKE_CUDA_RATES", "h2d=0.1,d2h=0.1,p2p=0.4")];
    alone("measuring_ends_in_time_however_slow_links_are", &env, |fake| {
        let start = Instant::now();
        assert!(measured(fake).relayed.is_some());
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    });
}

#[test]
fn gpus_that_do_not_reach_each_other_have_links_and_nothing_else() {
    let env =
        [("FAKE_CUDA_GPUS", "2"), ("FAKE_CUDA_RATES", "h2d=0.4,d2h=0.4"), ("FAKE_CUDA_FAULTS", "p2p off")];
    alone("gpus_that_do_not_reach_each_other_have_links_and_nothing_else", &env, |fake| {
        let profile = measured(fake);
        assert_eq!((profile.alone.len(), profile.pairs.len(), profile.relayed), (2, 0, None));
        let rates = Rates::from(&profile);
        assert_eq!(rates.least_bytes(), Rates::default().least_bytes());
    });
}

#[test]
fn gpus_that_move_wrong_bytes_are_a_fault_and_have_no_rate() {
    for fault in ["p2p copies lost", "p2p kernels zero"] {
        let env =
            [("FAKE_CUDA_GPUS", "2"), ("FAKE_CUDA_RATES", "h2d=0.4,d2h=0.4"), ("FAKE_CUDA_FAULTS", fault)];
        alone("gpus_that_move_wrong_bytes_are_a_fault_and_have_no_rate", &env, |fake| {
            let profile = measured(fake);
            assert_eq!((profile.alone.len(), profile.pairs.len(), profile.relayed), (2, 0, None));
            assert_eq!(profile.untrusted.len(), 1, "{profile:?}");
            let host = Topology::read(fake.driver).unwrap();
            let found = findings(&host, Some(&profile));
            assert_eq!(worst(&found), Severity::Fault, "{found:?}");
            // And so whoever reads what was kept.
            let folder = tempfile::tempdir().unwrap();
            profile.save(folder.path()).unwrap();
            let kept = Profile::load(folder.path(), &profile.digest).unwrap();
            assert_eq!(kept.untrusted, profile.untrusted);
        });
    }
}

#[test]
fn a_copy_that_fails_is_an_error_and_leaves_nothing_behind() {
    alone("a_copy_that_fails_is_an_error_and_leaves_nothing_behind", &[("FAKE_CUDA_GPUS", "2")], |fake| {
        fake.control("fail cuMemcpyAsync 40 700");
        let failed = measure(fake.driver, &Topology::read(fake.driver).unwrap()).unwrap_err();
        assert!(failed.to_string().contains("cuMemcpyAsync"), "{failed}");
        assert_nothing_is_left(fake);
    });
}

/// A profile that nobody would assume, for the host as the fake driver has it.
fn odd(fake: &Fake) -> Profile {
    let host = Topology::read(fake.driver).unwrap();
    let together = BothWays { h2d_bytes_per_s: 30e9, d2h_bytes_per_s: 20e9 };
    let h2d = Relayed {
        relaying: Relaying { efficiency: 0.7, latency_s: 55e-6 },
        break_even_bytes: Some(5 << 20),
        mover_bytes: 77 << 20,
        relay: Relay::ALL[2],
    };
    let relayed = RelayedBothWays { h2d, d2h: Relayed { break_even_bytes: None, ..h2d } };
    Profile::new(host.digest(), vec![], together, vec![], Some(relayed))
}

/// Runs a test with a folder for what is kept.
fn with_cache(test: &str, body: impl FnOnce(&Fake)) {
    let cache = tempfile::tempdir().unwrap();
    alone(test, &[("FAKE_CUDA_GPUS", "2"), ("XDG_CACHE_HOME", cache.path().to_str().unwrap())], body);
}

#[test]
fn a_copier_goes_by_what_was_kept_of_this_host_unless_told_otherwise() {
    with_cache("a_copier_goes_by_what_was_kept_of_this_host_unless_told_otherwise", |fake| {
        let started =
            |options| Copier::with_driver(fake.driver, &options).unwrap().stream_copies().rates().clone();
        assert_eq!(started(CopierOptions::default()), Rates::default());
        let kept = odd(fake);
        kept.save(&Profile::folder().unwrap()).unwrap();
        let rates = started(CopierOptions::default());
        assert_eq!(rates, Rates::from(&kept));
        assert_eq!(rates.of(Direction::HostToDevice).break_even_bytes, 5 << 20);
        assert_eq!(rates.of(Direction::DeviceToHost).break_even_bytes, u64::MAX);
        assert_eq!(rates.of(Direction::HostToDevice).mover_bytes, 77 << 20);
        let told = Rates::default().with(Direction::HostToDevice, |own| own.mover_bytes = 1);
        let options = CopierOptions { rates: Some(told.clone()), ..CopierOptions::default() };
        assert_eq!(started(options), told);
    });
}

/// The head of `forebay_copy_api`.
#[repr(C)]
struct CopyApi {
    abi: u32,
    size: u32,
    min_bytes: AtomicU64,
    copy: unsafe extern "C" fn(*const Piece, u64, u32, *mut c_void, u32, *mut i32) -> i32,
}

unsafe extern "C" {
    fn forebay_copy_open(
        dlsym: unsafe extern "C" fn(*mut c_void, *const libc::c_char) -> *mut c_void,
        libcuda: *mut c_void,
        lines: i32,
    ) -> *const CopyApi;
}

#[test]
fn the_preload_is_offered_copies_from_the_size_that_was_measured() {
    with_cache("the_preload_is_offered_copies_from_the_size_that_was_measured", |fake| {
        odd(fake).save(&Profile::folder().unwrap()).unwrap();
        let path = std::ffi::CString::new(std::env::var("FOREBAY_LIBCUDA").unwrap()).unwrap();
        // SAFETY: the library is the fake driver, which is never closed; what is returned lives as
        // long as the process.
        let api = unsafe { &*forebay_copy_open(libc::dlsym, libc::dlopen(path.as_ptr(), libc::RTLD_NOW), 2) };
        // It starts with the first copy that could go over several links.
        let device = Device::open(fake.driver, 0).unwrap();
        let bytes = 8 << 20;
        let (host, memory) =
            (HostMemory::new(&device, bytes).unwrap(), DeviceMemory::new(&device, bytes as u64).unwrap());
        let offered = [Piece { from: host.start() as u64, to: memory.address(), bytes: bytes as u64 }];
        let _current = device.enter().unwrap();
        let mut result = 0;
        // SAFETY: both are as long as that, and nothing is copied before the library has started.
        let declined = unsafe { (api.copy)(offered.as_ptr(), 1, 2, std::ptr::null_mut(), 0, &mut result) };
        assert_eq!(declined, 11, "it starts");
        let deadline = Instant::now() + Duration::from_secs(60);
        while api.min_bytes.load(Ordering::Relaxed) != 5 << 20 {
            assert!(Instant::now() < deadline, "still {:?}", api.min_bytes);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(api.abi == 2 && api.size >= 16);
    });
}
