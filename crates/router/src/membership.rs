//! Which engines a source of engines wants there, and what has to change for that. A source is a
//! file, a DNS name or a pool of Kubernetes: it is read again and again. This file knows readings
//! and engines' names; how a source is read, and what a change takes, is others' business.

use crate::config::Backend;

/// What has to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Remove(String),
    Add(Backend),
}

/// One source, and what became of its readings so far.
#[derive(Debug, Default)]
pub struct Source {
    /// The engines that came from it and are there.
    here: Vec<Backend>,
    /// The last reading.
    last: Option<Vec<Backend>>,
}

impl Source {
    /// Takes in a reading. Nothing changes before a reading has come twice in a row: a file that is
    /// just being written looks like a shorter list. The first one counts at once.
    pub fn read(&mut self, wanted: Vec<Backend>) -> Vec<Step> {
        let settled = self.last.as_ref().is_none_or(|last| *last == wanted);
        let steps = if settled { self.steps(&wanted) } else { Vec::new() };
        self.last = Some(wanted);
        steps
    }

    /// Takes in a reading that cannot be half of one.
    pub fn set(&mut self, wanted: Vec<Backend>) -> Vec<Step> {
        let steps = self.steps(&wanted);
        self.last = Some(wanted);
        steps
    }

    fn steps(&self, wanted: &[Backend]) -> Vec<Step> {
        let too_many = self.here.iter().filter(|backend| !wanted.contains(backend));
        let too_few = wanted.iter().filter(|backend| !self.here.contains(backend));
        let removals = too_many.map(|backend| Step::Remove(backend.name.clone()));
        removals.chain(too_few.cloned().map(Step::Add)).collect()
    }

    /// A step was taken. One that was not is a step again after the next reading.
    pub fn done(&mut self, step: Step) {
        match step {
            Step::Remove(name) => self.here.retain(|backend| backend.name != name),
            Step::Add(backend) => self.here.push(backend),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backends(names: &[&str]) -> Vec<Backend> {
        names.iter().map(|name| Backend::new(*name, format!("http://{name}:1"))).collect()
    }

    fn apply(source: &mut Source, wanted: Vec<Backend>) -> Vec<Step> {
        let steps = source.read(wanted);
        steps.iter().cloned().for_each(|step| source.done(step));
        steps
    }

    fn add(name: &str) -> Step {
        Step::Add(backends(&[name]).remove(0))
    }

    #[test]
    fn the_first_reading_counts_at_once_and_a_change_when_it_has_come_twice() {
        let mut source = Source::default();
        assert_eq!(apply(&mut source, backends(&["a", "b"])), [add("a"), add("b")]);
        assert_eq!(apply(&mut source, backends(&["a", "b"])), []);
        assert_eq!(apply(&mut source, backends(&[])), [], "half of a file");
        assert_eq!(apply(&mut source, backends(&["b", "c"])), []);
        assert_eq!(apply(&mut source, backends(&["b", "c"])), [Step::Remove("a".into()), add("c")]);
        assert_eq!(apply(&mut source, backends(&["b", "c"])), []);
    }

    #[test]
    fn an_engine_that_moves_is_removed_and_added() {
        let mut source = Source::default();
        apply(&mut source, backends(&["a"]));
        let moved = vec![Backend::new("a", "http://elsewhere:1")];
        apply(&mut source, moved.clone());
        assert_eq!(
            apply(&mut source, moved.clone()),
            [Step::Remove("a".into()), Step::Add(moved[0].clone())]
        );
    }

    #[test]
    fn what_could_not_be_done_is_tried_again() {
        let mut source = Source::default();
        assert_eq!(source.read(backends(&["a"])), [add("a")]);
        assert_eq!(source.read(backends(&["a"])), [add("a")]);
        source.done(add("a"));
        assert_eq!(source.read(backends(&["a"])), []);
    }
}
