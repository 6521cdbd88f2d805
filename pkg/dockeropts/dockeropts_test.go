package dockeropts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// usual is what the agent writes, and flanneld.
const usual = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"

func TestEncode(t *testing.T) {
	for name, c := range map[string]struct {
		options Options
		file    string
		want    string
	}{
		"everything": {
			file: usual,
			want: `DOCKER_OPT_BIP="--bip=10.5.52.1/24"
DOCKER_OPT_IPMASQ="--ip-masq=false"
DOCKER_OPT_MTU="--mtu=1450"
DOCKER_OPTS=" --bip=10.5.52.1/24 --ip-masq=false --mtu=1450"
`,
		},
		"combined, behind others": {
			options: Options{OnlyCombined: true, Key: "DOCKER_NETWORK_OPTIONS", Before: "--debug", WithoutMasquerade: true},
			file:    usual,
			want:    "DOCKER_NETWORK_OPTIONS=\"--debug  --bip=10.5.52.1/24 --mtu=1450\"\n",
		},
		"individual, nobody else masquerades": {
			options: Options{OnlyIndividual: true},
			file:    strings.ReplaceAll(usual, "true", "false"),
			want:    "DOCKER_OPT_BIP=\"--bip=10.5.52.1/24\"\nDOCKER_OPT_IPMASQ=\"--ip-masq=true\"\nDOCKER_OPT_MTU=\"--mtu=1450\"\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			subnet, err := parse("subnet.env", []byte(c.file))
			if err != nil {
				t.Fatal(err)
			}
			got, err := c.options.Encode(subnet)
			if diff := cmp.Diff(c.want, string(got)); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestRefusesWhatItCannotFollow(t *testing.T) {
	for name, c := range map[string]struct{ file, want string }{
		"empty":                 {"", "subnet.env has no FLANNEL_SUBNET"},
		"IPv6 alone":            {"FLANNEL_IPV6_SUBNET=fc00::1/64\n", "has no FLANNEL_SUBNET: containers need an IPv4 subnet"},
		"no length":             {"FLANNEL_SUBNET=10.5.52.1\n", `FLANNEL_SUBNET="10.5.52.1": takes`},
		"no address":            {"FLANNEL_SUBNET=10.5.52.0/24\n", `FLANNEL_SUBNET="10.5.52.0/24": takes`},
		"IPv6 in its place":     {"FLANNEL_SUBNET=fc00::1/64\n", `FLANNEL_SUBNET="fc00::1/64": takes`},
		"MTU in words":          {usual + "FLANNEL_MTU=big\n", `FLANNEL_MTU="big": takes a number`},
		"MTU too small":         {usual + "FLANNEL_MTU=67\n", `FLANNEL_MTU="67": takes a number`},
		"MTU in octal":          {usual + "FLANNEL_MTU=01450\n", `FLANNEL_MTU="01450": takes a number`},
		"masquerade":            {usual + "FLANNEL_IPMASQ=yes\n", `FLANNEL_IPMASQ="yes": takes true or false`},
		"a remark that is none": {"FLANNEL_SUBNET=10.5.52.1/24#x\n", "line 1, is"},
		"no assignment":         {usual + "umask 022\n", `subnet.env, line 5, is "umask 022": takes NAME=VALUE`},
		"to be evaluated":       {"FLANNEL_SUBNET=$(hostname)\n", "line 1, is"},
		"in quotes as well":     {"FLANNEL_SUBNET=\"`hostname`\"\n", "line 1, is"},
		"half a quote":          {"FLANNEL_SUBNET=\"10.5.52.1/24\n", "line 1, is"},
		"two words":             {"FLANNEL_SUBNET=10.5.52.1/24 reboot\n", "line 1, is"},
	} {
		t.Run(name, func(t *testing.T) {
			subnet, err := parse("subnet.env", []byte(c.file))
			if err == nil {
				_, err = Options{}.Encode(subnet)
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want one that says %q", err, c.want)
			}
		})
	}
}

func TestReadSaysWhoWritesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "subnet.env")
	_, err := Read(path)
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "--registry=etcd") {
		t.Errorf("%v, want one that names the file and the agent's flag", err)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "docker_opts.env")
	for _, content := range []string{"before\n", "after\n"} {
		if err := Write(path, []byte(content)); err != nil {
			t.Fatal(err)
		}
		have, err := os.ReadFile(path)
		if string(have) != content || err != nil {
			t.Errorf("%q, %v in the file, want %q", have, err, content)
		}
	}
	if entries, err := os.ReadDir(dir); len(entries) != 1 || err != nil {
		t.Errorf("%v, %v are there, want the file alone", entries, err)
	}
	if err := Write(filepath.Join(dir, "none", "docker_opts.env"), nil); err == nil {
		t.Error("no error without the directory")
	}
}

// A device is written to, not replaced by a file.
func TestWriteToWhatIsNoFile(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	link := filepath.Join(t.TempDir(), "stdout")
	if err := os.Symlink("/proc/self/fd/"+fd(write), link); err != nil {
		t.Fatal(err)
	}
	if err := Write(link, []byte("options\n")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	n, err := read.Read(got)
	if string(got[:n]) != "options\n" || err != nil {
		t.Errorf("%q, %v came through, want the content", got[:n], err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("%v, %v: the link is no link any more", info, err)
	}
}
