//! Graphs: what captures come to. A graph that was instantiated is the graph itself: nothing
//! changes it afterwards.

use crate::abi::Code;
use crate::caller::put;
use crate::entry::entries;

entries! {
    cuGraphInstantiateWithFlags = "cuGraphInstantiateWithFlags" @ 11040 (made: *mut usize, graph: usize, _flags: u64) |call| {
        call.ready()?;
        let ops = call.graphs.get(&graph).ok_or(Code::INVALID_HANDLE)?.clone();
        let handle = call.new_handle();
        call.graphs.insert(handle, ops);
        put(made, handle)
    }
    cuGraphLaunch | cuGraphLaunch_ptsz @ 10000 = "cuGraphLaunch" @ 10000 (graph: usize, stream: usize) |call| {
        let stream = call.stream(stream)?;
        let ops = call.graphs.get(&graph).ok_or(Code::INVALID_HANDLE)?.clone();
        ops.into_iter().try_for_each(|(name, what)| call.enqueue(stream, name, what).map(drop))
    }
    cuGraphDestroy = "cuGraphDestroy" @ 10000 (graph: usize) |call| {
        call.ready()?;
        call.graphs.remove(&graph).map(drop).ok_or(Code::INVALID_HANDLE)
    }
}
