//! Whether host names resolve: twice to the same addresses, and soon. Names are those of `--peer`
//! and of the configuration; lists of nodes have addresses.

use crate::cmd::preflight::net::finding::{Check, Finding};
use forebay_cuda::preflight::Severity::{Fault, Warning};
use forebay_cuda::topology::Root;
use std::collections::BTreeSet;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A lookup that takes longer holds up every connection that begins with it.
const SLOW: Duration = Duration::from_millis(100);
/// Then it is given up here; the system may go on.
const LIMIT: Duration = Duration::from_millis(1_500);

/// One lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    pub took: Duration,
    /// The reason, where there is no address.
    pub found: Result<BTreeSet<IpAddr>, String>,
}

/// What `/etc/resolv.conf` says of names that are not whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolver {
    /// A name with fewer dots is tried in the search domains first.
    pub ndots: usize,
    /// Search domains.
    pub domains: usize,
}

/// A name that was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    pub name: String,
    pub first: Lookup,
    /// Not made where the first gave nothing.
    pub second: Option<Lookup>,
}

impl Name {
    /// Looks a name up. Takes as long as the limit at most.
    pub fn look_up(name: &str) -> Name {
        let first = lookup(name);
        let second = first.found.is_ok().then(|| lookup(name));
        Name { name: name.to_owned(), first, second }
    }

    /// The addresses of the first lookup.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.first.found.iter().flatten().copied()
    }
}

fn lookup(name: &str) -> Lookup {
    let (sender, receiver) = mpsc::sync_channel(1);
    let (begin, asked) = (Instant::now(), name.to_owned());
    // The system's lookup cannot be given up: its thread may outlive this.
    let thread = std::thread::Builder::new().name("preflight-dns".into()).spawn(move || {
        let found = (&*asked, 0).to_socket_addrs();
        let found = found.map(|all| all.map(|one| one.ip()).collect());
        drop(sender.send(found.map_err(|error| error.to_string())));
    });
    let found = match thread {
        Ok(_) => receiver.recv_timeout(LIMIT).unwrap_or_else(|_| Err(format!("no answer in {LIMIT:?}"))),
        Err(error) => Err(format!("no thread for it: {error}")),
    };
    Lookup { took: begin.elapsed(), found }
}

impl Resolver {
    pub fn read(root: &Root) -> Resolver {
        Resolver::parse(&root.text("etc/resolv.conf").unwrap_or_default())
    }

    /// As the C library reads it: the last `search` or `domain` counts, and one dot by default.
    fn parse(text: &str) -> Resolver {
        let mut resolver = Resolver { ndots: 1, domains: 0 };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("search" | "domain") => resolver.domains = words.count(),
                Some("options") => {
                    let ndots =
                        words.filter_map(|word| word.strip_prefix("ndots:")?.parse().ok()).next_back();
                    resolver.ndots = ndots.unwrap_or(resolver.ndots);
                }
                _ => {}
            }
        }
        resolver
    }

    /// Lookups of other names that come before that of this one.
    fn extra_lookups(&self, name: &str) -> usize {
        let is_whole = name.ends_with('.') || name.matches('.').count() >= self.ndots;
        if is_whole { 0 } else { self.domains }
    }
}

pub fn judge(names: &[Name], resolver: Resolver) -> Vec<Finding> {
    if names.is_empty() {
        return vec![Finding::ok(Check::Dns, "", "no host names are used")];
    }
    names.iter().map(|name| judge_one(name, resolver)).collect()
}

