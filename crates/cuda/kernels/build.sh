#!/bin/sh
# Rebuilds the PTX of every kernel in this folder, or with --check compares it with what is here. Users need none of this.
# KERNELS names another folder: tools/bench/kernels has kernels of its own.
# NVCC names the compiler; `pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime` (13.0) gives one.
# sm_80 is the oldest GPU that the kernels run on; the driver translates the text for newer ones.
set -eu
cd "${KERNELS:-$(dirname "$0")}"
nvcc=${NVCC:-nvcc}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
status=0
for source in *.cu; do
    name=${source%.cu}
    # Debug line and compiler build lines name versions, not code.
    "$nvcc" -ptx -O3 -arch=compute_80 -o "$out/$name.raw" "$source"
    grep -v '^//' "$out/$name.raw" >"$out/$name.ptx"
    # A PTX version that drivers of CUDA 12.4 read; nothing newer is used.
    sed -i 's/^\.version .*/.version 8.4/' "$out/$name.ptx"
    if [ "${1:-}" = --check ]; then
        cmp "$out/$name.ptx" "$name.ptx" || status=1
    else
        cp "$out/$name.ptx" "$name.ptx"
    fi
done
exit $status
