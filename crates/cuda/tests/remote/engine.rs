//! An engine of these tests: what it copies, what of it went over relays, and whether every byte is
//! right.

use super::*;
use testkit::eventually;

/// An engine: a copier and memory on both sides.
pub struct Engine {
    // Dropped in this order.
    pub copier: Copier,
    pub host: PinnedBuffer,
    pub device: Target,
}

pub enum Target {
    Allocated(DeviceMemory),
    Virtual(Address),
}

impl Target {
    pub fn address(&self) -> Address {
        match self {
            Target::Allocated(memory) => memory.address(),
            Target::Virtual(address) => *address,
        }
    }
}

impl Engine {
    pub fn start(socket: &Path, token: &str, target: impl Fn(&Arc<Device>) -> Target) -> Engine {
        let relays = NodeRelays::At(RelaysAt { socket: socket.to_owned(), token: token.to_owned() });
        Engine::with(CopierOptions { relays, ..CopierOptions::default() }, target)
    }

    pub fn with(options: CopierOptions, target: impl Fn(&Arc<Device>) -> Target) -> Engine {
        let copier = Copier::start(&options).unwrap();
        let device = Arc::clone(copier.devices().next().unwrap());
        let pool =
            PinnedPool::new(&device, PoolConfig { slab_bytes: 64 << 20, ..PoolConfig::shared(1 << 28) });
        // Not at the start of its file.
        let _before = pool.take(4096).unwrap();
        let host = pool.take(OFFSET + BYTES).unwrap();
        Engine { copier, host, device: target(&device) }
    }

    pub fn gpu(&self) -> u16 {
        self.copier.devices().next().unwrap().index()
    }

    pub fn attachment(&self) -> &Attachment {
        self.copier.relays(self.gpu()).unwrap()
    }

    pub fn allocated(device: &Arc<Device>) -> Target {
        Target::Allocated(DeviceMemory::new(device, OFFSET + BYTES).unwrap())
    }

    /// Waits for relays that reach the host memory, and says how many there are.
    pub fn wait_attached(&self) -> usize {
        eventually("sharing", || self.attachment().shared_bytes() > 0);
        match self.attachment().wait(TIMEOUT, |status| matches!(status, Status::Attached { .. })) {
            Status::Attached { relays } => relays,
            status => panic!("{status:?}"),
        }
    }

    pub fn is_copying(&self) -> bool {
        self.copier.telemetry().unwrap().transfers_active > 0
    }

    pub fn wait_detached(&self) -> String {
        match self.attachment().wait(TIMEOUT, |status| matches!(status, Status::Detached { .. })) {
            Status::Detached { reason } => reason,
            status => panic!("{status:?}"),
        }
    }

    /// Bytes that came over relays so far, one way or both.
    pub fn relayed(&self, way: &str) -> u64 {
        let telemetry = self.copier.telemetry().unwrap();
        let relays = telemetry.links.iter().filter(|link| link.name.starts_with("relay-"));
        relays
            .filter(|link| link.name.ends_with(way) && !link.name.contains(".gpu"))
            .map(|link| link.bytes)
            .sum()
    }

    pub fn fill(&self, seed: u64) {
        // SAFETY: the buffer is this test's, and no transfer is under way.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.host.len()) };
        for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&pattern(seed, at as u64).to_le_bytes());
        }
    }

    pub fn check(&self, seed: u64) {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.host.len()) };
        let first = (OFFSET / 8) as usize;
        let wrong =
            bytes.chunks_exact(8).enumerate().skip(first).find(|(at, word)| {
                u64::from_le_bytes((*word).try_into().unwrap()) != pattern(seed, *at as u64)
            });
        assert_eq!(wrong.map(|(at, _)| at * 8), None, "a wrong byte");
    }

    pub fn copy(&self, direction: Direction) {
        let (host, device) = (self.host.as_ptr() as Address + OFFSET, self.device.address() + OFFSET);
        let (from, to) = match direction {
            Direction::HostToDevice => (host, device),
            Direction::DeviceToHost => (device, host),
        };
        // SAFETY: both ranges are this engine's, and nothing else uses them.
        unsafe { self.copier.copy_and_wait(self.gpu(), direction, &[Piece { from, to, bytes: BYTES }]) }
            .unwrap();
    }

    /// Copies to the GPU and back, with `during` called while each is under way; it is told how to
    /// see that one is over. No byte may be wrong.
    pub fn round_trip(&self, seed: u64, during: impl Fn(&Engine, &str, &dyn Fn() -> bool)) {
        self.fill(seed);
        for (direction, way) in Direction::BOTH.into_iter().zip(["h2d", "d2h"]) {
            std::thread::scope(|scope| {
                let copying = scope.spawn(|| self.copy(direction));
                during(self, way, &|| copying.is_finished());
            });
            if way == "h2d" {
                self.fill(!seed);
            }
        }
        self.check(seed);
    }
}

pub fn pattern(seed: u64, at: u64) -> u64 {
    (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
