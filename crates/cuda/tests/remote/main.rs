//! Relays across processes, on the fake driver. Each test runs this binary again as the process
//! that plays the scenario, with GPUs of its own choice, and that one starts the other side as a
//! third process.

#![allow(clippy::unwrap_used)]

mod engine;
mod node;

use engine::*;
use forebay_cuda::device::{Device, DeviceMemory, HostMemory, Stream};
use forebay_cuda::driver::abi::Address;
use forebay_cuda::driver::{Driver, LIBRARY_VARIABLE};
use forebay_cuda::kernels::Piece;
use forebay_cuda::links::Direction;
use forebay_cuda::pinned::{PinnedBuffer, PinnedPool, PoolConfig};
use forebay_cuda::remote::{Attachment, NodeRelays, Relays, RelaysAt, RelaysConfig, Status};
use forebay_cuda::{Copier, CopierOptions};
use forebay_transfer::Backing;
use node::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use testkit::eventually;

const TIMEOUT: Duration = Duration::from_secs(60);
/// What is copied, and where it begins in its memory.
const BYTES: u64 = 24 << 20;
const OFFSET: u64 = 1 << 20;
/// Slow PCIe links, so that relays pay and a node can be killed in the middle.
const RATES: &str = "h2d=0.1,d2h=0.1,p2p=4,host_h2d=0.4,host_d2h=0.4";
/// So slow that a copy lasts much longer than a process that is to be stopped in the middle can be
/// held up.
const SLOW_RATES: &str = "h2d=0.02,d2h=0.02,p2p=4,host_h2d=0.08,host_d2h=0.08";
const RATES_VARIABLE: &str = "FAKE_CUDA_RATES";

const ROLE: &str = "FOREBAY_TEST_ROLE";
const SOCKET: &str = "FOREBAY_TEST_SOCKET";
const LIMIT: &str = "FOREBAY_TEST_LIMIT";

type Scenario = fn(&Path);
const SCENARIOS: &[(&str, Scenario)] = &[
    ("node", node),
    ("copier", copier),
    ("both_ways", both_ways),
    ("killed", killed),
    ("frozen", frozen),
    ("virtual_memory", virtual_memory),
    ("wrong_token", wrong_token),
    ("engine_killed", engine_killed),
    ("environment", environment),
    ("several_gpus", several_gpus),
    ("silent", silent),
    ("smaller_node", smaller_node),
    ("short_of_streams", short_of_streams),
    ("wrong_bytes", wrong_bytes),
    ("exclusive", exclusive),
    ("partitioned", partitioned),
    ("node_unseen", node_unseen),
    ("engine_unseen", engine_unseen),
    ("stranger", stranger),
];
/// Runs a program in a process namespace of its own, in which it sees nobody outside, and ends it
/// with itself.
const APART: [&str; 3] = ["unshare", "-Urpf", "--kill-child"];

/// What a process that this binary started does.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // One that hangs fails.
    // SAFETY: there is no handler for the signal.
    unsafe { libc::alarm(240) };
    let (_, scenario) = SCENARIOS.iter().find(|(name, _)| *name == role).unwrap();
    scenario(Path::new(&std::env::var(SOCKET).unwrap()));
}

/// This binary again, in a role.
fn command(role: &str, socket: &Path, gpus: &str) -> Command {
    command_by(&[], role, socket, gpus)
}

