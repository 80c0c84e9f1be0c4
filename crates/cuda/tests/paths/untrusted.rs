//! Peers that report success and move wrong bytes, GPUs that cannot be opened, and GPUs that are
//! somebody else's: copies use the others, and what is not used is named.

use crate::common::{Fake, Log, World, alone, pattern};
use crate::copy_stream::pages;
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::peers::{Distrust, Means};
use forebay_cuda::rates::Rates;
use forebay_cuda::stream_copy::DeclineReason;
use forebay_cuda::{Copier, CopierOptions, LeftOut, Relay, StartError};

const MIB: u64 = 1 << 20;

/// Copies there and back, of a run and of pages of several sizes; every byte arrives. Gives what
/// went over links of other GPUs than the first one.
fn relayed(world: &World, seed: u64) -> u64 {
    let over_peers = || {
        let ways = ["bytes.h2d.1", "bytes.h2d.2", "bytes.d2h.1", "bytes.d2h.2"];
        ways.map(|way| world.fake.stat(way)).into_iter().sum::<u64>()
    };
    let before = over_peers();
    for (page, bytes) in [(12 * MIB, 12 * MIB), (64 << 10, 4 * MIB), (16 << 10, 4 * MIB)] {
        let (source, target, memory) = (world.host(bytes), world.host(bytes), world.memory(0, 2 * bytes));
        source.fill(&pattern(seed, bytes));
        for (way, host) in [(Direction::HostToDevice, &source), (Direction::DeviceToHost, &target)] {
            let pieces = pages(way, host.address(), memory.address(), page, bytes);
            // SAFETY: all memory outlives the copies, and nothing else uses it.
            unsafe { world.copier.copy_and_wait(0, way, &pieces).unwrap() };
        }
        assert!(target.bytes() == pattern(seed, bytes), "pages of {page} bytes");
    }
    over_peers() - before
}

/// Copiers whose stream copies, and whose mover by each kind of relay, have all copies.
fn kinds() -> impl Iterator<Item = CopierOptions> {
    let movers = |rates: Rates, way| rates.with(way, |own| own.mover_bytes = MIB);
    let rates = Direction::BOTH.into_iter().fold(Rates::default(), movers);
    let by_mover = move |relay| CopierOptions {
        to_device: Some(relay),
        to_host: Some(relay),
        rates: Some(rates.clone()),
        ..CopierOptions::default()
    };
    [CopierOptions::default()].into_iter().chain(Relay::ALL.into_iter().map(by_mover))
}

fn with_broken_peers(fake: &Fake, fault: &str, expected: &[Means]) {
    for options in kinds() {
        fake.control(fault);
        let world = fake.world(options);
        assert_eq!(relayed(&world, 1), 0, "{fault}: a relay had a part in it");
        let untrusted = world.copier.stream_copies().peers().untrusted();
        assert_eq!(untrusted.len(), 3, "{fault}: {untrusted:?}");
        for pair in untrusted {
            let Distrust::WrongBytes { means, .. } = pair.why else { panic!("{fault}: {pair}") };
            assert!(expected.contains(&means), "{pair}");
            let said = pair.to_string();
            let names = [format!("GPU {}", pair.one), format!("GPU {}", pair.other)];
            assert!(
                names.iter().all(|name| said.contains(name)) && said.contains("reported success"),
                "{said}"
            );
        }
        assert!(!world.copier.stream_copies().has_relays(0));
        world.end();
    }
    fake.control("p2p copies right; p2p kernels right");
}

#[test]
fn peers_that_move_wrong_bytes_and_report_success_never_relay() {
    alone("untrusted::peers_that_move_wrong_bytes_and_report_success_never_relay", &[], |fake| {
        for how in ["lost", "zero"] {
            with_broken_peers(fake, &format!("p2p copies {how}"), &[Means::Copy]);
            with_broken_peers(fake, &format!("p2p kernels {how}"), &[Means::Kernel]);
        }
        // And they do where nothing is wrong.
        let world = fake.world(CopierOptions::default());
        assert!(relayed(&world, 2) > 0 && world.copier.stream_copies().peers().untrusted().is_empty());
        world.end();
    });
}

