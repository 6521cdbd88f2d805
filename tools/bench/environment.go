package main

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
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
	e := result.Environment{Cores: runtime.NumCPU(), CPU: field("/proc/cpuinfo", "model name"), Versions: map[string]string{"go": runtime.Version()}}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		e.Kernel = unix.ByteSliceToString(name.Release[:]) + " " + unix.ByteSliceToString(name.Machine[:])
	}
	kilobytes, _ := strconv.Atoi(strings.TrimSuffix(field("/proc/meminfo", "MemTotal"), " kB"))
	e.MemoryMB = kilobytes / 1024
	for _, program := range []string{"iptables", "nft"} {
		if line, _, _ := strings.Cut(output(ctx, program, "--version"), "\n"); line != "" {
			e.Versions[program] = strings.TrimPrefix(strings.TrimPrefix(line, program+" "), "v")
		}
	}
	e.Commit = output(ctx, "git", "rev-parse", "HEAD")
	// What a run publishes is not what the next one measures.
	e.Dirty = output(ctx, "git", "status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)BENCHMARKS.md", ":(top,exclude)README.md",
		":(top,exclude)tools/bench/plots", ":(top,exclude)tools/bench/results") != ""
	load, _ := os.ReadFile("/proc/loadavg")
	_, _ = fmt.Sscan(string(load), &e.Load) // the first number
	if e.Load > busy {
		e.Warnings = append(e.Warnings, fmt.Sprintf("the load average was %.2f when the run began: something else was running", e.Load))
	}
	if e.Cores < 2 {
		e.Warnings = append(e.Warnings, "there is one CPU: both ends of every sample share it")
	}
	if e.Dirty {
		e.Warnings = append(e.Warnings, "the checkout has changes that no commit has")
	}
	return e
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

// field is the value of the first "name : value" in a file of /proc.
func field(path, name string) string {
	content, _ := os.ReadFile(path)
	for line := range strings.Lines(string(content)) {
		if key, value, found := strings.Cut(line, ":"); found && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
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
		set := map[string]string{}
		for _, s := range info.Settings {
			set[s.Key] = s.Value
		}
		from := set["vcs.revision"]
		switch {
		case from == "":
			from = info.Main.Path + " " + info.Main.Version
		case set["vcs.modified"] == "true":
			from += ", with changes"
		}
		found[filepath.Base(file)] = from
	}
	return found
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

// record notes what programs were built from. The function returned warns of those that somebody has replaced since: agents and plugins are started
// again and again.
func record(run *result.Run, files []string) (compare func()) {
	e := &run.Environment
	maps.Copy(e.Versions, builds(files))
	e.Warnings = append(e.Warnings, strangers(*e)...)
	before := contents(files)
	return func() {
		after := contents(files)
		for _, file := range slices.Sorted(maps.Keys(before)) {
			if before[file] != after[file] {
				e.Warnings = append(e.Warnings, filepath.Base(file)+" was replaced while it was measured: the figures are of more than one program")
			}
		}
	}
}

// contents are the sums of files; that of one that can't be read is of nothing.
func contents(files []string) map[string][sha256.Size]byte {
	sums := map[string][sha256.Size]byte{}
	for _, file := range files {
		content, _ := os.ReadFile(file)
		sums[file] = sha256.Sum256(content)
	}
	return sums
}
