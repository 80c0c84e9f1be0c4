//! Which host is slow, late or lossy, from what was measured of pairs. A host is as good as most of
//! its pairs: the one that all of its pairs have in common is named, not each pair. Pure.

use crate::cmd::preflight::net::finding::{Check, Finding};
use crate::cmd::preflight::net::questions::Segments;
use forebay_cuda::preflight::Severity::{Fault, Warning};

/// Less than this part of what others reach, or of the link, is slow.
const SLOW: f64 = 0.7;
/// So many times what others take is late, unless it is less than the other.
const LATE: f64 = 10.0;
const LATE_US: f64 = 1_000.0;
/// More than this part of what was sent, and more than a few segments, sent again is lossy.
const LOSSY: f64 = 0.001;
const LOSSY_SEGMENTS: u64 = 10;

/// A host that was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct RatedHost {
    pub name: String,
    /// What its device says that its link carries.
    pub link_bytes_per_s: Option<f64>,
}

/// A pair of hosts, by their places in the list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RatedPair {
    pub hosts: (usize, usize),
    /// From the first to the second, and back.
    pub bytes_per_s: [f64; 2],
    pub round_trip_us: u64,
    /// What the first and the second have sent.
    pub segments: [Segments; 2],
    /// Transfers that arrived damaged.
    pub damaged: u32,
}

/// Something that was measured of a pair; more is better.
type Value = ((usize, usize), f64);

/// Hosts that are bad in most of their pairs, and pairs that are bad without such a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Outliers {
    hosts: Vec<usize>,
    pairs: Vec<(usize, usize)>,
}

impl Outliers {
    /// What is left without them.
    fn without(&self, values: &[Value]) -> Vec<Value> {
        let is_out = |(one, other): &(usize, usize)| {
            self.hosts.contains(one) || self.hosts.contains(other) || self.pairs.contains(&(*one, *other))
        };
        values.iter().filter(|(pair, _)| !is_out(pair)).copied().collect()
    }
}

/// Finds them: the worst host is named and taken out with its pairs, as long as it is bad. A host
/// counts with the median over its pairs. `is_bad` is given a value, the median of the hosts that
/// are left, and where it is of.
fn outliers(values: &[Value], is_bad: impl Fn(f64, f64, &[usize]) -> bool) -> Outliers {
    let (mut left, mut hosts) = (values.to_vec(), Vec::new());
    loop {
        let scores = scores(&left);
        let reference = median(scores.iter().map(|(_, score, _)| *score).collect());
        let worst = scores.iter().min_by(|one, other| {
            (one.1, one.2).partial_cmp(&(other.1, other.2)).unwrap_or(std::cmp::Ordering::Equal)
        });
        match worst {
            // Of two hosts neither is known to be the worse one.
            Some((host, score, _)) if scores.len() > 2 && is_bad(*score, reference, &[*host]) => {
                hosts.push(*host);
                left.retain(|((one, other), _)| one != host && other != host);
            }
            _ => {
                let bad =
                    left.iter().filter(|((one, other), value)| is_bad(*value, reference, &[*one, *other]));
                return Outliers { hosts, pairs: bad.map(|(pair, _)| *pair).collect() };
            }
        }
    }
}

/// Each host with the median and the mean of its pairs.
fn scores(values: &[Value]) -> Vec<(usize, f64, f64)> {
    let mut hosts: Vec<usize> = values.iter().flat_map(|((one, other), _)| [*one, *other]).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let score = |host: usize| {
        let of = values.iter().filter(|((one, other), _)| *one == host || *other == host);
        let own: Vec<f64> = of.map(|(_, value)| *value).collect();
        let mean = own.iter().sum::<f64>() / own.len() as f64;
        (host, median(own), mean)
    };
    hosts.into_iter().map(score).collect()
}

