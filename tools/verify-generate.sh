#!/usr/bin/env bash
# Makes what is generated, the objects of the BPF programs and the Go enums, in a copy of the tree in another
# directory, and fails unless the result is byte for byte what stands in bpf/ and maps/. Nothing in the tree is touched.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

mkdir "$copy/tools"
cp -R go.mod go.sum bpf maps "$copy"
cp -R tools/enums "$copy/tools"
# A file that the sources no longer make must be missed, so none is carried over.
rm -f "$copy"/bpf/*_bpfel.go "$copy"/bpf/*_bpfel.o "$copy"/maps/*/*_gen.go
(cd "$copy" && go generate ./bpf ./maps/...)

for dir in bpf maps; do
	if ! diff -r $dir "$copy/$dir"; then
		echo "verify-generate: $dir/ is not what its sources make; run make generate and commit the result" >&2
		exit 1
	fi
done
echo "verify-generate: $(find bpf -name '*_bpfel.o' | wc -l) objects and $(find maps -name '*_gen.go' | wc -l) files of enums are what their sources make"
