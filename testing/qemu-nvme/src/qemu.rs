//! A running QEMU with one NVMe controller: its registers, its doorbells and its end. It knows PCI
//! and the controller's registers, and nothing of commands.

use crate::mailbox::Mailbox;
use crate::memory::anonymous_file;
use crate::packages::Program;
use crate::{Error, GuestMemory, firmware};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where the firmware's side sees the controller's registers: in the hole below 4 GiB.
const BAR: u32 = 0xe000_0000;
/// The device's number on the bus.
const DEVICE: u32 = 4;
const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
/// Memory space and bus mastering.
const PCI_COMMAND: u32 = 0b110;
const NVME_CLASS: u32 = 0x01_0802;

/// Controller registers, by their offset.
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const AQA: u32 = 0x24;
const ASQ: u32 = 0x28;
const ACQ: u32 = 0x30;
const FIRST_DOORBELL: u32 = 0x1000;
/// CC: entries of 64 bytes (2^6) and 16 bytes (2^4), memory pages of 4 KiB, enabled.
const ENABLED: u32 = 4 << 20 | 6 << 16 | 1;
const READY: u32 = 1;

/// QEMU starts in a second; a busy machine gets a minute.
const LIMIT: Duration = Duration::from_secs(60);

/// How the guest is made.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Guest memory, in bytes: a multiple of 1 MiB.
    pub memory_bytes: usize,
    /// The namespace, in bytes: a multiple of 512, its blocks' size.
    pub disk_bytes: u64,
    /// The controller's MDTS: 2^mdts pages of 4 KiB.
    pub mdts: u8,
    /// Pairs of I/O queues that the controller has.
    pub io_queues: u16,
    /// How fast the drive reads and writes, where that is limited: then commands are still under
    /// way when something else happens.
    pub bytes_per_second: Option<u64>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            memory_bytes: 256 << 20,
            disk_bytes: 64 << 20,
            mdts: 7,
            io_queues: 8,
            bytes_per_second: None,
        }
    }
}

/// Where the admin queues lie.
#[derive(Debug, Clone, Copy)]
pub struct AdminQueues {
    /// The submission queue's address.
    pub submission: u64,
    /// The completion queue's address.
    pub completion: u64,
    /// Entries of each.
    pub entries: u16,
}

/// A running QEMU. It ends when this is dropped, and when the thread ends that started it: a test
/// that is killed leaves no process behind, and no file.
#[derive(Debug)]
pub struct Qemu {
    program: Program,
    process: Process,
    memory: GuestMemory,
    mailbox: Mailbox,
    doorbells: u32,
}

impl Qemu {
    /// Starts QEMU and gives the controller its place in the guest's address space. The controller
    /// is disabled.
    pub fn start(settings: &Settings) -> Result<Qemu, Error> {
        let image = firmware::image()?;
        let program = Program::find()?;
        let memory = GuestMemory::new(settings.memory_bytes)?;
        let disk = anonymous_file("disk", settings.disk_bytes)?;
        let mut bios = anonymous_file("firmware", 0)?;
        bios.write_all(&image).map_err(Error::io("writing the firmware's image"))?;

        let mut command = program.command();
        machine(&mut command, settings, memory.file(), &bios);
        controller(&mut command, settings, &disk);
        let mut process = Process::start(command)?;
        process.wait_until(|| Mailbox::is_alive(&memory))?;

        // Admin queues have doorbells too.
        let doorbells = 2 * (u32::from(settings.io_queues) + 1);
        let qemu = Qemu { program, process, memory, mailbox: Mailbox::default(), doorbells };
        qemu.place()?;
        Ok(qemu)
    }

    /// Gives the controller its addresses and lets it reach memory, as firmware does.
    fn place(&self) -> Result<(), Error> {
        let class = self.read_config(0x08) >> 8;
        if class != NVME_CLASS {
            return Err(Error::NotNvme(class));
        }
        self.write_config(0x10, BAR);
        self.write_config(0x14, 0);
        self.write_config(0x04, PCI_COMMAND);
        Ok(())
    }

    fn read_config(&self, register: u32) -> u32 {
        self.mailbox.write_port(&self.memory, CONFIG_ADDRESS, 1 << 31 | DEVICE << 11 | register);
        self.mailbox.read_port(&self.memory, CONFIG_DATA)
    }

    fn write_config(&self, register: u32, value: u32) {
        self.mailbox.write_port(&self.memory, CONFIG_ADDRESS, 1 << 31 | DEVICE << 11 | register);
        self.mailbox.write_port(&self.memory, CONFIG_DATA, value);
    }

    /// The memory in which queues, lists and data lie.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The first line of what `qemu -version` says.
    pub fn version(&self) -> Result<String, Error> {
        self.program.version()
    }

