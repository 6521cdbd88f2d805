#!/usr/bin/env bash
# go test of packages of the module in the working directory, for tests that need root. Packages run two at a time, since most
# tests wait for the kernel longer than they compute. A package's own run one after the other, unless more flags say otherwise:
# those of the lab, two of which that say so (t.Parallel) stand beside each other. The benchmark's measure.
set -euo pipefail

abreast=(-p 2 -parallel 1)
[[ $PWD != */tools/bench ]] || abreast=(-p 1)
[[ $PWD != */test/e2e ]] || abreast=(-p 1 -parallel 2)
exec go test "${abreast[@]}" -count 1 "$@"