/// The median; of an even number the better one, so that one bad pair of two makes no bad host.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// What a host sends and receives, each the median over its pairs.
pub fn rates_of(host: usize, pairs: &[RatedPair]) -> Option<(f64, f64)> {
    let of = |pair: &RatedPair| match pair.hosts {
        (one, _) if one == host => Some((pair.bytes_per_s[0], pair.bytes_per_s[1])),
        (_, other) if other == host => Some((pair.bytes_per_s[1], pair.bytes_per_s[0])),
        _ => None,
    };
    let (sends, receives): (Vec<f64>, Vec<f64>) = pairs.iter().filter_map(of).unzip();
    (!sends.is_empty()).then(|| (median(sends), median(receives)))
}

/// Hosts that send or receive less than others, or than links carry.
pub fn bandwidth(hosts: &[RatedHost], pairs: &[RatedPair]) -> Vec<Finding> {
    let slower_way = |pair: &RatedPair| (pair.hosts, pair.bytes_per_s[0].min(pair.bytes_per_s[1]));
    let values: Vec<Value> = pairs.iter().map(slower_way).collect();
    let beside_others = outliers(&values, |value, reference, _| value < SLOW * reference);
    let alike = beside_others.without(&values);
    let is_below_link = |value, of: &[usize]| link_of(hosts, of).is_some_and(|link| value < SLOW * link);
    let below_links = outliers(&alike, |value, _, of| is_below_link(value, of));
    let is_everybody = !below_links.hosts.is_empty() && below_links.without(&alike).is_empty();
    let good = median(alike.iter().map(|(_, value)| *value).collect());
    let mut found = slow(hosts, pairs, &beside_others, |_| {
        format!("{:.2} GB/s: {SLOW} of what most others move", SLOW * good / 1e9)
    });
    let of_link = |of: &[usize]| {
        let link = link_of(hosts, of).unwrap_or(0.0);
        format!("{:.2} GB/s: {SLOW} of what the link carries", SLOW * link / 1e9)
    };
    match is_everybody {
        true => {
            let seen = format!("no host is as fast as its link: {}", range(&alike));
            found.push(bad_rate("", seen, of_link(&below_links.hosts)));
        }
        false => found.extend(slow(hosts, pairs, &below_links, of_link)),
    }
    if found.is_empty() && !pairs.is_empty() {
        found.push(Finding::ok(Check::Bandwidth, "", range(&values)));
    }
    found
}

/// Hosts and pairs that are slow, with what they move and what they should.
fn slow(
    hosts: &[RatedHost],
    pairs: &[RatedPair],
    outliers: &Outliers,
    expected: impl Fn(&[usize]) -> String,
) -> Vec<Finding> {
    let slow_host = |host: &usize| {
        let (sends, receives) = rates_of(*host, pairs).unwrap_or_default();
        let (sends, receives) = (sends / 1e9, receives / 1e9);
        let seen = format!(
            "this host is slow: it sends {sends:.2} and receives {receives:.2} GB/s, the medians of its pairs"
        );
        bad_rate(&hosts[*host].name, seen, expected(&[*host]))
    };
    let slow_pair = |of: &(usize, usize)| {
        let [there, back] =
            pairs.iter().find(|pair| pair.hosts == *of).map_or([0.0; 2], |pair| pair.bytes_per_s);
        let (one, other) = (&hosts[of.0].name, &hosts[of.1].name);
        let seen = format!("this pair is slow: {:.2} GB/s there and {:.2} back", there / 1e9, back / 1e9);
        bad_rate(&format!("{one} and {other}"), seen, expected(&[of.0, of.1]))
    };
    outliers.hosts.iter().map(slow_host).chain(outliers.pairs.iter().map(slow_pair)).collect()
}

fn bad_rate(subject: &str, seen: String, expected: String) -> Finding {
    let action = "look at the link's speed and MTU, at the switch's port, and at what else uses it";
    Finding::bad(Check::Bandwidth, Warning, subject, seen, expected, action)
}

fn range(values: &[Value]) -> String {
    let rates = values.iter().map(|(_, value)| *value / 1e9);
    let (least, most) = (rates.clone().fold(f64::INFINITY, f64::min), rates.fold(0.0, f64::max));
    format!("{} pairs move {least:.2} to {most:.2} GB/s, each in its slower direction", values.len())
}

