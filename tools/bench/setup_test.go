package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// setup runs tools/setup.sh on a machine that has those files, every program, and a modprobe that notes what it is asked for.
func setup(t *testing.T, target, modprobe string, has ...string) (loaded, said string, err error) {
	t.Helper()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	write := func(path, content string) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range has {
		write(file, "1\n")
	}
	says := map[string]string{"id": "echo 0", "stat": "echo bpf_fs", "modprobe": `echo "$@" >>` + root + "/loaded; " + modprobe}
	for _, program := range []string{"git", "ip", "ping", "tcpdump", "iptables-legacy", "iptables-restore", "nft", "ipset", "conntrack", "setpriv", "traceroute", "tracepath", "etcd", "dockerd", "docker-proxy", "docker", "containerd", "containerd-shim-runc-v2", "runc", "busybox", "id", "stat", "modprobe"} {
		write("path/"+program, "#!"+bash+"\n"+says[program]+"\n")
	}
	cmd := exec.CommandContext(t.Context(), bash, "../setup.sh", target)
	cmd.Env = []string{"PATH=" + filepath.Join(root, "path"), "SETUP_ROOT=" + root}
	out, err := cmd.CombinedOutput()
	asked, _ := os.ReadFile(filepath.Join(root, "loaded"))
	return strings.Join(strings.Fields(string(asked)), " "), string(out), err
}

// The modules that no namespace can load are loaded on a fresh machine, and a machine's own bridges are left as they are.
func TestSetupLoadsModules(t *testing.T) {
	const (
		tracking = "proc/sys/net/netfilter/nf_conntrack_max"
		bridges  = "proc/sys/net/bridge/bridge-nf-call-iptables"
		own      = "sys/class/net/docker0/bridge/bridge_id"
	)
	for name, c := range map[string]struct {
		has              []string
		modprobe, loaded string
		fails            string
	}{
		"fresh":              {nil, "true", "nf_conntrack br_netfilter", ""},
		"ready":              {[]string{tracking, bridges}, "true", "", ""},
		"ready, a bridge":    {[]string{tracking, bridges, own}, "true", "", ""},
		"tracking only":      {[]string{tracking}, "true", "br_netfilter", ""},
		"a bridge":           {[]string{tracking, own}, "true", "", "bridge of its own, docker0"},
		"no such module":     {nil, "exit 1", "nf_conntrack", "cannot load the kernel module nf_conntrack"},
		"no bridge's module": {[]string{tracking}, "exit 1", "br_netfilter", "cannot load the kernel module br_netfilter"},
	} {
		for _, target := range []string{"bench", "test"} {
			t.Run(name+", "+target, func(t *testing.T) {
				loaded, said, err := setup(t, target, c.modprobe, c.has...)
				if loaded != c.loaded || (err != nil) != (c.fails != "") || !strings.Contains(said, c.fails) {
					t.Errorf("loaded %q, want %q; %v: %s, want %q", loaded, c.loaded, err, said, c.fails)
				}
			})
		}
	}
}
