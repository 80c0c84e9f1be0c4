#!/bin/sh
# vLLM with and without Forebay on a host with an H200, into one folder: time to the first token of prompts whose KV is somewhere, and
# a load of many sessions. Needs Python 3.12 with torch 2.11 and no network; each stage takes a few minutes and stands for itself, so
# that they can be run one by one, and again.
#
#   bench/vllm.sh FOLDER [STAGE...]         without stages: all of them, in this order, then `results`
#
#   links plain offloading simple memory multipath relay ssd ssd-always     time to the first token (multipath, relay: several GPUs)
#   relays                                                            of those, what `relay` is compared with: links plain memory relay multipath
#   layers                                                            what copies are waited for beside computing, without vLLM
#   asleep                                                            what KV is there after vLLM has slept (on a GPU)
#   pegaflow lmcache                                                  the same, where `pegaflow-server` and `lmcache` are on the path
#   load-hbm load-plain load-offloading load-simple load-pegaflow load-lmcache load-memory           the load
#   load-beside-offloading load-beside-simple     on two GPUs: ours and that one at the same time, and again with the GPUs exchanged
#   results                                                           ttft.json, load.json and restore.svg of what there is
#
# FOREBAY names the binary, target/release/forebay by default. ARCHIVES names a folder with what is to be unpacked first where vLLM
# is not installed: archives (*.tar.xz) of vLLM and what it needs, and our wheel (*.whl). SITE is where they go. SCRATCH is a
# folder on the SSD that is measured. ARGUMENTS go to every part, such as `--runs 5`, or `--tiny` to try all of it on a CPU.
set -u
if [ $# -lt 1 ]; then
    sed -n '2,19s/^# *//p' "$0" >&2
    exit 2
fi
folder=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
forebay=${FOREBAY:-"$here/../target/release/forebay"}
python=${PYTHON:-python3}
site=${SITE:-${TMPDIR:-/tmp}/forebay-vllm-site}
mkdir -p "$folder" || exit 2
scratch=${SCRATCH:-"$folder/scratch"}
# What is measured of the links is kept in the folder, not for the user.
XDG_CACHE_HOME=$(cd "$folder" && pwd)
export XDG_CACHE_HOME PYTHONUNBUFFERED=1
failed=
[ $# -gt 0 ] || set -- links plain offloading simple memory multipath ssd ssd-always load-hbm load-plain load-offloading load-simple load-memory results

# unpack: once, and again if it was interrupted.
unpack() {
    [ -n "${ARCHIVES:-}" ] || return 0
    PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    [ -e "$site/.complete" ] && return 0
    mkdir -p "$site" || exit 2
    for archive in "$ARCHIVES"/*.tar.xz; do
        [ -e "$archive" ] || continue
        tar -xJf "$archive" -C "$site" || "$python" -m tarfile -e "$archive" "$site" || exit 2
    done
    for wheel in "$ARCHIVES"/*.whl; do
        [ -e "$wheel" ] || continue
        "$python" -m zipfile -e "$wheel" "$site" || exit 2
    done
    touch "$site/.complete"
}

# step NAME COMMAND...: runs it, keeps what it says in NAME.txt, and remembers if it failed.
step() {
    name=$1
    shift
    echo "== $name: $*"
    begin=$(date +%s)
    "$@" >"$folder/$name.txt" 2>&1
    code=$?
    tail -n 40 "$folder/$name.txt"
    echo "== $name: exit code $code after $(($(date +%s) - begin)) s"
    [ $code -eq 0 ] || failed="$failed $name"
}

# ARGUMENTS is split into words on purpose.
ttft() {
    # shellcheck disable=SC2086
    "$python" "$here/vllm_ttft.py" "$folder" --forebay "$forebay" --scratch "$scratch" ${ARGUMENTS:-} "$@"
}

load() {
    # shellcheck disable=SC2086
    "$python" "$here/vllm_load.py" "$folder" --forebay "$forebay" --scratch "$scratch" ${ARGUMENTS:-} "$@"
}

# pair PEER GPU GPU: ours on the first GPU, a peer on the second.
pair() {
    (
        export CUDA_VISIBLE_DEVICES="$2"
        step load-memory load --part memory
        [ -z "$failed" ]
    ) &
    (
        export CUDA_VISIBLE_DEVICES="$3"
        scratch=$scratch-peer
        step "load-$1" load --part "$1"
        [ -z "$failed" ]
    )
    peers=$?
    wait $! && [ $peers -eq 0 ] || failed="$failed load-beside-$1"
}

# What copies pay is measured first, as a host's owner would. Exit code 1 is a warning; there is nothing to measure on a CPU.
preflight() {
    case " ${ARGUMENTS:-} " in *" --tiny "*) return 0 ;; esac
    "$forebay" preflight gpu --measure --json "$folder/preflight.json"
    [ $? -le 1 ]
}

unpack
# One link, the node's relays and two links in one process, in one run.
if [ "$*" = relays ]; then
    set -- links plain memory relay multipath results
    ARGUMENTS="--sizes 8192 32768 131072 ${ARGUMENTS:-}"
fi
for stage in "$@"; do
    case $stage in
    links)
        step preflight preflight
        step links ttft --part links
        ;;
    plain | offloading | simple | example | pegaflow | lmcache | memory | multipath | relay | ssd | ssd-always) step "$stage" ttft --part "$stage" ;;
    layers) step layers "$python" "$here/vllm_layers.py" "$folder" --forebay "$forebay" ;;
    asleep) step asleep "$python" "$here/vllm_asleep.py" "$folder" --forebay "$forebay" --scratch "$scratch" ;;
    load-beside-*)
        pair "${stage#load-beside-}" 0 1
        pair "${stage#load-beside-}" 1 0
        ;;
    load-*) step "$stage" load --part "${stage#load-}" ;;
    results)
        [ ! -e "$folder/plain.json" ] || step ttft ttft
        [ ! -e "$folder/load-plain.json" ] && [ ! -e "$folder/load-memory.json" ] || step load load
        ;;
    *)
        echo "no stage is called $stage" >&2
        exit 2
        ;;
    esac
done

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
