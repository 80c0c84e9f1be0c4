//! Primary contexts, which thread works in which, and peer access.

use crate::abi::{Code, Outcome};
use crate::caller::{put, put_if_wanted};
use crate::capture;
use crate::driver::{State, signals};
use crate::entry::{Call, contexts, entries};
use crate::memory::{Area, Kind};

/// Memory that goes with its context.
const RESET: &[Kind] = &[Kind::Device, Kind::Pinned, Kind::Registered, Kind::Managed];

/// Handles of contexts begin here.
const CONTEXT_BASE: usize = 0xfa4e_c000_0000_0000;
/// `CU_COMPUTEMODE_PROHIBITED`.
const PROHIBITED: i32 = 2;

/// The handle of a GPU's primary context.
pub fn context_handle(gpu: usize) -> usize {
    CONTEXT_BASE + gpu * 16
}

impl State {
    /// The GPU of a context that is alive.
    pub fn context(&self, handle: usize) -> Outcome<usize> {
        let gpu =
            handle.checked_sub(CONTEXT_BASE).filter(|offset| offset % 16 == 0).map(|offset| offset / 16);
        let alive = |&gpu: &usize| self.gpus.get(gpu).is_some_and(|gpu| gpu.retained > 0);
        gpu.filter(alive).ok_or(Code::INVALID_CONTEXT)
    }
}

impl Call {
    /// The GPU of a context, or of the current one for 0: what CUDA 13 made of calls that had no
    /// argument.
    fn context_or_current(&self, context: usize) -> Outcome<usize> {
        if context == 0 { self.current() } else { self.context(context) }
    }

    /// Takes away all that a context has. It stays retained, and what it had is misuse from now on.
    fn reset_context(&mut self, gpu: usize) -> Outcome {
        self.unsafe_in_capture()?;
        // What has not begun never does.
        self.gpus[gpu].poison.get_or_insert(Code::UNKNOWN);
        signals().waiting.notify_all();
        while self.ops.values().any(|op| op.gpu == gpu) {
            self.wait_for_any();
        }
        let streams = self.streams.iter().filter(|(_, stream)| stream.gpu == gpu);
        for handle in streams.map(|(&handle, _)| handle).collect::<Vec<_>>() {
            self.remove_stream(handle);
        }
        self.default_streams.retain(|&(of, _), _| of != gpu);
        self.events.retain(|_, event| event.gpu != gpu);
        let modules: Vec<usize> =
            self.modules.iter().filter(|(_, module)| module.gpu == gpu).map(|(&handle, _)| handle).collect();
        for handle in modules {
            self.modules.remove(&handle);
            self.functions.retain(|_, function| function.module != handle);
        }
        let is_its = |area: &&Area| area.gpu == gpu && RESET.contains(&area.kind);
        for (base, bytes) in
            self.memory.areas().filter(is_its).map(|area| (area.base, area.bytes)).collect::<Vec<_>>()
        {
            self.order.forget(base, bytes);
            self.memory.remove(base, RESET);
        }
        self.memory.peers.retain(|&(who, whose)| who != gpu && whose != gpu);
        (self.gpus[gpu].poison, self.gpus[gpu].is_abandoned) = (None, false);
        Ok(())
    }

    fn wait_for_context(&mut self, gpu: usize) -> Outcome {
        self.healthy(gpu)?;
        self.unsafe_in_capture()?;
        let ops: Vec<u64> = self.ops.iter().filter(|(_, op)| op.gpu == gpu).map(|(&id, _)| id).collect();
        let ended =
            self.streams.values().filter(|stream| stream.gpu == gpu).map(|stream| stream.clock.clone());
        ended.collect::<Vec<_>>().iter().for_each(|clock| self.order.host.join(clock));
        self.wait_for_ops(ops)?;
        self.healthy(gpu)
    }
}

