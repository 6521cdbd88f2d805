package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
)

const subnetFile = "FLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"

func TestDockerOpts(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "subnet.env"), filepath.Join(dir, "docker")
	if err := os.WriteFile(from, []byte(subnetFile), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "DOCKER_OPT_BIP=\"--bip=10.5.52.1/24\"\nDOCKER_OPT_IPMASQ=\"--ip-masq=false\"\nDOCKER_OPT_MTU=\"--mtu=1450\"\n" +
			"DOCKER_OPTS=\"--debug  --bip=10.5.52.1/24 --ip-masq=false --mtu=1450\"\n"},
		{[]string{"-i", "-m"}, "DOCKER_OPT_BIP=\"--bip=10.5.52.1/24\"\nDOCKER_OPT_MTU=\"--mtu=1450\"\n"},
		{[]string{"-cm"}, "DOCKER_OPTS=\"--debug  --bip=10.5.52.1/24 --mtu=1450\"\n"},
		{[]string{"-c", "-k", "DOCKER_NETWORK_OPTIONS"}, "DOCKER_NETWORK_OPTIONS=\" --bip=10.5.52.1/24 --ip-masq=false --mtu=1450\"\n"},
	} {
		got := callWith(t, map[string]string{"DOCKER_OPTS": "--debug"}, append([]string{"docker-opts", "-f", from, "-d", to}, c.args...)...)
		if got != (result{cli.Fine, "", ""}) {
			t.Errorf("%v: %+v", c.args, got)
		}
		if have, err := os.ReadFile(to); string(have) != c.want || err != nil {
			t.Errorf("%v wrote %q, %v; want %q", c.args, have, err, c.want)
		}
	}
}

// What Docker was last told stays, so that it starts with that.
func TestDockerOptsKeepsTheFileOnAnError(t *testing.T) {
	dir := t.TempDir()
	to := filepath.Join(dir, "docker_opts.env")
	if err := os.WriteFile(to, []byte("before\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string]string{
		"none":                                  "no such file",
		"FLANNEL_MTU=1450\n":                    "has no FLANNEL_SUBNET",
		subnetFile + "FLANNEL_IPMASQ=perhaps\n": `FLANNEL_IPMASQ="perhaps": takes true or false`,
	} {
		from := filepath.Join(dir, "subnet.env")
		if content != "none" {
			if err := os.WriteFile(from, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got := call(t, "docker-opts", "-f", from, "-d", to)
		if got.status != cli.Failed || !strings.Contains(got.stderr, want) || strings.Count(got.stderr, "\n") != 1 {
			t.Errorf("%q: %+v, want a line that says %q", content, got, want)
		}
		if have, err := os.ReadFile(to); string(have) != "before\n" || err != nil {
			t.Errorf("%q: the file is %q, %v now", content, have, err)
		}
		_ = os.Remove(from)
	}
}
