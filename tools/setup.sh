#!/usr/bin/env bash
# Makes the machine ready for one of the make targets, and does nothing where it is ready.
#
#   tools/setup.sh generate       the pinned clang and the headers that the programs are compiled against
#   tools/setup.sh lint           clang-format
#   tools/setup.sh test           what the tests run beside the project's own binaries; etcd; Docker; bpffs; netfilter's modules
#   tools/setup.sh test-kernels   what boots other kernels, and unpacks their modules
#   tools/setup.sh demo           bpffs
#   tools/setup.sh docker         what nodes without Kubernetes run: etcd, Docker; bpffs
#   tools/setup.sh cluster        what nodes of a real Kubernetes run beside what test/cluster compiles for them; bpffs
#   tools/setup.sh bench          what the classical networks are made with; bpffs; netfilter's modules
#
# Missing packages are installed with apt-get when it can be used (Debian, root). Elsewhere the
# script says what is missing and exits 1. Servers are unpacked below the cache and not installed, since their packages'
# scripts would start them.
set -euo pipefail

# Where the machine's /proc and /sys are: somewhere else in this script's test only.
readonly root=${SETUP_ROOT:-}

# The release whose code the committed objects are, byte for byte.
readonly clang_release=19.1.7

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

have() { command -v "$1" >/dev/null 2>&1; }

# missing COMMAND-OR-FILE=PACKAGE...: the packages whose command or file is not there, each once.
missing() {
	local pair packages=' '
	for pair in "$@"; do
		case "${pair%%=*}" in
		/*) [ ! -e "${pair%%=*}" ] || continue ;;
		*) ! have "${pair%%=*}" || continue ;;
		esac
		[[ $packages == *" ${pair#*=} "* ]] || packages+="${pair#*=} "
	done
	printf '%s' "${packages# }"
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

# unpack COMMAND=PACKAGE...: has Debian's packages of missing commands below the cache, in debian/usr/bin, debian/usr/sbin or debian/bin.
unpack() {
	local cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/ebpf-cni
	local PATH=$PATH:$cache/debian/usr/bin:$cache/debian/usr/sbin:$cache/debian/bin
	[ -n "$(missing "$@")" ] || return 0
	mkdir -p "$cache/debian"
	# One at a time: whoever waited finds the packages there.
	exec 9>"$cache/debian.lock"
	flock 9
	local packages temp
	packages=$(missing "$@")
	if [ -n "$packages" ]; then
		have apt-get || die "missing: ${packages% } (Debian's package names); install them, and end what they start"
		say "unpacking ${packages% } into $cache/debian"
		temp=$(mktemp -d)
		trap "rm -rf '$temp'" EXIT
		# shellcheck disable=SC2086 # a list of names
		(cd "$temp" && { apt download $packages || { apt update && apt download $packages; }; } &&
			for package in ./*.deb; do dpkg -x "$package" "$cache/debian"; done) ||
			die "apt-get cannot get ${packages% }; its last words stand above"
	fi
	exec 9>&-
}

# bpffs mounts the BPF file system where the kernel's tools expect it.
bpffs() {
	[ "$(id -u)" -eq 0 ] || return 0
	[ "$(stat -f -c %T /sys/fs/bpf 2>/dev/null)" = bpf_fs ] && return 0
	mount -t bpf bpf /sys/fs/bpf ||
		die "cannot mount bpffs on /sys/fs/bpf: the tests need a kernel with CONFIG_BPF_SYSCALL and root's own mount namespace"
}

# modules loads what no network namespace can load for itself and the classical networks are made with.
modules() {
	[ "$(id -u)" -eq 0 ] || return 0
	[ -e "$root/proc/sys/net/netfilter/nf_conntrack_max" ] || load nf_conntrack
	[ ! -e "$root/proc/sys/net/bridge/bridge-nf-call-iptables" ] || return 0
	# From then on iptables sees the packets of all bridges. Those of the machine's own are their owner's to decide on.
	local bridge
	for bridge in "$root"/sys/class/net/*/bridge; do
		[ -e "$bridge" ] || continue
		bridge=${bridge%/bridge}
		die "br_netfilter is not loaded, and this machine has a bridge of its own, ${bridge##*/}: its packets would pass iptables from then on." \
			"If they may: modprobe br_netfilter. If they must not: sysctl net.bridge.bridge-nf-call-iptables=0 right after it." \
			"Without it: make build, go -C tools/bench build -o ../../bin/bench . && bin/bench --modes direct,ebpf,ebpf+kube-proxy,ptp"
	done
	load br_netfilter
	say "loaded br_netfilter: iptables sees the packets of bridges that this machine makes from now on; modprobe -r br_netfilter ends that"
}

load() {
	need modprobe=kmod
	modprobe "$1" ||
		die "cannot load the kernel module $1, which the classical networks are made with: install your kernel's modules; in a container, load it on the host"
}

# servers has etcd, Docker and what a container of its is made from.
servers() {
	unpack etcd=etcd-server dockerd=docker.io docker-proxy=docker.io docker=docker.io containerd=containerd containerd-shim-runc-v2=containerd runc=runc \
		busybox=busybox-static
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
	need git=git ip=iproute2 ping=iputils-ping tcpdump=tcpdump iptables-legacy=iptables nft=nftables ipset=ipset conntrack=conntrack setpriv=util-linux \
		/usr/lib/systemd/systemd-networkd=systemd traceroute=traceroute tracepath=iputils-tracepath
	servers
	bpffs
	modules
	;;
test-kernels)
	[ "$(uname -m)" = x86_64 ] || die "test-kernels emulates x86-64 and builds for this machine, which is $(uname -m): run it on x86-64"
	need qemu-system-x86_64=qemu-system-x86 xz=xz-utils /bin/busybox=busybox-static
	;;
demo) bpffs ;;
docker)
	need git=git iptables=iptables mount=mount
	servers
	bpffs
	;;
cluster)
	need git=git ip=iproute2 iptables-restore=iptables nft=nftables conntrack=conntrack nsenter=util-linux mount=mount \
		ping=iputils-ping sysctl=procps
	unpack containerd=containerd containerd-shim-runc-v2=containerd ctr=containerd runc=runc etcd=etcd-server
	bpffs
	;;
bench)
	need git=git iptables-restore=iptables nft=nftables
	bpffs
	modules
	;;
*) die "usage: tools/setup.sh generate|lint|test|test-kernels|demo|docker|cluster|bench" ;;
esac