entries! {
    cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain" @ 7000 (context: *mut usize, device: i32) |call| {
        let gpu = call.device(device)?;
        if call.gpus[gpu].compute_mode == PROHIBITED {
            return Err(Code::DEVICE_UNAVAILABLE);
        }
        call.gpus[gpu].retained += 1;
        put(context, context_handle(gpu))
    }
    cuDevicePrimaryCtxRelease_v2 = "cuDevicePrimaryCtxRelease" @ 11000 (device: i32) |call| {
        let gpu = call.device(device)?;
        call.gpus[gpu].retained = call.gpus[gpu].retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        Ok(())
    }
    cuDevicePrimaryCtxReset_v2 = "cuDevicePrimaryCtxReset" @ 11000 (device: i32) |call| {
        let gpu = call.device(device)?;
        call.reset_context(gpu)
    }
    cuDevicePrimaryCtxGetState = "cuDevicePrimaryCtxGetState" @ 7000
    (device: i32, flags: *mut u32, active: *mut i32) |call| {
        let gpu = call.device(device)?;
        put_if_wanted(flags, 0);
        put(active, (call.gpus[gpu].retained > 0).into())
    }
    cuCtxSetCurrent = "cuCtxSetCurrent" @ 4000 (context: usize) |call| {
        call.ready()?;
        let gpu = if context == 0 { None } else { Some(call.context(context)?) };
        contexts(|contexts| {
            contexts.pop();
            contexts.extend(gpu);
        });
        Ok(())
    }
    cuCtxGetCurrent = "cuCtxGetCurrent" @ 4000 (context: *mut usize) |call| {
        call.ready()?;
        put(context, contexts(|contexts| contexts.last().map_or(0, |&gpu| context_handle(gpu))))
    }
    cuCtxPushCurrent_v2 = "cuCtxPushCurrent" @ 4000 (context: usize) |call| {
        call.ready()?;
        let gpu = call.context(context)?;
        contexts(|contexts| contexts.push(gpu));
        Ok(())
    }
    cuCtxPopCurrent_v2 = "cuCtxPopCurrent" @ 4000 (context: *mut usize) |call| {
        call.ready()?;
        let gpu = contexts(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        put_if_wanted(context, context_handle(gpu));
        Ok(())
    }
    cuCtxGetDevice = "cuCtxGetDevice" @ 2000 (device: *mut i32) |call| {
        call.ready()?;
        let gpu = contexts(|contexts| contexts.last().copied()).ok_or(Code::INVALID_CONTEXT)?;
        put(device, call.ordinal(gpu))
    }
    cuCtxGetStreamPriorityRange = "cuCtxGetStreamPriorityRange" @ 5050 (least: *mut i32, greatest: *mut i32) |call| {
        call.current()?;
        put_if_wanted(least, 0);
        put_if_wanted(greatest, -5);
        Ok(())
    }
    cuCtxSynchronize = "cuCtxSynchronize" @ 2000 () |call| {
        let gpu = call.current()?;
        call.wait_for_context(gpu)
    }
    cuCtxSynchronize_v2 = "cuCtxSynchronize" @ 13000 (context: usize) |call| {
        let gpu = call.context_or_current(context)?;
        call.wait_for_context(gpu)
    }
    cuCtxEnablePeerAccess = "cuCtxEnablePeerAccess" @ 4000 (peer: usize, flags: u32) |call| {
        let gpu = call.current()?;
        let peer = call.context(peer)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !call.can_peer(gpu, peer) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        if call.memory.peers.insert((gpu, peer)) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }
    cuCtxDisablePeerAccess = "cuCtxDisablePeerAccess" @ 4000 (peer: usize) |call| {
        let gpu = call.current()?;
        let peer = call.context(peer)?;
        if call.memory.peers.remove(&(gpu, peer)) { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    }
    cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode" @ 10010 (mode: *mut u32) |call| {
        call.ready()?;
        let wanted = crate::caller::get(mode)?;
        if wanted > capture::RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        put(mode, capture::exchange_mode(wanted))
    }
}
