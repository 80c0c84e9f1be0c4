#!/usr/bin/env bash
# Builds what the wheel carries twice, from two checkouts of HEAD at two paths, and compares the bytes. It takes as long as two
# builds from nothing, so it is not part of `make test-all`. VENV names the virtual environment of `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "${VENV:-.venv}")
folder=$(mktemp -d)
trap 'git worktree remove --force "$folder/one"; git worktree remove --force "$folder/another/path"; rm -rf "$folder"' EXIT
for checkout in one another/path; do
    git worktree add --quiet --detach "$folder/$checkout"
    make -C "$folder/$checkout" VENV="$venv" binaries
    (cd "$folder/$checkout/python/forebay" && sha256sum bin/forebay lib/*.so) > "$folder/sums.${checkout%%/*}"
done
cat "$folder/sums.one"
diff "$folder/sums.one" "$folder/sums.another" && echo "both builds have the same bytes"
