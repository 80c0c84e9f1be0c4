//! A GPU drives queues of our controller and of QEMU's. Here the kernels run on the fake driver,
//! which has bodies of its own for them; on a GPU the example `gpu` does the same.

use cuda_testkit::alone;
use forebay_cuda::device::Device;
use qemu_nvme::{Counts, Drive, Error, GpuDriver, Settings, SoftDrive};

const ENV: [(&str, &str); 1] = [("FAKE_CUDA_GPUS", "1")];
/// So that both queues wrap a hundred times.
const COMMANDS: u64 = 1600;
const ENTRIES: u16 = 16;

#[test]
fn commands_that_a_gpu_gives_to_our_controller_end_once_with_their_own_data() {
    alone("commands_that_a_gpu_gives_to_our_controller_end_once_with_their_own_data", &ENV, |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let drive = SoftDrive::start(32 << 20, 1 << 15, ENTRIES).unwrap();
        let mut gpu = GpuDriver::new(&device, drive.memory(), drive.queues(), drive.free()).unwrap();
        let counts = gpu.round_trips(COMMANDS, 1).unwrap();
        assert_eq!(counts, Counts { commands: 1620, bad: 0 });
    });
}

#[test]
fn commands_that_a_gpu_gives_to_qemus_controller_end_once_with_their_own_data() {
    alone("commands_that_a_gpu_gives_to_qemus_controller_end_once_with_their_own_data", &ENV, |fake| {
        let device = Device::open(fake.driver, 0).unwrap();
        let mut drive = match Drive::start(&Settings::default()) {
            Ok(drive) => drive,
            Err(why @ Error::Missing(_)) => return testkit::skipped(why),
            Err(error) => panic!("{error}"),
        };
        let queues = drive.add_queue::<()>(ENTRIES).places();
        let areas = drive.take(0);
        let mut gpu = GpuDriver::new(&device, drive.memory(), queues, areas).unwrap();
        let counts = gpu.round_trips(COMMANDS, 2).unwrap();
        assert_eq!(counts, Counts { commands: 1620, bad: 0 });
    });
}
