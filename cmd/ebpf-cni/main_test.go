package main

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	module  = "github.com/ebpf-cni/ebpf-cni"
	maxSize = 12 << 20
)

func TestLinksNeitherKubernetesNorTheObjects(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 50 {
		t.Fatalf("only %d dependencies listed", len(deps))
	}
	for _, dep := range deps {
		switch {
		case dep == "sigs.k8s.io/knftables": // the address library's, which names nftables and nothing of Kubernetes
		case strings.HasPrefix(dep, "k8s.io/"), strings.HasPrefix(dep, "sigs.k8s.io/"),
			strings.HasPrefix(dep, "github.com/prometheus/"), strings.HasPrefix(dep, "github.com/spf13/"),
			dep == module+"/bpf", dep == module+"/pkg/datapath", strings.HasPrefix(dep, module+"/pkg/agent"):
			t.Errorf("the plugin links %s", dep)
		}
	}
}

func TestBinary(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ebpf-cni")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.version=v9.8.7", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() >= maxSize { // symbols included
		t.Errorf("the plugin has %d bytes, more than %d", info.Size(), maxSize)
	}
	t.Logf("%d bytes", info.Size())
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("the plugin is not static: it has a segment %s", p.Type)
		}
	}

	about := exec.Command(path)
	about.Env = []string{}
	if out, err := about.CombinedOutput(); err != nil || !strings.Contains(string(out), "v9.8.7") || !strings.Contains(string(out), "1.1.0") {
		t.Errorf("without a command: %v, %s", err, out)
	}
	version := exec.Command(path)
	version.Env = []string{"CNI_COMMAND=VERSION"}
	if out, err := version.CombinedOutput(); err != nil || !strings.Contains(string(out), `"supportedVersions":["0.3.1","0.4.0","1.0.0","1.1.0"]`) {
		t.Errorf("VERSION: %v, %s", err, out)
	}
}
