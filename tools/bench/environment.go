package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// busy is the load average from which on a machine has something else to do.
const busy = 0.5

// environment is what can be known of this machine. What cannot is left empty.
func environment(ctx context.Context) result.Environment {
	e := result.Environment{
		Cores: runtime.NumCPU(), CPU: field("/proc/cpuinfo", "model name"),
		Versions: versions(ctx), Sysctls: sysctls(),
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		e.Kernel = text(name.Release[:]) + " " + text(name.Machine[:])
	}
	kilobytes, _ := strconv.Atoi(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"))
	e.MemoryMB = kilobytes / 1024
	if strings.Contains(" "+field("/proc/cpuinfo", "flags")+" ", " hypervisor ") {
		e.Virtual = "virtual machine"
	}
	e.Commit = output(ctx, "git", "rev-parse", "HEAD")
	// What a run publishes is not what the next one measures.
	e.Dirty = output(ctx, "git", "status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)BENCHMARKS.md", ":(top,exclude)README.md",
		":(top,exclude)tools/bench/plots") != ""
	load, _, _ := strings.Cut(read("/proc/loadavg"), " ")
	e.Load, _ = strconv.ParseFloat(load, 64)
	e.Warnings = warnings(e)
	return e
}

func warnings(e result.Environment) (list []string) {
	if e.Load > busy {
		list = append(list, fmt.Sprintf("the load average was %.2f when the run began: something else was running", e.Load))
	}
	if e.Cores < 2 {
		list = append(list, "there is one CPU: both ends of every sample share it")
	}
	if e.Dirty {
		list = append(list, "the checkout has changes that no commit has")
	}
	return list
}

func versions(ctx context.Context) map[string]string {
	found := map[string]string{"go": runtime.Version()}
	for name, args := range map[string][]string{
		"iptables": {"iptables", "--version"}, "nft": {"nft", "--version"},
	} {
		line, _, _ := strings.Cut(output(ctx, args[0], args[1:]...), "\n")
		if line != "" {
			found[name] = strings.TrimPrefix(strings.TrimPrefix(line, name+" "), "v")
		}
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == "github.com/cilium/ebpf" {
				found["ebpf"] = module.Version
			}
		}
	}
	return found
}

// sysctls are those of the machine; what each network namespace has for itself is recorded once the networks stand.
func sysctls() map[string]string {
	found := map[string]string{}
	for _, name := range []string{
		"net/core/bpf_jit_enable", "net/core/bpf_jit_harden", "net/core/netdev_budget", "net/core/netdev_max_backlog",
		"net/core/default_qdisc", "net/core/rmem_max", "net/core/wmem_max", "net/core/rps_sock_flow_entries",
		"kernel/bpf_stats_enabled",
	} {
		if value := read(filepath.Join("/proc/sys", name)); value != "" {
			found[strings.ReplaceAll(name, "/", ".")] = value
		}
	}
	if value := read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"); value != "" {
		found["cpu governor"] = value
	}
	return found
}

// output is what a program prints; empty when it is missing or fails.
func output(ctx context.Context, program string, args ...string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func read(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

// field is the value of the first "name : value" in a file of /proc.
func field(path, name string) string {
	for line := range strings.Lines(read(path)) {
		if key, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func text(raw []byte) string { return strings.TrimRight(string(raw), "\x00") }