fn judge_one(name: &Name, resolver: Resolver) -> Finding {
    let bad = |severity, seen: String, expected: &str, action: &str| {
        Finding::bad(Check::Dns, severity, &name.name, seen, expected, action)
    };
    let found = match &name.first.found {
        Ok(found) => found,
        Err(why) => {
            let action = "look at the name, and at the name servers in /etc/resolv.conf";
            return bad(Fault, format!("it does not resolve: {why}"), "an address", action);
        }
    };
    let second = name.second.as_ref().map(|second| &second.found);
    if second != Some(&Ok(found.clone())) {
        let list =
            |found: &BTreeSet<IpAddr>| found.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" ");
        let again =
            second.map_or("nothing".into(), |second| second.as_ref().map_or_else(String::clone, list));
        let seen = format!("it resolves to {}, and then to {again}", list(found));
        let action = "connections go to the first answer: use a name with one address, or the address";
        return bad(Warning, seen, "the same twice", action);
    }
    let extra = resolver.extra_lookups(&name.name);
    if name.first.took > SLOW {
        let seen = format!("it resolves in {} ms", name.first.took.as_millis());
        let expected = format!("at most {} ms", SLOW.as_millis());
        let action = match extra {
            0 => "look at the name servers in /etc/resolv.conf".into(),
            _ => format!(
                "{extra} other names are asked for first (ndots:{}): end the name with a dot",
                resolver.ndots
            ),
        };
        return bad(Warning, seen, &expected, &action);
    }
    let before = if extra > 0 {
        format!(", after {extra} other names (ndots:{})", resolver.ndots)
    } else {
        String::new()
    };
    Finding::ok(Check::Dns, &name.name, format!("it resolves within {} ms{before}", SLOW.as_millis()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_cuda::preflight::Severity;

    fn lookup(took_ms: u64, found: Result<&[&str], &str>) -> Lookup {
        let found = found.map(|all| all.iter().map(|one| one.parse().unwrap()).collect());
        Lookup { took: Duration::from_millis(took_ms), found: found.map_err(str::to_owned) }
    }

    fn judged(first: Lookup, second: Option<Lookup>, conf: &str) -> Finding {
        let name = Name { name: "etcd.kv.svc".into(), first, second };
        judge(&[name], Resolver::parse(conf)).remove(0)
    }

    #[test]
    fn a_name_has_to_resolve_twice_to_the_same_and_soon() {
        let here: Result<&[&str], &str> = Ok(&["10.0.0.1", "10.0.0.2"]);
        let turned: Result<&[&str], &str> = Ok(&["10.0.0.2", "10.0.0.1"]);
        let good = judged(lookup(3, here), Some(lookup(3, turned)), "");
        assert_eq!(good.severity, Severity::Ok, "the order of answers may change");
        let unknown = judged(lookup(3, Err("Name or service not known")), None, "");
        assert!(unknown.severity == Fault && unknown.seen.contains("Name or service not known"));
        let stale = judged(lookup(3, here), Some(lookup(3, Ok(&["10.0.0.9"]))), "");
        assert!(stale.severity == Warning && stale.seen.contains("then to 10.0.0.9"), "{stale:?}");
        let gone = judged(lookup(3, here), Some(lookup(3, Err("it timed out"))), "");
        assert!(gone.severity == Warning && gone.seen.contains("it timed out"), "{gone:?}");
        let slow = judged(lookup(101, here), Some(lookup(1, here)), "");
        assert!(slow.severity == Warning && slow.action.contains("name servers"), "{slow:?}");
    }

    #[test]
    fn what_ndots_costs_is_said() {
        let conf = "nameserver 10.96.0.10\nsearch a.svc b c\noptions ndots:5 edns0\n";
        let here: Result<&[&str], &str> = Ok(&["10.0.0.1"]);
        let slow = judged(lookup(300, here), Some(lookup(1, here)), conf);
        assert!(slow.action.contains("3 other names are asked for first (ndots:5)"), "{slow:?}");
        let good = judged(lookup(3, here), Some(lookup(3, here)), conf);
        assert!(good.seen.ends_with("after 3 other names (ndots:5)"), "{good:?}");
        assert_eq!(Resolver::parse(conf).extra_lookups("etcd.kv.svc."), 0);
        assert_eq!(Resolver::parse("search a\n").extra_lookups("etcd.kv.svc"), 0);
        assert_eq!(Resolver::parse("search a\nsearch b c\n"), Resolver { ndots: 1, domains: 2 });
    }

    #[test]
    fn a_name_that_nobody_has_is_told_within_the_limit() {
        let name = Name::look_up("no-such-host.invalid");
        assert!(name.first.found.is_err() && name.second.is_none());
        assert!(name.first.took < LIMIT + Duration::from_secs(5));
    }
}
