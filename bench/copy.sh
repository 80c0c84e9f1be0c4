#!/bin/sh
# Everything about copies on a host with GPUs, into one folder: what the host is and what its links carry, then the benchmark of
# copies with its picture.
# A step that fails is told of at the end and does not stop the others. Needs the binary and nothing else: no toolkit, no network.
# What is measured of the links is kept in the folder, not for the user; the benchmark uses it.
#
#   bench/copy.sh FOLDER [ARGUMENT...]      arguments are `forebay bench copy`'s, such as --runs 15
#
# FOREBAY names the binary, target/release/forebay by default.
set -u
if [ $# -lt 1 ]; then
    sed -n '7,9s/^# *//p' "$0" >&2
    exit 2
fi
folder=$1
shift
forebay=${FOREBAY:-"$(dirname "$0")/../target/release/forebay"}
mkdir -p "$folder" || exit 2
XDG_CACHE_HOME=$(cd "$folder" && pwd)
export XDG_CACHE_HOME
failed=

# step NAME COMMAND...: runs it, keeps what it says in NAME.txt, and remembers if it failed.
step() {
    name=$1
    shift
    echo "== $name: $*"
    begin=$(date +%s)
    "$@" >"$folder/$name.txt" 2>&1
    code=$?
    cat "$folder/$name.txt"
    echo "== $name: exit code $code after $(($(date +%s) - begin)) s"
    [ $code -eq 0 ] || failed="$failed $name"
}

# Exit code 1 is a warning, which the text explains; only faults count.
preflight() {
    "$forebay" preflight gpu --measure --json "$folder/preflight.json"
    [ $? -le 1 ]
}

step preflight preflight
step copy "$forebay" bench copy --daemon --json "$folder/copy.json" --plot "$folder/copy.svg" "$@"

if [ -n "$failed" ]; then
    echo "failed:$failed"
    exit 1
fi
