//! A link that carries one transfer after another: host memory to GPU, or host to host. It knows a
//! rate and until when it is busy.

/// A link and when it has carried all that it was given.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    bytes_per_us: f64,
    free_us: u64,
}

impl Link {
    /// An idle link of so many 10^9 bytes per second.
    pub fn new(gb_per_s: f64) -> Link {
        Link { bytes_per_us: gb_per_s * 1e3, free_us: 0 }
    }

    /// When what is given to it now would begin.
    pub fn free_us(&self, now_us: u64) -> u64 {
        self.free_us.max(now_us)
    }

    /// Carries so many bytes from `begin_us` on, and says when they are there.
    pub fn carry(&mut self, begin_us: u64, bytes: u64) -> u64 {
        self.free_us = self.free_us(begin_us) + self.time_us(bytes);
        self.free_us
    }

    /// How long so many bytes take.
    pub fn time_us(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.bytes_per_us).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_wait_for_one_another() {
        let mut link = Link::new(1.0);
        assert_eq!(link.carry(100, 5_000), 105);
        assert_eq!(link.carry(101, 1_000), 106);
        assert_eq!((link.carry(200, 1), link.free_us(150)), (201, 201));
    }
}
