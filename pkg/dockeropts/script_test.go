package dockeropts

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func fd(f *os.File) string { return strconv.Itoa(int(f.Fd())) }

// flannelsScript is the script of the release that this project is tested beside, where Go keeps that.
func flannelsScript(t *testing.T) string {
	t.Helper()
	const flannel, user = "github.com/flannel-io/flannel", "../../test/cluster/flannel"
	if out, err := exec.CommandContext(t.Context(), "go", "-C", user, "mod", "download", flannel).CombinedOutput(); err != nil {
		t.Fatalf("download %s: %v: %s", flannel, err, out)
	}
	dir, err := exec.CommandContext(t.Context(), "go", "-C", user, "list", "-m", "-f", "{{.Dir}}", flannel).Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(strings.TrimSpace(string(dir)), "dist/mk-docker-opts.sh")
}

// choices are the script's flags, and what they are here.
var choices = []struct {
	flags   []string
	options Options
}{
	{nil, Options{}},
	{[]string{"-i", "-c"}, Options{}},
	{[]string{"-i"}, Options{OnlyIndividual: true}},
	{[]string{"-c"}, Options{OnlyCombined: true}},
	{[]string{"-m"}, Options{WithoutMasquerade: true}},
	{[]string{"-cm", "-k", "DOCKER_NETWORK_OPTIONS"}, Options{OnlyCombined: true, WithoutMasquerade: true, Key: "DOCKER_NETWORK_OPTIONS"}},
}

func TestWritesWhatFlannelsScriptWrites(t *testing.T) {
	script := flannelsScript(t)
	for name, file := range map[string]string{
		"usual":               usual,
		"not masqueraded":     strings.ReplaceAll(usual, "true", "false"),
		"both families":       usual + "FLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00:0:0:34::1/64\n",
		"subnet alone":        "FLANNEL_SUBNET=172.30.255.129/25\n",
		"no MTU":              "FLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_IPMASQ=true\n",
		"empty values":        "FLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_MTU=\nFLANNEL_IPMASQ=\n",
		"another order":       "FLANNEL_IPMASQ=false\nFLANNEL_MTU=8951\nFLANNEL_SUBNET=10.5.52.1/24\n",
		"the last one counts": "FLANNEL_SUBNET=10.1.1.1/24\n" + usual,
		"remarks and blanks":  "# ours\n\n  " + strings.ReplaceAll(usual, "\n", "  # so\n"),
		"quotes":              "FLANNEL_SUBNET=\"10.5.52.1/24\"\nexport FLANNEL_MTU='1450'\n",
		"no newline":          strings.TrimSpace(usual),
		"masquerade refused":  usual + "FLANNEL_IPMASQ=yes\n",
		"what is not for us":  usual + "OTHER=\"a b\" # c\n",
	} {
		for _, choice := range choices {
			for _, before := range []string{"", "--debug --log-level=warn"} {
				choice.options.Before = before
				t.Run(fmt.Sprintf("%s %s %s", name, choice.flags, before), func(t *testing.T) {
					compare(t, script, file, choice.flags, choice.options)
				})
			}
		}
	}
}

func compare(t *testing.T, script, file string, flags []string, options Options) {
	t.Helper()
	theirs, failed := runScript(t, script, file, flags, options)
	subnet, err := parse("subnet.env", []byte(file))
	var ours []byte
	if err == nil {
		ours, err = options.Encode(subnet)
	}
	if (failed == nil) != (err == nil) {
		t.Errorf("the script: %v %s; ours: %v", failed, theirs, err)
	}
	if diff := cmp.Diff(theirs, string(ours)); diff != "" && err == nil {
		t.Errorf("-script +ours:\n%s", diff)
	}
}

func runScript(t *testing.T, script, file string, flags []string, options Options) (string, error) {
	t.Helper()
	dir := t.TempDir()
	from, to := filepath.Join(dir, "subnet.env"), filepath.Join(dir, "docker_opts.env")
	// At the end it looks for a route of the machine's own to the subnet.
	for name, content := range map[string]string{from: file, filepath.Join(dir, "ip"): "#!/bin/sh\n"} {
		if err := os.WriteFile(name, []byte(content), 0o700); err != nil { //nolint:gosec // one is a program
			t.Fatal(err)
		}
	}
	key := options.Key
	if key == "" {
		key = DefaultKey
	}
	cmd := exec.CommandContext(t.Context(), "sh", append([]string{script, "-f", from, "-d", to}, flags...)...)
	cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), key + "=" + options.Before}
	if out, err := cmd.CombinedOutput(); err != nil {
		return string(out), err
	}
	content, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	return string(content), nil
}
