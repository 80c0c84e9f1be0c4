//! Start, fork and end of the process. At start nothing is done but asking to be told of forks, and
//! keeping stderr where a report was asked for; at the end nothing but printing counts: the driver
//! may be gone by then, so no CUDA is called from here.

use crate::{counts, library, system};

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static AT_START: extern "C" fn() = started;

#[used]
#[cfg_attr(not(test), unsafe(link_section = ".fini_array"))]
static AT_END: extern "C" fn() = ended;

extern "C" fn started() {
    // It fails for want of memory only; then the check of the process id, which is made before
    // copies are handed over, remains.
    system::pthread_atfork(None, None, Some(forked));
    // Whoever asked for a report wants it where stderr is now. Others keep no descriptor before
    // there is something to say.
    if system::environment(c"FOREBAY_PRELOAD").is_some_and(|value| value == c"stats") {
        system::keep_stderr();
    }
}

extern "C" fn forked() {
    counts::forget();
    library::forked();
}

extern "C" fn ended() {
    counts::report();
}
