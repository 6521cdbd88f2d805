package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWhatDebianSays(t *testing.T) {
	const depends = "linux-image-6.12-amd64\n  Depends: linux-image-6.12.117+deb12-amd64\n"
	if name, ok := imageIn(depends, "6.12"); !ok || name != "linux-image-6.12.117+deb12-amd64" {
		t.Errorf("image %q", name)
	}
	if name, ok := imageIn(depends, "6.1"); ok {
		t.Errorf("%s is taken for 6.1", name)
	}
	got, err := parseURI("p", "'http://x/p_1.deb' p_1.deb 70 SHA256:abc\n")
	if err != nil || got != (debian{"p", "p_1.deb", "abc"}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "'u' p_1.deb 70", "'u' p_1.deb 70 MD5Sum:abc", "'u' ../p.deb 70 SHA256:abc"} {
		if got, err := parseURI("p", bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}

func TestVerifyComparesTheChecksum(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deb")
	check(t, os.WriteFile(path, []byte("abc"), 0o600))
	const sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	check(t, verify(path, sum))
	if err := verify(path, strings.Replace(sum, "b", "c", 1)); err == nil || !strings.Contains(err.Error(), sum) {
		t.Errorf("a damaged package: %v", err)
	}
}

// writeImage makes the beginning of a kernel image.
func writeImage(t *testing.T, release string) string {
	t.Helper()
	raw := make([]byte, 0x400)
	copy(raw[0x202:], "HdrS")
	raw[0x20f] = 1 // the text is 0x100 behind the header at 0x200
	path := filepath.Join(t.TempDir(), "bzImage")
	check(t, os.WriteFile(path, append(raw[:0x300:0x300], release...), 0o600))
	return path
}

func TestFindKernelRefuses(t *testing.T) {
	image := writeImage(t, "6.9.9-test (root@host) #1\x00junk")
	text := filepath.Join(t.TempDir(), "text")
	check(t, os.WriteFile(text, bytes.Repeat([]byte("text "), 200), 0o600))
	for _, c := range [][]string{
		{"/no/such/image", "", "neither"}, {image, "", "MODULES"}, {"6.1", "/lib/modules/x", "KERNEL=FILE"},
		{text, "/modules", "no kernel"}, {os.DevNull, "/modules", "no kernel"}, {writeImage(t, ""), "/modules", "cut off"}, {"/", "/modules", "no kernel"},
	} {
		if _, err := findKernel(t.Context(), c[0], c[1], t.TempDir()); err == nil || !strings.Contains(err.Error(), c[2]) {
			t.Errorf("%q: %v", c, err)
		}
	}
	k, err := findKernel(t.Context(), image, "/modules", "")
	if err != nil || k.image != image || k.modules != "/modules" || k.series != "" || k.release != "6.9.9-test" {
		t.Errorf("%+v, %v", k, err)
	}
	k.modules = "/no/such/modules"
	if err := k.loadModules(); err == nil || !strings.Contains(err.Error(), k.modules) {
		t.Errorf("no modules: %v", err)
	}
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"net/veth.ko", "net/bridge.ko.xz", "net/stp.ko", "net/llc-x.ko.zst", "unused.ko"} {
		check(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}
	if _, err := openModules(dir); err == nil || !strings.Contains(err.Error(), "modules.builtin") {
		t.Errorf("a directory that is none of modules: %v", err)
	}
	check(t, os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte("kernel/net/sched/sch-built.ko\n"), 0o600))
	tree, err := openModules(dir)
	check(t, err)
	needs := map[string][]string{"bridge.ko.xz": {"stp", "llc_x"}, "stp.ko": {"llc-x"}}
	tree.open = func(path string) ([]byte, []string, error) { return []byte(path), needs[filepath.Base(path)], nil }
	modules, err := tree.closure([]string{"?absent", "sch_built", "bridge", "veth", "stp"})
	check(t, err)
	var got []string
	for _, m := range modules {
		got = append(got, m.file)
	}
	if diff := cmp.Diff([]string{"llc_x.ko", "stp.ko", "bridge.ko", "veth.ko"}, got); diff != "" {
		t.Error(diff)
	}
	needs["veth.ko"] = []string{"lost"}
	if _, err := tree.closure([]string{"veth"}); err == nil || !strings.Contains(err.Error(), "lost") || !strings.Contains(err.Error(), "veth") {
		t.Errorf("a dependency that is missing: %v", err)
	}
	if _, err := depends([]byte("no module")); err == nil {
		t.Error("what is no module is read as one")
	}
}

// entries reads an archive as the kernel does.
func entries(t *testing.T, raw []byte) map[string]string {
	t.Helper()
	out := make(map[string]string)
	for at := 0; ; {
		if string(raw[at:at+6]) != "070701" {
			t.Fatalf("no header at %d", at)
		}
		field := func(i int) int {
			n, err := strconv.ParseInt(string(raw[at+6+8*i:at+14+8*i]), 16, 64)
			check(t, err)
			return int(n)
		}
		size, nameSize := field(6), field(11)
		name := string(raw[at+110 : at+110+nameSize-1])
		data := (at + 110 + nameSize + 3) &^ 3
		if name == cpioTrailer {
			return out
		}
		out[name] = fmt.Sprintf("%o %s", field(1), raw[data:data+size])
		at = (data + size + 3) &^ 3
	}
}

func TestArchive(t *testing.T) {
	from := t.TempDir()
	check(t, os.MkdirAll(filepath.Join(from, "sub"), 0o755))
	check(t, os.WriteFile(filepath.Join(from, "sub", "run"), []byte("12345"), 0o755))
	check(t, os.WriteFile(filepath.Join(from, "text"), []byte("abc"), 0o600))
	var b bytes.Buffer
	a := newArchive(&b)
	a.data("/etc/hosts", []byte("h"))
	a.tree("/src/x", from)
	a.link("/etc/link", "hosts")
	a.tree("/none", filepath.Join(from, "none"))
	check(t, a.end())
	want := map[string]string{
		"etc": "40755 ", "etc/hosts": "100644 h", "etc/link": "120777 hosts", "src": "40755 ", "src/x": "40755 ", "src/x/sub": "40755 ",
		"src/x/sub/run": "100755 12345", "src/x/text": "100644 abc",
	}
	if diff := cmp.Diff(want, entries(t, b.Bytes())); diff != "" {
		t.Error(diff)
	}
	a = newArchive(io.Discard)
	a.file("x", filepath.Join(from, "none"))
	if a.end() == nil {
		t.Error("a file that is not there is archived")
	}
}

func TestComplaints(t *testing.T) {
	const console = "[ 0.1] tsc: Unable to calibrate\n[ 1.0] WARNING: CPU: 1 PID: 7 at net/core/dev.c:1\n[ 1.1] Call Trace:\n[ 2.0] hrtimer: interrupt took 1 ns\n"
	if got := complaints(console); len(got) != 2 {
		t.Errorf("complaints: %q", got)
	}
}

func TestSkipsAreCompared(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "skips-6.1.txt"), []byte("# tcx\n\npkg/a  TestA/tcx # why\npkg/b TestB\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "skips-6.12.txt"), []byte("# none\n"), 0o600))
	for version, want := range map[string]struct {
		n     int
		exact bool
	}{"6.1.0-56-amd64": {2, true}, "6.8.1": {2, false}, "6.12.117+deb12": {0, true}, "7.0-rc1": {0, false}, "5.15.3": {0, false}} {
		r, err := parseRelease(version)
		check(t, err)
		got, exact, err := expectedSkips(dir, r)
		if err != nil || len(got) != want.n || exact != want.exact {
			t.Errorf("%s: %q, %v, %v", version, got, exact, err)
		}
	}
	if _, err := parseRelease("six"); err == nil {
		t.Error("a release without numbers")
	}
	expected := []string{"pkg/a TestA/tcx", "pkg/b TestB"}
	both := map[string]bool{"pkg/a": true, "pkg/b": true}
	for name, c := range map[string]struct {
		got   []string
		ran   map[string]bool
		exact bool
		want  int
	}{
		"as expected":          {expected, both, true, 0},
		"one more":             {append(slices.Clone(expected), "pkg/c TestC"), both, true, 1},
		"one less":             {expected[:1], both, true, 1},
		"one less, not run":    {expected[:1], map[string]bool{"pkg/a": true}, true, 0},
		"another kernel's one": {nil, both, false, 0},
	} {
		if got := compareSkips(c.got, expected, c.ran, c.exact); len(got) != c.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// A machine is played by a script: what it says is judged as a real one's.
func TestRunsAreJudged(t *testing.T) {
	frames := func(all ...any) string {
		var b strings.Builder
		for _, f := range all {
			raw, err := json.Marshal(f)
			check(t, err)
			b.WriteString("printf '%s\\n' '" + string(raw) + "'\n")
		}
		return b.String()
	}
	line := func(s string) wire.Frame { s += "\n"; return wire.Frame{Line: &s} }
	ended := func(status int) wire.Frame { return wire.Frame{Ended: &wire.Ended{Dir: "pkg/a", Status: status}} }
	booted, done := wire.Frame{Booted: "6.1.0"}, wire.Frame{Done: true}
	a, b := line("--- PASS: TestA (0.1s)"), line("--- PASS: TestB (0.1s)")
	for name, c := range map[string]struct {
		script string
		ok     bool
	}{
		"all is well":       {frames(booted, a, b, ended(0), done), true},
		"expected skip":     {frames(booted, a, line("    --- SKIP: TestA/tcx (0.0s)"), b, ended(0), done), true},
		"line begun before": {frames(booted, line("fatal error: --- PASS: TestA (0.1s)"), b, ended(0), done), true},
		"unexpected skip":   {frames(booted, a, line("--- SKIP: TestB (0.0s)"), ended(0), done), false},
		"a test fails":      {frames(booted, a, line("--- FAIL: TestB (0.1s)"), ended(1), done), false},
		"fails and warns":   {frames(booted, a, line("--- FAIL: TestB (0.1s)"), ended(1), done) + "echo 'WARNING: CPU' >\"${11#file:}\"\n", false},
		"status without":    {frames(booted, a, b, ended(2), done), false},
		"result missing":    {frames(booted, a, ended(0), done), false},
		"suite cut off":     {frames(booted, a, b), false},
		"not done":          {frames(booted, a, b, ended(0)), false},
		"no boot":           {"", false},
		"broken":            {frames(booted, a, b, ended(0), wire.Frame{Broken: "x"}), false},
		"suite out of turn": {frames(booted, wire.Frame{Ended: &wire.Ended{Dir: "pkg/z"}}, done), false},
		"damaged line":      {frames(booted, a, b, ended(0), done) + "echo '{'\n", false},
		"machine fails":     {frames(booted, a, b, ended(0), done) + "exit 3\n", false},
		"machine hangs":     {frames(booted, a, b, ended(0), done) + "exec sleep 100\n", false},
		"warning":           {frames(booted, a, b, ended(0), done) + "echo 'WARNING: CPU' >\"${11#file:}\"\n", false},
		"another kernel":    {frames(wire.Frame{Booted: "6.2.0"}, a, b, ended(0), done), false},
	} {
		t.Run(name, func(t *testing.T) {
			limit := time.Minute
			if name == "machine hangs" {
				limit = 3 * time.Second
			}
			dir := t.TempDir()
			check(t, os.MkdirAll(filepath.Join(dir, "test/vm"), 0o755))
			check(t, os.WriteFile(filepath.Join(dir, "test/vm/skips-6.1.txt"), []byte("pkg/a TestA/tcx\n"), 0o600))
			qemu := filepath.Join(dir, "qemu")
			script := "#!/bin/sh\nfor a; do case $a in file:*) console=${a#file:};; esac; done\n: >\"$console\"\n" +
				strings.ReplaceAll(c.script, "${11#file:}", "$console")
			check(t, os.WriteFile(qemu, []byte(script), 0o755))
			s := &session{
				count:    make(map[string]int),
				machine:  machine{qemu: qemu, timeout: limit},
				workshop: &workshop{dir: dir, root: dir},
				options:  testOptions{run: "."},
			}
			r := &report{
				session: s, out: t.Output(), kernel: kernel{name: "6.1", series: "6.1"},
				suites: []suite{{Suite: wire.Suite{Dir: "pkg/a"}, tests: []string{"TestA", "TestB"}}},
			}
			s.boot(t.Context(), r, filepath.Join(dir, "root"))
			s.add(r)
			if s.failed == c.ok {
				t.Errorf("failed: %v", s.failed)
			}
			if again := len(r.failedTests(1)) == 1; again != (name == "a test fails") || len(r.failedTests(0)) > 0 {
				t.Errorf("runs once more: %v", again)
			}
		})
	}
}

// A machine was given the bounds of all kernels, and measures its own only.
func TestOnlyTheRunningKernelsBoundsAreKept(t *testing.T) {
	dir := t.TempDir()
	var said strings.Builder
	r := &report{
		session: &session{workshop: &workshop{root: dir}}, out: &said, kernel: kernel{name: "6.1"}, release: "6.1.0-56-amd64",
	}
	for _, version := range []string{"6.1", "6.12"} {
		r.frame(wire.Frame{File: &wire.File{Path: "verifier-" + version + ".txt", Content: []byte(version)}})
	}
	r.frame(wire.Frame{File: &wire.File{Path: "../verifier-6.1.txt"}})
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	check(t, err)
	if len(files) != 1 || filepath.Base(files[0]) != "verifier-6.1.txt" {
		t.Errorf("kept %v", files)
	}
	if !r.failed || !strings.Contains(said.String(), "../verifier-6.1.txt") {
		t.Errorf("a path that leads out of the tree: %q", said.String())
	}
}
