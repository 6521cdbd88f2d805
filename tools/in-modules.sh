#!/usr/bin/env bash
# Runs a command in the directory of each module that packages lie in, with their patterns there in place of {}:
#
#   tools/in-modules.sh './pkg/agent ./test/e2e' go test {} -v
#
# The patterns are go's, seen from the top of the tree, and one that ends in /... takes in the modules below its directory. The
# linters' module, which has no package, and those of test/cluster, whose tests have a target of their own, take part when they
# are named. The command runs in every module, also after it has failed in one; then the exit status is 1.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A patterns=() # by module
modules=()             # as they are named

# take MODULE PATTERN
take() {
	[ -n "${patterns[$1]:-}" ] || modules+=("$1")
	patterns[$1]+=" $2"
}

for pattern in $1; do
	pattern=${pattern#.}
	pattern=./${pattern#/}
	pattern=${pattern%/}
	dir=${pattern%/...}
	module=$dir
	until [ -e "$module/go.mod" ]; do module=$(dirname "$module"); done
	take "$module" ".${pattern#"$module"}"
	[ "$pattern" != "$dir" ] || continue
	while read -r file; do
		take "$(dirname "$file")" ./...
	done < <(find "$dir" ! -path "$dir" \( -path ./test/cluster -o -path ./tools/lint \) -prune -o \
		-name go.mod ! -path "$dir/go.mod" -print | sort)
done
shift

trap 'exit 130' INT TERM
status=0
for module in "${modules[@]}"; do
	command=()
	for word in "$@"; do
		# shellcheck disable=SC2206 # a list of patterns
		if [ "$word" = {} ]; then command+=(${patterns[$module]}); else command+=("$word"); fi
	done
	printf '%s: %s\n' "$module" "${command[*]}" >&2
	(cd "$module" && "${command[@]}") || status=1
done
exit "$status"