    /// The process of QEMU.
    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Reads a register of the controller: its offset in BAR0.
    ///
    /// # Panics
    /// Where the firmware does not answer within a minute, as in all that follows.
    pub fn read32(&self, register: u32) -> u32 {
        self.mailbox.read_memory(&self.memory, BAR + register)
    }

    /// Reads a register of 64 bits by its halves.
    pub fn read64(&self, register: u32) -> u64 {
        u64::from(self.read32(register)) | u64::from(self.read32(register + 4)) << 32
    }

    /// Writes a register of the controller.
    pub fn write32(&self, register: u32, value: u32) {
        self.mailbox.write_memory(&self.memory, BAR + register, value);
    }

    fn write64(&self, register: u32, value: u64) {
        self.write32(register, value as u32);
        self.write32(register + 4, (value >> 32) as u32);
    }

    /// Sets a queue's tail doorbell.
    pub fn ring_tail(&self, queue: u16, tail: u16) {
        Mailbox::ring(&self.memory, 2 * u32::from(queue), tail.into());
    }

    /// Sets a queue's head doorbell.
    pub fn ring_head(&self, queue: u16, head: u16) {
        Mailbox::ring(&self.memory, 2 * u32::from(queue) + 1, head.into());
    }

    /// Resets the controller: CC.EN is 0. All queues are gone when this returns, and the controller
    /// touches no memory any more.
    pub fn disable(&self) {
        self.write32(CC, 0);
        self.wait_for_ready(0);
    }

    /// Enables a controller that is disabled, with these admin queues. The completion queue's
    /// memory must be zero.
    pub fn enable(&self, admin: AdminQueues) {
        self.mailbox.mirror_doorbells(&self.memory, BAR + FIRST_DOORBELL, self.doorbells);
        let last = u32::from(admin.entries - 1);
        self.write32(AQA, last << 16 | last);
        self.write64(ASQ, admin.submission);
        self.write64(ACQ, admin.completion);
        self.write32(CC, ENABLED);
        self.wait_for_ready(READY);
    }

    fn wait_for_ready(&self, wanted: u32) {
        let since = Instant::now();
        while self.read32(CSTS) & READY != wanted {
            assert!(since.elapsed() < LIMIT, "CSTS.RDY does not become {wanted}");
        }
    }
}

/// A path under which another process opens this process's file.
fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn machine(command: &mut Command, settings: &Settings, memory: &File, bios: &File) {
    let bytes = settings.memory_bytes;
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg"]);
    command.args(["-machine", "q35,memory-backend=ram,hpet=off", "-m", &format!("{}M", bytes >> 20)]);
    command
        .arg("-object")
        .arg(format!("memory-backend-file,id=ram,size={bytes},share=on,mem-path={}", path_of(memory)));
    command.arg("-bios").arg(path_of(bios));
}

fn controller(command: &mut Command, settings: &Settings, disk: &File) {
    let limit = settings.bytes_per_second.map(|rate| format!(",throttling.bps-total={rate}"));
    let limit = limit.unwrap_or_default();
    let drive = format!("file={},if=none,id=disk,format=raw,cache=writeback{limit}", path_of(disk));
    command.arg("-drive").arg(drive);
    command.arg("-device").arg(format!(
        "nvme,serial=forebay,drive=disk,addr={DEVICE}.0,mdts={},max_ioqpairs={}",
        settings.mdts, settings.io_queues
    ));
}

/// QEMU's process, which ends with this value.
#[derive(Debug)]
struct Process {
    child: Child,
    said: File,
}

impl Process {
    fn start(mut command: Command) -> Result<Process, Error> {
        // A file takes whatever QEMU says, where a pipe that nobody reads would hold it up.
        let said = anonymous_file("what QEMU says", 0)?;
        let stderr = said.try_clone().map_err(Error::io("a second descriptor of a file"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        // SAFETY: between fork and exec only a system call is made, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                let kill = Some(rustix::process::Signal::KILL);
                Ok(rustix::process::set_parent_process_death_signal(kill)?)
            });
        }
        let child = command.spawn().map_err(Error::io("starting QEMU"))?;
        Ok(Process { child, said })
    }

    fn wait_until(&mut self, mut is_so: impl FnMut() -> bool) -> Result<(), Error> {
        let since = Instant::now();
        while !is_so() {
            let status = self.child.try_wait().map_err(Error::io("looking at QEMU"))?;
            if let Some(status) = status {
                return Err(Error::Ended { status, said: self.said() });
            }
            if since.elapsed() > LIMIT {
                return Err(Error::Silent { limit: LIMIT, said: self.said() });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn said(&mut self) -> String {
        let mut said = Vec::new();
        // QEMU writes at the same offset: it is the same open file.
        let read = self.said.rewind().and_then(|()| self.said.read_to_end(&mut said));
        read.map_or_else(|error| error.to_string(), |_| String::from_utf8_lossy(&said).into_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself; a child that was not waited for keeps its pid.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
