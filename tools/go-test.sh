#!/usr/bin/env bash
# go test of packages of the module in the working directory, for tests that need root. Most of them wait for the kernel longer
# than they compute, so packages run two at a time, and of a package's tests three of those that say t.Parallel. The
# benchmark's own run one after the other: they measure.
set -euo pipefail

abreast=(-p 2 -parallel 3)
[[ $PWD != */tools/bench ]] || abreast=(-p 1)
exec go test "${abreast[@]}" -count 1 "$@"
