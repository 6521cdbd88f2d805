#!/usr/bin/env bash
# Compiles the BPF programs in a copy of the tree, in another directory, and fails unless the result
# is byte for byte what stands in bpf/. Nothing in the tree is touched.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

cp -R go.mod go.sum bpf maps "$copy"
# A file that the sources no longer make must be missed, so none is carried over.
rm -f "$copy"/bpf/*_bpfel.go "$copy"/bpf/*_bpfel.o
(cd "$copy" && go generate ./bpf)

if ! diff -r bpf "$copy/bpf"; then
	echo "verify-generate: bpf/ is not what its sources compile to; run make generate and commit the result" >&2
	exit 1
fi
echo "verify-generate: $(find bpf -name '*_bpfel.o' | wc -l) objects are what their sources compile to"