/// What the links of these hosts carry at most. A host sends no faster than any other receives.
fn link_of(hosts: &[RatedHost], of: &[usize]) -> Option<f64> {
    let own = of.iter().filter_map(|host| hosts[*host].link_bytes_per_s).reduce(f64::min);
    let [host] = of else { return own };
    let others = hosts.iter().enumerate().filter(|(nth, _)| nth != host);
    let others = others.filter_map(|(_, other)| other.link_bytes_per_s).reduce(f64::max);
    own.zip(others).map(|(own, others)| own.min(others)).or(own)
}

/// Pairs between which bytes arrive other than they were sent, which TCP's own sum did not catch.
pub fn damage(names: &[String], pairs: &[RatedPair]) -> Vec<Finding> {
    let damaged = pairs.iter().filter(|pair| pair.damaged > 0);
    let finding = |pair: &RatedPair| {
        let subject = format!("{} and {}", names[pair.hosts.0], names[pair.hosts.1]);
        let seen =
            format!("{} transfers arrived with another checksum than they were sent with", pair.damaged);
        let action = "look for a failing network card, cable, switch or memory: Forebay drops such bytes, others use them";
        Finding::bad(Check::Bandwidth, Fault, subject, seen, "none", action)
    };
    damaged.map(finding).collect()
}

/// Hosts whose answers take longer than those of others. `round_trips`: of pairs, in microseconds.
pub fn latency(names: &[String], round_trips: &[((usize, usize), u64)]) -> Vec<Finding> {
    let values: Vec<Value> = round_trips.iter().map(|(hosts, us)| (*hosts, -(*us as f64))).collect();
    let is_late = |value: f64, reference: f64, _: &[usize]| -value > LATE_US && value < LATE * reference;
    let action = "look whether it is far away, busy, or behind a link that is full";
    let told = |host: usize| {
        let own = values.iter().filter(|((one, other), _)| *one == host || *other == host);
        let us = -median(own.map(|(_, value)| *value).collect());
        format!("a small question takes {us:.0} us to come back")
    };
    let most = values.iter().map(|(_, value)| -value).fold(0.0, f64::max);
    let expected = format!("at most {LATE:.0} times what others take");
    let ok = (!values.is_empty())
        .then(|| Finding::ok(Check::Latency, "", format!("small questions come back within {most:.0} us")));
    named(names, &outliers(&values, is_late), told, "a small question is late", &expected, action, ok)
}

/// Hosts of which segments are lost.
pub fn loss(names: &[String], pairs: &[RatedPair]) -> Vec<Finding> {
    let share =
        |segments: &Segments| if segments.again < LOSSY_SEGMENTS { 0.0 } else { segments.lost_share() };
    let of = |pair: &RatedPair| (pair.hosts, -pair.segments.iter().map(share).fold(0.0, f64::max));
    let values: Vec<Value> = pairs.iter().map(of).collect();
    let told = |host: usize| {
        let own = pairs.iter().filter(|pair| pair.hosts.0 == host || pair.hosts.1 == host);
        let (mut sent, mut again) = (0, 0);
        own.flat_map(|pair| pair.segments).for_each(|segments| {
            sent += segments.sent;
            again += segments.again;
        });
        format!("of {sent} segments between it and others {again} were sent again")
    };
    let expected = format!("at most {} % of them", LOSSY * 100.0);
    let action = "look at errors of its device (`ip -s link`), its cable, its switch's port, and full queues";
    let ok =
        (!pairs.is_empty()).then(|| Finding::ok(Check::Latency, "", "next to no segment was sent again"));
    named(
        names,
        &outliers(&values, |value, _, _| -value > LOSSY),
        told,
        "segments are lost",
        &expected,
        action,
        ok,
    )
}

