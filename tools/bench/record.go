package main

import (
	"debug/buildinfo"
	"fmt"
	"maps"
	"path/filepath"
	"runtime/debug"
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
	for _, ours := range []string{"ebpf-agent", "ebpf-cni"} {
		built := e.Versions[ours]
		if commit, _, _ := strings.Cut(built, ","); built != "" && commit != e.Commit {
			e.Warnings = append(e.Warnings, fmt.Sprintf("%s was built from %s, and the checkout is at %s; make build", ours, built, e.Commit))
		}
	}
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
