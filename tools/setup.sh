#!/usr/bin/env bash
# Makes the machine ready for one of the make targets, and does nothing where it is ready.
#
#   tools/setup.sh generate       the pinned clang and the headers that the programs are compiled against
#   tools/setup.sh lint           clang-format
#   tools/setup.sh test           what the tests run beside the project's own binaries; bpffs
#   tools/setup.sh test-kernels   what boots other kernels, and unpacks their modules
#   tools/setup.sh demo           bpffs
#   tools/setup.sh cluster        what nodes of a real Kubernetes run beside what test/cluster gets for them itself; bpffs
#   tools/setup.sh bench          what the classical networks are made with; bpffs
#
# Missing packages are installed with apt-get when it can be used (Debian, root). Elsewhere the
# script says what is missing and exits 1.
set -euo pipefail

# The release whose code the committed objects are, byte for byte.
readonly clang_release=19.1.7

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

have() { command -v "$1" >/dev/null 2>&1; }

# missing COMMAND-OR-FILE=PACKAGE...: the packages whose command or file is not there.
missing() {
	local pair
	for pair in "$@"; do
		case "${pair%%=*}" in
		/*) [ -e "${pair%%=*}" ] || printf '%s ' "${pair#*=}" ;;
		*) have "${pair%%=*}" || printf '%s ' "${pair#*=}" ;;
		esac
	done
}

# apt ARG...: apt-get without questions or chatter; its output is shown when it fails.
apt() {
	local log
	log=$(mktemp)
	if ! DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
		"$@" </dev/null >"$log" 2>&1; then
		tail -n 30 "$log" >&2
		rm -f "$log"
		return 1
	fi
	rm -f "$log"
}

# need COMMAND-OR-FILE=PACKAGE...: installs what is missing.
need() {
	local packages
	packages=$(missing "$@")
	[ -n "$packages" ] || return 0
	if ! have apt-get || [ "$(id -u)" -ne 0 ]; then
		die "missing: ${packages% } (Debian's package names); install them, or run this as root on Debian"
	fi
	say "installing ${packages% }"
	# shellcheck disable=SC2086 # a list of names
	apt install --no-install-recommends $packages ||
		{ apt update && apt install --no-install-recommends $packages; } ||
		die "apt-get cannot install ${packages% }; its last words stand above"
}

# bpffs mounts the BPF file system where the kernel's tools expect it.
bpffs() {
	[ "$(id -u)" -eq 0 ] || return 0
	[ "$(stat -f -c %T /sys/fs/bpf 2>/dev/null)" = bpf_fs ] && return 0
	mount -t bpf bpf /sys/fs/bpf ||
		die "cannot mount bpffs on /sys/fs/bpf: the tests need a kernel with CONFIG_BPF_SYSCALL and root's own mount namespace"
}

pinned_clang() {
	local found
	found=$(clang-19 --version | sed -n 's/.*version \([0-9.]*\).*/\1/p')
	[ "$found" = "$clang_release" ] ||
		die "clang-19 is release $found; the committed objects come from $clang_release, and another release makes other bytes"
}

case "${1:-}" in
generate)
	need clang-19=clang-19 llvm-strip-19=llvm-19 \
		/usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
	pinned_clang
	;;
lint) need clang-format-19=clang-format-19 git=git ;;
test)
	need git=git ip=iproute2 ping=iputils-ping tcpdump=tcpdump iptables-legacy=iptables nft=nftables setpriv=util-linux
	bpffs
	;;
test-kernels)
	[ "$(uname -m)" = x86_64 ] || die "test-kernels emulates x86-64 and builds for this machine, which is $(uname -m): run it on x86-64"
	need qemu-system-x86_64=qemu-system-x86 xz=xz-utils /bin/busybox=busybox-static
	;;
demo) bpffs ;;
cluster)
	need git=git ip=iproute2 iptables-restore=iptables nft=nftables conntrack=conntrack nsenter=util-linux mount=mount
	bpffs
	;;
bench)
	need git=git iptables-restore=iptables nft=nftables
	bpffs
	;;
*) die "usage: tools/setup.sh generate|lint|test|test-kernels|demo|cluster|bench" ;;
esac
