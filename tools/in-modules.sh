#!/usr/bin/env bash
# Runs a command in the directory of each module that packages lie in, with their patterns there in place of {}:
#
#   tools/in-modules.sh './pkg/agent ./test/e2e' go test {} -v
#
# The patterns are go's, seen from the top of the tree, and one that ends in /... takes in the modules below its directory. The
# linters' module, which has no package, and those of test/cluster, whose tests have a target of their own, take part when they
# are named. The command runs in every module, also after it has failed in one; then the exit status is 1.
#
# In modules that $BESIDE names it runs beside all others, at a low priority, and what it says there is shown at the end: for
# tests that compute while those of the others wait.
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

# in_module MODULE COMMAND...
in_module() {
	local module=$1 word command=()
	shift
	for word in "$@"; do
		# shellcheck disable=SC2206 # a list of patterns
		if [ "$word" = {} ]; then command+=(${patterns[$module]}); else command+=("$word"); fi
	done
	printf '%s: %s\n' "$module" "${command[*]}" >&2
	(cd "$module" && "${command[@]}")
}

# is_beside MODULE: whether $BESIDE names it, and it is not all there is.
is_beside() { [ ${#modules[@]} -gt 1 ] && [[ " ${BESIDE:-} " == *" $1 "* ]]; }

# beside COMMAND...: in each of those modules.
beside() {
	local module failed=0
	renice -n 10 "$BASHPID" >/dev/null
	for module in "${modules[@]}"; do
		! is_beside "$module" || in_module "$module" "$@" || failed=1
	done
	return "$failed"
}

said=$(mktemp)
set -m # in a group of its own, which ends with this script
beside "$@" </dev/null >"$said" 2>&1 &
set +m
trap 'kill -- -$! 2>/dev/null || true; rm -f "$said"' EXIT
trap 'exit 130' INT TERM
status=0
for module in "${modules[@]}"; do
	is_beside "$module" || in_module "$module" "$@" || status=1
done
wait $! || status=1
trap 'rm -f "$said"' EXIT
cat "$said"
exit "$status"