/// The same, started by another program.
fn command_by(starter: &[&str], role: &str, socket: &Path, gpus: &str) -> Command {
    let binary = std::env::current_exe().unwrap();
    let mut words = starter.iter().map(std::ffi::OsStr::new).chain([binary.as_os_str()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["--exact", "role", "--nocapture", "--test-threads=1"]);
    if std::env::var_os(LIBRARY_VARIABLE).is_none() {
        command.env(LIBRARY_VARIABLE, &fake_cuda_install::installed().libcuda);
    }
    if std::env::var_os(RATES_VARIABLE).is_none() {
        command.env(RATES_VARIABLE, RATES);
    }
    command.env("CUDA_VISIBLE_DEVICES", gpus);
    command.env(ROLE, role).env(SOCKET, socket);
    // Whoever waits for this process' output would wait for that of one that it left behind, too.
    // SAFETY: the call is one that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

fn play(role: &str, gpus: &str) {
    play_with(role, gpus, RATES);
}

fn play_with(role: &str, gpus: &str, rates: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(role, &folder.path().join("relays.sock"), gpus);
    let output = command.env(RATES_VARIABLE, rates).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(!err.contains("fake-cuda: misuse"), "{err}");
}

#[test]
fn bytes_go_both_ways_over_relays_whose_gpus_the_engine_cannot_see() {
    play("both_ways", "1");
}

#[test]
fn a_node_killed_in_the_middle_costs_no_byte_and_one_that_returns_is_used_again() {
    play("killed", "2");
}

#[test]
fn a_node_that_hangs_is_given_up_and_what_it_may_still_write_is_waited_for() {
    play_with("frozen", "0", SLOW_RATES);
}

#[test]
fn a_node_that_hangs_before_the_welcome_is_waited_for_and_keeps_nothing_for_who_did_not() {
    play("silent", "0");
}

#[test]
fn memory_that_a_node_will_not_have_goes_directly_and_its_relays_are_used_all_the_same() {
    play("smaller_node", "0");
}

#[test]
fn a_relay_that_the_driver_has_no_stream_for_leaves_no_link_behind() {
    play("short_of_streams", "0");
}

#[test]
fn a_relay_whose_memory_is_reached_wrong_is_never_used() {
    play("wrong_bytes", "0");
}

#[test]
fn a_node_has_no_context_on_a_gpu_that_is_one_process_own() {
    play("exclusive", "0");
}

#[test]
fn an_instance_of_a_partitioned_gpu_is_told_why_it_has_no_relays() {
    play("partitioned", "0");
}

#[test]
fn memory_that_no_peer_may_touch_is_relayed_for_all_the_same() {
    play("virtual_memory", "3");
}

#[test]
fn without_the_right_token_copies_go_directly() {
    play("wrong_token", "0");
}

#[test]
fn an_engine_that_is_killed_leaves_nothing_at_the_node() {
    play("engine_killed", "3,1,0");
}

#[test]
fn the_environment_says_which_relays_to_use_and_only_memory_that_is_shared_goes_there() {
    play("environment", "1");
}

#[test]
fn a_node_that_an_engine_cannot_see_is_not_used_and_the_status_says_why() {
    if can_part() {
        play("node_unseen", "0");
    }
}

#[test]
fn an_engine_that_a_node_cannot_see_is_refused_and_told_why() {
    if can_part() {
        play("engine_unseen", "0");
    }
}

/// Whether this user may start processes that see nobody. If not, says so loudly.
fn can_part() -> bool {
    let [program, args @ ..] = APART;
    let parted = Command::new(program).args(args).arg("true").output();
    let can = parted.is_ok_and(|parted| parted.status.success());
    if !can {
        testkit::skipped(format_args!(
            "no process namespace can be made here; this test needs `{}`",
            APART.join(" ")
        ));
    }
    can
}

#[test]
fn a_copier_with_several_gpus_uses_the_node_for_the_others() {
    play("several_gpus", "2,0");
}

fn partitioned(socket: &Path) {
    const NAME: &str = "FAKE_CUDA_NAME";
    if std::env::var_os(NAME).is_none() {
        let _node = Node::start(socket);
        // The name is read when the driver is loaded.
        let mut engine = command("partitioned", socket, "0");
        assert!(engine.env(NAME, "Fake H200 MIG 1g.18gb").status().unwrap().success());
        let mut node = command("node", socket, "3,2,1,0");
        let node = node.env(NAME, "Fake H200 MIG 1g.18gb").env(LIMIT, "4096").output().unwrap();
        let why = String::from_utf8_lossy(&node.stderr).into_owned();
        assert!(!node.status.success() && why.contains("Part"), "{why}");
        return;
    }
    let engine = Engine::start(socket, "token", Engine::allocated);
    let told = |status: &Status| matches!(status, Status::Detached { reason } if reason.contains("MIG"));
    let status = engine.attachment().wait(TIMEOUT, told);
    assert!(told(&status), "{status:?}");
    engine.round_trip(1, |_, _, _| ());
    assert_eq!(engine.relayed(""), 0);
}

fn both_ways(socket: &Path) {
    let _node = Node::start(socket);
    let engine = Engine::start(socket, "token", Engine::allocated);
    assert_eq!(engine.wait_attached(), 3, "all GPUs but its own");
    engine.round_trip(1, |_, _, _| ());
    for way in ["h2d", "d2h"] {
        assert!(engine.relayed(way) > 0, "{way}: nothing went over relays");
    }
}

fn killed(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    // Without a node everything goes directly.
    engine.round_trip(0, |_, _, _| ());
    assert_eq!(engine.relayed(""), 0);
    // From the first lots to the last ones, in each direction.
    let points = [("h2d", 1), ("d2h", 1), ("h2d", BYTES / 4), ("d2h", BYTES / 4), ("d2h", BYTES / 2)];
    for (nth, (at, bytes)) in points.into_iter().enumerate() {
        let node = std::cell::Cell::new(Some(Node::start(socket)));
        engine.wait_attached();
        let before = engine.relayed(at);
        engine.round_trip(nth as u64 + 1, |engine, way, is_over| {
            if way == at {
                eventually("relaying", || engine.relayed(at) >= before + bytes || is_over());
                node.take().unwrap().kill();
            }
        });
        engine.wait_detached();
    }
}

fn frozen(socket: &Path) {
    for at in ["h2d", "d2h"] {
        let node = Node::start(socket);
        let engine = Engine::start(socket, "token", Engine::allocated);
        engine.wait_attached();
        engine.round_trip(7, |engine, way, _| {
            if way == at {
                eventually("relaying", || engine.relayed(at) > 0);
                node.signal(libc::SIGSTOP);
                assert_eq!(engine.wait_detached(), "the node shows no sign of life");
                match way {
                    // Nobody reads what the node may still put into staging.
                    "h2d" => eventually("the end", || !engine.is_copying()),
                    _ => {
                        // Long enough for an end that comes too early to be seen.
                        std::thread::sleep(Duration::from_millis(300));
                        assert!(engine.is_copying(), "the node may still write to the host");
                    }
                }
                node.signal(libc::SIGCONT);
            }
        });
        engine.wait_attached();
        let before = engine.relayed("");
        engine.round_trip(8, |_, _, _| ());
        assert!(engine.relayed("") > before, "a node that hung once is used again");
    }
}

fn silent(socket: &Path) {
    let node = Node::start(socket);
    node.signal(libc::SIGSTOP);
    let is_silent = |engine: &Engine| engine.wait_detached() == "the node is silent";
    let given_up = Engine::start(socket, "token", Engine::allocated);
    eventually("silence", || is_silent(&given_up));
    drop(given_up);
    let engine = Engine::start(socket, "token", Engine::allocated);
    eventually("silence", || is_silent(&engine));
    node.signal(libc::SIGCONT);
    assert_eq!(engine.wait_attached(), 3);
    // There is staging for three engines.
    let others = [(); 2].map(|()| Engine::start(socket, "token", Engine::allocated));
    others.iter().for_each(|other| assert_eq!(other.wait_attached(), 3));
}

fn smaller_node(socket: &Path) {
    let node = Node::start(socket);
    let engine = Engine::start(socket, "token", Engine::allocated);
    engine.wait_attached();
    node.kill();
    engine.wait_detached();
    let _node = Node::with_limit(socket, 4096);
    let status = engine.attachment().wait(TIMEOUT, |status| matches!(status, Status::Attached { .. }));
    assert_eq!(status, Status::Attached { relays: 3 });
    assert_eq!(engine.attachment().shared_bytes(), 0);
    engine.round_trip(4, |_, _, _| ());
}

fn short_of_streams(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    // Of the streams for a relay the last but one, in two attempts.
    let control = symbol::<unsafe extern "C" fn(*const libc::c_char) -> i32>(c"fake_cuda_control");
    let faults = c"fail cuStreamCreateWithPriority 4 2; fail cuStreamCreateWithPriority 8 2";
    // SAFETY: this is the signature of the symbol.
    assert_eq!(unsafe { control(faults.as_ptr()) }, 0);
    let _node = Node::start(socket);
    eventually("want of memory", || engine.wait_detached().contains("OUT_OF_MEMORY"));
    assert_eq!(engine.wait_attached(), 3);
    let links = engine.copier.telemetry().unwrap().links;
    assert_eq!(links.iter().filter(|link| link.name.starts_with("relay-")).count(), 3 * 4);
    engine.round_trip(9, |_, _, _| ());
}

fn wrong_bytes(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    let control = symbol::<unsafe extern "C" fn(*const libc::c_char) -> i32>(c"fake_cuda_control");
    // SAFETY: this is the signature of the symbol.
    assert_eq!(unsafe { control(c"p2p kernels lost".as_ptr()) }, 0);
    let _node = Node::start(socket);
    eventually("no relay", || engine.wait_detached().contains("none of the node's relays"));
    engine.round_trip(4, |_, _, _| ());
    assert_eq!(engine.relayed(""), 0, "it was used all the same");
}

fn exclusive(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    // SAFETY: this process reads no variable on another thread meanwhile.
    unsafe { std::env::set_var("FAKE_CUDA_FAULTS", "mode 2 3") };
    let _node = Node::start(socket);
    assert_eq!(engine.wait_attached(), 2, "all but its own and the one that is another process's");
    engine.round_trip(5, |_, _, _| ());
}

fn wrong_token(socket: &Path) {
    let _node = Node::start(socket);
    let engine = Engine::start(socket, "tokem", Engine::allocated);
    eventually("a refusal", || engine.wait_detached().contains("the token is wrong"));
    engine.round_trip(3, |_, _, _| ());
    assert_eq!(engine.relayed(""), 0);
}

fn node_unseen(socket: &Path) {
    let _node = Node::start(socket);
    // An engine that sees it.
    let engine = Engine::start(socket, "token", Engine::allocated);
    assert_eq!(engine.wait_attached(), 3);
    let output = command_by(&APART, "stranger", socket, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
}

fn stranger(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    let why = "the node's process cannot be watched: its number is not known here; is it in another process namespace?";
    wait_for_reason(&engine, why);
    engine.round_trip(6, |_, _, _| ());
    assert_eq!(engine.relayed(""), 0);
}

fn engine_unseen(socket: &Path) {
    let _node = Node::apart(socket);
    let engine = Engine::start(socket, "token", Engine::allocated);
    let why = "the node refuses: the client's process cannot be watched: its number is not known here; is it in \
               another process namespace?";
    wait_for_reason(&engine, why);
}

/// Waits until the attachment has failed, and sees that it says why.
fn wait_for_reason(engine: &Engine, why: &str) {
    eventually("an attempt", || engine.wait_detached() != "not tried yet");
    assert_eq!(engine.wait_detached(), why);
}

/// Copies until it is killed.
fn copier(socket: &Path) {
    let engine = Engine::start(socket, "token", Engine::allocated);
    engine.wait_attached();
    println!("\nREADY");
    std::io::stdout().flush().unwrap();
    for seed in 0.. {
        engine.round_trip(seed, |_, _, _| ());
    }
}

fn engine_killed(socket: &Path) {
    let relays = Relays::start(Driver::load().unwrap(), config(socket)).unwrap();
    for gpu in ["0", "2"] {
        let requests = relays.stat().requests;
        let mut child = command("copier", socket, gpu).stdout(Stdio::null()).spawn().unwrap();
        eventually("copying", || relays.stat().requests > requests + 20);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("clearing up", || (relays.stat().engines, relays.stat().staging_bytes) == (0, 0));
    }
}

/// A program that says nothing of relays, in an environment that does; memory of its own alone goes
/// over its own PCIe link.
fn environment(socket: &Path) {
    let _node = Node::start(socket);
    let token = socket.with_file_name("token");
    std::fs::write(&token, "token\n").unwrap();
    // SAFETY: no other thread of this process uses the environment now.
    unsafe {
        std::env::set_var("FOREBAY_RELAYS", socket);
        std::env::set_var("FOREBAY_TOKEN_FILE", token);
    }
    let engine = Engine::with(CopierOptions::default(), Engine::allocated);
    engine.wait_attached();
    engine.round_trip(1, |_, _, _| ());
    let relayed = engine.relayed("");
    assert!(relayed > 0, "nothing went over relays");
    let own = HostMemory::new(engine.copier.devices().next().unwrap(), BYTES as usize).unwrap();
    let piece = Piece { from: own.start() as Address, to: engine.device.address(), bytes: BYTES };
    // SAFETY: both ranges are allocated, and nothing else uses them.
    unsafe { engine.copier.copy_and_wait(0, Direction::HostToDevice, &[piece]) }.unwrap();
    assert_eq!(engine.relayed(""), relayed);
    // The pool goes with its last buffer, and the node lets go of its memory.
    let Engine { copier, host, .. } = engine;
    drop(host);
    eventually("taking back", || copier.relays(0).unwrap().shared_bytes() == 0);
}

/// Of the node's relays those are used that the copier does not have itself.
fn several_gpus(socket: &Path) {
    let _node = Node::start(socket);
    let engine = Engine::start(socket, "token", Engine::allocated);
    assert_eq!(engine.wait_attached(), 2);
    let other = engine.copier.relays(1).unwrap();
    let status = other.wait(TIMEOUT, |status| matches!(status, Status::Attached { .. }));
    assert_eq!(status, Status::Attached { relays: 2 });
    engine.round_trip(1, |_, _, _| ());
}

/// Memory as vLLM's allocator makes it: mapped, and open to its own GPU only.
fn virtual_memory(socket: &Path) {
    let _node = Node::start(socket);
    let engine = Engine::start(socket, "token", |device| Target::Virtual(map_virtual(device)));
    engine.wait_attached();
    engine.round_trip(5, |_, _, _| ());
    assert!(engine.relayed("h2d") > 0 && engine.relayed("d2h") > 0);
    let Engine { device: Target::Virtual(address), ref copier, .. } = engine else { unreachable!() };
    // It is what it is said to be: its own GPU reads it.
    let device = copier.devices().next().unwrap();
    let host = HostMemory::new(device, 8).unwrap();
    let stream = Stream::new(device).unwrap();
    let _current = device.enter().unwrap();
    // SAFETY: both ranges are allocated, and this waits for the copy.
    unsafe { stream.copy(address + OFFSET, host.start() as Address, 8).unwrap() };
    stream.synchronize().unwrap();
    // SAFETY: the allocation has 8 bytes, and the copy is over.
    assert_eq!(unsafe { host.start().cast::<u64>().read_unaligned() }, pattern(5, OFFSET / 8));
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct Properties {
    kind: i32,
    handle_types: i32,
    location: Location,
    security: *mut u8,
    flags: [u8; 8],
}

#[repr(C)]
struct Access {
    location: Location,
    flags: i32,
}

fn symbol<F: Copy>(name: &std::ffi::CStr) -> F {
    let path = PathBuf::from(std::env::var("FOREBAY_LIBCUDA").unwrap());
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the driver is loaded already; the callers name a function's own type.
    unsafe {
        let function = libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr());
        assert!(!function.is_null(), "{name:?}");
        std::mem::transmute_copy(&function)
    }
}

fn map_virtual(device: &Arc<Device>) -> Address {
    type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> i32;
    type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
    type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
    type SetAccess = unsafe extern "C" fn(u64, usize, *const Access, usize) -> i32;
    let bytes = (OFFSET + BYTES).next_multiple_of(2 << 20) as usize;
    let location = Location { kind: 1, id: device.index().into() };
    let properties =
        Properties { kind: 1, handle_types: 0, location, security: std::ptr::null_mut(), flags: [0; 8] };
    let (mut handle, mut address) = (0, 0);
    let _current = device.enter().unwrap();
    // SAFETY: the signatures are those of cuda.h, and results are written to valid places.
    unsafe {
        assert_eq!(symbol::<Create>(c"cuMemCreate")(&mut handle, bytes, &properties, 0), 0);
        assert_eq!(symbol::<Reserve>(c"cuMemAddressReserve")(&mut address, bytes, 0, 0, 0), 0);
        assert_eq!(symbol::<Map>(c"cuMemMap")(address, bytes, 0, handle, 0), 0);
        let access = Access { location, flags: 3 };
        assert_eq!(symbol::<SetAccess>(c"cuMemSetAccess")(address, bytes, &access, 1), 0);
    }
    address
}
