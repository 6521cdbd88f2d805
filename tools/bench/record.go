package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// perNode are the sysctls that each network namespace has for itself, and that a figure may depend on.
func perNode() []string {
	return []string{
		"net/ipv4/ip_forward", "net/ipv4/conf/all/rp_filter", "net/ipv4/conf/eth0/rp_filter", "net/ipv4/ip_local_port_range",
		"net/ipv4/tcp_congestion_control", "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem",
		"net/bridge/bridge-nf-call-iptables", "net/netfilter/nf_conntrack_max", "net/netfilter/nf_conntrack_buckets",
		"net/netfilter/nf_conntrack_udp_timeout", "net/netfilter/nf_conntrack_tcp_timeout_established",
		"net/netfilter/nf_conntrack_tcp_timeout_time_wait", "net/netfilter/nf_conntrack_tcp_timeout_close",
	}
}

// record adds what can only be known once the networks stand: their nodes' sysctls, and what their programs were built from.
func record(run *result.Run, networks map[string]*modes.Network) {
	e := &run.Environment
	for i := range run.Modes {
		mode := &run.Modes[i]
		network := networks[mode.Name]
		if network == nil {
			continue
		}
		mode.Sysctls = map[string]string{}
		for name, value := range network.Sysctls(perNode()...) {
			mode.Sysctls[strings.ReplaceAll(name, "/", ".")] = strings.Join(strings.Fields(value), " ")
		}
		files, err := network.Binaries()
		if err != nil {
			e.Warnings = append(e.Warnings, fmt.Sprintf("what mode %s runs is not known: %v", mode.Name, err))
		}
		maps.Copy(e.Versions, builds(files))
	}
	e.Warnings = append(e.Warnings, strangers(*e)...)
}

// strangers says which of this project's programs are not of the commit that the run is filed under.
func strangers(e result.Environment) (warnings []string) {
	for _, name := range result.Ours() {
		if built := e.Versions[name]; built != "" && built != e.Commit {
			warnings = append(warnings, fmt.Sprintf("%s was built from %s, and the checkout is at %s; make build", name, built, e.Commit))
		}
	}
	return warnings
}

// files are those that all networks' programs were started from.
func files(networks map[string]*modes.Network) (all []string) {
	for _, network := range networks {
		some, _ := network.Binaries() // record has told of an error
		all = append(all, some...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// contents are the sums of files; of one that can't be read there is none.
func contents(files []string) map[string][sha256.Size]byte {
	sums := map[string][sha256.Size]byte{}
	for _, file := range files {
		if content, err := os.ReadFile(file); err == nil {
			sums[file] = sha256.Sum256(content)
		}
	}
	return sums
}

// changed says which files somebody has replaced while they were measured: agents and plugins are started again and again.
func changed(before, after map[string][sha256.Size]byte) (warnings []string) {
	for _, file := range slices.Sorted(maps.Keys(before)) {
		if before[file] != after[file] {
			warnings = append(warnings, filepath.Base(file)+" was replaced while it was measured: the figures are of more than one program")
		}
	}
	return warnings
}

// builds says what files were built from, by their names: a commit of the checkout that they were built in, or a module's version.
func builds(files []string) map[string]string {
	found := map[string]string{}
	for _, file := range files {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			found[filepath.Base(file)] = err.Error()
			continue
		}
		found[filepath.Base(file)] = builtFrom(info)
	}
	return found
}

func builtFrom(info *debug.BuildInfo) string {
	set := map[string]string{}
	for _, s := range info.Settings {
		set[s.Key] = s.Value
	}
	commit := set["vcs.revision"]
	switch {
	case commit == "":
		return info.Main.Path + " " + info.Main.Version
	case set["vcs.modified"] == "true":
		return commit + ", with changes"
	}
	return commit
}
