//! The order of a trace. A replay needs the order of arrival, and files may have another one: some
//! are written when requests end. It knows arrival times only.

use crate::request::TraceRequest;

/// Counts requests that stand behind one that arrives later.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutOfOrder {
    latest_us: u64,
    count: usize,
}

impl OutOfOrder {
    /// Takes the next request of the file.
    pub fn add(&mut self, request: &TraceRequest) {
        self.count += usize::from(request.arrival_us < self.latest_us);
        self.latest_us = self.latest_us.max(request.arrival_us);
    }

    pub fn count(self) -> usize {
        self.count
    }
}

/// Puts requests into the order of their arrival, and those that arrive together into the order of
/// the file. Says how many stood behind one that arrives later.
pub fn sort_by_arrival(requests: &mut [TraceRequest]) -> usize {
    let mut out_of_order = OutOfOrder::default();
    requests.iter().for_each(|request| out_of_order.add(request));
    if out_of_order.count() > 0 {
        requests.sort_by_key(|request| request.arrival_us);
    }
    out_of_order.count()
}

#[cfg(test)]
mod tests {
    use super::sort_by_arrival;
    use crate::request::TraceRequest;

    #[test]
    fn sorting_keeps_the_order_of_what_arrives_together_and_says_how_much_it_moved() {
        let request =
            |(turn, arrival_us): (u32, u64)| TraceRequest { turn, arrival_us, ..TraceRequest::default() };
        let mut requests = [(0, 20), (1, 0), (2, 5), (3, 5), (4, 30)].map(request);
        assert_eq!(sort_by_arrival(&mut requests), 3);
        assert_eq!(requests.each_ref().map(|request| request.turn), [1, 2, 3, 0, 4]);
        assert_eq!(sort_by_arrival(&mut requests), 0);
    }
}
