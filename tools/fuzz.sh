#!/usr/bin/env bash
# Runs every fuzz target for the time that is given, as go test's -fuzztime. One that executes too little has tested
# nothing, and so fails.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly least=1000 # executions of a target
log=$(mktemp)
trap 'rm -f "$log"' EXIT

while IFS=: read -r file target; do
	dir=$(dirname "$file") target=${target#func }
	echo "$target in $dir"
	# By default an input that finds something new is made smaller for a minute, and meanwhile nothing else is executed.
	go -C "$dir" test -run '^$' -fuzz "^$target\$" -fuzztime "$1" -fuzzminimizetime 20x | tee "$log"
	executed=$(grep -o 'execs: [0-9]*' "$log" | tail -1 | tr -dc 0-9)
	if [ "${executed:-0}" -lt "$least" ]; then
		echo "$target in $dir has executed ${executed:-0} inputs in $1, fewer than $least: make its seeds smaller, or its body faster" >&2
		exit 1
	fi
done < <(grep -rHo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' . | sort)