/// Findings about latency of hosts and pairs that stand out; `ok` if there are none.
fn named(
    names: &[String],
    found: &Outliers,
    told: impl Fn(usize) -> String,
    pair_is: &str,
    expected: &str,
    action: &str,
    ok: Option<Finding>,
) -> Vec<Finding> {
    let bad = |subject: String, seen: String| {
        Finding::bad(Check::Latency, Warning, subject, seen, expected, action)
    };
    let mut all: Vec<Finding> =
        found.hosts.iter().map(|host| bad(names[*host].clone(), told(*host))).collect();
    let pair = |(one, other): &(usize, usize)| {
        bad(format!("{} and {}", names[*one], names[*other]), pair_is.to_owned())
    };
    all.extend(found.pairs.iter().map(pair));
    if all.is_empty() { ok.into_iter().collect() } else { all }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::preflight::net::measure::tournament::rounds;
    use forebay_cuda::preflight::Severity;
    use proptest::prelude::*;

    fn hosts(number: usize) -> Vec<RatedHost> {
        (0..number).map(|nth| RatedHost { name: format!("h{nth}"), link_bytes_per_s: None }).collect()
    }

    /// All pairs, each as fast as the slower of the two, times a factor.
    fn pairs(speeds: &[f64], factor: impl Fn(usize, usize) -> f64) -> Vec<RatedPair> {
        let pair = |(one, other): (usize, usize)| {
            let rate = speeds[one].min(speeds[other]) * factor(one, other);
            let segments = [Segments { sent: 100_000, again: 0 }; 2];
            RatedPair {
                hosts: (one, other),
                bytes_per_s: [rate; 2],
                round_trip_us: 100,
                segments,
                damaged: 0,
            }
        };
        rounds(speeds.len()).into_iter().flatten().map(pair).collect()
    }

    fn subjects(found: &[Finding]) -> Vec<&str> {
        let bad = found.iter().filter(|finding| finding.severity != Severity::Ok);
        bad.map(|finding| &*finding.subject).collect()
    }

    proptest! {
        #[test]
        fn exactly_the_slow_hosts_are_named_whatever_pairs_vary(
            number in 3usize..12,
            slow in prop::collection::btree_set(0usize..12, 0..5),
            noise in prop::collection::vec(0.9f64..1.1, 144),
        ) {
            let slow: Vec<usize> = slow.into_iter().filter(|host| *host < number).take((number - 1) / 2).collect();
            let speeds: Vec<f64> = (0..number).map(|host| if slow.contains(&host) { 1e9 } else { 1e10 }).collect();
            let found = bandwidth(&hosts(number), &pairs(&speeds, |one, other| noise[one * 12 + other]));
            let mut named = subjects(&found);
            named.sort_unstable();
            let mut expected: Vec<String> = slow.iter().map(|host| format!("h{host}")).collect();
            expected.sort_unstable();
            prop_assert_eq!(named, expected);
        }

        #[test]
        fn a_slow_cable_between_two_good_hosts_is_a_pair(number in 4usize..10, one in 0usize..9, by in 1usize..9) {
            let one = one % number;
            let other = (one + 1 + by % (number - 1)) % number;
            let (low, high) = (one.min(other), one.max(other));
            let cable = |a: usize, b: usize| if (a.min(b), a.max(b)) == (low, high) { 0.1 } else { 1.0 };
            let found = bandwidth(&hosts(number), &pairs(&vec![1e10; number], cable));
            let names = [format!("h{low} and h{high}"), format!("h{high} and h{low}")];
            prop_assert_eq!(found.len(), 1);
            prop_assert!(names.contains(&found[0].subject), "{:?}", found);
        }
    }

    #[test]
    fn of_two_hosts_the_pair_is_named_and_only_if_the_link_would_carry_more() {
        let slow = pairs(&[1e9, 1e9], |_, _| 1.0);
        assert!(subjects(&bandwidth(&hosts(2), &slow)).is_empty());
        let linked: Vec<RatedHost> = hosts(2)
            .into_iter()
            .map(|host| RatedHost { link_bytes_per_s: Some(1.25e9 * 2.0), ..host })
            .collect();
        let found = bandwidth(&linked, &slow);
        assert_eq!(subjects(&found), ["h0 and h1"]);
        assert!(found[0].expected.contains("1.75 GB/s: 0.7 of what the link carries"), "{found:?}");
    }

    #[test]
    fn all_hosts_that_are_slower_than_their_links_are_told() {
        let all: Vec<RatedHost> =
            hosts(4).into_iter().map(|host| RatedHost { link_bytes_per_s: Some(12.5e9), ..host }).collect();
        let found = bandwidth(&all, &pairs(&[5e9; 4], |_, _| 1.0));
        assert!(found.len() == 1 && found[0].severity == Warning, "{found:?}");
        assert!(found[0].seen.starts_with("no host is as fast as its link: 6 pairs move 5.00 to 5.00 GB/s"));
        assert!(found[0].expected.starts_with("8.75 GB/s: 0.7 of what the link carries"), "{found:?}");
        let mixed: Vec<RatedHost> = [12.5e9, 12.5e9, 12.5e9, 1.25e9]
            .map(|link| RatedHost { name: format!("{link}"), link_bytes_per_s: Some(link) })
            .to_vec();
        let found = bandwidth(&mixed, &pairs(&[12e9, 12e9, 12e9, 1.2e9], |_, _| 1.0));
        assert_eq!(subjects(&found), ["1250000000"], "the others' link is not wasted: {found:?}");
    }

    #[test]
    fn a_slow_host_is_named_also_where_no_link_is_used_up() {
        let all: Vec<RatedHost> =
            hosts(3).into_iter().map(|host| RatedHost { link_bytes_per_s: Some(12.5e9), ..host }).collect();
        let found = bandwidth(&all, &pairs(&[8e9, 8e9, 1e9], |_, _| 1.0));
        assert_eq!(subjects(&found), ["h2", "h0 and h1"]);
        assert!(
            found[0].expected.contains("most others move") && found[1].expected.contains("the link carries")
        );
    }

    #[test]
    fn what_a_slow_host_sends_and_receives_is_told_apart() {
        let mut all = pairs(&[1e10; 4], |_, _| 1.0);
        for pair in &mut all {
            match pair.hosts {
                (2, _) => pair.bytes_per_s[0] = 1e9,
                (_, 2) => pair.bytes_per_s[1] = 1e9,
                _ => {}
            }
        }
        let found = bandwidth(&hosts(4), &all);
        assert_eq!(subjects(&found), ["h2"]);
        assert!(found[0].seen.contains("sends 1.00 and receives 10.00 GB/s"), "{found:?}");
    }

    #[test]
    fn bytes_that_arrive_damaged_are_a_fault_of_their_pair() {
        let names: Vec<String> = hosts(3).into_iter().map(|host| host.name).collect();
        let mut all = pairs(&[1e10; 3], |_, _| 1.0);
        assert!(damage(&names, &all).is_empty());
        (all[1].hosts, all[1].damaged) = ((0, 2), 3);
        let found = damage(&names, &all);
        assert!(
            found.len() == 1 && found[0].severity == Fault && found[0].subject == "h0 and h2",
            "{found:?}"
        );
    }

    #[test]
    fn a_late_host_and_a_lossy_one_are_named() {
        let names: Vec<String> = hosts(4).into_iter().map(|host| host.name).collect();
        let mut all = pairs(&[1e10; 4], |_, _| 1.0);
        let trips =
            |all: &[RatedPair]| all.iter().map(|pair| (pair.hosts, pair.round_trip_us)).collect::<Vec<_>>();
        assert!(
            subjects(&latency(&names, &trips(&all))).is_empty() && subjects(&loss(&names, &all)).is_empty()
        );
        for pair in all.iter_mut().filter(|pair| pair.hosts.0 == 1 || pair.hosts.1 == 1) {
            pair.round_trip_us = 5_000;
            let sender = usize::from(pair.hosts.0 == 1);
            pair.segments[sender].again = 2_000;
        }
        assert_eq!(subjects(&latency(&names, &trips(&all))), ["h1"]);
        assert_eq!(subjects(&loss(&names, &all)), ["h1"], "what others send to it is lost");
        // Seen from one host only: the peers' own distances.
        let star = [((0, 1), 100), ((0, 2), 120), ((0, 3), 9_000)];
        assert_eq!(subjects(&latency(&names, &star)), ["h3"]);
        let near = [((0, 1), 10), ((0, 2), 10), ((0, 3), 900)];
        assert!(subjects(&latency(&names, &near)).is_empty(), "below a millisecond nothing is late");
        assert!(latency(&names, &[]).is_empty() && loss(&names, &[]).is_empty());
    }
}