#[test]
fn a_copy_without_a_relay_that_is_trusted_is_counted_by_that_reason() {
    alone(
        "untrusted::a_copy_without_a_relay_that_is_trusted_is_counted_by_that_reason",
        &[("FAKE_CUDA_FAULTS", "p2p copies lost")],
        |fake| {
            let world = fake.world(CopierOptions::default());
            let bytes = 8 * MIB;
            let (host, memory) = (world.host(bytes), world.memory(0, bytes));
            let stream = forebay_cuda::device::Stream::new(memory.device()).unwrap();
            let whole = [Piece { from: host.address(), to: memory.address(), bytes }];
            let current = memory.device().enter().unwrap();
            // SAFETY: all memory outlives the stream's work.
            let declined = unsafe { world.copier.copy_in_stream(&whole, stream.handle()).unwrap() };
            stream.synchronize().unwrap();
            assert_eq!(declined, Some(DeclineReason::Untrusted));
            assert_eq!(world.copier.stream_copies().counters().declined(DeclineReason::Untrusted), 1);
            drop(current);
            drop((stream, memory));
            world.end();
        },
    );
}

#[test]
fn a_gpu_that_cannot_be_opened_is_left_out_and_the_others_relay() {
    alone("untrusted::a_gpu_that_cannot_be_opened_is_left_out_and_the_others_relay", &[], |fake| {
        for fault in ["cuDevicePrimaryCtxRetain 2 2", "cuModuleLoadData 2 209", "cuModuleGetFunction 3 500"] {
            fake.control(&format!("fail {fault}"));
            let world = fake.world(CopierOptions::default());
            assert_eq!(fake.stat("live.failing"), 0, "{fault}");
            assert_eq!(world.copier.devices().len(), 2, "{fault}");
            assert!(relayed(&world, 3) > 0, "{fault}: no relay had a part in it");
            world.end();
        }
    });
}

/// Starts with the nth call of a symbol refused. Says whether there was one.
fn started_without(fake: &Fake, symbol: &str, nth: u64) -> bool {
    fake.control(&format!("fail {symbol} {nth} 2"));
    let options = CopierOptions::default();
    let started = Copier::with_driver(forebay_cuda::driver::Driver::load().unwrap(), &options);
    let was_met = fake.stat("live.failing") == 0;
    fake.control("mend");
    match started {
        Ok(copier) if copier.devices().any(|device| device.index() == 0) => {
            let world = World { fake, copier };
            relayed(&world, nth);
            world.end();
        }
        Ok(copier) => {
            assert!(copier.devices().len() == 2, "{symbol} {nth}: the first GPU and another are out")
        }
        // What all GPUs share.
        Err(error) => assert!(was_met, "{symbol} {nth}: {error}"),
    }
    was_met
}

#[test]
fn a_start_that_is_refused_a_call_leaves_right_copies_and_nothing_behind() {
    alone("untrusted::a_start_that_is_refused_a_call_leaves_right_copies_and_nothing_behind", &[], |fake| {
        for symbol in ["cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyAsync", "cuCtxEnablePeerAccess"] {
            // Every third call: each of them is a start.
            let calls = (1..150).step_by(3);
            let met = calls.take_while(|nth| started_without(fake, symbol, *nth)).count();
            assert!((1..50).contains(&met), "{symbol}: {met}");
        }
    });
}

#[test]
fn in_an_exclusive_mode_only_the_programs_own_gpu_is_used() {
    alone(
        "untrusted::in_an_exclusive_mode_only_the_programs_own_gpu_is_used",
        &[("FAKE_CUDA_FAULTS", "mode 0 3; mode 1 3; mode 2 2")],
        |fake| {
            let log = Log::start();
            let own =
                forebay_cuda::device::Device::open(forebay_cuda::driver::Driver::load().unwrap(), 0).unwrap();
            let world = fake.world(CopierOptions::default());
            let used: Vec<u16> = world.copier.devices().map(|device| device.index()).collect();
            assert_eq!(used, [0]);
            assert_eq!(log.count("GPU is left out gpu=1 reason=its compute mode is exclusive"), 1);
            assert_eq!(log.count("GPU is left out gpu=2 reason=its compute mode is prohibited"), 1);
            assert_eq!(fake.stat("cuDevicePrimaryCtxRetain"), 2, "a context on another GPU");
            assert_eq!(relayed(&world, 4), 0);
            world.end();
            let options = CopierOptions { devices: Some(vec![2]), ..CopierOptions::default() };
            let refused = Copier::with_driver(own.driver(), &options).unwrap_err();
            assert!(matches!(refused, StartError::LeftOut(LeftOut::Prohibited)), "{refused}");
        },
    );
}
